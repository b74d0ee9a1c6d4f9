"""Where a call's microbatches come from: its data iterator, or a function that has the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.reading.ahead import LookAhead, attempt, copied
from megatron_loss_agg.mcore.reading.keys import ReadBatch, ReadStep
from megatron_loss_agg.mcore.reading.prefetch import prefetch_of
from megatron_loss_agg.microbatch import for_each_term, listed


class Given(NamedTuple):
    """Of one call of the schedule."""

    read: Callable[[], Sequence[Any]]  # all microbatches; called once, on the ranks that read data
    iterator: Any  # what the schedule gets in place of the script's data iterator


class Source(NamedTuple):
    """See `LossHook`."""

    read_batch: ReadBatch
    read_step: ReadStep | None

    def of(self, call: Any, copies: bool) -> Given:
        """The microbatches of ``call``, a `mcore.host.Call`.

        Args:
            copies: see `LookAhead`.
        """
        number, iterator = call.scale.num_microbatches, call.data_iterator
        # Planned when the script may have changed the batches already.
        lazily = call.may_lack_mask
        if not call.groups.last_stage or not call.groups.reads_data:
            return Given(list, iterator)
        if self.read_step is not None:
            read = functools.partial(self.read_step, iterator, number)
            if lazily:  # now, since it may look at the iterator, from which the forward steps draw
                kept = attempt(lambda: [for_each_term(copied, x) for x in listed(read())])
                return Given(kept, iterator)
            return Given(read, iterator)
        if not hasattr(iterator, "__next__"):
            return Given(functools.partial(_refuse, iterator), iterator)
        ahead = LookAhead(iterator, number, self.read_batch, lazily, copies)
        return Given(ahead.microbatches, ahead)

    def fetch_next(self, call: Any) -> None:
        """Start to draw the next step's batches, if a `Prefetch` can; on the ranks that read data.

        Megatron's own training loop gets a `Prefetch`.
        """
        if self.read_step is None and call.trains and call.groups.reads_data:
            prefetch = prefetch_of(call.data_iterator, insert=call.loop.of_megatron)
            if prefetch is not None:
                prefetch.fetch(call.scale.num_microbatches)


def _refuse(data_iterator: Any) -> Any:
    raise HostError(
        f"data_iterator is a {type(data_iterator).__name__} on a rank that reads data; expected an "
        "iterator with __next__ on tensor-parallel rank 0 of the last pipeline stage (in a list, "
        "one for each model chunk), or LossHook(read_step=...) or hook.step(...), which need none"
    )
