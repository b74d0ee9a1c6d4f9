"""What the host does to a loss that a loss function returns, and its inverse.

Megatron-Core 0.13 to 0.19, with ``n_mb`` microbatches, ``d`` data-parallel and ``c``
context-parallel ranks:

=================== ========= ================================================================
loss function gives per token host multiplies the gradient of the sum over ranks by
=================== ========= ================================================================
(loss, report)      off       ``c / n_mb`` in the schedule, ``1 / (d c)`` in DDP
(loss, n, report)   off       ``1 / (max(n, 1) n_mb)``, ``1 / (d c)``: not used here
(loss, n, report)   on        ``1 / max(sum of n over microbatches and ranks, 1)`` in finalize
(loss, report)      on        the token total stays 0: not used here
=================== ========= ================================================================

This is the only file that undoes the division by the number of microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class HostScale:
    """The host's own averaging of one step on this rank."""

    num_microbatches: int  # of this rank
    data_parallel_size: int  # without context parallelism
    context_parallel_size: int
    per_token: bool  # config.calculate_per_token_loss

    @property
    def reports_per_step(self) -> int:
        """Number of reports over all microbatches and ranks, which the host adds up."""
        return self.num_microbatches * self.data_parallel_size * self.context_parallel_size

    def returned(
        self, loss: Tensor, num_tokens: Tensor, total_tokens: float, report: dict[str, Any]
    ) -> tuple[Any, ...]:
        """What to return so that the host's gradient is that of ``loss`` summed over the step.

        Args:
            loss: this rank's ``sum w * loss`` of one microbatch.
            num_tokens: int32, this rank's active tokens of the microbatch. The host scales MoE and
                MTP losses by their total, so it stays the true count.
            total_tokens: sum of ``num_tokens`` over microbatches, data- and context-parallel ranks.
        """
        loss = loss * self.multiplier(total_tokens)
        return (loss, num_tokens, report) if self.per_token else (loss, report)

    def multiplier(self, total_tokens: float) -> float:
        """The inverse of what the host does to the sum over ranks and microbatches."""
        if self.per_token:
            return max(total_tokens, 1)
        return self.num_microbatches * self.data_parallel_size
