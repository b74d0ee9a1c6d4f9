"""The host's loss function, with its reduction replaced."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.errors import HostError, MaskError
from megatron_loss_agg.loss import weighted_sum


class TokenLoss:
    """A loss function that leaves the reduction to the hook, for losses of your own.

    Return it from a forward step beside the model's output::

        return output, TokenLoss(lambda output: (token_losses(output), report), loss_mask)

    Without a hook it is a stock Megatron loss function: sum over the mask, token count, report.

    Args:
        compute: model output -> (per-token losses, report); the losses in the shape of
            ``loss_mask``, the report in Megatron's form.
        loss_mask: of this rank's tokens.
    """

    def __init__(
        self, compute: Callable[[Any], tuple[Tensor, dict[str, Any]]], loss_mask: Tensor
    ) -> None:
        self.compute = compute
        self.loss_mask = loss_mask

    def __call__(self, output: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
        losses, report = self.compute(output)
        total = weighted_sum(self.loss_mask.to(losses.dtype), losses)
        return total, self.loss_mask.sum().to(torch.int), report


class TokenLosses(NamedTuple):
    """One microbatch on one rank, before any reduction."""

    losses: Tensor
    mask: Tensor
    report: dict[str, Any]
    reduced: tuple[Any, ...] | None  # what a stock loss function made of it


def token_losses(loss_func: Callable[..., Any], output: Any) -> TokenLosses:
    """Per-token losses, their local mask and the report, of whatever a forward step returned.

    A stock loss function is called, so that its checks (NaN, spikes) and its report stay in force;
    only its loss is not used. Its mask is the argument ``loss_mask`` that it was bound to, and the
    model's output is the per-token loss.

    Raises:
        HostError: no mask can be found.
        MaskError: the output is not one loss per element of the mask.
    """
    if isinstance(loss_func, TokenLoss):
        losses, report = loss_func.compute(output)
        mask, reduced = loss_func.loss_mask, None
    else:
        losses, mask = output, _bound_mask(loss_func)
        with torch.no_grad():
            reduced = loss_func(output)
        report = reduced[-1]
    if not isinstance(losses, Tensor) or losses.numel() != mask.numel():
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise MaskError(
            f"losses {shape} for a loss mask of shape {tuple(mask.shape)}; expected one loss per "
            "token (the model called with labels): otherwise return a TokenLoss"
        )
    return TokenLosses(losses, mask, dict(report), reduced)


def check_is_masked_sum(tokens: TokenLosses, whole: bool) -> None:
    """Raise if a stock loss function computed something else than a masked sum or mean.

    Its reduction is about to be replaced: a term that it adds would be lost.

    Args:
        whole: this rank holds whole samples, so that a mean over them can be recognised.
    """
    if tokens.reduced is None:
        return
    loss = tokens.reduced[0].detach().double()
    mask = tokens.mask.reshape(-1).double()
    total = weighted_sum(mask, tokens.losses.detach().reshape(-1).double())
    if len(tokens.reduced) == 3:
        expected = [total]
    elif whole:
        expected = [total, total / mask.sum().clamp(min=1)]
    else:
        return
    if loss.isfinite() and not any(torch.isclose(loss, x, rtol=1e-2) for x in expected):
        raise HostError(
            f"the loss function returned {loss.item():.6g}, and the masked sum of the model's "
            f"losses is {total.item():.6g}; expected a masked sum, since its reduction is "
            "replaced: return a TokenLoss with the full per-token loss instead"
        )


def _bound_mask(loss_func: Callable[..., Any]) -> Tensor:
    """The ``loss_mask`` that a `functools.partial` carries."""
    if isinstance(loss_func, functools.partial):
        bound = inspect.signature(loss_func.func).bind_partial(
            *loss_func.args, **loss_func.keywords
        )
        mask = bound.arguments.get("loss_mask")
        if isinstance(mask, Tensor):
            return mask
    raise HostError(
        f"the forward step returned the loss function {loss_func!r}, which carries no mask; "
        "expected functools.partial(loss_func, loss_mask) with a parameter named loss_mask, or "
        "megatron_loss_agg.mcore.TokenLoss"
    )
