"""A step's batches are read before its first forward pass, behind the compute of the step before.

What needs no plan is left to the host, and drawn as it draws.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import GeneratorType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import Extension, LossHook, Prefetch, read_batch
from tests.host import gpt, gradients
from tests.host.cases import EVALUATION, Batch, Call, Case, assert_exact
from tests.host.harness import EXACT, TOPOLOGIES, error_of, on_ranks_of, run_host_ranks
from tests.host.reference import Gradient, reference
from tests.host.refusals import Refusal, assert_told, two_rows
from tests.host.scripts import Form, returning, stock
from tests.host.steps import (
    N_MB,
    PLACES,
    ROW,
    SHORT,
    aggregation,
    batch_of,
    batches,
    sequences,
    weights_of,
)

PATIENCE = 30.0  # seconds until a test that would hang fails


class Loader(torch.utils.data.IterableDataset[Batch]):
    """Batches of samples 0, 1, 2, ... one each; tells what was drawn."""

    def __init__(self) -> None:
        self.drawn = 0
        self.drew = threading.Condition()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        with self.drew:
            self.drawn += 1
            self.drew.notify_all()
        return batch_of([sequences()[self.drawn - 1]], "thd")

    def wait_for(self, number: int) -> None:
        with self.drew:
            assert self.drew.wait_for(lambda: self.drawn >= number, PATIENCE)


def iterators() -> dict[str, tuple[Callable[[Loader], Any], bool, bool]]:
    """Readers of a loader; whether a hook that prefetches draws ahead of them, and one that does not.

    Only Megatron's own iterators on torch's loaders get a prefetch by themselves.
    """
    from megatron.core.rerun_state_machine import RerunDataIterator

    def cyclic_iter(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    torchs = functools.partial(torch.utils.data.DataLoader, batch_size=None)
    return {
        "own": (Prefetch, True, True),
        "own, in Megatron's": (lambda x: RerunDataIterator(Prefetch(x)), True, True),
        "torch's": (lambda x: RerunDataIterator(iter(torchs(x))), True, False),
        "cyclic": (lambda x: RerunDataIterator(cyclic_iter(torchs(x))), True, False),
        # As --dataloader-type external may have it.
        "external": (RerunDataIterator, False, False),
        "torch's alone": (lambda x: iter(torchs(x)), False, False),
    }


# By step: its samples, and how many batches are drawn when it computes, without a prefetch and
# with one. The next step is taken to be of the same size: 2 + 2 ahead; 5 + 3; and for the 6th that
# the last step takes, 8 are there already.
RUN = [((0, 1), 2, 4), ((2, 3, 4), 5, 8), ((5,), 6, 8)]


def run_on_each(wanted: list[Gradient]) -> None:
    """One rank: every step of `RUN` is exact, and reads as it should, from each iterator."""
    from megatron.core import rerun_state_machine

    gpt.initialize()
    rerun_state_machine.initialize_rerun_state_machine()
    model = gpt.ddp_model()

    def take(wrap: Callable[[Loader], Any], prefetches: bool, fetches: bool) -> None:
        options = {"prefetch": prefetches, "aggregate_evaluation": prefetches}
        hook = LossHook(aggregation("prompt_mean"), **options)
        train = Loader()
        iterator = wrap(train)
        for (samples, read, ahead), gradient in zip(RUN, wanted, strict=True):

            def forward_step(data: Any, model: Any, read: int = read, ahead: int = ahead) -> Any:
                train.wait_for(ahead if fetches else 0)  # without a thread the wait would fail
                assert train.drawn == (ahead if fetches else read)
                return gpt.forward_step(data, model)

            gpt.run_step(hook, model, iterator, len(samples), forward_step_func=forward_step)
            assert gradients.error(model, gradient) <= EXACT
            evaluation = Loader()
            gpt.run_step(hook, model, evaluation, 2, forward_only=True)
            assert evaluation.drawn == 2

    for wrap, inserted, alone in iterators().values():
        take(wrap, True, inserted)
        take(wrap, False, alone)


def test_a_step_is_read_at_once_and_the_next_one_while_it_computes() -> None:
    places = [((tuple((i,) for i in samples)),) for samples, *_ in RUN]
    run_host_ranks(
        run_on_each, 1, [reference().gradient(weights_of("prompt_mean", p)) for p in places]
    )


def judged_loss(loss_mask: Tensor, output: Tensor) -> Any:
    """As in pretrain_gpt.py under ``--check-for-spiky-loss``."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine = get_rerun_state_machine()
    loss, *others = gpt.stock_loss_func(loss_mask, output)
    machine.validate_result(
        result=loss,
        rejection_func=functools.partial(
            machine.is_unexpectedly_large, threshold=100, context="loss", num_samples=1
        ),
        message="Spiky loss",
        tolerance=0.0,
        fatal=False,
    )
    return loss, *others


