"""The headline: however a step is split, its parts add up to the whole step.

One process plays every data-parallel rank (their microbatches in one plan) and every
context-parallel rank (its shard of weights and losses). The per-token losses of the step are one
leaf vector, so the gradient of the summed parts must be the oracle's weight, token by token.
Positions of no token hold NaN: nothing may read them.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, weighted_sum
from tests.core.steps import MODES, Laid, aggregation, cp_layout, expected_weights, flatten, lay
from tests.fuzz.strategies import samples
from tests.oracle import Sample

F64 = torch.float64
splits = st.fixed_dictionaries(
    {
        "samples": samples(min_size=1, max_size=10),
        "microbatches": st.integers(1, 6),
        "seed": st.integers(0, 2**32),
        "layouts": st.lists(st.sampled_from(["thd", "bshd", "contiguous"]), min_size=1, max_size=3),
        "cp": st.integers(1, 4),
    }
)


def deal(samples: list[Sample], microbatches: int, seed: int) -> list[list[int]]:
    """Samples over microbatches in any order; some microbatches may stay empty."""
    rng = random.Random(seed)
    split: list[list[int]] = [[] for _ in range(microbatches)]
    for i in rng.sample(range(len(samples)), len(samples)):
        rng.choice(split).append(i)
    return split


def tokens_of(samples: list[Sample], members: list[int]) -> list[int]:
    """Where the tokens of some samples are in the vector of all losses."""
    first = [sum(len(s.mask) for s in samples[:i]) for i in range(len(samples))]
    return [first[i] + t for i in members for t in range(len(samples[i].mask))]


def spread_losses(laid: Laid, tokens: list[int], losses: torch.Tensor) -> torch.Tensor:
    """Losses in the shape of the microbatch's mask; NaN where there is no token."""
    mask = laid.inputs["loss_mask"]
    source = torch.full((mask.numel(),), len(losses))
    source[flatten(laid.index)] = torch.tensor(tokens, dtype=torch.int64)
    with_nan = torch.cat([losses, losses.new_full((1,), math.nan)])
    return with_nan[source].reshape(mask.shape)


def summed_parts(
    agg: LossAggregation,
    split: list[list[int]],
    samples: list[Sample],
    layouts: list[str],
    cp: int,
    losses: torch.Tensor,
) -> torch.Tensor:
    """The step's loss as the parts give it; ``split[k]`` lists the samples of microbatch k."""
    kinds = [layouts[k % len(layouts)] for k in range(len(split))]
    laid = [
        lay([samples[i] for i in mb], "thd" if kind == "thd" else "bshd", multiple=2 * cp)
        for mb, kind in zip(split, kinds, strict=True)
    ]
    plan = StepPlan.build(agg, [Microbatch(**x.inputs) for x in laid])
    total = losses.new_zeros(())
    for k, x in enumerate(laid):
        here = spread_losses(x, tokens_of(samples, split[k]), losses)
        w = plan.weights(k, dtype=F64)
        for rank in range(cp):
            local = cp_layout(x.inputs, cp, rank, kinds[k])
            total = total + weighted_sum(local.shard(w), local.shard(here))
    return total


@pytest.mark.parametrize("mode", MODES)
@given(case=splits, empty=st.sampled_from(["count", "skip"]))
@settings(max_examples=40, deadline=None)
def test_any_split_sums_to_the_whole_step(mode, case, empty):
    samples, cp = case["samples"], case["cp"]
    split = deal(samples, case["microbatches"], case["seed"])
    # Only microbatch_mean depends on the microbatches, and in them on nothing else.
    order = split if mode == "microbatch_mean" else [[*range(len(samples))]]
    step = [[[samples[i] for i in mb] for mb in order]]
    w = torch.zeros(sum(len(s.mask) for s in samples), dtype=F64)
    w[tokens_of(samples, flatten(order))] = torch.tensor(
        flatten(expected_weights(mode, step, empty=empty)), dtype=F64
    )
    losses = (torch.arange(len(w), dtype=F64) * 0.7).sin().mul(3).requires_grad_()
    got = summed_parts(aggregation(mode, empty=empty), split, samples, case["layouts"], cp, losses)
    got.backward()
    scale = float((w * losses.detach().abs()).sum())
    assert got.item() == pytest.approx(float((w * losses.detach()).sum()), abs=1e-13 * scale)
    torch.testing.assert_close(losses.grad, w, rtol=1e-13, atol=0)


def test_fp32_loses_no_more_than_fp32_must():
    # Three-way: fp64 oracle, one unsplit fp32 sum, ours split over 6 parts in fp32.
    torch.manual_seed(1)
    lengths = torch.randint(1, 400, (24,)).tolist()
    samples = [Sample((1.0,) * n, prompt=i // 4) for i, n in enumerate(lengths)]
    w = torch.tensor(flatten(expected_weights("prompt_mean", [[samples]])), dtype=F64)
    losses = torch.rand(len(w), dtype=F64)
    exact = float((w * losses).sum())
    naive = abs(float((w.float() * losses.float()).sum()) - exact)
    laid = [lay(samples[k : k + 4], "thd", dtype=torch.float32) for k in range(0, 24, 4)]
    plan = StepPlan.build(aggregation("prompt_mean"), [Microbatch(**x.inputs) for x in laid])
    parts = losses.float().split([sum(lengths[k : k + 4]) for k in range(0, 24, 4)])
    sums = [weighted_sum(plan.weights(k), part) for k, part in enumerate(parts)]
    ours = abs(float(torch.stack(sums).sum()) - exact)
    assert ours <= 2 * naive + 4 * torch.finfo(torch.float32).eps * exact


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_later_edits_of_what_was_planned_change_nothing(mode, layout):
    mask = torch.tensor([[1.0, 0.5, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
    given = {"prompt_ids": torch.tensor([3, 4]), "rollout_ids": torch.tensor([0, 1])}
    given["dataset_ids"] = torch.tensor([5, 6])
    if layout == "thd":
        mask, given["cu_seqlens"] = mask.view(-1), torch.tensor([0, 3, 7])
        given["cu_seqlens_padded"] = torch.tensor([0, 4, 8])
    plan = StepPlan.build(aggregation(mode), [Microbatch(mask, **given)])
    before = plan.weights(0)
    mask.data.mul_(5)  # which no version counter sees
    for tensor in (mask, *given.values()):
        tensor.copy_(tensor.flip(0))
    assert torch.equal(plan.weights(0), before)
