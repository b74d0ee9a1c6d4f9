"""Draws the batches of a step before their forward passes, which get the same batches later."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_loss_agg.errors import AggregationError, HostError, StepError
from megatron_loss_agg.mcore.reading.keys import ReadBatch, identified
from megatron_loss_agg.microbatch import Microbatch, for_each_term
from megatron_loss_agg.weights import detached


class LookAhead:
    """An iterator whose next ``number`` batches can be read before ``next`` returns them.

    Batches wait for their forward passes while later ones are drawn, so ``source`` must not fill
    the same memory for each.

    Args:
        source: anything with ``__next__``; Megatron's own data iterators have nothing else.
        read: batch -> microbatch. It is called once for each batch, before the batch is returned.
        lazily: the batches may never be asked for, so methods of ``source`` stay available; and
            the script may have changed them by then, so copies of what was read are kept.
        copies: keep copies in any case. Where ``source`` fills the same memory for every batch,
            these differ from the masks and tokens of the forward passes.
    """

    def __init__(
        self, source: Any, number: int, read: ReadBatch, lazily: bool, copies: bool
    ) -> None:
        self._source = source
        self._number = number
        self._read = read
        self._lazily = lazily
        self._copies = copies or lazily
        self._drawn: list[Callable[[], Any]] = []  # the microbatches, or what reading them raised
        self._served: deque[Any] = deque()
        self._taken = 0

    def microbatches(self) -> list[Any]:
        """Those of all ``number`` batches, including batches already returned by ``next``.

        Raises:
            HostError: ``lazily``, and no batch was returned yet.
            StepError: ``source`` ended amid the step.
            Exception: that of ``source``, or of ``read``.
        """
        if self._lazily and not self._drawn:
            raise HostError(
                "a loss function with a mask, whose batch was not drawn by next(data_iterator); "
                "expected that, or LossHook(read_step=...)"
            )
        self._served.extend([self._draw() for _ in range(len(self._drawn), self._number)])
        return [microbatch() for microbatch in self._drawn]

    def check_taken(self) -> None:
        """Raise StepError if the forward steps have not drawn one batch for each microbatch."""
        if self._drawn and self._taken != self._number:
            raise StepError(
                f"the forward steps drew {self._taken} batches for {self._number} microbatches; "
                "expected next(data_iterator) once each: otherwise give LossHook(read_step=...)"
            )

    def __iter__(self) -> LookAhead:
        return self

    def __next__(self) -> Any:
        self._taken += 1
        if self._served:
            return self._served.popleft()
        return self._draw() if len(self._drawn) < self._number else next(self._source)

    def __getattr__(self, name: str) -> Any:
        if self._lazily:
            return getattr(self._source, name)
        raise AttributeError(
            f"{type(self._source).__name__}.{name} of a data iterator that the hook draws ahead; "
            "expected next(data_iterator) alone: give LossHook(read_step=...)"
        )

    def _draw(self) -> Any:
        try:
            batch = next(self._source)
        except StopIteration:
            if not self._drawn:
                raise  # the end of the data, which a loop may wait for
            raise StepError(
                f"the data iterator ended after {len(self._drawn)} of the {self._number} batches "
                "of a call; expected num_microbatches of them: leave out the last, smaller step, "
                "or lower num_microbatches for it"
            ) from None
        self._drawn.append(attempt(self._microbatch, batch))
        return batch

    def _microbatch(self, batch: Any) -> Any:
        read = for_each_term(lambda x: identified(x, batch), self._read(batch))
        return for_each_term(copied, read) if self._copies else read


def attempt(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Call ``function`` now; what is returned returns its result, or raises its exception."""
    try:
        result = function(*args)
    except Exception as error:
        # A traceback keeps the batch alive; ours says no more than the message.
        kept = None if isinstance(error, AggregationError) else error.__traceback__
        failure = error.with_traceback(kept)
    else:
        return lambda: result

    def fail() -> Any:
        raise failure

    return fail


def copied(microbatch: Any) -> Any:
    """A microbatch with copies of all tensors, which later edits of the batch do not reach."""
    if not isinstance(microbatch, Microbatch):
        return microbatch
    token_ids = tuple(map(_copy, microbatch.token_ids))
    return dataclasses.replace(microbatch.changed(_copy), token_ids=token_ids)


def _copy(x: Tensor) -> Tensor:
    return detached(x).clone()
