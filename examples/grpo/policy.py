"""Per-token reinforcement-learning losses; reduce them with `weighted_sum`.

All inputs of a function have the same shape (any shape; nothing is broadcast). Half precision is
computed in and returned as fp32, fp64 as fp64. Only the first input gets a gradient. Every function
raises OptionError for mismatched shapes, and for dtypes that are not floating-point.

**Masked positions may hold anything**: where an input is unusable (NaN, or inf if the formula has
no value for it), the loss is computed from 0 and then set to NaN, which `weighted_sum` ignores at
weight 0. Otherwise the gradient there would be ``0 * inf``, or ``0 * NaN``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.tensors import LARGEST_FP32, check_tensors

__all__ = [
    "PolicyLoss",
    "cispo_loss",
    "clipped_policy_loss",
    "clipped_value_loss",
    "kl_penalty",
    "sequence_policy_loss",
    "token_entropy",
    "truncated_importance_weight",
]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this magnitude before exp (e^20 = 4.9e8); no gradient beyond it."""


class PolicyLoss(NamedTuple):
    """Per-token losses and what to report about them, all in the shape of the inputs."""

    losses: Tensor
    """What `weighted_sum` takes; differentiable."""
    ratios: Tensor
    """Importance ratios, detached."""
    clipped: Tensor
    """bool: where clipping (or `LOG_RATIO_BOUND`) removed the gradient."""


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

        r    = exp(log_probs - old_log_probs)
        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        loss = min(loss, -dual_clip A)   where A < 0, if dual_clip is given

    ``clip_high > clip_low`` is clip-higher (DAPO, arXiv:2503.14476); for ``dual_clip`` see Ye et
    al. 2020 (arXiv:1912.09729). ``clip_low >= 1`` or an infinite ``clip_high`` disables that side.

    Raises:
        OptionError: also for a clip that is not a number >= 0, or a dual clip that is not > 1.
    """
    log_probs, old, advantages = _prepared(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    dual = None if dual_clip is None else _number("dual_clip", dual_clip, above=1)
    return _surrogate(log_probs - old, advantages, _clip_range(clip_low, clip_high), dual)


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

        s    = exp(mean over the sequence's active tokens of (log_probs - old_log_probs))
        loss = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))

    The clips have no default because those of a mean are far smaller than PPO's (the paper uses
    3e-4 and 4e-4). With ``sample_mean`` this is the paper's objective. NaN at an active token makes
    its whole sequence NaN.

    Args:
        sequence_mean: the microbatch's `SequenceMean`, which holds the mask and the
            context-parallel group. The other inputs have the shape that it takes.

    Raises:
        OptionError, DataError: as `clipped_policy_loss` and `SequenceMean`.
    """
    log_probs, old, advantages = _prepared(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    limits = _clip_range(clip_low, clip_high)
    return _surrogate(sequence_mean(log_probs - old), advantages, limits, None)


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """CISPO: clips a token's weight but keeps its gradient (MiniMax-M1, arXiv:2506.13585).

        r    = exp(log_probs - old_log_probs)
        loss = -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log_probs

    ``clipped`` marks clipped weights. The paper tunes only ``clip_high`` and leaves the lower side
    open (``clip_low >= 1``). Raises as `clipped_policy_loss`.
    """
    log_probs, old, advantages = _prepared(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    limits = _clip_range(clip_low, clip_high)
    log_ratio = log_probs.detach() - old
    ratios = _clamped(log_ratio).exp()
    weights = ratios.clamp(*limits)
    scale = -(weights * advantages)
    usable = scale.isfinite()  # false also where log_ratio is NaN, or the product overflows
    losses = scale.masked_fill(~usable, 0) * log_probs
    return PolicyLoss(_nan_unless(usable, losses), ratios, usable & (weights != ratios))


def truncated_importance_weight(
    log_probs: Tensor, rollout_log_probs: Tensor, *, cap: float, mask: Tensor | None = None
) -> Tensor:
    """``min(exp(log_probs - rollout_log_probs), cap)``, detached: a factor for per-token losses.

    Corrects for a rollout engine whose probabilities differ from the trainer's for the same weights
    (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training";
    Ionides 2008, "Truncated Importance Sampling").

    Args:
        log_probs: from the trainer, for the policy that generated the rollout.
        cap: above 0; 2 is common.
        mask: sets the factor to 0 where it is 0; needed if masked positions may hold NaN, since a
            NaN factor would make the gradient ``0 * NaN``.

    Raises:
        OptionError: also for a cap that is not > 0.
    """
    log_probs, rollout = _prepared(log_probs=log_probs, rollout_log_probs=rollout_log_probs)
    cap = _number("cap", cap, above=0)
    weights = _clamped(log_probs.detach() - rollout).exp().clamp(max=cap)
    if mask is None:
        return weights
    check_tensors(OptionError, "real", log_probs=weights, mask=mask)
    return weights.masked_fill(mask == 0, 0)


def kl_penalty(
    log_probs: Tensor, ref_log_probs: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Estimate of ``KL(policy || reference)`` at sampled tokens (Schulman 2020, "Approximating KL
    Divergence").

    With ``x = log_probs - ref_log_probs`` and tokens sampled from the policy:

    - ``k1 = x``: unbiased, may be negative. Its gradient ``grad log p`` has expectation 0, so as a
      loss it only adds noise; use it in the reward.
    - ``k2 = x^2 / 2``: biased, low variance. Its gradient ``x grad log p`` is, in expectation, that
      of ``KL(policy || reference)``.
    - ``k3 = exp(-x) - 1 + x``: unbiased, never negative. Its gradient ``(1 - exp(-x)) grad log p``
      is, in expectation, that of the reverse direction, ``KL(reference || policy)``. Clamps ``x``
      to `LOG_RATIO_BOUND`.

    Raises:
        OptionError: also for an unknown estimator.
    """
    log_probs, ref = _prepared(log_probs=log_probs, ref_log_probs=ref_log_probs)
    x = log_probs - ref
    if estimator == "k1":
        return x
    if estimator == "k2":
        usable = x.detach().square().isfinite()
        return _nan_unless(usable, x.masked_fill(~usable, 0).square() / 2)
    if estimator == "k3":
        usable = ~x.isnan()
        x = _clamped(x.masked_fill(~usable, 0))
        return _nan_unless(usable, torch.expm1(-x) + x)
    raise OptionError(f"estimator={estimator!r}; expected 'k1', 'k2' or 'k3'")


def token_entropy(logits: Tensor) -> Tensor:
    """``-sum_v p_v log p_v`` with ``p = softmax(logits)``: of [..., vocab], [...].

    A logit of -inf (a token that cannot be sampled) contributes 0; a row with NaN or +inf, or all
    -inf, gives NaN. `megatron_loss_agg.mcore.logprobs` is for a sharded vocabulary.
    """
    (logits,) = _prepared(logits=logits)
    usable = logits.detach().amax(dim=-1).isfinite()
    logits = logits.masked_fill(~usable.unsqueeze(-1), 0)
    log_p = logits.log_softmax(dim=-1)
    log_p = log_p.masked_fill(log_p == -torch.inf, 0)  # avoids 0 * -inf
    return _nan_unless(usable, -(logits.softmax(dim=-1) * log_p).sum(dim=-1))


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float
) -> Tensor:
    """``max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2``.

    The critic loss of the original PPO implementation (Engstrom et al. 2020, arXiv:2005.12729), of
    values v, of v_old at rollout time and returns R. An infinite ``clip`` gives the plain squared
    error.

    Raises:
        OptionError: also for a clip that is not a number >= 0.
    """
    values, old, returns = _prepared(values=values, old_values=old_values, returns=returns)
    clip = _number("clip", clip)
    clipped = (values.detach().clamp(old - clip, old + clip) - returns).square()
    unclipped = values - returns
    usable = clipped.isfinite() & unclipped.detach().square().isfinite()
    unclipped = unclipped.masked_fill(~usable, 0).square()
    return _nan_unless(usable, torch.where(clipped > unclipped, clipped, unclipped) / 2)


def _surrogate(
    log_ratio: Tensor, advantages: Tensor, limits: tuple[float, float], dual_clip: float | None
) -> PolicyLoss:
    """The clipped surrogate; where it is clipped, it is a constant without gradient."""
    usable = ~log_ratio.isnan() & advantages.isfinite()
    ratios = _clamped(log_ratio.masked_fill(~usable, 0)).exp()
    losses = -(advantages * ratios)
    limit = -(advantages * ratios.detach().clamp(*limits))
    clipped = limit > losses
    losses = torch.where(clipped, limit, losses)
    if dual_clip is not None:
        most = -(dual_clip * advantages)
        too_much = (advantages < 0) & (losses > most)
        losses = torch.where(too_much, most, losses)
        clipped = clipped | too_much
    clipped = clipped | ((log_ratio.abs() > LOG_RATIO_BOUND) & (advantages != 0))
    ratios = _clamped(log_ratio.detach()).exp()
    return PolicyLoss(_nan_unless(usable, losses), ratios, clipped & usable)


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _nan_unless(usable: Tensor, losses: Tensor) -> Tensor:
    """``losses``, but NaN without gradient where ``usable`` is false."""
    return losses.masked_fill(~usable, torch.nan)


def _clip_range(clip_low: float, clip_high: float) -> tuple[float, float]:
    return 1 - _number("clip_low", clip_low), 1 + _number("clip_high", clip_high)


def _number(name: str, given: Any, above: float | None = None) -> float:
    """``given`` as a float, if it is > ``above``, or >= 0 without it."""
    is_number = isinstance(given, Real)
    fits = is_number and (given >= 0 if above is None else given > above)
    if not fits or LARGEST_FP32 < given < math.inf:
        least = ">= 0" if above is None else f"> {above}"
        raise OptionError(f"{name}={given!r}; expected a number {least} that fp32 holds, or inf")
    return float(given)


def _prepared(**inputs: Tensor) -> list[Tensor]:
    """In their widest dtype, at least fp32; all but the first detached. See `check_tensors`."""
    check_tensors(OptionError, "floating-point", **inputs)
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in inputs.values()), torch.float32)
    first, *data = inputs.values()
    return [first.to(dtype), *(x.detach().to(dtype) for x in data)]
