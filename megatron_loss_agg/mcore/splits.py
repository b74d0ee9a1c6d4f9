"""Recognises how a script splits sequences over context-parallel ranks.

Loops on Megatron-Core split in several ways. Weights for another split than the script's land on
the wrong tokens, often with the right sum. So none is assumed: until a split is recognised, weights
are made for all that are possible, and those are taken that fit what the script passes to the loss
function and to the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import any_rank
from megatron_loss_agg.errors import AggregationError, LayoutError, PeerError, StepError
from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.mcore.gathers import Gathers
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.microbatch import Microbatch

WHOLE = "not split"


def _zigzag_of_sequences(pack: Microbatch, size: int, rank: int) -> CPLayout:
    starts, length = pack.sample_starts, pack.loss_mask.shape[-1]
    assert starts is not None
    if int(starts[-1]) < length:
        # Tokens after the last sample are padding, which is split like a sequence of its own.
        starts = torch.cat([starts, starts.new_tensor([length])])
    return CPLayout.thd(starts, size, rank)


def _zigzag(microbatch: Microbatch, size: int, rank: int) -> CPLayout:
    return _zigzag_of(microbatch.loss_mask.shape[-1], size, rank)


# A step's microbatches are often of one length.
_zigzag_of = functools.lru_cache(maxsize=4)(CPLayout.bshd)


def _contiguous(microbatch: Microbatch, size: int, rank: int) -> CPLayout:
    return CPLayout.contiguous(microbatch.loss_mask.shape[-1], size, rank)


_Split = Callable[[Microbatch, int, int], CPLayout]
_ROWS: Mapping[str, _Split] = {"zigzag": _zigzag, "contiguous": _contiguous}
_PACKS: Mapping[str, _Split] = {
    "zigzag inside every sequence": _zigzag_of_sequences,
    "zigzag over the whole pack": _zigzag,
    "contiguous": _contiguous,
}


class Splits:
    """The splits that a script may use, for rows and for packs: fewer with every microbatch.

    Attributes:
        gathers: of losses, where nothing is split.
    """

    def __init__(self) -> None:
        self._left: dict[bool, Sequence[str]] = {False: [*_ROWS], True: [*_PACKS]}  # by `packed`
        self.gathers = Gathers()

    def recognised(self, packed: bool) -> str | None:
        """The only split that is left for packs, or for rows; None if there are several."""
        left = self._left[packed]
        return left[0] if len(left) == 1 else None

    def left(self, packed: bool) -> Sequence[str]:
        """The splits that fit all microbatches so far."""
        return self._left[packed]

    def undecided(self, packed: bool, layouts: Mapping[str, CPLayout | None]) -> bool:
        """Whether it matters for a microbatch, and is not known, which of its layouts is right."""
        indices = [layout.index for layout in layouts.values() if layout is not None]
        if not indices or self.recognised(packed):
            return False
        impossible = len(indices) < len(self._left[packed])
        return impossible or not all(torch.equal(indices[0], other) for other in indices[1:])

    def layouts(self, microbatch: Microbatch, groups: ParallelGroups) -> dict[str, CPLayout | None]:
        """This rank's tokens of ``microbatch`` under each split that is possible for it.

        None instead of a layout: this rank holds the losses of all of them.

        Raises:
            LayoutError: none is possible, and losses are not of all tokens.
        """
        if groups.cp_size == 1 or self.gathers.all_tokens:
            return {WHOLE: None}
        found, error = self._possible(microbatch, groups)
        if self.gathers.all_tokens is None:
            return {WHOLE: None, **found}
        if error is not None:
            raise error
        return dict(found)

    def _possible(
        self, microbatch: Microbatch, groups: ParallelGroups
    ) -> tuple[dict[str, CPLayout], LayoutError | None]:
        """This rank's part under each split that is possible; or why none is."""
        packed = microbatch.cu_seqlens is not None
        splits = _PACKS if packed else _ROWS
        found: dict[str, CPLayout] = {}
        errors = []
        for name in self._left[packed]:
            try:
                found[name] = splits[name](microbatch, groups.cp_size, groups.cp_rank)
            except LayoutError as error:
                errors.append(error)
        return found, None if found else errors[0]

    def check(
        self, microbatches: Sequence[Microbatch], groups: ParallelGroups
    ) -> LayoutError | None:
        """The error of a microbatch for which no split is possible, if losses may be whole.

        One check for all; layouts are built only where it fails.

        Raises:
            LayoutError: that error, if losses are known not to be whole, or other pipeline stages
                would wait for this one.
        """
        size = groups.cp_size
        if size == 1 or self.gathers.all_tokens:
            return None
        lengths = torch.tensor([m.loss_mask.shape[-1] for m in microbatches])
        starts = [m.sample_starts for m in microbatches if m.sample_starts is not None]
        if not bool((torch.cat([lengths, *starts]) % (2 * size)).any()):
            return None
        errors = (self._possible(microbatch, groups)[1] for microbatch in microbatches)
        error = next((error for error in errors if error is not None), None)
        if error is not None and not self._may_be_whole(groups):
            raise error
        return error

    def shared(self, error: LayoutError | None, groups: ParallelGroups) -> AggregationError | None:
        """What `check` returned, or if nothing, an error for another data-parallel rank's."""
        waits = self._may_be_whole(groups) and any_rank(error is not None, groups.dp)
        if error is not None or not waits:
            return error
        return PeerError(
            "a microbatch of another data-parallel rank cannot be split over context-parallel "
            "ranks; expected it to: see the error of that rank"
        )

    def _may_be_whole(self, groups: ParallelGroups) -> bool:
        """Whether an error waits for the first losses, which no other pipeline stage may hear."""
        if groups.cp_size == 1 or self.gathers.all_tokens is not None:
            return False
        return dist.get_world_size(groups.pp) == 1

    def narrow(
        self, packed: bool, shards: Mapping[str, Sequence[Tensor]], given: Sequence[Tensor]
    ) -> None:
        """Keep the splits under which the script passes on this rank's part of the batch.

        Args:
            shards: for each split that fits the mask, this rank's part of the batch's token ids,
                the most telling first; one that fits no split is left out.
            given: the integer tensors that the model is called with.

        Raises:
            LayoutError: the script passes on none of the token ids, whatever the split.
        """
        # The step's earlier microbatches may have left fewer than when it was planned.
        fitting = [name for name in self._left[packed] if name in shards]
        flat = _telling(given)
        compared = matched = False
        for k, ids in enumerate(next(iter(shards.values()))):
            parts = [x.to(ids.dtype) for x in flat if x.numel() == ids.numel()]
            fit = [n for n in fitting if any(torch.equal(x, shards[n][k]) for x in parts)]
            compared, matched = compared or bool(parts), matched or bool(fit)
            fitting = fit or fitting
        if not fitting or (compared and not matched):
            raise LayoutError(
                "none of the integer tensors that the model is called with is this rank's part of "
                f"the batch's under any of the splits {self._left[packed]}, which fit so far; "
                "expected one of these splits, or Microbatch(token_ids=...) with the whole labels "
                "or tokens of the call"
            )
        self._left[packed] = fitting


