"""Counts of a step: on this rank, then over all ranks.

Suffix: ``_S`` samples of all this rank's microbatches, in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import collectives
from megatron_loss_agg.aggregation import LossAggregation, Unit
from megatron_loss_agg.collectives import (
    Header,
    abandon_records,
    all_gather,
    gather_records,
    tag_of,
)
from megatron_loss_agg.errors import GroupError, MaskError, ModeError, StepError
from megatron_loss_agg.samples import Samples

CROSS_RANK_UNITS: tuple[Unit, ...] = ("rollout", "prompt", "sample", "microbatch")
"""Units whose groups can span ranks; the last two do only where masks are sharded."""
TERMS_CAPACITY = 8
"""Number of terms whose counts fit in the first collective."""
UNDECIDED = (
    "some samples are rejected, and the aggregation does not say whether rejected samples count; "
    "expected LossAggregation(rejected='count') or rejected='skip'"
)


class GroupSums(NamedTuple):
    """Mask sums by group."""

    ids: Tensor  # int64 [groups], sorted and distinct
    sums: Tensor  # fp64 [groups]

    @classmethod
    def merge(cls, ids: Tensor, sums: Tensor) -> GroupSums:
        """Sum over equal ``ids``."""
        distinct, inverse = ids.unique(return_inverse=True)
        return cls(distinct, sums.new_zeros(distinct.numel()).index_add_(0, inverse, sums))

    def lookup(self, ids: Tensor) -> Tensor:
        """The sum of each of ``ids``; 0 for an unknown id."""
        padded = torch.cat([self.ids, self.ids.new_zeros(1)])
        place = torch.searchsorted(self.ids, ids)
        found = (place < self.ids.numel()) & (padded[place] == ids)
        return torch.cat([self.sums, self.sums.new_zeros(1)])[place].where(found, 0.0)


class Totals(NamedTuple):
    """One rank's totals for one term of the loss; each is summed over ranks."""

    tokens: float
    kept_tokens: float
    active_tokens: float  # NaN where masks are unknown
    microbatches: float
    active_microbatches: float
    samples: float
    active_samples: float
    routed_tokens: float
    routed_microbatches: float  # that say their routed tokens


_WIDTH = len(Totals._fields) + 2 + len(CROSS_RANK_UNITS)


@dataclass(frozen=True)
class StepCounts:
    """Counts over the whole optimizer step: all microbatches of all data-parallel ranks."""

    tokens: float  # sum of the masks
    kept_tokens: float  # without those of rejected samples
    active_tokens: int | None  # positions with a nonzero mask; None where masks are unknown
    routed_tokens: int | None  # None: the microbatches do not say it
    microbatches: int
    samples: int
    rollouts: int | None  # None: the mode does not use them, or some rank has no ids
    prompts: int | None
    nonempty: Mapping[Unit, int]  # number of groups with tokens

    def number(self, unit: Unit, empty: str) -> int:
        """Number of groups; without empty ones if ``empty`` is ``skip``."""
        if empty == "skip":
            return self.nonempty[unit]
        return int(getattr(self, "microbatches" if unit == "microbatch" else f"{unit}s"))


