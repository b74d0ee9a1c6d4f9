"""Reports of one microbatch on one rank: pairs, as Megatron's training loop reduces them.

The loop adds up both elements over microbatches and ranks, in an evaluation over its calls, too,
and then divides the first by the second.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor

from megatron_loss_agg.mcore.evaluation import RunningMean, report_weight
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.local_weights import LocalMask
from megatron_loss_agg.mcore.step_weights import StepWeights
from megatron_loss_agg.weights import at_least_fp32, weighted_sum_of_vectors


class Pairs:
    """Makes pairs of this rank's parts of sums over the step.

    Args:
        mask: the first term's, of this rank's tokens.
        gather: `TokenLoss.whole`.
        running_means: by report, if the host averages quotients instead of summing pairs.
        first: whether this is the call's first microbatch.
    """

    def __init__(
        self,
        call: Call,
        weights: StepWeights,
        mask: LocalMask,
        gather: str | None,
        running_means: MutableMapping[str, RunningMean] | None,
        first: bool,
    ) -> None:
        self._weights, self._mask = weights, mask
        self._running_means, self._first = running_means, first
        self._evaluates = call.forward_only
        self._copies = call.scale.loss_copies(gather)
        # Of the step, over microbatches and ranks.
        self._reports = weights.counts.microbatches * call.scale.context_parallel_size

    def summed(self, key: str, part: Tensor, denominator: float = 1.0) -> Tensor:
        """The pair for a part of a sum over the step, whose quotient becomes the sum.

        In an evaluation of several calls, a call weighs as much as the denominator.
        """
        if self._weights.divided_by_host:
            return _pair(part, 1 / self._copies, self._mask.total / self._copies)
        number = self._reports // self._copies
        if self._running_means is not None:
            value = self._running_means[key].add(part, denominator, self._first)
            return _pair(value.to(part.dtype), number, 1.0)
        count = report_weight(denominator, self._reports) if self._evaluates else 1.0
        return _pair(part, number * count, count)

    def token_mean(self, key: str, losses: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """The pair of a microbatch's masked sum and mask sum, whose quotient is the mean."""
        wide = at_least_fp32(mask.dtype)
        mask = mask.detach().reshape(-1).to(wide)
        total = weighted_sum_of_vectors(mask, losses.detach()).to(dtype)
        if self._running_means is None:
            return _pair(total, 1 / self._copies, self._mask.total / self._copies)
        tokens = self._weights.counts.all_tokens
        return self.summed(key, total / (tokens or 1.0), tokens)


def _pair(total: Tensor, factor: float, count: float) -> Tensor:
    """[2], in the dtype of ``total``: ``total * factor`` and ``count``; waits for no GPU."""
    pair = total.new_full((2,), count)
    pair.select(0, 0).copy_(total * factor)
    return pair
