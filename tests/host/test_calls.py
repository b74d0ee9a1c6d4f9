"""Calls of the schedule that are no step of their own, whose step is at hand, or that train not."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import Audit, LossHook, read_batch
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
from tests.host.steps import MODES, N_MB, PLACES, Places, aggregation, batches, weights_of

pytestmark = pytest.mark.host

CALLS = (1, 2, 1)  # microbatches of each call of the step
NAMES = ("dp2", "cp2", "tp2-sp", "pp2", "ep2", "pp2-dp2-distributed-overlap")


def microbatches(places: Places, layout: str) -> list[Microbatch]:
    """This data-parallel rank's step."""
    from tests.host import gpt

    return [read_batch(batch) for batch in batches(places[gpt.data_rank()], layout)]


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
                data, reports = data_for(topology, places, layout), []
                with hook.step(microbatches(places, layout)):
                    for i, number in enumerate(CALLS):
                        reports += gpt.run_step(hook, chunks, data, number, zero_grad=i == 0)
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


class Data:
    """A data iterator over the step that counts the batches drawn from it."""

    def __init__(self) -> None:
        self.batches, self.drawn = batches(PLACES[1][0], "thd"), 0

    def __next__(self) -> Any:
        self.drawn += 1
        return next(self.batches)


def emptying(iterator: Iterator[Any], model: Any) -> Any:
    """As scripts that put their part of the tokens into the batch, it changes the batch."""
    from tests.host import gpt

    batch = next(iterator)
    kept = dict(batch)
    batch.clear()
    return gpt.forward_step(iter([kept]), model)


def log_probs(*_: Any) -> Any:
    """A loss function without a mask."""
    return lambda losses: (losses.sum(), {"log_probs": losses.detach()})


def undrawn(cp: int, gradient: Any, loss: float) -> dict[str, Any]:
    """A step that `read_step` returns; and without it log-probabilities and an evaluation."""
    from tests.host import gpt, gradients

    gpt.initialize(cp=cp)
    model, asked = gpt.ddp_model(), []

    def read_step(iterator: Data, number: int) -> list[Microbatch]:
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

        options["forward_step_func"] = forward_step
        return gpt.run_step(hook, model, data, N_MB, **options), drawn

    def evaluated(hook: LossHook, forward_step: Any) -> float:
        options = {"forward_step_func": forward_step, "forward_only": True}
        reports = gpt.run_step(hook, model, Data(), N_MB, **options)
        return abs(gpt.reported(reports, "prompt_mean loss") / loss - 1)

    hook = LossHook(aggregation("prompt_mean"))
    at_hand = LossHook(aggregation("prompt_mean"), read_step=read_step)
    _, drawn = run(at_hand, partial)
    answer = {"errors": [gradients.error(model, gradient)], "drawn": [drawn]}
    with Operations() as ours:
        reports, drawn = run(hook, log_probs, forward_only=True)
    with Operations() as stock:
        run(None, log_probs, forward_only=True)
    answer["drawn"].append(drawn)
    answer["exchanges"] = ours.collectives, stock.collectives
    answer["names"] = [list(report) for report in reports]
    answer["errors"] += [evaluated(hook, emptying), evaluated(at_hand, gpt.forward_step)]
    return {**answer, "asked": asked}


@pytest.mark.parametrize("cp", [1, 2])
def test_neither_a_step_at_hand_nor_a_call_without_masks_is_drawn_ahead(cp: int) -> None:
    weights = weights_of("prompt_mean", PLACES[1])
    wanted = reference().gradient(weights), reference().loss(weights)
    for answer in run_host_ranks(undrawn, cp, cp, *wanted):
        assert answer["drawn"] == [[1, 2, 3, 4]] * 2
        assert max(answer["errors"]) <= EXACT
        assert answer["asked"] == [(Data, 0, N_MB)] * 2
        assert answer["names"] == [["log_probs"]] * N_MB
        ours, stock = answer["exchanges"]
        assert ours == stock


def left_to_the_host(wanted: Any) -> dict[str, Any]:
    """One rank: what stock and hooked calls return, or say."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.host import gpt, gradients

    gpt.initialize()
    model, returned = gpt.ddp_model(), []

    def outputs(iterator: Any, chunk: Any) -> Any:
        return gpt.forward_step(iterator, chunk)[0], None

    def frozen(iterator: Any, chunk: Any) -> Any:
        output, loss_func = gpt.forward_step(iterator, chunk)
        return output.detach(), loss_func

    def run(hook: LossHook | None, forward_step: Any, **options: Any) -> None:
        options["forward_step_func"] = forward_step
        returned.append(gpt.run_step(hook, model, Data(), N_MB, **options))

    hook = LossHook(aggregation("prompt_mean"))
    trusting = LossHook(aggregation("prompt_mean"), extensions=[Audit(trust=True)])
    told = {
        "outputs": [error_of(run, x, outputs, forward_only=True) for x in (None, hook)],
        "trained": error_of(run, hook, outputs),
        "frozen": [error_of(run, x, frozen) for x in (None, trusting)],
    }
    bound = partial(get_forward_backward_func(), num_microbatches=N_MB)
    arguments = {"forward_step_func": gpt.forward_step, "model": [model], "data_iterator": Data()}
    model.zero_grad_buffer()
    LossHook(aggregation("prompt_mean")).wrap(bound)(
        **arguments, seq_length=1, micro_batch_size=1, forward_only=False
    )
    return {**told, "returned": returned, "bound": gradients.error(model, wanted)}


@pytest.fixture(scope="module")
def left() -> dict[str, Any]:
    wanted = reference().gradient(weights_of("prompt_mean", PLACES[1]))
    return run_host_ranks(left_to_the_host, 1, wanted)[0]


def test_a_call_without_loss_functions_is_left_to_the_host(left: dict[str, Any]) -> None:
    stock, hooked = left["outputs"]
    assert stock == hooked  # before 0.19 both fail: the schedule itself calls the loss function
    if stock is None:
        assert all(map(torch.equal, *left["returned"][:2]))
    assert "the loss function NoneType, which the forward step returned, has no mask" in str(
        left["trained"]
    )


def test_a_step_without_gradients_is_left_to_the_host(left: dict[str, Any]) -> None:
    stock, hooked = left["frozen"]
    assert stock == hooked


def test_a_schedule_may_have_its_number_of_microbatches_already(left: dict[str, Any]) -> None:
    assert left["bound"] <= EXACT
