"""The losses of `examples/grpo/policy.py` and their gradients, by their published formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.grpo import policy
from megatron_loss_agg import Microbatch, SequenceMean

F64 = torch.float64
NEAR = (-0.5, -0.1, 0.0, 0.1, 0.5)  # log-ratios; exp(0.1) = 1.11 and exp(-0.1) = 0.90
LOW, HIGH, CAP = 0.2, 0.28, 1.3

# A loss of a token, and its derivative by the first input, in Python's own numbers.


def ppo(log_prob: float, old: float, advantage: float) -> tuple[float, float]:
    ratio = math.exp(log_prob - old)
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    if -advantage * clipped > -advantage * ratio:
        return -advantage * clipped, 0.0
    return -advantage * ratio, -advantage * ratio


def cispo(log_prob: float, old: float, advantage: float) -> tuple[float, float]:
    weight = min(math.exp(log_prob - old), 1 + HIGH)
    return -weight * advantage * log_prob, -weight * advantage


def k1(log_prob: float, reference: float, _: float) -> tuple[float, float]:
    return log_prob - reference, 1.0


def k2(log_prob: float, reference: float, _: float) -> tuple[float, float]:
    return (log_prob - reference) ** 2 / 2, log_prob - reference


def k3(log_prob: float, reference: float, _: float) -> tuple[float, float]:
    ratio = math.exp(reference - log_prob)
    return ratio - 1 - math.log(ratio), 1 - ratio


def critic(value: float, old: float, returns: float) -> tuple[float, float]:
    clipped = min(max(value, old - LOW), old + LOW)
    if (clipped - returns) ** 2 > (value - returns) ** 2:
        return (clipped - returns) ** 2 / 2, 0.0
    return (value - returns) ** 2 / 2, value - returns


def clipped_loss(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return policy.clipped_policy_loss(policy.log_ratio_of(log_probs, old), advantages, LOW, HIGH)[0]


def cispo_loss(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return policy.cispo_loss(log_probs, policy.log_ratio_of(log_probs, old), advantages, HIGH)


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[float, float]]]] = {
    "ppo": (clipped_loss, ppo),
    "cispo": (cispo_loss, cispo),
    "k1": (lambda x, y, _: policy.kl_k1(x, y), k1),
    "k2": (lambda x, y, _: policy.kl_k2(x, y), k2),
    "k3": (lambda x, y, _: policy.kl_k3(x, y), k3),
    "critic": (partial(policy.clipped_value_loss, clip=LOW), critic),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_those_of_the_formula(name):
    loss, formula = LOSSES[name]
    rows = [(-1.0 + x, -1.0, a) for x in NEAR for a in (-1.5, 0.0, 0.5)]
    first, *others = torch.tensor(rows, dtype=F64).unbind(dim=1)
    first.requires_grad_()
    losses = loss(first, *others)
    losses.sum().backward()
    values, slopes = zip(*(formula(*row) for row in rows), strict=True)
    assert losses.tolist() == pytest.approx(values, rel=1e-12, abs=1e-15)
    assert first.grad.tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-15)


# Ratios, advantages, and whether the gradient is clipped away: not where it leads back towards 1.
CLIPPED = [([0.5, 1, 2], 1.0, [False, False, True]), ([0.5, 1, 2], -1.0, [True, False, False])]


@pytest.mark.parametrize("ratios, advantage, expected", CLIPPED)
def test_clipped_tokens_are_those_without_a_gradient(ratios, advantage, expected):
    log_ratio = torch.tensor(ratios).log().requires_grad_()
    losses, clipped = policy.clipped_policy_loss(
        log_ratio, torch.full_like(log_ratio, advantage), LOW, HIGH
    )
    losses.sum().backward()
    assert clipped.tolist() == (log_ratio.grad == 0).tolist() == expected


def test_a_sequence_has_one_ratio():
    """GSPO: that of the mean over its active tokens."""
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    log_ratio = torch.tensor([[0.1, 0.3, 9.0], [-0.4, 9.0, 9.0]], dtype=F64, requires_grad=True)
    means = SequenceMean(Microbatch(mask))(log_ratio)
    losses, _ = policy.clipped_policy_loss(means, torch.ones_like(means), 0.9, 0.9)
    (losses * mask).sum().backward()
    first, second = math.exp(0.2), math.exp(-0.4)
    torch.testing.assert_close(losses[:, 0], torch.tensor([-first, -second], dtype=F64))
    # Both tokens of the first sequence have its ratio, whose mean is half of each.
    expected = torch.tensor([[-first, -first, 0], [-second, 0, 0]], dtype=F64)
    torch.testing.assert_close(log_ratio.grad, expected)


def test_an_importance_weight_is_truncated_and_has_no_gradient():
    log_ratio = torch.tensor([0.1, 3.0], requires_grad=True)
    weight = policy.truncated_importance_weight(log_ratio, CAP)
    torch.testing.assert_close(weight, torch.tensor([math.exp(0.1), CAP]))
    assert not weight.requires_grad


@pytest.mark.parametrize("name", ["ppo", "cispo", "k3"])
def test_far_log_ratios_overflow_neither_value_nor_gradient(name: Any):
    old = torch.tensor([-1e4, -700.0, 700.0, 1e4])
    for advantages in (torch.ones(4), -torch.ones(4)):
        first = torch.full((4,), -1.0, requires_grad=True)
        losses = LOSSES[name][0](first, old, advantages)
        losses.sum().backward()
        assert losses.isfinite().all() and first.grad.isfinite().all()
