"""Sequence means and GSPO over context-parallel ranks, against one process with plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_loss_agg import CPLayout, Microbatch, SequenceMean, policy, weighted_sum
from megatron_loss_agg.errors import GroupError, LayoutError, MaskError
from tests.core.operations import Operations
from tests.core.steps import cp_layout, lay
from tests.distributed import run_ranks
from tests.oracle import Sample

F64 = torch.float64
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
    shape = laid.inputs["loss_mask"].shape
    g = torch.Generator().manual_seed(len(samples))

    def draw() -> Tensor:
        return torch.randn(shape, generator=g, dtype=F64)

    old = draw()
    return {
        "microbatch": laid.inputs,
        "index": laid.index,
        # Sequence ratios on both sides of the clips.
        "log_probs": old + 0.1 * draw(),
        "old": old,
        "advantages": draw(),
        "w": draw().abs() * (laid.inputs["loss_mask"] > 0),
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
    return {
        "loss": loss.item(),
        "gradient": log_probs.grad,
        "ratio": out.ratios,
        "clipped": out.clipped,
        "active": float(mask.sum()),
        "calls": made.collectives,
    }


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
        expected = reference(data)
        ranks = [answer[n] for answer in answers]
        assert sum(r["loss"] for r in ranks) == pytest.approx(expected["loss"], rel=1e-12)
        cut = cp_layout(data["microbatch"], cp, 0)
        got = {
            name: cut.unshard([r[name] for r in ranks]).reshape(-1).tolist()
            for name in ("gradient", "ratio", "clipped")
        }
        assert got["gradient"] == pytest.approx(expected["gradient"], rel=1e-12, abs=1e-15)
        active = [t for positions in data["index"] for t in positions if expected["ratio"][t] != 1]
        for t in active:
            assert got["ratio"][t] == pytest.approx(expected["ratio"][t], rel=1e-12)
            assert poison is not None or got["clipped"][t] == expected["clipped"][t]
        # One collective forward and its adjoint backward, also on ranks without a token.
        assert all(len(r["calls"]) == (2 if cp > 1 else 0) for r in ranks)
    if cp > 1:
        assert min(answers[1][n]["active"] for n in range(len(cases))) == 0


values = st.one_of(st.floats(-10, 10), st.sampled_from([math.nan, math.inf, -math.inf]))
masks = st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.0]), values), max_size=5)


@pytest.mark.parametrize("layout", ["thd", "thd_row", "thd_padded", "bshd"])
@given(st.lists(masks, max_size=4))
@settings(deadline=None, max_examples=60)
def test_mean_and_gradient_are_those_of_a_loop(layout, drawn):
    laid = lay([Sample(tuple(m for m, _ in pairs)) for pairs in drawn], layout)
    mask = laid.inputs["loss_mask"]
    x = torch.zeros_like(mask)
    for pairs, positions in zip(drawn, laid.index, strict=True):
        # What is masked may be anything; what counts is a number.
        kept = [v if m == 0 or math.isfinite(v) else 1.0 for m, v in pairs]
        x.view(-1)[positions] = torch.tensor(kept, dtype=F64)
    x.requires_grad_()
    mean = SequenceMean(Microbatch(**laid.inputs))(x)
    pull = torch.arange(1.0, mean.numel() + 1, dtype=F64).view(mean.shape)
    (mean * pull).sum().backward()
    expected, gradient = torch.zeros(mask.numel(), dtype=F64), torch.zeros_like(mask).view(-1)
    for s, positions in enumerate(laid.index):
        if layout == "bshd":  # a row is a sequence as a whole, its padding included
            positions = list(range(s * mask.shape[1], (s + 1) * mask.shape[1]))
        m, v, g = (t.detach().view(-1)[positions].tolist() for t in (mask, x, pull))
        total = math.fsum(m)
        if total:
            expected[positions] = math.fsum(a * b for a, b in zip(m, v, strict=True) if a) / total
            gradient[positions] = torch.tensor([a / total * math.fsum(g) for a in m], dtype=F64)
    torch.testing.assert_close(mean.detach().view(-1), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(x.grad.view(-1), gradient, rtol=1e-12, atol=1e-14)


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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_values_of_the_mask_are_checked(bad):
    with pytest.raises(MaskError, match="negative, infinite or NaN"):
        SequenceMean(Microbatch(torch.tensor([[1.0, bad]])))
    for offsets in ([1, 4], [0, 3, 2], [0, 5]):
        with pytest.raises(GroupError, match="expected"):
            SequenceMean(Microbatch(torch.ones(4), torch.tensor(offsets)))
    with pytest.raises(MaskError, match="not 0 on tokens outside"):
        SequenceMean(Microbatch(torch.ones(4), torch.tensor([0, 3])))


def test_the_mask_may_be_overwritten_once_the_mean_is_made():
    mask = torch.tensor([[1.0, 1.0, 0.0]], dtype=F64)
    mean = SequenceMean(Microbatch(mask))
    mask.zero_()
    assert mean(torch.tensor([[1.0, 3.0, 8.0]])).tolist() == [[2.0] * 3]


def test_refusals_say_what_to_change():
    microbatch = Microbatch(torch.ones(2, 8))
    with pytest.raises(LayoutError, match=r"layout of 2 .* a group of 1; .* both, or neither"):
        SequenceMean(microbatch, CPLayout.bshd(8, 2, 0))
    with pytest.raises(LayoutError, match="axis -1 has length 8; expected the layout's 16"):
        SequenceMean(microbatch, CPLayout.bshd(16, 1, 0))
    with pytest.raises(MaskError, match=r"values has shape \(8, 2\) and local_loss_mask \(2, 8\)"):
        SequenceMean(microbatch)(torch.zeros(8, 2))
    with pytest.raises(MaskError, match=r"values is a torch\.int64 .*; expected a floating-point"):
        SequenceMean(microbatch)(torch.zeros(2, 8, dtype=torch.int64))
