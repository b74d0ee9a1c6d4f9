"""Losses of reinforcement learning, one number a token: nothing is reduced here.

Weigh and sum them with `weighted_sum`. Every function takes any shape, the same for all its
inputs, and never broadcasts. It computes in fp32 for half precision, in fp64 for fp64, and
returns what it computed in. Gradients flow to the first input only; the others are data.

Inf or NaN at positions that do not count is harmless, and shown at those that do (`elementwise`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.elementwise import LOG_RATIO_BOUND, bounded, check, lift, shown
from megatron_loss_agg.errors import PolicyError


class PolicyLoss(NamedTuple):
    """Per-token losses, and what to report of them. All of the inputs' shape."""

    losses: Tensor
    ratios: Tensor
    """Importance ratios, detached."""
    clipped: Tensor
    """bool: where the clip (or `LOG_RATIO_BOUND`) took the gradient away."""


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347).

    ::

        r    = exp(log_probs - old_log_probs)
        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        loss = min(loss, -dual_clip A)   where A < 0, if dual_clip is given

    ``clip_high > clip_low`` is clip-higher (DAPO, arXiv:2503.14476); ``dual_clip`` is that of
    Ye et al. 2020 (arXiv:1912.09729). ``clip_low >= 1`` and an infinite ``clip_high`` clip nothing.

    Args:
        log_probs: of the policy that is trained.
        old_log_probs: of the policy that the ratio is against.
        advantages: A.

    Raises:
        PolicyError: shapes or dtypes that do not fit, a negative or NaN clip, a dual clip <= 1.
    """
    check(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    _check_clips(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise PolicyError(f"dual_clip={dual_clip!r}; expected a number > 1, or None for none")
    log_probs, old, advantages = lift(log_probs, old_log_probs, advantages)
    return _surrogate(log_probs - old, advantages, (1 - clip_low, 1 + clip_high), dual_clip)


def sequence_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequence_mean: Callable[[Tensor], Tensor],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """GSPO: one ratio for all tokens of a sequence (Zheng et al. 2025, arXiv:2507.18071).

    ::

        s    = exp(mean over the sequence's active tokens of (log_probs - old_log_probs))
        loss = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))

    The clips have no default: of a mean they are far smaller than PPO's (3e-4 and 4e-4 there).
    Under ``sample_mean`` this is the paper's objective. Active NaN makes its whole sequence NaN.

    Args:
        log_probs, old_log_probs, advantages: as in `clipped_policy_loss`, of the shape that
            ``sequence_mean`` takes.
        sequence_mean: a `SequenceMean` of the microbatch; it holds the mask, and the group over
            which sequences are split.

    Raises:
        PolicyError: as `clipped_policy_loss`. MaskError: a shape that is not the mask's.
    """
    check(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    _check_clips(clip_low, clip_high)
    log_probs, old, advantages = lift(log_probs, old_log_probs, advantages)
    log_ratio = sequence_mean(log_probs - old)
    return _surrogate(log_ratio, advantages, (1 - clip_low, 1 + clip_high), None)


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """CISPO: the clip limits a token's weight, never its gradient (MiniMax-M1, arXiv:2506.13585).

    ::

        r    = exp(log_probs - old_log_probs)
        loss = -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log_probs

    ``clipped`` tells where the weight was limited; every token keeps its gradient. The paper tunes
    ``clip_high`` alone and leaves the lower side open, which is ``clip_low >= 1``.

    Args:
        log_probs, old_log_probs, advantages: as in `clipped_policy_loss`.

    Raises:
        PolicyError: shapes or dtypes that do not fit, or a negative or NaN clip.
    """
    check(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    _check_clips(clip_low, clip_high)
    log_probs, old, advantages = lift(log_probs, old_log_probs, advantages)
    log_ratio = log_probs.detach() - old
    usable = ~log_ratio.isnan() & advantages.isfinite()
    ratios = bounded(log_ratio).exp()
    weights = ratios.clamp(1 - clip_low, 1 + clip_high)
    scale = (-(weights * advantages)).masked_fill(~usable, 0)
    return PolicyLoss(shown(scale * log_probs, usable), ratios, usable & (weights != ratios))


def truncated_importance_weight(
    log_probs: Tensor, rollout_log_probs: Tensor, *, cap: float, mask: Tensor | None = None
) -> Tensor:
    """``min(exp(log_probs - rollout_log_probs), cap)``, detached: a factor for per-token losses.

    It corrects for a rollout engine whose probabilities differ from the trainer's for the same
    weights (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"; truncation: Ionides 2008, "Truncated Importance Sampling").

    Args:
        log_probs: by the trainer, of the policy that made the rollout.
        rollout_log_probs: by the rollout engine.
        cap: > 0; 2 is common.
        mask: give it where masked positions may hold NaN. The factor is 0 there, for a factor of
            NaN would make the gradient ``0 * NaN``.

    Raises:
        PolicyError: shapes or dtypes that do not fit, or a cap that is not > 0.
    """
    check(log_probs=log_probs, rollout_log_probs=rollout_log_probs)
    if not cap > 0:
        raise PolicyError(f"cap={cap!r}; expected a number > 0")
    log_probs, rollout = lift(log_probs.detach(), rollout_log_probs)
    weights = bounded(log_probs - rollout).exp().clamp(max=cap)
    if mask is None:
        return weights
    if mask.shape != weights.shape:
        raise PolicyError(
            f"mask of shape {tuple(mask.shape)} for log_probs of shape {tuple(weights.shape)}; "
            "expected the same shape"
        )
    return weights.masked_fill(mask == 0, 0)


def kl_penalty(
    log_probs: Tensor, ref_log_probs: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Estimate of ``KL(policy || reference)`` at sampled tokens (Schulman 2020, "Approximating KL
    Divergence").

    With ``x = log_probs - ref_log_probs``, and tokens sampled from the policy:

    - ``k1 = x``: unbiased, may be negative. Its gradient ``grad log p`` is 0 in expectation, so as
      a loss it does nothing but add noise; it belongs in the reward.
    - ``k2 = x^2 / 2``: biased, low variance. Its gradient ``x grad log p`` is in expectation that
      of ``KL(policy || reference)``.
    - ``k3 = exp(-x) - 1 + x``: unbiased, never negative. Its gradient ``(1 - exp(-x)) grad log p``
      is in expectation that of the other direction, ``KL(reference || policy)``.

    ``k3`` bounds ``x`` by `LOG_RATIO_BOUND`.

    Raises:
        PolicyError: shapes or dtypes that do not fit, or an unknown estimator.
    """
    check(log_probs=log_probs, ref_log_probs=ref_log_probs)
    log_probs, ref = lift(log_probs, ref_log_probs)
    x = log_probs - ref
    if estimator == "k1":
        return x
    if estimator == "k2":
        usable = x.detach().square().isfinite()
        return shown(x.masked_fill(~usable, 0).square() / 2, usable)
    if estimator == "k3":
        usable = ~x.isnan()
        kept = bounded(x.masked_fill(~usable, 0))
        return shown(torch.expm1(-kept) + kept, usable)
    raise PolicyError(f"estimator={estimator!r}; expected 'k1', 'k2' or 'k3'")


def token_entropy(logits: Tensor) -> Tensor:
    """``-sum_v p_v log p_v`` with ``p = softmax(logits)``, of an unsplit vocabulary.

    A logit of -inf is a token that cannot be drawn: it adds 0. For a vocabulary split over
    tensor-parallel ranks see `megatron_loss_agg.mcore.logprobs`.

    Args:
        logits: [..., vocab].

    Returns:
        [...]; NaN where the row has NaN, +inf, or nothing but -inf.

    Raises:
        PolicyError: not a floating tensor with a vocabulary axis.
    """
    check(logits=logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise PolicyError(f"logits have shape {tuple(logits.shape)}; expected [..., vocab]")
    (logits,) = lift(logits)
    usable = logits.detach().amax(dim=-1).isfinite()
    logits = logits.masked_fill(~usable.unsqueeze(-1), 0)
    log_p = logits.log_softmax(dim=-1)
    log_p = log_p.masked_fill(logits == -torch.inf, 0)  # for 0 * -inf; what p is there is no matter
    entropy = -(logits.softmax(dim=-1) * log_p).sum(dim=-1)
    return shown(entropy, usable)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float
) -> Tensor:
    """``max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2``.

    The critic's loss of PPO's first implementation, described by Engstrom et al. 2020
    (arXiv:2005.12729). An infinite ``clip`` gives the plain squared error.

    Args:
        values: v, of the critic that is trained.
        old_values: v_old, at the time of the rollout.
        returns: R.

    Raises:
        PolicyError: shapes or dtypes that do not fit, or a negative or NaN clip.
    """
    check(values=values, old_values=old_values, returns=returns)
    if not clip >= 0:
        raise PolicyError(f"clip={clip!r}; expected a number >= 0")
    values, old, returns = lift(values, old_values, returns)
    # Beyond the dtype's range when squared is as unusable as inf.
    largest = torch.stack([x.detach().abs() for x in (values, old, returns)]).amax(0)
    usable = (4 * largest * largest).isfinite()
    values, old, returns = (x.masked_fill(~usable, 0) for x in (values, old, returns))
    kept = (values - returns).square()
    limit = (values.detach().clamp(old - clip, old + clip) - returns).square()
    return shown(torch.where(limit > kept, limit, kept) / 2, usable)


def _surrogate(
    log_ratio: Tensor, advantages: Tensor, limits: tuple[float, float], dual_clip: float | None
) -> PolicyLoss:
    """The clipped surrogate. Where it is clipped its value is a constant, hence no gradient."""
    usable = ~log_ratio.isnan() & advantages.isfinite()
    ratios = bounded(log_ratio.masked_fill(~usable, 0)).exp()
    kept = -(advantages * ratios)
    limit = -(advantages * ratios.detach().clamp(*limits))
    clipped = limit > kept
    losses = torch.where(clipped, limit, kept)
    if dual_clip is not None:
        most = -(dual_clip * advantages)
        too_much = (advantages < 0) & (losses > most)
        losses = torch.where(too_much, most, losses)
        clipped = clipped | too_much
    clipped = clipped | ((log_ratio.abs() > LOG_RATIO_BOUND) & (advantages != 0))
    return PolicyLoss(shown(losses, usable), bounded(log_ratio.detach()).exp(), clipped & usable)


def _check_clips(clip_low: float, clip_high: float) -> None:
    for name, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not isinstance(clip, (int, float)) or not clip >= 0:
            raise PolicyError(f"{name}={clip!r}; expected a number >= 0")
