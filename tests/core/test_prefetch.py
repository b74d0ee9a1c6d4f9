"""Batches are drawn behind the compute of a step: none is lost or read twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from megatron_loss_agg.mcore import Prefetch

PATIENCE = 30.0  # seconds until a test that would hang fails


def test_an_exception_surfaces_at_its_batch() -> None:
    def source() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("disk")

    prefetch = Prefetch(source())
    for _ in range(3):
        prefetch.fetch(4)
    assert [next(prefetch), next(prefetch)] == [1, 2]
    with pytest.raises(OSError, match="disk"):
        next(prefetch)
    with pytest.raises(StopIteration):  # what the source itself says from then on
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


class Unsaved(Saving):
    def state_dict(self) -> dict[str, int]:
        raise NotImplementedError


@pytest.mark.parametrize("fetched", [0, 1, 3, 5])
def test_a_run_resumed_at_the_saved_position_reads_on_where_the_reader_was(fetched: int) -> None:
    prefetch = Prefetch(Saving())
    got = []
    for taken in (2, 0, 4, 2):
        prefetch.fetch(fetched)
        got += [next(prefetch) for _ in range(taken)]
        assert next(Saving(**prefetch.state_dict())) == len(got) + 1
    prefetch.fetch(fetched)
    assert [*got, next(prefetch)] == list(range(1, 10))
    prefetch.fetch(0)
    assert prefetch.state_dict() == {"position": 9}  # before the end of data, which is unread
    with pytest.raises(StopIteration):
        next(prefetch)


def test_a_position_has_the_name_of_the_source_and_matters_only_if_it_is_asked_for() -> None:
    names = ("state_dict", "save_state", "load_state_dict")  # the last would drop what was drawn
    assert [hasattr(Prefetch(Saving()), name) for name in names] == [True, False, False]
    assert not hasattr(Prefetch(iter([])), "state_dict")
    prefetch = Prefetch(Unsaved())
    prefetch.fetch(2)
    with pytest.raises(NotImplementedError):
        prefetch.state_dict()
    assert next(prefetch) == 1
