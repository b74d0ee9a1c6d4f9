"""The weights of this rank's own tokens, microbatch by microbatch.

The weights of rows are made when their microbatch has its turn, out of one coefficient for each
row and this rank's part of the mask, which the forward step hands to its loss function. Those of a
pack, and of short rows, are made before the step: to look up every token's sample then takes longer
than to sum its loss.

Suffixes: ``_S`` samples of a microbatch, ``_T`` this rank's tokens of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Unit
from megatron_loss_agg.errors import PeerError
from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.masks import active_tokens, on_cpu
from megatron_loss_agg.mcore.ranks import Ranks
from megatron_loss_agg.mcore.scaling import HostScale
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.terms import StepTerms
from megatron_loss_agg.weights import sample_coefficients, spread


@dataclass(frozen=True)
class Part:
    """What one microbatch of one term leaves to do on this rank. Tensors are on the CPU."""

    shape: tuple[int, ...]  # of this rank's part of the mask
    active_tokens: int
    mask_sum: float
    mask_sums: Tensor  # fp64, of each row, or of all
    coefficient_S: Tensor | None  # [samples, 1] of rows, in the default dtype, or else
    weight_T: Tensor | None  # of a pack, of short rows, or of a custom aggregation

    def weights(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens], on the device of ``mask``, which is this rank's part of the mask."""
        if self.weight_T is not None:
            return self.weight_T.to(mask.device, dtype, non_blocking=True).reshape(-1)
        assert self.coefficient_S is not None
        coefficient_S = self.coefficient_S.to(mask.device, dtype, non_blocking=True)
        weights = mask.reshape(self.shape) * coefficient_S
        # Nothing is called for nothing here: small microbatches cost as many calls as they take.
        return (weights if weights.dtype == dtype else weights.to(dtype)).reshape(-1)


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
            parts=_parts(plans, ranks),
            total_tokens=first.active_tokens,
            mask_sums={name: plan.counts.tokens for name, plan in plans.items()},
            rows=0 if first.packed_microbatches else first.samples,
            is_empty=plans.is_empty,
        )

    def weights(self, name: str, i: int, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens] of this rank's part of microbatch ``i``, whose local mask is ``mask``."""
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
    try:
        if read is not None:
            answer = [read()]
    finally:
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
        self._groups: dict[Unit, int] = {"sample": rows, "microbatch": 1}  # of a microbatch
        self._microbatches = scale.num_microbatches * scale.data_parallel_size  # of the step

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
        across = aggregation.across
        if across not in ("sample", "microbatch") or aggregation.empty == "skip" or not fixed_rows:
            return False
        whole = scale.context_parallel_size == 1
        return aggregation.within is None or (aggregation.within == across and whole)

    def weights(self, name: str, i: int, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens] of this rank's rows ``mask``; whatever the microbatch and the name."""
        if self._per_token:
            return mask.to(dtype).reshape(-1)
        within, across = self._aggregation.within, self._aggregation.across
        number = 1 if across is None else self._groups[across] * self._microbatches
        if within is None:
            groups, sums = mask.reshape(1, -1), mask.new_ones(1, dtype=torch.float64)
        else:
            groups = mask.reshape(self._groups[within], -1)
            sums = groups.sum(dim=1, dtype=torch.float64)
        coefficients = sample_coefficients(sums, number, self._aggregation.scale)
        return spread(coefficients, groups, None, dtype).reshape(-1)


def local_part(x: Tensor, microbatch: Microbatch, ranks: Ranks) -> Tensor:
    """This context-parallel rank's tokens of ``x``, which has the shape of the whole mask."""
    return _local(x, _layout(microbatch, ranks))


def check_layouts(microbatches: Sequence[Microbatch], ranks: Ranks) -> None:
    """Raise LayoutError unless context-parallel ranks can split every microbatch.

    All of them are looked at as one; only a bad one is laid out, which says what is wrong with it.
    """
    size = dist.get_world_size(ranks.context)
    if size == 1:
        return
    starts = [m.sample_starts for m in microbatches if m.sample_starts is not None]
    lengths = [m.loss_mask.shape[-1] for m in microbatches]
    ends = torch.cat([on_cpu(starts, torch.int64), torch.tensor(lengths, dtype=torch.int64)])
    if bool((ends % (2 * size)).any()):
        for microbatch in microbatches:
            _layout(microbatch, ranks)


