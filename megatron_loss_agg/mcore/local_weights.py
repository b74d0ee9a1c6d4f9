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
from megatron_loss_agg.counts import StepCounts, abandoning_on_error
from megatron_loss_agg.errors import PeerError
from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.masks import active_tokens
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.mcore.splits import WHOLE, Splits, ambiguous
from megatron_loss_agg.microbatch import MicrobatchOfTerms, of_term
from megatron_loss_agg.plan import StepPlan, StepTerms
from megatron_loss_agg.weights import dot, token_weights_of

_SHORT_ROW = 32
"""Weights of rows with fewer local tokens are computed before the step."""


@dataclass(frozen=True)
class LocalMask:
    """What the plan knows about a microbatch's mask on this rank; tensors are on the CPU."""

    shape: tuple[int, ...]
    packed: bool
    active_tokens: int
    sums: Tensor  # fp64: of each row, or of the pack
    total: float
    values: Tensor | None  # if the loss function's mask is compared by value
    token_ids: tuple[Tensor, ...]  # vectors; if the split is not recognised yet

    @classmethod
    def of(cls, plan: StepPlan, i: int, layout: CPLayout | None, keeps_values: bool) -> LocalMask:
        microbatch = plan.microbatches[i]
        mask, sums, active = microbatch.loss_mask, plan.mask_sums(i), plan.active_tokens[i]
        token_ids: tuple[Tensor, ...] = ()
        packed = microbatch.cu_seqlens is not None
        if layout is not None:
            mask = layout.shard(mask)
            sums, active = mask.sum(dim=-1, dtype=torch.float64).cpu(), active_tokens(mask)
            if keeps_values:
                token_ids = tuple(layout.shard(x).cpu().reshape(-1) for x in microbatch.token_ids)
        total = sums.sum()
        values = mask.cpu() if keeps_values else None
        sums = total.view(1) if packed else sums
        return cls(tuple(mask.shape), packed, active, sums, float(total), values, token_ids)

    def fits(self, mask: Tensor) -> bool:
        """Whether a loss function's mask has the planned values, or these were not kept."""
        if self.values is None:
            return True
        given, planned = mask.detach().reshape(-1).cpu(), self.values.reshape(-1)
        # In the coarser dtype: a script may cast its mask, as to that of its losses.
        floats = [x.dtype for x in (given, planned) if x.dtype.is_floating_point]
        coarse = min(floats, key=lambda dtype: dtype.itemsize, default=torch.int64)
        return torch.equal(given.to(coarse), planned.to(coarse))


@dataclass(frozen=True)
class LocalWeights:
    """Weights of one microbatch on this rank; terms with equal weights share them."""

    mask: LocalMask
    coefficient_S: Tensor | None  # fp64; for rows
    weight_T: Tensor | None  # for packs, short rows and custom functions; on the CPU
    signed: bool  # some weights may be negative
    checksum: Tensor  # fp64, of the planned mask: sums of its rows, or its product with the weights

    @classmethod
    def of(cls, plan: StepPlan, i: int, layout: CPLayout | None, mask: LocalMask) -> LocalWeights:
        custom = plan.aggregation.function is not None
        if not mask.packed and not custom and mask.shape[-1] >= _SHORT_ROW:
            return cls(mask, plan.coefficients(i), None, False, mask.sums)
        whole = plan.weights(i, torch.promote_types(torch.get_default_dtype(), torch.float32))
        product = whole.abs() * plan.microbatches[i].loss_mask
        if layout is not None:
            whole, product = layout.shard(whole), layout.shard(product)
        checksum = product.sum(dtype=torch.float64).view(1).cpu()
        return cls(mask, None, whole.cpu(), custom, checksum)

    def made_for(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens], on the device of ``mask``, which is this rank's shard."""
        if self.weight_T is not None:
            return self.weight_T.to(mask.device, dtype, non_blocking=True).reshape(-1)
        assert self.coefficient_S is not None
        rows = mask.reshape(self.mask.shape)
        return token_weights_of(self.coefficient_S, rows, None, dtype).reshape(-1)

    def checksum_of(self, mask: Tensor, weights: Tensor) -> Tensor:
        """The checksum of a loss function's mask, whose weights were made; on its device.

        Row sums are enough for rows: their weights are made from the loss function's own mask.
        """
        if self.weight_T is None:
            return mask.detach().reshape(self.mask.shape).sum(dim=-1, dtype=torch.float32)
        weights = weights.abs() if self.signed else weights
        return dot(mask.detach().reshape(-1).to(weights.dtype), weights).view(1).float()


WeightsBySplit = dict[str, LocalWeights]
"""The weights of a microbatch under each split that the script may use; one where it is known."""


