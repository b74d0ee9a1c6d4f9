"""Drawing the next step's batches behind the compute of this one.

The hook draws a step's batches before its first forward pass, where stock Megatron draws each just
before its own. With a slow data loader the accelerator would wait for all of them at once.
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
"""Methods by which data loaders return their position, for a checkpoint."""


class Prefetch:
    """The batches of ``source`` in their order, some of them drawn ahead by a thread.

    Nothing is lost or read twice, however the reader mixes with what was drawn ahead. An exception
    of ``source`` is raised where the reader wants the batch that it came for. The thread ends with
    the process.

    Megatron's own training loop gets one by itself, if it reads a `torch.utils.data.DataLoader`. In
    a loop of your own, and for other loaders, give the schedule a ``Prefetch(batches)``, the same
    in every step. ``source`` must not use collectives or the current device, since it runs in a
    thread. Nor may it draw from the process's global random generators if others do: the order in
    which both draw would be left to chance (give it a `torch.Generator` of its own; a
    ``DataLoader`` draws in its workers, except with ``num_workers=0``).

    If ``source`` returns its position by ``state_dict()`` or ``save_state()``, so does this: the
    position of the reader, whatever was drawn ahead. It is taken before each batch that is.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._drawn: deque[tuple[dict[str, Any], Any]] = deque()  # (position before it, batch)
        self._failure: BaseException | None = None
        self._thread: Thread | None = None

    def fetch(self, number: int) -> None:
        """Begin to draw, so that the next ``number`` batches are at hand."""
        self._wait()
        missing = number - len(self._drawn)
        if missing > 0 and self._failure is None:
            self._thread = Thread(target=self._draw, args=(missing,), daemon=True)
            self._thread.start()

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Any:
        self._wait()
        if self._drawn:
            return self._drawn.popleft()[1]
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return next(self._source)

    def __getattr__(self, name: str) -> Any:
        if name in _POSITIONS and hasattr(self._source, name):
            return functools.partial(self._position, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _position(self, name: str) -> Any:
        self._wait()
        return self._drawn[0][0][name] if self._drawn else getattr(self._source, name)()

    def _draw(self, number: int) -> None:
        names = [name for name in _POSITIONS if hasattr(self._source, name)]
        try:
            for _ in range(number):
                # A copy, since a loader may return its live state.
                position = {n: copy.deepcopy(getattr(self._source, n)()) for n in names}
                self._drawn.append((position, next(self._source)))
        except BaseException as failure:  # kept for the reader, StopIteration too
            self._failure = failure

    def _wait(self) -> None:
        """Let the thread finish: the source has one reader at a time."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def prefetch_of(data_iterator: Any, insert: bool) -> Prefetch | None:
    """The `Prefetch` in or below ``data_iterator``; None if there is none.

    Args:
        insert: put one below Megatron's own iterator, if that reads a
            `torch.utils.data.DataLoader`. Megatron's iterator replays a step from the batches that
            it handed out, so it must be the upper one. Other loaders may use collectives or a
            device, and are left alone.
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
