"""What the per-token losses share: input checks, dtypes, and containment of NaN.

**Masked positions may hold anything**: inf or NaN there reaches neither the weighted sum nor its
gradient. Log-ratios are clamped before they are exponentiated. Where an input is unusable (NaN, or
inf if the formula has no value for it), the loss is computed from 0 and then set to NaN, which
`weighted_sum` ignores at weight 0. Otherwise the gradient there would be ``0 * inf``, or
``0 * NaN``.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import PolicyError
from megatron_loss_agg.weights import LARGEST_FP32, check_tensors

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this magnitude before exp (e^20 = 4.9e8); no gradient beyond it."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def nan_unless(usable: Tensor, losses: Tensor) -> Tensor:
    """``losses``, but NaN without gradient where ``usable`` is false."""
    return losses.masked_fill(~usable, torch.nan)


def prepare(**inputs: Tensor) -> list[Tensor]:
    """Check the inputs and promote them to their widest dtype, at least fp32.

    All but the first are detached.

    Raises:
        PolicyError: an input is not a floating-point tensor of the first one's shape.
    """
    check_tensors(PolicyError, "floating-point", **inputs)
    dtype = torch.float32
    for x in inputs.values():
        dtype = torch.promote_types(dtype, x.dtype)
    first, *data = inputs.values()
    return [first.to(dtype), *(x.detach().to(dtype) for x in data)]


def number_of(name: str, given: Any, above: float | None = None) -> float:
    """``given`` as a float: > ``above``, or >= 0 without it; finite in fp32, or inf."""
    least = ">= 0" if above is None else f"> {above}"
    number = isinstance(given, Real) and not isinstance(given, bool)
    try:
        value = float(given) if number else math.nan
    except OverflowError:
        value = 2 * LARGEST_FP32
    if not (value >= 0 if above is None else value > above) or LARGEST_FP32 < value < math.inf:
        raise PolicyError(
            f"{name}={given!r}; expected a number {least} that fp32 holds, or inf for no limit"
        )
    return value
