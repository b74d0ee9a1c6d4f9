"""Where the samples of a packed batch lie, under the names that data loaders give their offsets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.tensors import described

_FORMS = (
    {"cu_seqlens"},
    {"cu_seqlens_padded"},
    {"cu_seqlens", "cu_seqlens_padded"},
    {"cu_seqlens_q"},
    {"cu_seqlens_q", "cu_seqlens_q_padded"},
)
_KEYS = (
    *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_padded", "cu_seqlens_q_padded"),
    *("cu_seqlens_unpadded", "cu_seqlens_argmin"),
)
"""Real ones first. The last two are of Megatron-Bridge before 0.6, with another meaning."""


def pack_offsets(
    batch: Mapping[str, Any], mask: Tensor, sample_counts: Collection[int]
) -> dict[str, Tensor]:
    """``cu_seqlens`` and ``cu_seqlens_padded`` of `Microbatch`; empty for rows.

    ``sample_counts``: how many samples the batch has ids for.
    """
    given = {key: batch[key] for key in _KEYS if batch.get(key) is not None}
    if not given:
        return {}
    if set(given) not in _FORMS:
        forms = " or ".join(" with ".join(sorted(form)) for form in _FORMS)
        raise DataError(
            f"the batch has the offsets {' and '.join(given)}, and which are real and which padded "
            f"is unknown; expected exactly one of these: {forms}"
        )
    rows = [_rows(key, offsets, mask) for key, offsets in given.items()]
    real, places = rows[0], rows[-1]
    if "cu_seqlens" in given and not any(sample_counts) and not real.any():
        return {"cu_seqlens": real[0, :1]}  # a dummy pack, whose place is no sample's
    counts = batch.get("token_count")
    if len(places) == 1 and places.shape[1] - 1 in sample_counts:
        surplus = [0]
    else:
        # An empty last sample repeats the last real offset, as fill does; its place does not.
        surplus = [_repeated(row) for row in places]
        if counts is not None and "cu_seqlens_q" in given and given["cu_seqlens_q"].dim() == 2:
            # Packs of Megatron-Bridge's data sets: what begins where their tokens end is padding.
            beyond = [int((row > n).sum()) for row, n in zip(places, counts, strict=True)]
            surplus = [max(pair) for pair in zip(surplus, beyond, strict=True)]
    found = [_joined(key, x, surplus, mask) for key, x in zip(given, rows, strict=True)]
    return dict(zip(("cu_seqlens", "cu_seqlens_padded"), found, strict=False))


def _rows(key: str, offsets: Any, mask: Tensor) -> Tensor:
    """[packs, samples + 1]; a vector is one pack, or several that are joined already."""
    packs = mask.shape[0] if mask.dim() == 2 else 1
    if isinstance(offsets, Tensor) and offsets.dim() == 1:
        return offsets.unsqueeze(0)
    if isinstance(offsets, Tensor) and offsets.dim() == 2 and offsets.shape[0] == packs:
        return offsets
    raise DataError(
        f"batch key {key!r} is {described(offsets)} beside a loss_mask of shape "
        f"{tuple(mask.shape)}; expected [samples + 1], or one such row for each row of the mask"
    )


def _repeated(places: Tensor) -> int:
    """How many offsets at the end of a row are fill: they repeat the one before them."""
    _, run_lengths = places.unique_consecutive(return_counts=True)
    return int(run_lengths[-1:].sum()) - 1


def _joined(key: str, rows: Tensor, surplus: Sequence[int], mask: Tensor) -> Tensor:
    """Offsets [samples + 1] of one pack, from rows without the ``surplus`` at their ends."""
    packs = [row[: row.numel() - n] for row, n in zip(rows, surplus, strict=True)]
    if len(packs) == 1:
        return packs[0]
    length = mask.shape[1]
    if any(int(pack[-1]) != length for pack in packs):
        raise DataError(
            f"batch key {key!r} does not end at the length {length} of every pack, and several "
            "packs are joined to one; expected the last sample to reach to the pack's end"
        )
    return torch.cat([packs[0][:1], *(pack[1:] + i * length for i, pack in enumerate(packs))])
