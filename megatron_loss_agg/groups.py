"""Sums by group of a step, such as by prompt, over the ranks that have samples of the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import all_gather


class GroupSums(NamedTuple):
    """Sums by group."""

    ids: Tensor  # int64 [groups], sorted and distinct
    sums: Tensor  # fp64 [groups, columns]: of the mask; or see `sample_weights`

    @property
    def mask_sums(self) -> Tensor:
        """fp64 [groups]."""
        return self.sums[:, 0]

    @classmethod
    def merge(cls, ids: Tensor, sums: Tensor) -> GroupSums:
        """Sum over equal ``ids``."""
        distinct, inverse = ids.unique(return_inverse=True)
        total = sums.new_zeros(distinct.numel(), sums.shape[1])
        return cls(distinct, total.index_add_(0, inverse, sums))

    def lookup(self, ids: Tensor) -> Tensor:
        """The mask sum of each of ``ids``; 0 for an unknown id."""
        return torch.cat([self.mask_sums, self.sums.new_zeros(1)])[places_in(self.ids, ids)]


def places_in(known: Tensor, ids: Tensor) -> Tensor:
    """int64: the place of each of ``ids`` in ``known``, which is sorted and distinct.

    ``len(known)`` for an unknown id.
    """
    place = torch.searchsorted(known, ids)
    padded = torch.cat([known, known.new_zeros(1)])  # so that a place beyond the last has an entry
    return place.where(padded[place] == ids, len(known))


def exchange_groups(
    mine: Sequence[GroupSums], numbers: Sequence[Sequence[int]], group: dist.ProcessGroup | None
) -> list[GroupSums]:
    """Merge each of ``mine`` with that of the other ranks, in one collective for all.

    Args:
        numbers: for every rank, the number of groups in each entry.
    """
    if len(numbers) == 1 or not any(map(sum, numbers)):
        return list(mine)
    columns = [g.sums.shape[1] for g in mine]
    # Each entry is its ids, then its sums.
    sizes = [
        [n * k for n, c in zip(of_rank, columns, strict=True) for k in (1, c)]
        for of_rank in numbers
    ]
    payload = packed_groups(mine, max(map(sum, sizes)))
    entries: list[list[GroupSums]] = [[] for _ in mine]
    for row, of_rank in zip(all_gather(payload, group), sizes, strict=True):
        parts = row[: sum(of_rank)].split(of_rank)
        for entry, c, ids, sums in zip(entries, columns, parts[::2], parts[1::2], strict=True):
            entry.append(GroupSums(ids, sums.view(torch.float64).view(-1, c)))
    return [
        GroupSums.merge(torch.cat([g.ids for g in entry]), torch.cat([g.sums for g in entry]))
        for entry in entries
    ]


def packed_groups(groups: Sequence[GroupSums], size: int) -> Tensor:
    """int64 [size]: each entry's ids, then the bits of its sums; padded with zeros."""
    payload = torch.zeros(size, dtype=torch.int64)
    flat = torch.cat(
        [part for g in groups for part in (g.ids, g.sums.reshape(-1).view(torch.int64))]
    )
    payload[: flat.numel()] = flat
    return payload
