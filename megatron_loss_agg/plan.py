"""The plan of one optimizer step: counts over all of it, exchanged once, and every weight.

Suffixes: ``_S`` samples of all this rank's microbatches, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Unit
from megatron_loss_agg.errors import FunctionError, GroupError, MaskError, ModeError
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.tally import StepCounts, Tally, abandon
from megatron_loss_agg.weights import sample_coefficients, spread


class StepPlan:
    """The weight of every token of this rank's microbatches, exact for the whole step."""

    def __init__(
        self,
        aggregation: LossAggregation,
        microbatches: Sequence[Microbatch],
        counts: StepCounts,
        group_sums: dict[Unit, Tensor],
        coefficient_S: Tensor,
    ) -> None:
        self.aggregation = aggregation
        self.microbatches = list(microbatches)
        self.counts = counts
        self._sizes = [microbatch.num_samples for microbatch in self.microbatches]
        self._group_sums = {unit: sums.split(self._sizes) for unit, sums in group_sums.items()}
        self._coefficients = coefficient_S.split(self._sizes)

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
            PeerError: bad input on another rank; every rank of ``group`` raises.
        """
        if not isinstance(agg, LossAggregation):
            raise ModeError(f"a {type(agg).__name__} for agg; expected a LossAggregation")
        microbatches = list(microbatches)
        for microbatch in microbatches:
            if not isinstance(microbatch, Microbatch):
                raise MaskError(f"a {type(microbatch).__name__}; expected a list of Microbatch")
        if sharded_over is not None and group is None:
            raise GroupError(
                "sharded_over without group; expected the combined data-and-context-parallel group"
            )
        step = Tally(agg, microbatches, sharded_over).exchange(group)
        across = 1 if agg.across is None else step.number(agg.across, agg.empty == "skip")
        coefficient_S = sample_coefficients(step.within(agg.within), across, agg.scale)
        if not bool(coefficient_S.isfinite().all()):
            raise MaskError(
                "weights overflow: a mask sum or the divisor is too small; expected larger ones"
            )
        return cls(agg, microbatches, step.counts, step.sums, coefficient_S)

    @staticmethod
    def abandon(agg: LossAggregation, group: dist.ProcessGroup | None) -> None:
        """Stand in for `build` of whole masks on a rank that could not read its step.

        No rank waits for it then: the others raise PeerError, and this one its own error.
        """
        abandon(agg, group)

    def coefficients(self, i: int) -> Tensor:
        """``c_s`` of each sample of microbatch ``i``: fp64 [samples]; ``w_t = m_t * c_s``."""
        return self._coefficients[i]

    def group_sums(self, unit: Unit, i: int) -> Tensor:
        """Mask sum, over the step, of the group that each sample of microbatch ``i`` is in."""
        if unit not in self._group_sums:
            raise GroupError(f"no sums by {unit!r} in this plan; it has {[*self._group_sums]}")
        return self._group_sums[unit][i]

    def weights(self, i: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Weights of microbatch ``i``: ``dtype``, in the shape and on the device of its mask.

        Summed over all microbatches and data-parallel ranks, ``(w * token_loss).sum()`` is the
        aggregated loss of the step.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise MaskError(f"weights in dtype {dtype!r}; expected a floating-point torch.dtype")
        microbatch = self.microbatches[i]
        if self.aggregation.function is not None:
            return checked_custom(self.aggregation.function(self, i), microbatch, dtype)
        coefficient = self._coefficients[i].to(microbatch.loss_mask.device, non_blocking=True)
        return spread(coefficient, microbatch.loss_mask, microbatch.sample_index(), dtype)


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
    """
    microbatch = Microbatch(
        loss_mask, cu_seqlens, prompt_ids, rollout_ids, cu_seqlens_padded=cu_seqlens_padded
    )
    return StepPlan.build(agg, [microbatch]).weights(0, dtype)


def checked_custom(weights: object, microbatch: Microbatch, dtype: torch.dtype) -> Tensor:
    """``weights`` of a custom function in ``dtype``, if they are usable for ``microbatch``."""
    mask = microbatch.loss_mask
    if not isinstance(weights, Tensor) or weights.shape != mask.shape or weights.is_complex():
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise FunctionError(
            f"the aggregation function returned {got}; expected real weights of the mask's shape "
            f"{tuple(mask.shape)}"
        )
    weights = weights.detach().to(dtype)
    if not bool((weights.isfinite() & ((weights == 0) | (mask != 0))).all()):
        raise FunctionError(
            "the aggregation function returned weights that are not finite, or not 0 where the "
            "mask is 0; expected finite weights, and 0 on masked tokens"
        )
    return weights
