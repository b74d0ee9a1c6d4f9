"""Calls of the schedule that are no step of their own, or whose step is at hand."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import Audit, LossHook
from megatron_loss_agg.mcore.reading.keys import read_batch
from tests.core.operations import Operations
from tests.host.harness import (
    EXACT,
    TOPOLOGIES,
    Topology,
    build_chunks,
    data_for,
    error_of,
    run_host_ranks,
)
from tests.host.reference import reference
from tests.host.steps import (
    MODES,
    N_MB,
    PLACES,
    Places,
    aggregation,
    batch_of,
    batches,
    sequences,
    weights_of,
)

pytestmark = pytest.mark.host

CALLS = (1, 2, 1)  # microbatches of each call of the step
NAMES = ("dp1", "dp2", "cp2", "tp2-sp", "pp2", "ep2")
NAMES += ("dp2-distributed-overlap", "pp2-dp2-distributed-overlap")


def microbatches(places: Places, layout: str) -> list[Microbatch]:
    """This data-parallel rank's step."""
    from tests.host import gpt

    return [read_batch(batch) for batch in batches(places[gpt.data_rank()], layout)]


def run_calls(hook: Any, chunks: Any, data: Any, numbers: tuple[int, ...] = CALLS) -> list[Any]:
    """Reports of all calls of a step, which adds up its gradients."""
    from tests.host import gpt

    return [
        report
        for i, number in enumerate(numbers)
        for report in gpt.run_step(hook, chunks, data, number, zero_grad=i == 0)
    ]


def in_several_calls(topology: Topology, wanted: dict[str, Any]) -> dict[str, float]:
    """The gradient's error by mode, layout and per-token flag; and of the reported loss."""
    from tests.host import gpt, gradients

    gpt.initialize(**topology.sizes)
    errors = {}
    places = PLACES[topology.data_parallel_size]
    for per_token in topology.per_token_flags:
        chunks = build_chunks(topology, per_token)
        for mode, layout in product(MODES, ("thd", "bshd")):
            hook = LossHook(aggregation(mode))
            for _ in range(2):  # the second step is not the first one's continuation
                with hook.step(microbatches(places, layout)):
                    reports = run_calls(hook, chunks, data_for(topology, places, layout))
            gradient, loss = wanted[mode]
            errors[f"{mode}-{layout}-{per_token}"] = gradients.error(chunks, gradient)
            if reports:
                error = abs(gpt.reported(reports, f"{mode} loss") / loss - 1)
                errors[f"report-{mode}-{layout}-{per_token}"] = error
    return errors


@pytest.mark.parametrize("name", NAMES)
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
    from tests.host import gpt

    gpt.initialize()
    model = gpt.ddp_model()
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
    assert model.module.config.finalize_model_grads_func  # is restored
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
    assert answers["whole"] is None


class Data:
    """A data iterator over the step that counts the batches drawn from it."""

    def __init__(self) -> None:
        self.batches, self.drawn = batches(PLACES[1][0], "thd"), 0

    def __next__(self) -> Any:
        self.drawn += 1
        return next(self.batches)