class LocalCounts:
    """This rank's counts of a step for one term of the loss.

    Raises:
        MaskError: mask sums that overflow fp32 weights.
        GroupError: missing ids, or rejected samples without `LossAggregation.rejected`.
    """

    def __init__(
        self, agg: LossAggregation, samples: Samples, sharded_over: dist.ProcessGroup | None
    ) -> None:
        if not isinstance(agg, LossAggregation):
            raise ModeError(f"a {type(agg).__name__} for agg; expected a LossAggregation")
        if agg.rejected is None and samples.rejected_S is not None:
            raise GroupError(UNDECIDED)
        self.agg = agg
        self.samples = samples
        self._counted_S: Tensor | None = None  # None: all of them
        self.sums_S = samples.sums_S
        if samples.rejected_S is not None and agg.rejected == "skip":
            self._counted_S = ~samples.rejected_S
            self.sums_S = self.sums_S.where(self._counted_S, 0.0)
        self._sizes = torch.tensor(samples.sizes, dtype=torch.int64)
        self._by_microbatch = torch.segment_reduce(
            self.sums_S, "sum", lengths=self._sizes, unsafe=True
        )
        _check_fits_fp32(agg, self.sums_S, self._by_microbatch)
        # Where ranks hold parts of the same samples, the first of them owns the samples: it alone
        # counts them, and its rank is part of their ids.
        self._owner: int | None = None
        if sharded_over is not None:
            self._owner = min(dist.get_process_group_ranks(sharded_over))
        # For every unit the distinct ids, and the index of each sample's id in them.
        self._ids = {
            unit: ids.unique(return_inverse=True)
            for unit in _cross_rank_units(agg, sharded_over is not None)
            if (ids := self._ids_of(unit)) is not None
        }
        self.groups = {unit: self._group_sums(*ids) for unit, ids in self._ids.items()}

    def record(self) -> list[float]:
        """What this rank sends: totals; owner and number of samples; number of groups by unit.

        -1 stands for no owner, and for a unit without ids.
        """
        numbers = [self.groups[u].ids.numel() if u in self.groups else -1 for u in CROSS_RANK_UNITS]
        owner = -1 if self._owner is None else self._owner
        return [*self._totals(), owner, self.sums_S.numel(), *numbers]

    def of_step(
        self, totals: Totals, groups: Mapping[Unit, GroupSums]
    ) -> tuple[StepCounts, dict[Unit, Tensor]]:
        """Counts of the whole step, and by unit the mask sum of each sample's group, fp64."""
        sums: dict[Unit, Tensor] = {
            "step": self.sums_S.new_tensor(totals.tokens).expand_as(self.sums_S),
            "microbatch": self._by_microbatch.repeat_interleave(self._sizes),
            "sample": self.sums_S,
        }
        nonempty: dict[Unit, int] = {
            "sample": round(totals.active_samples),
            "microbatch": round(totals.active_microbatches),
        }
        for unit, of_unit in groups.items():
            nonempty[unit] = int((of_unit.sums > 0).sum())
            distinct, inverse = self._ids[unit]
            sums[unit] = of_unit.lookup(distinct)[inverse]
        counts = StepCounts(
            tokens=totals.tokens,
            kept_tokens=totals.kept_tokens,
            active_tokens=None if math.isnan(totals.active_tokens) else round(totals.active_tokens),
            routed_tokens=_routed_tokens(totals),
            microbatches=round(totals.microbatches),
            samples=round(totals.samples),
            rollouts=groups["rollout"].ids.numel() if "rollout" in groups else None,
            prompts=groups["prompt"].ids.numel() if "prompt" in groups else None,
            nonempty=nonempty,
        )
        _check_normal_in_fp32(self.agg, counts)
        return counts, sums

    def _totals(self) -> Totals:
        counts_samples = self._owner is None or self._owner == dist.get_rank()
        kept_S, rejected_S = self.samples.sums_S, self.samples.rejected_S
        if rejected_S is not None:
            kept_S = kept_S.where(~rejected_S, 0.0)
        samples = self.sums_S.numel() if self._counted_S is None else int(self._counted_S.sum())
        active = self.samples.active_tokens
        return Totals(
            tokens=float(self.sums_S.sum()),
            kept_tokens=float(kept_S.sum()),
            active_tokens=math.nan if active is None else sum(active),
            microbatches=len(self._sizes) * counts_samples,
            active_microbatches=int((self._by_microbatch > 0).sum()) * counts_samples,
            samples=samples * counts_samples,
            active_samples=int((self.sums_S > 0).sum()) * counts_samples,
            routed_tokens=sum(self.samples.routed_tokens) * counts_samples,
            routed_microbatches=len(self.samples.routed_tokens) * counts_samples,
        )

    def _group_sums(self, distinct: Tensor, inverse: Tensor) -> GroupSums:
        """Mask sums of the groups that count."""
        sums = self.sums_S.new_zeros(distinct.numel()).index_add_(0, inverse, self.sums_S)
        if self._counted_S is None:
            return GroupSums(distinct, sums)
        counted = torch.zeros_like(distinct, dtype=torch.bool)
        counted[inverse[self._counted_S]] = True
        return GroupSums(distinct[counted], sums[counted])

    def _ids_of(self, unit: Unit) -> Tensor | None:
        """The id of each sample's group, comparable between ranks; None if there are none."""
        if unit in ("sample", "microbatch"):
            assert self._owner is not None
            ordinal = torch.arange(len(self.sums_S))
            if unit == "microbatch":
                ordinal = torch.arange(len(self._sizes)).repeat_interleave(self._sizes)
            return (self._owner << 32) + ordinal
        ids = self.samples.ids.get(unit)
        if ids is None and self.agg.mode != "custom":
            raise GroupError(
                f"mode {self.agg.mode!r} groups by {unit} and a microbatch has no {unit}_ids; "
                f"give {unit}_ids=, one for each sample"
            )
        return ids


