"""The weight of a token, and the weighted sum of losses. Both formulas are here and nowhere else.

Every mode (see `aggregation`) is a coefficient that all tokens of a sample share, times the mask:

    w_t = m_t * c_s        c_s = 1 / (D * M_within(s) * N_across)        L = sum_t w_t * loss_t

Suffixes: ``_S`` samples, ``_T`` tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_loss_agg.errors import FunctionError, MaskError


def sample_coefficients(within_S: Tensor, across: float, scale: float) -> Tensor:
    """``c_s = scale / (M_within(s) * N_across)``; 0 for a group without tokens.

    Args:
        within_S: fp64 [samples]; mask sum over the whole step of the group each sample is in.
        across: number of groups in the whole step.
        scale: ``1 / D``.

    Returns:
        fp64 [samples].
    """
    zero_S = torch.zeros_like(within_S)
    return torch.where(within_S > 0, scale / across / within_S, zero_S) if across else zero_S


def token_weights_of(
    coefficient_S: Tensor, mask: Tensor, length_S: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``w_t = m_t * c_s``, each factor rounded to ``dtype`` (or to fp32, if that is wider).

    Args:
        coefficient_S: fp64 [samples], on any device.
        mask: [samples, seq], one sample per row; or any shape of ``tokens`` elements together with
            ``length_S``. 0 on padding.
        length_S: integers [samples], the (padded) lengths of the samples of a pack, in order; at
            most ``tokens`` in all.

    Returns:
        ``dtype``, in the shape and on the device of ``mask``.
    """
    computed = dtype if dtype == torch.float64 else torch.float32
    # Skip no-op casts: call overhead dominates small microbatches.
    mask = mask.detach() if mask.dtype == computed else mask.detach().to(computed)
    coefficient_S = coefficient_S.to(mask.device, computed, non_blocking=True)
    if length_S is None:
        weights = mask * coefficient_S.unsqueeze(-1)
    else:
        # Tokens after the last sample get 0. The total length is given, so nothing waits for the
        # device.
        length_S = length_S.to(mask.device, non_blocking=True)
        rest = mask.numel() - length_S.sum(dim=0, keepdim=True)
        coefficient_T = torch.cat([coefficient_S, coefficient_S.new_zeros(1)]).repeat_interleave(
            torch.cat([length_S, rest]), output_size=mask.numel()
        )
        weights = coefficient_T.view(mask.shape).mul_(mask)
    return weights if dtype == computed else weights.to(dtype)


def custom_weights(
    weights: object, mask: Tensor, kept: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """A copy of what a custom function returned, in ``dtype``.

    Args:
        kept: 0 on tokens of rejected samples, in the shape of ``mask``; None if there are none.

    Raises:
        FunctionError: these cannot be weights for ``mask``.
    """
    if not isinstance(weights, Tensor) or weights.shape != mask.shape or weights.is_complex():
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise FunctionError(
            f"the aggregation function returned {got}; expected real weights of the mask's shape "
            f"{tuple(mask.shape)}"
        )
    weights = weights.detach().to(dtype, copy=True)  # it may be a tensor of the batch
    if not bool((weights.isfinite() & ((weights == 0) | (mask != 0))).all()):
        raise FunctionError(
            "the aggregation function returned weights that are not finite, or not 0 where the "
            "mask is 0; expected finite weights, and 0 on masked tokens"
        )
    if kept is not None and bool(((weights != 0) & (kept == 0)).any()):
        raise FunctionError(
            "the aggregation function returned weights for rejected samples; expected 0 on their "
            "tokens: see plan.microbatches[i].rejected"
        )
    return weights


def weighted_sum(w: Tensor, token_loss: Tensor) -> Tensor:
    """``sum_t w_t * loss_t`` over the tokens with ``w_t != 0``.

    Tokens of weight 0 are left out rather than multiplied by 0, so NaN or inf there reaches neither
    the value nor the gradient of ``token_loss``. Without any token the sum is 0 and stays in the
    autograd graph, so that every rank reaches the collectives of the backward pass.

    Args:
        w: weights, from `StepPlan.weights`; constants, so no gradient reaches them.
        token_loss: per-token losses, of the same shape.

    Returns:
        scalar, in the wider of the two dtypes; fp32 if neither is floating.

    Raises:
        MaskError: not two real tensors of the same shape; nothing is broadcast.
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
    if token_loss.dim() != 1:  # a view of a vector would be one more step of the backward pass
        w, token_loss = w.reshape(-1), token_loss.reshape(-1)
    if w.dtype == token_loss.dtype and w.dtype in (torch.float32, torch.float64):
        return _weighted_sum(w.detach(), token_loss)
    wider = torch.promote_types(w.dtype, token_loss.dtype)
    computed = torch.promote_types(wider, torch.float32)
    total = _weighted_sum(w.detach().to(computed), token_loss.to(computed))
    return total.to(wider) if wider.is_floating_point else total


def times_coefficient(coefficient: float, part: Tensor, losses: Tensor) -> Tensor:
    """``coefficient * part``, where ``part`` is a weighted sum of ``losses``.

    A coefficient of 0 gives 0 whatever ``part`` is, and stays in the autograd graph.
    """
    if coefficient == 0:
        return weighted_sum(torch.zeros_like(losses), losses).to(part.dtype)
    return coefficient * part


def where_weighted(w: Tensor, x: Tensor) -> Tensor:
    """``x`` where ``w != 0``, else 0, whatever ``x`` is there; same shape and dtype.

    One vectorised pass: `torch.where` takes several times as long on a CPU.
    """
    return torch.ops.aten.hardshrink_backward(x, w, 0)


def _weighted_sum(w: Tensor, token_loss: Tensor) -> Tensor:
    # The gradient is w whatever the losses are; only the value has to be saved from NaN.
    total = _dot(token_loss, w)
    if not _is_known_finite(total):
        with torch.no_grad():
            total.detach().copy_(_dot(where_weighted(w, token_loss), w))
    return total


_BLOCK = 2**18


def _dot(x: Tensor, w: Tensor) -> Tensor:
    """In blocks on a CPU, where the error of a dot product grows with its length."""
    if x.numel() <= _BLOCK or not x.is_cpu:
        return torch.dot(x, w)
    blocks = zip(x.split(_BLOCK), w.split(_BLOCK), strict=True)
    return torch.stack([torch.dot(*block) for block in blocks]).sum()


def _is_known_finite(total: Tensor) -> bool:
    """Whether a scalar is finite; False where reading it would wait for a device.

    A finite sum has met no NaN and no inf, at tokens of weight 0 either.
    """
    if not total.is_cpu or torch.compiler.is_compiling():
        return False
    try:
        return math.isfinite(total.detach().numpy())
    except RuntimeError:  # no numpy, or a tensor without memory of its own, as under `vmap`
        return False