def check_order(i: int, token_ids: Sequence[Sequence[Tensor]], given: Sequence[Tensor]) -> None:
    """Raise StepError if the model is called with another microbatch's tokens than those of ``i``.

    Args:
        token_ids: of each microbatch of the step; vectors.
        given: the integer tensors that the model is called with, if nothing is split.
    """
    # A dummy microbatch may hold one number alone, as a mask or kinds of tokens do.
    flat = [x for x in _telling(given) if bool((x != x[:1]).any())]

    def fits(j: int) -> bool:
        known = _telling(token_ids[j])
        return any(torch.equal(x, y.to(x.dtype)) for x in known for y in flat)

    if flat and not fits(i):
        others = [j for j in range(len(token_ids)) if fits(j)]
        if others:
            raise StepError(
                f"the model is called with the tokens of microbatch {others[0]} of the step in "
                f"place of {i}; expected the microbatches in the order in which the forward steps "
                "draw their batches: see read_step or hook.step"
            )


def _telling(given: Sequence[Tensor]) -> list[Tensor]:
    """Vectors on the CPU, without those that tell nothing."""
    return [x.reshape(-1).cpu() for x in given if not _counts_up(x)]


def _counts_up(x: Tensor) -> bool:
    """Whether these are positions that a script may have made itself, whatever its split."""
    return x.dim() > 0 and bool((x == torch.arange(x.shape[-1], device=x.device)).all())


def ambiguous(fitting: Sequence[str]) -> LayoutError:
    """The error for splits that fit alike, where they give other weights."""
    return LayoutError(
        f"this rank's mask and tokens fit the splits {list(fitting)} alike, which give different "
        "weights; expected tensors that tell tokens apart: give Microbatch(token_ids=...), the "
        "whole labels or tokens that the model is called with"
    )