def count_step(
    terms: Mapping[str, LocalCounts], group: dist.ProcessGroup | None
) -> list[tuple[StepCounts, dict[Unit, Tensor]]]:
    """Sum every term's counts over ``group``; see `LocalCounts.of_step`.

    At most two collectives for up to `TERMS_CAPACITY` terms, three for more.

    Raises:
        PeerError: another rank called `abandon`.
        ModeError: ranks have different terms.
        StepError: some microbatches have routed tokens, and others have none.
        GroupError: ranks that share samples have different numbers of them.
    """
    local = list(terms.values())
    records = gather_records(
        torch.tensor([counts.record() for counts in local], dtype=torch.float64),
        TERMS_CAPACITY,
        group,
        tag=tag_of(
            (name, agg.mode, agg.within, agg.across, agg.empty, agg.rejected, agg.scale)
            for name, agg in zip(terms, (counts.agg for counts in local), strict=True)
        ),
        failure="bad microbatches on rank(s) {} of the data-parallel group",
        difference=_different_terms,
    )
    width = len(Totals._fields)
    totals, shared, numbers = records.tensor_split([width, width + 2], dim=2)
    for of_ranks in shared.long().unbind(dim=1):
        _check_sharded_samples(of_ranks.tolist())
    # The groups of a unit are exchanged only if every rank has ids for it.
    exchanged = (numbers >= 0).all(dim=0)  # [terms, units]
    places = [(t, CROSS_RANK_UNITS[u]) for t, u in exchanged.nonzero().tolist()]
    mine = [local[t].groups[unit] for t, unit in places]
    merged = _exchange_groups(mine, numbers[:, exchanged].long().tolist(), group)
    groups: list[dict[Unit, GroupSums]] = [{} for _ in local]
    for (t, unit), sums in zip(places, merged, strict=True):
        groups[t][unit] = sums
    return [
        counts.of_step(Totals(*of_term), of_units)
        for counts, of_term, of_units in zip(local, totals.sum(dim=0).tolist(), groups, strict=True)
    ]


def abandon(group: dist.ProcessGroup | None) -> None:
    """Call instead of `count_step` on a rank that failed: the others raise PeerError."""
    abandon_records(TERMS_CAPACITY, _WIDTH, group)


