"""Dynamic context parallelism: several ranks hold one microbatch, and the first of them sends it.

The ranks that hold a microbatch are consecutive, and the first rank is a multiple of their number.
The others look up the microbatch's rows in the table of all ranks.

Suffixes: ``_M`` one number for each microbatch of the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.microbatch import Microbatch


class _Key(NamedTuple):
    """Identifies a microbatch among those of all ranks."""

    first_rank: int
    num_holders: int
    number: int


class HeldMicrobatches:
    """The microbatches that one rank holds, each alone or together with other ranks.

    Args:
        rank, num_ranks: in the group of data- and context-parallel ranks.

    Raises:
        DataError: a microbatch of more ranks than there are, or two with the same gid.
    """

    def __init__(self, microbatches: Sequence[Microbatch], rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_samples = [m.num_samples for m in microbatches]
        self._keys = _keys(microbatches, rank)
        for first, num_holders, _ in self._keys:
            if first + num_holders > num_ranks:
                raise _wrong_ranks(first, num_holders, f"{num_ranks} ranks in all")
        if repeated := [key for key, times in Counter(self._keys).items() if times > 1]:
            first, num_holders, gid = repeated[0]
            raise _wrong_ranks(first, num_holders, f"the gid {gid} twice on rank {rank}")
        self.num_holders = torch.tensor([key.num_holders for key in self._keys]).long()
        self.number = torch.tensor([key.number for key in self._keys]).long()
        self.is_first = torch.tensor([key.first_rank == rank for key in self._keys]).bool()

    def rows(
        self, rank_M: Tensor, num_holders_M: Tensor, number_M: Tensor, num_samples_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The rows of this rank's microbatches, and of its samples, in the table of all ranks.

        The arguments are columns of the table.

        Raises:
            DataError: the first rank of a microbatch does not have it.
        """
        row_by_key = {}
        for first in {key.first_rank for key in self._keys}:
            rows = (rank_M == first).nonzero().view(-1)
            columns = (x.tolist() for x in (num_holders_M[rows], number_M[rows], rows))
            for num_holders, number, row in zip(*columns, strict=True):
                row_by_key[_Key(first, num_holders, number)] = row
        for key, num_samples in zip(self._keys, self._num_samples, strict=True):
            row = row_by_key.get(key)
            if row is None or int(num_samples_M[row]) != num_samples:
                got = f"one on rank {self._rank} that rank {key.first_rank} does not have"
                raise _wrong_ranks(key.first_rank, key.num_holders, got)
        microbatch_rows = torch.tensor([row_by_key[key] for key in self._keys]).long()
        sizes = torch.tensor(self._num_samples).long()
        # Numbers of samples, here and in the table, count on from the start of each microbatch.
        starts = (num_samples_M.cumsum(0) - num_samples_M)[microbatch_rows]
        shifts = starts - (sizes.cumsum(0) - sizes)
        return microbatch_rows, torch.arange(int(sizes.sum())) + shifts.repeat_interleave(sizes)


def _keys(microbatches: Sequence[Microbatch], rank: int) -> list[_Key]:
    """The same key on all ranks that hold a microbatch.

    Its number is the gid, which is >= 0. Without a gid the number is negative and counts the
    microbatches of the same ranks, which compute them in the same order, as the model's collectives
    require.
    """
    counted: Counter[int] = Counter()
    keys = []
    for microbatch in microbatches:
        num_holders, number = microbatch.local_cp_size or 1, microbatch.gid
        if number is None:
            counted[num_holders] += 1
            number = -counted[num_holders]
        keys.append(_Key(rank - rank % num_holders, num_holders, number))
    return keys


def _wrong_ranks(first: int, num_holders: int, got: str) -> DataError:
    return DataError(
        f"a microbatch with local_cp_size={num_holders} must be given by the data- and "
        f"context-parallel ranks {first} to {first + num_holders - 1}, once each and with the same "
        f"samples, got {got}. Let one of Megatron's groups hold it, and give its gid on all of these "
        "ranks or on none."
    )
