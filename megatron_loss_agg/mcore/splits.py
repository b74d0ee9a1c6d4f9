"""How a script splits sequences over context-parallel ranks, recognised by the model's inputs.

Weights for another split than the script's land on the wrong tokens, often with the right sum. So
none is assumed: fingerprints of this rank's part under each split are compared with those of what
the script passes to the model, until one is left.

Rows need no split: all tokens of a row have one coefficient. Packs need to know how many tokens of
each sample are on this rank. What is known by token (weights of custom functions, factors, masks of
MTP) needs to know where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import all_gather
from megatron_loss_agg.cp_layout import CPLayout
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.mcore.reading.fingerprints import (
    Fingerprints,
    IdFingerprints,
    counts_up,
    fingerprint,
)
from megatron_loss_agg.microbatch import Microbatch


class MicrobatchShape(NamedTuple):
    """Where the samples of a whole microbatch lie, before context parallelism."""

    mask: tuple[int, ...]
    starts: Tensor | None  # int64 [samples + 1], offsets in the (padded) pack; None: rows

    @classmethod
    def of(cls, microbatch: Microbatch) -> MicrobatchShape:
        starts = microbatch.sample_starts
        starts = None if starts is None else starts.long()
        return cls(tuple(microbatch.loss_mask.shape), starts)

    @property
    def samples(self) -> int:
        return self.mask[0] if self.starts is None else len(self.starts) - 1


_BY_SEQUENCE = "zigzag inside every sequence"
_SPLITS: Mapping[bool, Mapping[str, Callable[[Any, int, int], CPLayout]]] = {
    False: {"zigzag": CPLayout.bshd, "contiguous": CPLayout.contiguous},
    True: {  # of packs
        _BY_SEQUENCE: CPLayout.thd,
        "zigzag over the whole pack": CPLayout.bshd,
        "contiguous": CPLayout.contiguous,
    },
}


class Splits:
    """The splits that a script may use, for rows and for packs: fewer with every microbatch."""

    def __init__(self) -> None:
        self._left = {packed: [*splits] for packed, splits in _SPLITS.items()}

    def recognised(self, packed: bool) -> str | None:
        """The only split that is left for packs, or for rows; None if there are several."""
        left = self._left[packed]
        return left[0] if len(left) == 1 else None

    def is_open(self, shape: MicrobatchShape, size: int, by_token: bool) -> bool:
        """Whether it matters how it is split over ``size`` ranks, and is not known."""
        packed = shape.starts is not None
        matters = by_token or (packed and shape.samples > 1)
        return size > 1 and matters and self.recognised(packed) is None

    def layouts(self, shape: MicrobatchShape, size: int, rank: int) -> dict[str, CPLayout]:
        """Where this rank's tokens are, under each split that is left and fits; DataError."""
        packed, found, errors = shape.starts is not None, {}, []
        length = shape.mask[-1]
        for name in self._left[packed]:
            whole: int | Tensor = length
            if shape.starts is not None and name == _BY_SEQUENCE:
                # Padding after the last sample is split like a sequence of its own.
                whole = torch.cat([shape.starts, shape.starts.new_tensor([length])])
            try:
                found[name] = _SPLITS[packed][name](whole, size, rank)
            except DataError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        return found

    def fingerprints(
        self, microbatch: Microbatch, shape: MicrobatchShape, size: int, rank: int, by_token: bool
    ) -> Fingerprints:
        """Fingerprints of a microbatch's tokens and mask; waits for a device that holds them."""
        layouts: dict[str, CPLayout] = {}
        if self.is_open(shape, size, by_token):
            with contextlib.suppress(DataError):  # raised where the split is needed
                layouts = self.layouts(shape, size, rank)

        def by_split(x: Tensor) -> dict[str, float]:
            return {name: float(fingerprint(y.shard(x), True)) for name, y in layouts.items()}

        def of_ids(x: Tensor) -> IdFingerprints:
            tells = x.numel() > 0 and bool((x != x.reshape(-1)[:1]).any())
            return IdFingerprints(float(fingerprint(x)), tells, by_split(x))

        telling = [x for x in microbatch.token_ids if not bool(counts_up(x))]
        return Fingerprints(
            tuple(map(of_ids, telling)), by_split(microbatch.loss_mask.detach() != 0)
        )

    def narrow(
        self,
        shape: MicrobatchShape,
        fingerprints: Fingerprints,
        inputs: Sequence[Tensor],
        mask: Tensor,
        cp: dist.ProcessGroup,
    ) -> None:
        """Keep the splits under which the script passes on each rank's part of a microbatch.

        Waits for the device, until one split is left. All ranks of ``cp`` must call, and all of
        them raise DataError if none is left. ``inputs``: the integer tensors that the model was
        called with; ``mask``: the loss function's.
        """
        packed = shape.starts is not None
        if self.recognised(packed):
            return
        possible = self._left[packed]
        # There are none where the microbatch has one coefficient, or no split fits its length.
        left = (
            self._fitting(possible, fingerprints, inputs, mask) if fingerprints.mask else possible
        )
        fits = all_gather(torch.tensor([float(name in left) for name in possible]), cp).all(dim=0)
        if not fits.any():
            raise DataError(
                "none of the integer tensors that the model is called with is this rank's part of "
                f"the batch's under any of the splits {possible}, which fit so far, on every "
                "context-parallel rank; expected one of these splits, or "
                "Microbatch(token_ids=...) with the whole labels or tokens of the call"
            )
        self._left[packed] = [name for name, fit in zip(possible, fits, strict=True) if fit]

    def _fitting(
        self,
        possible: Sequence[str],
        fingerprints: Fingerprints,
        inputs: Sequence[Tensor],
        mask: Tensor,
    ) -> list[str]:
        """The splits of which these are this rank's part, as far as they tell."""
        left = [name for name in possible if name in fingerprints.mask]
        given = [x for x in inputs if x.numel() == mask.numel() and not bool(counts_up(x))]
        seen = [float(fingerprint(x, True)) for x in given]
        by_mask = float(fingerprint(mask.detach() != 0, True))
        left, matched = [s for s in left if fingerprints.mask[s] == by_mask] or left, False
        for ids in fingerprints.ids:
            fit = [split for split in left if ids.by_split[split] in seen]
            matched, left = matched or bool(fit), fit or left
        return left if matched or not seen or not fingerprints.ids else []


def only(by_split: Mapping[str, Tensor]) -> Tensor:
    """What all splits that fit agree on; DataError if they do not."""
    first, *others = by_split.values()
    if all(torch.equal(first, other) for other in others):
        return first
    raise DataError(
        f"this rank's mask and tokens fit the splits {[*by_split]} alike, which give different "
        "weights; expected tensors that tell tokens apart: give Microbatch(token_ids=...), the "
        "whole labels or tokens that the model is called with"
    )
