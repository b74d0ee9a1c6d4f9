"""Several terms in one plan: each has its own denominator, and all share one exchange."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import AggregationError, Microbatch, StepPlan, Term
from megatron_loss_agg.errors import MaskError, ModeError
from tests.core.operations import Operations
from tests.core.steps import aggregation, assert_weights, expected_weights, lay, random_step
from tests.distributed import run_ranks
from tests.oracle import Step

F64 = torch.float64
MODES = ["prompt_mean", "token_mean", "sample_mean", "constant", "rollout_mean"]
TOKEN_MEAN = aggregation("token_mean")


def plan_terms(plan_steps: list[Step]) -> list[tuple[dict[str, Any], int]]:
    """On each rank and for each step: the weights of every term, and the collectives."""
    answers = []
    for step in plan_steps:
        laid = [lay(mb, "thd_padded") for mb in step[dist.get_rank()]]
        with Operations() as made:
            plans = StepPlan.build_terms(
                {mode: aggregation(mode) for mode in MODES},
                [Microbatch(**x.inputs) for x in laid],
                dist.group.WORLD,
            )
        weights = {
            mode: [x.samples(plan.weights(k, F64)) for k, x in enumerate(laid)]
            for mode, plan in plans.items()
        }
        answers.append((weights, len(made.collectives)))
    return answers


def test_every_term_has_its_own_weights_over_all_ranks_in_two_collectives():
    plan_steps = [random_step(seed, 2) for seed in range(8)]
    for rank, answers in enumerate(run_ranks(plan_terms, 2, plan_steps)):
        for step, (weights, collectives) in zip(plan_steps, answers, strict=True):
            assert collectives <= 2
            for mode in MODES:
                assert_weights(weights[mode], expected_weights(mode, step)[rank])


def two_microbatches() -> list[Microbatch]:
    """Of 3 + 1 and 2 tokens; prompts 7, 9 and 7."""
    return [
        Microbatch(torch.tensor([[1.0, 1, 1], [1, 0, 0]]), prompt_ids=torch.tensor([7, 9])),
        Microbatch(torch.tensor([[1.0, 1, 0]]), prompt_ids=torch.tensor([7])),
    ]


def test_the_sum_of_the_terms_takes_each_by_its_own_denominator():
    terms = {
        "policy": aggregation("prompt_mean"),
        "kl": Term(TOKEN_MEAN, coefficient=Fraction(1, 2)),
        "off": Term(aggregation("sum"), coefficient=0),
    }
    plans = StepPlan.build_terms(terms, iter(two_microbatches()))  # read once for all terms
    assert [plan.counts.tokens for plan in plans.values()] == [6.0, 6.0, 6.0]
    # A loss that is 1 on prompt 7's five tokens and 0 on prompt 9's one: by prompts 1/2, and by
    # tokens 5/6; in all 1/2 + 1/2 * 5/6 + 0 = 11/12.
    losses = [torch.tensor([[1.0, 1, 1], [0, 0, 0]]), torch.tensor([[1.0, 1, 0]])]
    for name, mean in (("policy", 1 / 2), ("kl", 5 / 6)):
        parts = [(plans[name].weights(i) * x).sum().item() for i, x in enumerate(losses)]
        assert sum(parts) == pytest.approx(mean)
    total = sum(plans.weighted_sum(i, dict.fromkeys(terms, x)) for i, x in enumerate(losses))
    assert total.item() == pytest.approx(11 / 12)


def test_terms_may_have_masks_of_their_own():
    answer, whole = (Microbatch(torch.tensor([[1.0, 1, x]])) for x in (0, 1))
    terms = {"policy": TOKEN_MEAN, "value": TOKEN_MEAN}
    plans = StepPlan.build_terms(terms, [{"policy": answer, "value": whole}])
    assert plans["policy"].weights(0).tolist() == [[0.5, 0.5, 0]]
    assert plans["value"].weights(0)[0].tolist() == pytest.approx([1 / 3] * 3)
    with pytest.raises(MaskError, match="has none for the term 'value'"):
        StepPlan.build_terms(terms, [{"policy": answer}])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_is_no_loss_at_masked_positions_or_in_a_term_of_coefficient_zero(poison):
    terms = {"a": TOKEN_MEAN, "b": Term(aggregation("sample_mean"), -2.0)}
    terms["off"] = Term(TOKEN_MEAN, 0)
    plans = StepPlan.build_terms(terms, [Microbatch(torch.tensor([[1.0, 0.0]]))])
    losses = {name: torch.tensor([[3.0, poison]], requires_grad=True) for name in ("a", "b")}
    losses["off"] = torch.full((1, 2), poison, requires_grad=True)
    total = plans.weighted_sum(0, losses)
    total.backward()
    assert total.item() == -3.0
    assert [x.grad.tolist() for x in losses.values()] == [[[1, 0]], [[-2, 0]], [[0, 0]]]


A_MAPPING = "expected a mapping of names to Term or LossAggregation"
BAD_TERMS = [
    (lambda: {}, A_MAPPING),
    (lambda: [aggregation("sum")], A_MAPPING),
    (lambda: {"a": "token_mean"}, "a str for the aggregation of a term; expected a LossAgg"),
    *(
        (lambda x=x: {"a": Term(aggregation("sum"), x)}, "coefficient=.*expected a finite number")
        for x in (math.nan, math.inf, "1", None)
    ),
]


@pytest.mark.parametrize(("terms", "text"), BAD_TERMS)
def test_bad_terms_are_named(terms, text):
    with pytest.raises(ModeError, match=text):
        StepPlan.build_terms(terms(), two_microbatches())


def test_losses_of_other_terms_are_refused():
    plans = StepPlan.build_terms({"a": aggregation("sum")}, two_microbatches())
    with pytest.raises(MaskError, match=r"losses \['b'\] for the terms \['a'\]"):
        plans.weighted_sum(0, {"b": torch.ones(2, 3)})


def test_an_error_names_the_place_of_the_microbatch_in_its_step():
    good, bad = Microbatch(torch.ones(1, 2)), Microbatch(-torch.ones(1, 2))
    for lists in ([good, good, good, bad], [{"a": good, "b": good}] * 3 + [{"a": good, "b": bad}]):
        with pytest.raises(MaskError, match="microbatch 3: loss_mask has negative"):
            StepPlan.build_terms({"a": aggregation("sum"), "b": aggregation("sum")}, lists)


TERMS: dict[str, dict[str, Any]] = {
    "one": {"policy": TOKEN_MEAN},
    "in another mode": {"policy": aggregation("sample_mean")},
    "with a divisor": {"policy": aggregation("sum")},
    "with another divisor": {"policy": aggregation("sum", divisor=2)},
    "two": {"policy": TOKEN_MEAN, "kl": TOKEN_MEAN},
    "in another order": {"kl": TOKEN_MEAN, "policy": TOKEN_MEAN},
    "under another name": {"policy": TOKEN_MEAN, "entropy": TOKEN_MEAN},
    "nine": dict.fromkeys("abcdefghi", TOKEN_MEAN),
    "ten": dict.fromkeys("abcdefghij", TOKEN_MEAN),
}


def build_unlike_and_many_terms() -> list[str]:
    """What this rank hears when rank 1 has other terms than rank 0, and at last other samples.

    And 19 terms have the weights that each has alone, and 5 terms take the collectives of 1.
    """
    world, rank = dist.group.WORLD, dist.get_rank()
    mine = two_microbatches()

    def heard(terms: dict[str, Any], step: Any = mine, **options: Any) -> str:
        try:
            plans = StepPlan.build_terms(terms, step, world, **options)
        except AggregationError as error:
            return f"{type(error).__name__}: {error}"
        return f"{len(plans)} plans"

    for number in (1, 5):
        ids = torch.arange(2)
        step = [Microbatch(torch.ones(2, 3), prompt_ids=ids, rollout_ids=ids)]
        by = [aggregation(f"{('prompt', 'rollout')[i % 2]}_mean") for i in range(number)]
        with Operations() as made:
            StepPlan.build_terms({str(i): agg for i, agg in enumerate(by)}, step, world)
        assert made.collectives == ["c10d::_allgather_base_"] * 2
    many = {str(i): aggregation([*MODES[:3], "sum"][i % 4]) for i in range(19)}
    for name, plan in StepPlan.build_terms(many, mine[: 1 + rank], world).items():
        alone = StepPlan.build(many[name], mine[: 1 + rank], world)
        assert torch.equal(plan.weights(0, F64), alone.weights(0, F64))
    unlike = [heard(TERMS[pair[rank]]) for pair in itertools.product(TERMS, repeat=2)]
    return [*unlike, heard(TERMS["one"], mine[: 1 + rank], sharded_over=world)]


def test_ranks_with_other_terms_all_hear_of_it_and_any_number_is_exact():
    first, second = run_ranks(build_unlike_and_many_terms, 2, timeout=60.0)
    assert first == second
    *heard, other_samples = first
    assert other_samples.startswith("GroupError: ranks that share samples have 2 and 3 of them")
    for (first, second), said in zip(itertools.product(TERMS, repeat=2), heard, strict=True):
        numbers = sorted({len(TERMS[first]), len(TERMS[second])})
        if first == second:
            assert said == f"{numbers[0]} plans"
        else:
            assert said.startswith("ModeError: ranks have different aggregations, or other terms")
