"""Draws the next step's batches while this one computes.

The hook draws a step's batches before its first forward pass, where stock Megatron draws each just
before its own. With a slow data loader, the accelerator would wait for the whole step's batches.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Iterator
from threading import Thread
from types import GeneratorType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

_POSITIONS = ("state_dict", "save_state")
"""Methods that return a data loader's position, for checkpoints."""


class Prefetch:
    """Iterates over ``source`` in order; a thread draws some batches ahead.

    No batch is lost or read twice. An exception of ``source`` is raised when the reader asks for
    the batch that caused it. The thread is a daemon.

    Megatron's own training loop gets one automatically if it reads a `torch.utils.data.DataLoader`.
    In a custom loop, or for other loaders, pass the same ``Prefetch(batches)`` to the schedule in
    every step. ``source`` runs in a thread, so it must not use collectives or the current device.
    Nor may it draw from the process's global random generators if other code does: the order of
    draws would vary. Give it a `torch.Generator` of its own; a ``DataLoader`` draws in its workers,
    except with ``num_workers=0``. And it must return new tensors for each batch, since batches wait
    for their use while later ones are drawn.

    If ``source`` has ``state_dict()`` or ``save_state()``, so has this: they return the position of
    the reader, as recorded before each batch that is drawn ahead.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._drawn: deque[tuple[dict[str, Any], Any]] = deque()  # (position before it, batch)
        self._failure: tuple[dict[str, Any], BaseException] | None = None
        self._thread: Thread | None = None

    def fetch(self, number: int) -> None:
        """Start drawing, so that the next ``number`` batches are ready."""
        self._wait()
        missing = number - len(self._drawn)
        if missing > 0 and self._failure is None:
            self._thread = Thread(target=self._draw, args=(missing,), daemon=True)
            self._thread.start()

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Any:
        self._wait()
        if self._failure is not None and not self._drawn:
            (_, failure), self._failure = self._failure, None
            raise failure
        return self._drawn.popleft()[1] if self._drawn else next(self._source)

    def __getattr__(self, name: str) -> Any:
        if name in _POSITIONS and hasattr(self._source, name):
            return functools.partial(self._position, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _position(self, name: str) -> Any:
        self._wait()
        unread = self._drawn[0] if self._drawn else self._failure
        position = getattr(self._source, name)() if unread is None else unread[0][name]
        if isinstance(position, Exception):
            raise position
        return position

    def _positions(self) -> dict[str, Any]:
        """Copies by name, since a loader may return live state; an exception where one fails."""
        positions: dict[str, Any] = {}
        for name in _POSITIONS:
            if hasattr(self._source, name):
                try:
                    positions[name] = copy.deepcopy(getattr(self._source, name)())
                except Exception as error:  # matters only to a reader that asks for it
                    positions[name] = error
        return positions

    def _draw(self, number: int) -> None:
        for _ in range(number):
            positions = self._positions()
            try:
                self._drawn.append((positions, next(self._source)))
            except BaseException as failure:  # raised later in the reader, StopIteration too
                self._failure = positions, failure
                return

    def _wait(self) -> None:
        """Let the thread finish: the source has one reader at a time."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def prefetch_of(data_iterator: Any, insert: bool) -> Prefetch | None:
    """The `Prefetch` that ``data_iterator`` is or wraps; None if there is none.

    Args:
        insert: if there is none, and Megatron's own iterator reads a
            `torch.utils.data.DataLoader`, put one between them. Megatron's iterator must stay
            outermost, since it replays a step from the batches that it returned. Other loaders are
            left alone, since they may use collectives or a device.
    """
    if isinstance(data_iterator, Prefetch):
        return data_iterator
    loader: Any = getattr(data_iterator, "iterable", None)
    if isinstance(loader, Prefetch):
        return loader
    if not insert or not _reads_data_loader(data_iterator, loader):
        return None
    data_iterator.iterable = prefetch = Prefetch(loader)
    return prefetch


def _reads_data_loader(data_iterator: Any, loader: Any) -> bool:
    from megatron.core.rerun_state_machine import RerunDataIterator

    # `--dataloader-type cyclic` reads one through a generator.
    cyclic = isinstance(loader, GeneratorType) and loader.__name__ == "cyclic_iter"
    reads = cyclic or isinstance(loader, _BaseDataLoaderIter)
    return reads and isinstance(data_iterator, RerunDataIterator)
