"""Batches of the next step are drawn behind the compute of this one, and none is lost for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_loss_agg.mcore import LossHook, Prefetch
from tests.host.harness import EXACT, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import aggregation, batch_of, sequences, weights_of

pytestmark = pytest.mark.host

PATIENCE = 30.0  # seconds until a test that would hang fails


class Loader:
    """Batches of samples 0, 1, 2, ... one each; tells what was drawn."""

    def __init__(self) -> None:
        self.drawn = 0
        self.drew = threading.Condition()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> dict[str, Any]:
        sample = sequences()[self.drawn % len(sequences())]
        with self.drew:
            self.drawn += 1
            self.drew.notify_all()
        return batch_of([sample], "thd")

    def wait_for(self, number: int) -> None:
        with self.drew:
            assert self.drew.wait_for(lambda: self.drawn >= number, PATIENCE)


def steps_on_host() -> list[Any]:
    """One rank, for each way to wrap the data: steps of 2, 3 and 1 microbatches around an
    evaluation; gradients, and batches drawn for training and evaluation.
    """
    from megatron.core import rerun_state_machine

    from tests.host import gpt, gradients

    gpt.initialize()
    rerun_state_machine.initialize_rerun_state_machine()
    model = gpt.ddp_model()

    def steps(wrap: Any) -> tuple[list[Any], int, int]:
        hook = LossHook(aggregation("prompt_mean"))
        train, evaluation = Loader(), Loader()
        iterator = wrap(train)
        found = []

        # The next step is taken to be of the same size. Batches drawn in all: 2 + 2 ahead; 5 + 3;
        # and for the 6th that the last step takes, 8 are there already.
        for number, ahead in ((2, 4), (3, 8), (1, 8)):

            def forward_step(data: Any, model: Any, ahead: int = ahead) -> Any:
                # Without a thread the wait would fail.
                train.wait_for(0 if iterator is train else ahead)
                return gpt.forward_step(data, model)

            gpt.run_step(hook, model, iterator, number, forward_step_func=forward_step)
            found.append(gradients.flat(model))
            if number == 3:
                gpt.run_step(hook, model, iter(evaluation), 2, forward_only=True)
        return found, train.drawn, evaluation.drawn

    def rerun(train: Loader) -> Any:
        return rerun_state_machine.RerunDataIterator(Prefetch(train))

    return [steps(wrap) for wrap in (iter, Prefetch, rerun)]


def test_the_next_step_is_drawn_while_this_one_computes() -> None:
    (found,) = run_host_ranks(steps_on_host, 1)
    plain, *fetched = found
    assert plain[1:] == (6, 2)
    for gradients, *drawn in fetched:
        assert drawn == [8, 2]
        assert all(torch.equal(g, w) for g, w in zip(gradients, plain[0], strict=True))


def places_on_host() -> tuple[list[bool], list[bool]]:
    """One rank: which iterators get a prefetch in Megatron's training loop, and which outside."""
    from megatron.core.rerun_state_machine import RerunDataIterator
    from torch.utils.data import DataLoader

    from megatron_loss_agg.mcore.reading.prefetch import prefetch_of

    def cyclic_iter(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    def loader() -> Any:
        return DataLoader([1, 2, 3], batch_size=None)

    class Own:
        iterable = iter([1])

    def found(insert: bool) -> list[bool]:
        iterators = (
            RerunDataIterator(iter(loader())),
            RerunDataIterator(cyclic_iter(loader())),
            Prefetch(iter([1])),
            RerunDataIterator(Loader()),  # as --dataloader-type external may have it
            Own(),
            iter([1]),
            None,
        )
        return [prefetch_of(x, insert=insert) is not None for x in iterators]

    once = RerunDataIterator(iter(loader()))
    assert prefetch_of(once, True) is prefetch_of(once, False) is once.iterable
    assert [next(once) for _ in range(3)] == [1, 2, 3]
    return found(True), found(False)


def test_only_megatrons_own_loaders_get_one_by_themselves() -> None:
    ((inside, outside),) = run_host_ranks(places_on_host, 1)
    assert inside == [True] * 3 + [False] * 4
    assert outside == [False, False, True] + [False] * 4


HELD = ((0, 1), (3,), (2,))  # samples of batches that a source returns in every step


def held_on_host(expected: torch.Tensor) -> list[float]:
    """One rank: the error of the gradient of each of three steps, whose script edits batches."""
    from tests.host import gpt, gradients

    gpt.initialize()
    model, hook = gpt.ddp_model(), LossHook(aggregation("sample_mean"))
    batches = [batch_of([sequences()[i] for i in rows], "bshd") for rows in HELD]
    edited = threading.Event()

    def again() -> Iterator[dict[str, Any]]:
        yield from batches
        while True:
            assert edited.wait(PATIENCE)  # in the thread, while the step before computes
            edited.clear()
            yield from batches

    data = Prefetch(again())

    def forward_step(iterator: Any, chunk: Any) -> Any:
        batch = next(iterator)
        for x in batch.values():
            x.clamp_(min=0)  # as of labels that are no tokens: a write, also where nothing changes
        if batch is batches[0]:
            edited.set()
        return gpt.forward_step(iter([batch]), chunk)

    errors = []
    for _ in range(3):
        gpt.run_step(hook, model, data, len(HELD), forward_step_func=forward_step)
        errors.append(gradients.error(model, expected))
    return errors


def test_batches_that_come_again_may_be_edited_in_place() -> None:
    expected = reference().gradient(weights_of("sample_mean", (HELD,)))
    (errors,) = run_host_ranks(held_on_host, 1, expected)
    assert len(errors) == 3 and max(errors) <= EXACT
