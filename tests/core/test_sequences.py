"""Sequence means and GSPO over context-parallel ranks, against one process with plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_loss_agg import Microbatch, SequenceMean, policy, weighted_sum
from tests.core.operations import Operations
from tests.core.steps import cp_layout, lay
from tests.distributed import run_ranks
from tests.fuzz.meaning import Read, called, exact_or_refused, listed
from tests.fuzz.strategies import ANYTHING, INPUTS, changes, microbatches, with_changes
from tests.oracle import Sample

F64 = torch.float64
TOLD = [x for x in INPUTS if x != "sample_weights"]  # what a sequence mean reads, and checks
CP = (1, 2, 4)
CLIPS = {"clip_low": 0.02, "clip_high": 0.03}

# Of 2 * 4 chunks: samples cut over all ranks, fractional and empty masks, and one sample whose
# tokens lie on the first rank alone, so that the others hold none of its.
SAMPLES = [
    Sample((1.0,) * 13),
    Sample((0.0, 1.0, 0.0, 0.5, 1.0, 1.0, 0.0)),
    Sample((0.0,) * 5),
    Sample((1.0,)),
]
LONELY = [Sample((1.0,)), Sample((0.0, 0.0, 0.0))]  # only rank 0 has a token that counts


def inputs(samples: list[Sample], layout: str) -> dict[str, Any]:
    """The whole microbatch: what `Microbatch` takes, and per-token tensors of the mask's shape."""
    laid = lay(samples, layout, multiple=2 * max(CP))
    mask = laid.inputs["loss_mask"]
    g = torch.Generator().manual_seed(len(samples))
    old, more, advantages, w = torch.randn((4, *mask.shape), generator=g, dtype=F64)
    return {
        "microbatch": laid.inputs,
        "index": laid.index,
        "log_probs": old + 0.1 * more,  # sequence ratios on both sides of the clips
        "old": old,
        "advantages": advantages,
        "w": w.abs() * (mask > 0),
    }


def reference(data: dict[str, Any]) -> dict[str, Any]:
    """Loss, gradient of the log-probabilities, ratios and clips, as loops over samples."""
    mask = data["microbatch"]["loss_mask"].reshape(-1).tolist()
    lp, old, a, w = (data[x].reshape(-1).tolist() for x in ("log_probs", "old", "advantages", "w"))
    terms: list[float] = []
    gradient, ratio, clipped = [0.0] * len(lp), [1.0] * len(lp), [False] * len(lp)
    for positions in data["index"]:
        total = math.fsum(mask[t] for t in positions)
        if total == 0:
            continue
        s = math.exp(math.fsum(mask[t] * (lp[t] - old[t]) for t in positions) / total)
        inside = min(max(s, 1 - CLIPS["clip_low"]), 1 + CLIPS["clip_high"])
        slope = 0.0  # of the loss by the mean of the log-ratio
        for t in positions:
            ratio[t] = s
            clipped[t] = -a[t] * inside > -a[t] * s
            terms.append(w[t] * max(-a[t] * s, -a[t] * inside))
            slope += 0.0 if clipped[t] else -w[t] * a[t] * s
        for t in positions:
            gradient[t] = slope * mask[t] / total
    return {"loss": math.fsum(terms), "gradient": gradient, "ratio": ratio, "clipped": clipped}


def gspo(data: dict[str, Any], poison: float | None) -> dict[str, Any]:
    """This rank's part of the loss and of the gradient, and the collectives that it took."""
    cp, rank = dist.get_world_size(), dist.get_rank()
    whole = Microbatch(**data["microbatch"])
    cut = cp_layout(data["microbatch"], cp, rank)
    sequence_mean = SequenceMean(whole, cut, dist.group.WORLD)
    mask, w = cut.shard(whole.loss_mask), cut.shard(data["w"])
    log_probs, old, advantages = (cut.shard(data[x]) for x in ("log_probs", "old", "advantages"))
    if poison is not None:
        for x in (log_probs, old, advantages):
            x[mask == 0] = poison
    log_probs.requires_grad_()
    with Operations() as made:
        out = policy.sequence_policy_loss(log_probs, old, advantages, sequence_mean, **CLIPS)
        loss = weighted_sum(w, out.losses)
        loss.backward()
    found = {"loss": loss.item(), "gradient": log_probs.grad, "ratio": out.ratios}
    return {**found, "clipped": out.clipped, "active": mask.sum(), "calls": made.collectives}


