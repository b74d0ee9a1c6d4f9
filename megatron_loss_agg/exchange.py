"""Every rank's counts of a step, exchanged and added up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from megatron_loss_agg import collectives
from megatron_loss_agg.aggregation import LossAggregation, Unit
from megatron_loss_agg.collectives import Header, abandon_records, gather_records, tag_of
from megatron_loss_agg.counts import (
    CROSS_RANK_UNITS,
    RECORD_WIDTH,
    LocalCounts,
    Record,
    StepSums,
    Totals,
)
from megatron_loss_agg.errors import GroupError, ModeError
from megatron_loss_agg.groups import GroupSums, exchange_groups
from megatron_loss_agg.sample_weights import Extremes

TERMS_CAPACITY = 8
"""Number of terms whose counts fit in the first collective."""


def count_step(terms: Mapping[str, LocalCounts], group: dist.ProcessGroup | None) -> list[StepSums]:
    """Sum every term's counts over ``group``; see `LocalCounts.of_step`.

    At most two collectives for up to `TERMS_CAPACITY` terms, three for more.

    Raises:
        PeerError: another rank called `abandon`.
        ModeError: ranks have different terms.
        StepError: some microbatches have routed tokens, and others have none.
        GroupError: ranks that share samples have different numbers of them.
    """
    local = list(terms.values())
    by_rank = [[counts.record() for counts in local]]
    if collectives.ranks_of(group) > 1:
        rows = gather_records(
            torch.tensor([record.row() for record in by_rank[0]], dtype=torch.float64),
            TERMS_CAPACITY,
            group,
            tag=tag_of((name, *_defining(x.agg), x.group_by) for name, x in terms.items()),
            failure="bad microbatches on rank(s) {} of the data-parallel group",
            difference=_different_terms,
        )
        by_rank = [[*map(Record.of, of_rank)] for of_rank in rows.tolist()]
    by_term = [*zip(*by_rank, strict=True)]
    for of_ranks in by_term:
        _check_sharded_samples(of_ranks)
    groups = _groups_of_step(local, by_term, group)
    return [
        counts.of_step(
            Totals(*map(math.fsum, zip(*(r.totals for r in of_ranks), strict=True))),
            Extremes(*map(max, zip(*(r.extremes for r in of_ranks), strict=True))),
            of_term,
        )
        for counts, of_ranks, of_term in zip(local, by_term, groups, strict=True)
    ]


def _groups_of_step(
    local: Sequence[LocalCounts],
    by_term: Sequence[Sequence[Record]],
    group: dist.ProcessGroup | None,
) -> list[dict[Unit, GroupSums]]:
    """Each term's groups over all ranks; of a unit only if every rank has ids for it."""
    if not any(counts.groups for counts in local):
        return [{} for _ in local]
    places = [
        (t, unit)
        for t, of_ranks in enumerate(by_term)
        for unit in CROSS_RANK_UNITS
        if all(record.groups[unit] >= 0 for record in of_ranks)
    ]
    mine = [local[t].groups[unit] for t, unit in places]
    sizes = [
        [int(of_terms[t].groups[unit]) for t, unit in places]
        for of_terms in zip(*by_term, strict=True)
    ]
    groups: list[dict[Unit, GroupSums]] = [{} for _ in local]
    for (t, unit), sums in zip(places, exchange_groups(mine, sizes, group), strict=True):
        groups[t][unit] = sums
    return groups


def abandon(group: dist.ProcessGroup | None) -> None:
    """Call instead of `count_step` on a rank that failed: the others raise PeerError."""
    abandon_records(TERMS_CAPACITY, RECORD_WIDTH, group)


def abandoning_on_error(group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    """Call `abandon` if the body fails."""
    return collectives.abandoning_on_error(TERMS_CAPACITY, RECORD_WIDTH, group)


def _defining(agg: LossAggregation) -> tuple[object, ...]:
    """What must be the same on every rank."""
    options = agg.empty, agg.rejected, agg.sample_weights
    return agg.mode, agg.within, agg.across, agg.scale, *options


def _different_terms(headers: Sequence[Header]) -> ModeError:
    numbers = sorted({round(header.records) for header in headers})
    if len(numbers) > 1:
        return ModeError(f"ranks have {numbers} terms; expected the same number on every rank")
    return ModeError(
        "ranks have different aggregations, or terms in another order; expected the same on every "
        "rank"
    )


def _check_sharded_samples(of_ranks: Sequence[Record]) -> None:
    """Raise GroupError on every rank if ranks with the same owner differ in number of samples."""
    held: dict[float, float] = {}
    for record in of_ranks:
        owner, number = record.owner, record.held_samples
        if owner >= 0 and held.setdefault(owner, number) != number:
            raise GroupError(
                f"ranks that share samples have {held[owner]:.0f} and {number:.0f} of them; "
                "expected parts of the same samples on every rank of sharded_over"
            )
