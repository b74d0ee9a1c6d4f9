"""Calls of the schedule that are no step of their own, or whose step is at hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron_loss_agg import Microbatch
from tests.core.operations import Operations
from tests.host.harness import (
    CP2,
    EP2,
    EXACT,
    PP2,
    SP,
    TP2,
    Topology,
    build_chunks,
    data_for,
    error_of,
    run_host_ranks,
)
from tests.host.reference import reference
from tests.host.steps import MODES, N_MB, PLACES, Places, aggregation, batches, weights_of

pytestmark = pytest.mark.host

CALLS = (1, 2, 1)  # microbatches of each call of the step
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 2000}
DISTRIBUTED = {"use_distributed_optimizer": True}
TOPOLOGIES = {
    "dp1": Topology(1),
    "dp2": Topology(2),
    "cp2": Topology(2, CP2),
    "tp2-sp": Topology(2, TP2, SP),
    "pp2": Topology(2, PP2),
    "ep2": Topology(2, EP2, model="moe"),
    "dp2-distributed-overlap": Topology(2, ddp={**DISTRIBUTED, **OVERLAP}),
    "pp2-dp2-distributed-overlap": Topology(4, PP2, ddp={**DISTRIBUTED, **OVERLAP}),
}


def microbatches(places: Places, layout: str) -> list[Microbatch]:
    """This data-parallel rank's step."""
    from megatron.core import parallel_state

    from megatron_loss_agg.mcore.batches import read_batch

    return [read_batch(b) for b in batches(places[parallel_state.get_data_parallel_rank()], layout)]


def run_calls(hook: Any, chunks: Any, data: Any, numbers: tuple[int, ...] = CALLS) -> list[Any]:
    """Reports of all calls of a step, which adds up its gradients."""
    from tests.host import gpt

    return [
        report
        for i, number in enumerate(numbers)
        for report in gpt.run_step(hook, chunks, data, number, zero_grad=i == 0)
    ]


def loss_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def in_several_calls(topology: Topology, wanted: dict[str, Any]) -> dict[str, float]:
    """The gradient's error by mode, layout and per-token flag; and of the reported loss."""
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt, gradients

    gpt.initialize(**topology.sizes)
    errors = {}
    places = PLACES[topology.data_parallel_size]
    for per_token in topology.per_token_flags:
        chunks = build_chunks(topology, per_token)
        for mode, layout in ((m, layout) for m in MODES for layout in ("thd", "bshd")):
            hook = LossHook(aggregation(mode))
            for _ in range(2):  # the second step is not the first one's continuation
                with hook.step(microbatches(places, layout)):
                    reports = run_calls(hook, chunks, data_for(topology, places, layout))
            gradient, loss = wanted[mode]
            errors[f"{mode}-{layout}-{per_token}"] = gradients.error(chunks, gradient)
            if reports:
                total = torch.stack([r[f"{mode} loss"] for r in reports]).sum(dim=0)
                torch.distributed.all_reduce(total, group=loss_group())
                reported = float(total[0] / total[1])
                errors[f"report-{mode}-{layout}-{per_token}"] = abs(reported / loss - 1)
    return errors


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_step_of_several_calls_is_exact(name: str) -> None:
    topology = TOPOLOGIES[name]
    assert sum(CALLS) == N_MB
    ours = reference(topology.model)
    weights = {mode: weights_of(mode, PLACES[topology.data_parallel_size]) for mode in MODES}
    wanted = {mode: (ours.gradient(w), ours.loss(w)) for mode, w in weights.items()}
    for errors in run_host_ranks(in_several_calls, topology.world_size, topology, wanted):
        assert {case: e for case, e in errors.items() if not e <= EXACT} == {}
        assert len(errors) >= 2 * len(MODES)


def misuse() -> dict[str, str | None]:
    """One rank: what steps that do not add up say."""
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize()
    model = gpt.ddp_model(False)
    hook = LossHook(aggregation("token_mean"))
    step = microbatches(PLACES[1], "thd")

    def run(*numbers: int) -> None:
        with hook.step(step):
            run_calls(hook, model, batches(PLACES[1][0], "thd"), numbers)

    def nested() -> None:
        with hook.step(step), hook.step(step):
            pass

    def failing() -> None:
        with hook.step(step):
            raise RuntimeError("of the loop")

    answers = {
        "early": error_of(run, 1, 2),
        "none": error_of(run),
        "too many": error_of(run, 3, 2),
        "nested": error_of(nested),
        "the loop's own": error_of(failing),
        "whole": error_of(run, *CALLS),  # what failed before leaves nothing behind
    }
    config = model.module.config
    answers["finalize"] = None if config.finalize_model_grads_func else "was not restored"
    return answers


