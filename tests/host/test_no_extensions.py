"""A step without any extension has the gradients, bit for bit, of one with all checks.

And a loss function that is called twice, as where it is recomputed, makes the same weights again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host.cases import Case
from tests.host.harness import EXACT, TOPOLOGIES, build_chunks, data_for, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import PLACES

pytestmark = pytest.mark.host

NAMES = ("dp2", "cp2", "pp2", "tp2-sp", "dp2-distributed-overlap")
MODES = ("token_mean", "prompt_mean", "custom")


def cases(data_parallel: int) -> list[Case]:
    """Every pair of layout, flag and dtype; every mode with both layouts."""
    return [
        Case(m, layout=layout, places=PLACES[data_parallel], per_token=per_token, dtype=dtype)
        for m, layout, per_token, dtype in (
            ("prompt_mean", "thd", False, torch.float64),
            ("prompt_mean", "bshd", True, torch.float32),
            ("custom", "thd", True, torch.float32),
            ("custom", "bshd", False, torch.float64),
            ("token_mean", "thd", True, torch.float64),
            ("token_mean", "bshd", False, torch.float32),
        )
    ]


def one_step(name: str, case: Case, hook: Any, model: Any, **options: Any) -> Tensor:
    """This rank's gradient."""
    from tests.host import gpt, gradients

    data = data_for(TOPOLOGIES[name], case.places, case.layout, case.masks)
    gpt.run_step(hook, model, data, len(case.places[0]), **options)
    return gradients.flat(model)


def differing(name: str) -> tuple[list[str], float]:
    """Cases whose gradient the checks change on this rank; and the sum of all gradients' norms."""
    from megatron_loss_agg.mcore import LossHook
    from megatron_loss_agg.mcore.hook import Hook
    from tests.host import gpt

    topology = TOPOLOGIES[name]
    gpt.initialize(**topology.sizes)
    different, total = [], 0.0
    models: dict[Any, Any] = {}
    for case in cases(topology.data_parallel_size):
        kind = case.per_token, case.dtype
        if kind not in models:
            models[kind] = build_chunks(topology, *kind)
        torch.set_default_dtype(case.dtype)
        hooks = Hook(case.aggregation, extensions=[]), LossHook(case.aggregation)
        without, checked = (one_step(name, case, hook, models[kind]) for hook in hooks)
        total += float(without.norm())
        if not torch.equal(without, checked):
            different.append(case.name)
    return different, total


@pytest.mark.parametrize("name", NAMES)
def test_checks_change_no_bit_of_a_gradient(name: str) -> None:
    for different, total in run_host_ranks(differing, TOPOLOGIES[name].world_size, name):
        assert different == []
        assert total > 0


def twice(loss_func: Callable[..., Any], output: Tensor) -> Any:
    """As a schedule that drops a loss and computes it again for the backward pass."""
    loss_func(output)
    return loss_func(output)


def recomputed(name: str, wanted: dict[Case, Any]) -> list[tuple[str, float, bool]]:
    """Of each case: the error of a step whose losses are computed twice, and whether all are so."""
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt, gradients

    gpt.initialize(**TOPOLOGIES[name].sizes)
    found = []
    for case, gradient in wanted.items():
        model = build_chunks(TOPOLOGIES[name], case.per_token)
        hook = LossHook(case.aggregation)
        schedule = gpt.schedule_with(twice)
        first = one_step(name, case, hook, model, schedule=schedule)  # which is checked most
        error = gradients.error(model, gradient)
        once = one_step(name, case, hook, model)
        again = one_step(name, case, hook, model, schedule=schedule)
        same = torch.equal(first, once) and torch.equal(once, again)
        found.append((case.name, error, same))
    return found


@pytest.mark.parametrize("name", ["dp2", "cp2"])
def test_a_loss_that_is_computed_twice_is_the_same(name: str) -> None:
    in_fp64 = [c for c in cases(TOPOLOGIES[name].data_parallel_size) if c.dtype == torch.float64]
    wanted = {case: reference().gradient(case.weights) for case in in_fp64}
    for rank in run_host_ranks(recomputed, 2, name, wanted):
        for of_case, error, same in rank:
            assert error <= EXACT, of_case
            assert same, of_case
