"""Draws the next step's batches while this one computes.

The hook draws a step's batches before its first forward pass, where stock Megatron draws each just
before its own. With a slow data loader, the accelerator would wait for the whole step's batches.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
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
        # Batches, or errors of the source; and its positions before them, by name.
        self._drawn: deque[tuple[Future[Any], dict[str, Future[Any]]]] = deque()
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
        return self._drawn.popleft()[0].result() if self._drawn else next(self._source)

    def __getattr__(self, name: str) -> Any:
        if name in _POSITIONS and hasattr(self._source, name):
            return functools.partial(self._position, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _position(self, name: str) -> Any:
        self._wait()
        return self._drawn[0][1][name].result() if self._drawn else getattr(self._source, name)()

    def _saved(self, name: str) -> Any:
        return copy.deepcopy(getattr(self._source, name)())  # which may be live state

    def _draw(self, number: int) -> None:
        names = [name for name in _POSITIONS if hasattr(self._source, name)]
        for _ in range(number):
            # One that cannot be had matters only to a reader that asks for it.
            positions = {name: attempt(self._saved, name) for name in names}
            batch = attempt(next, self._source)
            self._drawn.append((batch, positions))
            if batch.exception() is not None:  # asking the source again may block
                return

    def _wait(self) -> None:
        """Let the thread finish: the source has one reader at a time."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def attempt(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call ``function`` now, and hold its result, or its exception, for whoever asks for it."""
    outcome: Future[Any] = Future()
    try:
        outcome.set_result(function(*args))
    except Exception as error:
        outcome.set_exception(error)
    return outcome


def prefetch_of(data_iterator: Any, insert: bool) -> Prefetch | None:
    """The `Prefetch` that ``data_iterator`` is or wraps; None if there is none.

    Args:
        insert: put one between Megatron's own iterator, which replays a step from the batches that
            it returned, and a torch ``DataLoader``. Other loaders may use collectives or a device.
    """
    from megatron.core.rerun_state_machine import RerunDataIterator

    if isinstance(data_iterator, Prefetch):
        return data_iterator
    loader: Any = getattr(data_iterator, "iterable", None)
    if isinstance(loader, Prefetch):
        return loader
    # `--dataloader-type cyclic` reads one through a generator.
    cyclic = isinstance(loader, GeneratorType) and loader.__name__ == "cyclic_iter"
    reads_loader = cyclic or isinstance(loader, _BaseDataLoaderIter)
    if not (insert and reads_loader and isinstance(data_iterator, RerunDataIterator)):
        return None
    data_iterator.iterable = prefetch = Prefetch(loader)
    return prefetch
