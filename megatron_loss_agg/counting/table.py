"""The samples of a step as one table, and the denominators that are read from it.

Suffix: ``_S`` samples, the rows of the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Unit
from megatron_loss_agg.errors import MaskError
from megatron_loss_agg.weights import LARGEST_FP32

_SMALLEST_FP32 = torch.finfo(torch.float32).tiny  # the smallest normal number


class Groups(NamedTuple):
    """How the rows of a table fall into groups."""

    ids: Tensor  # int64 [groups], sorted and distinct
    place: Tensor  # int64 [rows]: of each row's group in `ids`

    def summed(self, x_S: Tensor) -> Tensor:
        """fp64 [groups]."""
        return x_S.new_zeros(self.ids.numel()).index_add_(0, self.place, x_S)


class Part(NamedTuple):
    """What a table says of the denominators; adds up over ranks that share no group of `across`."""

    across: float  # N_across, or V_across; 0 without an outer mean, and where it is the step's
    largest: float  # of v_s / M_within over samples with a weight; with 1 for M_step
    largest_inverse: float  # of its reciprocals


class Table:
    """Samples of one term, one row each: this rank's, or those of all ranks of the step.

    Attributes:
        mask_S: fp64, mask sums; 0 for samples that do not count.
        counted_S: fp64, 0 for samples that do not count, and else 1.
        weight_S: fp64, ``v_s``; 1 where none is given.
        rejected_S: bool.
        ids: int64 [rows] by unit, equal for the rows of one group. Without ids of samples, every
            row is one.
    """

    def __init__(
        self,
        agg: LossAggregation,
        mask_S: Tensor,
        weight_S: Tensor,
        rejected_S: Tensor,
        ids: Mapping[Unit, Tensor],
    ) -> None:
        self.agg = agg
        self.counted_S = torch.ones_like(mask_S)
        self.mask_S = mask_S
        if agg.rejected == "skip":
            self.counted_S = self.counted_S.masked_fill(rejected_S, 0.0)
            self.mask_S = mask_S.masked_fill(rejected_S, 0.0)
        self.weight_S = weight_S
        self.rejected_S = rejected_S
        self.ids = ids
        self._groups: dict[Unit, Groups] = {}

    def packed(self, units: Sequence[Unit]) -> Tensor:
        """int64 [3 + units, rows]: all columns, floats by their bits."""
        floats = [x.view(torch.int64) for x in (self.mask_S, self.weight_S)]
        return torch.stack([*floats, self.rejected_S.long(), *(self.ids[unit] for unit in units)])

    @classmethod
    def unpacked(cls, agg: LossAggregation, packed: Tensor, units: Sequence[Unit]) -> Table:
        """The table whose columns were `packed`."""
        mask_S, weight_S, rejected_S, *ids = packed.unbind()
        mask_S, weight_S = mask_S.view(torch.float64), weight_S.view(torch.float64)
        return cls(agg, mask_S, weight_S, rejected_S.bool(), dict(zip(units, ids, strict=True)))

    def groups(self, unit: Unit) -> Groups:
        """The groups by ``unit``; kept, since several denominators ask for them."""
        if unit not in self._groups:
            if unit in self.ids:
                self._groups[unit] = Groups(*self.ids[unit].unique(return_inverse=True))
            else:
                assert unit == "sample"
                ordinal_S = torch.arange(self.mask_S.numel())
                self._groups[unit] = Groups(ordinal_S, ordinal_S)
        return self._groups[unit]

    def group_sums(self, unit: Unit) -> Tensor:
        """Mask sum of each row's group: fp64 [rows]."""
        groups = self.groups(unit)
        return groups.summed(self.mask_S)[groups.place]

    def counted_groups(self, unit: Unit) -> tuple[Tensor, Tensor]:
        """Groups with samples that count: ids, int64 [groups], and mask sums, fp64 [groups]."""
        groups = self.groups(unit)
        counted = groups.summed(self.counted_S) > 0
        return groups.ids[counted], groups.summed(self.mask_S)[counted]

    def part(self, microbatches: int) -> Part:
        """What the denominators need; ``microbatches`` is their number, also of those without rows.

        `Part.largest` does not count samples of coefficient 0.
        """
        factor_S = self.weight_S
        if self.agg.within not in (None, "step"):
            factor_S = factor_S / self.group_sums(self.agg.within)
        zero_S = self.rejected_S | (self.mask_S == 0) | (self.weight_S == 0)
        ends = [x_S.masked_fill(zero_S, 0.0) for x_S in (factor_S, 1 / factor_S)]
        return Part(self._across(microbatches), *(float(x.amax()) if len(x) else 0.0 for x in ends))

    def _across(self, microbatches: int) -> float:
        unit = self.agg.weighted or self.agg.across
        if unit in (None, "step"):
            return 0.0
        groups = self.groups(unit)
        number, mask = groups.summed(self.counted_S), groups.summed(self.mask_S)
        value = torch.ones_like(mask)
        if self.agg.weighted is not None:
            weighted = groups.summed(self.weight_S * self.mask_S)
            value = groups.summed(self.weight_S * self.counted_S) / number
            value = (weighted / mask).where(mask > 0, value)
        exists = number > 0
        counts_empty = self.agg.empty == "count"
        across = float(value[exists if counts_empty else mask > 0].sum())
        if unit == "microbatch" and counts_empty:
            across += microbatches - int(exists.sum())  # those without samples, of weight 1
        return across


def check_coefficients(agg: LossAggregation, across: float, tokens: float, part: Part) -> None:
    """Raise MaskError if fp32 overflows at a sample's coefficient, or rounds it coarsely.

    Below its smallest normal number fp32 has less than 24 bits. All ranks of a step decide alike.

    Args:
        across, tokens: as in `StepCounts`.
        part: of the whole step.
    """
    if agg.mode == "custom" or not across or not part.largest:
        return
    scale = agg.scale / across / (tokens if agg.within == "step" else 1.0)
    least, largest = math.inf, scale * part.largest
    if part.largest_inverse:  # 0 where 1 / M_within overflows
        least = scale / part.largest_inverse
    if least < _SMALLEST_FP32 or largest > LARGEST_FP32:
        raise MaskError(
            f"the coefficients of samples, by which the mask is multiplied, are from {least:.3g} "
            f"to {largest:.3g}, and fp32 holds {_SMALLEST_FP32:.3g} to {LARGEST_FP32:.3g}; "
            "expected a loss_mask, sample_weights and divisor of moderate size"
        )
