"""Counting a step: this rank's microbatches first, then everybody's.

Suffixes: ``_S`` samples of all this rank's microbatches, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Unit
from megatron_loss_agg.errors import GroupError, MaskError
from megatron_loss_agg.exchange import Groups, Totals, exchange_groups, exchange_totals
from megatron_loss_agg.gather import tag_of
from megatron_loss_agg.masks import MaskSums, on_cpu
from megatron_loss_agg.microbatch import Microbatch

_SHAREABLE: tuple[Unit, ...] = ("rollout", "prompt", "sample", "microbatch")
_IDS: dict[Unit, str] = {"rollout": "rollout_ids", "prompt": "prompt_ids"}
UNDECIDED = (
    "microbatches say which samples are rejected, and the aggregation not whether those count; "
    "expected LossAggregation(rejected='count') or 'skip' (--loss-aggregation-rejected)"
)


@dataclass(frozen=True)
class StepCounts:
    """Counts over the whole optimizer step: all microbatches of all data-parallel ranks."""

    tokens: float  # sum of the masks
    kept_tokens: float  # of samples that were not rejected
    active_tokens: int  # positions with a mask other than 0
    microbatches: int
    packed_microbatches: int  # those cut by cu_seqlens
    samples: int
    rollouts: int | None = None  # None: not needed by the mode, or some rank has no ids
    prompts: int | None = None


@dataclass(frozen=True)
class StepSums:
    """The step's counts, and for every unit the mask sum of the group that a sample is in."""

    counts: StepCounts
    active: dict[Unit, int]  # number of groups with tokens
    sums: dict[Unit, Tensor]  # fp64 [samples]
    rejected_S: Tensor | None  # bool [samples]

    def within(self, unit: Unit | None) -> Tensor:
        """fp64 [samples]: ``M_within`` of each; 1 without a unit."""
        return torch.ones_like(self.sums["sample"]) if unit is None else self.sums[unit]

    def number(self, unit: Unit, without_empty: bool) -> int:
        """Number of groups in the step."""
        if without_empty:
            return self.active[unit]
        number = getattr(self.counts, {"microbatch": "microbatches"}.get(unit, f"{unit}s"))
        return int(number)


