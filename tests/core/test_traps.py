"""Known defects of public systems, each pinned beside the right number.

Every row derives both by hand. Defects of the scaling by a host are in tests/host/test_traps.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg import CPLayout, LossAggregation, Microbatch, StepPlan, Term, weighted_sum
from megatron_loss_agg.report import Mean, reduce_reports
from tests.distributed import run_ranks

F64 = torch.float64
TOKEN_MEAN = LossAggregation(mode="token_mean")


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=F64)


def mode(name: str, **options: Any) -> LossAggregation:
    return LossAggregation(mode=name, **options)


MASK, LOSS = rows([1, 1], [1, 0]), rows([1, 2], [3, 9])
# An aggregation, the right loss and the wrong one; mask, losses, ids and offsets by microbatch.
TRAPS: dict[str, tuple[LossAggregation, float, float, list[Any]]] = {
    # M = 0.25 + 0.25 = 0.5: (0.25 * 2 + 0.25 * 6) / 0.5 = 4. Over max(M, 1): 2.
    "a fraction clamped to 1": (TOKEN_MEAN, 4, 2, [(rows([0.25, 0.25]), rows([2, 6]), {})]),
    # D = 10, N = 2: (1 + 2 + 3) / (2 * 10) = 0.3. Without N: 0.6.
    "a constant without N": (mode("constant", divisor=10), 0.3, 0.6, [(MASK, LOSS, {})]),
    # The same, padded to 4 tokens: 6 / (2 * 4) = 0.75 with that width for the divisor.
    "the padded width for a divisor": (
        *(mode("constant", divisor=10), 0.3, 0.75),
        [(pad(MASK, (0, 2)), pad(LOSS, (0, 2), value=9), {})],
    ),
    # Rollout 5 was cut in three rows of loss 1, rollout 6 is one row of loss 5: (1 + 5) / 2 = 3.
    # By rows: (1 + 1 + 1 + 5) / 4 = 2.
    "rows counted for rollouts": (
        *(mode("rollout_mean"), 3, 2),
        [(torch.ones(4, 1), rows([1], [1], [1], [5]), {"rollout_ids": torch.tensor([5, 5, 5, 6])})],
    ),
    # Sequences of 1 token (loss 4) and 3 tokens (loss 1): (4 + 1) / 2 = 2.5. As one: 7 / 4 = 1.75.
    "a packed row taken for one sequence": (
        *(mode("sample_mean"), 2.5, 1.75),
        [(torch.ones(1, 4), rows([4, 1, 1, 1]), {"cu_seqlens": torch.tensor([0, 1, 4])})],
    ),
    # Prompt 1 has 1 token (loss 8) in the first microbatch and 3 (loss 0) in the second; prompt 2
    # has 1 token (loss 2): (8 / 4 + 2) / 2 = 2. With denominators of each microbatch:
    # (8 + 0 + 2) / 2 = 5.
    "siblings counted by microbatch": (
        *(mode("prompt_mean"), 2, 5),
        [
            (rows([1, 0, 0]), rows([8, 9, 9]), {"prompt_ids": torch.tensor([1])}),
            (
                rows([1, 1, 1], [1, 0, 0]),
                rows([0, 0, 0], [2, 9, 9]),
                {"prompt_ids": torch.tensor([1, 2])},
            ),
        ],
    ),
    # Microbatches of 1 and 3 tokens with losses 8 and 4: (8 + 3 * 4) / 4 = 5, and not
    # (8 + 4) / 2 = 6.
    "a second loss by microbatch": (
        *(TOKEN_MEAN, 5, 6),
        [(torch.ones(1, n), torch.full((1, n), x), {}) for n, x in ((1, 8.0), (3, 4.0))],
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_the_loss_is_the_right_one_and_not_that_of_the_defect(name: str) -> None:
    aggregation, right, wrong, step = TRAPS[name]
    terms = {"policy": TOKEN_MEAN, "second": Term(aggregation, coefficient=0.5)}
    plan = StepPlan.build_terms(terms, [Microbatch(mask, **ids) for mask, _, ids in step])["second"]
    found = sum(weighted_sum(plan.weights(i, F64), x) for i, (_, x, _) in enumerate(step)).item()
    assert found == pytest.approx(right) != pytest.approx(wrong)


def plan_over_cp_ranks() -> tuple[float, float, float]:
    """First weight of this rank: whole masks counted over CP, whole masks, sharded masks."""
    mask, world = torch.ones(1, 8), dist.group.WORLD
    local = CPLayout.bshd(8, dist.get_world_size(), dist.get_rank()).shard(mask)
    plans = [
        StepPlan.build(TOKEN_MEAN, [Microbatch(mask)], group=world),
        StepPlan.build(TOKEN_MEAN, [Microbatch(mask)]),
        StepPlan.build(TOKEN_MEAN, [Microbatch(local)], group=world, sharded_over=world),
    ]
    return tuple(plan.weights(0, dtype=F64)[0, 0].item() for plan in plans)


def test_whole_masks_are_not_counted_over_context_parallel_ranks():
    # 1/8 each. Counting the replicated mask over both ranks divides by c: 1/16.
    for counted_over_cp, whole, sharded in run_ranks(plan_over_cp_ranks, 2):
        assert counted_over_cp == pytest.approx(1 / 16)
        assert whole == sharded == pytest.approx(1 / 8)


def test_the_window_is_the_optimizer_step_and_not_the_generation_batch():
    # 4 samples of 2 tokens, used in two optimizer steps of 2 samples. A token weighs 1 / 4 in its
    # step; by the tokens of the whole batch, 1 / 8.
    batch = [Microbatch(torch.ones(1, 2)) for _ in range(4)]
    assert StepPlan.build(TOKEN_MEAN, batch).weights(0, F64).tolist() == [[1 / 8, 1 / 8]]
    assert StepPlan.build(TOKEN_MEAN, batch[2:]).weights(1, F64).tolist() == [[1 / 4, 1 / 4]]


def test_every_metric_has_its_own_denominator():
    # KL over 4 tokens, of which 1 has 8: 2. Rewards of 2 samples, 1 and 0: 1 / 2. Rescaled by one
    # scalar, tokens / samples = 2, the reward would be 1 or the KL 4.
    kl = Mean.of(torch.tensor([8.0, 0, 0, 0], dtype=F64), torch.ones(4, dtype=F64))
    reward = Mean.of(torch.tensor([1.0, 0], dtype=F64), torch.ones(2, dtype=F64))
    assert reduce_reports([{"kl": kl, "reward": reward}], None) == {"kl": 2.0, "reward": 0.5}
