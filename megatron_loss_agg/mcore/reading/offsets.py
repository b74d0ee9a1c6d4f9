"""Where the samples of a packed batch lie, under the names that data loaders give their offsets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.errors import GroupError


class _Names(NamedTuple):
    """The keys of the samples' real offsets, and of those of their padded places."""

    real: str
    padded: str


_MEGATRON = _Names("cu_seqlens", "cu_seqlens_padded")
_BRIDGE = _Names("cu_seqlens_q", "cu_seqlens_q_padded")
_FORMS: Mapping[frozenset[str], _Names] = {
    frozenset({_MEGATRON.real}): _MEGATRON,
    frozenset({_MEGATRON.padded}): _MEGATRON,
    frozenset(_MEGATRON): _MEGATRON,
    frozenset({_BRIDGE.real}): _BRIDGE,
    frozenset(_BRIDGE): _BRIDGE,
}
# Of Megatron-Bridge before 0.6, whose ``cu_seqlens`` mean something else, are the last two.
_KEYS = (*_MEGATRON, *_BRIDGE, "cu_seqlens_unpadded", "cu_seqlens_argmin")


def pack_offsets(
    batch: Mapping[str, Any], mask: Tensor, sample_counts: Collection[int]
) -> dict[str, Tensor]:
    """``cu_seqlens`` and ``cu_seqlens_padded`` of `Microbatch`; empty for rows.

    Args:
        mask: the batch's; several packs are joined.
        sample_counts: how many samples the batch has ids for.

    Raises:
        GroupError: the keys are no known form, or their values contradict each other.
    """
    given = {key: batch[key] for key in _KEYS if batch.get(key) is not None}
    if not given:
        return {}
    names = _FORMS.get(frozenset(given))
    if names is None:
        forms = " or ".join(" with ".join(sorted(form)) for form in _FORMS)
        raise GroupError(
            f"the batch has the offsets {' and '.join(given)}, and which are real and which padded "
            f"is unknown; expected exactly one of these: {forms}"
        )
    for key, offsets in given.items():
        if not isinstance(offsets, Tensor):
            raise GroupError(f"batch key {key!r} is a {type(offsets).__name__}; expected a tensor")
    places = given.get(names.padded)
    # Padded offsets first: reading the others needs padded ones of a valid shape.
    found = {
        key: _one_pack(key, given[key], places, mask, sample_counts, names is _MEGATRON)
        for key in (names.padded, names.real)
        if key in given
    }
    tokens = batch.get("token_count")
    if tokens is not None and names is _BRIDGE:
        found = _without_padding(found, tokens, mask, sample_counts)
    real, padded = found.get(names.real), found.get(names.padded)
    if real is None or padded is None or real.numel() == 1:
        return {"cu_seqlens": next(x for x in (real, padded) if x is not None)}
    return {"cu_seqlens": real, "cu_seqlens_padded": padded}


def _one_pack(
    key: str,
    offsets: Tensor,
    padded: Tensor | None,
    mask: Tensor,
    sample_counts: Collection[int],
    dummies: bool,
) -> Tensor:
    """Offsets [samples + 1] of one joined pack, from [samples + 1] or [packs, samples + 1].

    Args:
        dummies: offsets that are all 0 mean that the pack has no sample.
    """
    places = offsets if padded is None or padded.dim() != offsets.dim() else padded
    if offsets.dim() == 1:
        if not offsets.numel() or offsets.numel() - 1 in sample_counts:
            return offsets
        # Unequal numbers are refused later, so nothing is cut off before.
        return offsets[: _num_offsets(places)] if places.shape == offsets.shape else offsets
    packs = mask.shape[0] if mask.dim() == 2 else 1
    if offsets.dim() != 2 or offsets.shape[0] != packs or offsets.shape[1] == 0:
        raise GroupError(
            f"batch key {key!r} has shape {tuple(offsets.shape)} beside a loss_mask of shape "
            f"{tuple(mask.shape)}; expected [samples + 1], or one such row for each row of the mask"
        )
    if packs == 1 and offsets.shape[1] - 1 in sample_counts:
        return offsets[0]
    rows = [
        row[: 1 if dummies and int(row[-1]) == 0 else _num_offsets(place)]
        for row, place in zip(offsets, places, strict=True)
    ]
    if packs > 1 and any(int(row[-1]) != mask.shape[1] for row in rows):
        raise GroupError(
            f"batch key {key!r} does not end at the length {mask.shape[1]} of every pack, and "
            "several packs are joined to one; expected the last sample to reach to the pack's end"
        )
    shifted = [row[1:] + i * mask.shape[-1] for i, row in enumerate(rows)]
    return torch.cat([rows[0][:1], *shifted])


def _num_offsets(place: Tensor) -> int:
    """Number of offsets in a row without the fill at its end, which repeats the last one.

    Args:
        place: the padded offsets, if there are any: an empty last sample repeats the last real
            offset, as fill does.
    """
    before = (place != place[-1]).nonzero()
    return int(before[-1]) + 2 if before.numel() else 1


def _without_padding(
    found: Mapping[str, Tensor], tokens: Any, mask: Tensor, sample_counts: Collection[int]
) -> dict[str, Tensor]:
    """``found`` without the sample that Megatron-Bridge adds at the end of a pack for its padding.

    Args:
        found: offsets by key, the samples' places first.
        tokens: the batch's ``token_count``, the length of each pack without that padding.
    """
    key, places = next(iter(found.items()))
    packs = mask.shape[0] if mask.dim() == 2 else 1
    counts = torch.as_tensor(tokens).flatten().tolist()
    if places.numel() - 1 in sample_counts or counts == [mask.shape[-1]] * packs:
        return dict(found)
    if len(counts) != 1 or packs != 1 or counts[0] not in (ends := places.tolist()):
        raise GroupError(
            f"batch key 'token_count' is {counts} beside a loss_mask of shape {tuple(mask.shape)} "
            f"and {key!r} {places.tolist()}; expected one pack, and the offset at which it ends"
        )
    number = len(ends) - ends[::-1].index(counts[0])
    return {name: offsets[:number] for name, offsets in found.items()}
