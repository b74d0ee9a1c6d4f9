"""Token losses, their weighted sum and the means of sequences: by their formulas, and NaN-safe."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Categorical

from megatron_loss_agg import Microbatch, SequenceMean, SequenceSum, policy, weighted_sum
from tests.core.meaning import F64, Read, called, cp_layout, exact_or_refused, lay, listed, products
from tests.core.operations import Operations
from tests.core.strategies import (
    ANYTHING,
    EXTREMES,
    INPUTS,
    changes,
    microbatches,
    weighed,
    with_changes,
)
from tests.distributed import run_ranks
from tests.oracle import Sample


@given(weighed(), changes(["w", "token_loss"]))
@settings(max_examples=300, deadline=None)
@exact_or_refused
def test_a_weighted_sum_and_its_gradient_are_those_of_a_loop(drawn, changes):
    given = with_changes(dict(zip(("token_loss", "w"), drawn, strict=True)), changes)
    total = called(weighted_sum, changes=changes, **given)
    w, losses = given["w"], given["token_loss"]
    floats = [x.dtype for x in (w, losses) if x.is_floating_point()] or [torch.float32]
    assert total.dtype == torch.promote_types(floats[0], floats[-1]) and total.dim() == 0
    terms, limit = products(losses, w), torch.finfo(total.dtype)
    size = sum(map(abs, terms))
    if size < limit.max / 4:
        room = 16 * limit.eps * size + limit.smallest_normal
        assert total.item() == pytest.approx(math.fsum(terms), rel=0, abs=room)
    if losses.requires_grad and not changes:
        (grad,) = torch.autograd.grad(total, losses)
        assert listed(grad) == pytest.approx(listed(w), rel=2 * torch.finfo(losses.dtype).eps)


def test_many_tokens_add_up_in_the_wider_dtype():
    # (1 + 2**-7)**2 - (1 + 2**-6) = 2**-14, whose terms are equal in bf16.
    a, b = (torch.tensor(x).bfloat16() for x in ([1 + 2**-7, -1], [1 + 2**-7, 1 + 2**-6]))
    assert weighted_sum(a, b).item() == 2**-14
    # 200 * 2 + 100 * 3 = 700, which uint8 cannot hold.
    total = weighted_sum(*(torch.tensor(x, dtype=torch.uint8) for x in ([2, 3], [200, 100])))
    assert total.item() == 700
    loss = torch.rand(2**22, generator=torch.Generator().manual_seed(0)) + 1
    found = weighted_sum(torch.full_like(loss, 2.0**-22), loss).item()
    assert found == pytest.approx(loss.double().mean().item(), rel=1e-6)


def test_a_weighted_sum_compiles_as_one_graph_and_needs_no_values():
    w, loss = torch.tensor([0.0, 0.5, 2.0]), torch.tensor([math.nan, 2, 3], requires_grad=True)
    total = torch.compile(weighted_sum, fullgraph=True, backend="aot_eager")(w, loss)
    total.backward()
    assert total.item() == 7.0 and torch.equal(loss.grad, w)
    with FakeTensorMode():
        assert weighted_sum(torch.ones(3), torch.ones(3, requires_grad=True)).requires_grad


# The formulas as they were published, see the docstrings of `policy`.


def ppo(lp: Tensor, old: Tensor, a: Tensor, low: float, high: float, dual: Any = None) -> Tensor:
    r = (lp - old).exp()
    loss = torch.maximum(-a * r, -a * r.clamp(1 - low, 1 + high))
    if dual is None:
        return loss
    return torch.where(a < 0, torch.minimum(loss, -dual * a), loss)


def cispo(lp: Tensor, old: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return -(lp - old).exp().clamp(1 - low, 1 + high).detach() * a * lp


def kl(lp: Tensor, ref: Tensor, estimator: str) -> Tensor:
    x = lp - ref
    return {"k1": x, "k2": x**2 / 2, "k3": torch.expm1(-x) + x}[estimator]


def value(v: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    near = old + (v - old).clamp(-clip, clip)
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
    """Sums of sequences; this rank's part of their means and of the gradient; and collectives."""
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