def test_a_step_that_does_not_add_up_is_an_error() -> None:
    (answers,) = run_host_ranks(misuse, 1)
    assert answers["early"] == (
        "StepError: hook.step ends with 1 of 4 microbatches left; expected calls that take all of "
        "them: see their num_microbatches"
    )
    assert "ends with 4 of 4 microbatches left" in answers["none"]
    assert "num_microbatches=2 in a hook.step with 1 of 4 microbatches left" in answers["too many"]
    assert "expected one step at a time" in answers["nested"]
    assert answers["the loop's own"] == "RuntimeError: of the loop"
    assert answers["whole"] is None and answers["finalize"] is None


class Untouchable:
    """A data iterator that only the forward step may draw from."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.allowed = False

    def __next__(self) -> Any:
        assert self.allowed, "drawn by the hook"
        return next(self.data)


def at_hand(cp: int, wanted: Any) -> dict[str, Any]:
    """Errors of steps that `read_step` returns, and what it was called with."""
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt, gradients

    gpt.initialize(cp=cp)
    model = gpt.ddp_model(False)
    data = Untouchable(batches(PLACES[1][0], "thd"))
    asked = []

    def read_step(iterator: Any, number: int) -> list[Microbatch]:
        asked.append((iterator is data, number))
        return microbatches(PLACES[1], "thd")

    def forward_step(iterator: Any, chunk: Any) -> Any:
        iterator.allowed = True
        result = gpt.forward_step(iterator, chunk)
        iterator.allowed = False
        return result

    hook = LossHook(aggregation("prompt_mean"), read_step=read_step)
    run = functools.partial(gpt.run_step, hook, model, forward_step_func=forward_step)
    run(data, N_MB)
    error = gradients.error([model], wanted)
    short = LossHook(
        aggregation("prompt_mean"), read_step=lambda *_: microbatches(PLACES[1], "thd")
    )
    return {"error": error, "asked": asked, "short": error_of(gpt.run_step, short, model, data, 3)}


@pytest.mark.parametrize("cp", [1, 2])
def test_a_step_that_is_at_hand_is_not_drawn_ahead(cp: int) -> None:
    wanted = reference().gradient(weights_of("prompt_mean", PLACES[1]))
    for answer in run_host_ranks(at_hand, cp, cp, wanted):
        assert answer["error"] <= EXACT
        assert answer["asked"] == [(True, N_MB)]
        assert (
            "4 microbatches for a call of the schedule with num_microbatches=3" in answer["short"]
        )


class Counted:
    """A data iterator that knows how many batches are left in it."""

    def __init__(self) -> None:
        self.left = list(batches(PLACES[1][0], "thd"))

    def __next__(self) -> Any:
        return self.left.pop(0)


def forward_only(cp: int, wanted: float) -> dict[str, Any]:
    """A call that takes log-probabilities, and an evaluation, in a custom loop."""
    from megatron.core import parallel_state

    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize(cp=cp)
    model = gpt.ddp_model(False)
    hook = LossHook(aggregation("sample_mean"))
    data = Counted()
    left: list[int] = []

    def collect(losses: Any) -> Any:
        left.append(len(data.left))
        return losses.sum(), {"log_probs": losses.detach()}

    def forward_step(iterator: Any, chunk: Any) -> Any:
        output, _ = gpt.forward_step(iterator, chunk)
        return output, collect

    options = {"forward_step_func": forward_step, "forward_only": True}
    with Operations() as ours:
        reports = gpt.run_step(hook, model, data, N_MB, **options)
    first, left = left, []
    with Operations() as stock:
        gpt.run_step(None, model, Counted(), N_MB, **options)
    evaluated = gpt.run_step(hook, model, batches(PLACES[1][0], "thd"), N_MB, forward_only=True)
    total = torch.stack([report["sample_mean loss"] for report in evaluated]).sum(dim=0)
    torch.distributed.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return {
        "names": [list(report) for report in reports],
        "left": first,
        "same collectives": ours.collectives == stock.collectives,
        "evaluated": abs(float(total[0] / total[1]) / wanted - 1),
    }


@pytest.mark.parametrize("cp", [1, 2])
def test_a_forward_only_call_without_masks_is_left_alone_and_one_with_masks_is_exact(
    cp: int,
) -> None:
    wanted = reference().loss(weights_of("sample_mean", PLACES[1]))
    for answer in run_host_ranks(forward_only, cp, cp, wanted):
        assert answer["names"] == [["log_probs"]] * N_MB
        assert answer["left"] == [3, 2, 1, 0]  # drawn one by one
        assert answer["same collectives"]
        assert answer["evaluated"] <= EXACT
