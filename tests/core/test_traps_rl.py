"""Traps of loops with several losses, metrics and optimizer steps a batch.

Each test derives the trap's number by hand, as in `test_traps`, and shows that ours is right.
"""

from __future__ import annotations

import pytest
import torch

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, Term
from megatron_loss_agg.report import Mean, reduce_reports

F64 = torch.float64
TOKEN_MEAN = LossAggregation(mode="token_mean")


def microbatch(tokens: int) -> Microbatch:
    return Microbatch(torch.ones(1, tokens, dtype=F64))


def test_trap_14_a_second_loss_is_global_too():
    # Two microbatches of 1 and 3 tokens with losses 8 and 4: (8 + 3 * 4) / 4 = 5. A critic whose
    # mean is taken by microbatch, (8 + 4) / 2 = 6.
    terms = {"policy": TOKEN_MEAN, "value": Term(TOKEN_MEAN, coefficient=0.5)}
    plans = StepPlan.build_terms(terms, [microbatch(1), microbatch(3)])
    losses = [torch.full((1, 1), 8.0, dtype=F64), torch.full((1, 3), 4.0, dtype=F64)]
    assert sum(x.mean().item() for x in losses) / 2 == 6
    value = sum((plans["value"].weights(i, F64) * x).sum().item() for i, x in enumerate(losses))
    assert value == pytest.approx(5, rel=1e-15)
    total = sum(plans.weighted_sum(i, dict.fromkeys(terms, x)) for i, x in enumerate(losses))
    assert total.item() == pytest.approx(1.5 * 5, rel=1e-15)


def test_trap_15_the_window_is_the_optimizer_step():
    # A generation batch of 4 samples of 2 tokens, used in two optimizer steps of 2 samples. A token
    # weighs 1 / 4 in its step; by the tokens of the whole batch, 1 / 8, which is 0.5 of it.
    batch = [microbatch(2) for _ in range(4)]
    whole = StepPlan.build(TOKEN_MEAN, batch)
    for step in (batch[:2], batch[2:]):
        plan = StepPlan.build(TOKEN_MEAN, step)
        assert plan.weights(0, F64).tolist() == [[1 / 4, 1 / 4]]
        assert sum(plan.weights(i, F64).sum().item() for i in range(2)) == 1
        assert whole.weights(0, F64)[0, 0] / plan.weights(0, F64)[0, 0] == 0.5


def test_trap_25_every_metric_has_its_own_denominator():
    # KL over 4 tokens, of which 1 has 8: 2. Rewards of 2 samples, 1 and 0: 1 / 2. Rescaled by one
    # scalar, tokens / samples = 2, the reward would be 1 or the KL 4.
    kl = Mean.of(torch.tensor([8.0, 0, 0, 0], dtype=F64), torch.ones(4, dtype=F64))
    reward = Mean.of(torch.tensor([1.0, 0], dtype=F64), torch.ones(2, dtype=F64))
    assert (reward.sum / reward.count * 2).item() == 1
    assert (kl.sum / reward.count).item() == 4
    assert reduce_reports([{"kl": kl, "reward": reward}], None) == {"kl": 2.0, "reward": 0.5}


def test_trap_25_an_evaluation_is_no_mean_of_means():
    # One token of 8, and then three of 4: 5 by tokens, 6 by microbatches.
    reports = [
        {"loss": Mean.of(torch.full((n,), x, dtype=F64), torch.ones(n, dtype=F64))}
        for n, x in ((1, 8.0), (3, 4.0))
    ]
    assert sum(report["loss"].value().item() for report in reports) / 2 == 6
    assert reduce_reports(reports, None) == {"loss": 5.0}
