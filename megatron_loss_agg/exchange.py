"""What ranks tell each other about a step: one row of totals, then one payload of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.errors import PeerError


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


def exchange_totals(
    mine: Sequence[tuple[Totals, list[int]]], failed: bool, group: dist.ProcessGroup | None
) -> list[tuple[Totals, list[list[int]]]]:
    """Sum totals over ``group``, and collect everybody's columns. One collective for all terms.

    Args:
        mine: for every term, this rank's totals, and columns of integers.
        failed: whether this rank could not count its step.

    Returns:
        for every term the totals of the step, and the columns of every rank in order.

    Raises:
        PeerError: some rank failed (this one's own failure is for the caller to raise).
    """
    rows = gather_rows(row_of(mine, failed), group)
    failures = rows[:, 0].nonzero().view(-1).tolist()
    if failures and not failed:
        raise PeerError(
            f"bad microbatches on rank(s) {failures} of the data-parallel group; "
            "expected every rank's to be valid: see the error of those ranks"
        )
    blocks = rows[:, 1:].split([len(totals) + len(columns) for totals, columns in mine], dim=1)
    width = len(Totals._fields)
    return [(Totals.sum(b[:, :width]), b[:, width:].long().tolist()) for b in blocks]


def row_of(mine: Sequence[tuple[Totals, list[int]]], failed: bool) -> Tensor:
    """What a rank sends of its totals: fp64."""
    cells = [float(failed), *(x for totals, columns in mine for x in (*totals, *columns))]
    return torch.tensor(cells, dtype=torch.float64)


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


def communication_device(group: dist.ProcessGroup) -> torch.device:
    """The device that ``group``'s backend carries tensors on."""
    if "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
