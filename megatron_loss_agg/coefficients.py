"""The coefficient ``c_s`` of every sample of this rank, exact for the whole step."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, Unit
from megatron_loss_agg.counting.table import StepCounts
from megatron_loss_agg.errors import DataError


@dataclass(frozen=True, eq=False)
class StepCoefficients:
    """The part of a step's plan that needs no masks by token: a few numbers for each own sample.

    Vectors are on the CPU, with the samples of all microbatches in their order.
    """

    counts: StepCounts
    """Over all microbatches of all ranks."""
    sizes: Sequence[int]
    """Samples of each microbatch."""
    coefficient_S: Tensor
    """``c_s``, fp64; see `coefficients`."""
    mask_sum_S: Tensor
    """``M_s``, fp64; see `mask_sums`."""
    groups_by_unit: Mapping[Unit, tuple[Tensor, Tensor]]
    """See `groups`."""

    @property
    def is_empty(self) -> bool:
        """Whether every token of the whole step is masked or belongs to a rejected sample."""
        return self.counts.kept_tokens == 0

    def coefficients(self, i: int) -> Tensor:
        """``c_s`` of each sample of microbatch ``i``, with ``w_t = m_t * c_s``: fp64 [samples].

        With the sample's own weight; 0 for rejected samples and for samples whose mask sum is 0.
        """
        return self._of_microbatch(self.coefficient_S, i)

    def mask_sums(self, i: int) -> Tensor:
        """Mask sum of each sample of microbatch ``i``, rejected ones included: fp64 [samples]."""
        return self._of_microbatch(self.mask_sum_S, i)

    def groups(self, unit: Unit) -> tuple[Tensor, Tensor]:
        """All groups of the whole step, the same on every rank: ids and mask sums.

        int64 [groups], sorted and distinct, and fp64 [groups], on the CPU. Without groups all of
        whose samples are rejected, if ``rejected`` is ``skip``.

        Raises:
            DataError: ``unit`` has no ids, or neither the mode nor ``group_by`` names it.
        """
        if unit not in self.groups_by_unit:
            raise DataError(
                f"no groups by {unit!r} in this plan; expected one of {', '.join(BY_ID)}, that the "
                "mode uses or that group_by names"
            )
        return self.groups_by_unit[unit]

    def _of_microbatch(self, x_S: Tensor, i: int) -> Tensor:
        """A copy of the part of ``x_S`` that is of microbatch ``i``."""
        i = self._index(i)
        return x_S[self._starts[i] : self._starts[i + 1]].clone()

    @cached_property
    def _starts(self) -> list[int]:
        return [*accumulate(self.sizes, initial=0)]

    def _index(self, i: Any) -> int:
        try:
            return range(len(self.sizes))[operator.index(i)]
        except (TypeError, IndexError):
            raise DataError(
                f"microbatch {i!r} of a plan of {len(self.sizes)} microbatches; expected an int "
                "from 0 to one less"
            ) from None
