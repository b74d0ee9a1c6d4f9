"""The one sum."""

from __future__ import annotations

import math

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
        scalar, in the wider of the two dtypes; fp32 if neither is floating.

    Raises:
        MaskError: the shapes differ; nothing is broadcast.
    """
    if not isinstance(w, Tensor) or not isinstance(token_loss, Tensor):
        raise MaskError(
            f"weights are a {type(w).__name__} and losses a {type(token_loss).__name__}; expected "
            "two tensors"
        )
    if w.is_complex() or token_loss.is_complex():
        raise MaskError(
            f"weights of {w.dtype} for losses of {token_loss.dtype}; expected real tensors"
        )
    if w.shape != token_loss.shape:
        raise MaskError(
            f"weights of shape {tuple(w.shape)} for losses of shape {tuple(token_loss.shape)}; "
            "expected the same shape"
        )
    if token_loss.dim() != 1:  # another view would be another step of the backward pass
        w, token_loss = w.reshape(-1), token_loss.reshape(-1)
    if w.dtype == token_loss.dtype and w.dtype in _SUMMED:
        return _weighted_sum(w.detach(), token_loss)
    wider = torch.promote_types(w.dtype, token_loss.dtype)
    computed = torch.promote_types(wider, torch.float32)
    total = _weighted_sum(w.detach().to(computed), token_loss.to(computed))
    return total.to(wider) if wider.is_floating_point else total


def _weighted_sum(w: Tensor, token_loss: Tensor) -> Tensor:
    """Of vectors of one of the dtypes that are `_SUMMED`."""
    # The gradient is w itself, whatever the losses are; it is the value that NaN would spoil.
    total = _dot(token_loss, w)
    if not _is_known_finite(total):
        with torch.no_grad():
            total.detach().copy_(_dot(where_weighted(w, token_loss), w))
    return total


def _dot(x: Tensor, w: Tensor) -> Tensor:
    """In blocks on a CPU, whose dot product adds up in sequence, with errors that grow so."""
    if x.numel() <= _BLOCK or not x.is_cpu:
        return torch.dot(x, w)
    blocks = zip(x.split(_BLOCK), w.split(_BLOCK), strict=True)
    return torch.stack([torch.dot(*block) for block in blocks]).sum()


_SUMMED = (torch.float32, torch.float64)
_BLOCK = 2**18


def where_weighted(w: Tensor, x: Tensor) -> Tensor:
    """``x`` where ``w != 0``, and 0 elsewhere whatever ``x`` is there; same shape and dtype.

    A select in one vectorised pass: `torch.where` takes several times as long on a CPU.
    """
    return torch.ops.aten.hardshrink_backward(x, w, 0)


def _is_known_finite(total: Tensor) -> bool:
    """Whether a scalar is finite; False where that cannot be read without waiting for a device.

    A finite sum has met no NaN and no inf, at positions of weight 0 either.
    """
    if not total.is_cpu or torch.compiler.is_compiling():
        return False
    try:
        return math.isfinite(total.detach().numpy())
    except RuntimeError:  # no numpy, or a tensor without memory of its own, as under `vmap`
        return False
