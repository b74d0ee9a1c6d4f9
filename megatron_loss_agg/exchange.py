"""What ranks tell each other about a step: one row of totals, then one payload of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.errors import ModeError, PeerError


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


class Header(NamedTuple):
    """What every row begins with, so that ranks which disagree can tell."""

    failed: bool  # the rank could not count its step
    terms: int
    tag: int  # differs between different terms


def exchange_totals(
    mine: Sequence[tuple[Totals, list[int]]], tag: int, group: dist.ProcessGroup | None
) -> list[tuple[Totals, list[list[int]]]]:
    """Sum totals over ``group``, and collect everybody's columns.

    One collective for every `TERMS_A_ROW` terms. Its size is the same whatever the terms: a
    collective of different sizes hangs or ends the process.

    Args:
        mine: for every term, this rank's totals, and columns of integers.
        tag: a number that differs between different terms.

    Returns:
        for every term the totals of the step, and the columns of every rank in order.

    Raises:
        PeerError: some rank failed.
        ModeError: ranks have different terms.
    """
    header = Header(False, len(mine), tag)
    answers = []
    for start in range(0, len(mine), TERMS_A_ROW):
        terms = mine[start : start + TERMS_A_ROW]
        rows = gather_rows(row_of(header, terms), group)
        _check_headers(rows[:, : len(Header._fields)])
        cells = rows[:, len(Header._fields) :].unflatten(1, (TERMS_A_ROW, -1))
        for term in cells.unbind(dim=1)[: len(terms)]:
            totals, columns = term.split([len(Totals._fields), COLUMNS], dim=1)
            answers.append((Totals.sum(totals), columns.long().tolist()))
    return answers


def abandon(group: dist.ProcessGroup | None) -> None:
    """Stand in for `exchange_totals` on a rank that could not count its step."""
    gather_rows(row_of(Header(True, 0, 0), []), group)


def row_of(header: Header, terms: Sequence[tuple[Totals, list[int]]]) -> Tensor:
    """What a rank sends of its totals: fp64."""
    cells = [*header, *(x for totals, columns in terms for x in (*totals, *columns))]
    row = torch.zeros(len(header) + TERMS_A_ROW * (len(Totals._fields) + COLUMNS)).double()
    row[: len(cells)] = torch.tensor(cells, dtype=torch.float64)
    return row


def _check_headers(rows: Tensor) -> None:
    """Raise, on every rank that has not failed itself, unless all are well and agree."""
    headers = [Header(*row) for row in rows.tolist()]
    failures = [rank for rank, header in enumerate(headers) if header.failed]
    if failures:
        raise PeerError(
            f"bad microbatches on rank(s) {failures} of the data-parallel group; "
            "expected every rank's to be valid: see the error of those ranks"
        )
    numbers = sorted({round(header.terms) for header in headers})
    if len(numbers) > 1:
        raise ModeError(f"the ranks have {numbers} terms; expected the same on every rank")
    if len({header.tag for header in headers}) > 1:
        raise ModeError(
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


def gather_rows(row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[ranks, n] out of everybody's [n], in rank order; on the CPU on both ends."""
    if group is None or dist.get_world_size(group) == 1:
        return row.unsqueeze(0)
    sent = row.to(communication_device(group))
    rows = sent.new_empty(dist.get_world_size(group) * row.numel())
    dist.all_gather_into_tensor(rows, sent, group=group)
    return rows.view(-1, row.numel()).cpu()


def any_of(flags: Sequence[bool], group: dist.ProcessGroup) -> list[bool]:
    """Which of ``flags`` is set on some rank of ``group``. One collective, and a wait for it."""
    if dist.get_world_size(group) == 1:
        return [*flags]
    told = torch.tensor([*flags], dtype=torch.int, device=communication_device(group))
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    return told.bool().tolist()


def communication_device(group: dist.ProcessGroup) -> torch.device:
    """The device that ``group``'s backend carries tensors on."""
    if "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
