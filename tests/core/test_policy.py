"""Per-token losses against plain loops: value, gradient, and anything at masked positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_loss_agg import policy, weighted_sum
from tests.fuzz.policies import Number, spec_cispo, spec_kl, spec_ppo, spec_value

F64 = torch.float64
LOW, HIGH, DUAL = 0.2, 0.28, 3.0
CLIPS = {"clip_low": LOW, "clip_high": HIGH}
POISON = [math.nan, math.inf, -math.inf, torch.finfo(torch.float64).max]


def clipped(loss: Callable[..., Any], *inputs: Any, **options: Any) -> Tensor:
    return loss(*inputs, **CLIPS, **options).losses


def kl(estimator: str) -> tuple[Callable[..., Tensor], Callable[..., Number], int]:
    options = {"estimator": estimator}
    return partial(policy.kl_penalty, **options), partial(spec_kl, options), 2


PPO = partial(spec_ppo, CLIPS)
# A loss, its specification, and the number of its inputs.
LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., Number], int]] = {
    "ppo": (partial(clipped, policy.clipped_policy_loss), PPO, 3),
    "dual": (
        partial(clipped, policy.clipped_policy_loss, dual_clip=DUAL),
        partial(spec_ppo, {**CLIPS, "dual_clip": DUAL}),
        3,
    ),
    # Of sequences of one token, it is PPO.
    "gspo": (lambda *x: clipped(policy.sequence_policy_loss, *x, lambda v: v), PPO, 3),
    "cispo": (partial(clipped, policy.cispo_loss), partial(spec_cispo, CLIPS), 3),
    **{estimator: kl(estimator) for estimator in ("k1", "k2", "k3")},
    "value": (
        lambda *x: policy.clipped_value_loss(*x, clip=LOW),
        partial(spec_value, {"clip": LOW}),
        3,
    ),
}
in_every_loss = pytest.mark.parametrize("name", LOSSES)

numbers = st.floats(-3.0, 3.0)
shapes = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tokens(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[float]], list[float]]:
    """A shape, three inputs, and weights of which some are 0."""
    shape = tuple(draw(shapes))
    count = math.prod(shape)
    inputs = [draw(st.lists(numbers, min_size=count, max_size=count)) for _ in range(3)]
    weight = st.sampled_from([0.0, 0.0, 0.25, 1.0])
    return shape, inputs, draw(st.lists(weight, min_size=count, max_size=count))


def tensor(values: Any, shape: tuple[int, ...] = (-1,)) -> Tensor:
    return torch.tensor(values, dtype=F64).reshape(shape)


@in_every_loss
@given(tokens())
@settings(deadline=None, max_examples=60)
def test_value_and_gradient_are_those_of_a_loop(name, drawn):
    function, spec, arity = LOSSES[name]
    shape, inputs, weights = drawn
    first, *others = (tensor(x, shape) for x in inputs[:arity])
    first.requires_grad_()
    total = weighted_sum(tensor(weights, shape), function(first, *others))
    total.backward()
    expected = [spec(*x) for x in zip(*inputs[:arity], strict=True)]
    values = [w * value for w, (value, _) in zip(weights, expected, strict=True)]
    slopes = [w * slope for w, (_, slope) in zip(weights, expected, strict=True)]
    # k3 near 0 is a small difference of numbers near 1.
    room = 1e-12 * (1 + sum(map(abs, values)))
    assert total.item() == pytest.approx(math.fsum(values), abs=room)
    torch.testing.assert_close(first.grad, tensor(slopes, shape), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("poison", POISON)
@in_every_loss
def test_masked_positions_may_hold_anything(name, poison):
    function, _, arity = LOSSES[name]
    clean = [tensor([0.3, 0.1]), tensor([0.1, 0.2]), tensor([-1.0, 1.0])][:arity]
    w = tensor([0.5, 0.0])

    def run(inputs: list[Tensor]) -> tuple[float, list[float]]:
        first = inputs[0].clone().requires_grad_()
        total = weighted_sum(w, function(first, *inputs[1:]))
        total.backward()
        return total.item(), first.grad.tolist()

    expected = run(clean)
    assert expected[1][1] == 0
    # In one input alone, and in all of them (inf - inf).
    for where in [{k} for k in range(arity)] + [set(range(arity))]:
        inputs = [x.clone() for x in clean]
        for k in where:
            inputs[k][1] = poison
        assert run(inputs) == expected, where


@in_every_loss
def test_nan_at_a_position_that_counts_is_shown(name):
    function, _, arity = LOSSES[name]
    for bad in range(arity):
        inputs = [tensor([0.3, 0.1]) for _ in range(arity)]
        inputs[bad][1] = math.nan
        assert math.isnan(weighted_sum(tensor([0.5, 0.5]), function(*inputs)).item())


@pytest.mark.parametrize("name", ["ppo", "dual", "gspo", "cispo", "k3"])
@pytest.mark.parametrize("distance", [-1e4, -700.0, 700.0, 1e4, math.inf, -math.inf])
def test_far_log_ratios_overflow_neither_value_nor_gradient(name, distance):
    function, _, arity = LOSSES[name]
    for advantage in (-1.0, 1.0):
        # The second one lies far off, for CISPO's loss is linear in the first.
        first = torch.tensor([-1.0], requires_grad=True)
        others = [torch.tensor([-1.0 + distance]), torch.tensor([advantage])][: arity - 1]
        losses = function(first, *others)
        losses.backward()
        assert losses.isfinite().all() and first.grad.isfinite().all()


@in_every_loss
def test_only_the_first_input_gets_a_gradient(name):
    function, _, arity = LOSSES[name]
    inputs = [tensor([0.3]).requires_grad_() for _ in range(arity)]
    grads = torch.autograd.grad(function(*inputs).sum(), inputs, allow_unused=True)
    assert grads[0] is not None and not any(g is not None for g in grads[1:])


@in_every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_fp32(name, dtype):
    function, _, arity = LOSSES[name]
    inputs = [torch.randn(50, generator=torch.Generator().manual_seed(k)) for k in range(arity)]
    halves = [x.to(dtype) for x in inputs]
    halves[0].requires_grad_()
    losses = function(*halves)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, function(*(x.detach().float() for x in halves)))
    losses.sum().backward()
    assert halves[0].grad.dtype == dtype
