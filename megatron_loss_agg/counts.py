"""Counts of a step, on this rank and over all.

Suffix: ``_S`` samples of all this rank's microbatches, in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, LossAggregation, Unit
from megatron_loss_agg.errors import GroupError, ModeError, StepError
from megatron_loss_agg.groups import GroupSums
from megatron_loss_agg.ranges import (
    active_samples,
    check_fits_fp32,
    check_normal_in_fp32,
    check_sample_weights,
)
from megatron_loss_agg.sample_weights import (
    Extremes,
    summed_columns,
    weight_of_step,
    weight_on_rank,
)
from megatron_loss_agg.samples import Samples, vector

CROSS_RANK_UNITS: tuple[Unit, ...] = (*BY_ID, "sample", "microbatch")
"""Units whose groups can span ranks; the last two do only where masks are sharded."""
UNDECIDED = (
    "some samples are rejected, and the aggregation does not say whether rejected samples count; "
    "expected LossAggregation(rejected='count') or rejected='skip'"
)
UNWEIGHED = (
    "samples have weights, and the aggregation does not say whether they count; expected "
    "LossAggregation(sample_weights='count') or sample_weights='skip'"
)


class Totals(NamedTuple):
    """One rank's totals for one term of the loss; each is summed over ranks."""

    tokens: float
    kept_tokens: float
    all_tokens: float
    active_tokens: float  # NaN where masks are unknown
    microbatches: float
    active_microbatches: float
    samples: float
    active_samples: float
    routed_tokens: float
    routed_microbatches: float  # that say their routed tokens
    weighted: float  # see `weight_on_rank`


class Record(NamedTuple):
    """What one rank says of one term."""

    totals: Totals
    extremes: Extremes
    owner: float  # of its samples; -1: itself alone
    held_samples: float
    groups: Mapping[Unit, float]  # number by unit of `CROSS_RANK_UNITS`; -1 without ids

    @classmethod
    def of(cls, row: Sequence[float]) -> Record:
        """The record whose `row` this is."""
        totals, rest = row[: len(Totals._fields)], row[len(Totals._fields) :]
        extremes, rest = rest[: len(Extremes._fields)], rest[len(Extremes._fields) :]
        owner, held_samples, *numbers = rest
        groups = dict(zip(CROSS_RANK_UNITS, numbers, strict=True))
        return cls(Totals(*totals), Extremes(*extremes), owner, held_samples, groups)

    def row(self) -> list[float]:
        """All `RECORD_WIDTH` numbers, joined."""
        return [*self.totals, *self.extremes, self.owner, self.held_samples, *self.groups.values()]


RECORD_WIDTH = len(Totals._fields) + len(Extremes._fields) + 2 + len(CROSS_RANK_UNITS)


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


class StepSums(NamedTuple):
    """What a plan is made from, besides this rank's samples."""

    counts: StepCounts
    by_sample: Mapping[Unit, Tensor]  # fp64 [samples]: its own mask sum, and those of its groups
    by_group: Mapping[Unit, GroupSums]  # of the units that were exchanged


