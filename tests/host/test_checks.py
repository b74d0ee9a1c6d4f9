"""Every check finds its mistake alone, and no check changes a bit of a gradient.

Nor does a loss function that is called twice, as where a schedule recomputes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import LossHook
from megatron_loss_agg.mcore.extensions import with_checks
from megatron_loss_agg.mcore.hook import Hook
from tests.host import scripts
from tests.host.harness import EXACT, TOPOLOGIES, build_chunks, data_for, run_host_ranks
from tests.host.reference import reference
from tests.host.refusals import Row, assert_told
from tests.host.steps import PLACES, aggregation, weights_of

pytestmark = pytest.mark.host


class Case(NamedTuple):
    mode: str
    layout: str
    per_token: bool
    dtype: torch.dtype


# Every pair of layout, flag and dtype; every mode with both layouts.
CASES = (
    Case("prompt_mean", "thd", False, torch.float64),
    Case("prompt_mean", "bshd", True, torch.float32),
    Case("custom", "thd", True, torch.float32),
    Case("custom", "bshd", False, torch.float64),
    Case("token_mean", "thd", True, torch.float64),
    Case("token_mean", "bshd", False, torch.float32),
)


def twice(loss_func: Callable[..., Any], output: Tensor) -> Any:
    """As a schedule that drops a loss and computes it again for the backward pass."""
    loss_func(output)
    return loss_func(output)


class Steps(NamedTuple):
    """Gradients of steps of one case."""

    norm: float
    checks_change_nothing: bool
    twice_changes_nothing: bool
    error: float  # where losses are computed twice; of fp64


def steps_on_host(name: str, wanted: dict[str, Any]) -> dict[Case, Steps]:
    from tests.host import gpt, gradients

    topology = TOPOLOGIES[name]
    gpt.initialize(**topology.sizes)
    places = PLACES[topology.data_parallel_size]
    schedule, found = gpt.schedule_with(twice), {}
    for case in CASES:
        chunks = build_chunks(topology, case.per_token, case.dtype)

        def gradient(hook: Hook, case: Case = case, model: Any = chunks, **options: Any) -> Tensor:
            data = data_for(topology, places, case.layout)
            gpt.run_step(hook, model, data, len(places[0]), **options)
            return gradients.flat(model)

        one = aggregation(case.mode)
        unchecked, hook = gradient(Hook(one, extensions=[])), LossHook(one)
        first = gradient(hook, schedule=schedule)  # which is checked most
        error = gradients.error(chunks, wanted[case.mode])
        once, again = gradient(hook), gradient(hook, schedule=schedule)
        same = torch.equal(first, once) and torch.equal(once, again)
        checked = gradient(LossHook(one))
        found[case] = Steps(float(once.norm()), torch.equal(unchecked, checked), same, error)
    return found


@pytest.mark.parametrize("name", ["cp2", "pp2", "tp2-sp", "dp2-distributed-overlap"])
def test_neither_checks_nor_a_second_loss_change_a_bit_of_a_gradient(name: str) -> None:
    topology = TOPOLOGIES[name]
    places = PLACES[topology.data_parallel_size]
    wanted = {case.mode: reference().gradient(weights_of(case.mode, places)) for case in CASES}
    for rank in run_host_ranks(steps_on_host, topology.world_size, name, wanted):
        for case in CASES:
            found = rank[case]
            assert found.norm > 0 and found.checks_change_nothing, case
            assert found.twice_changes_nothing, case
            assert case.dtype != torch.float64 or found.error <= EXACT, case


# What finds a mistake, and the row of the mistake.
MISTAKES = {
    "Agreement": Row("ModeError: ranks have different settings"),
    "InexactSettings": Row(
        "HostError: full_iteration",
        config={"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
    ),
    "LeftGradients": Row(
        "StepError: a forward-backward call on the gradients",
        before=[{}],
        call={"zero_grad": False},
    ),
    "Audit": Row(
        "HostError: gradients would be 0.666667 times the planned ones",
        config={"finalize_model_grads_func": None},
    ),
    "MaskCheck": Row(
        "MaskError: the loss function's mask is not this rank's",
        loss=scripts.with_mask(lambda mask: mask / 2),
    ),
    "MaskedSum": Row("HostError: the loss function returned", loss=scripts.divided),
}


def hook_with(mistake: str, is_kept: Callable[[str], bool], rank: int) -> Hook:
    """With the checks that ``is_kept`` names, and no others."""
    checks = [x for x in with_checks([]) if is_kept(type(x).__name__)]
    unlike = mistake == "Agreement" and rank == 1
    empty_step = "error" if unlike else "step"
    return Hook(aggregation("token_mean"), extensions=checks, empty_step=empty_step)


ROWS = {}
for name, row in MISTAKES.items():
    alone, others = partial(hook_with, name, name.__eq__), partial(hook_with, name, name.__ne__)
    ROWS[f"{name} alone"] = replace(row, hook=alone)
    ROWS[f"all but {name}"] = replace(row, hook=others, says="")


@pytest.mark.parametrize("name", ROWS)
def test_a_check_finds_its_mistake_alone_and_no_other_does(name: str) -> None:
    assert_told(__name__, name)
