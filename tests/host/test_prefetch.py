"""The next step's batches are drawn behind the compute of this one: all of them, once, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_loss_agg.mcore import Loop, LossHook, Prefetch
from tests.host.harness import EXACT, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import aggregation, batch_of, sequences, weights_of

pytestmark = pytest.mark.host

PATIENCE = 30.0  # seconds until a test that would hang fails


def test_the_same_batches_in_the_same_order_to_their_end() -> None:
    prefetch = Prefetch(iter(range(10)))
    got = [next(prefetch)]
    for fetched, taken in ((3, 2), (2, 4), (4, 1)):  # as a ramp-up, an evaluation
        prefetch.fetch(fetched)
        got += [next(prefetch) for _ in range(taken)]
    prefetch.fetch(9)
    assert got + list(prefetch) == list(range(10))


def failing_twice() -> Iterator[int]:
    class Failing:
        asked = 0

        def __next__(self) -> int:
            self.asked += 1
            if self.asked > 2:
                raise OSError(f"attempt {self.asked}")
            return self.asked

    return Failing()  # type: ignore[return-value]


def failed_generator() -> Iterator[int]:
    yield from (1, 2)
    raise OSError("attempt 3")  # a generator that is drawn from again just ends


@pytest.mark.parametrize("source", [failing_twice, failed_generator])
def test_an_exception_surfaces_at_its_batch(source: Callable[[], Iterator[int]]) -> None:
    prefetch = Prefetch(source())
    for _ in range(3):
        prefetch.fetch(4)
    assert [next(prefetch), next(prefetch)] == [1, 2]
    with pytest.raises(OSError, match="attempt 3"):
        next(prefetch)
    # What the source itself says from then on.
    with pytest.raises(OSError if source is failing_twice else StopIteration):
        next(prefetch)


def test_fetching_does_not_wait_for_the_source() -> None:
    may_draw = threading.Event()

    def source() -> Iterator[int]:
        assert may_draw.wait(PATIENCE)
        yield 1

    prefetch = Prefetch(source())
    prefetch.fetch(1)
    may_draw.set()  # reached, though the source has not drawn
    assert next(prefetch) == 1


class Saving:
    """A loader of epochs that can be resumed: its state is live, as some loaders return theirs."""

    def __init__(self, position: int = 0) -> None:
        self.state = {"position": position}

    def __next__(self) -> int:
        if self.state["position"] == 9:
            self.state["position"] = 0
            raise StopIteration
        self.state["position"] += 1
        return self.state["position"]

    def state_dict(self) -> dict[str, int]:
        return self.state


@pytest.mark.parametrize("fetched", [0, 1, 3, 5])
def test_a_run_resumed_at_the_saved_position_reads_on_where_the_reader_was(fetched: int) -> None:
    prefetch = Prefetch(Saving())
    got = []
    for taken in (2, 0, 4, 2):
        prefetch.fetch(fetched)
        got += [next(prefetch) for _ in range(taken)]
        resumed = Saving(**prefetch.state_dict())
        assert next(resumed) == len(got) + 1
    prefetch.fetch(fetched)
    assert next(prefetch) == 9
    prefetch.fetch(0)
    assert prefetch.state_dict() == {"position": 9}  # before the end of data, which is unread
    assert got == list(range(1, 9))


def test_a_position_has_the_name_of_the_source_and_matters_only_if_it_is_asked_for() -> None:
    class Unsaved(Saving):
        def state_dict(self) -> dict[str, int]:
            raise NotImplementedError

    names = ("state_dict", "save_state", "load_state_dict")  # the last would drop what was drawn
    assert [hasattr(Prefetch(Saving()), name) for name in names] == [True, False, False]
    assert not hasattr(Prefetch(iter([])), "state_dict")
    prefetch = Prefetch(Unsaved())
    prefetch.fetch(2)
    with pytest.raises(NotImplementedError):
        prefetch.state_dict()
    assert next(prefetch) == 1


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


class Items(torch.utils.data.IterableDataset[dict[str, Any]]):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.loader


def iterators() -> dict[str, tuple[Callable[[Loader], Any], bool, bool]]:
    """What reads a loader; and whether batches are drawn ahead in Megatron's loop, and elsewhere.

    Only Megatron's own iterators on torch's loaders get a prefetch by themselves.
    """
    from megatron.core.rerun_state_machine import RerunDataIterator
    from torch.utils.data import DataLoader

    def cyclic_iter(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    def torchs(loader: Loader) -> Any:
        return DataLoader(Items(loader), batch_size=None)

    return {
        "plain": (iter, False, False),
        "own": (Prefetch, True, True),
        "own, in Megatron's": (lambda x: RerunDataIterator(Prefetch(x)), True, True),
        "torch's": (lambda x: RerunDataIterator(iter(torchs(x))), True, False),
        "cyclic": (lambda x: RerunDataIterator(cyclic_iter(torchs(x))), True, False),
        # As --dataloader-type external may have it.
        "external": (RerunDataIterator, False, False),
        "torch's alone": (lambda x: iter(torchs(x)), False, False),
    }


def steps_on_host() -> dict[tuple[str, bool], tuple[bool, list[Any], int, int]]:
    """One rank, for each iterator in each loop: steps of 2, 3 and 1 microbatches around an
    evaluation; whether to draw ahead, gradients, and batches drawn for training and evaluation.
    """
    from megatron.core import rerun_state_machine

    from tests.host import gpt, gradients

    gpt.initialize()
    rerun_state_machine.initialize_rerun_state_machine()
    model = gpt.ddp_model()

    def steps(wrap: Any, of_megatron: bool, fetches: bool) -> tuple[bool, list[Any], int, int]:
        hook = LossHook(aggregation("prompt_mean"), loop=Loop(of_megatron=of_megatron))
        train, evaluation = Loader(), Loader()
        iterator, found = wrap(train), []

        # The next step is taken to be of the same size. Batches drawn in all: 2 + 2 ahead; 5 + 3;
        # and for the 6th that the last step takes, 8 are there already.
        for number, ahead in ((2, 4), (3, 8), (1, 8)):

            def forward_step(data: Any, model: Any, ahead: int = ahead) -> Any:
                train.wait_for(ahead if fetches else 0)  # without a thread the wait would fail
                return gpt.forward_step(data, model)

            gpt.run_step(hook, model, iterator, number, forward_step_func=forward_step)
            found.append(gradients.flat(model))
            if number == 3:
                gpt.run_step(hook, model, iter(evaluation), 2, forward_only=True)
        return fetches, found, train.drawn, evaluation.drawn

    return {
        (name, of_megatron): steps(wrap, of_megatron, fetches)
        for name, (wrap, *ahead) in iterators().items()
        for of_megatron, fetches in zip((True, False), ahead, strict=True)
    }


def test_the_next_step_is_drawn_while_this_one_computes() -> None:
    (found,) = run_host_ranks(steps_on_host, 1)
    _, expected, *_ = found["plain", False]
    for name, (fetches, gradients, *drawn) in found.items():
        assert drawn == [8 if fetches else 6, 2], name
        assert all(torch.equal(g, w) for g, w in zip(gradients, expected, strict=True))


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
