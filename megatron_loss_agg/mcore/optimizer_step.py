"""The microbatches of an optimizer step, which one call of the schedule takes, or several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_loss_agg.errors import HostError, StepError
from megatron_loss_agg.mcore.batches import LookAhead, ReadBatch, ReadStep, attempt, copied
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step_weights import StepWeights
from megatron_loss_agg.microbatch import for_each_term
from megatron_loss_agg.samples import listed


class OptimizerStep:
    """Microbatches that are counted together and taken by one or several calls of the schedule."""

    def __init__(self, number: int, read: Callable[[], Any] = list) -> None:
        self.number = number
        self.left = number
        self._read = read
        self._weights: StepWeights | None = None

    @classmethod
    def of_call(
        cls,
        call: Call,
        read_batch: ReadBatch,
        read_step: ReadStep | None,
        lazily: bool,
        verify: bool,
    ) -> tuple[OptimizerStep, Any]:
        """The step that is one call, and the iterator to pass to the schedule.

        Args:
            lazily: planned when the script may have changed the batches already.
            verify: see `LookAhead`.
        """
        number, iterator = call.scale.num_microbatches, call.data_iterator
        if not call.groups.last_stage or not call.groups.reads_data:
            return cls(number), iterator
        if read_step is not None:
            read: Callable[[], Any] = functools.partial(read_step, iterator, number)
            if lazily:  # now, since it may look at the iterator, from which the forward steps draw
                given = read
                read = attempt(lambda: [for_each_term(copied, x) for x in listed(given())])
            return cls(number, read), iterator
        if not hasattr(iterator, "__next__"):
            return cls(number, functools.partial(_refuse_iterator, iterator)), iterator
        ahead = LookAhead(iterator, number, read_batch, lazily, verify)
        return cls(number, ahead.microbatches), ahead

    @property
    def is_whole(self) -> bool:
        """Whether no call has taken any of them yet."""
        return self.left == self.number

    def take(self, number: int) -> int:
        """Take the next ``number`` microbatches; return the index of the first.

        Raises:
            StepError: fewer are left.
        """
        if number > self.left:
            raise StepError(
                f"a call with num_microbatches={number} in a hook.step with {self.left} of "
                f"{self.number} microbatches left; expected at most as many (a call that failed "
                "has taken its own)"
            )
        self.left -= number
        return self.number - self.left - number

    def weights(self, plan: Callable[[Callable[[], Any], int], StepWeights]) -> StepWeights:
        """The weights of all of them, planned when first asked for."""
        if self._weights is None:
            self._weights = plan(self._read, self.number)
        return self._weights

    def carried_tokens(self, first: int) -> int:
        """Host's tokens of earlier calls, if the call that begins with ``first`` is the last one.

        The host scales the gradients of all calls by the token count of the last one.
        """
        if self.left or not first:
            return 0
        assert self._weights is not None
        return sum(self._weights.local_mask(i).own_tokens for i in range(first))


def _refuse_iterator(data_iterator: Any) -> Any:
    raise HostError(
        f"data_iterator is a {type(data_iterator).__name__} on a rank that reads data; expected an "
        "iterator with __next__ on tensor-parallel rank 0 of the last pipeline stage (in a list, "
        "one for each model chunk), or LossHook(read_step=...) or hook.step(...), which need none"
    )
