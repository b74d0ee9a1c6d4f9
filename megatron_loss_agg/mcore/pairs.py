"""Reports of one microbatch on one rank: pairs, as Megatron's training loop reduces them.

The loop adds up both elements over microbatches and ranks, in an evaluation over its calls, too,
and then divides the first by the second.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.mcore.evaluation import RunningMean, report_weight
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.local_weights import LocalMask
from megatron_loss_agg.mcore.step_weights import StepWeights
from megatron_loss_agg.transfer import moved
from megatron_loss_agg.weights import at_least_fp32, in_dtype, weighted_sum_of_fitting


@dataclass(slots=True)
class Pair:
    """``(total * factor, count)``; `make_pairs` makes it a tensor."""

    total: Tensor  # a scalar; the pair gets its dtype, fp32 or fp64
    factor: float
    count: float


class Pairs:
    """Pairs of this rank's parts of sums over the step.

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

    def summed(self, key: str, part: Tensor, denominator: float = 1.0) -> Pair:
        """The pair for a part of a sum over the step, whose quotient becomes the sum.

        In an evaluation of several calls, a call weighs as much as the denominator.
        """
        part = part.detach()
        if self._weights.divided_by_host:
            return Pair(part, 1 / self._copies, self._mask.total / self._copies)
        number = self._reports // self._copies
        if self._running_means is not None:
            value = self._running_means[key].add(part, denominator, self._first)
            return Pair(value.to(part.dtype), number, 1.0)
        count = report_weight(denominator, self._reports) if self._evaluates else 1.0
        return Pair(part, number * count, count)

    def token_mean(self, key: str, losses: Tensor, mask: Tensor, dtype: torch.dtype) -> Pair:
        """The pair of a microbatch's masked sum and mask sum, whose quotient is the mean."""
        mask = in_dtype(mask.flatten(), at_least_fp32(mask.dtype))
        total = in_dtype(weighted_sum_of_fitting(mask, losses.detach()), dtype)
        if self._running_means is None:
            return Pair(total, 1 / self._copies, self._mask.total / self._copies)
        tokens = self._weights.counts.all_tokens
        return self.summed(key, total / (tokens or 1.0), tokens)


def make_pairs(reports: Iterable[dict[str, Any]]) -> None:
    """Replace every `Pair` of ``reports`` by its tensor [2], all together; waits for no GPU."""
    places = [
        (report, key) for report in reports for key in report if isinstance(report[key], Pair)
    ]
    if not places:
        return
    pairs = [report[key] for report, key in places]
    totals = torch.stack([pair.total for pair in pairs])
    numbers = [number for pair in pairs for number in (pair.factor, pair.count)]
    (made,) = moved([torch.tensor(numbers, dtype=totals.dtype)], totals.device)
    made[::2].mul_(totals)
    for (report, key), pair, tensor in zip(places, pairs, made.view(-1, 2).unbind(), strict=True):
        report[key] = in_dtype(tensor, pair.total.dtype)
