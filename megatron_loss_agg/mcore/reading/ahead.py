"""Where a call's microbatches come from: its data iterator, drawn ahead, or a function."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from megatron_loss_agg.errors import DataError, HostError
from megatron_loss_agg.mcore.reading.keys import ReadBatch, ReadStep, identified
from megatron_loss_agg.mcore.reading.prefetch import attempt, prefetch_of
from megatron_loss_agg.microbatch import Microbatch, for_each_term, listed


class Source(NamedTuple):
    """How a hook reads a step: batch by batch, or all at once; see `LossHook`."""

    read_batch: ReadBatch
    read_step: ReadStep | None

    def reader(self, call: Any, keep_copies: bool) -> tuple[Callable[[], Sequence[Any]], Any]:
        """A function that returns all microbatches of ``call`` (`mcore.host.Call`), called once;
        and what the schedule gets in place of the script's data iterator.
        """
        number, iterator = call.scale.num_microbatches, call.data_iterator
        # Planned when the script may have changed the batches already.
        lazily = call.may_lack_mask
        if not call.groups.last_stage or not call.groups.reads_data:
            return list, iterator
        if self.read_step is not None:
            read = functools.partial(self.read_step, iterator, number)
            if lazily:  # now, since it may look at the iterator, from which the forward steps draw
                kept = attempt(lambda: [for_each_term(copied, x) for x in listed(read())])
                return kept.result, iterator
            return read, iterator
        if not hasattr(iterator, "__next__"):
            return functools.partial(_refuse, iterator), iterator
        ahead = LookAhead(iterator, number, self.read_batch, lazily, keep_copies)
        return ahead.microbatches, ahead

    def fetch_next(self, call: Any) -> None:
        """Start to draw the next step's batches by a `Prefetch`, which Megatron's loop gets."""
        if self.read_step is None and call.trains and call.groups.reads_data:
            prefetch = prefetch_of(call.data_iterator, insert=call.loop.of_megatron)
            if prefetch is not None:
                prefetch.fetch(call.scale.num_microbatches)


def _refuse(data_iterator: Any) -> Any:
    raise HostError(
        f"data_iterator is a {type(data_iterator).__name__} on a rank that reads data; expected an "
        "iterator on tensor-parallel rank 0 of the last pipeline stage (in a list, one for each "
        "model chunk), such as iter(loader); or LossHook(read_step=...) or hook.step(...); "
        "in an evaluation of a stock script, data to evaluate on, or --eval-iters 0"
    )


class LookAhead:
    """An iterator whose next ``number`` batches can be read before ``next`` returns them.

    Args:
        source: anything with ``__next__``. Its batches wait for their forward passes while later
            ones are drawn, so it must not fill the same memory for each.
        read: batch -> microbatch; called once for each batch, before the batch is returned.
        lazily: the batches may never be asked for, so methods of ``source`` stay available; and
            the script may have changed them by then, so copies of what was read are kept.
        keep_copies: even if not ``lazily``: they show a ``source`` that fills the same memory.
    """

    def __init__(
        self, source: Any, number: int, read: ReadBatch, lazily: bool, keep_copies: bool
    ) -> None:
        self._source = source
        self._number = number
        self._read = read
        self._lazily = lazily
        self._keeps_copies = keep_copies or lazily
        self._drawn: list[Future[Any]] = []  # the microbatches, or what reading them raised
        self._waiting: deque[Any] = deque()  # batches that were drawn before they were asked for
        self._taken = 0

    def microbatches(self) -> list[Any]:
        """Those of all ``number`` batches, including batches already returned by ``next``."""
        while len(self._drawn) < self._number:
            self._waiting.append(self._draw())
        return [microbatch.result() for microbatch in self._drawn]

    def check_taken(self) -> None:
        """Raise DataError if the forward steps have not drawn one batch for each microbatch."""
        if self._drawn and self._taken != self._number:
            raise DataError(
                f"the forward steps drew {self._taken} batches for {self._number} microbatches; "
                "expected next(data_iterator) once each: otherwise give LossHook(read_step=...)"
            )

    def __iter__(self) -> LookAhead:
        return self

    def __next__(self) -> Any:
        self._taken += 1
        if self._waiting:
            return self._waiting.popleft()
        return self._draw() if len(self._drawn) < self._number else next(self._source)

    def __getattr__(self, name: str) -> Any:
        if self._lazily:
            return getattr(self._source, name)
        raise AttributeError(
            f"a data iterator that the hook draws ahead has no {name}; expected "
            "next(data_iterator) alone: otherwise give LossHook(read_step=...)"
        )

    def _draw(self) -> Any:
        try:
            batch = next(self._source)
        except StopIteration:
            if not self._drawn:
                raise  # the end of the data, which a loop may wait for
            raise DataError(
                f"the data iterator ended after {len(self._drawn)} of the {self._number} batches "
                "of a call; expected all: leave out the last step, or lower its num_microbatches"
            ) from None
        self._drawn.append(attempt(self._microbatch, batch))
        return batch

    def _microbatch(self, batch: Any) -> Any:
        read = for_each_term(lambda x: identified(x, batch), self._read(batch))
        return for_each_term(copied, read) if self._keeps_copies else read


def copied(microbatch: Any) -> Any:
    """A microbatch with copies of all tensors, which later edits of the batch do not reach."""
    if not isinstance(microbatch, Microbatch):
        return microbatch
    token_ids = [x.clone() for x in microbatch.token_ids]
    return dataclasses.replace(microbatch.copied(), token_ids=token_ids)
