"""The mean over the calls of an evaluation, for a loop that averages them with equal weights."""

from __future__ import annotations

from torch import Tensor


class RunningMean:
    """Values whose mean over an evaluation's calls is the mean over all of their denominators.

    For a loop that averages the calls' values with equal weights.
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
