"""A prefetch hands on the batches of its source: all of them, once, in their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from megatron_loss_agg.mcore import Prefetch

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
