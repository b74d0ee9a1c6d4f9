"""Batches of the next step are drawn behind the compute of this one, and none is lost for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_loss_agg.mcore.prefetch import Prefetch
from tests.host.ranks import run_host_ranks
from tests.host.steps import batch_of, sequences

pytestmark = pytest.mark.host

PATIENCE = 30.0  # seconds until a test that would hang fails


def test_the_same_batches_in_the_same_order() -> None:
    prefetch = Prefetch(iter(range(10)))
    got = [next(prefetch)]
    for fetched, taken in ((3, 2), (2, 4), (4, 1)):  # as a ramp-up, an evaluation
        prefetch.fetch(fetched)
        got += [next(prefetch) for _ in range(taken)]
    assert got + list(prefetch) == list(range(10))


def test_an_exception_surfaces_at_the_batch_that_it_came_for() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("disk")

    prefetch = Prefetch(source())
    prefetch.fetch(4)
    assert [next(prefetch), next(prefetch)] == [1, 2]
    with pytest.raises(OSError, match="disk"):
        next(prefetch)
    with pytest.raises(StopIteration):  # as the source itself says from then on
        next(prefetch)


def test_the_end_of_the_data_surfaces_once_it_is_reached() -> None:
    prefetch = Prefetch(iter([1]))
    prefetch.fetch(3)
    assert list(prefetch) == [1]


def test_fetching_does_not_wait_for_the_source() -> None:
    may_draw = threading.Event()

    def source() -> Iterator[int]:
        assert may_draw.wait(PATIENCE)
        yield 1

    prefetch = Prefetch(source())
    prefetch.fetch(1)
    may_draw.set()  # reached, though the source has not drawn
    assert next(prefetch) == 1


class Loader:
    """Batches of samples 0, 1, 2, ... one each; tells what was drawn."""

    def __init__(self, layout: str) -> None:
        self.drawn = 0
        self.drew = threading.Condition()
        self._layout = layout
        self._chosen = sequences(fractional=False)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> dict[str, Any]:
        batch = batch_of([self._chosen[self.drawn % len(self._chosen)]], self._layout)
        with self.drew:
            self.drawn += 1
            self.drew.notify_all()
        return batch


def steps_on_host(wrapped: str) -> dict[str, Any]:
    """One rank: steps of 2, 3 and 1 microbatches around an evaluation; gradients and draws."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator, initialize_rerun_state_machine

    from megatron_loss_agg import LossAggregation
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize()
    initialize_rerun_state_machine()
    model = gpt.data_parallel(gpt.build(torch.float64, per_token=False))
    hook = LossHook(LossAggregation(mode="prompt_mean"))
    train, evaluation = Loader("thd"), Loader("thd")
    iterator: Any = train
    if wrapped != "plain":
        iterator = Prefetch(train)
    if wrapped == "rerun":
        iterator = RerunDataIterator(iterator)
    seen, gradients = [], []

    def forward_step(data_iterator: Any, model: Any) -> Any:
        if waits_for:
            with train.drew:
                assert train.drew.wait_for(lambda: train.drawn >= waits_for, PATIENCE)
        result = gpt.forward_step(data_iterator, model)
        seen.append(train.drawn)
        return result

    # The next step is taken to be of the same size. Batches drawn in all: 2 + 2 ahead; 5 + 3; and
    # for the 6th that the last step takes, 8 are there already.
    for number, ahead in ((2, 4), (3, 8), (1, 8)):
        waits_for = 0 if wrapped == "plain" else ahead
        schedule = hook.wrap(get_forward_backward_func())
        gpt.run_step(schedule, model, iterator, number, forward_step_func=forward_step)
        gradients.append(gpt.gradient(model))
        if number == 3:
            waits_for = 0
            gpt.run_step(schedule, model, iter(evaluation), 2, forward_only=True)
    return {"gradients": gradients, "drawn": train.drawn, "evaluated": evaluation.drawn}


@pytest.mark.parametrize("wrapped", ["prefetch", "rerun"])
def test_the_next_step_is_drawn_while_this_one_computes(wrapped: str) -> None:
    # Each forward pass waits until the next step's batches are drawn: without the thread they
    # never would be, and the wait would fail.
    plain, fetched = (run_host_ranks(steps_on_host, 1, how)[0] for how in ("plain", wrapped))
    for wanted, got in zip(plain["gradients"], fetched["gradients"], strict=True):
        assert all(torch.equal(g, got[name]) for name, g in wanted.items())
    assert (plain["drawn"], fetched["drawn"]) == (6, 8)
    assert plain["evaluated"] == fetched["evaluated"] == 2


def places_on_host() -> list[Any]:
    """One rank: which iterators get a prefetch in Megatron's training loop, and which outside."""
    from megatron.core.rerun_state_machine import RerunDataIterator
    from torch.utils.data import DataLoader

    from megatron_loss_agg.mcore.prefetch import prefetch_of

    def cyclic_iter(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    def loader() -> Any:
        return DataLoader([1, 2, 3], batch_size=None)

    class Own:
        iterable = iter([1])

    answers: list[Any] = [
        prefetch_of(x, insert=insert) is not None
        for insert in (True, False)
        for x in (
            RerunDataIterator(iter(loader())),
            RerunDataIterator(cyclic_iter(loader())),
            RerunDataIterator(Loader("thd")),  # as --dataloader-type external may have it
            Own(),
            iter([1]),
            None,
            Prefetch(iter([1])),
        )
    ]
    once = RerunDataIterator(iter(loader()))
    answers.append(prefetch_of(once, True) is prefetch_of(once, False) is once.iterable)
    answers.append([next(once) for _ in range(3)])
    return answers


def test_only_megatrons_own_loaders_get_one_by_themselves() -> None:
    (answers,) = run_host_ranks(places_on_host, 1)
    assert answers[:7] == [True, True, False, False, False, False, True]
    assert answers[7:14] == [False, False, False, False, False, False, True]
    assert answers[14:] == [True, [1, 2, 3]]
