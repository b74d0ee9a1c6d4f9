"""Reports as pairs: Megatron's loop reduces them over microbatches, ranks and evaluation calls.

Megatron adds up both elements of a pair and then divides the first by the second. In some releases,
and in evaluations with ``--sft``, it instead divides each microbatch's pair (by 1 if the
denominator is below 1) and averages the quotients. The pairs here come out right both ways. A part
``x`` of the sum ``S = sum x`` becomes

    (x * D * C, D * C / P)      sum / sum = S        mean of quotients = sum (x * P) / P = S

where ``P`` is the number of this rank's microbatches times all data- and context-parallel ranks,
``D`` is the aggregation's denominator, and ``C`` is a large constant that keeps denominators above
1. An evaluation adds up the pairs of its calls: ``sum S * D / sum D`` is the mean over the tokens,
samples or groups of all calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.forward_step import TermLosses, merged_reports
from megatron_loss_agg.mcore.split import RankSamples
from megatron_loss_agg.plan import StepPlan, plan_of_first_term
from megatron_loss_agg.tensors import at_least_fp32
from megatron_loss_agg.weighted_sum import weighted_sum_unchecked

_LARGE = 2.0**30
_MIN_DENOMINATOR = torch.finfo(torch.float32).tiny
"""The denominator of an empty call: negligible next to a real one; avoids 0/0 if all are empty."""


@dataclass
class MicrobatchLoss:
    """The loss of one microbatch on this rank, before Megatron's scale; mappings are by term."""

    call: Call
    plans: Mapping[str, StepPlan]
    i: int  # the microbatch's index in its step
    terms: Mapping[str, TermLosses]
    weights: Mapping[str, Tensor]  # in the shape of the losses
    samples: Mapping[str, RankSamples]  # the samples of this rank's tokens
    total: Tensor  # the loss; an extension may change it
    reports: dict[str, Any]
    stock_loss: Any = None
    """The loss that the script's stock loss function returned; None if there is none to compare.

    After the extensions have run, it is compared with the masked sum of the model's output. An
    extension that expects another result, such as a sum of two losses, makes its own comparison and
    sets this to None.
    """

    def report(self, name: str, pair: Any) -> None:
        """Add a report, such as a `pair`.

        Raises:
            DataError: there already is a report of this name.
        """
        self.reports = merged_reports(self.reports, {name: pair})

    def pair(self, part: Tensor, denominator: float = 1.0) -> Tensor:
        """[2]: this rank's part of a sum over the step, as Megatron reduces it."""
        return report_pair(self.call, plan_of_first_term(self.plans), part, denominator)

    def constant_pair(self, value: float) -> Tensor:
        """[2]: an equal share, for each microbatch of each rank, of a value for the whole step."""
        num_microbatches = len(plan_of_first_term(self.plans).sizes)
        ranks = self.call.groups.num_counted_ranks
        return self.pair(self.total.new_full((), value / (num_microbatches * ranks)))


def report_pair(
    call: Call, plan: StepPlan, part: Tensor, denominator: float = 1.0, divisor: float = 1.0
) -> Tensor:
    """[2]: a part of a sum over the call. Megatron's quotient becomes the sum over ``divisor``."""
    pairs = len(plan.sizes) * call.groups.num_counted_ranks
    weight = max(denominator, _MIN_DENOMINATOR) * _LARGE
    pair = part.new_full((2,), weight / pairs)
    torch.mul(part.detach(), weight / divisor, out=pair[0])
    return pair


def aggregated_pair(call: Call, plan: StepPlan, part: Tensor) -> Tensor:
    """[2]: a part of the aggregated loss of the call."""
    return report_pair(call, plan, part, report_denominator(plan))


def report_denominator(plan: StepPlan) -> float:
    """The denominator of the aggregation, over one whole call of the schedule.

    ``token_mean``: the sum of the masks. Modes that count groups: the number of groups, without
    empty ones if ``empty="skip"``. Both include sample weights if these count. ``sum`` and
    ``custom``: 1.
    """
    tokens = plan.counts.tokens if plan.aggregation.within == "all" else 1.0
    return plan.counts.across * tokens


def token_mean_pair(microbatch: MicrobatchLoss, masked_sum: Tensor | None) -> Tensor:
    """The mean over all tokens of the call: Megatron's ``lm loss``.

    Args:
        masked_sum: the masked sum of this rank's losses, if the script has computed it.
    """
    plan = plan_of_first_term(microbatch.plans)
    if masked_sum is None:
        (term,) = microbatch.terms.values()
        masked_sum = weighted_sum_unchecked(term.mask, term.losses.detach())
    part = masked_sum.reshape(()).to(at_least_fp32(masked_sum.dtype))
    tokens = plan.counts.all_tokens
    return report_pair(microbatch.call, plan, part, denominator=tokens, divisor=tokens or 1.0)
