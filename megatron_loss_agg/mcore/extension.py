"""The interface of users' extensions of a hook."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.reports import MicrobatchLoss
from megatron_loss_agg.plan import StepPlan


class Extension:
    """Something that a hook does besides its loss; each method may be left out.

    An extension may raise, add to ``MicrobatchLoss.total`` and add reports.
    """

    def before_step(self, call: Call, plans: Mapping[str, StepPlan] | None) -> None:
        """On every rank, once for each step or evaluation call, after counting.

        May communicate. The plans are by term; None on the pipeline stages without a loss. Plans
        hold masks and the samples of all ranks only where batches are read (`reads_data`).
        """

    def first_lines(self, plans: Mapping[str, StepPlan]) -> Mapping[str, str]:
        """Texts by label for the log's first lines, on the rank that prints them.

        The plans are by term, and hold the samples of all ranks.
        """
        return {}

    def on_loss(self, microbatch: MicrobatchLoss) -> None:
        """For the loss of each microbatch, on the ranks that compute it; must not communicate."""
