"""Known defects of public systems that live in the pure core.

Each test pins the wrong number that the defect gives (a small function that has it), the right
number by hand, and shows that ours is the right one. Numbers are those of the trap list in docs.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import (
    CPLayout,
    LossAggregation,
    Microbatch,
    StepPlan,
    token_weights,
    weighted_sum,
)
from megatron_loss_agg.errors import DivisorError
from tests.distributed import run_ranks

F64 = torch.float64


def ours(mode: str, mask: torch.Tensor, loss: torch.Tensor, divisor=None, **inputs) -> float:
    agg = LossAggregation(mode=mode, divisor=divisor)
    return weighted_sum(token_weights(agg, mask, **inputs, dtype=F64), loss).item()


def over_microbatches(mode, masks, losses, divisor=None, ids=None, name="prompt_ids") -> float:
    ids = ids or [None] * len(masks)
    agg = LossAggregation(mode=mode, divisor=divisor)
    plan = StepPlan.build(
        agg, [Microbatch(mask, **{name: i}) for mask, i in zip(masks, ids, strict=True)]
    )
    parts = [weighted_sum(plan.weights(k, dtype=F64), loss) for k, loss in enumerate(losses)]
    return torch.stack(parts).sum().item()


def test_trap_1_phantom_tokens():
    # Three active tokens and two empty samples. Right: (2 + 3 + 7) / 3 = 4.
    mask = torch.tensor([[1.0, 1, 1], [0, 0, 0], [0, 0, 0]])
    loss = torch.tensor([[2.0, 3, 7], [9, 9, 9], [9, 9, 9]], dtype=F64)

    def clamped_for_each_sample() -> float:
        return ((loss * mask).sum() / mask.sum(-1).clamp(min=1).sum()).item()

    assert clamped_for_each_sample() == pytest.approx(12 / 5)  # T / (T + empties) of the right one
    assert ours("token_mean", mask, loss) == pytest.approx(4)


def test_trap_1_clamped_fractions():
    # M = 0.25 + 0.25 = 0.5 is a legal denominator: (0.25 * 2 + 0.25 * 6) / 0.5 = 4.
    mask, loss = torch.tensor([[0.25, 0.25]]), torch.tensor([[2.0, 6.0]], dtype=F64)
    assert ((loss * mask).sum() / mask.sum().clamp(min=1)).item() == pytest.approx(2)
    assert ours("token_mean", mask, loss) == pytest.approx(4)


def test_trap_2_dp_squared():
    # Two ranks of two samples: N = 4, sums 1 + 2 + 3 + 4. Right: 10 / 4.
    masks = [torch.ones(2, 1), torch.ones(2, 1)]
    losses = [torch.tensor([[1.0], [2.0]], dtype=F64), torch.tensor([[3.0], [4.0]], dtype=F64)]

    def denominator_times_dp(dp: int) -> float:
        """Each rank divides by N * dp where it should by N / dp; then the ranks are averaged."""
        return sum(loss.sum().item() / (4 * dp) for loss in losses) / dp

    assert denominator_times_dp(2) == pytest.approx(2.5 / 4)
    assert over_microbatches("sample_mean", masks, losses) == pytest.approx(2.5)


def test_trap_3_constant_divisor_without_the_number_of_samples():
    # D = 10, N = 2. Right: (1 + 2 + 3) / (2 * 10) = 0.3.
    mask = torch.tensor([[1.0, 1], [1, 0]])
    loss = torch.tensor([[1.0, 2], [3, 9]], dtype=F64)
    assert ((loss * mask).sum() / 10).item() == pytest.approx(0.6)
    assert ours("constant", mask, loss, divisor=10) == pytest.approx(0.3)


def test_trap_4_the_divisor_is_not_the_padded_width():
    # Right, with D = 10 and N = 1, in a batch of any width: (1 + 2) / 10 = 0.3.
    def batch(width: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask, loss = torch.zeros(1, width), torch.zeros(1, width, dtype=F64)
        mask[0, :2], loss[0, :2] = 1, torch.tensor([1.0, 2.0])
        return mask, loss

    def divided_by_width(width: int) -> float:
        mask, loss = batch(width)
        return ((loss * mask).sum() / mask.shape[-1]).item()

    assert divided_by_width(4) == pytest.approx(0.75)
    assert divided_by_width(8) == pytest.approx(0.375)
    for width in (4, 8):
        assert ours("constant", *batch(width), divisor=10) == pytest.approx(0.3)
    with pytest.raises(DivisorError):
        LossAggregation(mode="constant")


def test_trap_5_unmasked_numerator():
    # Right: (1 + 3) / 2 = 2.
    mask = torch.tensor([[1.0, 0, 1]])
    loss = torch.tensor([[1.0, 100, 3]], dtype=F64)
    assert (loss.sum() / mask.sum()).item() == pytest.approx(52)
    assert ours("token_mean", mask, loss) == pytest.approx(2)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_trap_6_nan_times_zero(poison):
    # Right: value (1 + 3) / 2 = 2, gradient 1/2 at the two active positions.
    mask = torch.tensor([[1.0, 0, 1]])

    def multiplied(w: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return (w * loss).sum()

    w = token_weights(LossAggregation(mode="token_mean"), mask, dtype=F64)
    for total_of, right in ((multiplied, False), (weighted_sum, True)):
        loss = torch.tensor([[1.0, poison, 3]], dtype=F64, requires_grad=True)
        total = total_of(w, loss)
        total.backward()
        assert math.isfinite(total.item()) is right
    assert total.item() == 2
    assert loss.grad.tolist() == [[0.5, 0, 0.5]]


def test_trap_9_shards_add_up_to_the_whole_and_not_to_cp_times_it():
    # M = 8 over two context-parallel ranks that both hold the whole mask. Right: weights sum to 1.
    mask, cp = torch.ones(1, 8), 2
    replicated_count = sum(mask.sum().item() for _ in range(cp))
    assert replicated_count == 16  # every token counted cp times
    w = token_weights(LossAggregation(mode="token_mean"), mask, dtype=F64)
    shards = [CPLayout.bshd(8, cp, rank).shard(w) for rank in range(cp)]
    assert [shard.sum().item() for shard in shards] == [0.5, 0.5]


def plan_over_cp_ranks() -> tuple[float, float, float]:
    """First weight of this rank: whole masks counted over CP, whole masks, sharded masks."""
    agg, mask, world = LossAggregation(mode="token_mean"), torch.ones(1, 8), dist.group.WORLD
    local = CPLayout.bshd(8, dist.get_world_size(), dist.get_rank()).shard(mask)
    plans = [
        StepPlan.build(agg, [Microbatch(mask)], group=world),
        StepPlan.build(agg, [Microbatch(mask)]),
        StepPlan.build(agg, [Microbatch(local)], group=world, sharded_over=world),
    ]
    return tuple(plan.weights(0, dtype=F64)[0, 0].item() for plan in plans)


def test_trap_9_whole_masks_are_not_counted_over_cp():
    # Right: 1/8. Counting the replicated mask over both ranks divides by c: 1/16.
    for counted_over_cp, whole, sharded in run_ranks(plan_over_cp_ranks, 2):
        assert counted_over_cp == pytest.approx(1 / 16)
        assert whole == sharded == pytest.approx(1 / 8)


def test_trap_18_rows_are_not_rollouts():
    # Rollout 5 was cut in three rows of loss 1, rollout 6 is one row of loss 5.
    # Right: (1 + 5) / 2 = 3. By rows: (1 + 1 + 1 + 5) / 4 = 2.
    mask = torch.ones(4, 2)
    loss = torch.tensor([[1.0, 1], [1, 1], [1, 1], [5, 5]], dtype=F64)
    rollouts = torch.tensor([5, 5, 5, 6])
    assert loss.mean(-1).mean().item() == pytest.approx(2)
    assert ours("rollout_mean", mask, loss, rollout_ids=rollouts) == pytest.approx(3)


@pytest.mark.parametrize(
    ("mode", "name"), [("prompt_mean", "prompt_ids"), ("rollout_mean", "rollout_ids")]
)
def test_trap_19_siblings_in_several_microbatches_share_a_denominator(mode, name):
    # Group 1 has 1 token (loss 8) in the first microbatch and 3 (loss 0) in the second; group 2
    # has 1 token (loss 2). Right: (8 / 4 + 2) / 2 = 2.
    masks = [torch.tensor([[1.0, 0, 0]]), torch.tensor([[1.0, 1, 1], [1, 0, 0]])]
    losses = [
        torch.tensor([[8.0, 9, 9]], dtype=F64),
        torch.tensor([[0.0, 0, 0], [2, 9, 9]], dtype=F64),
    ]
    ids = [torch.tensor([1]), torch.tensor([1, 2])]

    def denominators_for_each_microbatch() -> float:
        total = 0.0
        for mask, loss, group in zip(masks, losses, ids, strict=True):
            for g in group.unique():
                rows = group == g
                total += ((loss * mask)[rows].sum() / mask[rows].sum()).item()
        return total / 2

    assert denominators_for_each_microbatch() == pytest.approx((8 + 0 + 2) / 2)
    assert over_microbatches(mode, masks, losses, ids=ids, name=name) == pytest.approx(2)


def test_trap_20_rejected_samples_are_a_choice():
    # One of two samples is masked out. Count all: 6 / 2 = 3; survivors: 6 / 1 = 6.
    mask = torch.tensor([[1.0, 1], [0, 0]])
    loss = torch.tensor([[6.0, 6], [9, 9]], dtype=F64)
    assert ours("sample_mean", mask, loss) == pytest.approx(3)
    survivors = LossAggregation(mode="sample_mean", empty="skip")
    assert weighted_sum(token_weights(survivors, mask, dtype=F64), loss).item() == pytest.approx(6)


def test_trap_21_a_rank_without_loss_tokens_keeps_its_autograd_path():
    parameter = torch.ones(4, dtype=F64, requires_grad=True)
    loss, mask = parameter * 2, torch.zeros(1, 4)

    def early_return() -> torch.Tensor:
        return torch.zeros(()) if not mask.any() else (loss * mask).sum() / mask.sum()

    assert early_return().grad_fn is None  # backward never reaches the attention's collectives
    w = token_weights(LossAggregation(mode="token_mean"), mask, dtype=F64)
    total = weighted_sum(w, loss.unsqueeze(0))
    assert total.item() == 0
    total.backward()
    assert parameter.grad.tolist() == [0.0] * 4


def test_trap_22_a_step_without_any_token_has_weights_zero_and_says_so():
    mask = torch.zeros(1, 3)
    assert math.isnan((torch.zeros(3).sum() / mask.sum()).item())
    plan = StepPlan.build(LossAggregation(mode="token_mean"), [Microbatch(mask)])
    assert plan.weights(0).tolist() == [[0.0, 0.0, 0.0]]
    assert int(plan.counts.active_tokens) == 0


def test_trap_26_a_packed_row_is_not_one_sequence():
    # Sequences of 1 token (loss 4) and 3 tokens (loss 1). Right: (4 + 1) / 2 = 2.5.
    # As one sequence: (4 + 1 + 1 + 1) / 4 = 1.75.
    mask, loss = torch.ones(1, 4), torch.tensor([[4.0, 1, 1, 1]], dtype=F64)
    assert ours("sample_mean", mask, loss) == pytest.approx(1.75)  # without the offsets
    packed = ours("sample_mean", mask, loss, cu_seqlens=torch.tensor([0, 1, 4], dtype=torch.int32))
    assert packed == pytest.approx(2.5)


def test_trap_26_fractions_are_not_cut_off():
    # Right: (0.5 * 2 + 1 * 5) / 1.5 = 4. Through an integer mask: 5 / 1 = 5.
    mask, loss = torch.tensor([[0.5, 1.0]]), torch.tensor([[2.0, 5.0]], dtype=F64)
    cut = mask.long()
    assert ((loss * cut).sum() / cut.sum()).item() == pytest.approx(5)
    assert ours("token_mean", mask, loss) == pytest.approx(4)


def test_trap_26_counts_above_int32():
    # 3 * 2**30 is beyond int32 (and beyond what fp32 counts one by one).
    mask = torch.full((1, 3), 2**30, dtype=torch.int32)
    assert mask.sum(dtype=torch.int32).item() < 0
    plan = StepPlan.build(LossAggregation(mode="token_mean"), [Microbatch(mask)])
    assert float(plan.counts.tokens) == 3 * 2**30
    assert plan.weights(0, dtype=F64)[0, 0].item() == pytest.approx(1 / 3, rel=1e-15)


def test_trap_26_a_count_of_odd_tokens_beyond_fp32():
    # 2**24 + 1 is the first count that fp32 cannot hold.
    masks = [torch.full((1, 1), 2.0**24), torch.ones(1, 1)]
    assert torch.tensor([2.0**24, 1.0]).sum().item() == 2**24
    plan = StepPlan.build(LossAggregation(mode="token_mean"), [Microbatch(m) for m in masks])
    assert float(plan.counts.tokens) == 2**24 + 1
