"""Drawing the next step's batches behind the compute of this one.

A look-ahead draws a step's batches before its first forward pass, where stock Megatron draws each
just before its own. With a slow data loader the accelerator would wait for all of them at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from threading import Thread
from types import GeneratorType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter


class Prefetch:
    """The batches of ``source`` in their order, some of them drawn ahead by a thread.

    Whoever reads, and whatever was fetched, nothing is lost or read twice. An exception of
    ``source`` surfaces where the batch is wanted that it came for. The thread does not outlive the
    process.

    Megatron's own training loop gets one by itself, if it reads a `torch.utils.data.DataLoader`. In
    a loop of your own, give the schedule a ``Prefetch(batches)``, the same in every step;
    ``source`` must not use collectives or the current device, since it runs in a thread. Nor may it
    draw from the process's global random generators, if others do: the order in which both draw
    would be left to chance (give it a `torch.Generator` of its own; a ``DataLoader`` draws in its
    workers, except with ``num_workers=0``).
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._drawn: deque[Any] = deque()
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
            return self._drawn.popleft()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return next(self._source)

    def _draw(self, number: int) -> None:
        try:
            for _ in range(number):
                self._drawn.append(next(self._source))
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
        insert: put one below Megatron's own iterator, if that reads a `torch.utils.data.DataLoader`
            that does not save its position. Megatron's iterator replays a step from the batches
            that it handed out, so it must be the upper one. Loaders of the user's may use
            collectives or a device, and are left alone.
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

    if not isinstance(data_iterator, RerunDataIterator):
        return False
    if any(hasattr(loader, name) for name in ("save_state", "state_dict")):
        return False
    # `--dataloader-type cyclic` reads one through a generator.
    cyclic = isinstance(loader, GeneratorType) and loader.__name__ == "cyclic_iter"
    return cyclic or isinstance(loader, _BaseDataLoaderIter)
