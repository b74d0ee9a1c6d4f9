"""Reads the masks of a step once: sums by sample, active tokens, and defects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import gt

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.errors import AggregationError, GroupError, MaskError
from megatron_loss_agg.microbatch import Microbatch

F64 = torch.float64
_CHUNK = 2**16
"""Rows are summed in chunks of at most this many tokens, whose fp64 copies fit in a CPU's cache."""


@dataclass(frozen=True)
class MaskSums:
    """What was read from the masks of some microbatches."""

    by_sample: Tensor  # fp64 [samples of all of them], on the CPU
    active_tokens: list[int]  # of each microbatch: positions with a nonzero mask
    error: AggregationError | None  # the first defect of the values

    @classmethod
    def read(cls, microbatches: Sequence[Microbatch]) -> MaskSums:
        """Waits for the device once if all masks and offsets are on one device."""
        readings = [_read(microbatch) for microbatch in microbatches]
        facts = [fact.view(1) for _, of_one in readings for fact in of_one]
        found = on_cpu([*(sums for sums, _ in readings), *facts], F64)
        samples = sum(len(sums) for sums, _ in readings)
        numbers, active, error = iter(found[samples:].tolist()), [], None
        for i, (_, of_one) in enumerate(readings):
            tokens, largest, least, *zeros = islice(numbers, len(of_one))
            active.append(int(tokens))
            # If a sum of numbers >= 0 is finite in fp32, no term is NaN, inf or beyond fp32.
            values_are_good = least >= 0 and largest <= torch.finfo(torch.float32).max
            if error is None and (any(zeros) or not values_are_good):
                error = _defect(microbatches[i], i, values_are_good)
        return cls(found[:samples], active, error)


def active_tokens(mask: Tensor) -> int:
    """Number of positions with a nonzero mask."""
    return int(_active(mask.detach()))


def on_cpu(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """``parts`` joined to one ``dtype`` vector on the CPU; empty if there are none.

    Copies once, and so waits for the device once, if all are on one device.
    """
    if len({part.device for part in parts}) > 1:
        parts = [part.cpu() for part in parts]
    return torch.cat([*parts]).to("cpu", dtype) if parts else torch.empty(0, dtype=dtype)


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
    error = MaskSums.read([microbatch]).error
    if error is not None:
        raise error
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


def _read(microbatch: Microbatch) -> tuple[Tensor, list[Tensor]]:
    """Reads one mask on its device, without waiting for it.

    Returns:
        fp64 [samples], mask sums; and scalars: active tokens, the largest sum, the least value,
        and, for packs, numbers that are 0 if offsets and padding are valid.
    """
    mask, zeros = microbatch.loss_mask.detach(), list[Tensor]()
    if microbatch.cu_seqlens is None:
        sums = by_sample = _row_sums(mask)
    else:
        padded = microbatch.cu_seqlens_padded
        bounds, zeros = _bounds(microbatch.cu_seqlens, padded, mask)
        sums = torch.segment_reduce(mask.reshape(-1).double(), "sum", offsets=bounds, unsafe=True)
        by_sample, outside = (sums[:-1], sums[-1]) if padded is None else (sums[:-2:2], sums[1::2])
        zeros.append(outside if padded is None else outside.sum())
    largest = sums.max() if mask.numel() else sums.new_zeros(())
    return by_sample, [_active(mask), largest, _least(mask), *zeros]


def _least(mask: Tensor) -> Tensor:
    if not mask.numel() or not mask.dtype.is_signed:
        return torch.zeros((), device=mask.device)
    # CPUs find the least float several times faster by `amin`, the least integer by `min`.
    return mask.amin() if mask.is_floating_point() else mask.min()


def _active(mask: Tensor) -> Tensor:
    # Bytes, since CPUs compare, and count in int64, several times slower.
    counted = torch.int32 if mask.numel() < 2**31 else torch.int64
    return mask.bool().view(torch.uint8).sum(dtype=counted)


def _row_sums(mask: Tensor) -> Tensor:
    """fp64 [samples]."""
    if mask.numel() <= _CHUNK or not mask.is_cpu:
        return mask.sum(dim=1, dtype=F64)
    rows = max(1, _CHUNK // max(1, mask.shape[1]))
    return torch.cat([part.sum(dim=1, dtype=F64) for part in mask.split(rows)])


def _bounds(real: Tensor, padded: Tensor | None, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Cuts a pack into its samples and the rest; or, with ``padded``, into sample, padding, sample,
    padding, ..., an empty sample and the rest.

    Returns:
        int64 [samples + 2] or [2 * samples + 3], from 0, within the mask and never decreasing, even
        where offsets are bad; numbers that are 0 if they are valid.
    """
    given = real = real.to(mask.device, torch.int64)
    if padded is not None:
        starts = padded.to(real)
        given = torch.stack([starts, starts + pad(real.diff(), (0, 1))], dim=1).view(-1)
    given = pad(given, (0, 1), value=mask.numel())
    bounds = given.clamp(0, mask.numel())
    bounds[0] = 0
    bounds = bounds.cummax(0).values
    wrong = (given != bounds).any()
    return bounds, [wrong] if padded is None else [wrong, real[0]]


def _defect(microbatch: Microbatch, place: int, values_are_good: bool) -> AggregationError:
    """The error for a microbatch that has one; ``place`` is its index in the step."""
    if not values_are_good:
        return MaskError(
            f"microbatch {place}: loss_mask has negative, infinite or NaN values, or some beyond "
            "fp32; expected finite values >= 0"
        )
    tokens = microbatch.loss_mask.numel()
    offsets = {
        name: given.tolist()
        for name in ("cu_seqlens", "cu_seqlens_padded")
        if (given := getattr(microbatch, name)) is not None
    }
    real, padded = offsets["cu_seqlens"], offsets.get("cu_seqlens_padded", offsets["cu_seqlens"])
    kind: type[AggregationError] = GroupError
    if not _rises(real):
        text = (
            "cu_seqlens must start at 0 and not decrease; expected the running sum of the lengths"
        )
    elif not _rises(padded):
        text = (
            "cu_seqlens_padded must start at 0 and not decrease; expected the running sum of the "
            "padded lengths"
        )
    elif padded[-1] > tokens or any(map(gt, _lengths(real), _lengths(padded))):
        text = (
            "a sample is longer than its padded place, or ends beyond the mask; expected "
            "cu_seqlens within cu_seqlens_padded within the tokens"
        )
    else:
        kind = MaskError
        text = "loss_mask is not 0 on tokens outside of every sample; expected 0 on padding"
    return kind(f"microbatch {place}: {text} (of {tokens} tokens; {offsets})")


def _lengths(offsets: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(offsets)]


def _rises(offsets: list[int]) -> bool:
    return offsets[0] == 0 and min(_lengths(offsets), default=0) >= 0