@on_ranks_of("dp2")
def test_a_spiky_step_and_only_that_runs_again_on_the_same_batches(name: str) -> None:
    from megatron.core import rerun_state_machine

    ddp, hook = gpt.ddp_model(), LossHook(aggregation("prompt_mean"))
    validates = rerun_state_machine.RerunMode.VALIDATE_RESULTS
    rerun_state_machine.initialize_rerun_state_machine(mode=validates)
    machine = rerun_state_machine.get_rerun_state_machine()
    data = rerun_state_machine.RerunDataIterator(
        itertools.cycle(batches(SHORT[gpt.data_rank()], "bshd"))
    )

    def runs_of_step(scale: float) -> list[Tensor]:
        """The gradient of each."""

        def forward_step(iterator: Any, model: Any) -> Any:
            losses, stock = gpt.forward_step(iterator, model)
            return losses * scale, functools.partial(judged_loss, *stock.args)

        found = []
        while machine.should_run_forward_backward(data):
            gpt.run_step(hook, ddp, data, 2, forward_step_func=forward_step)
            found.append(gradients.flat(ddp))
        machine.should_checkpoint_and_exit()
        return found

    # Megatron does not judge the first step, and the second tells what is usual.
    assert len(runs_of_step(1)) == 1
    (usual,) = runs_of_step(1)
    spiky, again = runs_of_step(1e4)
    assert torch.equal(spiky, again)
    torch.testing.assert_close(spiky, 1e4 * usual, rtol=1e-10, atol=1e-12)


def read_step(iterator: Any, number: int) -> list[Microbatch]:
    """The whole step, from elsewhere; gets the script's own iterator."""
    assert (type(iterator), number) == (GeneratorType, N_MB)
    return [read_batch(batch) for batch in batches(PLACES[1][0], "thd")]


def with_own_iterator(iterator: Any, model: Any) -> Any:
    assert type(iterator) is GeneratorType
    return gpt.forward_step(iterator, model)


def emptying(iterator: Iterator[Any], model: Any) -> Any:
    """As scripts that put their part of the tokens into the batch, it changes the batch."""
    batch = next(iterator)
    kept = dict(batch)
    batch.clear()
    return gpt.forward_step(iter([kept]), model)


@pytest.mark.parametrize("name", ["dp1", "cp2"])
def test_a_step_at_hand_and_a_changed_batch_of_an_evaluation_are_exact(name: str) -> None:
    case = Case("prompt_mean", places=PLACES[1])
    at_hand = replace(case, step=with_own_iterator, hook={"read_step": read_step})
    evaluates = {"call": EVALUATION}
    cases = [at_hand, replace(at_hand, **evaluates), replace(case, step=emptying, **evaluates)]
    assert_exact(TOPOLOGIES[name], cases)


def log_probs(losses: Tensor, mask: Tensor) -> Any:
    """A loss function without a mask."""
    return losses, lambda output: (output.sum(), {"log_probs": output.detach()})


def collecting(losses: Tensor, mask: Tensor) -> Any:
    return losses, lambda output, non_loss_data: output if non_loss_data else None


def as_without_a_hook(form: Form, topology: str, grads: bool = True, **options: bool) -> Refusal:
    """The same error, the same results, and batches drawn when the host draws them."""

    def run(hook: LossHook, model: Any, call: Any) -> None:
        def seen(hook: LossHook | None) -> list[Any]:
            left, returned, data = [], [], batches(PLACES[1][0], "thd")

            def counted(iterator: Any, chunk: Any) -> Any:
                made = returning(form, iterator, chunk)
                left.append(data.__length_hint__())
                return made

            def take() -> None:
                arguments = {"forward_step_func": counted, **options}
                returned.append(gpt.run_step(hook, model, data, N_MB, **arguments))

            with torch.set_grad_enabled(grads and torch.is_grad_enabled()):
                error = error_of(take)
            # A step that trains is counted and reported, with gradients or not.
            return [error, left, returned] if options else [error]

        alone, hooked = seen(None), seen(hook)
        assert alone[:2] == hooked[:2]
        torch.testing.assert_close(alone[2:], hooked[2:], rtol=0, atol=0)

    return Refusal(case=Case(run=run), topology=topology)