@dataclass(frozen=True)
class StepWeights:
    """The weights of all microbatches that were planned together."""

    terms: Mapping[str, list[WeightsBySplit]]  # one for each microbatch
    tokens: Mapping[str, float]  # mask sum of the whole step
    counts: StepCounts  # of the first term, whose active tokens the host counts
    is_empty: bool  # every token of the whole step is masked or rejected

    @classmethod
    def plan(
        cls,
        read: Callable[[], Sequence[MicrobatchOfTerms]],
        terms: Mapping[str, Term],
        groups: ParallelGroups,
        splits: Splits,
        keeps_masks: bool,
    ) -> StepWeights:
        """Plan a step on every rank of the last pipeline stage; all of them must call.

        Args:
            read: this data-parallel rank's microbatches; called on the ranks that read data.
            splits: those that the script may use.
            keeps_masks: keep mask values, to compare the loss functions' masks with, even where the
                split is recognised.

        Raises:
            AggregationError: this rank's own error.
            PeerError: another rank failed.
        """

        def plan_here() -> StepWeights:
            with abandoning_on_error(groups.dp):
                microbatches = read()
                splits.check([of_term(name, m) for m in microbatches for name in terms], groups)
            plans = StepPlan.build_terms(terms, microbatches, groups.dp)
            return cls.of(plans, groups, splits, keeps_masks)

        if dist.get_world_size(groups.tp) == 1:
            return plan_here()
        return _broadcast(plan_here if groups.reads_data else None, groups.tp)

    @classmethod
    def of(
        cls, plans: StepTerms, groups: ParallelGroups, splits: Splits, keeps_masks: bool
    ) -> StepWeights:
        """From this rank's plans; called on every rank that reads data."""
        # A custom function may fail on one data-parallel rank alone; the others must learn of it.
        custom = any(plan.aggregation.function is not None for plan in plans.values())
        elsewhere = (
            "the aggregation function failed on another rank of the data-parallel group; "
            "expected it to succeed on every rank: see the error of that rank"
        )
        with failing_together([groups.dp] if custom else [], elsewhere):
            weights = _by_term(plans, groups, splits, keeps_masks)
        tokens = {name: plan.counts.tokens for name, plan in plans.items()}
        counts = next(iter(plans.values())).counts
        return cls(weights, tokens, counts, plans.is_empty)

    def __len__(self) -> int:
        """Number of this rank's microbatches."""
        return len(next(iter(self.terms.values())))

    @property
    def active_tokens(self) -> int:
        """Of the whole step, in the first term's masks, as the host counts them."""
        assert self.counts.active_tokens is not None
        return self.counts.active_tokens

    def local_mask(self, i: int) -> LocalMask:
        """What is known about the first term's mask of microbatch ``i``, whose split is chosen."""
        (chosen,) = next(iter(self.terms.values()))[i].values()
        return chosen.mask

    def choose(
        self, i: int, masks: Mapping[str, Tensor], inputs: Sequence[Tensor], splits: Splits
    ) -> dict[str, LocalWeights]:
        """The weights of microbatch ``i`` under the script's split, by term.

        Args:
            masks: the loss function's.
            inputs: the integer tensors that the model was called with.

        Raises:
            LayoutError: no split fits, or several, which give different weights.
        """
        for name, mask in masks.items():
            by_split = self.terms[name][i]
            known = next(iter(by_split.values())).mask
            fitting = [split for split, local in by_split.items() if local.mask.fits(mask)]
            if WHOLE in by_split or known.values is None or not fitting:  # see `Checks.check`
                continue
            told = len(fitting) == 1 < len(by_split)  # by the mask alone
            shards = {s: () if told else by_split[s].mask.token_ids for s in fitting}
            splits.narrow(known.packed, shards, inputs)
        chosen = {}
        for name, mask in masks.items():
            by_split = self.terms[name][i]
            packed = next(iter(by_split.values())).mask.packed
            fitting = [split for split in splits.left(packed) if split in by_split] or [*by_split]
            local = chosen[name] = by_split[fitting[0]]
            if local.mask.values is not None and local.mask.fits(mask) and len(fitting) > 1:
                made = [by_split[split].made_for(mask, torch.float64) for split in fitting]
                if not all(torch.equal(other, made[0]) for other in made):
                    raise ambiguous(fitting)
            self.terms[name][i] = {fitting[0]: local}
        return chosen


def _by_term(
    plans: StepTerms, groups: ParallelGroups, splits: Splits, keeps_masks: bool
) -> dict[str, list[WeightsBySplit]]:
    """By term and microbatch; terms with equal weights for a microbatch share them."""
    weights: dict[str, list[WeightsBySplit]] = {name: [] for name in plans}
    for i in range(len(next(iter(plans.values())).microbatches)):
        # Keep layouts for one microbatch only: they take more memory than the weights.
        masks: dict[int, dict[str, tuple[CPLayout | None, LocalMask]]] = {}
        made: list[tuple[StepPlan, WeightsBySplit]] = []
        for name, plan in plans.items():
            found = next((w for other, w in made if _equal_weights(plan, other, i)), None)
            if found is None:
                microbatch = plan.microbatches[i]
                if id(microbatch) not in masks:
                    layouts = splits.layouts(microbatch, groups)
                    packed = microbatch.cu_seqlens is not None
                    keeps = keeps_masks or splits.is_open(packed, layouts)
                    masks[id(microbatch)] = {
                        split: (layout, LocalMask.of(plan, i, layout, keeps))
                        for split, layout in layouts.items()
                    }
                found = {
                    split: LocalWeights.of(plan, i, *of_split)
                    for split, of_split in masks[id(microbatch)].items()
                }
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
