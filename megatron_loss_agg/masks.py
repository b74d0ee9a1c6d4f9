"""Reads the masks of a step once: sums by sample, active tokens, and defects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.errors import GroupError, MaskError
from megatron_loss_agg.microbatch import (
    Microbatch,
    MicrobatchOfTerms,
    for_each_term,
    rise_from_0,
)
from megatron_loss_agg.weights import LARGEST_FP32, at_least_fp32, detached, in_dtype

_Microbatch = TypeVar("_Microbatch", bound=MicrobatchOfTerms)
_BLOCK = 2**18
_COUNTED_BY_FP32 = 2**24
"""Up to here fp32 holds all whole numbers."""


class MaskSums(NamedTuple):
    """What was read from the masks of some microbatches."""

    by_sample: Tensor  # fp64 [samples of all of them], on the CPU
    totals: list[float]  # of each microbatch
    active_tokens: list[int]  # of each microbatch: positions with a nonzero mask

    @classmethod
    def read(cls, microbatches: Sequence[Microbatch]) -> MaskSums:
        """Of microbatches on the CPU.

        Raises:
            MaskError: values that are not finite and >= 0, or not 0 outside of all samples.
            GroupError: offsets that are not those of samples within the mask.
        """
        read = [_read(x, place) for place, x in enumerate(microbatches)]
        if not read:
            return cls(torch.empty(0, dtype=torch.float64), [], [])
        sums, totals, active_tokens = zip(*read, strict=True)
        by_sample = torch.cat(sums) if len(sums) > 1 else sums[0]
        return cls(by_sample, [*totals], [*active_tokens])


def predicting_mask(
    loss_mask: Tensor, cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """Shift a mask of tokens to the positions whose logits predict them.

    ``out[t] = loss_mask[t + 1]`` inside a sequence and 0 at its last position. In RL data the mask
    marks the tokens of the response; a causal model's loss for token ``t + 1`` is at position
    ``t``. The mask of a sequence's first token, which nothing predicts, is dropped.

    Args:
        loss_mask: [samples, seq]; or [tokens] or [1, tokens] with ``cu_seqlens``.
        cu_seqlens, cu_seqlens_padded: as in `Microbatch`.

    Raises:
        MaskError, GroupError: as `StepPlan.build` does.
    """
    microbatch = Microbatch(loss_mask, cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    MaskSums.read(brought_to_cpu([microbatch]))
    return shifted(loss_mask, microbatch, 1)


def brought_to_cpu(microbatches: Sequence[_Microbatch]) -> list[_Microbatch]:
    """``microbatches`` with their tensors, but the `token_ids`, on the CPU.

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
    stays = torch.searchsorted(ends, position + by, right=True) == sequence
    # torch has no `masked_fill` of uint16 to uint64.
    return torch.where(stays, result, torch.zeros_like(result))


def _read(microbatch: Microbatch, place: int) -> tuple[Tensor, float, int]:
    """Sums by sample, fp64 [samples], their total, and the number of active tokens.

    Args:
        place: index of the microbatch in the step, for errors.
    """
    mask = _with_arithmetic(detached(microbatch.loss_mask))
    binary = _is_binary(mask)
    if not (binary or (mask.amin() >= 0 and mask.amax() <= LARGEST_FP32)):
        raise MaskError(
            f"microbatch {place}: loss_mask has negative, infinite or NaN values, or some beyond "
            "fp32; expected finite values >= 0"
        )
    # Sums of 0s and 1s count the active tokens, and are exact in every dtype that holds them.
    exact = binary and mask.numel() <= _COUNTED_BY_FP32
    if microbatch.cu_seqlens is None:
        sums = mask.sum(dim=1, dtype=None if exact else torch.float64)
    else:
        dtype = at_least_fp32(mask.dtype) if exact else torch.float64
        bounds = _bounds(microbatch, place)
        flat = in_dtype(mask.reshape(-1), dtype)
        parts = torch.segment_reduce(flat, "sum", offsets=bounds, unsafe=True)
        padded = microbatch.cu_seqlens_padded is not None
        sums, outside = (parts[:-2:2], parts[1::2]) if padded else (parts[:-1], parts[-1:])
        if bool(outside.any()):
            raise MaskError(
                f"microbatch {place}: loss_mask is not 0 on tokens outside of every sample; "
                f"expected 0 on padding {_offsets(microbatch)}"
            )
    sums = sums.double()
    total = float(sums.sum())
    return sums, total, int(total) if binary else int(mask.count_nonzero())


def _with_arithmetic(mask: Tensor) -> Tensor:
    """The same values in a dtype that torch sums and compares fast on CPUs."""
    if mask.dtype == torch.bool:
        return mask.to(torch.uint8)
    if mask.is_floating_point():
        return in_dtype(mask, at_least_fp32(mask.dtype))
    return mask.double() if mask.dtype in (torch.uint16, torch.uint32, torch.uint64) else mask


def _is_binary(mask: Tensor) -> bool:
    """Whether all values are 0 or 1."""
    if not mask.numel():
        return True
    if not mask.is_floating_point():
        least, largest = mask.aminmax()
        return bool(least >= 0) and bool(largest <= 1)
    # Those whose x - x^2 has no bit set: integers are compared faster. Blocks take less memory.
    bits = torch.int32 if mask.dtype == torch.float32 else torch.int64
    blocks = [mask] if mask.numel() <= _BLOCK else mask.reshape(-1).split(_BLOCK)
    ends = (torch.addcmul(x, x, x, value=-1).view(bits).aminmax() for x in blocks)
    return not any(map(any, ends))


def _bounds(microbatch: Microbatch, place: int) -> Tensor:
    """Where to cut a pack into samples and the rest; with padding, into sample, padding, sample,
    padding, ..., an empty sample and the rest.

    Returns:
        int64 [samples + 2] or [2 * samples + 3].

    Raises:
        GroupError: the offsets do not start at 0, decrease, or leave their place or the mask.
    """
    assert microbatch.cu_seqlens is not None
    real, padded = microbatch.cu_seqlens.long(), microbatch.cu_seqlens_padded
    bounds = real
    if padded is not None:
        starts = padded.long()
        bounds = torch.stack([starts, starts + pad(real.diff(), (0, 1))], dim=1).view(-1)
    bounds = pad(bounds, (0, 1), value=microbatch.loss_mask.numel())
    if not rise_from_0(bounds) or (padded is not None and not rise_from_0(real)):
        raise _bad_offsets(microbatch, place)
    return bounds


def _bad_offsets(microbatch: Microbatch, place: int) -> GroupError:
    for name, what in (("cu_seqlens", ""), ("cu_seqlens_padded", "padded ")):
        offsets = getattr(microbatch, name)
        if offsets is not None and not rise_from_0(offsets):
            return GroupError(
                f"microbatch {place}: {name} must start at 0 and not decrease; expected the "
                f"running sum of the {what}lengths {_offsets(microbatch)}"
            )
    return GroupError(
        f"microbatch {place}: a sample is longer than its padded place, or ends beyond the mask; "
        f"expected cu_seqlens within cu_seqlens_padded within the tokens {_offsets(microbatch)}"
    )


def _offsets(microbatch: Microbatch) -> str:
    given = {
        name: offsets.tolist()
        for name in ("cu_seqlens", "cu_seqlens_padded")
        if (offsets := getattr(microbatch, name)) is not None
    }
    return f"(of {microbatch.loss_mask.numel()} tokens; {given})"
