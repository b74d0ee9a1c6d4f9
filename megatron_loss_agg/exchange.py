"""What ranks tell each other about a step: one row of totals, then one payload of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.errors import ModeError
from megatron_loss_agg.gather import Header, abandon_units, gather_rows, gather_units


class Groups(NamedTuple):
    """Mask sums by group: ``ids`` int64 [groups], sorted and distinct; ``sums`` fp64 [groups]."""

    ids: Tensor
    sums: Tensor

    @classmethod
    def merge(cls, ids: Tensor, sums: Tensor) -> Groups:
        """Add up the ``sums`` of equal ``ids``."""
        distinct, where = ids.unique(return_inverse=True)
        return cls(distinct, sums.new_zeros(distinct.numel()).index_add_(0, where, sums))

    def sums_of(self, ids: Tensor) -> Tensor:
        """The sum of each of ``ids``; 0 for one that is no group."""
        with_none = torch.cat([self.ids, self.ids.new_zeros(1)])
        place = torch.searchsorted(self.ids, ids)
        found = (place < self.ids.numel()) & (with_none[place] == ids)
        return torch.cat([self.sums, self.sums.new_zeros(1)])[place].where(found, 0.0)


class Totals(NamedTuple):
    """One rank's totals of a step, for one term of its loss. All of them add up over ranks."""

    tokens: float
    kept_tokens: float  # those of samples that were not rejected
    active_tokens: int
    microbatches: int
    packed_microbatches: int
    active_microbatches: int
    samples: int
    active_samples: int

    @classmethod
    def sum(cls, rows: Tensor) -> Totals:
        """Of fp64 [ranks, fields]."""
        tokens, kept, *counts = rows.sum(dim=0).tolist()
        return cls(tokens, kept, *(round(x) for x in counts))


TERMS_A_ROW = 8
COLUMNS = 6
"""Integers of a term beside its totals: see `Tally.columns`."""


def exchange_totals(
    mine: Sequence[tuple[Totals, list[int]]], tag: int, group: dist.ProcessGroup | None
) -> list[tuple[Totals, list[list[int]]]]:
    """Sum totals over ``group``, and collect everybody's columns.

    One collective for up to `TERMS_A_ROW` terms, and a second for all further ones.

    Args:
        mine: for every term, this rank's totals, and columns of integers.
        tag: `tag_of` the terms.

    Returns:
        for every term the totals of the step, and the columns of every rank in order.

    Raises:
        PeerError: some rank failed.
        ModeError: ranks have different terms.
    """
    terms = gather_units(
        rows_of(mine),
        TERMS_A_ROW,
        group,
        tag=tag,
        failure="bad microbatches on rank(s) {} of the data-parallel group",
        difference=_different_terms,
    )
    halves = (term.split([len(Totals._fields), COLUMNS], dim=1) for term in terms.unbind(dim=1))
    return [(Totals.sum(totals), columns.long().tolist()) for totals, columns in halves]


def abandon(group: dist.ProcessGroup | None) -> None:
    """Stand in for `exchange_totals` on a rank that could not count its step."""
    abandon_units(TERMS_A_ROW, len(Totals._fields) + COLUMNS, group)


def rows_of(mine: Sequence[tuple[Totals, list[int]]]) -> Tensor:
    """fp64 [terms, width]."""
    cells = [x for totals, columns in mine for x in (*totals, *columns)]
    return torch.tensor(cells, dtype=torch.float64).view(len(mine), len(Totals._fields) + COLUMNS)


def _different_terms(headers: Sequence[Header]) -> ModeError:
    numbers = sorted({round(header.units) for header in headers})
    if len(numbers) > 1:
        return ModeError(f"the ranks have {numbers} terms; expected the same on every rank")
    return ModeError(
        "the ranks have different aggregations, or terms in another order; expected the same "
        "on every rank"
    )


def exchange_groups(
    mine: list[Groups], sizes: list[list[int]], group: dist.ProcessGroup | None
) -> list[Groups]:
    """Merge each of ``mine`` with the other ranks'. One collective for all of them.

    Args:
        mine: one entry for each unit of each term, the same on every rank.
        sizes: for every rank, the number of groups in each entry.
    """
    if len(sizes) == 1 or not any(map(sum, sizes)):
        return mine
    payload = packed(mine, max(map(sum, sizes)))
    unpacked: list[list[Groups]] = [[] for _ in mine]
    for row, row_sizes in zip(gather_rows(payload, group), sizes, strict=True):
        # Each unit takes its ids and then as many sums.
        parts = row[: 2 * sum(row_sizes)].split([n for n in row_sizes for _ in range(2)])
        for entry, ids, sums in zip(unpacked, parts[::2], parts[1::2], strict=True):
            entry.append(Groups(ids, sums.view(torch.float64)))
    return [
        Groups.merge(torch.cat([g.ids for g in entry]), torch.cat([g.sums for g in entry]))
        for entry in unpacked
    ]


def packed(mine: Sequence[Groups], width: int) -> Tensor:
    """int64 [2 * width]: every entry's ids and then its sums' bits, and zeros up to the end."""
    payload = torch.zeros(2 * width, dtype=torch.int64)
    flat = torch.cat([part for g in mine for part in (g.ids, g.sums.view(torch.int64))])
    payload[: flat.numel()] = flat
    return payload