class LocalCounts:
    """This rank's counts of a step for one term of the loss.

    Raises:
        MaskError: mask sums that overflow fp32 weights.
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
        if not isinstance(agg, LossAggregation):
            raise ModeError(f"a {type(agg).__name__} for agg; expected a LossAggregation")
        if agg.rejected is None and samples.rejected_S is not None:
            raise GroupError(UNDECIDED)
        if agg.sample_weights is None and samples.weights_S is not None:
            raise GroupError(UNWEIGHED)
        self.agg = agg
        self.group_by = group_by
        self.samples = samples
        self._counted_S: Tensor | None = None  # None: all of them
        self.sums_S, self._mask_totals = samples.sums_S, samples.mask_totals
        if samples.rejected_S is not None and agg.rejected == "skip":
            self._counted_S = ~samples.rejected_S
            self.sums_S = self.sums_S.where(self._counted_S, 0.0)
            self._mask_totals = torch.segment_reduce(
                self.sums_S, "sum", lengths=self._sizes, unsafe=True
            ).tolist()
        self._active_samples, least = active_samples(self.sums_S)
        check_fits_fp32(agg, least, self._mask_totals)
        # Where ranks hold parts of the same samples, the first of them owns the samples: it alone
        # counts them, and its rank is part of their ids.
        self._owner: int | None = None
        if sharded_over is not None:
            self._owner = min(dist.get_process_group_ranks(sharded_over))
        # For every unit the distinct ids, and the index of each sample's id in them.
        self._ids = {
            unit: ids.unique(return_inverse=True)
            for unit in self._cross_rank_units()
            if (ids := self._ids_of(unit)) is not None
        }
        self.groups = {unit: self._group_sums(*ids) for unit, ids in self._ids.items()}

    @property
    def zero_S(self) -> Tensor | None:
        """bool: samples of weight 0, which have no tokens or are rejected; None: there are none."""
        rejected_S = self.samples.rejected_S
        if self._active_samples == self.sums_S.numel():
            return rejected_S
        empty_S = self.sums_S == 0
        return empty_S if rejected_S is None else empty_S | rejected_S

    def record(self) -> Record:
        numbers = dict.fromkeys(CROSS_RANK_UNITS, -1.0)
        numbers |= {unit: groups.ids.numel() for unit, groups in self.groups.items()}
        owner = -1 if self._owner is None else self._owner
        extremes = Extremes.of(self.agg, self.sums_S, self.samples.weights_S)
        return Record(self._totals(), extremes, owner, self.sums_S.numel(), numbers)

    def of_step(
        self, totals: Totals, extremes: Extremes, groups: Mapping[Unit, GroupSums]
    ) -> StepSums:
        """Counts of the whole step, and the mask sum of each sample's group that can span ranks."""
        sums: dict[Unit, Tensor] = {"sample": self.sums_S}
        for unit, of_unit in groups.items():
            distinct, inverse = self._ids[unit]
            sums[unit] = of_unit.lookup(distinct)[inverse]
        numbers = {unit: of_unit.ids.numel() for unit, of_unit in groups.items()}
        numbers["sample"] = round(totals.samples)
        numbers["microbatch"] = round(totals.microbatches)
        counts = StepCounts(
            tokens=totals.tokens,
            kept_tokens=totals.kept_tokens,
            all_tokens=totals.all_tokens,
            active_tokens=None if math.isnan(totals.active_tokens) else round(totals.active_tokens),
            routed_tokens=_routed_tokens(totals),
            microbatches=numbers["microbatch"],
            samples=numbers["sample"],
            rollouts=numbers.get("rollout"),
            prompts=numbers.get("prompt"),
            datasets=numbers.get("dataset"),
            across=self._across(totals, groups, numbers),
        )
        least = 1.0 / (extremes.inverse_least or 1.0)
        check_normal_in_fp32(
            self.agg, counts.across, counts.tokens, counts.active_tokens, counts.samples, least
        )
        check_sample_weights(self.agg, counts.across, extremes.largest_factor)
        return StepSums(counts, sums, groups)

    def _across(
        self, totals: Totals, groups: Mapping[Unit, GroupSums], numbers: Mapping[Unit, int]
    ) -> float:
        """N_across, or V_across."""
        agg, unit = self.agg, self.agg.across
        if agg.weighted is not None:
            of_unit, microbatches = groups.get(agg.weighted), numbers["microbatch"]
            return weight_of_step(agg, totals.weighted, totals.tokens, of_unit, microbatches)
        if unit is None:
            return 1
        if agg.empty == "count":
            return numbers[unit]
        if unit in groups:
            return int((groups[unit].mask_sums > 0).sum())
        return round(totals.active_samples if unit == "sample" else totals.active_microbatches)

    def _totals(self) -> Totals:
        counts_samples = self._owner is None or self._owner == dist.get_rank()
        tokens = all_tokens = kept_tokens = math.fsum(self._mask_totals)
        if self.samples.rejected_S is not None:
            all_tokens = float(self.samples.sums_S.sum())
            kept_tokens = float(self.samples.sums_S.where(~self.samples.rejected_S, 0.0).sum())
        samples = self.sums_S.numel() if self._counted_S is None else int(self._counted_S.sum())
        active = self.samples.active_tokens
        weighted = 0.0
        if self.agg.weighted is not None and self.agg.weighted not in self.groups:
            weighted = weight_on_rank(self.agg, self._columns, self._sizes, self._counted_S)
        return Totals(
            tokens=tokens,
            kept_tokens=kept_tokens,
            all_tokens=all_tokens,
            active_tokens=math.nan if active is None else sum(active),
            microbatches=len(self.samples.sizes) * counts_samples,
            active_microbatches=sum(x > 0 for x in self._mask_totals) * counts_samples,
            samples=samples * counts_samples,
            active_samples=self._active_samples * counts_samples,
            routed_tokens=sum(self.samples.routed_tokens) * counts_samples,
            routed_microbatches=len(self.samples.routed_tokens) * counts_samples,
            weighted=weighted,
        )

    @cached_property
    def _sizes(self) -> Tensor:
        return torch.tensor(self.samples.sizes, dtype=torch.int64)

    @cached_property
    def _columns(self) -> Tensor:
        return summed_columns(self.agg, self.sums_S, self.samples.weights_S, self._counted_S)

    def _group_sums(self, distinct: Tensor, inverse: Tensor) -> GroupSums:
        """Mask sums of the groups that count."""
        sums = self._columns.new_zeros(distinct.numel(), self._columns.shape[1])
        sums.index_add_(0, inverse, self._columns)
        if self._counted_S is None:
            return GroupSums(distinct, sums)
        counted = torch.zeros_like(distinct, dtype=torch.bool)
        counted[inverse[self._counted_S]] = True
        return GroupSums(distinct[counted], sums[counted])

    def _cross_rank_units(self) -> list[Unit]:
        """Units that are used and whose groups can span ranks, in a fixed order."""
        agg = self.agg
        used = {agg.within, agg.across, *self.group_by}
        units = BY_ID if self._owner is None else CROSS_RANK_UNITS
        return [unit for unit in units if agg.mode == "custom" or unit in used]

    def _ids_of(self, unit: Unit) -> Tensor | None:
        """The id of each sample's group, comparable between ranks; None if there are none."""
        if unit in ("sample", "microbatch"):
            assert self._owner is not None
            ordinal = torch.arange(len(self.sums_S))
            if unit == "microbatch":
                ordinal = torch.arange(len(self._sizes)).repeat_interleave(self._sizes)
            return (self._owner << 32) + ordinal
        ids = self.samples.ids.get(unit)
        if ids is None and (self.agg.mode != "custom" or unit in self.group_by):
            what = "a report" if unit in self.group_by else f"mode {self.agg.mode!r}"
            raise GroupError(
                f"{what} groups by {unit} and a microbatch has no {unit}_ids; "
                f"give {unit}_ids=, one for each sample"
            )
        return None if ids is None else vector(ids, torch.int64)


def _routed_tokens(totals: Totals) -> int | None:
    """Of the step; raises StepError, on every rank alike, if only some microbatches say it."""
    if not totals.routed_microbatches:
        return None
    if totals.routed_microbatches != totals.microbatches:
        raise StepError(
            f"{totals.routed_microbatches:.0f} of a step's {totals.microbatches:.0f} microbatches "
            "have routed_tokens; expected all of them, or none: give each Microbatch its own"
        )
    return round(totals.routed_tokens)
