"""Several terms in one plan: each has its own denominator, and all share one exchange."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_loss_agg import AggregationError, LossAggregation, Microbatch, StepPlan, Term
from megatron_loss_agg.errors import FunctionError, GroupError, MaskError, ModeError
from tests import oracle
from tests.core import steps
from tests.core.ranks import Collectives, assert_weights, divisor_of, random_step
from tests.core.steps import lay
from tests.distributed import run_ranks
from tests.oracle import Step

F64 = torch.float64
MODES = ["prompt_mean", "token_mean", "sample_mean", "constant", "rollout_mean"]


def aggregation(mode: str, **options: Any) -> LossAggregation:
    return LossAggregation(mode=mode, divisor=divisor_of(mode), **options)


def plan_terms(plan_steps: list[Step]) -> list[tuple[dict[str, Any], int]]:
    """On each rank and for each step: the weights of every term, and the collectives."""
    answers = []
    for step in plan_steps:
        laid = [lay(mb, "thd_padded") for mb in step[dist.get_rank()]]
        with Collectives() as collectives:
            plans = StepPlan.build_terms(
                {mode: aggregation(mode) for mode in MODES},
                [Microbatch(**x.inputs) for x in laid],
                dist.group.WORLD,
            )
        weights = {
            mode: [x.samples(plan.weights(k, F64)) for k, x in enumerate(laid)]
            for mode, plan in plans.items()
        }
        answers.append((weights, len(collectives.names)))
    return answers


def test_every_term_has_its_own_weights_over_all_ranks_in_two_collectives():
    plan_steps = [random_step(seed, 2) for seed in range(8)]
    for rank, answers in enumerate(run_ranks(plan_terms, 2, plan_steps)):
        for step, (weights, collectives) in zip(plan_steps, answers, strict=True):
            assert collectives <= 2
            for mode in MODES:
                wanted = oracle.step_weights(mode, step, divisor=divisor_of(mode))
                assert_weights(weights[mode], wanted[rank])


def two_microbatches() -> list[Microbatch]:
    """Of 3 + 1 and 2 tokens; prompts 7, 9 and 7."""
    return [
        Microbatch(torch.tensor([[1.0, 1, 1], [1, 0, 0]]), prompt_ids=torch.tensor([7, 9])),
        Microbatch(torch.tensor([[1.0, 1, 0]]), prompt_ids=torch.tensor([7])),
    ]


def test_an_iterator_of_microbatches_is_read_for_every_term():
    terms = {"policy": aggregation("prompt_mean"), "kl": aggregation("token_mean")}
    plans = StepPlan.build_terms(terms, iter(two_microbatches()))
    assert [plan.counts.tokens for plan in plans.values()] == [6.0, 6.0]


def test_the_sum_of_the_terms():
    terms = {
        "policy": aggregation("prompt_mean"),
        "kl": Term(aggregation("token_mean"), coefficient=0.5),
        "off": Term(aggregation("sum"), coefficient=0),
    }
    plans = StepPlan.build_terms(terms, two_microbatches())
    losses = [{name: torch.ones_like(m.loss_mask) for name in terms} for m in two_microbatches()]
    total = sum(plans.weighted_sum(i, of_mb) for i, of_mb in enumerate(losses))
    # A mean of ones is 1, whichever it is: 1 + 0.5 * 1 + 0 * (6 tokens / 3).
    assert total.item() == pytest.approx(1.5)
    # Trap: one denominator for both terms. KL by prompts, of a loss that is 1 on prompt 7's five
    # tokens and 0 on prompt 9's one, would be 1/2; by tokens it is 5/6.
    of_prompt_7 = [torch.tensor([[1.0, 1, 1], [0, 0, 0]]), torch.tensor([[1.0, 1, 0]])]
    by_tokens, by_prompts = (
        sum(float((plans[name].weights(i) * x).sum()) for i, x in enumerate(of_prompt_7))
        for name in ("kl", "policy")
    )
    assert (by_tokens, by_prompts) == pytest.approx((5 / 6, 1 / 2))


def test_terms_may_have_masks_of_their_own():
    answer = Microbatch(torch.tensor([[1.0, 1.0, 0.0]]))
    whole = Microbatch(torch.tensor([[1.0, 1.0, 1.0]]))
    terms = {"policy": aggregation("token_mean"), "value": aggregation("token_mean")}
    plans = StepPlan.build_terms(terms, [{"policy": answer, "value": whole}])
    assert plans["policy"].weights(0).tolist() == [[0.5, 0.5, 0]]
    assert plans["value"].weights(0)[0].tolist() == pytest.approx([1 / 3] * 3)
    with pytest.raises(MaskError, match="has none for the term 'value'"):
        StepPlan.build_terms(terms, [{"policy": answer}])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_no_nan_from_masked_positions_of_any_term(poison):
    terms = {"a": aggregation("token_mean"), "b": Term(aggregation("sample_mean"), -2.0)}
    plans = StepPlan.build_terms(terms, [Microbatch(torch.tensor([[1.0, 0.0]]))])
    losses = {name: torch.tensor([[3.0, poison]], requires_grad=True) for name in terms}
    total = plans.weighted_sum(0, losses)
    total.backward()
    assert total.item() == -3.0
    assert losses["a"].grad.tolist() == [[1, 0]] and losses["b"].grad.tolist() == [[-2, 0]]


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({}, "expected a mapping of names to Term or LossAggregation"),
        ([aggregation("sum")], "expected a mapping of names to Term or LossAggregation"),
        ({"a": "token_mean"}, "a str for the aggregation of a term; expected a LossAggregation"),
    ],
)
def test_bad_terms(terms, said):
    with pytest.raises(ModeError, match=said):
        StepPlan.build_terms(terms, two_microbatches())


@pytest.mark.parametrize("coefficient", [math.nan, math.inf, 10**400, "1", None, True])
def test_bad_coefficients(coefficient):
    with pytest.raises(ModeError, match="expected a finite number"):
        Term(aggregation("sum"), coefficient)


def test_losses_of_other_terms():
    plans = StepPlan.build_terms({"a": aggregation("sum")}, two_microbatches())
    with pytest.raises(MaskError, match=r"losses \['b'\] for the terms \['a'\]"):
        plans.weighted_sum(0, {"b": torch.ones(2, 3)})


def fail_on_one_rank() -> str:
    terms = {"a": aggregation("token_mean"), "b": aggregation("prompt_mean")}
    try:
        if dist.get_rank() == 1:
            StepPlan.abandon(dist.group.WORLD)
            return "abandoned"
        StepPlan.build_terms(terms, two_microbatches(), dist.group.WORLD)
    except AggregationError as error:
        return type(error).__name__
    return "nothing"


def test_no_rank_waits_for_one_that_failed():
    assert run_ranks(fail_on_one_rank, 2) == ["PeerError", "abandoned"]


TERMS = {
    "one": ["policy"],
    "two": ["policy", "kl"],
    "in another order": ["kl", "policy"],
    "under another name": ["policy", "entropy"],
    "nine": [str(i) for i in range(9)],
    "ten": [str(i) for i in range(10)],
}


def build_unlike_terms() -> list[str]:
    """What this rank hears when rank 1 has other terms, of the same aggregation, than rank 0."""

    def heard(mine: str) -> str:
        terms = dict.fromkeys(TERMS[mine], aggregation("token_mean"))
        try:
            plans = StepPlan.build_terms(terms, two_microbatches(), dist.group.WORLD)
        except AggregationError as error:
            return f"{type(error).__name__}: {error}"
        return f"{len(plans)} plans"

    return [heard(pair[dist.get_rank()]) for pair in itertools.product(TERMS, repeat=2)]


def test_ranks_with_other_terms_all_hear_of_it():
    heard = run_ranks(build_unlike_terms, 2, timeout=60.0)
    assert heard[0] == heard[1]
    for (first, second), said in zip(itertools.product(TERMS, repeat=2), heard[0], strict=True):
        numbers = sorted({len(TERMS[first]), len(TERMS[second])})
        if first == second:
            assert said == f"{numbers[0]} plans"
        elif len(numbers) > 1:
            assert f"the ranks have {numbers} terms; expected the same on every rank" in said
        else:
            assert "terms in another order; expected the same on every rank" in said


def plan_many_terms() -> list[tuple[float, float]]:
    modes = ["token_mean", "sample_mean", "prompt_mean", "sum"]
    terms = {str(i): aggregation(modes[i % len(modes)]) for i in range(19)}
    mine = two_microbatches()[: 1 + dist.get_rank()]
    plans = StepPlan.build_terms(terms, mine, dist.group.WORLD)
    alone = [StepPlan.build(agg, mine, dist.group.WORLD) for agg in terms.values()]
    return [
        (float(plan.weights(0, torch.float64).sum()), float(one.weights(0, torch.float64).sum()))
        for plan, one in zip(plans.values(), alone, strict=True)
    ]


def test_terms_of_several_rows():
    for found in run_ranks(plan_many_terms, 2):
        assert all(together == alone for together, alone in found)


rejections = st.lists(st.booleans(), min_size=30, max_size=30)


def without(step: Step, dropped: list[bool]) -> Step:
    """The step as if its dropped samples did not exist."""
    left = iter(dropped)
    return [[[s for s in mb if not next(left)] for mb in rank] for rank in step]


@pytest.mark.parametrize("empty", ["count", "skip"])
@pytest.mark.parametrize("mode", sorted(oracle.INNER))
@settings(deadline=None, max_examples=20)
@given(step=steps.steps(max_ranks=1), dropped=rejections)
def test_rejected_samples(mode, empty, step, dropped):
    laid = [lay(mb, "thd") for mb in step[0]]
    flags, at = [], 0
    for mb in step[0]:
        flags.append(torch.tensor(dropped[at : at + len(mb)], dtype=torch.bool))
        at += len(mb)
    microbatches = [Microbatch(**x.inputs, rejected=r) for x, r in zip(laid, flags, strict=True)]
    options = {"divisor": divisor_of(mode), "empty": empty}

    def weights(rejected: str) -> list[list[list[float]]]:
        agg = LossAggregation(mode=mode, rejected=rejected, **options)
        plan = StepPlan.build(agg, microbatches)
        assert plan.is_empty == (plan.counts.kept_tokens == 0)
        return [x.samples(plan.weights(k, F64)) for k, x in enumerate(laid)]

    # Counted: the denominators of the whole step, and weight 0 on what was rejected.
    (whole,) = oracle.step_weights(mode, step, **options)
    counted = [
        [[0.0 if r else w for w in s] for s, r in zip(mb, rs.tolist(), strict=True)]
        for mb, rs in zip(whole, flags, strict=True)
    ]
    assert_weights(weights("count"), counted)
    # Survivors: as if the rejected samples did not exist.
    (kept,) = oracle.step_weights(mode, without(step, dropped), **options)
    for got, wanted, rs in zip(weights("skip"), kept, flags, strict=True):
        assert_weights([s for s, r in zip(got, rs.tolist(), strict=True) if not r], wanted)
        assert not any(w for s, r in zip(got, rs.tolist(), strict=True) if r for w in s)


def test_counting_all_or_survivors_is_a_choice():
    # Two samples of 2 and 4 tokens, the second rejected: 1 / (2 samples * 2), or 1 / (1 * 2).
    microbatch = Microbatch(
        torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1]]), rejected=torch.tensor([False, True])
    )
    of = {
        choice: StepPlan.build(LossAggregation(mode="sample_mean", rejected=choice), [microbatch])
        for choice in ("count", "skip")
    }
    assert of["count"].weights(0).tolist() == [[0.25, 0.25, 0, 0], [0, 0, 0, 0]]
    assert of["skip"].weights(0).tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0, 0]]
    assert (of["count"].counts.samples, of["skip"].counts.samples) == (2, 1)
    with pytest.raises(GroupError, match=r"expected LossAggregation\(rejected='count'\)"):
        StepPlan.build(LossAggregation(mode="sample_mean"), [microbatch])
    with pytest.raises(ModeError, match="rejected='drop'; expected 'count' or 'skip'"):
        LossAggregation(mode="sample_mean", rejected="drop")


def test_a_step_without_tokens_says_so():
    nothing = Microbatch(torch.zeros(2, 3))
    all_rejected = Microbatch(torch.ones(1, 3), rejected=torch.tensor([True]))
    for microbatch, is_empty in (
        (nothing, True),
        (all_rejected, True),
        (Microbatch(torch.ones(1, 1)), False),
    ):
        terms = {"a": aggregation("token_mean", rejected="count")}
        terms["metric"] = Term(aggregation("sum", rejected="count"), 0)
        assert StepPlan.build_terms(terms, [microbatch]).is_empty is is_empty


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
    with pytest.raises(MaskError, match=r"advantages .* for a mask of shape"):
        plan.scaled_advantages(0, torch.ones(3))


def test_samples_of_a_rejection_of_wrong_kind():
    with pytest.raises(AggregationError, match=r"rejected is .*; expected a bool tensor"):
        Microbatch(torch.ones(1, 1), rejected=torch.ones(1))


def test_a_term_of_coefficient_zero_adds_nothing_even_of_nan():
    terms = {"a": aggregation("token_mean"), "off": Term(aggregation("token_mean"), 0)}
    plans = StepPlan.build_terms(terms, [Microbatch(torch.ones(1, 1))])
    off = torch.tensor([[math.nan]], requires_grad=True)
    total = plans.weighted_sum(0, {"a": torch.ones(1, 1), "off": off})
    total.backward()
    assert total.item() == 1 and off.grad.item() == 0


def test_custom_weights_of_rejected_samples_are_refused():
    rejected = torch.tensor([True, False])
    microbatch = Microbatch(torch.ones(2, 2), rejected=rejected)

    def plan(function) -> StepPlan:
        agg = LossAggregation(mode="custom", function=function, rejected="count")
        return StepPlan.build(agg, [microbatch])

    kept = plan(lambda p, i: (~p.microbatches[i].rejected).float().unsqueeze(1).expand(2, 2))
    assert kept.weights(0).tolist() == [[0, 0], [1, 1]]
    with pytest.raises(FunctionError, match="weights for rejected samples; expected 0"):
        plan(lambda p, i: p.microbatches[i].loss_mask).weights(0)


def test_negative_custom_weights_scale_no_advantage():
    agg = LossAggregation(mode="custom", function=lambda p, i: -p.microbatches[i].loss_mask)
    plan = StepPlan.build(agg, [Microbatch(torch.ones(1, 2))])
    with pytest.raises(FunctionError, match="negative weights"):
        plan.scaled_advantages(0, torch.ones(1, 2))


def test_an_error_names_the_place_of_the_microbatch_in_its_step():
    good, bad = Microbatch(torch.ones(1, 2)), Microbatch(-torch.ones(1, 2))
    for lists in ([good, good, good, bad], [{"a": good, "b": good}] * 3 + [{"a": good, "b": bad}]):
        with pytest.raises(MaskError, match="microbatch 3: loss_mask has negative"):
            StepPlan.build_terms({"a": aggregation("sum"), "b": aggregation("sum")}, lists)


def test_terms_of_other_numbers_and_losses_of_other_kinds():
    assert Term(aggregation("sum"), Fraction(1, 2)).coefficient == 0.5
    plans = StepPlan.build_terms({"a": aggregation("sum")}, two_microbatches())
    with pytest.raises(MaskError, match="losses of 'a' are a NoneType; expected a tensor"):
        plans.weighted_sum(0, {"a": None})


def miss_a_term_on_one_rank() -> str:
    terms = {"a": aggregation("token_mean"), "b": aggregation("token_mean")}
    mine = [{"a": m} if dist.get_rank() else m for m in two_microbatches()]
    try:
        StepPlan.build_terms(terms, mine, dist.group.WORLD)
    except AggregationError as error:
        return type(error).__name__
    return "nothing"


def test_no_rank_waits_for_one_that_misses_a_term():
    assert run_ranks(miss_a_term_on_one_rank, 2) == ["PeerError", "MaskError"]
