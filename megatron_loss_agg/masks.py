"""Reading the masks of a step: the sum of every sample, and whether masks and offsets are usable.

Microbatches of one kind are read as one long one, so that many small ones take few operations more
than a large one. Their masks are read a chunk at a time: one of many tokens would leave the
processor's cache.

Suffix: ``_B`` microbatches.
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
"""Tokens up to which masks are joined, which copies them."""


@dataclass(frozen=True)
class MaskSums:
    """What the masks of some microbatches hold; on the CPU."""

    by_sample: Tensor  # fp64 [samples of all of them]
    active_tokens: int  # positions with a mask other than 0
    error: AggregationError | None  # the first defect of the values

    @classmethod
    def read(cls, microbatches: Sequence[Microbatch]) -> MaskSums:
        """One device synchronisation, if they are all on one device and none has a defect."""
        runs = [list(run) for _, run in groupby(microbatches, _read_alike)]
        readings = [_read(run) for run in runs]
        found = on_cpu(readings, torch.float64).split([reading.numel() for reading in readings])
        sums: list[Tensor] = []
        active, place = 0, 0
        error: AggregationError | None = None
        for run, reading in zip(runs, found, strict=True):
            entries, of_run, defects = _unpacked(reading)
            sums.append(_samples(run, entries))
            if not bool(defects.any()):
                active += int(of_run)
            elif error is None:
                error = _first_defect(run, place)
            place += len(run)
        return cls(on_cpu(sums, torch.float64), active, error)


def sample_sums(microbatch: Microbatch) -> Tensor:
    """fp64 [samples], on the device of the mask and without waiting for it; nothing is checked."""
    mask = microbatch.loss_mask.detach()
    if microbatch.cu_seqlens is None:
        return mask.sum(dim=1, dtype=torch.float64)
    bounds = _Segments.of([microbatch]).of_packs(range(1))
    return _segment_sums(mask.reshape(-1).double(), bounds)[0:-2:2]


def active_tokens(mask: Tensor) -> Tensor:
    """Positions with a mask above 0; a scalar. Faster on a CPU than `torch.count_nonzero`."""
    # In fp32, which is several times as fast again, numbers up to 2**24 are exact.
    computed = torch.float32 if mask.numel() <= 2**24 else torch.float64
    return mask.detach().sign().sum(dtype=computed)


def on_cpu(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """``parts`` as one vector on the CPU, of ``dtype`` also when there is none.

    One copy, and so one device synchronisation, if they are all on one device.
    """
    if len({part.device for part in parts}) > 1:
        parts = [part.cpu() for part in parts]
    return torch.cat([*parts]).to("cpu", dtype) if parts else torch.empty(0, dtype=dtype)


def _read_alike(microbatch: Microbatch) -> tuple[object, ...]:
    """What microbatches that are read as one have in common."""
    starts = microbatch.sample_starts
    if microbatch.cu_seqlens is None or starts is None:
        return (microbatch.loss_mask.device,)
    return microbatch.loss_mask.device, microbatch.cu_seqlens.device, starts.device


# The first is one of the values alone, the others are of the offsets.
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
    """Of a run that has one; ``place`` is that of its first microbatch in the step."""
    defects = [_unpacked(_read([microbatch]))[2] for microbatch in run]
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
    """fp64: sums, the number of active tokens, and which of `_DEFECTS` there are.

    The sums are those of the samples, and after the samples of each pack a 0: see `_samples`.
    """
    segments = None if run[0].cu_seqlens is None else _Segments.of(run)
    sums: list[Tensor] = []
    least: list[Tensor] = []
    active: list[Tensor] = []
    masks = [m.loss_mask.detach() for m in run]
    if segments is None:
        masks = [rows for mask in masks for rows in _few_rows(mask)]
    for chunk, values, parts in _chunks(masks):
        if segments is None:
            shapes = [masks[i].shape for i in chunk]
            sums += [rows.view(n).sum(dim=1) for rows, n in zip(parts, shapes, strict=True)]
        else:
            sums.append(_segment_sums(values, segments.of_packs(chunk)))
        if values.numel():
            least.append(values.amin())
        active.append(values.sign_().sum())
    by_segment = torch.cat(sums)
    good, entries = [by_segment.new_ones((), dtype=torch.bool)], by_segment
    if least:
        # A sum of numbers >= 0 that is finite, in fp32 too, has no NaN or inf in it.
        finite = by_segment.amax() <= torch.finfo(torch.float32).max
        good = [finite & (torch.stack(least).amin() >= 0)]
    if segments is not None:
        entries, outside = by_segment.view(-1, 2).unbind(1)
        good += [*segments.good, (outside == 0).all()]
    defects = pad(torch.stack(good).logical_not().double(), (0, len(_DEFECTS) - len(good)))
    return torch.cat([entries, torch.stack(active).sum().view(1), defects])


def _unpacked(reading: Tensor) -> tuple[Tensor, ...]:
    """The three things that `_read` returns as one, lest each wait for the device."""
    return reading.tensor_split([-1 - len(_DEFECTS), -len(_DEFECTS)])


def _few_rows(mask: Tensor) -> tuple[Tensor, ...]:
    """``mask`` [samples, seq] in parts of `_CHUNK` tokens at most, or of a row."""
    return mask.split(max(1, _CHUNK // max(1, mask.shape[1])))


def _chunks(masks: Sequence[Tensor]) -> Iterator[tuple[range, Tensor, Sequence[Tensor]]]:
    """Which masks, of `_CHUNK` tokens at most or one alone; their values in fp64, joined and apart.

    All chunks use the same memory: to get some from the system costs more than a sum over it.
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
    """Of packs, joined to one: two for each of their offsets, a sample and the padding after it.

    At a pack's last offset the sample is empty, and the padding what follows the pack's samples.
    """

    bounds: Tensor  # int64 [2 * offsets + 1], on the masks' device; not decreasing
    good: list[Tensor]  # bool: the real offsets, the padded ones, and whether they fit
    first: list[int]  # offset of each pack, and the number of all
    tokens: list[int]  # before each pack, and in all

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
        """The bounds in the tokens of some of the packs, and never outside of them."""
        first, last = self.first[packs.start], self.first[packs.stop]
        before, end = self.tokens[packs.start], self.tokens[packs.stop]
        return (self.bounds[2 * first : 2 * last + 1] - before).clamp_(0, end - before)


def _joined(packs: Sequence[Microbatch], offsets: str) -> Tensor:
    return torch.cat([getattr(m, offsets) for m in packs])


def _segment_sums(values: Tensor, bounds: Tensor) -> Tensor:
    """Of ``values`` [tokens] between ``bounds``."""
    return torch.segment_reduce(values, "sum", offsets=bounds, unsafe=True)


def _samples(run: Sequence[Microbatch], sums: Tensor) -> Tensor:
    """Those of the sums that `_read` returns that are a sample's."""
    if run[0].cu_seqlens is None:
        return sums
    return torch.cat([of_pack[:-1] for of_pack in sums.split([m.num_samples + 1 for m in run])])
