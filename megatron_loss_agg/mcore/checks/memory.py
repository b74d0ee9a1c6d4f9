"""Finds batches of a step that were drawn into the memory of earlier ones."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.microbatch import TermMicrobatches, term_microbatches


class DrawnTensors:
    """The masks, offsets and ids of drawn batches, with copies from before the next one was drawn."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def note(self, microbatch: TermMicrobatches) -> None:
        tensors = [x for term in term_microbatches(microbatch) for x in term.tensors()]
        self._pairs += [(x, _bytes(x)) for x in tensors]

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