def in_one_buffer(
    batches: Iterator[Batch], flips: bool = False, key: str = "loss_mask"
) -> Iterator[Batch]:
    """Every mask is written into the memory of the first one; labels are new."""
    buffer = None
    for batch in batches:
        x = batch[key]
        buffer = x if buffer is None else buffer.copy_(buffer.flip(-1) if flips else x)
        yield {**batch, key: buffer}


def ids_in_one_buffer(batches: Iterator[Batch]) -> Iterator[Batch]:
    buffer = None
    for batch in batches:
        ids = batch["prompt_ids"]
        buffer = ids.clone() if buffer is None else buffer.copy_(ids)
        yield {**batch, "prompt_ids": buffer}


def one_mask_for_all(batches: Iterator[Batch]) -> Iterator[Batch]:
    mask = torch.ones(2, ROW, dtype=torch.float64)
    for batch in batches:
        yield {**batch, "loss_mask": mask}


def mask_alone(batch: Batch) -> Any:
    return batch["loss_mask"]


def step_of_batches(hook: LossHook, model: Any, call: Call) -> None:
    with hook.step([*two_rows().data(gpt.data_rank())]):
        call(2)


def without_microbatches(hook: LossHook, model: Any, call: Call) -> None:
    call(0)


OVERWRITTEN = (
    "DataError: a batch must stay as it was drawn until its forward pass, got masks, offsets or ids "
    "that changed ... Give new tensors in each batch, or clone them in the data iterator."
)
NO_MICROBATCH = (
    "DataError: microbatches must be of class Microbatch, or mappings of terms to Microbatch, got"
)
REFUSED = {
    "masks in one buffer": Refusal(OVERWRITTEN, two_rows("token_mean", iterator=in_one_buffer)),
    "masks of equal sums in one buffer": Refusal(
        OVERWRITTEN, two_rows(iterator=functools.partial(in_one_buffer, flips=True))
    ),
    "ids of the mode in one buffer": Refusal(OVERWRITTEN, two_rows(iterator=ids_in_one_buffer)),
    "ids that a function may read in one buffer": Refusal(
        OVERWRITTEN, two_rows("custom", iterator=ids_in_one_buffer)
    ),
    "ids that an extension may read in one buffer": Refusal(
        OVERWRITTEN,
        two_rows("token_mean", iterator=ids_in_one_buffer, hook={"extensions": [Extension()]}),
    ),
    "ids that nothing reads in one buffer": Refusal(
        case=two_rows("token_mean", iterator=ids_in_one_buffer, hook={"also": ["sample_mean"]})
    ),
    "a mask that all batches share": Refusal(case=two_rows(iterator=one_mask_for_all)),
    "a reader that returns a mask": Refusal(
        f"{NO_MICROBATCH} a Tensor. Give read_batch(batch), or correct the function",
        two_rows(hook={"read_batch": mask_alone}),
    ),
    "batches in place of microbatches": Refusal(
        f"{NO_MICROBATCH} a dict of ['labels', 'loss_mask', ... Give read_batch(batch)",
        two_rows(run=step_of_batches),
    ),
    "no microbatches": Refusal(
        "HostError: num_microbatches must be at least 1 ... got 0. Leave out the call",
        two_rows(run=without_microbatches),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_batches_that_cannot_be_counted_are_refused(name: str) -> None:
    assert_told(__name__, name)


ROWS = {**REFUSED}
for name in ("dp1", "cp2"):
    # Before 0.19 the first fails with the hook as without it: the schedule itself calls the
    # function.
    ROWS |= {
        f"no loss function, {name}": as_without_a_hook(lambda x, _: (x, None), name, **EVALUATION),
        f"log-probabilities, {name}": as_without_a_hook(log_probs, name, **EVALUATION),
        f"other data, {name}": as_without_a_hook(
            collecting, name, **EVALUATION, collect_non_loss_data=True
        ),
        f"no gradient, {name}": as_without_a_hook(lambda x, mask: stock(x.detach(), mask), name),
        f"no gradients at all, {name}": as_without_a_hook(stock, name, grads=False),
    }


@pytest.mark.parametrize("name", [name for name in ROWS if name not in REFUSED])
def test_what_needs_no_plan_is_left_to_the_host(name: str) -> None:
    assert_told(__name__, name)
