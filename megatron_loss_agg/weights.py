"""Masks, groups and counts -> weights. The only file that turns counts into weights.

Every mode is one formula (see `aggregation`), split in the factor that all tokens of a sample
share and the token's own mask:

    w_t = m_t * c_s        c_s = 1 / (D * M_within(s) * N_across)

Suffixes: ``_S`` samples, ``_T`` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_loss_agg.errors import FunctionError


def sample_coefficients(within_S: Tensor, across: float, scale: float) -> Tensor:
    """``c_s = scale / (M_within(s) * N_across)``; groups without tokens weigh nothing.

    Args:
        within_S: fp64 [samples]; mask sum over the whole step of the group each sample is in.
        across: number of groups in the whole step.
        scale: ``1 / D``.

    Returns:
        fp64 [samples].
    """
    weightless = torch.zeros_like(within_S)
    if across == 0:
        return weightless
    return torch.where(within_S > 0, scale / across / within_S, weightless)


def spread(
    coefficient_S: Tensor, mask: Tensor, length_S: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``w_t = m_t * c_{s(t)}``, each factor rounded to ``dtype`` (or fp32, if that is wider).

    Args:
        coefficient_S: fp64 [samples].
        mask: [samples, seq] (rows are samples), or any shape of ``tokens`` elements together with
            ``length_S``; 0 on padding, wherever it lies.
        length_S: integers [samples], the (padded) lengths of the samples in a pack, in its order;
            at most ``tokens`` in all.

    Returns:
        ``dtype``, shape of ``mask``.
    """
    computed = dtype if dtype == torch.float64 else torch.float32
    # A call that changes nothing costs as much as one that does, where a microbatch is small.
    mask = mask.detach() if mask.dtype == computed else mask.detach().to(computed)
    coefficient_S = coefficient_S.to(computed)
    if length_S is None:
        weights = mask * coefficient_S.unsqueeze(-1)
    else:
        weights = _repeated(coefficient_S, length_S, mask.numel()).view(mask.shape).mul_(mask)
    return weights if dtype == computed else weights.to(dtype)


def _repeated(x_S: Tensor, length_S: Tensor, tokens: int) -> Tensor:
    """[tokens]: each of ``x_S`` as often as its length says, and then 0.

    Waits for no device, since the number of tokens is given.
    """
    rest = tokens - length_S.sum(dim=0, keepdim=True)
    with_none = torch.cat([x_S, x_S.new_zeros(1)])
    lengths = torch.cat([length_S, rest])
    return with_none.repeat_interleave(lengths, output_size=tokens)


def check_rejected(weights: Tensor, kept: Tensor) -> None:
    """Raise FunctionError if a custom function weighs tokens where ``kept`` is 0."""
    if bool(((weights != 0) & (kept == 0)).any()):
        raise FunctionError(
            "the aggregation function returned weights for rejected samples; expected 0 on their "
            "tokens: see plan.microbatches[i].rejected"
        )


def checked_custom(weights: object, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """``weights`` of a custom function in ``dtype``, if they are usable for ``mask``.

    Raises:
        FunctionError: they are not.
    """
    if not isinstance(weights, Tensor) or weights.shape != mask.shape or weights.is_complex():
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise FunctionError(
            f"the aggregation function returned {got}; expected real weights of the mask's shape "
            f"{tuple(mask.shape)}"
        )
    # A copy, since the function may have returned a tensor of the batch's.
    weights = weights.detach().to(dtype, copy=True)
    if not bool((weights.isfinite() & ((weights == 0) | (mask != 0))).all()):
        raise FunctionError(
            "the aggregation function returned weights that are not finite, or not 0 where the "
            "mask is 0; expected finite weights, and 0 on masked tokens"
        )
    return weights
