"""Losses of tokens by their published formulas, and metrics over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributions import Categorical

from megatron_loss_agg import LossAggregation, policy, weighted_sum
from megatron_loss_agg.mcore import LossHook, TokenLoss
from megatron_loss_agg.report import Max, Mean, Min, Sum, reduce_reports
from tests.core.meaning import F64
from tests.core.operations import Operations
from tests.core.strategies import EXTREMES
from tests.distributed import run_ranks

# The formulas as they were published, see the docstrings of `policy`.


def clipped(x: Tensor, low: float, high: float) -> Tensor:
    """With a gradient of 1 at the bounds, where that of `Tensor.clamp` is 0 since torch 2.14."""
    return torch.where((x < low) | (x > high), x.clamp(low, high).detach(), x)


def ppo(lp: Tensor, old: Tensor, a: Tensor, low: float, high: float, dual: Any = None) -> Tensor:
    r = (lp - old).exp()
    loss = torch.maximum(-a * r, -a * clipped(r, 1 - low, 1 + high))
    if dual is None:
        return loss
    return torch.where(a < 0, torch.minimum(loss, -dual * a), loss)


def cispo(lp: Tensor, old: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return -(lp - old).exp().clamp(1 - low, 1 + high).detach() * a * lp


def kl(lp: Tensor, ref: Tensor, estimator: str) -> Tensor:
    x = lp - ref
    return {"k1": x, "k2": x**2 / 2, "k3": torch.expm1(-x) + x}[estimator]


def value(v: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    near = old + clipped(v - old, -clip, clip)
    return torch.maximum((v - returns) ** 2, (near - returns) ** 2) / 2


def weight(lp: Tensor, rollout: Tensor, cap: float) -> Tensor:
    return (lp - rollout).exp().clamp(max=cap).detach()


def gspo(lp: Tensor, old: Tensor, a: Tensor, **clips: float) -> Any:
    """Of sequences of one token, it is PPO."""
    return policy.sequence_policy_loss(lp, old, a, lambda x: x, **clips)


CLIPS = [(0.2, 0.28), (0.0, 0.0), (1.0, math.inf), (5, 0.2)]
CLIPS_AND_DUAL = [(*clips, dual) for clips in CLIPS for dual in (3.0, None, 1.5)]
# A loss, its formula, the number of its inputs, its options, and what these may be.
LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], int, str, list[Any]]] = {
    "ppo": (policy.clipped_policy_loss, ppo, 3, "clip_low clip_high dual_clip", CLIPS_AND_DUAL),
    "gspo": (gspo, ppo, 3, "clip_low clip_high", CLIPS),
    "cispo": (policy.cispo_loss, cispo, 3, "clip_low clip_high", CLIPS),
    "kl": (policy.kl_penalty, kl, 2, "estimator", [("k3",), ("k2",), ("k1",)]),
    "value": (policy.clipped_value_loss, value, 3, "clip", [(0.2,), (0.0,), (math.inf,)]),
    "weight": (policy.truncated_importance_weight, weight, 2, "cap", [(2,), (0.5,), (math.inf,)]),
}
in_every_loss = pytest.mark.parametrize("name", [name for name in LOSSES if name != "weight"])


def losses_of(name: str, inputs: Any, choice: int = 0) -> Tensor:
    function, _, arity, options, choices = LOSSES[name]
    out = function(*inputs[:arity], **dict(zip(options.split(), choices[choice], strict=True)))
    return getattr(out, "losses", out)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def drawn(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    "name, choice", [(name, i) for name, row in LOSSES.items() for i in range(len(row[-1]))]
)
def test_value_and_gradient_are_those_of_the_formula_whatever_lies_under_the_mask(name, choice):
    _, formula, arity, _, choices = LOSSES[name]
    counted = drawn(arity, 500)
    counted[1, ::5] = counted[0, ::5]  # on policy
    counted[-1, ::7] = 0  # no advantage
    unseen = tensor(*product(EXTREMES, repeat=arity)).T
    w = torch.cat([torch.linspace(0.1, 1, 500, dtype=F64), torch.zeros(unseen.shape[1])])
    inputs, own = torch.cat([counted, unseen], dim=1), counted[0].clone().requires_grad_()
    first = inputs[0].clone().requires_grad_()
    total = weighted_sum(w, losses_of(name, [first, *inputs[1:]], choice))
    expected = (w[:500] * formula(own, *counted[1:], *choices[choice])).sum()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    assert total.requires_grad == expected.requires_grad
    if total.requires_grad:
        total.backward()
        expected.backward()
        torch.testing.assert_close(first.grad[:500], own.grad, rtol=1e-12, atol=1e-14)
        assert not first.grad[500:].any()


@in_every_loss
def test_nan_that_counts_is_shown_and_only_the_first_input_gets_a_gradient(name):
    arity = LOSSES[name][2]
    for bad in range(arity):
        inputs = [tensor(0.3, 0.1) for _ in range(arity)]
        inputs[bad][1] = math.nan
        assert math.isnan(weighted_sum(tensor(0.5, 0.5), losses_of(name, inputs)).item())
    inputs = [tensor(0.3).requires_grad_() for _ in range(arity)]
    grads = torch.autograd.grad(losses_of(name, inputs).sum(), inputs, allow_unused=True)
    assert grads[0] is not None and not any(g is not None for g in grads[1:])


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "kl"])
def test_far_log_ratios_overflow_neither_value_nor_gradient(name):
    # The second one lies far off, for CISPO's loss is linear in the first.
    far = torch.tensor([-1e4, -700.0, 700.0, 1e4, math.inf, -math.inf])
    for advantages in (torch.ones(6), -torch.ones(6)):
        first = torch.full((6,), -1.0, requires_grad=True)
        losses = losses_of(name, [first, far - 1, advantages])
        losses.sum().backward()
        assert losses.isfinite().all() and first.grad.isfinite().all()


@in_every_loss
def test_half_precision_is_computed_in_fp32(name):
    halves = [x.requires_grad_() for x in drawn(3, 50, dtype=torch.bfloat16)]
    losses = losses_of(name, halves)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, losses_of(name, [x.detach().float() for x in halves]))
    losses.sum().backward()
    assert halves[0].grad.dtype == torch.bfloat16


BEYOND = math.exp(policy.LOG_RATIO_BOUND + 1)
# A loss, ratios, advantages and options; and which are clipped.
CLIPPED = [
    # Kept are those that move back towards 1.
    ("ppo", [0.5, 1, 2], [1, 1, 1], {"clip_high": 0.28}, [False, False, True]),
    ("ppo", [0.5, 1, 2], [-1, -1, -1], {"clip_high": 0.28}, [True, False, False]),
    # -A r = 5 is limited to 3; with A = 1 the upper clip gives -1.2.
    ("ppo", [5, 5], [-1, 1], {"dual_clip": 3.0}, [True, True]),
    # Without an advantage nothing is taken away.
    ("ppo", [BEYOND, BEYOND], [-1, 0], {}, [True, False]),
    ("cispo", [2, 1.1], [1, 1], {"clip_low": 1.0, "clip_high": 0.28}, [True, False]),
]


@pytest.mark.parametrize("name, ratios, advantages, options, clipped", CLIPPED)
def test_what_is_clipped_is_said_with_the_ratios(name, ratios, advantages, options, clipped):
    log_probs = tensor(*ratios).log().requires_grad_()
    loss = LOSSES[name][0]
    found = loss(log_probs, torch.zeros_like(log_probs), tensor(*advantages), **options)
    assert found.clipped.tolist() == clipped
    if BEYOND not in ratios:
        torch.testing.assert_close(found.ratios, tensor(*ratios))
    assert not found.ratios.requires_grad


def test_an_importance_weight_under_the_mask_is_0_whatever_is_there():
    log_probs = tensor(0.5, 3.0, 0.2, 0.2).requires_grad_()
    rollout, mask = tensor(0.0, 0.0, math.nan, -math.inf), tensor(1.0, 0.5, 0.0, 0.0)
    weights = policy.truncated_importance_weight(log_probs, rollout, cap=2.0, mask=mask)
    # exp(0.5) = 1.65 and exp(3) = 20.1, of which the cap leaves 2.
    torch.testing.assert_close(weights, tensor(math.exp(0.5), 2.0, 0.0, 0.0))
    assert not weights.requires_grad


def test_entropy_and_its_gradient_whatever_lies_under_the_mask():
    counted = drawn(20, 3)
    unseen = tensor(*product(EXTREMES, repeat=3))
    logits = torch.cat([counted, unseen]).requires_grad_()
    w = torch.cat([torch.ones(20), torch.zeros(len(unseen))]).double()
    entropy = policy.token_entropy(logits)
    weighted_sum(w, entropy).backward()
    own = counted.clone().requires_grad_()
    expected = Categorical(logits=own).entropy()
    expected.sum().backward()
    torch.testing.assert_close(entropy[:20], expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(logits.grad[:20], own.grad, rtol=1e-12, atol=1e-14)
    assert not logits.grad[20:].any()
    # A token that cannot be sampled counts for nothing; of other rows nothing is known.
    shown = tensor([0, 0, -math.inf], [0, math.inf, 0], [math.nan, 0, 0], 3 * [-math.inf])
    assert policy.token_entropy(shown).tolist() == pytest.approx(
        [math.log(2), math.nan, math.nan, math.nan], nan_ok=True
    )


SEEN, UNSEEN = (tensor(math.nan, -3, 5, 9), tensor(0, 1, 0.5, 0)), (tensor(math.nan), tensor(0))
NONE = (tensor(), tensor())
MANY = torch.ones(4099, dtype=torch.bfloat16, requires_grad=True)  # bf16 counts to 256 one by one
N = 2**24 + 1  # the first integer that fp32 rounds, to 2**24
LENGTHS, ONES = torch.tensor([N, 0]), torch.ones(2)
# A metric, and its numbers: of a mean, sum and count.
METRICS: dict[str, tuple[Any, list[float]]] = {
    # 1 * -3 + 0.5 * 5 and 1 + 0.5; the NaN lies under mask 0.
    "a mean": (Mean.of(*SEEN), [-0.5, 1.5]),
    "a mean of nothing": (Mean.of(*UNSEEN), [0, 0]),
    "a mean without values": (Mean.of(*NONE), [0, 0]),
    "a mean that is not a number": (Mean(torch.tensor(5.0), torch.tensor(math.nan)), [5, math.nan]),
    "a mean of many": (Mean.of(MANY, torch.ones_like(MANY)), [4099, 4099]),
    "a mean in fp64": (Mean.of(torch.ones(1), tensor(1 + 1e-9)), [1 + 1e-9, 1 + 1e-9]),
    "a mean of integers": (Mean.of(LENGTHS, ONES), [N, 2]),
    "a mean of integers by flags": (Mean.of(LENGTHS, ONES.bool()), [N, 2]),
    "a mean over integers": (Mean.of(ONES, LENGTHS.int()), [N, N]),
    "a mean of flags over integers": (Mean.of(ONES.bool(), LENGTHS.int()), [N, N]),
    "a mean by hand": (Mean(torch.tensor(N), ONES[:1]), [N, 1]),
    "a maximum": (Max.of(*SEEN), [5]),
    "a maximum of nothing": (Max.of(*UNSEEN), [-math.inf]),
    "a maximum without values": (Max.of(*NONE), [-math.inf]),
    "a maximum that is not a number": (Max.of(SEEN[0], torch.ones(4)), [math.nan]),
    "a maximum of integers": (Max.of(LENGTHS, ONES), [N]),
    "a minimum": (Min.of(*SEEN), [-3]),
    "a minimum of nothing": (Min.of(*UNSEEN), [math.inf]),
    "a minimum that is not a number": (Min.of(SEEN[0], torch.ones(4)), [math.nan]),
    "a minimum of integers": (Min.of(LENGTHS[:1], ONES[:1]), [N]),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_of_the_values_that_count_and_rounds_no_integer(name):
    metric, numbers = METRICS[name]
    found = [x.item() for x in vars(metric).values()]
    assert found == pytest.approx(numbers, rel=0, nan_ok=True)
    assert not any(x.requires_grad for x in vars(metric).values())
    value = numbers[0] / (numbers[1] or 1) if len(numbers) == 2 else numbers[0]
    assert metric.value().item() == pytest.approx(value, rel=1e-6, nan_ok=True)
    of_step = reduce_reports([{"": metric}] * 2, None)
    assert of_step[""] == pytest.approx(value, rel=0, nan_ok=True)


@pytest.mark.parametrize("mask", [torch.float32, torch.bfloat16, torch.bool])
def test_losses_are_not_copied_to_fp64(mask):
    for dtype in (torch.float32, torch.bfloat16):
        with Operations() as made:
            Mean.of(torch.ones(8, dtype=dtype), torch.ones(8, dtype=mask))
        assert F64 not in made.dtypes


def reduced_on_every_rank() -> list[tuple[dict[str, float], int]]:
    """Metrics of all kinds, and how many collectives they take; then of none.

    The second rank has them in another order, and in three microbatches and not in two.
    """
    rank = dist.get_rank()
    # Number i is i on rank 0 and i + 2**24 + 1 on rank 1, which fp32 could not tell.
    numbers = torch.arange(100) + rank * (2**24 + 1)
    reports: list[dict[str, Any]] = [
        {
            **{f"{i:03}": Max.of(x, torch.ones(())) for i, x in enumerate(numbers)},
            "loss": Mean.of(torch.full((n,), 1.0 + 3 * rank), torch.ones(n)),
            "sum": Sum.of(torch.full((n,), 1.0 + 3 * rank), torch.full((n,), 0.5)),
            "pair": torch.tensor([float(rank), 5.0]),
            "never": Mean(torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)),
            "max": Max.of(torch.tensor([10.0 * rank + n]), torch.ones(1)),
            "min": Min.of(torch.tensor([10.0 * rank + n]), torch.ones(1)),
        }
        for n in ((1, 1), (1, 1, 2))[rank]
    ]
    if rank:
        reports = [dict(reversed(x.items())) for x in reports]
    answers = []
    for given in (reports, [{}]):
        with Operations() as made:
            answer = reduce_reports(given, dist.group.WORLD)
        answers.append((answer, len(made.collectives)))
    return answers


def test_every_metric_is_reduced_by_its_own_kind_and_count_in_two_collectives_at_most():
    # loss: rank 0 has 1 + 1 tokens of 1, rank 1 has 1 + 1 + 2 of 4: (2 + 16) / 6 = 3. sum: 18 / 2.
    # pair: (0 + 0 + 1 + 1 + 1) / 25. max: 10 + 2. min: 0 + 1.
    expected = {"loss": 3.0, "sum": 9.0, "pair": 0.12, "never": 0.0, "max": 12.0, "min": 1.0}
    numbers = {f"{i:03}": i + 2**24 + 1 for i in range(100)}
    for (answer, collectives), of_none in run_ranks(reduced_on_every_rank, 2):
        assert {name: answer.pop(name) for name in numbers} == numbers
        assert answer == pytest.approx(expected)
        assert collectives == 2 and of_none == ({}, 1)


# Without a hook, a `TokenLoss` is a stock loss function: losses, mask, and their sum and count.
HALF, THREE, MASK = torch.tensor(0.5), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0, 1])
TOTALS: dict[str, tuple[Any, Any, float, int]] = {
    # fp16 ends at 65504, and bf16 counts to 256 one by one.
    "mask of fp16": (HALF.expand(70001), torch.ones(70001).half(), 35000.5, 70001),
    "mask of bf16": (HALF.expand(70001), torch.ones(70001).bfloat16(), 35000.5, 70001),
    "losses of fp16": (HALF.expand(140002).half(), torch.ones(140002), 70001, 140002),
    "losses of fp64": (HALF.expand(140002).double(), torch.ones(140002), 70001, 140002),
    "flat losses": (THREE, MASK.view(1, 3), 4, 2),
    "a column": (THREE.view(1, 3), MASK.view(3, 1), 4, 2),
    "NaN where the mask is 0": (torch.tensor([1.0, torch.nan, 3.0]), MASK, 4, 2),
}


@pytest.mark.parametrize("name", TOTALS)
def test_without_a_hook_a_token_loss_sums_over_the_mask(name):
    losses, mask, *expected = TOTALS[name]
    losses = losses.clone().requires_grad_()
    total, number, report = TokenLoss(lambda x: (x, {"own": 1}), mask)(losses)
    assert [total.item(), number.item()] == expected
    assert number.dtype == torch.int  # Megatron's counter
    assert (total.dtype, report) == (torch.promote_types(losses.dtype, torch.float32), {"own": 1})
    total.backward()
    assert torch.equal(losses.grad.flatten(), (mask.flatten() != 0).to(losses))


def test_a_loss_is_named_by_its_preset():
    assert [*LossHook(LossAggregation.preset("verl/token-mean")).terms] == ["verl/token-mean"]
    assert [*LossHook(LossAggregation(mode="token_mean")).terms] == ["token_mean"]