def _local(x: Tensor, layout: CPLayout | None) -> Tensor:
    return x if layout is None else layout.shard(x)


def _layout(microbatch: Microbatch, ranks: Ranks) -> CPLayout | None:
    """None where a rank holds the whole."""
    size, rank = dist.get_world_size(ranks.context), dist.get_rank(ranks.context)
    if size == 1:
        return None
    starts, length = microbatch.sample_starts, microbatch.loss_mask.shape[-1]
    if starts is None:
        return CPLayout.bshd(length, size, rank)
    if int(starts[-1]) < length:
        # Tokens after the last sample are padding, which is split like a sequence of its own.
        starts = torch.cat([starts, starts.new_tensor([length])])
    return CPLayout.thd(starts, size, rank)


_SHORT_ROW = 32
"""Tokens of a row, below which its weights are made before the step."""


@dataclass(frozen=True)
class _Local:
    """This rank's part of a microbatch, which all terms of the loss have in common."""

    layout: CPLayout | None
    by_row: bool  # its samples are rows, and not short ones
    shape: tuple[int, ...]
    active_tokens: int
    mask_sums: Tensor  # fp64 on the CPU, of each row, or of all

    @classmethod
    def of(cls, microbatch: Microbatch, ranks: Ranks) -> _Local:
        layout = _layout(microbatch, ranks)
        mask = _local(microbatch.loss_mask.detach(), layout)
        by_row = microbatch.cu_seqlens is None and mask.shape[-1] >= _SHORT_ROW and len(mask) > 0
        rows = mask.reshape(len(mask) if by_row else 1, -1)
        sums = rows.sum(dim=1, dtype=torch.float64).cpu()
        return cls(layout, by_row, tuple(mask.shape), int(active_tokens(mask)), sums)


def _parts(plans: StepTerms, ranks: Ranks) -> dict[str, list[Part]]:
    """By term and microbatch; terms that weigh a microbatch alike share its part."""
    parts: dict[str, list[Part]] = {name: [] for name in plans}
    for i in range(len(next(iter(plans.values())).microbatches)):
        # Of one microbatch at a time, since a layout takes more memory than what is made by it.
        local: dict[int, _Local] = {}
        made: list[tuple[StepPlan, Part]] = []
        for name, plan in plans.items():
            part = next((part for other, part in made if _weigh_alike(plan, other, i)), None)
            if part is None:
                microbatch = plan.microbatches[i]
                if id(microbatch) not in local:
                    local[id(microbatch)] = _Local.of(microbatch, ranks)
                part = _part(plan, i, local[id(microbatch)])
                made.append((plan, part))
            parts[name].append(part)
    return parts


def _weigh_alike(plan: StepPlan, other: StepPlan, i: int) -> bool:
    """Whether both give microbatch ``i`` the same weights.

    Aggregations may be equal and these differ: of another rank's or microbatch's masks, which
    count in the denominators, each term may have its own. A custom function may look at them all.
    """
    custom = plan.aggregation.function is not None or other.aggregation.function is not None
    same_mask = plan.microbatches[i] is other.microbatches[i]
    return not custom and same_mask and torch.equal(plan.coefficients(i), other.coefficients(i))


def _part(plan: StepPlan, i: int, local: _Local) -> Part:
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    coefficient_S = weight_T = None
    if local.by_row and plan.aggregation.function is None:
        coefficient_S = plan.coefficients(i).to(dtype, copy=True).unsqueeze(-1)
    else:
        weight_T = _local(plan.weights(i, dtype), local.layout).cpu()
    total = local.mask_sums.sum(dim=0, keepdim=True)
    return Part(
        shape=local.shape,
        active_tokens=local.active_tokens,
        mask_sum=float(total),
        mask_sums=total if coefficient_S is None else local.mask_sums,
        coefficient_S=coefficient_S,
        weight_T=weight_T,
    )
