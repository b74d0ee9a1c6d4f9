"""A step without any extension has the gradients, bit for bit, of one with all checks.

And a loss function that is called twice, as where it is recomputed, makes the same weights again;
and every check finds its mistake without any one of the others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.host.cases import Case
from tests.host.harness import EXACT, TOPOLOGIES, build_chunks, data_for, error_of, run_host_ranks
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


def without_finalization(model: Any) -> None:
    model.config.finalize_model_grads_func = None


def over_layers(model: Any) -> None:
    model.config.overlap_moe_expert_parallel_comm = True


def halved(loss_func: Callable[..., Any], mask: Tensor) -> Any:
    return functools.partial(loss_func, mask / 2)


def divided(loss_func: Callable[..., Any], mask: Tensor) -> Any:
    def own(loss_mask: Tensor, output: Tensor) -> Any:
        loss, tokens, report = loss_func(loss_mask, output)
        return loss / 7, tokens, report

    return functools.partial(own, mask)


# What finds a mistake; what is changed in the model, in the loss function and in the settings of
# rank 1; and what is said of it.
MISTAKES: dict[str, tuple[Any, Any, str, str]] = {
    "Agreement": (None, None, "error", "ModeError: ranks have different settings"),
    "InexactSettings": (over_layers, None, "step", "HostError: --overlap-moe-expert"),
    "LeftGradients": (None, None, "step", "StepError: a forward-backward call on the gradients"),
    "Audit": (
        without_finalization,
        None,
        "step",
        "HostError: gradients would be 0.666667 times the",
    ),
    "MaskCheck": (None, halved, "step", "MaskError: the loss function's mask is not this rank's"),
    "MaskedSum": (None, divided, "step", "HostError: the loss function returned"),
}
OTHERS = ("FirstLine", "GatherCheck")


def found_without(names: tuple[str, ...]) -> dict[tuple[str, str], str | None]:
    """What one step with each mistake ends with, by the check that is left out."""
    from megatron_loss_agg.mcore.extensions import with_checks
    from megatron_loss_agg.mcore.hook import Hook
    from tests.host import gpt

    gpt.initialize()
    case = cases(2)[-1]
    found = {}
    for name, mistake in itertools.product(names, MISTAKES):
        change_model, change_loss, empty_step, _ = MISTAKES[mistake]
        model = build_chunks(TOPOLOGIES["dp2"], False, torch.float32)
        checks = [x for x in with_checks([]) if type(x).__name__ != name]
        hook = Hook(
            case.aggregation,
            extensions=checks,
            empty_step=empty_step if dist.get_rank() else "step",
        )
        if mistake == "LeftGradients":
            one_step("dp2", case, hook, model)
        if change_model is not None:
            change_model(model[0] if isinstance(model, list) else model)
        options: dict[str, Any] = {"zero_grad": mistake != "LeftGradients"}
        if change_loss is not None:
            options["forward_step_func"] = gpt.forward_step_with(change_loss)
        found[name, mistake] = error_of(one_step, "dp2", case, hook, model, **options)
    return found


def test_a_check_finds_its_mistake_without_any_one_of_the_others() -> None:
    for rank in run_host_ranks(found_without, 2, (*MISTAKES, *OTHERS)):
        for (without, mistake), error in rank.items():
            is_found = (error or "").startswith(MISTAKES[mistake][-1])
            assert is_found == (without != mistake), (without, mistake, error)
