"""Counts a step over all ranks, in two collectives.

The first gathers a record of fixed size from every rank, so that ranks that failed, or that differ,
are found without a rank that waits for ever. The second gathers every rank's samples; each rank
then computes the same denominators from the same table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import collectives
from megatron_loss_agg.aggregation import BY_ID, LossAggregation, Unit
from megatron_loss_agg.coefficients import StepCoefficients
from megatron_loss_agg.collectives import (
    Header,
    abandon_records,
    all_gather,
    gather_records,
    rank_in,
    tag_of,
)
from megatron_loss_agg.counting.samples import Samples
from megatron_loss_agg.counting.table import StepCounts, Table
from megatron_loss_agg.errors import GroupError, ModeError, StepError

TERMS_CAPACITY = 8
"""Number of terms whose records fit in the first collective."""


class Record(NamedTuple):
    """What one rank says of one term, in the first collective."""

    rows: float
    owner: float  # of the samples, see `LocalTerm`
    units: float  # a bit for each of `BY_ID` that has ids here and is used
    microbatches: float
    routed_microbatches: float  # that say their routed tokens
    active_tokens: float  # NaN where masks are unknown, as are the positions
    positions: float
    unequal: float


class LocalTerm:
    """One term of the loss on this rank.

    Where ranks hold parts of the same samples, the first of them owns the samples: it alone counts
    the microbatches, and its rank is part of their ids.

    Attributes:
        owner: rank of the owner; -1 where samples are whole.
        units: of `BY_ID`, whose groups are needed.

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
            raise GroupError(
                "some samples are rejected, and the aggregation does not say whether they count; "
                "expected LossAggregation(rejected='count') or rejected='skip'"
            )
        if agg.sample_weights is None and samples.weights_S is not None:
            raise GroupError(
                "samples have weights, and the aggregation does not say whether they count; "
                "expected LossAggregation(sample_weights='count') or sample_weights='skip'"
            )
        self.agg, self.samples, self.group_by = agg, samples, group_by
        self.owner, self._rank = -1, dist.get_rank() if dist.is_initialized() else 0
        if sharded_over is not None:
            self.owner = min(dist.get_process_group_ranks(sharded_over))
        used = {agg.within, agg.across, *group_by}
        self.units = [u for u in BY_ID if u in used or (agg.mode == "custom" and u in samples.ids)]
        for unit in self.units:
            if unit not in samples.ids:
                what = "a report" if unit in group_by else f"mode {agg.mode!r}"
                raise GroupError(
                    f"{what} groups by {unit} and a microbatch has no {unit}_ids; "
                    f"give {unit}_ids=, one for each sample"
                )

    def record(self) -> Record:
        samples, positions = self.samples, self.samples.positions
        counts_microbatches = self.owner in (-1, self._rank)
        # Routed tokens are those of all ranks that share the samples, elements of masks are not.
        counts_positions = counts_microbatches or not samples.routed_microbatches
        return Record(
            rows=samples.sums_S.numel(),
            owner=self.owner,
            units=sum(1 << BY_ID.index(unit) for unit in self.units),
            microbatches=len(samples.sizes) * counts_microbatches,
            routed_microbatches=samples.routed_microbatches * counts_microbatches,
            active_tokens=math.nan if positions is None else sum(samples.active_tokens),
            positions=math.nan if positions is None else sum(positions) * counts_positions,
            unequal=len({*(positions or ())}) > 1,
        )

    def columns(self, units: Sequence[Unit]) -> Tensor:
        """int64 [3 + units, rows], as `Table` takes them."""
        samples = self.samples
        number = samples.sums_S.numel()
        weight_S, rejected_S = samples.weights_S, samples.rejected_S
        # Ordinals of this rank's microbatches and samples, apart from those of other owners.
        first = (self._rank if self.owner < 0 else self.owner) << 32
        sizes = torch.tensor(samples.sizes, dtype=torch.int64)
        ids = {
            **samples.ids,
            "sample": torch.arange(number) + first,
            "microbatch": torch.arange(len(sizes)).repeat_interleave(sizes) + first,
        }
        return torch.stack(
            [
                samples.sums_S.view(torch.int64),
                (torch.ones(number).double() if weight_S is None else weight_S).view(torch.int64),
                torch.zeros(number).long() if rejected_S is None else rejected_S.long(),
                *(ids[unit] for unit in units),
            ]
        )


def count_step(
    terms: Mapping[str, LocalTerm], group: dist.ProcessGroup | None
) -> list[StepCoefficients]:
    """Count every term over ``group``.

    Two collectives for up to `TERMS_CAPACITY` terms, three for more.

    Raises:
        PeerError: another rank called `abandon`.
        ModeError: ranks have different terms.
        StepError: some microbatches have routed tokens, and others have none.
        GroupError: ranks that share samples have different numbers of them.
        MaskError: coefficients that fp32 does not hold.
    """
    local = list(terms.values())
    records = [term.record() for term in local]
    rows = gather_records(
        torch.tensor(records, dtype=torch.float64).view(len(local), -1),
        TERMS_CAPACITY,
        group,
        tag=tag_of((name, *_defining(term)) for name, term in terms.items()),
        failure="bad microbatches on rank(s) {} of the data-parallel group",
        difference=_different_terms,
    )
    by_term = [[Record(*row) for row in of_term] for of_term in rows.transpose(0, 1).tolist()]
    for of_ranks in by_term:
        _check_sharded_samples(of_ranks)
    units = [_common_units(term, of_ranks) for term, of_ranks in zip(local, by_term, strict=True)]
    mine = [term.columns(of_term) for term, of_term in zip(local, units, strict=True)]
    whole = _gathered(mine, by_term, group)
    first = [sum(int(r.rows) for r in of_ranks[: rank_in(group)]) for of_ranks in by_term]
    parts = zip(local, by_term, units, whole, first, strict=True)
    return [_counted(*of_term) for of_term in parts]


