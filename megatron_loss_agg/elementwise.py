"""What the per-token losses have in common: their contract, their precision, and no stray NaN.

**Positions that do not count may hold anything.** There, inf or NaN in any input reaches neither
the sum nor its gradient. A log-ratio is bounded before it is exponentiated, and where an input is
unusable (NaN, or inf where the formula has no value for it) the arithmetic sees 0 instead and the
loss is set to NaN afterwards: shown if the position counts, left out by `weighted_sum` if not.
Without this, the gradient at a masked position would be ``0 * inf`` or ``0 * NaN``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_loss_agg.errors import PolicyError

LOG_RATIO_BOUND = 20.0
"""Log-ratios are taken as at most this in size where they are exponentiated (e^20 = 4.9e8). A
position beyond it has no gradient."""


def bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def shown(losses: Tensor, usable: Tensor) -> Tensor:
    """NaN where an input was unusable; no gradient goes there."""
    return losses.masked_fill(~usable, torch.nan)


def lift(first: Tensor, *data: Tensor) -> list[Tensor]:
    """All in the widest of their dtypes and fp32; only the first keeps its gradient."""
    dtype = torch.float32
    for x in (first, *data):
        dtype = torch.promote_types(dtype, x.dtype)
    return [first.to(dtype), *(x.detach().to(dtype) for x in data)]


def check(**inputs: Tensor) -> None:
    """All are floating tensors of the first one's shape."""
    (name, first), *_ = inputs.items()
    for other, x in inputs.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise PolicyError(f"{other} is {kind}; expected a floating tensor")
        if x.shape != first.shape:
            raise PolicyError(
                f"{other} has shape {tuple(x.shape)} and {name} {tuple(first.shape)}; expected the "
                "same shape, for nothing is broadcast: expand it"
            )
