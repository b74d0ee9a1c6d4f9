"""All samples of a step as one table, from which its denominators and coefficients are read.

Suffix: ``_S`` samples, the rows of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Unit
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.tensors import LARGEST_FP32
from megatron_loss_agg.weighted_sum import sample_coefficients

_SMALLEST_FP32 = torch.finfo(torch.float32).tiny  # the smallest normal number


class StepCounts(NamedTuple):
    """Counts over the whole optimizer step: all microbatches of all data-parallel ranks."""

    tokens: float  # sum of the masks that count
    kept_tokens: float  # without those of rejected samples
    all_tokens: float  # with them
    active_tokens: int | None  # positions with a nonzero mask; None where masks are unknown
    routed_tokens: int | None  # None: the microbatches do not say it
    microbatches: int
    samples: int
    rollouts: int | None  # None: the mode does not use them, or some rank has no ids
    prompts: int | None
    datasets: int | None
    across: float  # N_across or V_across; 1 without an outer mean
    positions: int | None  # routed tokens, or elements of masks; None where masks are unknown
    unequal: bool  # whether the positions of some rank's microbatches differ


class Groups(NamedTuple):
    """How the rows of a table fall into groups."""

    ids: Tensor  # int64 [groups], sorted and distinct
    place: Tensor  # int64 [rows]: of each row's group in `ids`

    def summed(self, x_S: Tensor) -> Tensor:
        """fp64 [groups]."""
        return x_S.new_zeros(self.ids.numel()).index_add_(0, self.place, x_S)


class Table:
    """The samples of one term, one row each, of all ranks of the step.

    Where masks are sharded, a sample has a row on each of the ranks that share it, with equal ids.

    Args:
        columns: int64 [3 + units, rows]: mask sums and weights ``v_s``, by the bits of their fp64
            numbers, whether a sample is rejected, and ids by each of ``units``, the sample itself
            among them.
        microbatches: of the step, those without samples included.
    """

    def __init__(
        self, agg: LossAggregation, columns: Tensor, units: list[Unit], microbatches: int
    ) -> None:
        mask_S, self._weight_S = (x.view(torch.float64) for x in columns[:2])
        self._rejected_S = columns[2].bool()
        skipped_S = self._rejected_S & (agg.rejected == "skip")
        self.all_tokens = float(mask_S.sum())
        self.kept_tokens = float(mask_S.masked_fill(self._rejected_S, 0.0).sum())
        self._mask_S = mask_S.masked_fill(skipped_S, 0.0)
        self._counted_S = (~skipped_S).double()
        self.tokens = float(self._mask_S.sum())
        self._agg, self._microbatches = agg, microbatches
        self._ids: Mapping[Unit, Tensor] = dict(zip(units, columns[3:], strict=True))
        self._groups: dict[Unit, Groups] = {}  # several denominators ask for the same ones

    def groups(self, unit: Unit) -> Groups:
        """The groups by ``unit``."""
        if unit not in self._groups:
            ids = self._ids[unit]
            # Ordinals of samples and microbatches are, but where ranks share samples.
            is_sorted = bool((ids[1:] >= ids[:-1]).all())
            unique = torch.unique_consecutive if is_sorted else torch.unique
            self._groups[unit] = Groups(*unique(ids, return_inverse=True))
        return self._groups[unit]

    def group_sums(self, unit: Unit | None) -> Tensor:
        """``M_within``: mask sum of each row's group, fp64 [rows]; 1 for None."""
        if unit is None or unit == "step":
            return torch.full_like(self._mask_S, 1.0 if unit is None else self.tokens)
        groups = self.groups(unit)
        return groups.summed(self._mask_S)[groups.place]

    def siblings(self) -> Tensor:
        """``C``: over the path, the product of the numbers of groups of one parent, fp64 [rows].

        Raises DataError, on all ranks alike, for a group with two parents.
        """
        siblings_S = torch.ones_like(self._mask_S)
        for outer, inner in pairwise(self._agg.path):
            parents, children = self.groups(outer), self.groups(inner)
            parent = torch.zeros_like(children.ids).index_copy_(0, children.place, parents.place)
            strays = (parent[children.place] != parents.place).nonzero()
            if strays.numel():
                one, other = children.place[strays[0]], parents.place[strays[0]]
                raise DataError(
                    f"the {inner} {int(children.ids[one])} is in the {outer}s "
                    f"{int(parents.ids[parent[one]])} and {int(parents.ids[other])}; expected each "
                    f"{inner} in one {outer}, for the levels {' > '.join(self._agg.path)}: ids "
                    "that are unique over the whole step"
                )
            counted = self._counts(children).double()
            number = torch.zeros_like(parents.ids).double().index_add_(0, parent, counted)
            siblings_S *= number[parents.place]
        return siblings_S

    def _counts(self, groups: Groups) -> Tensor:
        """Whether each of them counts in a mean over such groups: bool [groups]."""
        what_S = self._mask_S if self._agg.empty == "skip" else self._counted_S
        return groups.summed(what_S) > 0

    def counted_groups(self, unit: Unit) -> tuple[Tensor, Tensor]:
        """Groups with samples that count: ids, int64 [groups], and mask sums, fp64 [groups]."""
        groups = self.groups(unit)
        counted = groups.summed(self._counted_S) > 0
        return groups.ids[counted], groups.summed(self._mask_S)[counted]

    def across(self, siblings_S: Tensor) -> float:
        """``N_across``, or ``V_across`` where weights of samples count; 1 without an outer mean."""
        agg = self._agg
        if agg.weighted == "step":
            weighted = float((self._weight_S * self._mask_S).sum())
            return weighted / self.tokens if self.tokens else 0.0
        unit = agg.weighted or agg.across
        if unit is None:
            return 1.0
        groups = self.groups(unit)
        value, counted = torch.ones_like(groups.ids).double(), self._counts(groups)
        if agg.weighted is not None:
            mask, number = groups.summed(self._mask_S), groups.summed(self._counted_S)
            weighted_tokens = groups.summed(self._weight_S * self._mask_S)
            mean_weight = groups.summed(self._weight_S * self._counted_S) / number
            siblings = value.index_copy(0, groups.place, siblings_S)
            value = (weighted_tokens / mask).where(mask > 0, mean_weight) / siblings
        across = float(value[counted].sum())
        if unit == "microbatch" and agg.empty == "count":
            across += self._microbatches - int(counted.sum())  # those without samples
        return across

    def coefficients(self, siblings_S: Tensor, across: float) -> Tensor:
        """``c_s``, fp64 [rows]; 0 for rejected samples, and for those without a mask here.

        Raises DataError, on all ranks alike, where fp32 overflows or has less than 24 bits.
        """
        agg, zero_S = self._agg, self._rejected_S | (self._mask_S == 0)
        within_S = self.group_sums(agg.within) * siblings_S
        coefficient_S = sample_coefficients(within_S, across, agg.scale)
        coefficient_S = coefficient_S.mul_(self._weight_S).masked_fill_(zero_S, 0.0)
        size_S = coefficient_S[~zero_S & (self._weight_S != 0)]
        if agg.mode == "custom" or not across or not size_S.numel():
            return coefficient_S
        least, largest = size_S.aminmax()
        if not (least >= _SMALLEST_FP32 and largest <= LARGEST_FP32):
            raise DataError(
                "the coefficients of samples, by which the mask is multiplied, are from "
                f"{least:.3g} to {largest:.3g}, and fp32 holds {_SMALLEST_FP32:.3g} to "
                f"{LARGEST_FP32:.3g}; expected a loss_mask, sample_weights and divisor of moderate "
                "size"
            )
        return coefficient_S
