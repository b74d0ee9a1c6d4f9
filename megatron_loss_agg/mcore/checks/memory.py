"""Finds batches of a step that were drawn into the memory of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, Unit
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.microbatch import TermMicrobatches, term_microbatches


class DrawnTensors:
    """What is counted of drawn batches, with copies from before the next one was drawn."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def note(self, microbatch: TermMicrobatches, units: Sequence[Unit]) -> None:
        """Copy masks, offsets, rejections and weights, and the ids of ``units``."""
        for term in term_microbatches(microbatch):
            unread = [term.ids_of(unit) for unit in BY_ID if unit not in units]
            counted = [x for x in term.tensors() if not any(x is y for y in unread)]
            self._pairs += [(x, _bytes(x)) for x in counted]

    def check_unchanged(self) -> None:
        """Raise DataError if a later batch was written into the memory of an earlier one.

        No other check sees it: the counted mask, and that of the loss function, are both the last one.
        """
        if not all(torch.equal(_bytes(x), copy) for x, copy in self._pairs):
            raise DataError(
                "a batch must stay as it was drawn until its forward pass, got masks, offsets or ids "
                "that changed while later batches were drawn. Give new tensors in each batch, or clone "
                "them in the data iterator."
            )


def _bytes(x: Tensor) -> Tensor:
    """A copy of ``x`` as integers, in which NaN equals itself."""
    return x.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)