def undrawn_steps(cp: int, gradient: Any, loss: float) -> dict[str, Any]:
    """A step that `read_step` returns; and without it log-probabilities and an evaluation."""
    from tests.host import gpt, gradients

    gpt.initialize(cp=cp)
    model = gpt.ddp_model()
    asked = []

    def read_step(iterator: Any, number: int) -> list[Microbatch]:
        asked.append((type(iterator), iterator.drawn, number))
        return microbatches(PLACES[1], "thd")

    def run(hook: LossHook | None, change: Any, **options: Any) -> tuple[Any, list[int]]:
        """Reports, and how many batches were drawn when each loss function was made."""
        data, drawn = Data(), []

        def forward_step(iterator: Any, chunk: Any) -> Any:
            assert hook is not at_hand or iterator is data
            result = gpt.forward_step_with(change)(iterator, chunk)
            drawn.append(data.drawn)
            return result

        return gpt.run_step(
            hook, model, data, N_MB, forward_step_func=forward_step, **options
        ), drawn

    def log_probs(*_: Any) -> Any:
        return lambda losses: (losses.sum(), {"log_probs": losses.detach()})

    hook = LossHook(aggregation("prompt_mean"))
    at_hand = LossHook(aggregation("prompt_mean"), read_step=read_step)
    _, drawn = run(at_hand, partial)
    answer = {"error": gradients.error(model, gradient), "drawn": [drawn]}
    answer["short"] = error_of(gpt.run_step, at_hand, model, Data(), 3)
    with Operations() as ours:
        reports, drawn = run(hook, log_probs, forward_only=True)
    with Operations() as stock:
        run(None, log_probs, forward_only=True)
    assert ours.collectives == stock.collectives

    def emptying(iterator: Any, chunk: Any) -> Any:
        batch = next(iterator)
        kept = dict(batch)
        batch.clear()  # as scripts that put their part of the tokens into the batch change it
        return gpt.forward_step(iter([kept]), chunk)

    for name, ours, forward in (("drawn", hook, emptying), ("at hand", at_hand, gpt.forward_step)):
        options = {"forward_step_func": forward, "forward_only": True}
        evaluated = gpt.run_step(ours, model, Data(), N_MB, **options)
        answer[name + " evaluated"] = abs(gpt.reported(evaluated, "prompt_mean loss") / loss - 1)
    answer["asked"] = asked
    answer["drawn"].append(drawn)
    return {**answer, "names": [list(report) for report in reports]}


ORDERS = {
    "read_step": (1, 0),
    "hook.step": (1, 0),
    "in order": (0, 1),
    "other tokens": (2, 2),  # than any that the model is called with
    "told nothing": (1, 0),
    "dummy": (2, 2),
}


def orders_on_host() -> dict[str, str | None]:
    """One rank: what becomes of two microbatches with equal masks that are given in an order."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.ddp_model()
    given = [batch_of([sample], "bshd") for sample in sequences()[:3]]
    full = [{**batch, "loss_mask": torch.ones_like(batch["loss_mask"])} for batch in given]

    def answer(name: str, order: tuple[int, ...]) -> str | None:
        step = [read_batch(full[i]) for i in order]
        if name == "told nothing":
            step = [Microbatch(x.loss_mask, prompt_ids=x.prompt_ids) for x in step]
        if name == "dummy":  # tokens of one number
            zeros = torch.zeros_like(full[1]["tokens"])
            step[1] = dataclasses.replace(step[1], token_ids=zeros)
        hook = LossHook(aggregation("prompt_mean"), read_step=lambda *_: step)
        opened = hook.step(step) if name == "hook.step" else nullcontext()
        with opened, pytest.MonkeyPatch.context() as patch:
            if name == "dummy":  # which the model is called with, too
                patch.setattr(gpt, "positions_like", torch.zeros_like)
            gpt.run_step(hook, model, iter(full), 2)
        return None

    return {name: error_of(answer, name, order) for name, order in ORDERS.items()}


def test_microbatches_in_another_order_than_the_forward_steps_are_refused() -> None:
    (answers,) = run_host_ranks(orders_on_host, 1)
    for name in ("in order", "other tokens", "told nothing", "dummy"):
        assert answers.pop(name) is None, name
    assert answers.keys() == {"read_step", "hook.step"}
    text = (
        "StepError: the model is called with the tokens of microbatch 1 of the step in place of 0"
    )
    assert all(answer.startswith(text) for answer in answers.values()), answers


def calls_on_host() -> list[str | None]:
    """One rank: calls of one hook, by what happens to the gradients before each."""
    from tests.host import gpt

    gpt.initialize()
    model, hook = gpt.ddp_model(), LossHook(aggregation("token_mean"))

    def call(**options: Any) -> str | None:
        data = batches(PLACES[1][0], "thd")
        return error_of(gpt.run_step, hook, model, data, N_MB, **options)

    found = [call(), call(zero_grad=False)]
    model.zero_grad_buffer()
    found += [call(zero_grad=False), call(zero_grad=False, forward_only=True), call()]
    masked = batches(PLACES[1][0], "thd")
    empty = [{**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])} for batch in masked]
    found.append(error_of(gpt.run_step, hook, model, iter(empty), N_MB))
    return [*found, call(zero_grad=False)]  # the empty step's gradients are zero


def test_a_call_on_the_gradients_of_the_last_one_is_refused() -> None:
    ((first, second, *others),) = run_host_ranks(calls_on_host, 1)
    assert first is None and others == [None] * 5
    assert second.startswith("StepError: a forward-backward call on the gradients that the last")


def outputs_alone() -> list[Any]:
    """One rank: what a forward-only call without a loss function returns, stock and hooked."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.ddp_model()
    answers: list[Any] = []

    def outputs(iterator: Any, chunk: Any) -> Any:
        return gpt.forward_step(iterator, chunk)[0], None

    def run(hook: LossHook | None, forward_only: bool) -> None:
        options = {"forward_step_func": outputs, "forward_only": forward_only}
        answers.append(gpt.run_step(hook, model, Data(), N_MB, **options))

    hook = LossHook(aggregation("prompt_mean"))
    errors = [error_of(run, None, True), error_of(run, hook, True), error_of(run, hook, False)]
    return [answers, errors]


