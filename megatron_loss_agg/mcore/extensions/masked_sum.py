"""Checks that stock loss functions return a masked sum of the model's losses, or their mean.

The hook replaces their reduction, so anything else that they compute would be lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss, Watch
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step import PlannedStep
from megatron_loss_agg.tensors import described, is_plain
from megatron_loss_agg.weighted_sum import weighted_sum

_TOLERANCE = 1e-3
"""Relative tolerance of a loss function's result."""
_ROUNDING = 16
"""Allowed rounding error of a sum, in machine epsilons of the sum of absolute values."""


class MaskedSum(Extension):
    """Checks each kind of stock loss function, until its losses have told a factor.

    Training and evaluation are checked apart, since a function may do more in one of them.
    """

    def __init__(self) -> None:
        self._checked: set[Any] = set()

    @contextmanager
    def around(self, call: Call, plan: PlannedStep | None) -> Iterator[Watch | None]:
        kinds, found = list[Any](), list[Tensor]()

        def on_loss(x: MicrobatchLoss) -> None:
            kind = call.trains, _kind(x.loss_func)
            if x.returned is None or kind in self._checked:
                return
            returned, is_sum = x.returned[0], len(x.returned) == 3
            if not is_plain(returned) or returned.numel() != 1:
                raise HostError(
                    f"the loss function returned {described(returned)} as its loss; expected a "
                    "tensor of one number, the masked sum"
                )
            loss = returned.detach().reshape(())
            if is_sum or call.groups.cp_size == 1:  # or else a mean over a part of the tokens
                losses, mask = x.losses[x.first], x.masks[x.first]
                fits, tells = fits_masked_sum(loss, losses, mask, may_be_mean=not is_sum)
                found.append(torch.stack([x.double() for x in (fits, loss, tells)]))
                kinds.append(kind)

        yield on_loss
        numbers = torch.stack(found).tolist() if found else []
        for fits, loss, _ in numbers:
            if not fits:
                raise HostError(
                    f"the loss function returned {loss:.6g}, neither the masked sum of the model's "
                    "losses nor their mean; expected a masked sum, since its reduction is "
                    "replaced: drop its own factors and divisions, return a TokenLoss, or for "
                    "Megatron's distillation give a term 'kd' and extensions=[Distillation()]"
                )
        # Not earlier: a loop that catches the error must fail again.
        self._checked |= {kind for kind, x in zip(kinds, numbers, strict=True) if x[-1]}


def _kind(loss_func: Callable[..., Any]) -> object:
    """What functions that compute the same have in common: their code, or type."""
    while isinstance(loss_func, functools.partial):
        loss_func = loss_func.func
    return getattr(loss_func, "__code__", type(loss_func))


def fits_masked_sum(
    loss: Tensor, losses: Tensor, mask: Tensor, *, may_be_mean: bool
) -> tuple[Tensor, Tensor]:
    """Whether ``loss`` is ``sum(mask * losses)``, and whether a factor of it would show.

    Bool, scalars on the device of ``loss``. The first is True, too, of a loss that is not finite;
    if it ``may_be_mean``, also of that sum over ``sum(mask)``, or over 1 if that is more. The
    second is False of what cancels, or is 0: it fits with any factor.
    """
    epsilon = torch.finfo(loss.dtype).eps
    loss, losses, mask = (x.detach().reshape(-1).double() for x in (loss, losses, mask))
    total, size = weighted_sum(mask, losses), weighted_sum(mask.abs(), losses.abs())
    divisors = [torch.ones_like(total)]
    if may_be_mean:
        divisors += [mask.sum(), mask.sum().clamp(min=1)]
    divisor = torch.stack(divisors)
    # Where losses cancel, the rounding error of their sum dominates.
    allowed = _TOLERANCE * total.abs() + _ROUNDING * epsilon * size
    fits = total.isfinite() & ((loss - total / divisor).abs() <= allowed / divisor)
    is_finite = loss.isfinite().all()
    return ~is_finite | fits.any(), is_finite & (total.abs() > _TOLERANCE * size)
