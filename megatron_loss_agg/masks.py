"""Whole masks: the sum of each sample, defects, and shifts inside sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.microbatch import (
    Microbatch,
    MicrobatchShape,
    starts_at_zero_and_never_decreases,
)
from megatron_loss_agg.tensors import LARGEST_FP32


@dataclass(frozen=True, eq=False)
class Sequences:
    """The token sequences of one microbatch from which losses by sample are computed."""

    shape: MicrobatchShape
    mask_sum: Tensor  # fp64 [sequences]

    @classmethod
    def of(cls, microbatch: Microbatch) -> Sequences:
        """The sequences of ``microbatch``, which is on the CPU; DataError for bad values."""
        return cls(microbatch.shape, sums_by_sample([microbatch]))


def sums_by_sample(microbatches: Sequence[Microbatch]) -> Tensor:
    """The mask sums of all samples of microbatches on the CPU: fp64 [samples].

    Raises:
        DataError: values or offsets that `Microbatch` does not allow.
    """
    sums = [_sums(microbatch, i) for i, microbatch in enumerate(microbatches)]
    return torch.cat([torch.empty(0, dtype=torch.float64), *sums])


def predicting_mask(
    loss_mask: Tensor, cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """Shift a mask of tokens to the positions whose logits predict them.

    ``out[t] = loss_mask[t + 1]`` inside a sequence and 0 at its last position, since a causal
    model's loss for token ``t + 1`` is at position ``t``. Nothing predicts a sequence's first
    token, so its mask is dropped.

    Args:
        loss_mask: [samples, seq]; or [tokens] or [1, tokens] with ``cu_seqlens``.
        cu_seqlens, cu_seqlens_padded: as in `Microbatch`.

    Raises:
        DataError: as `StepPlan.build` does.
    """
    microbatch = Microbatch(loss_mask, cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    sums_by_sample(brought_to_cpu([microbatch]))
    return shifted(loss_mask, microbatch.sample_starts, 1)


def brought_to_cpu(microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """Microbatches with all tensors on the CPU, except the `model_inputs`.

    Waits for the device once, if any tensor is on it.
    """
    devices = {x.device for m in microbatches for x in m.tensors() if not x.is_cpu}
    if not devices:
        return list(microbatches)
    moved = [m.with_tensors(lambda x: x.to("cpu", non_blocking=True)) for m in microbatches]
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()
    return moved


def shifted(values: Tensor, starts: Tensor | None, by: int) -> Tensor:
    """``values[..., t + by]`` at ``t``; 0 where that is outside of the sequence of ``t``.

    Args:
        starts: offsets [sequences + 1] of a pack; None: each row is a sequence.
    """
    length = values.shape[-1]
    result = torch.zeros_like(values)
    result[..., : max(length - by, 0)] = values[..., by:]
    if starts is None:
        return result
    position = torch.arange(length, device=values.device)
    ends = starts[1:].to(position).contiguous()
    sequence = torch.searchsorted(ends, position, right=True)
    leaves_sequence = torch.searchsorted(ends, position + by, right=True) != sequence
    return result.masked_fill(leaves_sequence, 0)


def _sums(microbatch: Microbatch, i: int) -> Tensor:
    """The mask sum of each sample of microbatch ``i`` of the step, fp64 [samples]."""
    mask = microbatch.loss_mask.detach()
    # As Python numbers, since half precision would round the limit to infinity.
    least, largest = (x.item() for x in mask.aminmax()) if mask.numel() else (0, 0)
    if not (least >= 0 and largest <= LARGEST_FP32):
        raise DataError(
            f"loss_mask must be finite, >= 0 and in the range of fp32 (mask_sums too), got values "
            f"from {least:g} to {largest:g} in microbatch {i}. Correct the mask."
        )
    if microbatch.cu_seqlens is None:
        return mask.sum(dim=1, dtype=torch.float64)
    bounds = _segment_bounds(microbatch, i)
    flat = mask.reshape(-1).double()
    sums = torch.segment_reduce(flat, "sum", offsets=bounds, unsafe=True)
    # Segments alternate: a sample, the padding behind it. The last sample is an empty one.
    sample_sums, padding_sums = sums[:-2:2], sums[1::2]
    if bool(padding_sums.any()):
        raise DataError(
            f"loss_mask must be 0 outside of all samples, got other values in microbatch {i}. Mask "
            "the padding, or correct cu_seqlens and cu_seqlens_padded."
        )
    return sample_sums


def _segment_bounds(microbatch: Microbatch, i: int) -> Tensor:
    """Segment boundaries of a pack: start and end of each sample in turn, then the end of the mask.

    int64 [2 * samples + 3]; the last sample is an empty one.

    Raises:
        DataError: see `sums_by_sample`.
    """
    assert microbatch.cu_seqlens is not None
    real, padded = microbatch.cu_seqlens.long(), microbatch.cu_seqlens_padded
    starts = real if padded is None else padded.long()
    bounds = torch.stack([starts, starts + pad(real.diff(), (0, 1))], dim=1).view(-1)
    bounds = pad(bounds, (0, 1), value=microbatch.loss_mask.numel())
    # Without padded offsets, the bounds are the real offsets.
    offsets = [bounds] if padded is None else [real, bounds]
    if not all(map(starts_at_zero_and_never_decreases, offsets)):
        raise DataError(
            "offsets must start at 0, never decrease, and end inside the mask, with samples no "
            f"longer than their padded places, got cu_seqlens={real.tolist()} and "
            f"cu_seqlens_padded={None if padded is None else padded.tolist()} for the "
            f"{microbatch.loss_mask.numel()} tokens of microbatch {i}. Correct them, "
            "or give the whole pack, before context parallelism."
        )
    return bounds
