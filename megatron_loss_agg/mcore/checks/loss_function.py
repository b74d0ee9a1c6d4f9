"""Checks that stock loss functions return the masked sum of the model's losses, or their mean.

The hook replaces their reduction, so anything else that they compute would be lost. A function is
compared until a step shows that it applies no factor: losses that cancel, or are 0, fit any factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.call import CPRank
from megatron_loss_agg.mcore.forward_step import TermLosses
from megatron_loss_agg.tensors import described, is_plain
from megatron_loss_agg.weighted_sum import weighted_sum

_TOLERANCE = 1e-3
"""Relative tolerance of a loss function's result."""
_ROUNDING = 16
"""Allowed rounding error of a sum, in machine epsilons of the sum of absolute values."""


class StockLoss(NamedTuple):
    """The result of a stock loss function, compared with the masked sum; on its device."""

    function: object  # its key, see `function_key`
    fits: Tensor  # bool
    shows_factors: Tensor  # bool: a wrong factor would not fit
    loss: Tensor
    masked_sum: Tensor


def note_stock_loss(
    cp: CPRank, function: object, stock_loss: Any, has_token_count: bool, term: TermLosses
) -> StockLoss | None:
    """Compare the result of a stock loss function, without waiting for the device.

    Returns None for a mean over this rank's part of the tokens, since there is no whole mean to
    compare it with.

    Args:
        has_token_count: the function also returned a token count, so its loss is a sum.
    """
    if not is_plain(stock_loss) or stock_loss.numel() != 1:
        raise HostError(
            f"a loss function must return the masked sum, a tensor of one number, got "
            f"{described(stock_loss)}. Change it, or return a TokenLoss."
        )
    if not has_token_count and cp.size > 1:
        return None
    loss = stock_loss.detach().reshape(())
    fits, shows_factors, masked_sum = fits_masked_sum(
        loss, term.losses, term.mask, may_be_mean=not has_token_count
    )
    return StockLoss(function, fits, shows_factors, loss, masked_sum)


def check_stock_losses(results: Sequence[StockLoss]) -> set[object]:
    """Raise HostError unless all fit; return the functions where a factor would not have fit.

    Waits for the device.
    """
    rows = [(x.fits, x.shows_factors, x.loss, x.masked_sum) for x in results]
    numbers = torch.stack([torch.stack([y.double() for y in row]) for row in rows]).tolist()
    for fits, _, loss, masked_sum in numbers:
        if not fits:
            raise HostError(
                "a loss function must return the masked sum of the model's losses or their mean, since "
                f"its reduction is replaced, got {loss:.6g} where this rank's masked sum is "
                f"{masked_sum:.6g}. Drop its own factors, such as the context-parallel size, and "
                "divisions, or return a TokenLoss; for Megatron's distillation add the extension of "
                "examples/extensions/distillation.py."
            )
    return {x.function for x, (_, shows, *_) in zip(results, numbers, strict=True) if shows}


def fits_masked_sum(
    loss: Tensor, losses: Tensor, mask: Tensor, *, may_be_mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare ``loss`` with ``sum(mask * losses)``.

    Returns:
        three scalars on the device of ``loss``. The first is True if ``loss`` is that sum or is not
        finite; and if it ``may_be_mean``, also for the sum divided by ``max(sum(mask), 1)`` or
        ``sum(mask)``. The second is True if a wrong factor would show; where losses cancel or are
        0, any factor fits. The third is the sum.
    """
    epsilon = torch.finfo(loss.dtype).eps
    loss, losses, mask = (x.detach().reshape(-1).double() for x in (loss, losses, mask))
    total, size = weighted_sum(mask, losses), weighted_sum(mask.abs(), losses.abs())
    divisors = [torch.ones_like(total)]
    if may_be_mean:
        divisors.append(mask.sum())  # a stock mean that divides by 1 instead equals the sum
    divisor = torch.stack(divisors)
    # Where losses cancel, the rounding error of their sum dominates.
    allowed = _TOLERANCE * total.abs() + _ROUNDING * epsilon * size
    fits = total.isfinite() & ((loss - total / divisor).abs() <= allowed / divisor)
    is_finite = loss.isfinite().all()
    return ~is_finite | fits.any(), is_finite & (total.abs() > _TOLERANCE * size), total
