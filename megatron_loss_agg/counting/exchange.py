"""Counts a step over all ranks: each gathers all samples, and computes from the same table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, LossAggregation, Unit
from megatron_loss_agg.coefficients import StepCoefficients
from megatron_loss_agg.collectives import gathered, rank_in, tag_of
from megatron_loss_agg.counting.samples import Samples
from megatron_loss_agg.counting.table import StepCounts, Table
from megatron_loss_agg.errors import GroupError, ModeError, StepError


class Record(NamedTuple):
    """What one rank says of one term beside the samples."""

    rows: int
    owner: int  # of the samples, see `LocalTerm`
    units: int  # a bit for each of `BY_ID` that has ids here and is used
    microbatches: int
    routed_microbatches: int  # that say their routed tokens
    knows_masks: int  # else active tokens and positions are unknown
    active_tokens: int
    positions: int
    unequal: int


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
            knows_masks=positions is not None,
            active_tokens=sum(samples.active_tokens),
            positions=sum(positions or ()) * counts_positions,
            unequal=len({*(positions or ())}) > 1,
        )

    def packed(self) -> Tensor:
        """int64: the record, and then the columns of `Table`."""
        samples = self.samples
        number = samples.sums_S.numel()
        weight_S, rejected_S = samples.weights_S, samples.rejected_S
        # Ordinals of this rank's microbatches and samples, apart from those of other owners.
        first = (self._rank if self.owner < 0 else self.owner) << 32
        sizes = torch.tensor(samples.sizes, dtype=torch.int64)
        columns = [
            samples.sums_S.view(torch.int64),
            (torch.ones(number).double() if weight_S is None else weight_S).view(torch.int64),
            torch.zeros(number).long() if rejected_S is None else rejected_S.long(),
            torch.arange(len(sizes)).repeat_interleave(sizes) + first,
            torch.arange(number) + first,
            *(samples.ids[unit] for unit in self.units),
        ]
        return torch.cat([torch.tensor(self.record()), *columns])


def count_step(
    terms: Mapping[str, LocalTerm], group: dist.ProcessGroup | None
) -> list[StepCoefficients]:
    """Count every term over ``group``, in two collectives.

    Raises:
        PeerError: another rank called `abandon`.
        ModeError: ranks have different terms.
        StepError: some microbatches have routed tokens, and others have none.
        GroupError: ranks that share samples have different numbers of them.
        MaskError: coefficients that fp32 does not hold.
    """
    of_ranks = gathered(
        torch.cat([term.packed() for term in terms.values()]),
        group,
        tag=tag_of((name, *_defining(term)) for name, term in terms.items()),
        failure="bad microbatches on rank(s) {} of the data-parallel group",
        difference=_different_terms,
    )
    by_rank = [_unpacked(row) for row in of_ranks]
    return [
        _counted(term, of_term, rank_in(group))
        for term, of_term in zip(terms.values(), zip(*by_rank, strict=True), strict=True)
    ]


class Rows(NamedTuple):
    """One rank's samples of one term."""

    record: Record
    columns: Tensor  # int64 [columns, rows]: mask sums, weights, rejected, and ids by unit
    units: list[Unit]


def _unpacked(row: Tensor) -> list[Rows]:
    """What a rank packed of its terms."""
    found = []
    while row.numel():
        record = Record(*row[: len(Record._fields)].tolist())
        by_id = [unit for k, unit in enumerate(BY_ID) if record.units >> k & 1]
        units: list[Unit] = ["microbatch", "sample", *by_id]
        ends = len(Record._fields) + (3 + len(units)) * record.rows
        columns = row[len(Record._fields) : ends].view(3 + len(units), record.rows)
        found.append(Rows(record, columns, units))
        row = row[ends:]
    return found


def _counted(term: LocalTerm, of_ranks: Sequence[Rows], rank: int) -> StepCoefficients:
    """What all ranks' samples say of this ``rank``'s."""
    records = [x.record for x in of_ranks]
    _check_sharded_samples(records)
    total = Record(*map(sum, zip(*records, strict=True)))
    knows_masks = total.knows_masks == len(records)
    units = [u for u in of_ranks[rank].units if all(u in x.units for x in of_ranks)]
    places = [[0, 1, 2, *(3 + x.units.index(u) for u in units)] for x in of_ranks]
    rows = [x.columns[place] for x, place in zip(of_ranks, places, strict=True)]
    table = Table(term.agg, torch.cat(rows, dim=1), units, total.microbatches)
    first = sum(x.rows for x in records[:rank])
    samples, across = term.samples, table.across()
    own = slice(first, first + samples.sums_S.numel())
    groups = {unit: table.counted_groups(unit) for unit in units if unit in BY_ID}
    numbers = {unit: groups[unit][0].numel() if unit in groups else None for unit in BY_ID}
    counts = StepCounts(
        tokens=table.tokens,
        kept_tokens=table.kept_tokens,
        all_tokens=table.all_tokens,
        active_tokens=total.active_tokens if knows_masks else None,
        routed_tokens=_routed_tokens(total),
        microbatches=total.microbatches,
        samples=table.counted_groups("sample")[0].numel(),
        rollouts=numbers["rollout"],
        prompts=numbers["prompt"],
        datasets=numbers["dataset"],
        across=across,
        positions=total.positions if knows_masks else None,
        unequal=total.unequal > 0,
    )
    return StepCoefficients(
        counts=counts,
        sizes=samples.sizes,
        # Copies, since these are parts of all ranks' samples.
        coefficient_S=table.coefficients(across)[own].clone(),
        mask_sum_S=samples.sums_S,
        sums_by_unit={u: table.group_sums(u)[own].clone() for u in ("step", *units)},
        groups_by_unit=groups,
    )


def _defining(term: LocalTerm) -> tuple[object, ...]:
    """What must be the same on every rank."""
    agg = term.agg
    options = agg.empty, agg.rejected, agg.sample_weights
    return agg.mode, agg.within, agg.across, agg.scale, *options, term.group_by, term.owner >= 0


def _different_terms(_: list[int]) -> ModeError:
    return ModeError(
        "ranks have different aggregations, or other terms, or the same in another order, or "
        "sharded masks on some of them alone; expected the same on every rank"
    )


def _check_sharded_samples(of_ranks: Sequence[Record]) -> None:
    """Raise GroupError on every rank if ranks with the same owner differ in number of samples."""
    held: dict[int, int] = {}
    for record in of_ranks:
        owner, number = record.owner, record.rows
        if owner >= 0 and held.setdefault(owner, number) != number:
            raise GroupError(
                f"ranks that share samples have {held[owner]} and {number} of them; "
                "expected parts of the same samples on every rank of sharded_over"
            )


def _routed_tokens(total: Record) -> int | None:
    """Of the step; raises StepError, on every rank alike, if only some microbatches say it."""
    if not total.routed_microbatches:
        return None
    if total.routed_microbatches != total.microbatches:
        raise StepError(
            f"{total.routed_microbatches} of a step's {total.microbatches} microbatches "
            "have routed_tokens; expected all of them, or none: give each Microbatch its own"
        )
    return total.positions