def abandoning_on_error(group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    """Call `abandon` if the body fails."""
    return collectives.abandoning_on_error(TERMS_CAPACITY, _WIDTH, group)


def _exchange_groups(
    mine: list[GroupSums], numbers: list[list[int]], group: dist.ProcessGroup | None
) -> list[GroupSums]:
    """Merge each of ``mine`` with that of the other ranks, in one collective for all.

    Args:
        numbers: for every rank, the number of groups in each entry.
    """
    if len(numbers) == 1 or not any(map(sum, numbers)):
        return mine
    payload = packed_groups(mine, max(map(sum, numbers)))
    entries: list[list[GroupSums]] = [[] for _ in mine]
    for row, of_rank in zip(all_gather(payload, group), numbers, strict=True):
        # Each entry is its ids, then as many sums.
        parts = row[: 2 * sum(of_rank)].split([n for n in of_rank for _ in range(2)])
        for entry, ids, sums in zip(entries, parts[::2], parts[1::2], strict=True):
            entry.append(GroupSums(ids, sums.view(torch.float64)))
    return [
        GroupSums.merge(torch.cat([g.ids for g in entry]), torch.cat([g.sums for g in entry]))
        for entry in entries
    ]


def packed_groups(groups: Sequence[GroupSums], width: int) -> Tensor:
    """int64 [2 * width]: each entry's ids, then the bits of its sums; padded with zeros."""
    payload = torch.zeros(2 * width, dtype=torch.int64)
    flat = torch.cat([part for g in groups for part in (g.ids, g.sums.view(torch.int64))])
    payload[: flat.numel()] = flat
    return payload


def _cross_rank_units(agg: LossAggregation, sharded: bool) -> list[Unit]:
    """Units that ``agg`` uses and whose groups can span ranks, in a fixed order."""
    units = CROSS_RANK_UNITS if sharded else CROSS_RANK_UNITS[:2]
    return [unit for unit in units if agg.mode == "custom" or unit in (agg.within, agg.across)]


def _different_terms(headers: Sequence[Header]) -> ModeError:
    numbers = sorted({round(header.records) for header in headers})
    if len(numbers) > 1:
        return ModeError(f"ranks have {numbers} terms; expected the same number on every rank")
    return ModeError(
        "ranks have different aggregations, or terms in another order; expected the same on every "
        "rank"
    )


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


def _check_fits_fp32(agg: LossAggregation, sums_S: Tensor, by_microbatch: Tensor) -> None:
    """Raise MaskError if the masks' sums or their reciprocals overflow fp32."""
    largest = torch.finfo(torch.float32).max
    totals = by_microbatch * max(agg.scale, 1.0)
    large = (totals > largest).nonzero().view(-1).tolist()
    if large:
        over = "" if agg.divisor is None else f" over the divisor {float(agg.divisor):g}"
        raise MaskError(
            f"microbatch {large[0]}: loss_mask{over} sums to {float(totals[large[0]]):g}, beyond "
            f"fp32; expected smaller values{', or a larger divisor' if over else ''}"
        )
    small = sums_S[(sums_S > 0) & (sums_S < 1 / largest)].tolist()
    if small and agg.within is not None:
        raise MaskError(
            f"the loss_mask of a sample sums to {small[0]:g}, whose reciprocal overflows fp32; "
            "expected 0, or larger values"
        )


def _check_normal_in_fp32(agg: LossAggregation, counts: StepCounts) -> None:
    """Raise MaskError, on every rank alike, if fp32 would round coefficients or weights coarsely.

    Below its smallest normal number, fp32 has less than 24 bits. The least coefficient there can be
    is the bound, so that all ranks decide the same from the counts of the step.
    """
    across = 1 if agg.across is None else counts.number(agg.across, agg.empty)
    if not across or not counts.tokens:
        return
    least = agg.scale / across / (1.0 if agg.within is None else counts.tokens)
    weight = least
    if agg.within is None and counts.active_tokens:
        weight *= counts.tokens / counts.active_tokens  # on average
    if min(least, weight) < torch.finfo(torch.float32).tiny:
        over = "" if agg.divisor is None else f" over the divisor {float(agg.divisor):g}"
        raise MaskError(
            f"weights of a step of {counts.samples} samples, whose loss_mask{over} sums to "
            f"{counts.tokens * agg.scale:g}, can be {min(least, weight):g}, which fp32 rounds "
            f"coarsely; expected {'a smaller divisor' if over else 'smaller values'}"
        )


def _check_sharded_samples(rows: list[list[int]]) -> None:
    """Raise GroupError on every rank if ranks with the same owner differ in number of samples.

    Args:
        rows: for every rank, the owner of its samples (-1 for none) and their number.
    """
    samples: dict[int, int] = {}
    for owner, number in rows:
        if owner >= 0 and samples.setdefault(owner, number) != number:
            raise GroupError(
                f"ranks that share samples have {samples[owner]} and {number} of them; expected "
                "parts of the same samples on every rank of sharded_over"
            )