def gspo_cases(cases: list[tuple[dict[str, Any], float | None]]) -> list[dict[str, Any]]:
    return [gspo(*case) for case in cases]


@pytest.mark.parametrize("cp", CP)
def test_gspo_over_ranks_is_that_of_one_process(cp):
    cases = [
        (inputs(samples, layout), poison)
        for samples in (SAMPLES, LONELY)
        for layout in ("thd", "thd_row", "bshd")
        for poison in (None, math.nan, math.inf, -math.inf)
    ]
    answers = run_ranks(gspo_cases, cp, cases)
    for n, (data, poison) in enumerate(cases):
        expected, ranks = reference(data), [answer[n] for answer in answers]
        assert sum(r["loss"] for r in ranks) == pytest.approx(expected["loss"], rel=1e-12)
        cut = cp_layout(data["microbatch"], cp, 0)
        got = {
            name: cut.unshard([r[name] for r in ranks]).reshape(-1).tolist()
            for name in ("gradient", "ratio", "clipped")
        }
        assert got["gradient"] == pytest.approx(expected["gradient"], rel=1e-12, abs=1e-15)
        for t, ratio in enumerate(expected["ratio"]):
            if ratio != 1:
                assert got["ratio"][t] == pytest.approx(ratio, rel=1e-12)
                assert poison is not None or got["clipped"][t] == expected["clipped"][t]
        # One collective forward and its adjoint backward, also on ranks without a token.
        assert all(len(r["calls"]) == (2 if cp > 1 else 0) for r in ranks)
    if cp > 1:
        assert min(answers[1][n]["active"] for n in range(len(cases))) == 0


@given(microbatches(), st.sampled_from([F64, torch.float32]), st.data(), changes(TOLD))
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
    wanted, slope = [0.0] * x.numel(), [0.0] * x.numel()
    values, pulls = listed(x), listed(pull)
    for places in read.places:
        if total := math.fsum(read.values[t] for t in places):
            parts = (read.values[t] * values[t] for t in places if read.values[t])
            value, back = math.fsum(parts) / total, math.fsum(pulls[t] for t in places)
            for t in places:
                wanted[t], slope[t] = value, read.values[t] * back / total
    room = 1e-12 if dtype == F64 else 2e-5
    assert listed(out) == pytest.approx(wanted, rel=0, abs=room)
    assert listed(x.grad) == pytest.approx(slope, rel=0, abs=room)


def test_nan_that_counts_stays_in_its_sequence():
    mean = SequenceMean(Microbatch(torch.ones(2, 2)))(torch.tensor([[math.nan, 1.0], [1.0, 3.0]]))
    assert mean[0].isnan().all() and mean[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_means_of_half_precision_are_taken_in_fp32_or_more(dtype):
    # 4096 ones in bf16 would stop at 256.
    x = torch.ones(1, 4096, dtype=dtype, requires_grad=True)
    mean = SequenceMean(Microbatch(torch.ones(1, 4096, dtype=torch.bool)))(x)
    assert mean.dtype == torch.promote_types(dtype, torch.float32) and mean[0, 0] == 1
    mean[0, 0].backward()
    assert x.grad.dtype == dtype


def test_the_mask_may_be_overwritten_once_the_mean_is_made():
    mask = torch.tensor([[1.0, 1.0, 0.0]], dtype=F64)
    mean = SequenceMean(Microbatch(mask))
    mask.zero_()
    assert mean(torch.tensor([[1.0, 3.0, 8.0]])).tolist() == [[2.0] * 3]
