"""Steps that are counted as they train, against one process that knows the whole step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host import gpt
from tests.host.cases import Case, Expected, assert_exact, covering
from tests.host.harness import TOPOLOGIES, Topology
from tests.host.reference import reference
from tests.host.steps import Places, Weights, sequences, weights_with
from tests.oracle import Sample

# By data-parallel rank: the samples of each microbatch, and the microbatches of each call. Every
# prompt and rollout is in one call, and sample 5 has no token.
STREAMS: dict[int, tuple[Places, tuple[tuple[int, ...], ...]]] = {
    1: ((((0, 1), (4,), (7, 8), (2,), (5, 9), (3, 6)),), ((2, 1, 3),)),
    2: (
        (((0, 1), (4,), (7, 8)), ((2,), (5, 9), (3,), (6,))),
        ((2, 1), (4,)),
    ),
}
# As above, with whole groups in each microbatch.
WHOLE: dict[int, Places] = {
    1: (((0, 1, 4), (7, 8), (2, 5, 9), (3, 6)),),
    2: (((0, 1, 4), (7, 8)), ((2, 5, 9), (3, 6), ())),
}
MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {},
    "rollout_mean": {},
    "prompt_mean": {},
    "nested_mean": {"levels": ("prompt", "rollout", "sample")},
    "sample_sum": {},
    "constant": {},
    "sum": {},
    "microbatch_mean": {},
}


def in_calls(hook: Any, model: Any, step: Any) -> list[Any]:
    """The step as a stream of several calls."""
    sizes = STREAMS[gpt.parallel_state.get_data_parallel_world_size()][1][gpt.data_rank()]
    reports = []
    with hook.stream():
        for i, number in enumerate(sizes):
            reports += step(number, zero_grad=i == 0)
    return reports


def streams(topology: Topology, **more: Any) -> list[Case]:
    places, _ = STREAMS[topology.data_parallel_size]
    rows = covering(2, [*MODES], ("thd", "bshd"), topology.per_token_flags, ("01", "fractional"))
    return [
        Case(
            mode,
            options=MODES[mode],
            layout=layout,
            per_token=per_token,
            masks=masks,
            places=places,
            run=in_calls,
            times=2,
            **more,
        )
        for mode, layout, per_token, masks in rows
    ]


@pytest.mark.parametrize("name", ["dp1", "dp2", "dp2-cp2", "pp2-dp2-distributed-overlap"])
def test_a_stream_of_calls_is_exact(name: str) -> None:
    assert_exact(TOPOLOGIES[name], streams(TOPOLOGIES[name]))
