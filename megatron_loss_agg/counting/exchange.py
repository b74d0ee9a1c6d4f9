"""Counts of a step over all ranks, in at most two collectives.

The first gathers a record of fixed size from every rank. What no group over ranks decides is a sum
of the ranks' parts. Otherwise a second one gathers every rank's `Table`, and each rank computes the
denominators from all of them.
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
from megatron_loss_agg.aggregation import BY_ID, Unit
from megatron_loss_agg.collectives import (
    Header,
    abandon_records,
    all_gather,
    gather_records,
    rank_in,
    tag_of,
)
from megatron_loss_agg.counting.counts import UNITS, LocalTerm, Record, StepCounts
from megatron_loss_agg.counting.table import Part, Table, check_coefficients
from megatron_loss_agg.errors import GroupError, ModeError, StepError

TERMS_CAPACITY = 8
"""Number of terms whose records fit in the first collective."""
_ALWAYS_SENT: tuple[Unit, ...] = ("microbatch",)


class Counted(NamedTuple):
    """What the step says of one term and of this rank's samples."""

    counts: StepCounts
    within_S: Tensor  # fp64, M_within
    group_sums: Mapping[Unit, Tensor]  # fp64 [samples] by unit: mask sum of each sample's group
    groups: Mapping[Unit, tuple[Tensor, Tensor]]  # of `BY_ID`: see `Table.counted_groups`


def count_step(terms: Mapping[str, LocalTerm], group: dist.ProcessGroup | None) -> list[Counted]:
    """Count every term over ``group``.

    At most two collectives for up to `TERMS_CAPACITY` terms, three for more.

    Raises:
        PeerError: another rank called `abandon`.
        ModeError: ranks have different terms.
        StepError: some microbatches have routed tokens, and others have none.
        GroupError: ranks that share samples have different numbers of them.
        MaskError: coefficients that fp32 does not hold.
    """
    local = list(terms.values())
    by_rank = [[term.record() for term in local]]
    if collectives.ranks_of(group) > 1:
        rows = gather_records(
            torch.tensor(by_rank[0], dtype=torch.float64).view(len(local), -1),
            TERMS_CAPACITY,
            group,
            tag=tag_of((name, *_defining(term)) for name, term in terms.items()),
            failure="bad microbatches on rank(s) {} of the data-parallel group",
            difference=_different_terms,
        )
        by_rank = [[Record(*row) for row in of_rank] for of_rank in rows.tolist()]
    by_term = [*zip(*by_rank, strict=True)]
    for of_ranks in by_term:
        _check_sharded_samples(of_ranks)
    units = [
        [unit for k, unit in enumerate(UNITS) if all(int(r.units) >> k & 1 for r in of_ranks)]
        for of_ranks in by_term
    ]
    tables = _tables(local, units, by_term, group)
    parts = zip(local, by_term, units, tables, strict=True)
    return [_counted(x, Record.of_step(of_ranks), u, *table) for x, of_ranks, u, table in parts]


def _tables(
    local: Sequence[LocalTerm],
    units: Sequence[Sequence[Unit]],
    by_term: Sequence[Sequence[Record]],
    group: dist.ProcessGroup | None,
) -> list[tuple[Table, slice]]:
    """Every term's table, and this rank's rows in it.

    Of all ranks if the term has ``units``, whose groups can span ranks; else of this rank.
    """
    tables = [(term.table, slice(None)) for term in local]
    if len(by_term[0]) == 1 or not any(units):
        return tables
    # `microbatch_mean` may need groups by id beside its own.
    columns = [[*dict.fromkeys([*of_term, *_ALWAYS_SENT])] for of_term in units]
    sent = [t for t, of_term in enumerate(units) if of_term]
    packed = [local[t].table.packed(columns[t]) for t in sent]
    sizes = [
        [len(x) * int(by_term[t][rank].rows) for t, x in zip(sent, packed, strict=True)]
        for rank in range(len(by_term[0]))
    ]
    payload = torch.zeros(max(map(sum, sizes)), dtype=torch.int64)
    flat = torch.cat([x.reshape(-1) for x in packed])
    payload[: flat.numel()] = flat
    if payload.numel():
        rows = all_gather(payload, group)
        by_rank = [
            row[: sum(of_rank)].split(of_rank) for row, of_rank in zip(rows, sizes, strict=True)
        ]
        for t, mine, parts in zip(sent, packed, zip(*by_rank, strict=True), strict=True):
            whole = torch.cat([part.view(len(mine), -1) for part in parts], dim=1)
            first = sum(int(r.rows) for r in by_term[t][: rank_in(group)])
            own = slice(first, first + mine.shape[1])
            tables[t] = Table.unpacked(local[t].agg, whole, columns[t]), own
    return tables


def _counted(
    term: LocalTerm, total: Record, units: Sequence[Unit], table: Table, own: slice
) -> Counted:
    """What ``total``, over all ranks, and the ``table`` say; see `_tables`."""
    agg = term.agg
    part = Part(total.across, total.largest, total.largest_inverse)
    if units:
        part = table.part(round(total.microbatches))
    across: float = 1
    if agg.weighted == "step":
        across = total.weighted_tokens / total.tokens if total.tokens else 0.0
    elif agg.weighted is not None:
        across = part.across
    elif agg.across is not None:
        across = round(part.across)
    check_coefficients(agg, across, total.tokens, part)
    groups = {unit: table.counted_groups(unit) for unit in units if unit in BY_ID}
    sums: dict[Unit, Tensor] = {"sample": term.table.mask_S}
    sums |= {unit: table.group_sums(unit)[own] for unit in units}
    if agg.within in (None, "step"):
        within_S = torch.full_like(sums["sample"], total.tokens if agg.within else 1.0)
    else:
        within_S = table.group_sums(agg.within)[own]
    numbers = {unit: groups[unit][0].numel() if unit in groups else None for unit in BY_ID}
    counts = StepCounts(
        tokens=total.tokens,
        kept_tokens=total.kept_tokens,
        all_tokens=total.all_tokens,
        active_tokens=None if math.isnan(total.active_tokens) else round(total.active_tokens),
        routed_tokens=_routed_tokens(total),
        microbatches=round(total.microbatches),
        samples=round(total.samples),
        rollouts=numbers["rollout"],
        prompts=numbers["prompt"],
        datasets=numbers["dataset"],
        across=across,
        positions=None if math.isnan(total.positions) else round(total.positions),
        unequal=total.unequal > 0,
    )
    return Counted(counts, within_S, sums, groups)


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
