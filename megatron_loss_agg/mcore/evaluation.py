"""What an evaluation's reports weigh, so that their sum over iterations is a mean over the set.

Megatron adds up a report's pairs over microbatches, ranks and the iterations of an evaluation, and
divides the sums. An iteration's aggregated loss is ``L = S / D``, with the denominator ``D`` of the
aggregation. Its pairs add up to ``(L * D, D)``, so that ``sum L * D / sum D`` over the iterations
is the mean over the tokens, samples or groups of all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_loss_agg.plan import StepPlan

_LEAST = torch.finfo(torch.float32).tiny
"""The weight of an empty iteration: lost beside any other, but no division by 0 without others."""


def denominator(plan: StepPlan) -> float:
    """What the aggregation divides by, over one whole call of the schedule.

    ``token_mean``: the sum of the masks. Modes that count groups: their number, without empty ones
    under ``empty="skip"``. Both with sample weights, where they count. ``sum`` and ``custom``: 1.
    """
    within_step = plan.aggregation.within == "step"
    return plan.counts.across * (plan.counts.tokens if within_step else 1.0)


def report_weight(denominator: float, reports: int) -> float:
    """The part of ``denominator`` that each of a call's ``reports`` carries."""
    return max(denominator / reports, _LEAST)


class RunningMean:
    """Values whose mean over an evaluation's calls is the mean over all of their denominators.

    For a host that averages the calls' values with equal weights (``evaluate`` under ``--sft``).
    With ``R_k`` the mean ``sum L * D / sum D`` over the first ``k`` calls, the value of call ``k``
    is ``k R_k - (k - 1) R_{k-1}``, so that the first ``k`` values add up to ``k R_k``. It is linear
    in the parts of ``L``: every rank uses its own, and the host adds them up.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._denominators = 0.0  # of all calls
        self._sum: Tensor | float = 0.0  # fp64: of this rank's parts of L * D

    def add(self, part: Tensor, denominator: float, first: bool) -> Tensor:
        """This rank's part of the call's value, for its ``part`` of ``L`` in one microbatch.

        Args:
            first: whether it is the call's first microbatch.
        """
        carried: Tensor | float = 0.0
        if first:
            before = _over(self._calls, self._denominators)
            self._calls += 1
            self._denominators += denominator
            carried = (_over(self._calls, self._denominators) - before) * self._sum
        part = part.double() * denominator
        self._sum = self._sum + part
        return part * _over(self._calls, self._denominators) + carried


def _over(calls: int, denominators: float) -> float:
    return calls / denominators if denominators else 0.0
