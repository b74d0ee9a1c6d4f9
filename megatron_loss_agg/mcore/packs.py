"""The offsets of packed samples in a batch, under the keys of Megatron-LM and Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.tensors import described

_OFFSET_FORMS = (
    {"cu_seqlens"},
    {"cu_seqlens_padded"},
    {"cu_seqlens", "cu_seqlens_padded"},
    {"cu_seqlens_q"},
    {"cu_seqlens_q", "cu_seqlens_q_padded"},
)
OFFSET_KEYS = (
    "cu_seqlens",
    "cu_seqlens_q",
    "cu_seqlens_padded",
    "cu_seqlens_q_padded",
    "cu_seqlens_unpadded",
    "cu_seqlens_argmin",
)
"""Real offsets before padded ones. The last two keys are from Megatron-Bridge before 0.6; they are
refused, since its ``cu_seqlens`` had another meaning then."""


def pack_offsets(
    batch: Mapping[str, Any], mask: Tensor, sample_counts: Collection[int]
) -> dict[str, Tensor]:
    """``cu_seqlens`` and ``cu_seqlens_padded`` of `Microbatch`.

    Args:
        sample_counts: the numbers of samples that the batch has ids for.
    """
    offsets = {key: batch[key] for key in OFFSET_KEYS if batch.get(key) is not None}
    if set(offsets) not in _OFFSET_FORMS:
        forms = " or ".join(" with ".join(sorted(form)) for form in _OFFSET_FORMS)
        raise DataError(
            f"the offsets of a batch must be exactly one of {forms}, got {' and '.join(offsets)}, "
            "where real and padded ones cannot be told apart. Rename or drop a key."
        )
    rows = [_offset_rows(key, x, mask) for key, x in offsets.items()]
    # A lone pack with ids for as many samples as it has offsets has no filler.
    has_no_filler = len(rows[-1]) == 1 and rows[-1].shape[1] - 1 in sample_counts
    if not has_no_filler:
        rows = [x.cpu() for x in rows]  # one copy, since the values are read several times
    real, padded = rows[0], rows[-1]
    is_dummy = "cu_seqlens" in offsets and not any(sample_counts) and not real.any()
    if is_dummy:
        return {"cu_seqlens": real[0, :1]}  # no samples: all is padding
    num_fillers = [0] if has_no_filler else _numbers_of_fillers(batch, padded)
    joined = [_joined_packs(k, x, num_fillers, mask) for k, x in zip(offsets, rows, strict=True)]
    return dict(zip(("cu_seqlens", "cu_seqlens_padded"), joined, strict=False))


def _numbers_of_fillers(batch: Mapping[str, Any], padded: Tensor) -> list[int]:
    """The number of filler offsets at the end of each pack.

    A repeated last real offset is an empty sample or filler. Only filler also repeats the last
    padded offset.
    """
    fillers = []
    for offsets in padded:
        _, run_lengths = offsets.unique_consecutive(return_counts=True)
        fillers.append(int(run_lengths[-1:].sum()) - 1)
    counts, bridge_offsets = batch.get("token_count"), batch.get("cu_seqlens_q")
    if counts is not None and bridge_offsets is not None and bridge_offsets.dim() == 2:
        # A sample of Megatron-Bridge's packs that begins where the tokens end is padding.
        beyond = [int((row > int(n)).sum()) for row, n in zip(padded, counts, strict=True)]
        fillers = [max(pair) for pair in zip(fillers, beyond, strict=True)]
    return fillers


def _offset_rows(key: str, offsets: Any, mask: Tensor) -> Tensor:
    """[packs, samples + 1]; a vector is one pack, or several that are joined already."""
    packs = mask.shape[0] if mask.dim() == 2 else 1
    if isinstance(offsets, Tensor) and offsets.dim() == 1:
        return offsets.unsqueeze(0)
    if isinstance(offsets, Tensor) and offsets.dim() == 2 and offsets.shape[0] == packs:
        return offsets
    raise DataError(
        f"the batch key {key!r} must be [samples + 1], or one such row for each row of the mask of "
        f"shape {tuple(mask.shape)}, got {described(offsets)}. Correct it."
    )


def _joined_packs(key: str, rows: Tensor, fillers: Sequence[int], mask: Tensor) -> Tensor:
    """Offsets [samples + 1] of one pack, from rows without the ``fillers`` at their ends."""
    packs = [row[: row.numel() - n] for row, n in zip(rows, fillers, strict=True)]
    if len(packs) == 1:
        return packs[0]
    length = mask.shape[1]
    if any(int(pack[-1]) != length for pack in packs):
        raise DataError(
            f"the batch key {key!r} must end at the length {length} of every pack if several packs "
            "are joined into one, got other ends. Let the last sample reach to the pack's end."
        )
    return torch.cat([packs[0][:1], *(pack[1:] + i * length for i, pack in enumerate(packs))])
