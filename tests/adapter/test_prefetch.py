"""A prefetch hands on the batches of its source: all of them, once, in their order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

from megatron_loss_agg.mcore.reading.prefetch import Prefetch

PATIENCE = 30.0  # seconds until a test that would hang fails


def test_the_same_batches_in_the_same_order() -> None:
    prefetch = Prefetch(iter(range(10)))
    got = [next(prefetch)]
    for fetched, taken in ((3, 2), (2, 4), (4, 1)):  # as a ramp-up, an evaluation
        prefetch.fetch(fetched)
        got += [next(prefetch) for _ in range(taken)]
    assert got + list(prefetch) == list(range(10))


def test_an_exception_surfaces_at_its_batch() -> None:
    class Failing:
        asked = 0

        def __next__(self) -> int:
            self.asked += 1
            if self.asked > 2:
                raise OSError(f"attempt {self.asked}")
            return self.asked

    prefetch = Prefetch(Failing())
    for _ in range(3):
        prefetch.fetch(4)
    assert [next(prefetch), next(prefetch)] == [1, 2]
    with pytest.raises(OSError, match="attempt 3"):
        next(prefetch)
    with pytest.raises(OSError, match="attempt 4"):  # what the source itself says from then on
        next(prefetch)


def test_a_failed_generator_is_not_taken_for_an_ended_one() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("the loader's own")  # a generator that is drawn from again just ends

    prefetch = Prefetch(source())
    for _ in range(3):
        prefetch.fetch(2)
    assert next(prefetch) == 1
    prefetch.fetch(2)
    with pytest.raises(OSError, match="the loader's own"):
        next(prefetch)
    with pytest.raises(StopIteration):
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


class Saving:
    """A loader that can be resumed: its state is live, as some loaders return theirs."""

    def __init__(self, position: int = 0) -> None:
        self.state = {"position": position}

    def __next__(self) -> int:
        self.state["position"] += 1
        return self.state["position"]

    def state_dict(self) -> dict[str, int]:
        return self.state


@pytest.mark.parametrize("fetched", [0, 1, 3, 5])
def test_a_run_resumed_at_the_saved_position_reads_on_where_the_reader_was(fetched: int) -> None:
    prefetch = Prefetch(Saving())
    got = []
    for taken in (2, 0, 4, 1):
        prefetch.fetch(fetched)
        got += [next(prefetch) for _ in range(taken)]
        resumed = Saving(**prefetch.state_dict())
        assert next(resumed) == len(got) + 1
    assert got == list(range(1, 8))


def test_a_position_is_returned_under_the_name_that_the_source_has_for_it() -> None:
    assert hasattr(Prefetch(Saving()), "state_dict")
    assert not hasattr(Prefetch(Saving()), "save_state")
    assert not hasattr(Prefetch(iter([])), "state_dict")
    assert not hasattr(Prefetch(Saving()), "load_state_dict")  # it would not drop what was drawn


def test_the_position_at_an_unread_end_of_data_is_before_it() -> None:
    class Epochs(Saving):
        def __next__(self) -> int:
            if self.state["position"] == 3:
                self.state["position"] = 0
                raise StopIteration
            return super().__next__()

    prefetch = Prefetch(Epochs())
    prefetch.fetch(5)
    assert [next(prefetch) for _ in range(3)] == [1, 2, 3]
    assert prefetch.state_dict() == {"position": 3}


def test_a_position_that_cannot_be_had_is_no_matter_until_it_is_asked_for() -> None:
    class Unsaved(Saving):
        def state_dict(self) -> dict[str, int]:
            raise NotImplementedError

    prefetch = Prefetch(Unsaved())
    prefetch.fetch(2)
    with pytest.raises(NotImplementedError):
        prefetch.state_dict()
    assert next(prefetch) == 1


def test_batches_that_the_reader_edits_may_come_again() -> None:
    """As of a source that repeats its epoch: the reader's own writes are no change of the data."""
    batches = [{"tokens": torch.zeros(2)} for _ in range(2)]
    prefetch = Prefetch(itertools.cycle(batches))
    for _ in range(3):
        prefetch.fetch(2)
        for batch in batches:
            assert next(prefetch) is batch
            batch["tokens"].add_(1)
    assert [batch["tokens"].tolist() for batch in batches] == [[3, 3]] * 2
