"""The microbatches of an optimizer step, which one call of the schedule takes, or several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_loss_agg.errors import StepError
from megatron_loss_agg.mcore.step_weights import StepWeights


class OptimizerStep:
    """Microbatches that are counted together and taken by one or several calls of the schedule."""

    def __init__(self, number: int, read: Callable[[], Any] = list) -> None:
        self.number = number
        self.left = number
        self._read = read
        self._weights: StepWeights | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no call has taken any of them yet."""
        return self.left == self.number

    def take(self, number: int) -> int:
        """Take the next ``number`` microbatches; return the index of the first.

        Raises:
            StepError: fewer are left.
        """
        if number > self.left:
            raise StepError(
                f"a call with num_microbatches={number} in a hook.step with {self.left} of "
                f"{self.number} microbatches left; expected at most as many (a call that failed "
                "has taken its own)"
            )
        self.left -= number
        return self.number - self.left - number

    def weights(self, plan: Callable[[Callable[[], Any], int], StepWeights]) -> StepWeights:
        """The weights of all of them, planned when first asked for."""
        if self._weights is None:
            self._weights = plan(self._read, self.number)
        return self._weights

    def carried_tokens(self, first: int) -> int:
        """Host's tokens of earlier calls, if the call that begins with ``first`` is the last one.

        The host scales the gradients of all calls by the token count of the last one.
        """
        if self.left or not first:
            return 0
        assert self._weights is not None
        return sum(self._weights.local_mask(i).own_tokens for i in range(first))