def _common_units(term: LocalTerm, of_ranks: Sequence[Record]) -> list[Unit]:
    """The units of a term's table: those that every rank has ids for."""
    by_id = [u for k, u in enumerate(BY_ID) if all(int(r.units) >> k & 1 for r in of_ranks)]
    shared: list[Unit] = ["sample"] if term.owner >= 0 else []
    return ["microbatch", *shared, *by_id]


def _gathered(
    mine: Sequence[Tensor], by_term: Sequence[Sequence[Record]], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """The columns of every term's table, of all ranks in their order."""
    sizes = [
        [len(columns) * int(of_rank.rows) for columns, of_rank in zip(mine, of_all, strict=True)]
        for of_all in zip(*by_term, strict=True)
    ]
    payload = torch.zeros(max(map(sum, sizes)), dtype=torch.int64)
    flat = torch.cat([columns.reshape(-1) for columns in mine])
    payload[: flat.numel()] = flat
    rows = all_gather(payload, group) if payload.numel() else payload.expand(len(sizes), 0)
    by_rank = [row[: sum(of_rank)].split(of_rank) for row, of_rank in zip(rows, sizes, strict=True)]
    return [
        torch.cat([part.view(len(columns), -1) for part in of_ranks], dim=1)
        for columns, of_ranks in zip(mine, zip(*by_rank, strict=True), strict=True)
    ]


def _counted(
    term: LocalTerm, of_ranks: Sequence[Record], units: list[Unit], columns: Tensor, first: int
) -> StepCoefficients:
    """What all ranks' ``columns`` say; this rank's rows in them begin with ``first``."""
    total = Record(*map(math.fsum, zip(*of_ranks, strict=True)))
    table = Table(term.agg, columns, units, round(total.microbatches))
    samples, across = term.samples, table.across()
    own = slice(first, first + samples.sums_S.numel())
    groups = {unit: table.counted_groups(unit) for unit in units if unit in BY_ID}
    numbers = {unit: groups[unit][0].numel() if unit in groups else None for unit in BY_ID}
    counts = StepCounts(
        tokens=table.tokens,
        kept_tokens=table.kept_tokens,
        all_tokens=table.all_tokens,
        active_tokens=None if math.isnan(total.active_tokens) else round(total.active_tokens),
        routed_tokens=_routed_tokens(total),
        microbatches=round(total.microbatches),
        samples=table.counted_groups("sample")[0].numel(),
        rollouts=numbers["rollout"],
        prompts=numbers["prompt"],
        datasets=numbers["dataset"],
        across=across,
        positions=None if math.isnan(total.positions) else round(total.positions),
        unequal=total.unequal > 0,
    )
    return StepCoefficients(
        counts=counts,
        sizes=samples.sizes,
        # Copies, since these are parts of all ranks' samples.
        coefficient_S=table.coefficients(across)[own].clone(),
        mask_sum_S=samples.sums_S,
        sums_by_unit={u: table.group_sums(u)[own].clone() for u in ("step", "sample", *units)},
        groups_by_unit=groups,
    )


def abandon(group: dist.ProcessGroup | None) -> None:
    """Call instead of `count_step` on a rank that failed: the others raise PeerError."""
    abandon_records(TERMS_CAPACITY, len(Record._fields), group)


def abandoning_on_error(group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    """Call `abandon` if the body fails."""
    return collectives.abandoning_on_error(TERMS_CAPACITY, len(Record._fields), group)


def _defining(term: LocalTerm) -> tuple[object, ...]:
    """What must be the same on every rank."""
    agg = term.agg
    options = agg.empty, agg.rejected, agg.sample_weights
    return agg.mode, agg.within, agg.across, agg.scale, *options, term.group_by, term.owner >= 0


def _different_terms(headers: Sequence[Header]) -> ModeError:
    numbers = sorted({round(header.records) for header in headers})
    if len(numbers) > 1:
        return ModeError(f"ranks have {numbers} terms; expected the same number on every rank")
    return ModeError(
        "ranks have different aggregations, or terms in another order, or sharded masks on some "
        "of them alone; expected the same on every rank"
    )


def _check_sharded_samples(of_ranks: Sequence[Record]) -> None:
    """Raise GroupError on every rank if ranks with the same owner differ in number of samples."""
    held: dict[float, float] = {}
    for record in of_ranks:
        owner, number = record.owner, record.rows
        if owner >= 0 and held.setdefault(owner, number) != number:
            raise GroupError(
                f"ranks that share samples have {held[owner]:.0f} and {number:.0f} of them; "
                "expected parts of the same samples on every rank of sharded_over"
            )


def _routed_tokens(total: Record) -> int | None:
    """Of the step; raises StepError, on every rank alike, if only some microbatches say it."""
    if not total.routed_microbatches:
        return None
    if total.routed_microbatches != total.microbatches:
        raise StepError(
            f"{total.routed_microbatches:.0f} of a step's {total.microbatches:.0f} microbatches "
            "have routed_tokens; expected all of them, or none: give each Microbatch its own"
        )
    return round(total.positions)
