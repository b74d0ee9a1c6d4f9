"""Token weights and weighted sums: ``L = sum_t w_t * loss_t``, or only its gradient.

Suffixes: ``_S`` samples, ``_T`` tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.errors import DataError
from megatron_loss_agg.tensors import at_least_fp32, check_tensors, moved


def weights_of_tokens(
    coefficient_S: Tensor, mask: Tensor, starts: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``w_t = m_t * c_s``, each factor rounded to ``dtype`` (or to fp32, if that is wider).

    Args:
        coefficient_S: fp64 [samples], on any device.
        mask: [samples, seq]; or with ``starts``, a pack in any shape. 0 on padding.
        starts: integers [samples + 1], the valid offsets of the samples in a pack.
    """
    computed = at_least_fp32(dtype)
    coefficient_S = moved(coefficient_S, mask.device, computed)
    lengths = None
    if starts is not None:
        coefficient_S = pad(coefficient_S, (0, 1))
        lengths = moved(padded_lengths(starts, mask.numel()), mask.device)
    return weights_by_length(coefficient_S, mask.detach().to(computed), lengths).to(dtype)


def padded_lengths(starts: Tensor, num_tokens: int) -> Tensor:
    """[samples + 1]: the length of each sample of a pack, and of the padding after the last one.

    int32 halves the size of the per-token index that `weights_by_length` makes from them.
    """
    return pad(starts, (0, 1), value=num_tokens).diff().to(torch.int32)


def weights_by_length(coefficient_S: Tensor, mask: Tensor, lengths: Tensor | None) -> Tensor:
    """``w_t = m_t * c_s`` for tensors of one dtype and device, without waiting for the device.

    Args:
        lengths: `padded_lengths` of a pack; its ``coefficient_S`` must end with a 0 for the
            padding. None: rows.
    """
    if lengths is None:
        return mask * coefficient_S.view(-1, 1)
    # Passing `output_size` avoids a wait for the device.
    coefficient_T = coefficient_S.repeat_interleave(lengths, output_size=mask.numel())
    return coefficient_T.view(mask.shape) * mask


def weighted_sum(w: Tensor, token_loss: Tensor) -> Tensor:
    """``sum_t w_t * loss_t`` over the tokens with ``w_t != 0``.

    NaN or inf at a weight of 0 affects neither the sum nor the gradient of ``token_loss``. With no
    tokens the sum is 0 and stays attached to the autograd graph, so that every rank still runs the
    collectives of the backward pass.

    Args:
        w: from `StepPlan.weights`; gets no gradient.
        token_loss: of the same shape.

    Returns:
        scalar, in the wider of the two dtypes; fp32 if neither is floating-point.

    Raises:
        DataError: not two real tensors of the same shape; nothing is broadcast.
    """
    check_tensors(DataError, "real", w=w, token_loss=token_loss)
    return weighted_sum_unchecked(w, token_loss)


def weighted_sum_unchecked(w: Tensor, token_loss: Tensor) -> Tensor:
    """`weighted_sum` without checking its arguments."""
    dtype = torch.promote_types(w.dtype, token_loss.dtype)
    if not dtype.is_floating_point:
        dtype = torch.float32
    wide = at_least_fp32(dtype)
    # `flatten`, unlike `reshape`, adds no node to the graph for a vector.
    w, losses = w.detach().to(wide).flatten(), token_loss.to(wide).flatten()
    total = torch.dot(losses, w)
    # The gradient is w even where losses are not finite. Only the value may need a repair, since
    # NaN * 0 is NaN. On a CPU it is cheaper to check first; on a device the check would wait.
    if not _is_known_finite(total):
        with torch.no_grad():
            torch.dot(torch.where(w != 0, losses, w), w, out=total.detach())
    return total.to(dtype)


def _is_known_finite(total: Tensor) -> bool:
    """True if ``total`` is finite; False if finding out would mean waiting for the device."""
    if not total.is_cpu or torch.compiler.is_compiling():
        return False
    try:
        return math.isfinite(total.item())
    except RuntimeError:  # a tensor without its own value, as under `vmap`
        return False


def weigh(output: Tensor, weights: Tensor) -> Tensor:
    """``output`` itself, with its gradient multiplied by ``weights``.

    Use it in a loop whose loss is a sum or a mean of ``loss(output_t)`` and cannot be replaced. If
    the loop divides by M, ``weights = M * w_t`` gives the gradient of ``sum_t w_t * loss_t``. The
    loop still reports its own loss.

    Args:
        output: log-probabilities, values or losses, one number for each token.
        weights: of the same shape; get no gradient.

    Raises:
        DataError: not two real tensors of the same shape; nothing is broadcast.
    """
    check_tensors(DataError, "real", output=output, weights=weights)
    return _Weigh.apply(output, weights.detach())  # type: ignore[no-untyped-call]


class _Weigh(torch.autograd.Function):
    """The identity, with its gradient multiplied by weights."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, weights.dtype)
        return (gradient.to(wide) * weights.to(wide)).to(gradient.dtype), None
