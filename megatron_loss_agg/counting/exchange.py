"""Counts a step over all ranks: each gathers all samples, and computes from the same table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, LossAggregation, Unit
from megatron_loss_agg.coefficients import StepCoefficients
from megatron_loss_agg.collectives import gathered, tag_of
from megatron_loss_agg.counting.samples import Samples
from megatron_loss_agg.counting.table import StepCounts, Table
from megatron_loss_agg.errors import DataError, OptionError


class Record(NamedTuple):
    """What one rank says of one term beside the samples."""

    rows: int
    owner: int  # of the samples, see `LocalTerm`
    has_ids: int  # a bit for each of the term's units
    microbatches: int
    routed_microbatches: int  # that say their routed tokens
    active_tokens: int
    positions: int
    unequal: int


class Counted(NamedTuple):
    """What all ranks' samples say of one term."""

    coefficients: StepCoefficients
    table: Table  # of all ranks' samples
    own: slice  # this rank's rows of it


class LocalTerm:
    """One term of the loss on this rank.

    Where ranks hold parts of the same samples, the first of them owns the samples: it alone counts
    the microbatches, and its rank is part of their ids.

    Attributes:
        owner: rank of the owner; -1 where samples are whole.
        units: told by ids, whose groups are needed, or may be by a custom function.

    Raises:
        DataError: missing ids or sample weights; or rejected samples or weights, about which the
            aggregation does not say whether they count.
    """

    def __init__(
        self,
        agg: LossAggregation,
        samples: Samples,
        sharded_over: dist.ProcessGroup | None,
        group_by: tuple[Unit, ...] = (),
    ) -> None:
        for name in ("rejected", "sample_weights"):
            if getattr(agg, name) is None and name in samples.given:
                raise DataError(
                    f"a microbatch has {name}, and the aggregation does not say whether they "
                    f"count; expected LossAggregation({name}='count') or {name}='skip'"
                )
        if agg.sample_weights is not None and not samples.all_have_weights:
            raise DataError(
                f"sample_weights={agg.sample_weights!r} and a microbatch has no sample_weights; "
                "expected one for each sample: give sample_weights= (the batch key "
                "'sample_weights', floats [samples]), or leave out that option of the aggregation "
                "(--loss-aggregation-sample-weights)"
            )
        self.agg, self.samples, self.group_by = agg, samples, group_by
        self.owner, self._rank = -1, dist.get_rank() if dist.is_initialized() else 0
        if sharded_over is not None:
            self.owner = min(dist.get_process_group_ranks(sharded_over))
        used = {*agg.by_id, *group_by}
        self.units = sorted(used.union(BY_ID if agg.mode == "custom" else ()))
        for unit in sorted(used):
            if unit not in samples.ids:
                what = "a report" if unit in group_by else f"mode {agg.mode!r}"
                where = f"{unit}_ids=" if unit in BY_ID else f"ids={{{unit!r}: ...}}"
                raise DataError(
                    f"{what} groups by {unit} and a microbatch has no {unit}_ids; expected one id "
                    f"for each sample: give {where} (the batch key '{unit}_ids', int64 [samples]), "
                    "or group by another unit (--loss-aggregation): there are ids of "
                    f"{sorted(samples.ids)}"
                )

    def packed(self) -> Tensor:
        """int64: the record, and then the columns of `Table`."""
        samples, number = self.samples, self.samples.sums_S.numel()
        positions = samples.positions or []
        counts_microbatches = self.owner in (-1, self._rank)
        # Routed tokens are those of all ranks that share the samples, elements of masks are not.
        counts_positions = counts_microbatches or not samples.routed_microbatches
        record = Record(
            rows=number,
            owner=self.owner,
            has_ids=sum(1 << k for k, unit in enumerate(self.units) if unit in samples.ids),
            microbatches=len(samples.sizes) * counts_microbatches,
            routed_microbatches=samples.routed_microbatches * counts_microbatches,
            active_tokens=sum(samples.active_tokens),
            positions=sum(positions) * counts_positions,
            unequal=len({*positions}) > 1,
        )
        # Ordinals of this rank's microbatches and samples, apart from those of other owners.
        first = (self._rank if self.owner < 0 else self.owner) << 32
        ends, ordinal_S = torch.tensor([*accumulate(samples.sizes)]).long(), torch.arange(number)
        columns = [
            samples.sums_S.view(torch.int64),
            samples.weights_S.view(torch.int64),
            samples.rejected_S.long(),
            torch.searchsorted(ends, ordinal_S, right=True) + first,
            ordinal_S + first,
            *(samples.ids.get(unit, torch.zeros(number).long()) for unit in self.units),
        ]
        return torch.cat([torch.tensor(record), *columns])

    def unpacked(self, rows: list[Tensor]) -> tuple[list[Record], Tensor, list[Tensor]]:
        """The ranks' records, their columns side by side, and what they packed after this term."""
        records, columns, rest = [], [], []
        for row in rows:
            head, body = row[: len(Record._fields)], row[len(Record._fields) :]
            records.append(Record(*head.tolist()))
            number = 5 + len(self.units), records[-1].rows
            columns.append(body[: math.prod(number)].view(number))
            rest.append(body[math.prod(number) :])
        return records, torch.cat(columns, dim=1), rest


