"""Rejected samples, steps without tokens, and weights handed to a trainer as advantages."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, Term
from megatron_loss_agg.errors import FunctionError, GroupError, MaskError
from tests.core.steps import CONFIGS, aggregation, assert_weights, expected_weights, lay, steps
from tests.oracle import Step

F64 = torch.float64


def without(step: Step, dropped: list[list[bool]]) -> Step:
    """The one rank of ``step`` as if its dropped samples did not exist."""
    pairs = (zip(mb, rs, strict=True) for mb, rs in zip(step[0], dropped, strict=True))
    return [[[s for s, r in of_mb if not r] for of_mb in pairs]]


@pytest.mark.parametrize(("mode", "empty"), CONFIGS)
@settings(deadline=None, max_examples=20)
@given(step=steps(max_ranks=1), drawn=st.lists(st.booleans(), min_size=30, max_size=30))
def test_rejected_samples_weigh_nothing_and_count_as_told(mode, empty, step, drawn):
    left = iter(drawn)
    dropped = [[next(left) for _ in mb] for mb in step[0]]
    laid = [lay(mb, "thd") for mb in step[0]]
    microbatches = [
        Microbatch(**x.inputs, rejected=torch.tensor(r, dtype=torch.bool))
        for x, r in zip(laid, dropped, strict=True)
    ]

    def weights(rejected: str) -> list[list[list[float]]]:
        plan = StepPlan.build(aggregation(mode, rejected=rejected, empty=empty), microbatches)
        assert plan.is_empty == (plan.counts.kept_tokens == 0)
        for i, m in enumerate(microbatches):
            assert float(plan.mask_sums(i).sum()) == pytest.approx(float(m.loss_mask.sum()))
        return [x.samples(plan.weights(k, F64)) for k, x in enumerate(laid)]

    # Counted: the denominators of the whole step, and weight 0 on what was rejected.
    (whole,) = expected_weights(mode, step, empty=empty)
    counted = [
        [[0.0 if r else w for w in s] for s, r in zip(mb, rs, strict=True)]
        for mb, rs in zip(whole, dropped, strict=True)
    ]
    assert_weights(weights("count"), counted)
    # Survivors: as if the rejected samples did not exist.
    (kept,) = expected_weights(mode, without(step, dropped), empty=empty)
    for got, wanted, rs in zip(weights("skip"), kept, dropped, strict=True):
        assert_weights([s for s, r in zip(got, rs, strict=True) if not r], wanted)
        assert not any(w for s, r in zip(got, rs, strict=True) if r for w in s)


def test_counting_all_or_survivors_is_a_choice_that_must_be_made():
    step = [Microbatch(torch.ones(2, 4), rejected=torch.tensor([False, True]))]
    for choice, samples in (("count", 2), ("skip", 1)):
        plan = StepPlan.build(aggregation("sample_mean", rejected=choice), step)
        assert plan.counts.samples == samples
    with pytest.raises(GroupError, match=r"expected LossAggregation\(rejected='count'\)"):
        StepPlan.build(aggregation("sample_mean"), step)


def test_a_step_without_tokens_says_so():
    terms = {"a": aggregation("token_mean", rejected="count")}
    terms["metric"] = Term(aggregation("sum", rejected="count"), 0)
    for microbatch, is_empty in (
        (Microbatch(torch.zeros(2, 3)), True),
        (Microbatch(torch.ones(1, 3), rejected=torch.tensor([True])), True),
        (Microbatch(torch.ones(1, 1)), False),
    ):
        assert StepPlan.build_terms(terms, [microbatch]).is_empty is is_empty


def test_custom_weights_of_rejected_samples_are_refused():
    step = [Microbatch(torch.ones(2, 2), rejected=torch.tensor([True, False]))]

    def plan(function) -> StepPlan:
        agg = LossAggregation(mode="custom", function=function, rejected="count")
        return StepPlan.build(agg, step)

    kept = plan(lambda p, i: (~p.microbatches[i].rejected).float().unsqueeze(1).expand(2, 2))
    assert kept.weights(0).tolist() == [[0, 0], [1, 1]]
    with pytest.raises(FunctionError, match="or the sample rejected; expected finite"):
        plan(lambda p, i: p.microbatches[i].loss_mask).weights(0)


def test_scaled_advantages_give_a_trainer_that_sums_the_same_gradient():
    microbatch = Microbatch(torch.tensor([[0.0, 1, 1], [1, 0, 0]]), prompt_ids=torch.tensor([3, 4]))
    plan = StepPlan.build(aggregation("prompt_mean"), [microbatch])
    advantages = torch.tensor([[math.nan, 2.0, 2.0], [-1.0, math.inf, 0.0]], dtype=F64)
    old = torch.tensor([[0.0, -1.0, -2.0], [-0.5, 0.0, 0.0]], dtype=F64)

    def gradient(loss) -> torch.Tensor:
        log_p = torch.tensor([[0.0, -1.5, -1.0], [-0.6, 0.0, 0.0]], dtype=F64, requires_grad=True)
        loss(torch.exp(log_p - old)).backward()
        return log_p.grad

    def clipped(ratio: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)

    sane = torch.tensor([[0.0, 2.0, 2.0], [-1.0, 0.0, 0.0]], dtype=F64)
    w = plan.weights(0, F64)
    wanted = gradient(lambda ratio: (w * clipped(ratio, sane)).sum())
    scaled = plan.scaled_advantages(0, advantages)
    assert torch.allclose(gradient(lambda r: clipped(r, scaled).sum()), wanted, rtol=1e-15, atol=0)
    assert not torch.allclose(gradient(lambda r: clipped(r, sane).sum()), wanted)
    with pytest.raises(MaskError, match=r"advantages has shape .* and loss_mask"):
        plan.scaled_advantages(0, torch.ones(3))
    agg = LossAggregation(mode="custom", function=lambda p, i: -p.microbatches[i].loss_mask)
    with pytest.raises(FunctionError, match="negative weights"):
        StepPlan.build(agg, [microbatch]).scaled_advantages(0, advantages)
