"""Reports of the weights themselves: the unevenness of those of a step's samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.collectives import broadcast_result
from megatron_loss_agg.counting import coefficients
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.reports import MicrobatchLoss
from megatron_loss_agg.plan import StepPlan, plan_of_first_term

_TENTH = 0.1


class Weighing(NamedTuple):
    """The unevenness of samples' weights, ``W_s = c_s * M_s``."""

    effective_samples: float
    """``(sum W)^2 / sum W^2``: as many samples of one weight would be as uneven."""
    longest_tenth: float
    """The part of ``sum W`` on the tenth of the samples that has the most tokens."""

    @classmethod
    def of(cls, mask_sum_S: Tensor, coefficient_S: Tensor) -> Weighing:
        """Of the samples with weight; 0 and 0 if there are none.

        Of samples of one length that do not all fit into the longest tenth, each is in it in part.
        """
        weight_S = mask_sum_S * coefficient_S
        is_weighed_S = weight_S != 0
        weight_S, mask_sum_S = weight_S[is_weighed_S], mask_sum_S[is_weighed_S]
        total = weight_S.sum()
        if not len(weight_S) or total == 0:
            return cls(0.0, 0.0)
        lengths_L, length_S = torch.unique(mask_sum_S, return_inverse=True)  # in rising order
        number_L = torch.bincount(length_S, minlength=len(lengths_L)).double().flip(0)
        weight_L = weight_S.new_zeros(len(lengths_L)).index_add_(0, length_S, weight_S).flip(0)
        longer_L = number_L.cumsum(0) - number_L
        part_L = ((_TENTH * len(weight_S) - longer_L) / number_L).clamp(0, 1)
        return cls(
            float(total.square() / weight_S.square().sum()),
            float((part_L * weight_L).sum() / total),
        )


class WeightReports(Extension):
    """Adds ``effective samples`` and ``weight of longest tenth``, of each training step.

        hook = LossHook(LossAggregation(mode="token_mean"), extensions=[WeightReports()])

    Both are of the whole step, and of the first term of several; see `Weighing`.
    """

    def __init__(self) -> None:
        self._weighing = Weighing(0.0, 0.0)

    def before_step(self, call: Call, plans: Mapping[str, StepPlan] | None) -> None:
        if plans is None or not call.trains:
            return
        plan = plan_of_first_term(plans)
        self._weighing = broadcast_result(lambda: _weighing(plan), call.groups.tp, 0)

    def on_loss(self, microbatch: MicrobatchLoss) -> None:
        if not microbatch.call.trains:
            return
        # Every microbatch of every rank has its part of the number.
        call, first = microbatch.call, plan_of_first_term(microbatch.plans)
        ranks = call.scale.data_parallel_size * call.groups.cp_size
        parts = len(first.sizes) * ranks
        for name, value in zip(REPORTS, self._weighing, strict=True):
            part = microbatch.total.new_full((), value / parts)
            microbatch.report(name, microbatch.pair(part))

    def first_lines(self, plans: Mapping[str, StepPlan]) -> Mapping[str, str]:
        plan = plan_of_first_term(plans)
        if plan.is_empty:
            return {}
        effective_samples, longest_tenth = _weighing(plan)
        return {
            "weighed": f"{effective_samples:.4g} effective samples, {longest_tenth:.1%} of the weight "
            "on the longest tenth"
        }


REPORTS = ("effective samples", "weight of longest tenth")
"""The names of the fields of `Weighing`."""


def _weighing(plan: StepPlan) -> Weighing:
    """Of the samples of all ranks, on a rank that reads them."""
    assert plan.samples is not None
    coefficient_S, _ = coefficients(plan.aggregation, plan.samples)
    return Weighing.of(plan.samples.mask_sum, coefficient_S)
