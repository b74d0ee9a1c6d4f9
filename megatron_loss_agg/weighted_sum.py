"""The weight of a token, and the weighted sum of losses: the only place with these formulas.

In every mode (see `aggregation`) the weight is the mask times a coefficient of the sample, with its
own weight ``v_s``, or 1:

    w_t = m_t * c_s     c_s = v_s / (D * M_within(s) * C(s) * N_across)     L = sum_t w_t * loss_t

Factors of tokens, where there are any, multiply the weights: ``w_t = m_t * f_t * c_s``.
Suffixes: ``_S`` samples, ``_T`` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.tensors import (
    at_least_fp32,
    check_tensors,
    described,
    detached,
    in_dtype,
    is_plain,
    moved,
)


def sample_coefficients(within_S: Tensor, across: float, scale: float) -> Tensor:
    """``c_s`` of samples of weight 1; 0 in groups without tokens. fp64 [samples].

    Args:
        within_S: fp64 [samples]; ``M_within * C`` of each sample.
        across: number of groups in the whole step, or their weight ``V_across``.
        scale: ``1 / D``.
    """
    if not across:
        return torch.zeros_like(within_S)
    return torch.div(scale / across, within_S).masked_fill_(within_S == 0, 0.0)


def token_weights_of(
    coefficient_S: Tensor, mask: Tensor, starts: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``w_t = m_t * c_s``, each factor rounded to ``dtype`` (or to fp32, if that is wider).

    Args:
        coefficient_S: fp64 [samples], on any device.
        mask: [samples, seq]; or with ``starts``, a pack in any shape. 0 on padding.
        starts: integers [samples + 1], the valid offsets of the samples in a pack.
    """
    computed = at_least_fp32(dtype)
    mask = in_dtype(mask, computed)
    coefficient_S = moved(coefficient_S, mask.device, computed)
    if starts is None:
        weights = mask * coefficient_S.view(-1, 1)
    else:
        # Tokens after the last sample get 0. Passing `output_size` avoids a device sync.
        number = mask.numel()
        length = pad(moved(starts, mask.device), (0, 1), value=number).diff()
        coefficient_T = pad(coefficient_S, (0, 1)).repeat_interleave(length, output_size=number)
        weights = coefficient_T.view(mask.shape).mul_(mask)
    return in_dtype(weights, dtype)


def times_factors(w: Tensor, factors: Tensor | None) -> Tensor:
    """``w_t * f_t``, in the dtype, on the device and in the shape of ``w``; None: ``w`` itself."""
    return w if factors is None else w * moved(factors, w.device, w.dtype).reshape(w.shape)


def custom_weights(
    function: Callable[[], object], mask: Tensor, kept: Tensor, dtype: torch.dtype
) -> Tensor:
    """A copy of what a custom function returns, in ``dtype``.

    Args:
        mask: the plan's, which the function can reach; its edits are undone.
        kept: the mask, but 0 on tokens of rejected samples.
    """
    unedited = mask.clone()
    weights = function()
    if not is_plain(weights) or weights.shape != mask.shape:
        raise OptionError(
            f"the aggregation function returned {described(weights)}; expected real weights of the "
            f"mask's shape {tuple(mask.shape)}"
        )
    weights = weights.detach().to(dtype, copy=True)  # it may be the mask
    mask.copy_(unedited)
    if not bool((weights.isfinite() & ((weights == 0) | (kept != 0))).all()):
        raise OptionError(
            "the aggregation function returned weights that are not finite, or not 0 where the "
            "mask is 0 or the sample rejected; expected finite weights, and 0 on those tokens"
        )
    return weights


def weighted_sum(w: Tensor, token_loss: Tensor) -> Tensor:
    """``sum_t w_t * loss_t`` over the tokens with ``w_t != 0``.

    NaN or inf at a weight of 0 reaches neither the value nor the gradient of ``token_loss``. With
    no tokens the sum is 0 and stays attached to the autograd graph, so that every rank still runs
    the collectives of the backward pass.

    Args:
        w: from `StepPlan.weights`; gets no gradient.
        token_loss: of the same shape.

    Returns:
        scalar, in the wider of the two dtypes; fp32 if neither is floating-point.

    Raises:
        DataError: not two real tensors of the same shape; nothing is broadcast.
    """
    check_tensors(DataError, "real", w=w, token_loss=token_loss)
    return weighted_sum_of_fitting(detached(w), token_loss)


def weighted_sum_of_fitting(w: Tensor, token_loss: Tensor) -> Tensor:
    """`weighted_sum` of tensors that are known to fit, with weights that have no gradient."""
    summed = torch.promote_types(w.dtype, token_loss.dtype)
    if not summed.is_floating_point:
        summed = torch.float32
    wide = at_least_fp32(summed)
    # `flatten`, unlike `reshape`, adds no node to the graph for a vector.
    w, token_loss = in_dtype(w, wide).flatten(), in_dtype(token_loss, wide).flatten()
    total = torch.dot(token_loss, w)
    # The gradient is w even where losses are not finite: only the value needs a repair.
    if not _is_known_finite(total):
        with torch.no_grad():
            total.detach().copy_(torch.dot(where_weighted(w, token_loss), w))
    return in_dtype(total, summed)


def _is_known_finite(total: Tensor) -> bool:
    """Whether ``total`` is finite; False if that is unknown without a device sync."""
    if not total.is_cpu or torch.compiler.is_compiling():
        return False
    try:
        return math.isfinite(total.item())
    except RuntimeError:  # a tensor without a value of its own, as under `vmap`
        return False


def times_coefficient(coefficient: float, part: Tensor, losses: Tensor) -> Tensor:
    """``coefficient * part``, a weighted sum of ``losses``; for 0 it is 0 even if they are NaN."""
    if coefficient == 1:  # saves a node of the graph
        return part
    if coefficient == 0:
        return weighted_sum(torch.zeros_like(losses), losses).to(part.dtype)
    return coefficient * part


def where_weighted(w: Tensor, x: Tensor) -> Tensor:
    """``x`` where ``w != 0``, else 0 (also for NaN and inf); same shape and dtype."""
    # `torch.where` is several times slower on CPU.
    return torch.ops.aten.hardshrink_backward(x, w, 0)
