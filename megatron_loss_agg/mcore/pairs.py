"""Reports of one microbatch on one rank: pairs, as Megatron's training loop reduces them.

The loop adds up both elements over microbatches and ranks, in an evaluation over its calls, too,
and then divides the first by the second.

Pairs are handed out as rows of one tensor for each report, and filled together when the call ends:
a few operations a call instead of several a microbatch. Until then they are NaN.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.mcore.evaluation import RunningMean, report_weight
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.local_weights import LocalMask
from megatron_loss_agg.mcore.step_weights import StepWeights
from megatron_loss_agg.weights import weighted_sum_of_vectors


class Pairs:
    """The pairs of one call's reports.

    Args:
        running_means: by report, if the host averages quotients instead of summing pairs.
    """

    def __init__(
        self,
        call: Call,
        weights: StepWeights,
        running_means: MutableMapping[str, RunningMean] | None,
    ) -> None:
        self.call, self.weights, self.running_means = call, weights, running_means
        # Of the step, over microbatches and ranks.
        self.reports = weights.counts.microbatches * call.scale.context_parallel_size
        self._of_reports: dict[str, _Rows] = {}

    def of(self, mask: LocalMask, gather: str | None) -> MicrobatchPairs:
        """Those of the next microbatch.

        Args:
            mask: the first term's, of this rank's tokens.
            gather: `TokenLoss.whole`.
        """
        return MicrobatchPairs(self, mask.total, self.call.scale.loss_copies(gather))

    def is_first(self, key: str) -> bool:
        """Whether the report is the call's first one of that name."""
        return key not in self._of_reports

    def row(self, key: str, total: Tensor, factor: float, count: float) -> Tensor:
        """[2], in the dtype of ``total``: ``total * factor`` and ``count``, from `finish` on."""
        rows = self._of_reports.get(key)
        if rows is None:
            rows = self._of_reports[key] = _Rows.of(self.call.scale.num_microbatches, total)
        rows.totals.append(total)
        rows.numbers.append((factor, count))
        return rows.rows[len(rows.totals) - 1]

    def finish(self) -> None:
        """Fill all pairs."""
        reports = [*self._of_reports.values()]
        if not reports:
            return
        totals = torch.stack([total for rows in reports for total in rows.totals])
        numbers = [n for rows in reports for pair in rows.numbers for n in pair]
        made = torch.tensor(numbers, dtype=totals.dtype).view(-1, 2)
        filled = made.to(totals.device, non_blocking=True)
        filled.select(1, 0).mul_(totals)
        for rows, own in zip(reports, filled.split([len(x.totals) for x in reports]), strict=True):
            rows.table[: len(own)] = own


class MicrobatchPairs(NamedTuple):
    """Makes pairs of this rank's parts of sums over the step."""

    of_call: Pairs
    mask_total: float
    copies: int  # context-parallel ranks that have the loss of the same tokens

    def summed(self, key: str, part: Tensor, denominator: float = 1.0) -> Tensor:
        """The pair for a part of a sum over the step, whose quotient becomes the sum.

        In an evaluation of several calls, a call weighs as much as the denominator.
        """
        pairs, copies = self.of_call, self.copies
        if pairs.weights.divided_by_host:
            return pairs.row(key, part, 1 / copies, self.mask_total / copies)
        number = pairs.reports // copies
        if pairs.running_means is not None:
            value = pairs.running_means[key].add(part, denominator, pairs.is_first(key))
            return pairs.row(key, value.to(part.dtype), number, 1.0)
        evaluates = pairs.call.forward_only
        count = report_weight(denominator, pairs.reports) if evaluates else 1.0
        return pairs.row(key, part, number * count, count)

    def token_mean(self, key: str, losses: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """The pair of a microbatch's masked sum and mask sum, whose quotient is the mean."""
        # Half precision could not count the tokens.
        wide = torch.promote_types(mask.dtype, torch.float32)
        mask = mask.detach().reshape(-1)
        mask = mask if mask.dtype == wide else mask.to(wide)
        total = weighted_sum_of_vectors(mask, losses.detach())
        total = total if total.dtype == dtype else total.to(dtype)
        pairs = self.of_call
        if pairs.running_means is None:
            return pairs.row(key, total, 1 / self.copies, self.mask_total / self.copies)
        tokens = pairs.weights.counts.all_tokens
        return self.summed(key, total / (tokens or 1.0), tokens)


class _Rows(NamedTuple):
    """Of one report's name."""

    table: Tensor  # [microbatches, 2]
    rows: tuple[Tensor, ...]
    totals: list[Tensor]
    numbers: list[tuple[float, float]]  # factor of the total, count

    @classmethod
    def of(cls, number: int, like: Tensor) -> _Rows:
        table = like.new_full((number, 2), math.nan)
        return cls(table, table.unbind(), [], [])