class Tally:
    """This rank's counts of a step, for one term of its loss.

    Raises:
        MaskError, GroupError: its masks, offsets or ids are bad.
    """

    def __init__(
        self,
        agg: LossAggregation,
        microbatches: Sequence[Microbatch],
        masks: MaskSums,
        sharded_over: dist.ProcessGroup | None,
    ) -> None:
        self.agg = agg
        self.microbatches = microbatches
        if masks.error is not None:
            raise masks.error
        self.rejected_S = _rejected(microbatches)
        if agg.rejected is None and self.rejected_S is not None:
            raise GroupError(UNDECIDED)
        self._counted_S: Tensor | None = None  # all of them
        self.sums_S = masks.by_sample
        if self.rejected_S is not None and agg.rejected == "skip":
            self._counted_S = ~self.rejected_S
            self.sums_S = self.sums_S.where(self._counted_S, 0.0)
        self._sizes = torch.tensor([m.num_samples for m in microbatches], dtype=torch.int64)
        self._by_microbatch = torch.segment_reduce(
            self.sums_S, "sum", lengths=self._sizes, unsafe=True
        )
        _check_fits_fp32(agg, self.sums_S, self._by_microbatch)
        # Ranks that share samples are named by the first of them, and only that one counts them.
        self.owner: int | None = None
        if sharded_over is not None:
            self.owner = min(dist.get_process_group_ranks(sharded_over))
        # For every unit the distinct ids, and where each sample's is among them.
        self._ids: dict[Unit, tuple[Tensor, Tensor]] = {}
        for unit in _shared_units(agg, self.owner is not None):
            ids = self._ids_of(unit)
            if ids is not None:
                self._ids[unit] = ids.unique(return_inverse=True)
        self.groups = {unit: self._groups(*ids) for unit, ids in self._ids.items()}
        self.totals = self._totals(masks)

    @property
    def columns(self) -> list[int]:
        """What ranks tell each other: owner and number of samples, and sizes of groups."""
        sizes = [self.groups[u].ids.numel() if u in self.groups else -1 for u in _SHAREABLE]
        owner = -1 if self.owner is None else self.owner
        return [owner, self.sums_S.numel(), *sizes]

    def step(self, totals: Totals, shared: dict[Unit, Groups]) -> StepSums:
        """The sums of the whole step, out of everybody's totals and groups."""
        active: dict[Unit, int] = {
            "sample": totals.active_samples,
            "microbatch": totals.active_microbatches,
        }
        sums: dict[Unit, Tensor] = {
            "step": self.sums_S.new_tensor(totals.tokens).expand_as(self.sums_S),
            "microbatch": self._by_microbatch.repeat_interleave(self._sizes),
            "sample": self.sums_S,
        }
        number: dict[Unit, int] = {}
        for unit, groups in shared.items():
            number[unit] = groups.ids.numel()
            active[unit] = int((groups.sums > 0).sum())
            distinct, where = self._ids[unit]
            sums[unit] = groups.sums_of(distinct)[where]
        counts = StepCounts(
            tokens=totals.tokens,
            kept_tokens=totals.kept_tokens,
            active_tokens=totals.active_tokens,
            microbatches=totals.microbatches,
            packed_microbatches=totals.packed_microbatches,
            samples=totals.samples,
            rollouts=number.get("rollout"),
            prompts=number.get("prompt"),
        )
        return StepSums(counts, active, sums, self.rejected_S)

    def _totals(self, masks: MaskSums) -> Totals:
        counts_samples = self.owner is None or self.owner == dist.get_rank()
        tokens = float(self.sums_S.sum())
        kept_tokens = tokens
        if self.rejected_S is not None:
            kept_tokens = float(masks.by_sample.where(~self.rejected_S, 0.0).sum())
        samples = self.sums_S.numel() if self._counted_S is None else int(self._counted_S.sum())
        packed = sum(m.cu_seqlens is not None for m in self.microbatches)
        return Totals(
            tokens=tokens,
            kept_tokens=kept_tokens,
            active_tokens=masks.active_tokens,
            microbatches=len(self.microbatches) * counts_samples,
            packed_microbatches=packed * counts_samples,
            active_microbatches=int((self._by_microbatch > 0).sum()) * counts_samples,
            samples=samples * counts_samples,
            active_samples=int((self.sums_S > 0).sum()) * counts_samples,
        )

    def _groups(self, distinct: Tensor, where: Tensor) -> Groups:
        """Mask sums of the groups that are counted."""
        sums = self.sums_S.new_zeros(distinct.numel()).index_add_(0, where, self.sums_S)
        if self._counted_S is None:
            return Groups(distinct, sums)
        counted = torch.zeros_like(distinct, dtype=torch.bool)
        counted[where[self._counted_S]] = True
        return Groups(distinct[counted], sums[counted])

    def _ids_of(self, unit: Unit) -> Tensor | None:
        """Ids of each sample's group that mean the same on every rank; None if there are none."""
        if self.owner is not None and unit in ("sample", "microbatch"):
            ordinal = torch.arange(len(self.sums_S))
            if unit == "microbatch":
                ordinal = torch.arange(len(self._sizes)).repeat_interleave(self._sizes)
            return (self.owner << 32) + ordinal
        given = [getattr(microbatch, _IDS[unit]) for microbatch in self.microbatches]
        if not any(ids is None for ids in given):
            return on_cpu(given, torch.int64)
        if self.agg.mode != "custom":
            raise GroupError(
                f"mode {self.agg.mode!r} groups by {unit} and a microbatch has no {_IDS[unit]}; "
                f"give {_IDS[unit]}=, int64 [samples]"
            )
        return None


