"""Reads the masks of a step: sums by sample, and defects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.microbatch import Microbatch, for_each_term, rise_from_0
from megatron_loss_agg.tensors import LARGEST_FP32, detached


def sums_by_sample(microbatches: Sequence[Microbatch]) -> Tensor:
    """The mask sums of all samples of microbatches on the CPU: fp64 [samples].

    Raises DataError for values and offsets that are not as `Microbatch` says.
    """
    sums = [_sums(microbatch, place) for place, microbatch in enumerate(microbatches)]
    return torch.cat([torch.empty(0, dtype=torch.float64), *sums])


def predicting_mask(
    loss_mask: Tensor, cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """Shift a mask of tokens to the positions whose logits predict them.

    ``out[t] = loss_mask[t + 1]`` inside a sequence and 0 at its last position, since a causal
    model's loss for token ``t + 1`` is at position ``t``. The mask of a sequence's first token,
    which nothing predicts, is dropped.

    Args:
        loss_mask: [samples, seq]; or [tokens] or [1, tokens] with ``cu_seqlens``.
        cu_seqlens, cu_seqlens_padded: as in `Microbatch`.

    Raises:
        DataError: as `StepPlan.build` does.
    """
    microbatch = Microbatch(loss_mask, cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    sums_by_sample(brought_to_cpu([microbatch]))
    return shifted(loss_mask, microbatch, 1)


def brought_to_cpu(microbatches: Sequence[Any]) -> list[Any]:
    """Microbatches, or mappings of them by term, with tensors on the CPU, but for the `token_ids`.

    Waits for the device once, if any are on it. Terms that share a microbatch still do.
    """
    devices = set()

    def copied(x: Tensor) -> Tensor:
        if x.is_cpu:
            return x
        devices.add(x.device)
        return x.to("cpu", non_blocking=True)

    found = [for_each_term(lambda m: m.changed(copied), given) for given in microbatches]
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()
    return found


def shifted(values: Tensor, microbatch: Microbatch, by: int) -> Tensor:
    """``values[..., t + by]`` at ``t``; 0 where that is outside of the sequence of ``t``."""
    length = values.shape[-1]
    result = torch.zeros_like(values)
    result[..., : max(length - by, 0)] = values[..., by:]
    starts = microbatch.sample_starts
    if starts is None:
        return result
    position = torch.arange(length, device=values.device)
    ends = starts[1:].to(position).contiguous()
    sequence = torch.searchsorted(ends, position, right=True)
    leaves = torch.searchsorted(ends, position + by, right=True) != sequence
    return result.masked_fill(leaves, 0)


def _sums(microbatch: Microbatch, place: int) -> Tensor:
    """The mask sum of each sample, fp64 [samples], of the microbatch at ``place`` in the step."""
    mask = detached(microbatch.loss_mask)
    # As Python numbers, since half precision would round the limit to infinity.
    least, largest = (x.item() for x in mask.aminmax()) if mask.numel() else (0, 0)
    if not (least >= 0 and largest <= LARGEST_FP32):
        raise DataError(
            f"microbatch {place}: loss_mask has negative, infinite or NaN values, or some beyond "
            "fp32; expected finite numbers >= 0, in mask_sums too"
        )
    factors = microbatch.token_factors
    if factors is not None and not bool((factors.double().abs() <= LARGEST_FP32).all()):
        raise DataError(
            f"microbatch {place}: token_factors has infinite or NaN values, or some beyond fp32; "
            "expected finite numbers, where the mask is 0 too"
        )
    if microbatch.cu_seqlens is None:
        return mask.sum(dim=1, dtype=torch.float64)
    bounds = _bounds(microbatch, place)
    flat = mask.reshape(-1).double()
    parts = torch.segment_reduce(flat, "sum", offsets=bounds, unsafe=True)
    sums, outside = parts[:-2:2], parts[1::2]
    if bool(outside.any()):
        raise DataError(
            f"microbatch {place}: loss_mask is not 0 on tokens outside of every sample; expected "
            "0 on padding, see cu_seqlens and cu_seqlens_padded"
        )
    return sums


def _bounds(microbatch: Microbatch, place: int) -> Tensor:
    """Where a pack is cut into sample, padding, sample, padding, ..., an empty sample and the rest.

    int64 [2 * samples + 3]. Raises DataError, see `sums_by_sample`.
    """
    assert microbatch.cu_seqlens is not None
    real, padded = microbatch.cu_seqlens.long(), microbatch.cu_seqlens_padded
    starts = real if padded is None else padded.long()
    bounds = torch.stack([starts, starts + pad(real.diff(), (0, 1))], dim=1).view(-1)
    bounds = pad(bounds, (0, 1), value=microbatch.loss_mask.numel())
    if not (rise_from_0(real) and rise_from_0(bounds)):
        raise DataError(
            f"microbatch {place} of {microbatch.loss_mask.numel()} tokens has cu_seqlens="
            f"{real.tolist()} and cu_seqlens_padded={None if padded is None else padded.tolist()}; "
            "expected offsets that start at 0 and do not decrease, samples no longer than their "
            "padded places, and no end beyond the mask"
        )
    return bounds
