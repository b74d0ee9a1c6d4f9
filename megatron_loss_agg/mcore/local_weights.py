"""The weights of this rank's own tokens, by microbatch.

Weights of rows are computed in the loss function, from one coefficient per row and this rank's
shard of the mask. Weights of packs, of short rows and of custom functions are computed before the
step, since finding the sample of every token takes longer than summing the losses.

Suffixes: ``_S`` samples of a microbatch, ``_T`` this rank's tokens of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.collectives import failing_together
from megatron_loss_agg.counts import abandoning_on_error
from megatron_loss_agg.errors import PeerError
from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.masks import active_tokens, on_cpu
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.microbatch import Microbatch, MicrobatchOfTerms, of_term
from megatron_loss_agg.plan import StepPlan, StepTerms
from megatron_loss_agg.weights import token_weights_of

_SHORT_ROW = 32
"""Weights of rows with fewer local tokens are computed before the step."""


@dataclass(frozen=True)
class LocalMask:
    """What the plan knows about a microbatch's mask on this rank; tensors are on the CPU."""

    shape: tuple[int, ...]
    packed: bool
    by_row: bool  # weights are made from one coefficient per row
    active_tokens: int
    sums: Tensor  # fp64: of each row, or one of all
    total: float
    values: Tensor | None  # a copy, if the loss function's mask is compared by value

    @classmethod
    def of(cls, plan: StepPlan, i: int, layout: CPLayout | None, keeps_values: bool) -> LocalMask:
        microbatch = plan.microbatches[i]
        packed = microbatch.cu_seqlens is not None
        mask, sums, active = microbatch.loss_mask.detach(), plan.mask_sums(i), plan.active_tokens[i]
        if layout is not None:
            mask = layout.shard(mask)
            sums, active = mask.sum(dim=-1, dtype=torch.float64).cpu(), active_tokens(mask)
        by_row = not packed and mask.shape[-1] >= _SHORT_ROW and plan.aggregation.function is None
        total = sums.sum()
        values = mask.to("cpu", copy=True) if keeps_values else None
        sums = sums if by_row else total.view(1)
        return cls(tuple(mask.shape), packed, by_row, active, sums, float(total), values)


@dataclass(frozen=True)
class LocalWeights:
    """Weights of one microbatch on this rank; terms with equal weights share them."""

    mask: LocalMask
    coefficient_S: Tensor | None  # fp64; for rows
    weight_T: Tensor | None  # for packs, short rows and custom functions; on the CPU

    @classmethod
    def of(cls, plan: StepPlan, i: int, layout: CPLayout | None, mask: LocalMask) -> LocalWeights:
        if mask.by_row and plan.aggregation.function is None:
            return cls(mask, plan.coefficients(i), None)
        whole = plan.weights(i, torch.promote_types(torch.get_default_dtype(), torch.float32))
        return cls(mask, None, (whole if layout is None else layout.shard(whole)).cpu())

    def made_for(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens], on the device of ``mask``, which is this rank's shard."""
        if self.weight_T is not None:
            return self.weight_T.to(mask.device, dtype, non_blocking=True).reshape(-1)
        assert self.coefficient_S is not None
        rows = mask.reshape(self.mask.shape)
        return token_weights_of(self.coefficient_S, rows, None, dtype).reshape(-1)


@dataclass(frozen=True)
class StepWeights:
    """The weights of all microbatches that were planned together."""

    terms: Mapping[str, Sequence[LocalWeights]]  # one for each microbatch
    tokens: Mapping[str, float]  # mask sum of the whole step
    active_tokens: int  # of the whole step, in the first term's masks, as the host counts them
    is_empty: bool  # every token of the whole step is masked or rejected

    @property
    def first_term(self) -> Sequence[LocalWeights]:
        """Those of the term whose tokens the host counts."""
        return next(iter(self.terms.values()))

    @classmethod
    def plan(
        cls,
        read: Callable[[], Sequence[MicrobatchOfTerms]],
        terms: Mapping[str, Term],
        groups: ParallelGroups,
        keeps_masks: bool,
    ) -> StepWeights:
        """Plan a step on every rank of the last pipeline stage; all of them must call.

        Args:
            read: this data-parallel rank's microbatches; called on the ranks that read data.
            keeps_masks: keep mask values, to compare the loss functions' masks with.

        Raises:
            AggregationError: this rank's own error.
            PeerError: another rank failed.
        """

        def plan_here() -> StepWeights:
            with abandoning_on_error(groups.dp):
                microbatches = read()
                check_layouts([of_term(name, m) for m in microbatches for name in terms], groups)
            return cls.of(StepPlan.build_terms(terms, microbatches, groups.dp), groups, keeps_masks)

        if dist.get_world_size(groups.tp) == 1:
            return plan_here()
        return _broadcast(plan_here if groups.reads_data else None, groups.tp)

    @classmethod
    def of(cls, plans: StepTerms, groups: ParallelGroups, keeps_masks: bool) -> StepWeights:
        """From this rank's plans; called on every rank that reads data."""
        # A custom function may fail on one data-parallel rank alone; the others must learn of it.
        custom = any(plan.aggregation.function is not None for plan in plans.values())
        elsewhere = (
            "the aggregation function failed on another rank of the data-parallel group; "
            "expected it to succeed on every rank: see the error of that rank"
        )
        with failing_together([groups.dp] if custom else [], elsewhere):
            weights = _by_term(plans, groups, keeps_masks)
        active_tokens = next(iter(plans.values())).counts.active_tokens
        assert active_tokens is not None
        tokens = {name: plan.counts.tokens for name, plan in plans.items()}
        return cls(weights, tokens, active_tokens, plans.is_empty)


