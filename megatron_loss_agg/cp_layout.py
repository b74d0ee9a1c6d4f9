"""Which tokens a context-parallel rank holds, to shard tensors and to unshard them.

Causal attention costs more for late tokens, so a sequence is cut into ``2 * cp`` chunks and rank
``r`` holds chunks ``r`` and ``2 * cp - 1 - r`` ("zigzag"): of the whole sequence in Megatron's
bshd layout, of every packed sequence in Transformer Engine's thd layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.microbatch import are_offsets, starts_at_zero_and_never_decreases


class CPLayout:
    """Positions of the sequence (or flat token) axis that one context-parallel rank holds.

    Built by `bshd`, `thd` or `contiguous`.

    Attributes:
        index: int64 [local tokens], positions in the order in which this rank holds them.
        total_len: length of the whole axis.
        cp_size, cp_rank: size of the context-parallel group, and this rank in it.
    """

    def __init__(self, holder_T: Tensor, cp_size: int, cp_rank: int) -> None:
        if not 0 <= cp_rank < cp_size:
            raise DataError(f"cp_rank={cp_rank} of cp_size={cp_size}; expected 0 <= rank < size")
        self.total_len = holder_T.numel()
        self.cp_size = cp_size
        self.cp_rank = cp_rank
        self.index = (holder_T == cp_rank).nonzero().view(-1)
        self._holder_T = holder_T  # the rank of each position

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
                ``2 * cp_size``, unless one rank holds it all.

        Raises:
            DataError: the offsets do not start at 0 or decrease, a length is not such a
                multiple, or ``cp_rank`` is out of range.
        """
        if not are_offsets(cu_seqlens_padded) or not starts_at_zero_and_never_decreases(
            cu_seqlens_padded
        ):
            raise DataError(
                f"cu_seqlens_padded={cu_seqlens_padded}; expected int32 or int64 [sequences + 1], "
                "offsets that start at 0 and do not decrease"
            )
        starts = cu_seqlens_padded.long()
        lengths = starts.diff()
        uneven = (lengths % (2 * cp_size) != 0).nonzero()
        if cp_size > 1 and uneven.numel():
            which = int(uneven[0])
            raise DataError(
                f"sequence {which} has (padded) length {int(lengths[which])}; expected a multiple "
                f"of 2 * cp_size = {2 * cp_size}: pad it"
            )
        length_T, start_T = torch.stack([lengths, starts[:-1]]).repeat_interleave(lengths, dim=1)
        place_T = torch.arange(len(start_T), device=starts.device) - start_T
        chunk_T = place_T * (2 * cp_size) // length_T
        return cls(torch.minimum(chunk_T, 2 * cp_size - 1 - chunk_T), cp_size, cp_rank)

    @classmethod
    def contiguous(cls, total_len: int, cp_size: int, cp_rank: int) -> CPLayout:
        """Rank ``r`` holds the ``r``-th of ``cp_size`` equal parts.

        Raises:
            DataError: the parts would not be equal, or ``cp_rank`` is out of range.
        """
        if total_len % cp_size:
            raise DataError(
                f"length {total_len} cannot be split into {cp_size} equal parts; "
                f"expected a multiple of cp_size = {cp_size}: pad it"
            )
        holder_T = torch.arange(total_len) * cp_size // max(total_len, 1)
        return cls(holder_T, cp_size, cp_rank)

    def shard(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of ``x``, whose axis ``dim`` is the whole sequence (or pack).

        Raises:
            DataError: the length of ``x`` there is not ``total_len``.
        """
        _check_length(x, dim, self.total_len)
        return x.index_select(dim, self.index.to(x.device))

    def unshard(
        self,
        local: Tensor | Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        dim: int = -1,
    ) -> Tensor:
        """The inverse of `shard`; differentiable.

        Args:
            local: this rank's part; without ``group``, the list of all parts in rank order.
            group: the context-parallel group; every rank must call. A part's gradient is summed
                over all ranks' results.

        Raises:
            DataError: the parts are not as long as the whole axis; a list with ``group``, or a
                tensor without it.
        """
        if isinstance(local, Tensor) != (group is not None):
            raise DataError(
                f"unshard got a {type(local).__name__} {'without' if group is None else 'with'} a "
                "group; expected this rank's part and a group, or the list of all parts"
            )
        if isinstance(local, Tensor):
            _check_length(local, dim, self.index.numel())
            local = all_gather(local.contiguous(), group=group)
        whole = torch.cat([*local], dim=dim)
        _check_length(whole, dim, self.total_len)
        order = self._holder_T.argsort(stable=True).argsort()
        return whole.index_select(dim, order.to(whole.device))


def _check_length(x: Tensor, dim: int, expected: int) -> None:
    if x.shape[dim] != expected:
        raise DataError(f"axis {dim} has length {x.shape[dim]}; expected the layout's {expected}")
