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


def spread(
    coefficient_S: Tensor, mask: Tensor, sample_T: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``w_t = m_t * c_{s(t)}``, computed in fp64 and rounded once to ``dtype``.

    Args:
        coefficient_S: fp64 [samples].
        mask: [samples, seq] (rows are samples), or any shape together with ``sample_T``.
        sample_T: int64, one per element of ``mask``: its sample, or ``samples`` for no sample.

    Returns:
        ``dtype``, shape of ``mask``.
    """
    if sample_T is None:
        per_token = coefficient_S.unsqueeze(-1)
    else:
        with_none = torch.cat([coefficient_S, coefficient_S.new_zeros(1)])
        per_token = with_none[sample_T].view(mask.shape)
    return (mask.detach().to(torch.float64) * per_token).to(dtype)