def count_step(terms: Mapping[str, LocalTerm], group: dist.ProcessGroup | None) -> list[Counted]:
    """Count every term over ``group``, in two collectives; every rank raises, or none."""
    rows = gathered(
        torch.cat([term.packed() for term in terms.values()]),
        group,
        tag=tag_of((name, *_defining(term)) for name, term in terms.items()),
        failure="bad microbatches on rank(s) {} of the data-parallel group",
        difference=OptionError(
            "ranks have different aggregations, or other terms or groups, or the same in another "
            "order, or sharded masks or mask sums on some of them alone; expected the same on "
            "every rank"
        ),
    )
    rank = 0 if group is None else dist.get_rank(group)
    counted = []
    for term in terms.values():
        records, columns, rows = term.unpacked(rows)
        counted.append(_counted(term, records, columns, rank))
    return counted


def _counted(term: LocalTerm, records: Sequence[Record], columns: Tensor, rank: int) -> Counted:
    _check_sharded_samples(records)
    samples, total = term.samples, Record(*map(sum, zip(*records, strict=True)))
    units: list[Unit] = ["microbatch", "sample", *term.units]
    table = Table(term.agg, columns, units, total.microbatches)
    first = sum(record.rows for record in records[:rank])
    own = slice(first, first + records[rank].rows)
    # Of units whose ids every rank has.
    known = [u for k, u in enumerate(term.units) if all(x.has_ids >> k & 1 for x in records)]
    groups = {unit: table.counted_groups(unit) for unit in known}
    numbers = {unit: ids.numel() for unit, (ids, _) in groups.items()}
    knows_masks, siblings_S = samples.positions is not None, table.siblings()
    across = table.across(siblings_S)
    counts = StepCounts(
        tokens=table.tokens,
        kept_tokens=table.kept_tokens,
        all_tokens=table.all_tokens,
        active_tokens=total.active_tokens if knows_masks else None,
        routed_tokens=_routed_tokens(total),
        microbatches=total.microbatches,
        samples=table.counted_groups("sample")[0].numel(),
        rollouts=numbers.get("rollout"),
        prompts=numbers.get("prompt"),
        datasets=numbers.get("dataset"),
        across=across,
        positions=total.positions if knows_masks else None,
        unequal=total.unequal > 0,
    )
    coefficients = StepCoefficients(
        counts=counts,
        sizes=samples.sizes,
        # A copy, since it is a part of all ranks' samples.
        coefficient_S=table.coefficients(siblings_S, across)[own].clone(),
        mask_sum_S=samples.sums_S,
        groups_by_unit=groups,
    )
    return Counted(coefficients, table, own)


def _defining(term: LocalTerm) -> tuple[object, ...]:
    """What must be the same on every rank."""
    agg, samples = term.agg, term.samples
    options = agg.empty, agg.rejected, agg.sample_weights, term.group_by
    kinds = term.owner >= 0, samples.positions is None
    return agg.mode, agg.path, agg.across, agg.scale, *options, *kinds


def _check_sharded_samples(of_ranks: Sequence[Record]) -> None:
    """Raise DataError on every rank if ranks with the same owner differ in number of samples."""
    held: dict[int, int] = {}
    for record in of_ranks:
        owner, number = record.owner, record.rows
        if owner >= 0 and held.setdefault(owner, number) != number:
            raise DataError(
                f"ranks that share samples have {held[owner]} and {number} of them; "
                "expected parts of the same samples on every rank of sharded_over"
            )


def _routed_tokens(total: Record) -> int | None:
    """Of the step; raises DataError, on every rank alike, if only some microbatches say it."""
    if not total.routed_microbatches:
        return None
    if total.routed_microbatches != total.microbatches:
        raise DataError(
            f"{total.routed_microbatches} of a step's {total.microbatches} microbatches "
            "have routed_tokens; expected all of them, or none: give each Microbatch its own"
        )
    return total.positions
