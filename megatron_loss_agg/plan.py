"""The plan of one optimizer step: counts over all of it, exchanged once, and every weight.

Suffixes: ``_S`` samples of all this rank's microbatches, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Unit
from megatron_loss_agg.errors import FunctionError, GroupError, MaskError, ModeError
from megatron_loss_agg.exchange import abandon
from megatron_loss_agg.loss import where_weighted
from megatron_loss_agg.masks import MaskSums
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.tally import StepCounts, StepSums, Tally, exchange
from megatron_loss_agg.weights import (
    check_rejected,
    checked_custom,
    sample_coefficients,
    spread,
)

if TYPE_CHECKING:
    from megatron_loss_agg.terms import StepTerms, Term


_WIDE = (torch.float32, torch.float64, torch.bfloat16)


class StepPlan:
    """The weight of every token of this rank's microbatches, exact for the whole step."""

    def __init__(
        self, aggregation: LossAggregation, microbatches: Sequence[Microbatch], step: StepSums
    ) -> None:
        self.aggregation = aggregation
        self.microbatches = list(microbatches)
        self.counts: StepCounts = step.counts
        self._sizes = [microbatch.num_samples for microbatch in self.microbatches]
        self._group_sums = step.sums
        self._coefficients = _coefficients(aggregation, step).split(self._sizes)

    @classmethod
    def build(
        cls,
        agg: LossAggregation,
        microbatches: Sequence[Microbatch],
        group: dist.ProcessGroup | None = None,
        *,
        sharded_over: dist.ProcessGroup | None = None,
    ) -> StepPlan:
        """Count the step and exchange the counts, in at most two collectives.

        Masks come whole or sharded, and the difference is explicit:

        - whole (every context-parallel rank has the same full mask): ``group`` is the
          data-parallel group *without* context parallelism;
        - sharded: ``sharded_over`` is the context-parallel group, ``group`` the combined
          data-and-context-parallel group, and masks and offsets are this rank's local ones.

        Args:
            agg: what to compute.
            microbatches: this rank's, all of the step. Numbers may differ between ranks.
            group: who shares the step; None for one process.

        Raises:
            MaskError, GroupError: bad values or missing ids here; before the first use.
            ModeError: no aggregation, or another one on another rank.
            PeerError: bad input on another rank; every rank of ``group`` raises.
        """
        (plan,) = build_plans({"": agg}, [microbatches], group, sharded_over)
        return plan

    @staticmethod
    def build_terms(
        terms: Mapping[str, Term | LossAggregation],
        microbatches: Sequence[Microbatch | Mapping[str, Microbatch]],
        group: dist.ProcessGroup | None = None,
        *,
        sharded_over: dist.ProcessGroup | None = None,
    ) -> StepTerms:
        """`build` for a loss of several terms, each with a denominator of its own.

        Still at most two collectives, for up to eight terms; three for any number.

        Args:
            terms: by name, the same in the same order on every rank; an aggregation alone has the
                coefficient 1.
            microbatches: each one for all terms, or one for each where their masks differ.
            group, sharded_over: as for `build`.

        Raises: as `build`, of terms too.
        """
        from megatron_loss_agg.terms import StepTerms

        return StepTerms.build(terms, microbatches, group, sharded_over)

    @staticmethod
    def abandon(group: dist.ProcessGroup | None) -> None:
        """Stand in for `build` or `build_terms` on a rank that could not read its step.

        No rank waits for it then: the others raise PeerError, and this one its own error.
        """
        abandon(group)

    @property
    def is_empty(self) -> bool:
        """Whether no token of the whole step weighs anything, by its mask and rejection."""
        return self.counts.kept_tokens == 0

    def coefficients(self, i: int) -> Tensor:
        """``c_s`` of each sample of microbatch ``i``: fp64 [samples]; ``w_t = m_t * c_s``."""
        return self._coefficients[i]

    def group_sums(self, unit: Unit, i: int) -> Tensor:
        """Mask sum, over the step, of the group that each sample of microbatch ``i`` is in.

        fp64 [samples], on the CPU.

        Raises:
            GroupError: the mode has no need of ``unit``, or a microbatch no ids of it.
        """
        if unit not in self._group_sums:
            raise GroupError(f"no sums by {unit!r} in this plan; it has {[*self._group_sums]}")
        return self._group_sums[unit].split(self._sizes)[i]

    def weights(self, i: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Weights of microbatch ``i``: ``dtype``, in the shape and on the device of its mask.

        Summed over all microbatches and data-parallel ranks, ``(w * token_loss).sum()`` is the
        aggregated loss of the step.

        Raises:
            MaskError: a ``dtype`` that is no floating-point one, or of less range than fp32, in
                which the weights of a large step vanish.
            FunctionError: a custom function returned what cannot be weights.
        """
        if not isinstance(dtype, torch.dtype) or dtype not in _WIDE:
            raise MaskError(
                f"weights in dtype {dtype!r}; expected a floating-point one of the range of fp32: "
                "torch.float32, torch.float64 or torch.bfloat16"
            )
        microbatch = self.microbatches[i]
        if self.aggregation.function is not None:
            weights = checked_custom(
                self.aggregation.function(self, i), microbatch.loss_mask, dtype
            )
            if microbatch.rejected is not None:
                kept = self._spread((~microbatch.rejected).double(), microbatch, dtype)
                check_rejected(weights, kept)
            return weights
        return self._spread(self._coefficients[i], microbatch, dtype)

    @staticmethod
    def _spread(coefficient: Tensor, microbatch: Microbatch, dtype: torch.dtype) -> Tensor:
        mask = microbatch.loss_mask
        coefficient = coefficient.to(mask.device, non_blocking=True)
        length_S = None
        if microbatch.sample_starts is not None:
            length_S = microbatch.sample_starts.diff().to(mask.device, non_blocking=True)
        return spread(coefficient, mask, length_S, dtype)

    def scaled_advantages(self, i: int, advantages: Tensor) -> Tensor:
        """``w_t * A_t`` of microbatch ``i``, for a trainer that only sums its token losses.

        A policy loss is proportional to its advantage, so the sum of ``loss(w_t * A_t)`` over the
        step has the gradient of the sum of ``w_t * loss(A_t)``: the sum over tokens, without a
        mask, that Tinker's ``importance_sampling`` and ``ppo`` losses take. Weights must be
        non-negative, as those of all modes are, since a clip looks at the advantage's sign.

        Args:
            advantages: of the shape of the mask; whatever is at masked positions becomes 0.

        Raises:
            MaskError: the shapes differ.
            FunctionError: a custom aggregation has negative weights, or see `weights`.
        """
        mask = self.microbatches[i].loss_mask
        if not isinstance(advantages, Tensor) or advantages.shape != mask.shape:
            got = getattr(advantages, "shape", type(advantages).__name__)
            raise MaskError(
                f"advantages {got} for a mask of shape {tuple(mask.shape)}; expected one for "
                "each token"
            )
        dtype = torch.promote_types(advantages.dtype, torch.float32)
        w = self.weights(i, dtype)
        if self.aggregation.function is not None and bool((w < 0).any()):
            raise FunctionError(
                "the aggregation function returned negative weights, which turn the sign of an "
                "advantage; expected non-negative ones to scale advantages with"
            )
        return where_weighted(w, advantages.to(w)) * w


def build_plans(
    aggregations: Mapping[str, LossAggregation],
    microbatches: Sequence[Sequence[Microbatch]],
    group: dist.ProcessGroup | None,
    sharded_over: dist.ProcessGroup | None,
) -> list[StepPlan]:
    """A plan for each term, by its aggregation over its microbatches, in one exchange."""
    if sharded_over is not None and group is None:
        raise GroupError(
            "sharded_over without group; expected the combined data-and-context-parallel group"
        )
    try:
        lists = [_checked_microbatches(of_one) for of_one in microbatches]
        # Terms with the same masks read them once.
        masks = {mbs: MaskSums.read(mbs) for mbs in dict.fromkeys(lists)}
        tallies = {
            name: Tally(_checked_aggregation(agg), mbs, masks[mbs], sharded_over)
            for (name, agg), mbs in zip(aggregations.items(), lists, strict=True)
        }
    except Exception:
        abandon(group)
        raise
    steps = exchange(tallies, group)
    return [
        StepPlan(tally.agg, tally.microbatches, step)
        for tally, step in zip(tallies.values(), steps, strict=True)
    ]


def _checked_aggregation(agg: object) -> LossAggregation:
    if not isinstance(agg, LossAggregation):
        raise ModeError(f"a {type(agg).__name__} for agg; expected a LossAggregation")
    return agg


def _checked_microbatches(microbatches: Any) -> tuple[Microbatch, ...]:
    found = as_list(microbatches)
    for microbatch in found:
        if not isinstance(microbatch, Microbatch):
            raise MaskError(f"a {type(microbatch).__name__}; expected a list of Microbatch")
    return tuple(found)


def as_list(microbatches: Any) -> list[Any]:
    """An iterator gives its elements once, and every term of a loss needs them."""
    if not isinstance(microbatches, Iterable) or isinstance(microbatches, Tensor):
        raise MaskError(f"a {type(microbatches).__name__}; expected a list of Microbatch")
    return list(microbatches)


def _coefficients(agg: LossAggregation, step: StepSums) -> Tensor:
    """``c_s`` of every sample; fp64."""
    across = 1 if agg.across is None else step.number(agg.across, agg.empty == "skip")
    coefficient_S = sample_coefficients(step.within(agg.within), across, agg.scale)
    if step.rejected_S is None:
        return coefficient_S
    return coefficient_S.masked_fill(step.rejected_S, 0.0)


def token_weights(
    agg: LossAggregation,
    loss_mask: Tensor,
    cu_seqlens: Tensor | None = None,
    prompt_ids: Tensor | None = None,
    rollout_ids: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    cu_seqlens_padded: Tensor | None = None,
) -> Tensor:
    """Weights of a whole step that lies in one process, as one microbatch.

    ``(token_weights(agg, mask) * token_loss).sum()`` is the aggregated loss. Equivalent code for
    ``sample_mean`` on rows::

        sum((mask[s] * loss[s]).sum() / mask[s].sum() for s in range(batch)) / batch

    Args: as those of `Microbatch`.

    Returns:
        ``dtype``, shape of ``loss_mask``; counted in fp64.

    Raises: as `Microbatch`, `StepPlan.build` and `StepPlan.weights`.
    """
    microbatch = Microbatch(
        loss_mask, cu_seqlens, prompt_ids, rollout_ids, cu_seqlens_padded=cu_seqlens_padded
    )
    return StepPlan.build(agg, [microbatch]).weights(0, dtype)
