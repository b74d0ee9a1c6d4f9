"""Losses of reinforcement learning by token, a few lines each, to copy into other loops.

Every function takes tensors of the same shape and returns one loss for each token, unreduced.
Log-probabilities of tokens outside the mask must be finite: 0 times NaN is NaN in a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_ratio_of(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """``log(p / p_old)``, within ±20, so that its exponential cannot overflow."""
    return (log_probs - old_log_probs).clamp(-20, 20)


def clipped_policy_loss(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv:1707.06347), and True at tokens where it has no gradient.

    ``clip_high > clip_low`` is DAPO's clip-higher (arXiv:2503.14476). GSPO (arXiv:2507.18071) gives
    the log-ratio of a whole sequence, ``SequenceMean(...)(log_ratio)``, and clips far smaller.
    """
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def cispo_loss(
    log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, clip_high: float
) -> Tensor:
    """CISPO (arXiv:2506.13585): clips a token's weight and keeps its gradient."""
    weight = log_ratio.detach().exp().clamp(max=1 + clip_high)
    return -weight * advantages * log_probs


def truncated_importance_weight(log_ratio: Tensor, cap: float) -> Tensor:
    """Factor of a token's loss, for rollouts from an engine with different probabilities."""
    return log_ratio.detach().exp().clamp(max=cap)


def kl_k1(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Unbiased, may be negative. For rewards only: as a loss, its gradient has expectation 0."""
    return log_probs - reference_log_probs


def kl_k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Biased. Its gradient is, in expectation, that of KL(policy || reference)."""
    return (log_probs - reference_log_probs).square() / 2


def kl_k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Unbiased, never negative. Its gradient is that of KL(reference || policy)."""
    x = log_ratio_of(log_probs, reference_log_probs)
    return torch.expm1(-x) + x


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Squared error of the critic, clipped around its values at rollout time."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2
