"""Megatron's scaling of a loss, and the number that undoes it.

With ``n_mb`` microbatches, ``d`` data-parallel and ``c`` context-parallel ranks, Megatron-Core 0.13
to 0.19 multiplies the gradient of a loss function's result, summed over ranks, by:

======================= ========= ============================================================
loss function returns   per token Megatron multiplies by
======================= ========= ============================================================
(loss, report)          off       ``c / n_mb`` in the schedule, ``1 / (d c)`` in DDP
(loss, n, report)       off       ``1 / (max(n, 1) n_mb)``, ``1 / (d c)``: not used here
(loss, n, report)       on        ``1 / max(sum of n over microbatches and ranks, 1)`` at the end
(loss, report)          on        the token total stays 0: not used here
(loss, report)          off       ``1`` with ``loss_is_normalized`` (`patches/megatron-lm`)
(loss, n, report)       on        ``1`` in a step counted at its end (`StreamScale`)
======================= ========= ============================================================

"Per token" is ``config.calculate_per_token_loss``. Only this file undoes these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import HostError

_MAX_TOKENS = 2**31 - 1  # Megatron adds up token counts as int32


@dataclass(frozen=True)
class MegatronScale:
    """Megatron's averaging in one call of its schedule on this rank."""

    num_microbatches: int  # of this rank
    data_parallel_size: int  # without context parallelism
    per_token: bool  # config.calculate_per_token_loss
    normalized: bool = False  # config.loss_is_normalized: Megatron only sums
    denominator: float = 1.0  # see `StreamScale`

    def inverse(self, total_tokens: int) -> float:
        """The reciprocal of Megatron's factor on the loss summed over ranks and microbatches.

        Args:
            total_tokens: the token counts that all ranks return to Megatron in the step, summed.
        """
        if self.per_token:
            return float(max(total_tokens, 1))
        if self.normalized:
            return 1.0
        return float(self.num_microbatches * self.data_parallel_size)

    def in_words(self) -> str:
        """Megatron's factor on the loss summed over ranks and microbatches."""
        if self.per_token:
            return "divides by the tokens of the step (--calculate-per-token-loss)"
        if self.normalized:
            return "adds up (loss_is_normalized)"
        return "averages over microbatches and data-parallel ranks"

    def returned(
        self, loss: Tensor, num_tokens: int, total_tokens: int, report: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The results of a loss function that give the gradient of ``loss`` summed over ranks.

        Args:
            num_tokens: token count that this rank returns to Megatron for the microbatch. It must be
                the true count, since Megatron scales MoE and MTP losses by the total.
            total_tokens: as in `inverse`.

        Raises:
            HostError: there are more tokens than Megatron can add up.
        """
        if self.per_token and total_tokens > _MAX_TOKENS:
            raise HostError(
                f"a step must have at most {_MAX_TOKENS} tokens under calculate_per_token_loss, which "
                f"Megatron counts as int32, got {total_tokens}. Turn --calculate-per-token-loss off."
            )
        # Multiply even by 1: it makes a new tensor, which Megatron may scale in place.
        scaled = loss * self.inverse(total_tokens)
        if not self.per_token:
            return scaled, report
        return scaled, torch.full((), num_tokens, dtype=torch.int, device=loss.device), report


@dataclass(frozen=True)
class StreamScale(MegatronScale):
    """Megatron's averaging in a step that is counted at its end.

    Its microbatches are counted in parts, and the loss of each is a mean over its part. Multiplied
    by the part's denominator, it is a sum. At the end of the step, Megatron divides the gradients
    by the sum of all denominators instead of its token count.

    Attributes:
        denominator: the part's denominator, times `stream.denominator_factor`.
    """

    def inverse(self, total_tokens: int) -> float:
        if self.per_token or self.normalized:
            return self.denominator
        return self.num_microbatches * self.data_parallel_size * self.denominator

    def in_words(self) -> str:
        return "divides by the denominators of all parts of the step"
