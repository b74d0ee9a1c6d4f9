"""Known defects of public systems, each pinned beside the right number.

Every row derives both by hand: what a small piece of code with the defect gives, and what ours
must give instead.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import (
    CPLayout,
    LossAggregation,
    Microbatch,
    StepPlan,
    Term,
    token_weights,
    weighted_sum,
)
from megatron_loss_agg.report import Mean, reduce_reports
from tests.core.operations import Operations
from tests.distributed import run_ranks

F64 = torch.float64
TOKEN_MEAN = LossAggregation(mode="token_mean")


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=F64)


def ours(mode: str, mask: Tensor, loss: Tensor, inputs: Any = None, **options: Any) -> float:
    w = token_weights(LossAggregation(mode=mode, **options), mask, **(inputs or {}), dtype=F64)
    return weighted_sum(w, loss).item()


def test_samples_without_tokens_are_no_tokens():
    # Three active tokens and two empty samples: (2 + 3 + 7) / 3 = 4.
    mask, loss = rows([1, 1, 1], [0, 0, 0], [0, 0, 0]), rows([2, 3, 7], [9, 9, 9], [9, 9, 9])
    clamped_by_sample = mask.sum(-1).clamp(min=1).sum()
    assert float((loss * mask).sum() / clamped_by_sample) == pytest.approx(12 / 5)
    assert ours("token_mean", mask, loss) == pytest.approx(4)


def test_a_fractional_mask_is_neither_clamped_to_1_nor_cut_off():
    # M = 0.25 + 0.25 = 0.5: (0.25 * 2 + 0.25 * 6) / 0.5 = 4.
    mask, loss = rows([0.25, 0.25]), rows([2, 6])
    assert float((loss * mask).sum() / mask.sum().clamp(min=1)) == pytest.approx(2)
    assert ours("token_mean", mask, loss) == pytest.approx(4)
    # (0.5 * 2 + 1 * 5) / 1.5 = 4. Through an integer mask: 5 / 1 = 5.
    mask, loss = rows([0.5, 1]), rows([2, 5])
    assert float((loss * mask.long()).sum() / mask.long().sum()) == pytest.approx(5)
    assert ours("token_mean", mask, loss) == pytest.approx(4)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_constant_divides_by_the_number_of_samples_too_and_not_by_the_padded_width(width):
    # D = 10, N = 2, in a batch of any width: (1 + 2 + 3) / (2 * 10) = 0.3.
    of_samples = (rows([1, 1], [1, 0]), rows([1, 2], [3, 9]))
    mask, loss = (torch.nn.functional.pad(x, (0, width - 2)) for x in of_samples)
    assert float((loss * mask).sum() / 10) == pytest.approx(0.6)
    assert float((loss * mask).sum(-1).mean() / width) == pytest.approx(3 / width)
    assert ours("constant", mask, loss, divisor=10) == pytest.approx(0.3)


def test_neither_rows_are_rollouts_nor_a_packed_row_one_sequence():
    # Rollout 5 was cut in three rows of loss 1, rollout 6 is one row of loss 5: (1 + 5) / 2 = 3.
    # By rows: (1 + 1 + 1 + 5) / 4 = 2.
    loss, rollouts = rows([1, 1], [1, 1], [1, 1], [5, 5]), torch.tensor([5, 5, 5, 6])
    assert float(loss.mean(-1).mean()) == pytest.approx(2)
    found = ours("rollout_mean", torch.ones(4, 2), loss, {"rollout_ids": rollouts})
    assert found == pytest.approx(3)
    # Sequences of 1 token (loss 4) and 3 tokens (loss 1): (4 + 1) / 2 = 2.5. As one: 7 / 4 = 1.75.
    mask, loss, offsets = torch.ones(1, 4), rows([4, 1, 1, 1]), torch.tensor([0, 1, 4])
    assert ours("sample_mean", mask, loss) == pytest.approx(1.75)  # without the offsets
    assert ours("sample_mean", mask, loss, {"cu_seqlens": offsets.int()}) == pytest.approx(2.5)


def over_microbatches(mode: str, masks: list[Tensor], losses: list[Tensor], **ids: Any) -> float:
    inputs = [{name: x[i] for name, x in ids.items()} for i in range(len(masks))]
    step = [Microbatch(mask, **of_one) for mask, of_one in zip(masks, inputs, strict=True)]
    plan = StepPlan.build(LossAggregation(mode=mode), step)
    return sum(weighted_sum(plan.weights(k, dtype=F64), x).item() for k, x in enumerate(losses))


def test_the_number_of_ranks_does_not_divide_twice():
    # Two ranks of two samples: N = 4, and (1 + 2 + 3 + 4) / 4. A rank that divides by N * dp where
    # it should by N / dp, before ranks are averaged, is off by dp squared.
    losses, dp = [rows([1], [2]), rows([3], [4])], 2
    assert sum(x.sum().item() / (4 * dp) for x in losses) / dp == pytest.approx(2.5 / dp**2)
    found = over_microbatches("sample_mean", [torch.ones(2, 1)] * dp, losses)
    assert found == pytest.approx(2.5)


@pytest.mark.parametrize("unit", ["prompt", "rollout"])
def test_siblings_in_several_microbatches_share_a_denominator(unit):
    # Group 1 has 1 token (loss 8) in the first microbatch and 3 (loss 0) in the second; group 2
    # has 1 token (loss 2): (8 / 4 + 2) / 2 = 2. With denominators of each microbatch:
    # (8 + 0 + 2) / 2 = 5.
    masks = [rows([1, 0, 0]), rows([1, 1, 1], [1, 0, 0])]
    losses = [rows([8, 9, 9]), rows([0, 0, 0], [2, 9, 9])]
    alone = [((x * m).sum(-1) / m.sum(-1)).sum() for x, m in zip(losses, masks, strict=True)]
    assert sum(alone).item() / 2 == pytest.approx(5)
    ids = {f"{unit}_ids": [torch.tensor([1]), torch.tensor([1, 2])]}
    assert over_microbatches(f"{unit}_mean", masks, losses, **ids) == pytest.approx(2)


def plan_over_cp_ranks() -> tuple[float, float, float]:
    """First weight of this rank: whole masks counted over CP, whole masks, sharded masks."""
    mask, world = torch.ones(1, 8), dist.group.WORLD
    local = CPLayout.bshd(8, dist.get_world_size(), dist.get_rank()).shard(mask)
    with Operations() as made:
        alone = StepPlan.build(TOKEN_MEAN, [Microbatch(mask)])
    assert not made.collectives
    plans = [
        StepPlan.build(TOKEN_MEAN, [Microbatch(mask)], group=world),
        alone,
        StepPlan.build(TOKEN_MEAN, [Microbatch(local)], group=world, sharded_over=world),
    ]
    return tuple(plan.weights(0, dtype=F64)[0, 0].item() for plan in plans)


def test_whole_masks_are_not_counted_over_context_parallel_ranks():
    # 1/8 each. Counting the replicated mask over both ranks divides by c: 1/16.
    for counted_over_cp, whole, sharded in run_ranks(plan_over_cp_ranks, 2):
        assert counted_over_cp == pytest.approx(1 / 16)
        assert whole == sharded == pytest.approx(1 / 8)


def ones(tokens: int) -> Microbatch:
    return Microbatch(torch.ones(1, tokens, dtype=F64))


def test_a_second_loss_is_global_too():
    # Two microbatches of 1 and 3 tokens with losses 8 and 4: (8 + 3 * 4) / 4 = 5. A critic whose
    # mean is taken by microbatch gives (8 + 4) / 2 = 6.
    terms = {"policy": TOKEN_MEAN, "value": Term(TOKEN_MEAN, coefficient=0.5)}
    plans = StepPlan.build_terms(terms, [ones(1), ones(3)])
    losses = [torch.full((1, 1), 8.0, dtype=F64), torch.full((1, 3), 4.0, dtype=F64)]
    assert sum(x.mean().item() for x in losses) / 2 == 6
    value = sum((plans["value"].weights(i, F64) * x).sum().item() for i, x in enumerate(losses))
    assert value == pytest.approx(5, rel=1e-15)
    total = sum(plans.weighted_sum(i, dict.fromkeys(terms, x)) for i, x in enumerate(losses))
    assert total.item() == pytest.approx(1.5 * 5, rel=1e-15)


def test_the_window_is_the_optimizer_step_and_not_the_generation_batch():
    # 4 samples of 2 tokens, used in two optimizer steps of 2 samples. A token weighs 1 / 4 in its
    # step; by the tokens of the whole batch, 1 / 8.
    batch = [ones(2) for _ in range(4)]
    assert StepPlan.build(TOKEN_MEAN, batch).weights(0, F64).tolist() == [[1 / 8, 1 / 8]]
    for step in (batch[:2], batch[2:]):
        plan = StepPlan.build(TOKEN_MEAN, step)
        assert [plan.weights(i, F64).tolist() for i in range(2)] == [[[1 / 4, 1 / 4]]] * 2


def test_every_metric_has_its_own_denominator():
    # KL over 4 tokens, of which 1 has 8: 2. Rewards of 2 samples, 1 and 0: 1 / 2. Rescaled by one
    # scalar, tokens / samples = 2, the reward would be 1 or the KL 4.
    kl = Mean.of(torch.tensor([8.0, 0, 0, 0], dtype=F64), torch.ones(4, dtype=F64))
    reward = Mean.of(torch.tensor([1.0, 0], dtype=F64), torch.ones(2, dtype=F64))
    assert (reward.sum / reward.count * 2).item() == 1
    assert (kl.sum / reward.count).item() == 4
    assert reduce_reports([{"kl": kl, "reward": reward}], None) == {"kl": 2.0, "reward": 0.5}
