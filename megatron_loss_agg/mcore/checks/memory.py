"""Detects batches of a step that were drawn into the memory of earlier batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.microbatch import Microbatch, TermMicrobatches, term_microbatches

if TYPE_CHECKING:
    from megatron_loss_agg.mcore.hook import LossHook


class DrawnTensors:
    """The counted tensors of drawn batches, with copies made before the next batch was drawn."""

    def __init__(self, hook: LossHook) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        aggregations = [*(term.aggregation for term in hook.terms.values()), *hook.also]
        self._units = {unit for agg in aggregations for unit in agg.by_id}
        # A custom function, or an extension other than the one for `also`, may read any ids.
        has_function = any(agg.function is not None for agg in aggregations)
        num_other_extensions = len(hook.extensions) - (1 if hook.also else 0)
        self._reads_all_ids = has_function or num_other_extensions > 0

    def note(self, microbatch: TermMicrobatches) -> None:
        tensors = [x for term in term_microbatches(microbatch) for x in self._counted(term)]
        self._pairs += [(x, _bytes(x)) for x in tensors]

    def _counted(self, microbatch: Microbatch) -> list[Tensor]:
        """The masks, the offsets, and the ids that are read."""
        unread_units = {*BY_ID, *microbatch.ids} - self._units
        unread = [] if self._reads_all_ids else [microbatch.ids_of(x) for x in unread_units]
        return [x for x in microbatch.tensors() if not any(x is y for y in unread)]

    def check_unchanged(self) -> None:
        """Raise DataError if a later batch was written into the memory of an earlier one.

        No other check detects it, since the counted mask and the loss function's mask are then both
        the last batch's.
        """
        if not all(torch.equal(_bytes(x), copy) for x, copy in self._pairs):
            raise DataError(
                "a batch must stay as it was drawn until its forward pass, got masks, offsets or ids "
                "that changed while later batches were drawn. Give new tensors in each batch, or clone "
                "them in the data iterator."
            )


def _bytes(x: Tensor) -> Tensor:
    """A copy of ``x`` as integers, for which NaN equals itself."""
    return x.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)