def _by_term(
    plans: StepTerms, groups: ParallelGroups, keeps_masks: bool
) -> dict[str, list[LocalWeights]]:
    """By term and microbatch; terms with equal weights for a microbatch share them."""
    weights: dict[str, list[LocalWeights]] = {name: [] for name in plans}
    for i in range(len(next(iter(plans.values())).microbatches)):
        # Keep layouts for one microbatch only: they take more memory than the weights.
        masks: dict[int, tuple[CPLayout | None, LocalMask]] = {}
        made: list[tuple[StepPlan, LocalWeights]] = []
        for name, plan in plans.items():
            found = next((w for other, w in made if _equal_weights(plan, other, i)), None)
            if found is None:
                microbatch = plan.microbatches[i]
                if id(microbatch) not in masks:
                    layout = layout_of(microbatch, groups)
                    masks[id(microbatch)] = layout, LocalMask.of(plan, i, layout, keeps_masks)
                found = LocalWeights.of(plan, i, *masks[id(microbatch)])
                made.append((plan, found))
            weights[name].append(found)
    return weights


def _equal_weights(plan: StepPlan, other: StepPlan, i: int) -> bool:
    """Whether both give microbatch ``i`` the same weights.

    Equal aggregations are not enough: the terms' masks may differ in other microbatches or ranks,
    and so may their denominators.
    """
    custom = plan.aggregation.function is not None or other.aggregation.function is not None
    same_mask = plan.microbatches[i] is other.microbatches[i]
    return not custom and same_mask and torch.equal(plan.coefficients(i), other.coefficients(i))


def _broadcast(plan_here: Callable[[], StepWeights] | None, tp: dist.ProcessGroup) -> StepWeights:
    """The weights from the first rank of the tensor-parallel group; every rank must call.

    Raises:
        PeerError: that rank failed; it raises its own error.
    """
    answer: list[Any] = [None]
    try:
        if plan_here is not None:
            answer = [plan_here()]
    finally:
        dist.broadcast_object_list(answer, src=dist.get_global_rank(tp, 0), group=tp)
    if answer[0] is None:
        raise PeerError(
            "the rank that reads the data of this tensor-parallel group failed; "
            "expected it to succeed: see its error"
        )
    return answer[0]


def check_layouts(microbatches: Sequence[Microbatch], groups: ParallelGroups) -> None:
    """Raise LayoutError unless context-parallel ranks can split every microbatch.

    One check for all microbatches; layouts are built only to raise the error of a bad one.
    """
    size = dist.get_world_size(groups.cp)
    if size == 1:
        return
    starts = [m.sample_starts for m in microbatches if m.sample_starts is not None]
    lengths = [m.loss_mask.shape[-1] for m in microbatches]
    ends = torch.cat([on_cpu(starts, torch.int64), torch.tensor(lengths, dtype=torch.int64)])
    if bool((ends % (2 * size)).any()):
        for microbatch in microbatches:
            layout_of(microbatch, groups)


def layout_of(microbatch: Microbatch, groups: ParallelGroups) -> CPLayout | None:
    """The tokens that this context-parallel rank holds; None if it holds all."""
    size, rank = dist.get_world_size(groups.cp), dist.get_rank(groups.cp)
    if size == 1:
        return None
    starts, length = microbatch.sample_starts, microbatch.loss_mask.shape[-1]
    if starts is None:
        return CPLayout.bshd(length, size, rank)
    if int(starts[-1]) < length:
        # Tokens after the last sample are padding, which is split like a sequence of its own.
        starts = torch.cat([starts, starts.new_tensor([length])])
    return CPLayout.thd(starts, size, rank)
