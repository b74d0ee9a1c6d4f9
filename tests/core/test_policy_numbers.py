"""Per-token losses by worked numbers, the entropy, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import policy, weighted_sum
from megatron_loss_agg.errors import PolicyError

F64 = torch.float64
POISON = [math.nan, math.inf, -math.inf]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=F64)


ppo, gspo, cispo = policy.clipped_policy_loss, policy.sequence_policy_loss, policy.cispo_loss
BEYOND = math.exp(policy.LOG_RATIO_BOUND + 1)
# A loss, ratios, advantages and options; and which are clipped. The losses are in test_policy.
CLIPPED = [
    # Kept are those that move back towards 1.
    (ppo, [0.5, 1, 2], [1, 1, 1], {"clip_high": 0.28}, [False, False, True]),
    (ppo, [0.5, 1, 2], [-1, -1, -1], {"clip_high": 0.28}, [True, False, False]),
    # -A r = 5 is limited to 3; with A = 1 the upper clip gives -1.2.
    (ppo, [5, 5], [-1, 1], {"dual_clip": 3.0}, [True, True]),
    # Without an advantage nothing is taken away.
    (ppo, [BEYOND, BEYOND], [-1, 0], {}, [True, False]),
    (cispo, [2, 1.1], [1, 1], {"clip_low": 1.0, "clip_high": 0.28}, [True, False]),
]


@pytest.mark.parametrize("loss, ratios, advantages, options, clipped", CLIPPED)
def test_what_is_clipped_is_said_with_the_ratios(loss, ratios, advantages, options, clipped):
    log_probs = tensor(ratios).log().requires_grad_()
    found = loss(log_probs, torch.zeros_like(log_probs), tensor(advantages), **options)
    assert found.clipped.tolist() == clipped
    if BEYOND not in ratios:
        torch.testing.assert_close(found.ratios, tensor(ratios))
    assert not found.ratios.requires_grad


@pytest.mark.parametrize("poison", POISON)
def test_an_importance_weight_is_truncated_and_0_under_the_mask(poison):
    # exp(0.5) = 1.65 and exp(3) = 20.1, of which the cap leaves 2.
    log_probs = tensor([0.5, 3.0, 0.2]).requires_grad_()
    rollout, mask = tensor([0.0, 0.0, poison]), tensor([1.0, 1.0, 0.0])
    weights = policy.truncated_importance_weight(log_probs, rollout, cap=2.0, mask=mask)
    torch.testing.assert_close(weights, tensor([math.exp(0.5), 2.0, 0.0]))
    assert not weights.requires_grad
    unmasked = policy.truncated_importance_weight(log_probs[:2], rollout[:2], cap=2.0)
    assert torch.equal(unmasked, weights[:2])
    total = weighted_sum(mask, weights * policy.kl_penalty(log_probs, rollout, "k2"))
    total.backward()
    assert total.isfinite() and log_probs.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 1), (0, 4)])
def test_entropy_and_gradient_are_those_of_a_loop(shape):
    logits = 2 * torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    entropy = policy.token_entropy(logits)
    entropy.sum().backward()
    for row, grad, got in zip(
        logits.detach().view(-1, shape[-1]).tolist(),
        logits.grad.view(-1, shape[-1]).tolist(),
        entropy.view(-1).tolist(),
        strict=True,
    ):
        total = math.fsum(map(math.exp, row))
        p = [math.exp(z) / total for z in row]
        h = -math.fsum(x * math.log(x) for x in p)
        assert got == pytest.approx(h, rel=1e-12, abs=1e-15)
        # dH / dz_j = -p_j (log p_j + H)
        assert grad == pytest.approx([-x * (math.log(x) + h) for x in p], rel=1e-11, abs=1e-14)


@pytest.mark.parametrize("poison", POISON)
def test_entropy_at_masked_positions_may_be_anything(poison):
    logits = torch.tensor([[0.0, 1.0], [poison, poison], [poison, 0.0]], requires_grad=True)
    total = weighted_sum(torch.tensor([1.0, 0.0, 0.0]), policy.token_entropy(logits))
    total.backward()
    assert total.isfinite() and not logits.grad[1:].any() and logits.grad[0].isfinite().all()


@pytest.mark.parametrize("huge", [3e38, -3e38])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_huge_advantages_make_no_gradient_nan(huge, weight):
    # The ratio e^2 is over the clip, and the product of both beyond fp32.
    log_probs = torch.tensor([2.0, 0.0], requires_grad=True)
    inputs = log_probs, torch.zeros(2), torch.tensor([huge, 1.0])
    losses = cispo(*inputs, clip_low=1, clip_high=9).losses
    total = weighted_sum(torch.tensor([weight, 1.0]), losses)
    total.backward()
    assert log_probs.grad.tolist() == [0.0, -1.0]
    assert total.isnan() == bool(weight)  # a product that overflows is shown where it counts


def test_a_logit_far_below_the_largest_adds_no_entropy():
    # The log-probability, -3e38 - 3e38, is -inf in fp32.
    logits = torch.tensor([3e38, -3e38], requires_grad=True)
    entropy = policy.token_entropy(logits)
    entropy.backward()
    assert entropy.item() == 0 and not logits.grad.any()


def test_a_token_that_cannot_be_drawn_adds_no_entropy():
    logits = tensor([0.0, 0.0, -math.inf]).requires_grad_()
    entropy = policy.token_entropy(logits)
    entropy.backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert logits.grad.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-16)
    assert policy.token_entropy(torch.full((2, 3), math.nan)).isnan().all()


X = torch.zeros(2, 3)
weight = policy.truncated_importance_weight
REFUSED = [
    (lambda: ppo(X, X[0], X), "old_log_probs has shape (3,) and log_probs (2, 3); expected the"),
    (lambda: weight(X, X, cap=2, mask=X[0]), "mask has shape (3,) and log_probs (2, 3); expected"),
    (lambda: cispo(X, X, 1.0, clip_low=1, clip_high=1), "advantages is a float; expected a"),
    (lambda: policy.kl_penalty(X, X.long(), "k1"), "ref_log_probs is a torch.int64 tensor of"),
    (lambda: policy.kl_penalty(X, X, ["k1"]), "estimator=['k1']; expected 'k1', 'k2' or 'k3'"),
    (lambda: policy.kl_penalty(X, X, "k4"), "estimator='k4'; expected 'k1', 'k2' or 'k3'"),
    (lambda: ppo(X, X, X, clip_low=-0.1), "clip_low=-0.1; expected a number >= 0"),
    (lambda: gspo(X, X, X, X, clip_low=0, clip_high=math.nan), "clip_high=nan; expected a number"),
    (lambda: ppo(X, X, X, dual_clip=1.0), "dual_clip=1.0; expected a number > 1 that fp32"),
    (lambda: weight(X, X, cap=0), "cap=0; expected a number > 0"),
    (lambda: policy.clipped_value_loss(X, X, X, clip=-1), "clip=-1; expected a number >= 0"),
    (lambda: ppo(X, X, X, clip_high=1e300), "clip_high=1e+300; expected a number >= 0 that fp32"),
    (lambda: cispo(X, X, X, clip_low=10**400, clip_high=1), "clip_low=1000"),
    (lambda: ppo(X, X, X, dual_clip="3"), "dual_clip='3'; expected a number > 1 that fp32 holds"),
    (lambda: weight(X, X, cap=1e300), "cap=1e+300; expected a number > 0 that fp32 holds, or inf"),
    (lambda: policy.clipped_value_loss(X, X, X, clip=None), "clip=None; expected a number >= 0"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_refusals_say_what_to_change(call, text):
    with pytest.raises(PolicyError) as error:
        call()
    assert str(error.value).startswith(text)