def exchange(tallies: Mapping[str, Tally], group: dist.ProcessGroup | None) -> list[StepSums]:
    """Add up every term's tally with the other ranks' of ``group``.

    In two collectives at most for up to `TERMS_A_ROW` terms, and three for any number.

    Raises:
        PeerError: another rank has no tallies, since its input is bad (see `abandon`).
        ModeError: the ranks have different terms.
    """
    of_terms = list(tallies.values())
    mine = [(tally.totals, tally.columns) for tally in of_terms]
    tag = tag_of((name, _fields(tally.agg)) for name, tally in tallies.items())
    answers = exchange_totals(mine, tag, group)
    units: list[tuple[int, Unit]] = []
    sizes: list[list[int]] = [[] for _ in answers[0][1]]
    for t, (_, rows) in enumerate(answers):
        _check_shared_samples(rows)
        for k, unit in enumerate(_SHAREABLE):
            if all(row[2 + k] >= 0 for row in rows):
                units.append((t, unit))
                for of_rank, row in zip(sizes, rows, strict=True):
                    of_rank.append(row[2 + k])
    merged = exchange_groups([of_terms[t].groups[unit] for t, unit in units], sizes, group)
    shared: list[dict[Unit, Groups]] = [{} for _ in of_terms]
    for (t, unit), groups in zip(units, merged, strict=True):
        shared[t][unit] = groups
    return [
        tally.step(totals, of_tally)
        for tally, (totals, _), of_tally in zip(of_terms, answers, shared, strict=True)
    ]


def _shared_units(agg: LossAggregation, sharded: bool) -> list[Unit]:
    """Units whose groups may lie on several ranks and which ``agg`` needs, in a fixed order."""
    shared = list(_SHAREABLE if sharded else _IDS)
    if agg.mode == "custom":
        return shared
    return [unit for unit in shared if unit in (agg.within, agg.across)]


def _fields(agg: LossAggregation) -> tuple[object, ...]:
    """What must be the same on every rank."""
    return agg.mode, agg.within, agg.across, agg.empty, agg.rejected, agg.scale


def _rejected(microbatches: Sequence[Microbatch]) -> Tensor | None:
    """bool [samples of all of them]; None where no microbatch tells."""
    if all(m.rejected is None for m in microbatches):
        return None
    flags = [
        torch.zeros(m.num_samples, dtype=torch.bool) if m.rejected is None else m.rejected
        for m in microbatches
    ]
    return on_cpu(flags, torch.bool)


def _check_fits_fp32(agg: LossAggregation, sums_S: Tensor, by_microbatch: Tensor) -> None:
    """Raise MaskError if weights in fp32 could not hold what the masks ask for."""
    greatest = torch.finfo(torch.float32).max
    totals = by_microbatch * max(agg.scale, 1.0)
    large = (totals > greatest).nonzero().view(-1).tolist()
    if large:
        over = "" if agg.divisor is None else f" over the divisor {float(agg.divisor):g}"
        raise MaskError(
            f"microbatch {large[0]}: loss_mask{over} sums to {float(totals[large[0]]):g}, beyond "
            f"fp32; expected smaller values{', or a larger divisor' if over else ''}"
        )
    small = sums_S[(sums_S > 0) & (sums_S < 1 / greatest)].tolist()
    if small and agg.within is not None:
        raise MaskError(
            f"the loss_mask of a sample sums to {small[0]:g}, whose inverse overflows fp32; "
            "expected 0, or larger values"
        )


def _check_shared_samples(rows: list[list[int]]) -> None:
    """Raise, on every rank alike, if ranks that share samples differ in their number.

    Args:
        rows: for every rank, the owner of its samples, and their number.
    """
    samples: dict[int, int] = {}
    for owner, number, *_ in rows:
        if owner >= 0 and samples.setdefault(owner, number) != number:
            raise GroupError(
                f"ranks that share samples have {samples[owner]} and {number} of them; expected "
                "the parts of the same samples on every rank of sharded_over"
            )
