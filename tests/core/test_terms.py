"""Several terms in one plan: each has its own denominator, and all share one exchange."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from megatron_loss_agg import Microbatch, StepPlan, Term
from tests.core.steps import aggregation

TOKEN_MEAN = aggregation("token_mean")


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
