"""Compares the masks of a call's loss functions with the planned ones.

Weights come from the planned masks, but the script masks its losses with those that it passes to
its loss functions. The loss is right only if both are the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_loss_agg.errors import GroupError, LayoutError, MaskError
from megatron_loss_agg.mcore.batches import HOW_TO_READ
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.local_weights import LocalMask
from megatron_loss_agg.mcore.model_calls import ModelCalls
from megatron_loss_agg.transfer import Arriving


class MaskChecks:
    """The masks of a call's loss functions, against what was planned.

    Values on the device are collected, and read once by `finish`: reading them in each microbatch
    would wait for the device each time.
    """

    def __init__(self, call: Call, model_calls: ModelCalls) -> None:
        self._call = call
        self._model_calls = model_calls
        self._checksums: list[Tensor] = []
        self._sent: Arriving | None = None
        self._expected: list[Tensor] = []

    def check(self, mask: Tensor, planned: LocalMask, all_tokens: bool) -> None:
        """Check a loss function's mask against what is known about the planned one.

        Args:
            all_tokens: whether the planned one is of all tokens.

        Raises:
            MaskError: its shape, or its values if the plan kept them, are not the planned ones.
            LayoutError: it is of all tokens and should not be, or the other way round.
            GroupError: samples are packed, but were planned as rows.
        """
        packed_sequences = self._model_calls.packed_sequences
        one_sequence = packed_sequences == planned.shape[0] == 1
        rows = not planned.packed and not one_sequence
        lacks_offsets = packed_sequences is not None and rows
        if lacks_offsets and (self._model_calls.groups_samples or not planned.fits(mask)):
            raise GroupError(
                "the model is called with packed sequences and the batch has no 'cu_seqlens'; "
                f"expected that key: add it, or {HOW_TO_READ}"
            )
        if self._call.scale.context_parallel_size > 1:
            self._check_part(mask, planned, all_tokens)
        if mask.shape != planned.shape:
            _check_shape(mask, planned.shape)
        if not planned.fits(mask):
            sums = f": it sums to {float(mask.sum()):g}, and that to {planned.total:g}"
            raise self._changed(sums)

    def _check_part(self, mask: Tensor, planned: LocalMask, all_tokens: bool) -> None:
        """Raise LayoutError for a mask of all tokens instead of a part, or the other way round."""
        cp, size = self._call.scale.context_parallel_size, math.prod(planned.shape)
        if not all_tokens and mask.numel() == cp * size > 0:
            raise LayoutError(
                f"losses for all {mask.numel()} tokens of the batch on a context-parallel rank of "
                f"{cp}; expected those of this rank's part, {size}: shard the losses and the mask "
                "as the model's inputs are, or, if every rank gathers the losses of all tokens, "
                "say how: TokenLoss(whole='local_grad') or 'reduced_grad'"
            )
        if all_tokens and cp * mask.numel() == size > 0:
            raise LayoutError(
                f"TokenLoss(whole=...) with a mask of {mask.numel()} tokens on a context-parallel "
                f"rank of {cp}; expected all {size} of the batch: gather the losses and the mask, "
                "or leave out whole="
            )

    def collect(self, checksum: Tensor, expected: Tensor) -> None:
        """Compare a mask's checksum with the planned one later, in `finish`."""
        self._checksums.append(checksum)
        self._expected.append(expected)

    def send(self) -> None:
        """Start to copy the checksums to the CPU; the call's last loss is made.

        `finish` then waits for this loss, while the GPU still has its backward pass to do.
        """
        if self._checksums:
            self._sent = Arriving.of(torch.cat(self._checksums))

    def finish(self) -> None:
        """Raise MaskError if some mask's checksum is not the planned one."""
        if self._sent is None:
            return
        given, expected = self._sent.arrived().double(), torch.cat(self._expected)
        if torch.equal(given, expected):  # as of masks of 0 and 1
            return
        # `torch.allclose` takes twice as long, a noticeable part of a small step.
        excess = (given - expected).abs_().sub_(expected, alpha=1e-5)
        if not float(excess.amax()) <= 0:  # NaN, too
            raise self._changed()

    def _changed(self, sums: str = "") -> MaskError:
        several = self._call.scale.context_parallel_size > 1
        split = "split it over context-parallel ranks as CPLayout can and " if several else ""
        return MaskError(
            f"the loss function's mask is not this rank's part of the batch's 'loss_mask'{sums}; "
            f"expected the script to {split}leave it as it is, undivided (a cast to half precision "
            f"changes fractions): otherwise {HOW_TO_READ} with the final mask"
        )


def _check_shape(mask: Tensor, expected: tuple[int, ...]) -> None:
    """Raise MaskError unless ``mask`` has as many elements as ``expected``, in the same order."""
    if mask.numel() != math.prod(expected):
        raise MaskError(
            f"{mask.numel()} local losses for {math.prod(expected)} local weights; "
            "expected a batch that is whole, and the losses of this rank's part of every sequence; "
            "where the model makes its own mask, give --loss-aggregation-mask model "
            f"(LossHook(mask='model')), or {HOW_TO_READ}"
        )
    long = [[n for n in shape if n > 1] for shape in (mask.shape, expected)]
    if long[0] != long[1] and min(map(len, long)) > 1:
        raise MaskError(
            f"a loss mask of shape {tuple(mask.shape)}, where this rank's part of the batch's "
            f"is {expected}; expected [samples, seq], for losses too: transpose both"
        )
