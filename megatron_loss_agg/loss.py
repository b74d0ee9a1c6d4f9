"""The one sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import MaskError


def weighted_sum(w: Tensor, token_loss: Tensor) -> Tensor:
    """``sum_t w_t * loss_t`` over the tokens with ``w_t != 0``.

    A token of weight 0 is left out rather than multiplied by 0: NaN or inf there reaches neither
    the value nor the gradient of ``token_loss``. Without any token, the sum is 0 and keeps its path
    in the autograd graph, so that collectives in the backward pass are reached on every rank.

    Args:
        w: weights, from `StepPlan.weights`; constants of the step, so no gradient reaches them.
        token_loss: per-token losses, of the same shape.

    Returns:
        scalar, in the wider of the two dtypes.

    Raises:
        MaskError: the shapes differ; nothing is broadcast.
    """
    if not isinstance(w, Tensor) or not isinstance(token_loss, Tensor):
        raise MaskError(
            f"weights are a {type(w).__name__} and losses a {type(token_loss).__name__}; expected "
            "two tensors"
        )
    if w.shape != token_loss.shape:
        raise MaskError(
            f"weights of shape {tuple(w.shape)} for losses of shape {tuple(token_loss.shape)}; "
            "expected the same shape"
        )
    wider = torch.promote_types(w.dtype, token_loss.dtype)
    computed = torch.promote_types(wider, torch.float32)
    flat_w, flat_loss = (x.reshape(-1).to(computed) for x in (w.detach(), token_loss))
    return _WeightedSum.apply(flat_w, flat_loss).to(wider)  # type: ignore[no-untyped-call]


def where_weighted(w: Tensor, x: Tensor) -> Tensor:
    """``x`` where ``w != 0``, and 0 elsewhere whatever ``x`` is there; same shape and dtype.

    A select in one vectorised pass: `torch.where` takes several times as long on a CPU.
    """
    return torch.ops.aten.threshold_backward(x, w.abs(), 0)


class _WeightedSum(torch.autograd.Function):
    """The sum, whose gradient is ``w`` itself: 0 and not NaN where ``w`` is 0."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, token_loss: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return torch.dot(where_weighted(w, token_loss), w)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (w,) = ctx.saved_tensors
        return None, w * gradients[0]
