"""Draws the next step's batches while this one computes.

Stock Megatron draws each batch just before its forward pass; the hook draws all batches of a step
before the first forward pass. With a slow data loader, the accelerator would wait for all of them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from threading import Thread
from types import GeneratorType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

_POSITION_METHODS = ("state_dict", "save_state")
"""Methods that return a data loader's position, for checkpoints."""


class Prefetch:
    """Iterates over ``source`` in order; a thread draws some batches ahead.

    No batch is lost or read twice. An exception in ``source`` is raised when the reader asks for
    the batch that caused it. The thread is a daemon.

    Megatron's training loop gets one automatically if it reads a `torch.utils.data.DataLoader`.
    In a custom loop, or for other loaders, pass the same ``Prefetch(batches)`` to the schedule in
    every step. ``source`` runs in a thread, so it must not use collectives or the current device.
    Nor may it draw from the process's global random generators if other code does, since the order
    of draws would vary. Give it its own `torch.Generator`; a ``DataLoader`` draws in its workers,
    except with ``num_workers=0``. It must also return new tensors for each batch, since batches
    wait to be used while later ones are drawn.

    If ``source`` has ``state_dict()`` or ``save_state()``, so does this object; the method returns
    the position of the reader, as recorded before each batch that is drawn ahead.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        # Each batch, or the exception raised instead, and the source's position before it.
        self._drawn: deque[tuple[Any, Exception | None, Any]] = deque()
        self._thread: Thread | None = None

    def fetch(self, number: int) -> None:
        """Start drawing, so that the next ``number`` batches are ready."""
        self._wait()
        missing = number - len(self._drawn)
        if missing > 0:
            self._thread = Thread(target=self._draw, args=(missing,), daemon=True)
            self._thread.start()

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Any:
        self._wait()
        if not self._drawn:
            return next(self._source)
        batch, error, _ = self._drawn.popleft()
        if error is not None:
            raise error
        return batch

    def __getattr__(self, name: str) -> Any:
        if name in _POSITION_METHODS and hasattr(self._source, name):
            return self._position
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _position(self) -> Any:
        self._wait()
        position = self._drawn[0][2] if self._drawn else self._source_position()
        if isinstance(position, Exception):
            raise position
        return position

    def _source_position(self) -> Any:
        """A copy of the source's position, or its exception, to be raised if the reader asks."""
        for name in _POSITION_METHODS:
            if hasattr(self._source, name):
                try:
                    # A copy, since some loaders go on changing the state that they return.
                    return copy.deepcopy(getattr(self._source, name)())
                except Exception as error:
                    return error
        return None

    def _draw(self, number: int) -> None:
        for _ in range(number):
            position = self._source_position()
            try:
                self._drawn.append((next(self._source), None, position))
            except Exception as error:
                self._drawn.append((None, error, position))
                return  # some sources block if asked again after an error

    def _wait(self) -> None:
        """Let the thread finish, so that the source has one reader at a time."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def fetch_ahead(data_iterator: Any, number: int, insert: bool) -> None:
    """Start drawing ``number`` batches if ``data_iterator`` is, or wraps, a `Prefetch`.

    Args:
        insert: put a `Prefetch` between Megatron's iterator and a torch ``DataLoader``. Megatron's
            iterator stays outermost, since it replays a step from the batches that it returned. No
            other loader gets a `Prefetch`, since it may use collectives or a device.
    """
    from megatron.core.rerun_state_machine import RerunDataIterator

    loader: Any = getattr(data_iterator, "iterable", data_iterator)
    # With `--dataloader-type cyclic` Megatron reads the loader through a generator.
    cyclic = isinstance(loader, GeneratorType) and loader.__name__ == "cyclic_iter"
    reads_loader = cyclic or isinstance(loader, _BaseDataLoaderIter)
    if insert and reads_loader and isinstance(data_iterator, RerunDataIterator):
        data_iterator.iterable = loader = Prefetch(loader)
    if isinstance(loader, Prefetch):
        loader.fetch(number)