def test_a_call_without_loss_functions_is_left_to_the_host() -> None:
    ((answers, (stock, hooked, trained)),) = run_host_ranks(outputs_alone, 1)
    assert stock == hooked  # before 0.19 both fail: the schedule itself calls the loss function
    if stock is None:
        assert all(map(torch.equal, *answers))
    assert "the loss function NoneType, which the forward step returned, has no mask" in trained


def frozen_on_host() -> list[str | None]:
    """One rank: a step whose model output has no gradient, as of frozen parts; stock and hooked."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.ddp_model()

    def frozen(iterator: Any, chunk: Any) -> Any:
        output, loss_func = gpt.forward_step(iterator, chunk)
        return output.detach(), loss_func

    hooks = None, LossHook(aggregation("prompt_mean"), extensions=[Audit(trust=True)])
    options = {"forward_step_func": frozen}
    return [error_of(gpt.run_step, hook, model, Data(), N_MB, **options) for hook in hooks]


def test_a_step_without_gradients_is_left_to_the_host() -> None:
    ((stock, hooked),) = run_host_ranks(frozen_on_host, 1)
    assert stock == hooked


def without_a_number(wanted: Any) -> tuple[float, str | None]:
    """One rank: the gradient error of a schedule that has its number of microbatches already, and
    what one without any says.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.host import gpt, gradients

    gpt.initialize()
    model = gpt.ddp_model()
    arguments = {"forward_step_func": gpt.forward_step, "model": [model], "seq_length": 1}
    arguments |= {"micro_batch_size": 1, "forward_only": False}

    def run(schedule: Any) -> None:
        model.zero_grad_buffer()
        hook = LossHook(aggregation("prompt_mean"))
        with gpt.precision(model.config):
            hook.wrap(schedule)(data_iterator=Data(), **arguments)

    schedule = get_forward_backward_func()
    run(partial(schedule, num_microbatches=N_MB))
    error = gradients.error(model, wanted)
    return error, error_of(run, schedule)


def test_a_schedule_may_have_its_number_of_microbatches_already() -> None:
    wanted = reference().gradient(weights_of("prompt_mean", PLACES[1]))
    ((error, told),) = run_host_ranks(without_a_number, 1, wanted)
    assert error <= EXACT
    assert told.startswith("HostError: the schedule was called without num_microbatches=; expected")


@pytest.mark.parametrize("cp", [1, 2])
def test_neither_a_step_at_hand_nor_a_call_without_masks_is_drawn_ahead(cp: int) -> None:
    weights = weights_of("prompt_mean", PLACES[1])
    wanted = reference().gradient(weights), reference().loss(weights)
    for answer in run_host_ranks(undrawn_steps, cp, cp, *wanted):
        assert answer["drawn"] == [[1, 2, 3, 4]] * 2
        assert answer["error"] <= EXACT
        assert answer["asked"] == [(Data, 0, number) for number in (N_MB, 3, N_MB)]
        text = "4 microbatches for a call of the schedule with num_microbatches=3"
        assert text in answer["short"]
        assert answer["names"] == [["log_probs"]] * N_MB
        assert max(answer["drawn evaluated"], answer["at hand evaluated"]) <= EXACT  # with masks
