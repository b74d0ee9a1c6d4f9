"""Token losses and sequence means against plain loops, and anything at masked positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_loss_agg import Microbatch, SequenceMean, SequenceSum, policy, weighted_sum
from tests.core.meaning import F64, Read, called, cp_layout, exact_or_refused, lay, listed
from tests.core.operations import Operations
from tests.core.strategies import ANYTHING, INPUTS, changes, microbatches, with_changes
from tests.distributed import run_ranks
from tests.oracle import Sample

BOUND = policy.LOG_RATIO_BOUND
BEYOND = math.exp(BOUND + 1)
Number = tuple[float, float]  # value, and slope by the first input


def ratio_of(x: float) -> float:
    return math.exp(min(max(x, -BOUND), BOUND))


def loop_ppo(
    lp: float, old: float, a: float, clip_low: float, clip_high: float, dual_clip: Any = None
) -> Number:
    r, inside = ratio_of(lp - old), abs(lp - old) <= BOUND
    limit = min(max(r, 1 - clip_low), 1 + clip_high)
    loss, slope = (-a * r, -a * r * inside) if -a * r >= -a * limit else (-a * limit, 0.0)
    if dual_clip is not None and a < 0 and loss > -dual_clip * a:
        return -dual_clip * a, 0.0
    return loss, slope


def loop_cispo(lp: float, old: float, a: float, clip_low: float, clip_high: float) -> Number:
    weight = min(max(ratio_of(lp - old), 1 - clip_low), 1 + clip_high)
    return -weight * a * lp, -weight * a


def loop_kl(lp: float, ref: float, estimator: str) -> Number:
    x = lp - ref
    if estimator == "k1":
        return x, 1.0
    if estimator == "k2":
        return x * x / 2, x
    y = min(max(x, -BOUND), BOUND)
    return math.expm1(-y) + y, -math.expm1(-y) * (x == y)


def loop_value(v: float, old: float, returned: float, clip: float) -> Number:
    near = min(max(v, old - clip), old + clip)
    if (near - returned) ** 2 > (v - returned) ** 2:
        return (near - returned) ** 2 / 2, 0.0
    return (v - returned) ** 2 / 2, v - returned


def loop_weight(lp: float, rollout: float, cap: float) -> Number:
    return min(ratio_of(lp - rollout), cap), 0.0


def gspo(lp: Tensor, old: Tensor, a: Tensor, **clips: float) -> Any:
    """Of sequences of one token, it is PPO."""
    return policy.sequence_policy_loss(lp, old, a, lambda x: x, **clips)


ppo, cispo, truncated = (
    policy.clipped_policy_loss,
    policy.cispo_loss,
    policy.truncated_importance_weight,
)
clips = st.sampled_from([0.2, 0.28, 0.0, 1.0, 5, math.inf])
CLIPS = {"clip_low": clips, "clip_high": clips}
# A loss, its loop, the number of its inputs, and its options.
LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Number], int, dict[str, Any]]] = {
    "ppo": (ppo, loop_ppo, 3, {**CLIPS, "dual_clip": st.sampled_from([3.0, None, 1.5])}),
    "gspo": (gspo, loop_ppo, 3, CLIPS),
    "cispo": (cispo, loop_cispo, 3, CLIPS),
    "kl": (policy.kl_penalty, loop_kl, 2, {"estimator": st.sampled_from(["k3", "k2", "k1"])}),
    "value": (policy.clipped_value_loss, loop_value, 3, {"clip": clips}),
    "weight": (truncated, loop_weight, 2, {"cap": st.sampled_from([0.5, 2, math.inf])}),
}
# Each with its first options.
FIXED = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "estimator": "k3", "clip": 0.2}
TRAINED = [name for name in LOSSES if name != "weight"]
in_every_loss = pytest.mark.parametrize("name", TRAINED)


def losses_of(name: str, *inputs: Tensor) -> Tensor:
    function, _, arity, options = LOSSES[name]
    out = function(*inputs[:arity], **{key: FIXED[key] for key in options})
    return getattr(out, "losses", out)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


@pytest.mark.parametrize("name", LOSSES)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
@exact_or_refused
def test_value_and_gradient_are_those_of_a_loop(name, data):
    function, loop, arity, choices = LOSSES[name]
    options = {key: data.draw(of, label=key) for key, of in choices.items()}
    weights = data.draw(st.lists(st.sampled_from([1.0, 0.0, 0.5]), max_size=5))
    inputs = [
        [data.draw(st.floats(-3, 3) if w else ANYTHING) for w in weights] for _ in range(arity)
    ]
    first, *others = (tensor(*x) for x in inputs)
    given = {"0": first.requires_grad_(), **{str(n): x for n, x in enumerate(others, 1)}}
    how = data.draw(changes([*given], [*options]))
    out = called(
        function, *with_changes(given, how).values(), **with_changes(options, how), changes=how
    )
    if how:
        return
    total = weighted_sum(tensor(*weights), getattr(out, "losses", out))
    if total.requires_grad:
        total.backward()
    grad = [0.0] * len(weights) if first.grad is None else listed(first.grad)
    value = size = 0.0
    for w, got, x in zip(weights, grad, zip(*inputs, strict=True), strict=True):
        if not w:
            assert got == 0
            continue
        of_loop, slope = loop(*x, **options)
        value, size = value + w * of_loop, size + w * abs(of_loop)
        # At a kink either slope is right.
        beside = [loop(x[0] + d, *x[1:], **options)[1] for d in (-1e-9, 1e-9)]
        near = [pytest.approx(w * s, rel=1e-7, abs=1e-8) for s in beside]
        assert got == pytest.approx(w * slope, rel=1e-12, abs=1e-14) or got in near
    # k3 near 0 is a small difference of numbers near 1.
    assert total.item() == pytest.approx(value, rel=0, abs=1e-12 * (1 + size))


@in_every_loss
def test_nan_that_counts_is_shown_and_only_the_first_input_gets_a_gradient(name):
    arity = LOSSES[name][2]
    for bad in range(arity):
        inputs = [tensor(0.3, 0.1) for _ in range(arity)]
        inputs[bad][1] = math.nan
        assert math.isnan(weighted_sum(tensor(0.5, 0.5), losses_of(name, *inputs)).item())
    inputs = [tensor(0.3).requires_grad_() for _ in range(arity)]
    grads = torch.autograd.grad(losses_of(name, *inputs).sum(), inputs, allow_unused=True)
    assert grads[0] is not None and not any(g is not None for g in grads[1:])


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "kl"])
@pytest.mark.parametrize("distance", [-1e4, -700.0, 700.0, 1e4, math.inf, -math.inf])
def test_far_log_ratios_overflow_neither_value_nor_gradient(name, distance):
    for advantage in (-1.0, 1.0):
        # The second one lies far off, for CISPO's loss is linear in the first.
        first = torch.tensor([-1.0], requires_grad=True)
        losses = losses_of(name, first, torch.tensor([-1.0 + distance]), torch.tensor([advantage]))
        losses.backward()
        assert losses.isfinite().all() and first.grad.isfinite().all()


@in_every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_fp32(name, dtype):
    halves = [x.to(dtype) for x in torch.randn(3, 50, generator=torch.Generator().manual_seed(0))]
    halves[0].requires_grad_()
    losses = losses_of(name, *halves)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, losses_of(name, *(x.detach().float() for x in halves)))
    losses.sum().backward()
    assert halves[0].grad.dtype == dtype


# A loss, ratios, advantages and options; and which are clipped.
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
    log_probs = tensor(*ratios).log().requires_grad_()
    found = loss(log_probs, torch.zeros_like(log_probs), tensor(*advantages), **options)
    assert found.clipped.tolist() == clipped
    if BEYOND not in ratios:
        torch.testing.assert_close(found.ratios, tensor(*ratios))
    assert not found.ratios.requires_grad


def test_an_importance_weight_under_the_mask_is_0_whatever_is_there():
    log_probs = tensor(0.5, 3.0, 0.2, 0.2).requires_grad_()
    rollout, mask = tensor(0.0, 0.0, math.nan, -math.inf), tensor(1.0, 0.5, 0.0, 0.0)
    weights = truncated(log_probs, rollout, cap=2.0, mask=mask)
    # exp(0.5) = 1.65 and exp(3) = 20.1, of which the cap leaves 2.
    torch.testing.assert_close(weights, tensor(math.exp(0.5), 2.0, 0.0, 0.0))
    assert not weights.requires_grad


@given(
    st.lists(st.lists(st.one_of(st.floats(-9, 9), ANYTHING), min_size=3, max_size=3), max_size=3)
)
@settings(max_examples=150, deadline=None)
def test_entropy_and_gradient_are_those_of_a_loop_and_masked_rows_may_be_anything(rows):
    logits = torch.tensor(rows, dtype=F64).view(-1, 3).requires_grad_()
    entropy = policy.token_entropy(logits)
    weights = [1.0 if n % 2 == 0 else 0.0 for n in range(len(rows))]
    weighted_sum(tensor(*weights), entropy).backward()
    for w, row, got, grad in zip(weights, rows, listed(entropy), logits.grad, strict=True):
        assert w or not grad.any()
        if not math.isfinite(max(row)) or any(map(math.isnan, row)):
            assert math.isnan(got)
            continue
        e = [math.exp(z - max(row)) for z in row]
        p = [x / math.fsum(e) for x in e]
        h = -math.fsum(x * math.log(x) for x in p if x)
        assert got == pytest.approx(h, rel=1e-12, abs=1e-14)
        # dH / dz_j = -p_j (log p_j + H)
        slopes = [-w * x * (math.log(x) + h) if x else 0.0 for x in p]
        assert grad.tolist() == pytest.approx(slopes, rel=1e-10, abs=1e-13)


def mean_by_loop(read: Read, x: Tensor, pull: Tensor) -> tuple[list[float], list[float]]:
    """The mean of its sequence at every token, and the gradient of ``sum(pull * mean)``."""
    values, pulls = listed(x), listed(pull)
    means, slopes = [0.0] * len(values), [0.0] * len(values)
    for places in read.places:
        if total := math.fsum(read.values[t] for t in places):
            parts = (read.values[t] * values[t] for t in places if read.values[t])
            mean, back = math.fsum(parts) / total, math.fsum(pulls[t] for t in places)
            for t in places:
                means[t], slopes[t] = mean, read.values[t] * back / total
    return means, slopes


@given(
    microbatches(),
    st.sampled_from([F64, torch.float32]),
    st.data(),
    changes([x for x in INPUTS if x != "sample_weights"]),  # which it does not read
)
@settings(max_examples=200, deadline=None)
@exact_or_refused
def test_the_mean_of_a_sequence_and_its_gradient_are_those_of_a_loop(given, dtype, data, changes):
    given = with_changes(given, changes)
    mean = called(lambda: SequenceMean(Microbatch(**given)), changes=changes)
    read = Read.of(given)
    numbers = [data.draw(st.floats(-3, 3) if m else ANYTHING) for m in read.values]
    x = torch.tensor(numbers, dtype=dtype).view(given["loss_mask"].shape).requires_grad_()
    out = called(mean, x, changes=changes)
    pull = torch.linspace(-1, 2, x.numel(), dtype=dtype).view(x.shape)
    (out * pull).sum().backward()
    for got, wanted in zip((out, x.grad), mean_by_loop(read, x, pull), strict=True):
        room = 1e-12 if dtype == F64 else 2e-5
        assert listed(got) == pytest.approx(wanted, rel=0, abs=room)


# Of 2 * 4 chunks: samples cut over all ranks, fractional and empty masks, and a sample whose
# tokens lie on the first rank alone; in the second microbatch no other rank has any token.
SAMPLES = [
    Sample((1.0,) * 13),
    Sample((0.0, 1.0, 0.0, 0.5, 1.0, 1.0, 0.0)),
    Sample((0.0,) * 5),
    Sample((1.0,)),
]
SHARDED = [
    lay(samples, layout, multiple=8)
    for samples in (SAMPLES, [Sample((1.0,)), Sample((0.0, 0.0, 0.0))])
    for layout in ("thd", "thd_row", "bshd")
]


def values_of(mask: Tensor) -> Tensor:
    """NaN where nothing counts."""
    return torch.arange(mask.numel()).double().sin().view_as(mask).masked_fill(mask == 0, math.nan)


def on_ranks() -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """The sums of sequences; this rank's part of the means and of their gradient; and how many
    collectives the means took.
    """
    found = []
    for inputs in SHARDED:
        cut = cp_layout(inputs, dist.get_world_size(), dist.get_rank())
        sums, mean = (
            kind(Microbatch(**inputs), cut, dist.group.WORLD)
            for kind in (SequenceSum, SequenceMean)
        )
        x = cut.shard(values_of(inputs["loss_mask"])).requires_grad_()
        with Operations() as made:
            out = mean(x)
            (out * cut.index).sum().backward()
        of_fp32 = sums(x.detach().float())
        found.append((of_fp32, out.detach(), x.grad, len(made.collectives)))
    return found


@pytest.mark.parametrize("cp", [2, 4])
def test_sums_and_means_of_sequences_over_ranks_are_those_of_one_process(cp):
    for inputs, *of_ranks in zip(SHARDED, *run_ranks(on_ranks, cp), strict=True):
        sums, *parts, collectives = zip(*of_ranks, strict=True)
        # One forward and its adjoint backward, also on ranks without a token.
        assert collectives == (2,) * cp
        mask, cut, read = inputs["loss_mask"], cp_layout(inputs, cp, 0), Read.of(inputs)
        pull, values = torch.arange(mask.shape[-1]).expand_as(mask), values_of(mask)
        found = [listed(cut.unshard(part)) for part in parts]
        means, slopes = mean_by_loop(read, values, pull)
        assert found[0] == pytest.approx(means, rel=1e-12, abs=1e-15)
        assert found[1] == pytest.approx(slopes, rel=1e-12, abs=1e-15)
        of_all = listed(values)
        expected = [
            math.fsum(read.values[t] * of_all[t] for t in places if read.values[t])
            for places in read.places
        ]
        for of_rank in sums:  # every rank has them all
            assert of_rank.dtype == torch.float32
            assert listed(of_rank) == pytest.approx(expected, rel=1e-6)


def test_nan_that_counts_stays_in_its_sequence():
    mean = SequenceMean(Microbatch(torch.ones(2, 2)))(torch.tensor([[math.nan, 1.0], [1.0, 3.0]]))
    assert mean[0].isnan().all() and mean[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_means_of_half_precision_are_taken_in_fp32_or_more(dtype):
    # 4096 ones in bf16 would stop at 256.
    x, mask = torch.ones(1, 4096, dtype=dtype, requires_grad=True), torch.ones(1, 4096).bool()
    mean = SequenceMean(Microbatch(mask))
    mask.zero_()  # which a script may do once the mean is made
    out = mean(x)
    assert out.dtype == torch.promote_types(dtype, torch.float32) and out[0, 0] == 1
    out[0, 0].backward()
    assert x.grad.dtype == dtype
