"""The headline: every parameter's gradient through the real host, against one process in fp64.

Megatron's own schedule, DDP and gradient finalization run on ``dp * cp`` gloo ranks. The reference
runs every sample alone through the same model and takes its weights from the oracle's loops.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.host.cases import Case, gradient_errors, grid
from tests.host.harness import EXACT, Topology, run_host_ranks
from tests.host.reference import reference, relative_error
from tests.host.steps import Weights, deal, sequences

pytestmark = pytest.mark.host

TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (2, 2)]  # (data parallel, context parallel)
MICROBATCHES = (1, 3)
LOSSES = [
    Case("token_mean"),
    Case("sample_mean"),
    Case("sample_mean", (("empty", "skip"),)),
    Case("rollout_mean"),
    Case("prompt_mean"),
    Case("prompt_mean", (("count", "sample"),)),
    Case("sample_sum"),
    Case("constant", (("divisor", 7.0),)),
    Case("sum"),
    Case("sum", (("divisor", 7.0),)),
    Case("microbatch_mean"),
    Case("custom"),
    Case("token_mean", masks="fractional"),
    Case("prompt_mean", masks="fractional"),
    Case("sample_mean", masks="fractional"),  # of which one sums to a quarter of a token
]


GRID = grid(
    3,
    *(TOPOLOGIES, LOSSES, (torch.float64, torch.float32)),
    *(("thd", "bshd"), MICROBATCHES, (False, True)),
)


def runs(dp: int, cp: int) -> list[Case]:
    """Every loss in the ways in which the host computes it on ``dp`` times ``cp`` ranks."""
    return [
        dataclasses.replace(
            loss, dtype=dtype, layout=layout, places=deal(dp, number), per_token=per_token
        )
        for topology, loss, dtype, layout, number, per_token in GRID
        if topology == (dp, cp)
    ]


@functools.cache
def errors(dp: int, cp: int) -> dict[Case, float]:
    return gradient_errors(Topology(dp * cp, {"cp": cp}), runs(dp, cp))


def unsplit_gradients(wanted: list[tuple[str, Weights]]) -> list[Any]:
    """One fp32 process: the gradients of whole steps, each of (masks, weights)."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.build(torch.float32)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = []
    for masks, weights in wanted:
        total = sum(
            (torch.tensor(w) * gpt.plain_losses(model, sequences(masks)[i])).sum()
            for i, w in weights
        )
        found.append(dict(zip(names, torch.autograd.grad(total, parameters), strict=True)))
    return found


@functools.cache
def unsplit_fp32_errors() -> dict[tuple[Any, ...], float]:
    """What one fp32 process that holds the whole step cannot avoid."""
    steps = {case.loss: case for topology in TOPOLOGIES for case in runs(*topology)}
    wanted = [(case.masks, case.weights) for case in steps.values()]
    (found,) = run_host_ranks(unsplit_gradients, 1, wanted)
    return {
        loss: relative_error(got, reference().gradient(case.weights))
        for (loss, case), got in zip(steps.items(), found, strict=True)
    }


@pytest.mark.parametrize(
    "dp, cp, run",
    [
        pytest.param(dp, cp, run, id=f"{run.name}-{dp}-{cp}")
        for dp, cp in TOPOLOGIES
        for run in runs(dp, cp)
    ],
)
def test_gradient_is_that_of_the_whole_step(
    dp: int, cp: int, run: Case, record_property: Callable[[str, object], None]
) -> None:
    error = errors(dp, cp)[run]
    record_property("dtype", str(run.dtype).removeprefix("torch."))
    record_property("layout", run.layout)
    record_property("ranks", f"DP {dp}, CP {cp}")
    record_property("error", float(error))
    if run.dtype == torch.float64:
        assert error <= EXACT
    else:
        assert error <= 2 * unsplit_fp32_errors()[run.loss]
