"""Weights of samples in the counts of a step: ``V_across`` and ``V_g``, see `aggregation`.

Suffix: ``_S`` samples of all this rank's microbatches, in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.groups import GroupSums


class Extremes(NamedTuple):
    """Of one rank's sample weights; the step's are the largest over ranks."""

    inverse_least: float  # 1 / v_s
    largest_factor: float  # of v_s / M_within and v_s m_t / M_within; an upper bound

    @classmethod
    def of(cls, agg: LossAggregation, sums_S: Tensor, weights_S: Tensor | None) -> Extremes:
        """Over samples with tokens. 1 and 0 where no weight is multiplied."""
        if agg.sample_weights is None or agg.mode == "custom":
            return cls(1.0, 0.0)
        v_S = torch.ones_like(sums_S) if weights_S is None else weights_S
        positive_S = (v_S > 0) & (sums_S > 0)
        bound_S = v_S * sums_S.clamp(min=1)
        if agg.within is not None:
            bound_S = bound_S / sums_S
        if not bool(positive_S.any()):
            return cls(0.0, 0.0)
        return cls(1 / float(v_S[positive_S].amin()), float(bound_S[positive_S].amax()))


def summed_columns(
    agg: LossAggregation, sums_S: Tensor, weights_S: Tensor | None, counted_S: Tensor | None
) -> Tensor:
    """What is summed by group: fp64 [samples, 1], of the mask; or [samples, 4], see `mean_weights`.

    Args:
        sums_S: fp64, mask sums; 0 for samples that do not count.
        counted_S: bool; None: all of them.
    """
    if agg.weighted is None:
        return sums_S.unsqueeze(1)
    one_S = torch.ones_like(sums_S)
    if counted_S is not None:
        one_S = one_S.where(counted_S, 0.0)
    v_S = one_S if weights_S is None else weights_S
    return torch.stack([sums_S, v_S * sums_S, v_S * one_S, one_S], dim=1)


def mean_weights(sums: Tensor, empty: str) -> Tensor:
    """``V_g``: fp64 [groups].

    ``sum of v_s M_s / M_g``. For a group without tokens, the mean of ``v_s`` over its samples (1
    if it has none); 0 if ``empty`` is ``skip``.

    Args:
        sums: fp64 [groups, 4], over the group's samples that count: of ``M_s``, of ``v_s M_s``, of
            ``v_s``, and their number.
    """
    mask, weighted, plain, number = sums.unbind(1)
    of_empty = (plain / number).where(number > 0, 1.0)
    if empty == "skip":
        of_empty = torch.zeros_like(mask)
    return (weighted / mask).where(mask > 0, of_empty)


def weight_on_rank(
    agg: LossAggregation, columns_S: Tensor, sizes: Tensor, counted_S: Tensor | None
) -> float:
    """This rank's part of ``V_across`` where no group spans ranks; of ``sum v_s M_s`` for the step.

    Args:
        columns_S: see `summed_columns`.
        sizes: int64, samples of each microbatch.
    """
    if agg.weighted == "step":
        return float(columns_S[:, 1].sum())
    if agg.weighted == "microbatch":
        columns_S = torch.segment_reduce(columns_S, "sum", lengths=sizes, unsafe=True)
    elif counted_S is not None:
        columns_S = columns_S[counted_S]
    return float(mean_weights(columns_S, agg.empty).sum())


def weight_of_step(
    agg: LossAggregation,
    on_ranks: float,
    tokens: float,
    groups: GroupSums | None,
    microbatches: int,
) -> float:
    """``V_across``.

    Args:
        on_ranks: `weight_on_rank`, summed over ranks.
        groups: of the unit, where they can span ranks.
    """
    if agg.weighted == "step":
        return on_ranks / tokens if tokens else 0.0
    if groups is None:
        return on_ranks
    weights = mean_weights(groups.sums, agg.empty)
    total = float(weights.sum())
    if agg.weighted == "microbatch" and agg.empty == "count":
        total += microbatches - weights.numel()  # those without samples
    return total
