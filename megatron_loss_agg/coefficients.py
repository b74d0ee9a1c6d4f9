"""The coefficient ``c_s`` of every sample of this rank, exact for the whole step."""

from __future__ import annotations

import operator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, Unit
from megatron_loss_agg.counting.counts import LocalTerm
from megatron_loss_agg.counting.exchange import Counted
from megatron_loss_agg.errors import GroupError, StepError
from megatron_loss_agg.weights import sample_coefficients


class StepCoefficients:
    """What a step's plan knows without masks by token.

    Attributes:
        aggregation: the `LossAggregation` it was made for.
        counts: `StepCounts` over all microbatches of all ranks.
        mask_totals: the mask sum of each microbatch, rejected samples included.
        active_tokens: for each microbatch, the number of positions with a nonzero mask; empty in a
            plan from mask sums.
    """

    def __init__(self, term: LocalTerm, counted: Counted) -> None:
        agg, samples = term.agg, term.samples
        self.aggregation = agg
        self.counts, within_S, self._group_sums, self._groups = counted
        self.mask_totals = samples.mask_totals
        self.active_tokens = samples.active_tokens
        self._sums_S = samples.sums_S
        self._places = [slice(*ends) for ends in pairwise(accumulate(samples.sizes, initial=0))]
        zero_S = samples.sums_S == 0
        if samples.rejected_S is not None:
            zero_S |= samples.rejected_S
        self._coefficient_S = sample_coefficients(
            within_S, self.counts.across, agg.scale, zero_S, samples.weights_S
        )

    @property
    def is_empty(self) -> bool:
        """Whether every token of the whole step is masked or belongs to a rejected sample."""
        return self.counts.kept_tokens == 0

    def coefficients(self, i: int) -> Tensor:
        """``c_s`` of each sample of microbatch ``i``, with ``w_t = m_t * c_s``: fp64 [samples].

        With the sample's own weight; 0 for rejected samples and for samples whose mask sum is 0.
        """
        return self._coefficient_S[self._place(i)].clone()

    def mask_sums(self, i: int) -> Tensor:
        """Mask sum of each sample of microbatch ``i``, rejected ones included: fp64 [samples]."""
        return self._sums_S[self._place(i)].clone()

    def group_sums(self, unit: Unit, i: int) -> Tensor:
        """Mask sum over the step of each sample's group, for microbatch ``i``.

        fp64 [samples], on the CPU.

        Raises:
            GroupError: the mode does not use ``unit``, or a microbatch has no ids for it.
        """
        place = self._place(i)
        if unit in self._group_sums:
            return self._group_sums[unit][place].clone()
        own_S = self._group_sums["sample"][place]
        if unit == "step":
            return torch.full_like(own_S, self.counts.tokens)
        if unit == "microbatch":
            return torch.full_like(own_S, float(own_S.sum()))
        raise GroupError(
            f"no sums by {unit!r} in this plan; expected one of "
            f"{', '.join(sorted({'step', 'microbatch', *self._group_sums}))}"
        )

    def groups(self, unit: Unit) -> tuple[Tensor, Tensor]:
        """All groups of the whole step, the same on every rank: ids and mask sums.

        int64 [groups], sorted and distinct, and fp64 [groups], on the CPU. Without groups all of
        whose samples are rejected, if ``rejected`` is ``skip``.

        Raises:
            GroupError: ``unit`` has no ids, or neither the mode nor ``group_by`` names it.
        """
        if unit not in BY_ID or unit not in self._groups:
            raise GroupError(
                f"no groups by {unit!r} in this plan; expected one of {', '.join(BY_ID)}, that the "
                "mode uses or that group_by names"
            )
        ids, sums = self._groups[unit]
        return ids.clone(), sums.clone()

    def _place(self, i: Any) -> slice:
        """Where the samples of microbatch ``i`` lie in the vectors of all."""
        try:
            return self._places[operator.index(i)]
        except (TypeError, IndexError):
            raise StepError(
                f"microbatch {i!r} of a plan of {len(self._places)} microbatches; expected an int "
                "from 0 to one less"
            ) from None
