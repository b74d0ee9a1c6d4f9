"""The weights of this rank's own tokens, microbatch by microbatch.

The weights of rows are made when their microbatch has its turn, out of one coefficient for each
row and this rank's part of the mask, which the forward step hands to its loss function. Those of a
pack, and of short rows, are made before the step: to look up every token's sample then takes longer
than to sum its loss.

Suffixes: ``_S`` samples of a microbatch, ``_T`` this rank's tokens of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import PeerError
from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.mcore.ranks import Ranks
from megatron_loss_agg.mcore.scaling import HostScale
from megatron_loss_agg.microbatch import Microbatch, active_tokens
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.terms import StepTerms
from megatron_loss_agg.weights import sample_coefficients, spread


@dataclass(frozen=True)
class Part:
    """What one microbatch of one term leaves to do on this rank. Tensors are on the CPU."""

    shape: tuple[int, ...]  # of this rank's part of the mask
    active_tokens: int
    mask_sums: Tensor  # fp64, of each row, or of all
    coefficient_S: Tensor | None  # [samples, 1] of rows, in the default dtype, or else
    weight_T: Tensor | None  # of a pack, of short rows, or of a custom aggregation

    def weights(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """In the shape and on the device of ``mask``, this rank's part of the mask."""
        if self.weight_T is not None:
            return self.weight_T.to(mask.device, dtype, non_blocking=True).view(mask.shape)
        assert self.coefficient_S is not None
        coefficient_S = self.coefficient_S.to(mask.device, dtype, non_blocking=True)
        weights = mask.reshape(-1, mask.numel() // len(coefficient_S)) * coefficient_S
        # Nothing is called for nothing here: small microbatches cost as many calls as they take.
        return (weights if weights.dtype == dtype else weights.to(dtype)).view(mask.shape)


@dataclass(frozen=True)
class PlannedWeights:
    """Of a step that was read ahead, for every term."""

    parts: dict[str, list[Part]]  # by term and microbatch
    total_tokens: int  # active tokens of the whole step, which the host would count
    mask_sums: dict[str, float]  # of the whole step
    rows: int  # samples of the whole step if each is a row; 0 if some are packed
    is_empty: bool

    @classmethod
    def of(cls, plans: StepTerms, ranks: Ranks) -> PlannedWeights:
        """On a rank that reads its data.

        The host's count of tokens is that of the first term.
        """
        first = next(iter(plans.values())).counts
        return cls(
            parts={
                name: [_part(plan, i, ranks) for i in range(len(plan.microbatches))]
                for name, plan in plans.items()
            },
            total_tokens=first.active_tokens,
            mask_sums={name: plan.counts.tokens for name, plan in plans.items()},
            rows=0 if first.packed_microbatches else first.samples,
            is_empty=plans.is_empty,
        )

    def weights(self, name: str, i: int, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Of this rank's tokens of microbatch ``i``, whose local mask is ``mask``."""
        return self.parts[name][i].weights(mask, dtype)


def shared(read: Callable[[], PlannedWeights] | None, ranks: Ranks) -> PlannedWeights:
    """Weights of a tensor-parallel group, one of whose ranks reads the data.

    Every rank of the group must call; one object is broadcast in it: coefficients and, for packed
    microbatches, weights.

    Args:
        read: plans the step, on the rank that reads the data.

    Raises:
        PeerError: the rank that reads the data failed (it raises its own error).
    """
    source = dist.get_global_rank(ranks.tensor, 0)
    answer: list[PlannedWeights | None] = [None]
    if read is not None:
        try:
            answer = [read()]
        finally:
            dist.broadcast_object_list(answer, src=source, group=ranks.tensor)
    else:
        dist.broadcast_object_list(answer, src=source, group=ranks.tensor)
    if answer[0] is None:
        raise PeerError(
            "the rank that reads the data of this tensor-parallel group failed; "
            "expected it to succeed: see its error"
        )
    return answer[0]


class RowWeights:
    """From the local rows alone: modes whose denominators are known before the data is read."""

    def __init__(self, aggregation: LossAggregation, scale: HostScale, rows: int) -> None:
        self._aggregation = aggregation
        self._per_token = scale.per_token
        self._rows = rows
        self._samples = rows * scale.num_microbatches * scale.data_parallel_size

    @staticmethod
    def suffice(aggregation: LossAggregation, scale: HostScale, fixed_rows: bool) -> bool:
        """Whether no look-ahead is needed.

        Args:
            fixed_rows: every microbatch has as many samples as the host says, each in a row.
        """
        if aggregation.rejected is not None:
            return False  # which samples are rejected is in the batches
        if scale.per_token:
            # The host itself divides by the token total that it counts.
            return aggregation.mode == "token_mean"
        if aggregation.mode == "sum":
            return True
        if aggregation.across != "sample" or aggregation.empty == "skip" or not fixed_rows:
            return False
        whole_rows = scale.context_parallel_size == 1
        return aggregation.within is None or (aggregation.within == "sample" and whole_rows)

    def weights(self, name: str, i: int, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Of this rank's rows ``mask``; the same for every microbatch and whatever the name."""
        if self._per_token:
            return mask.to(dtype)
        across = 1 if self._aggregation.across is None else self._samples
        if self._aggregation.within is None:
            rows, within = mask.reshape(1, -1), mask.new_ones(1, dtype=torch.float64)
        else:
            rows = mask.reshape(self._rows, -1)
            within = rows.sum(dim=1, dtype=torch.float64)
        coefficients = sample_coefficients(within, across, self._aggregation.scale)
        return spread(coefficients, rows, None, dtype).view(mask.shape)


def local_part(x: Tensor, microbatch: Microbatch, ranks: Ranks) -> Tensor:
    """This context-parallel rank's tokens of ``x``, which has the shape of the whole mask."""
    size, rank = dist.get_world_size(ranks.context), dist.get_rank(ranks.context)
    if size == 1:
        return x
    starts = microbatch.sample_starts
    if starts is None:
        return CPLayout.bshd(x.shape[-1], size, rank).shard(x)
    if int(starts[-1]) < x.shape[-1]:
        # Tokens after the last sample are padding, which is split like a sequence of its own.
        starts = torch.cat([starts, starts.new_tensor([x.shape[-1]])])
    return CPLayout.thd(starts, size, rank).shard(x)


_SHORT_ROW = 32
"""Tokens of a row, below which its weights are made before the step."""


def _part(plan: StepPlan, i: int, ranks: Ranks) -> Part:
    microbatch = plan.microbatches[i]
    mask = local_part(microbatch.loss_mask, microbatch, ranks)
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    coefficient_S = weight_T = None
    by_row = plan.aggregation.function is None and microbatch.cu_seqlens is None
    if by_row and mask.shape[-1] >= _SHORT_ROW and len(mask):
        coefficient_S = plan.coefficients(i).to(dtype, copy=True).unsqueeze(-1)
    else:
        weight_T = local_part(plan.weights(i, dtype), microbatch, ranks).cpu()
    by_sum = mask.reshape(1 if coefficient_S is None else len(mask), -1)
    return Part(
        shape=tuple(mask.shape),
        active_tokens=int(active_tokens(mask)),
        mask_sums=by_sum.sum(dim=1, dtype=torch.float64).cpu(),
        coefficient_S=coefficient_S,
        weight_T=weight_T,
    )
