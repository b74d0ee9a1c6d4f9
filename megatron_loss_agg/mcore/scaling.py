"""How the host scales the loss that a loss function returns, and how to undo it.

Megatron-Core 0.13 to 0.19, with ``n_mb`` microbatches, ``d`` data-parallel and ``c``
context-parallel ranks:

=================== ========= ================================================================
returned value      per token host multiplies the gradient, summed over ranks, by
=================== ========= ================================================================
(loss, report)      off       ``c / n_mb`` in the schedule, ``1 / (d c)`` in DDP
(loss, n, report)   off       ``1 / (max(n, 1) n_mb)``, ``1 / (d c)``; not used here
(loss, n, report)   on        ``1 / max(sum of n over microbatches and ranks, 1)`` in finalize
(loss, report)      on        undefined: the token total stays 0; not used here
=================== ========= ================================================================

No other file undoes the division by the number of microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class HostScale:
    """The host's scaling of the loss in one step."""

    num_microbatches: int  # of this rank
    data_parallel_size: int  # without context parallelism
    context_parallel_size: int
    per_token: bool  # config.calculate_per_token_loss

    @property
    def reports_per_step(self) -> int:
        """Number of reports that the host sums, over all microbatches and ranks."""
        return self.num_microbatches * self.data_parallel_size * self.context_parallel_size

    def returned(
        self, loss: Tensor, num_tokens: Tensor, total_tokens: float, report: dict[str, Any]
    ) -> tuple[Any, ...]:
        """What to return so that the host computes the gradient of ``loss`` summed over the step.

        Args:
            loss: this rank's ``sum w * loss`` of one microbatch.
            num_tokens: int32, this rank's active tokens of the microbatch. Must be the true count,
                since the host scales MoE and MTP losses by the total.
            total_tokens: sum of ``num_tokens`` over microbatches, data- and context-parallel ranks.
        """
        loss = loss * self.multiplier(total_tokens)
        return (loss, num_tokens, report) if self.per_token else (loss, report)

    def multiplier(self, total_tokens: float) -> float:
        """The inverse of the host's scaling of the sum over ranks and microbatches."""
        if self.per_token:
            return max(total_tokens, 1)
        return self.num_microbatches * self.data_parallel_size
