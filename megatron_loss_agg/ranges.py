"""Are a step's weights numbers that fp32 holds well?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import MaskError
from megatron_loss_agg.weights import LARGEST_FP32


def active_samples(sums_S: Tensor) -> tuple[int, float]:
    """How many samples have tokens, and the least of their mask sums; inf if there are none.

    Args:
        sums_S: fp64 [samples], mask sums.
    """
    least = float(sums_S.amin()) if sums_S.numel() else math.inf
    if least > 0:
        return sums_S.numel(), least
    active_S = sums_S[sums_S > 0]
    number = active_S.numel()
    return number, float(active_S.amin()) if number else math.inf


def check_fits_fp32(agg: LossAggregation, least: float, mask_totals: Sequence[float]) -> None:
    """Raise MaskError if the masks' sums or their reciprocals overflow fp32.

    Args:
        least: see `active_samples`.
        mask_totals: mask sums of microbatches.
    """
    for i, total in enumerate(mask_totals):
        if (scaled := total * max(agg.scale, 1.0)) > LARGEST_FP32:
            over = "" if agg.divisor is None else f" over the divisor {float(agg.divisor):g}"
            raise MaskError(
                f"microbatch {i}: loss_mask{over} sums to {scaled:g}, beyond fp32; expected "
                f"smaller values{', or a larger divisor' if over else ''}"
            )
    if agg.within is not None and least < 1 / LARGEST_FP32:
        raise MaskError(
            f"the loss_mask of a sample sums to {least:g}, whose reciprocal overflows fp32; "
            "expected 0, or larger values"
        )


def check_normal_in_fp32(
    agg: LossAggregation,
    across: float,
    tokens: float,
    active_tokens: int | None,
    samples: int,
    least_weight: float,
) -> None:
    """Raise MaskError, on every rank alike, if fp32 would round coefficients or weights coarsely.

    Below its smallest normal number, fp32 has less than 24 bits. The least coefficient there can be
    is the bound, so that all ranks decide the same from the counts of the step.

    Args:
        across, tokens, active_tokens, samples: as in `StepCounts`.
        least_weight: the least positive sample weight of the step.
    """
    if not across or not tokens:
        return
    least = agg.scale / across * least_weight / (1.0 if agg.within is None else tokens)
    weight = least
    if agg.within is None and active_tokens:
        weight *= tokens / active_tokens  # on average
    if min(least, weight) < torch.finfo(torch.float32).tiny:
        over = "" if agg.divisor is None else f" over the divisor {float(agg.divisor):g}"
        raise MaskError(
            f"weights of a step of {samples} samples, whose loss_mask{over} sums to "
            f"{tokens * agg.scale:g}, can be {min(least, weight):g}, which fp32 rounds "
            f"coarsely; expected {'a smaller divisor' if over else 'smaller values'}"
        )


def check_sample_weights(agg: LossAggregation, across: float, largest: float) -> None:
    """Raise MaskError, on every rank alike, if coefficients can overflow fp32.

    Args:
        largest: of ``v_s / M_within`` and ``v_s m_t / M_within``, a bound over all ranks.
    """
    if across and agg.scale / across * largest > LARGEST_FP32:
        raise MaskError(
            f"weights of tokens can be {agg.scale / across * largest:g}, beyond fp32; expected "
            "smaller sample_weights, or masks that are not as small"
        )
