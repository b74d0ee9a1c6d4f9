"""The tokens that a context-parallel rank holds, to shard and unshard tensors.

Causal attention costs more for late tokens, so a sequence is cut into ``2 * cp`` chunks and rank
``r`` holds chunks ``r`` and ``2 * cp - 1 - r`` ("zigzag"). Megatron's bshd layout does this to the
whole sequence, Transformer Engine's thd layout to every packed sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.microbatch import are_offsets, starts_at_zero_and_never_decreases
from megatron_loss_agg.tensors import moved


class CPLayout:
    """Positions of the sequence (or flat token) axis that one context-parallel rank holds.

    Built by `bshd`, `thd` or `contiguous`.

    Attributes:
        index: int64 [local tokens], positions in the order in which this rank holds them.
        rank_of_position: int64 [total_len], the context-parallel rank that holds each position.
        total_len: length of the whole axis.
        cp_size, cp_rank: size of the context-parallel group, and this rank in it.
    """

    def __init__(self, rank_of_position: Tensor, cp_size: int, cp_rank: int) -> None:
        if not 0 <= cp_rank < cp_size:
            raise DataError(
                f"cp_rank must be from 0 to cp_size - 1 = {cp_size - 1}, got {cp_rank}. Pass this "
                "process's rank in its context-parallel group."
            )
        self.rank_of_position = rank_of_position
        self.index = (rank_of_position == cp_rank).nonzero().view(-1)
        self.total_len = rank_of_position.numel()
        self.cp_size = cp_size
        self.cp_rank = cp_rank

    @classmethod
    def bshd(cls, seq_len: int, cp_size: int, cp_rank: int) -> CPLayout:
        """Zigzag over the whole sequence.

        Raises:
            DataError: as `thd` does.
        """
        return cls.thd(torch.tensor([0, seq_len]), cp_size, cp_rank)

    @classmethod
    def thd(cls, cu_seqlens_padded: Tensor, cp_size: int, cp_rank: int) -> CPLayout:
        """Zigzag inside every packed sequence.

        Args:
            cu_seqlens_padded: integer offsets [sequences + 1]; every length must be a multiple of
                ``2 * cp_size``, unless a single rank holds everything.

        Raises:
            DataError: the offsets do not start at 0 or decrease, a length is not such a
                multiple, or ``cp_rank`` is out of range.
        """
        if not are_offsets(cu_seqlens_padded) or not starts_at_zero_and_never_decreases(
            cu_seqlens_padded
        ):
            raise DataError(
                "cu_seqlens_padded must be int32 or int64 [sequences + 1], start at 0 and never "
                f"decrease, got {cu_seqlens_padded}. Pass the offsets of the padded pack."
            )
        lengths = cu_seqlens_padded.long().diff()
        if cp_size <= 1:
            return cls(lengths.new_zeros(int(lengths.sum())), cp_size, cp_rank)
        uneven = (lengths % (2 * cp_size) != 0).nonzero()
        if uneven.numel():
            first = int(uneven[0])
            raise DataError(
                f"the length of a sequence must be a multiple of 2 * cp_size = {2 * cp_size}, got "
                f"{int(lengths[first])} for sequence {first}. Pad it, and pass the padded offsets."
            )
        chunk = torch.arange(2 * cp_size, device=lengths.device)
        rank_of_chunk = torch.minimum(chunk, 2 * cp_size - 1 - chunk).repeat(len(lengths))
        chunk_lengths = (lengths // (2 * cp_size)).repeat_interleave(2 * cp_size)
        return cls(rank_of_chunk.repeat_interleave(chunk_lengths), cp_size, cp_rank)

    @classmethod
    def contiguous(cls, total_len: int, cp_size: int, cp_rank: int) -> CPLayout:
        """Rank ``r`` holds the ``r``-th of ``cp_size`` equal parts.

        Raises:
            DataError: the parts would not be equal, or ``cp_rank`` is out of range.
        """
        if total_len % cp_size:
            raise DataError(
                f"the length must be a multiple of cp_size = {cp_size}, got {total_len}. Pad it."
            )
        rank_of_position = torch.arange(total_len) * cp_size // max(total_len, 1)
        return cls(rank_of_position, cp_size, cp_rank)

    def shard(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of ``x``, whose axis ``dim`` is the whole sequence (or pack).

        Raises:
            DataError: the length of that axis is not ``total_len``.
        """
        _check_length(x, dim, self.total_len)
        return x.index_select(dim, moved(self.index, x.device))

    def unshard(
        self,
        local: Tensor | Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        dim: int = -1,
    ) -> Tensor:
        """The inverse of `shard`; differentiable.

        Args:
            local: this rank's part; without ``group``, the list of all parts in rank order.
            group: the context-parallel group, any process group of ``cp_size`` ranks; every rank
                must call, and must also run the backward pass. There, a part gets the sum of its
                gradients over all ranks' results.

        Raises:
            DataError: the parts are not as long as the whole axis; a list with ``group``, or a
                tensor without it.
        """
        if isinstance(local, Tensor) != (group is not None):
            raise DataError(
                "unshard needs this rank's part and a group, or the list of all parts, got a "
                f"{type(local).__name__} {'without' if group is None else 'with'} a group. "
                f"{'Give' if group is None else 'Drop'} group=."
            )
        if isinstance(local, Tensor):
            _check_length(local, dim, self.index.numel())
            local = _AllGather.apply(local, group)  # type: ignore[no-untyped-call]
        in_rank_order = torch.cat([*local], dim=dim)
        _check_length(in_rank_order, dim, self.total_len)
        return in_rank_order.index_select(
            dim, moved(self._index_in_rank_order, in_rank_order.device)
        )

    @functools.cached_property
    def _index_in_rank_order(self) -> Tensor:
        """int64 [total_len]: where each position is in the parts of all ranks, one after the other."""
        ranks = range(self.cp_size)
        parts = torch.cat([(self.rank_of_position == r).nonzero().view(-1) for r in ranks])
        index = torch.empty_like(parts)
        index[parts] = torch.arange(len(parts), device=parts.device)
        return index


class _AllGather(torch.autograd.Function):
    """[ranks, ...] from each rank's part [...]; backward: its part of the sum of all gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        local = local.contiguous()
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local, group=group)
        return torch.stack(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def _check_length(x: Tensor, dim: int, expected: int) -> None:
    if x.shape[dim] != expected:
        raise DataError(
            f"axis {dim} must have the layout's length {expected}, got {x.shape[dim]}. Build the "
            "layout for this tensor, or pass another dim=."
        )
