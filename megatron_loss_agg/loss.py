"""The only reduction: a weighted sum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_loss_agg.checks import check_tensors
from megatron_loss_agg.errors import MaskError

_SUM_DTYPES = (torch.float32, torch.float64)
_BLOCK = 2**18


def weighted_sum(w: Tensor, token_loss: Tensor) -> Tensor:
    """``sum_t w_t * loss_t`` over the tokens with ``w_t != 0``.

    Tokens of weight 0 are skipped, not multiplied by 0: NaN or inf there reaches neither the value
    nor the gradient of ``token_loss``. With no tokens the sum is 0 and stays attached to the
    autograd graph, so that every rank still runs the collectives of the backward pass.

    Args:
        w: weights, from `StepPlan.weights`; treated as constants, without gradient.
        token_loss: per-token losses, of the same shape.

    Returns:
        scalar, in the wider of the two dtypes; fp32 if neither is floating-point.

    Raises:
        MaskError: not two real tensors of the same shape; nothing is broadcast.
    """
    check_tensors(MaskError, "real", w=w, token_loss=token_loss)
    if token_loss.dim() != 1:  # a view of a vector would only add a backward node
        w, token_loss = w.reshape(-1), token_loss.reshape(-1)
    if w.dtype == token_loss.dtype and w.dtype in _SUM_DTYPES:
        return _weighted_sum(w.detach(), token_loss)
    wider = torch.promote_types(w.dtype, token_loss.dtype)
    dtype = torch.promote_types(wider, torch.float32)
    total = _weighted_sum(w.detach().to(dtype), token_loss.to(dtype))
    return total.to(wider) if wider.is_floating_point else total


def where_weighted(w: Tensor, x: Tensor) -> Tensor:
    """``x`` where ``w != 0``, else 0 (also for NaN and inf); same shape and dtype.

    One vectorized pass: `torch.where` is several times slower on CPU.
    """
    return torch.ops.aten.hardshrink_backward(x, w, 0)


def _weighted_sum(w: Tensor, token_loss: Tensor) -> Tensor:
    # The gradient of the dot product is w, whatever the losses are: only the value needs a repair.
    total = _dot(token_loss, w)
    if not _is_known_finite(total):
        with torch.no_grad():
            total.detach().copy_(_dot(where_weighted(w, token_loss), w))
    return total


def _dot(x: Tensor, w: Tensor) -> Tensor:
    """In blocks on CPU, where the rounding error of `torch.dot` grows with the length."""
    if x.numel() <= _BLOCK or not x.is_cpu:
        return torch.dot(x, w)
    blocks = zip(x.split(_BLOCK), w.split(_BLOCK), strict=True)
    return torch.stack([torch.dot(*block) for block in blocks]).sum()


def _is_known_finite(total: Tensor) -> bool:
    """Whether no NaN or inf entered the sum; False if that is unknown without a device sync."""
    if not total.is_cpu or torch.compiler.is_compiling():
        return False
    try:
        return math.isfinite(total.detach().numpy())
    except RuntimeError:  # no numpy, or a tensor without storage, as under `vmap`
        return False
