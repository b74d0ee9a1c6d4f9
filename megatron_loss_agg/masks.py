"""Reads the masks of a step once: sums by sample, active tokens, and defects.

Consecutive microbatches of the same kind are read as one, so that many small ones take hardly more
operations than one large one. They are read in chunks that fit in the CPU cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.errors import AggregationError, GroupError, MaskError
from megatron_loss_agg.microbatch import Microbatch

_CHUNK = 2**16
"""Masks are copied into chunks of at most this many tokens; a longer mask is one chunk."""


@dataclass(frozen=True)
class MaskSums:
    """What was read from the masks of some microbatches; tensors are on the CPU."""

    by_sample: Tensor  # fp64 [samples of all of them]
    active_tokens: list[int]  # of each microbatch: positions with a nonzero mask
    error: AggregationError | None  # the first defect of the values

    @classmethod
    def read(cls, microbatches: Sequence[Microbatch]) -> MaskSums:
        """Waits for the device once if all masks are on one device and none has a defect."""
        runs = [list(run) for _, run in groupby(microbatches, _devices)]
        readings = [_read(run) for run in runs]
        found = on_cpu(readings, torch.float64).split([reading.numel() for reading in readings])
        sums: list[Tensor] = []
        active: list[int] = []
        error: AggregationError | None = None
        for run, reading in zip(runs, found, strict=True):
            entries, counts, defects = _unpacked(reading, run)
            if error is None and bool(defects.any()):
                error = _first_defect(run, len(active))
            sums.append(_of_samples(run, entries))
            active += counts.long().tolist() if error is None else [0] * len(run)
        return cls(on_cpu(sums, torch.float64), active, error)


def active_tokens(mask: Tensor) -> int:
    """Number of positions with a nonzero mask. Faster on CPU than `torch.count_nonzero`."""
    # fp32 is several times faster than fp64, and exact up to 2**24.
    computed = torch.float32 if mask.numel() <= 2**24 else torch.float64
    return int(mask.detach().sign().sum(dtype=computed))


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


def _devices(microbatch: Microbatch) -> tuple[object, ...]:
    """Of mask and offsets; consecutive microbatches where these are equal are read as one."""
    starts = microbatch.sample_starts
    if microbatch.cu_seqlens is None or starts is None:
        return (microbatch.loss_mask.device,)
    return microbatch.loss_mask.device, microbatch.cu_seqlens.device, starts.device


# The first concerns the values alone; the others involve the offsets.
_DEFECTS: tuple[tuple[type[AggregationError], str], ...] = (
    (
        MaskError,
        "loss_mask has negative, infinite or NaN values, or some beyond fp32; expected finite "
        "values >= 0",
    ),
    (
        GroupError,
        "cu_seqlens must start at 0 and not decrease; expected the running sum of the lengths",
    ),
    (
        GroupError,
        "cu_seqlens_padded must start at 0 and not decrease; expected the running sum of the "
        "padded lengths",
    ),
    (
        GroupError,
        "a sample is longer than its padded place, or ends beyond the mask; expected cu_seqlens "
        "within cu_seqlens_padded within the tokens",
    ),
    (MaskError, "loss_mask is not 0 on tokens outside of every sample; expected 0 on padding"),
)


def _first_defect(run: Sequence[Microbatch], place: int) -> AggregationError:
    """The first defect of a run that has one.

    Args:
        place: index in the step of the run's first microbatch.
    """
    defects = [_unpacked(_read([microbatch]), [microbatch])[2] for microbatch in run]
    i, which = torch.stack(defects).nonzero()[0].tolist()
    kind, text = _DEFECTS[which]
    microbatch = run[i]
    offsets = {
        name: getattr(microbatch, name).tolist()
        for name in ("cu_seqlens", "cu_seqlens_padded")
        if which > 0 and getattr(microbatch, name) is not None
    }
    got = f" (of {microbatch.loss_mask.numel()} tokens; {offsets})" if offsets else ""
    return kind(f"microbatch {place + i}: {text}{got}")


def _read(run: Sequence[Microbatch]) -> Tensor:
    """fp64: sums (see `_of_samples`), active tokens by microbatch, and a flag for each defect."""
    segments = None if run[0].cu_seqlens is None else _Segments.of(run)
    sums: list[Tensor] = []
    least: list[Tensor] = []
    active: list[Tensor] = []
    masks = [m.loss_mask.detach() for m in run]
    pieces = [1] * len(masks)
    if segments is None:
        # Of at most `_CHUNK` tokens, or of one longer row.
        of_masks = [m.split(max(1, _CHUNK // max(1, m.shape[1]))) for m in masks]
        masks, pieces = [rows for of_mask in of_masks for rows in of_mask], [*map(len, of_masks)]
    for chunk, values, parts in _chunks(masks):
        if segments is None:
            shapes = [masks[i].shape for i in chunk]
            sums += [rows.view(n).sum(dim=1) for rows, n in zip(parts, shapes, strict=True)]
        else:
            sums.append(_segment_sums(values, segments.of_packs(chunk)))
        if values.numel():
            least.append(values.amin())
        values.sign_()
        active += [part.sum() for part in parts]
    active_by_mask = torch.stack(active)
    if len(masks) > len(run):
        active_by_mask = torch.stack([x.sum() for x in active_by_mask.split(pieces)])
    by_segment = torch.cat(sums)
    good, entries = [by_segment.new_ones((), dtype=torch.bool)], by_segment
    if least:
        # If a sum of numbers >= 0 is finite in fp32, no term is NaN, inf or beyond fp32.
        finite = by_segment.amax() <= torch.finfo(torch.float32).max
        good = [finite & (torch.stack(least).amin() >= 0)]
    if segments is not None:
        entries, outside = by_segment.view(-1, 2).unbind(1)
        good += [*segments.good, (outside == 0).all()]
    defects = pad(torch.stack(good).logical_not().double(), (0, len(_DEFECTS) - len(good)))
    return torch.cat([entries, active_by_mask, defects])


def _unpacked(reading: Tensor, run: Sequence[Microbatch]) -> tuple[Tensor, ...]:
    """The three parts of a reading, which `_read` joins so that one copy to the CPU is enough."""
    end = len(reading) - len(_DEFECTS)
    return reading.tensor_split([end - len(run), end])


def _chunks(masks: Sequence[Tensor]) -> Iterator[tuple[range, Tensor, Sequence[Tensor]]]:
    """Yield each chunk: indices of its masks, their values in fp64, and these split by mask.

    All chunks reuse one buffer: allocating one costs more than a sum over it.
    """
    sizes = [mask.numel() for mask in masks]
    memory = masks[0].new_empty(max(min(_CHUNK, sum(sizes)), *sizes), dtype=torch.float64)
    begin = 0
    while begin < len(masks):
        end, tokens = begin + 1, sizes[begin]
        while end < len(masks) and tokens + sizes[end] <= _CHUNK:
            tokens += sizes[end]
            end += 1
        parts = memory[:tokens].split(sizes[begin:end])
        for part, mask in zip(parts, masks[begin:end], strict=True):
            part.copy_(mask.reshape(-1))
        yield range(begin, end), memory[:tokens], parts
        begin = end


class _Segments(NamedTuple):
    """Packs joined to one and cut into two segments per offset: a sample and its padding.

    At a pack's last offset the sample is empty, and the padding is the rest of the pack.
    """

    bounds: Tensor  # int64 [2 * offsets + 1], on the masks' device; not decreasing
    good: list[Tensor]  # bool: whether real offsets, padded ones, and both together are valid
    first: list[int]  # index of each pack's first offset; last, the number of offsets
    tokens: list[int]  # number of tokens before each pack; last, the total

    @classmethod
    def of(cls, packs: Sequence[Microbatch]) -> _Segments:
        device = packs[0].loss_mask.device
        number_B = [m.num_samples + 1 for m in packs]
        first, tokens = (
            [0, *accumulate(n)] for n in (number_B, [m.loss_mask.numel() for m in packs])
        )
        base = torch.tensor(tokens[:-1]).repeat_interleave(torch.tensor(number_B)).to(device)
        first_B = torch.tensor(first[:-1]).to(device)
        last_B = torch.tensor(first[1:]).to(device) - 1

        real = _joined(packs, "cu_seqlens").to(device, torch.int64)
        length = pad(real.diff(), (0, 1)).index_fill_(0, last_B, 0)
        # Differences of numbers >= 0 do not overflow.
        good = good_padded = (real[first_B] == 0).all() & (torch.minimum(real, length) >= 0).all()
        starts = real
        if any(m.cu_seqlens_padded is not None for m in packs):
            starts = _joined(packs, "sample_starts").to(real)
        begin = starts + base
        place = pad(begin, (0, 1), value=tokens[-1]).diff()
        if starts is not real:
            rises = torch.minimum(starts, place.index_fill(0, last_B, 0)) >= 0
            good_padded = (starts[first_B] == 0).all() & rises.all()
        good_places = (length <= place).all()
        bounds = pad(torch.stack([begin, begin + length], dim=1).view(-1), (0, 1), value=tokens[-1])
        return cls(bounds.cummax(0).values, [good, good_padded, good_places], first, tokens)

    def of_packs(self, packs: range) -> Tensor:
        """The bounds of ``packs``, relative to their first token and clamped to their tokens."""
        first, last = self.first[packs.start], self.first[packs.stop]
        before, end = self.tokens[packs.start], self.tokens[packs.stop]
        return (self.bounds[2 * first : 2 * last + 1] - before).clamp_(0, end - before)


def _joined(packs: Sequence[Microbatch], offsets: str) -> Tensor:
    return torch.cat([getattr(m, offsets) for m in packs])


def _segment_sums(values: Tensor, bounds: Tensor) -> Tensor:
    """Sums of ``values`` [tokens] between ``bounds``."""
    return torch.segment_reduce(values, "sum", offsets=bounds, unsafe=True)


def _of_samples(run: Sequence[Microbatch], sums: Tensor) -> Tensor:
    """Drop the 0 that `_read` adds after the last sample of each pack."""
    if run[0].cu_seqlens is None:
        return sums
    return torch.cat([of_pack[:-1] for of_pack in sums.split([m.num_samples + 1 for m in run])])
