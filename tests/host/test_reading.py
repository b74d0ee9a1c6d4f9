"""Calls whose step is at hand, and calls that need no plan: batches are drawn as the host draws."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

import pytest
import torch

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import Audit, LossHook, read_batch
from tests.core.operations import Operations
from tests.host.cases import Batch, Case, assert_exact
from tests.host.harness import EXACT, TOPOLOGIES, error_of, run_host_ranks
from tests.host.reference import Gradient, reference
from tests.host.steps import N_MB, PLACES, aggregation, weights_of
from tests.host.steps import batches as batches_of

pytestmark = pytest.mark.host

# On a rank: the batches that were drawn, by their samples.
DRAWN: list[tuple[int, ...]] = []


def noted(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    DRAWN.append(of_mb)
    return batch


def read_step(iterator: Any, number: int) -> list[Microbatch]:
    """The whole step, from elsewhere; gets the script's own iterator."""
    assert (type(iterator), number) == (GeneratorType, N_MB)
    return [read_batch(batch) for batch in batches_of(PLACES[1][0], "thd")]


def one_by_one(iterator: Iterator[Any], model: Any) -> Any:
    from tests.host import gpt

    before = len(DRAWN)
    made = gpt.forward_step(iterator, model)
    assert len(DRAWN) == before + 1
    return made


def emptying(iterator: Iterator[Any], model: Any) -> Any:
    """As scripts that put their part of the tokens into the batch, it changes the batch."""
    from tests.host import gpt

    batch = next(iterator)
    kept = dict(batch)
    batch.clear()
    return gpt.forward_step(iter([kept]), model)


@pytest.mark.parametrize("name", ["dp1", "cp2"])
def test_a_step_at_hand_and_a_changed_batch_of_an_evaluation_are_exact(name: str) -> None:
    evaluates = {"forward_only": True}
    at_hand = {"batch": noted, "step": one_by_one, "hook": {"read_step": read_step}}
    cases = [
        Case("prompt_mean", places=PLACES[1], **at_hand),
        Case("prompt_mean", places=PLACES[1], **at_hand, call=evaluates),
        Case("prompt_mean", places=PLACES[1], step=emptying, call=evaluates),
    ]
    assert_exact(TOPOLOGIES[name], cases)


def outputs(iterator: Any, model: Any) -> Any:
    from tests.host import gpt

    return gpt.forward_step(iterator, model)[0], None


def log_probs(iterator: Any, model: Any) -> Any:
    """A loss function without a mask."""
    from tests.host import gpt

    losses, _ = gpt.forward_step(iterator, model)
    return losses, lambda output: (output.sum(), {"log_probs": output.detach()})


def collecting(iterator: Any, model: Any) -> Any:
    from tests.host import gpt

    losses, _ = gpt.forward_step(iterator, model)
    return losses, lambda output, non_loss_data: output if non_loss_data else None


def frozen(iterator: Any, model: Any) -> Any:
    from tests.host import gpt

    output, loss_func = gpt.forward_step(iterator, model)
    return output.detach(), loss_func


# Before 0.19 the first fails with the hook as without it: the schedule itself calls the function.
LEFT: dict[str, tuple[Any, dict[str, bool]]] = {
    "no loss function": (outputs, {"forward_only": True}),
    "log-probabilities": (log_probs, {"forward_only": True}),
    "other data": (collecting, {"forward_only": True, "collect_non_loss_data": True}),
    "no gradient": (frozen, {}),
}


def left_to_the_host(cp: int, wanted: Gradient) -> dict[str, Any]:
    """Every rank: what becomes of calls without a hook, and with one; and the error of a step whose
    schedule has its number of microbatches already.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.host import gpt, gradients

    gpt.initialize(cp=cp)
    model = gpt.ddp_model()

    def run(hook: LossHook | None, step: Any, options: Any) -> tuple[Any, ...]:
        drawn, returned, data = [], [], batches_of(PLACES[1][0], "thd")

        def counted(iterator: Any, chunk: Any) -> Any:
            made = step(iterator, chunk)
            drawn.append(data.__length_hint__())
            return made

        def take() -> None:
            options_of_step = {"forward_step_func": counted, **options}
            returned.append(gpt.run_step(hook, model, data, N_MB, **options_of_step))

        with Operations() as operations:
            error = error_of(take)
        # A step that trains is counted and reported, with gradients or not.
        is_left = "forward_only" in options
        return error, *((drawn, operations.collectives, returned) if is_left else ())

    trusting = LossHook(aggregation("prompt_mean"), extensions=[Audit(trust=True)])
    found = {name: [run(hook, *of) for hook in (None, trusting)] for name, of in LEFT.items()}
    bound = functools.partial(get_forward_backward_func(), num_microbatches=N_MB)
    model.zero_grad_buffer()
    LossHook(aggregation("prompt_mean")).wrap(bound)(
        forward_step_func=gpt.forward_step,
        data_iterator=batches_of(PLACES[1][0], "thd"),
        model=[model],
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    return {**found, "bound": gradients.error(model, wanted)}


@pytest.mark.parametrize("cp", [1, 2])
def test_what_needs_no_plan_is_left_to_the_host(cp: int) -> None:
    wanted = reference().gradient(weights_of("prompt_mean", PLACES[1]))
    for found in run_host_ranks(left_to_the_host, cp, cp, wanted):
        assert found.pop("bound") <= EXACT
        for stock, hooked in found.values():
            assert stock[:3] == hooked[:3]
            torch.testing.assert_close(stock[3:], hooked[3:], rtol=0, atol=0)
