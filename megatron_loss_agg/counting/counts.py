"""Counts of a step: what one rank says of its samples, and what is true of all ranks.

Suffix: ``_S`` samples of all this rank's microbatches, in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, LossAggregation, Unit
from megatron_loss_agg.counting.samples import Samples
from megatron_loss_agg.counting.table import Part, Table
from megatron_loss_agg.errors import GroupError

UNITS: tuple[Unit, ...] = (*BY_ID, "sample", "microbatch")
"""Units whose groups can span ranks; the last two do only where masks are sharded."""
UNDECIDED = (
    "some samples are rejected, and the aggregation does not say whether rejected samples count; "
    "expected LossAggregation(rejected='count') or rejected='skip'"
)
UNWEIGHED = (
    "samples have weights, and the aggregation does not say whether they count; expected "
    "LossAggregation(sample_weights='count') or sample_weights='skip'"
)


class StepCounts(NamedTuple):
    """Counts over the whole optimizer step: all microbatches of all data-parallel ranks."""

    tokens: float  # sum of the masks that count
    kept_tokens: float  # without those of rejected samples
    all_tokens: float  # with them
    active_tokens: int | None  # positions with a nonzero mask; None where masks are unknown
    routed_tokens: int | None  # None: the microbatches do not say it
    microbatches: int
    samples: int
    rollouts: int | None  # None: the mode does not use them, or some rank has no ids
    prompts: int | None
    datasets: int | None
    across: float  # N_across or V_across; 1 without an outer mean
    positions: int | None  # routed tokens, or elements of masks; None where masks are unknown
    unequal: bool  # whether the positions of some rank's microbatches differ


class Record(NamedTuple):
    """What one rank says of one term, or the sum over ranks."""

    tokens: float
    kept_tokens: float
    all_tokens: float
    weighted_tokens: float  # sum of v_s M_s
    active_tokens: float  # NaN where masks are unknown, as are the positions
    positions: float
    unequal: float
    routed_microbatches: float  # that say their routed tokens
    microbatches: float
    samples: float
    across: float  # see `Part`; 0 where groups span ranks
    largest: float  # the largest over ranks counts
    largest_inverse: float
    rows: float
    owner: float  # of the samples, see `LocalTerm`
    units: float  # a bit for each of `UNITS` that has ids here and is used

    @classmethod
    def of_step(cls, of_ranks: Sequence[Record]) -> Record:
        total = cls(*map(math.fsum, zip(*of_ranks, strict=True)))
        return total._replace(
            largest=max(x.largest for x in of_ranks),
            largest_inverse=max(x.largest_inverse for x in of_ranks),
        )


class LocalTerm:
    """One term of the loss on this rank.

    Where ranks hold parts of the same samples, the first of them owns the samples: it alone counts
    them, and its rank is part of their ids.

    Attributes:
        owner: rank of the owner; -1 where samples are whole.
        units: whose groups can span ranks.
        table: of this rank's samples.

    Raises:
        GroupError: missing ids; or rejected samples or sample weights, about which the aggregation
            does not say whether they count.
    """

    def __init__(
        self,
        agg: LossAggregation,
        samples: Samples,
        sharded_over: dist.ProcessGroup | None,
        group_by: tuple[Unit, ...] = (),
    ) -> None:
        if agg.rejected is None and samples.rejected_S is not None:
            raise GroupError(UNDECIDED)
        if agg.sample_weights is None and samples.weights_S is not None:
            raise GroupError(UNWEIGHED)
        self.agg, self.samples, self.group_by = agg, samples, group_by
        self.owner, self._rank = -1, dist.get_rank() if dist.is_initialized() else 0
        if sharded_over is not None:
            self.owner = min(dist.get_process_group_ranks(sharded_over))
        ids = self._ids()
        used = {agg.within, agg.across, *group_by}
        possible = BY_ID if self.owner < 0 else UNITS
        self.units = [u for u in possible if u in used or (agg.mode == "custom" and u in ids)]
        for unit in self.units:
            if unit not in ids:
                what = "a report" if unit in group_by else f"mode {agg.mode!r}"
                raise GroupError(
                    f"{what} groups by {unit} and a microbatch has no {unit}_ids; "
                    f"give {unit}_ids=, one for each sample"
                )
        rejected_S, weights_S = samples.rejected_S, samples.weights_S
        self.table = Table(
            agg,
            samples.sums_S,
            torch.ones_like(samples.sums_S) if weights_S is None else weights_S,
            (samples.sums_S < 0) if rejected_S is None else rejected_S,
            ids,
        )

    def record(self) -> Record:
        samples, table = self.samples, self.table
        counts_samples = self.owner in (-1, self._rank)
        positions = samples.positions
        # Routed tokens are those of all ranks that share the samples, elements of masks are not.
        counts_positions = counts_samples or not samples.routed_microbatches
        part = Part(0.0, 0.0, 0.0) if self.units else table.part(len(samples.sizes))
        return Record(
            tokens=float(table.mask_S.sum()),
            kept_tokens=float(samples.sums_S.masked_fill(table.rejected_S, 0.0).sum()),
            all_tokens=float(samples.sums_S.sum()),
            weighted_tokens=float((table.weight_S * table.mask_S).sum()),
            active_tokens=math.nan if positions is None else sum(samples.active_tokens),
            positions=math.nan if positions is None else sum(positions) * counts_positions,
            unequal=len({*(positions or ())}) > 1,
            routed_microbatches=samples.routed_microbatches * counts_samples,
            microbatches=len(samples.sizes) * counts_samples,
            samples=float(table.counted_S.sum()) * counts_samples,
            across=part.across,
            largest=part.largest,
            largest_inverse=part.largest_inverse,
            rows=samples.sums_S.numel(),
            owner=self.owner,
            units=sum(1 << UNITS.index(unit) for unit in self.units),
        )

    def _ids(self) -> dict[Unit, Tensor]:
        """Those given, and ordinals of microbatches and shared samples, apart from other ranks'."""
        first = (self._rank if self.owner < 0 else self.owner) << 32
        sizes = torch.tensor(self.samples.sizes, dtype=torch.int64)
        microbatch_S = torch.arange(len(sizes)).repeat_interleave(sizes)
        ids: dict[Unit, Tensor] = {**self.samples.ids, "microbatch": microbatch_S + first}
        if self.owner >= 0:
            ids["sample"] = torch.arange(len(microbatch_S)) + first
        return ids
