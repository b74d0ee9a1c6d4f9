"""Masks, groups and counts -> weights. The only file that knows what a mean is.

Every mode is one formula (see `aggregation`), split in the factor that all tokens of a sample
share and the token's own mask:

    w_t = m_t * c_s        c_s = 1 / (D * M_within(s) * N_across)

Suffixes: ``_S`` samples, ``_T`` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def sample_of_token(length_S: Tensor, tokens: int) -> Tensor:
    """int32 [tokens]: the sample of each token of a pack; ``samples`` after the last of them.

    Args:
        length_S: integers [samples], the (padded) lengths in the pack's order.
        tokens: length of the pack. Given, so that no device is waited for.
    """
    rest = tokens - length_S.sum(dim=0, keepdim=True)
    place = torch.arange(length_S.numel() + 1, dtype=torch.int32, device=length_S.device)
    return place.repeat_interleave(torch.cat([length_S, rest]), output_size=tokens)


def spread(
    coefficient_S: Tensor, mask: Tensor, sample_T: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``w_t = m_t * c_{s(t)}``, each factor rounded to ``dtype`` (or fp32, if that is wider).

    Args:
        coefficient_S: fp64 [samples].
        mask: [samples, seq] (rows are samples), or any shape together with ``sample_T``; 0 on
            padding, wherever it lies.
        sample_T: int32 or int64 [tokens], from `sample_of_token`.

    Returns:
        ``dtype``, shape of ``mask``.
    """
    computed = torch.promote_types(dtype, torch.float32)
    mask, coefficient_S = mask.detach().to(computed), coefficient_S.to(computed)
    if sample_T is None:
        return (mask * coefficient_S.unsqueeze(-1)).to(dtype)
    with_none = torch.cat([coefficient_S, coefficient_S.new_zeros(1)])
    per_token = with_none.index_select(0, sample_T).view(mask.shape)
    return per_token.mul_(mask).to(dtype)
