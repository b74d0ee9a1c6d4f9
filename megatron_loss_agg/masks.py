"""Reads the masks of a step once: sums by sample, active tokens, and defects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.errors import GroupError, MaskError
from megatron_loss_agg.microbatch import Microbatch, rise_from_0
from megatron_loss_agg.transfer import brought_to_cpu
from megatron_loss_agg.weights import at_least_fp32, in_dtype

_LARGEST = torch.finfo(torch.float32).max
_BLOCK = 2**16
_COUNTED_BY_FP32 = 2**24
"""Up to here fp32 holds all whole numbers."""


class MaskSums(NamedTuple):
    """What was read from the masks of some microbatches."""

    by_sample: Tensor  # fp64 [samples of all of them], on the CPU
    by_microbatch: list[float]
    active_tokens: list[int]  # of each microbatch: positions with a nonzero mask

    @classmethod
    def read(cls, microbatches: Sequence[Microbatch]) -> MaskSums:
        """Waits for the device once, if any masks are on it.

        Raises:
            MaskError: values that are not finite and >= 0, or not 0 outside of all samples; or a
                mask whose sum is beyond fp32.
            GroupError: offsets that are not those of samples within the mask.
        """
        microbatches = brought_to_cpu(microbatches)
        masks = [_with_arithmetic(microbatch.loss_mask.detach()) for microbatch in microbatches]
        read = [
            of_one
            for begin, end in _blocks(masks)
            for of_one in _read(microbatches[begin:end], masks[begin:end], begin)
        ]
        sums = [of_mask for of_mask, _ in read]
        totals = [float(x.sum()) for x in sums]
        for place, total in enumerate(totals):
            if total > _LARGEST:
                raise MaskError(
                    f"microbatch {place}: loss_mask sums to {total:g}, beyond fp32; expected "
                    "smaller values"
                )
        active = [
            int(total) if binary else int(mask.count_nonzero())
            for mask, (_, binary), total in zip(masks, read, totals, strict=True)
        ]
        by_sample = torch.cat(sums) if sums else torch.empty(0, dtype=torch.float64)
        return cls(by_sample, totals, active)


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
    MaskSums.read([microbatch])
    return shifted(loss_mask, microbatch, 1)


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


def _blocks(masks: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Where to cut ``masks`` into small ones of one dtype, and large ones alone."""
    begin, size = 0, 0
    for place, mask in enumerate(masks):
        size += mask.numel()
        if place > begin and (size > _BLOCK or mask.dtype != masks[begin].dtype):
            yield begin, place
            begin, size = place, mask.numel()
    if masks:
        yield begin, len(masks)


def _read(
    microbatches: Sequence[Microbatch], masks: Sequence[Tensor], first: int
) -> list[tuple[Tensor, bool]]:
    """Of each: `_by_sample`, and whether its mask is known to hold 0s and 1s alone.

    Args:
        masks: theirs; looked at together, since call overhead dominates small ones.
        first: index of the first one in the step, for errors.
    """
    values = masks[0] if len(masks) == 1 else torch.cat([mask.reshape(-1) for mask in masks])
    binary = _is_binary(values)
    if not (binary or _in_range(values)):
        if len(masks) > 1:  # one by one, to name the first that is bad
            alone = [slice(k, k + 1) for k in range(len(masks))]
            return [x for k in alone for x in _read(microbatches[k], masks[k], first + k.start)]
        raise MaskError(
            f"microbatch {first}: loss_mask has negative, infinite or NaN values, or some beyond "
            "fp32; expected finite values >= 0"
        )
    each = zip(microbatches, masks, strict=True)
    return [
        (_by_sample(microbatch, mask, binary, place), binary)
        for place, (microbatch, mask) in enumerate(each, first)
    ]


def _by_sample(microbatch: Microbatch, mask: Tensor, binary: bool, place: int) -> Tensor:
    """fp64 [samples]: the sums of ``mask``, which is that of ``microbatch``."""
    # Sums of 0s and 1s are exact in every dtype that holds them.
    exact = binary and mask.numel() <= _COUNTED_BY_FP32
    if microbatch.cu_seqlens is None:
        return in_dtype(mask.sum(dim=1, dtype=None if exact else torch.float64), torch.float64)
    bounds = _bounds(microbatch, place)
    summed = in_dtype(mask.reshape(-1), at_least_fp32(mask.dtype) if exact else torch.float64)
    parts = torch.segment_reduce(summed, "sum", offsets=bounds, unsafe=True)
    padded = microbatch.cu_seqlens_padded is not None
    sums, outside = (parts[:-2:2], parts[1::2]) if padded else (parts[:-1], parts[-1:])
    if bool(outside.any()):
        raise MaskError(
            f"microbatch {place}: loss_mask is not 0 on tokens outside of every sample; "
            f"expected 0 on padding {_offsets(microbatch)}"
        )
    return in_dtype(sums, torch.float64)


def _with_arithmetic(mask: Tensor) -> Tensor:
    """The same values in a dtype that torch sums and compares fast on CPUs."""
    if mask.dtype == torch.bool:
        return mask.to(torch.uint8)
    if mask.is_floating_point():
        return in_dtype(mask, at_least_fp32(mask.dtype))
    return mask.double() if mask.dtype in (torch.uint16, torch.uint32, torch.uint64) else mask


def _is_binary(values: Tensor) -> bool:
    """Whether all are 0 or 1."""
    if not values.numel():
        return True
    if not values.is_floating_point():
        least, largest = values.aminmax()
        return int(least) >= 0 and int(largest) <= 1
    # Those with x = x^2; in blocks, which take less memory.
    blocks = [values] if values.numel() <= _BLOCK else values.reshape(-1).split(_BLOCK)
    return not any(float(torch.addcmul(x, x, x, value=-1).abs_().amax()) for x in blocks)


def _in_range(values: Tensor) -> bool:
    """Whether all are finite in fp32, and >= 0."""
    return float(values.amin()) >= 0 and float(values.amax()) <= _LARGEST


def _bounds(microbatch: Microbatch, place: int) -> Tensor:
    """Where to cut a pack into samples and the rest; with padding, into sample, padding, sample,
    padding, ..., an empty sample and the rest.

    Returns:
        int64 [samples + 2] or [2 * samples + 3].

    Raises:
        GroupError: the offsets do not start at 0, decrease, or leave their place or the mask.
    """
    assert microbatch.cu_seqlens is not None
    real, padded = in_dtype(microbatch.cu_seqlens, torch.int64), microbatch.cu_seqlens_padded
    bounds = real
    if padded is not None:
        starts = in_dtype(padded, torch.int64)
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
