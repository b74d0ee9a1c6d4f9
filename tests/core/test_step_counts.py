"""Counts of the whole step beside its denominators, and what every rank must hear of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import AggregationError, LossAggregation, Microbatch, StepPlan
from tests.core.steps import aggregation
from tests.core.test_distributed import groups_of_rank
from tests.distributed import run_ranks

TOKEN_MEAN = aggregation("token_mean")


def of_shape(*shape: int, routed: int | None = None) -> Microbatch:
    return Microbatch(torch.ones(shape), routed_tokens=routed)


@pytest.mark.parametrize(
    ("step", "positions", "unequal"),
    [
        ([of_shape(2, 3), of_shape(3, 2)], 12, False),
        ([of_shape(2, 3), of_shape(2, 4)], 14, True),
        ([of_shape(2, 3, routed=5), of_shape(2, 4, routed=5)], 10, False),
        ([of_shape(2, 3, routed=5), of_shape(2, 3, routed=6)], 11, True),
        ([Microbatch(torch.zeros(7), torch.tensor([0, 3]))], 7, False),
        ([], 0, False),
    ],
)
def test_positions_are_routed_tokens_or_elements_of_masks(step, positions, unequal):
    counts = StepPlan.build(TOKEN_MEAN, step).counts
    assert (counts.positions, counts.unequal) == (positions, unequal)
    assert type(counts.positions) is int and type(counts.unequal) is bool


def test_of_mask_sums_no_positions_are_known():
    counts = StepPlan.from_mask_sums(TOKEN_MEAN, [[1.0], [2.0, 3.0]]).counts
    assert counts.positions is None and counts.unequal is False


def positions_on_ranks() -> list[Any]:
    """Of whole masks and of masks sharded over all ranks, with and without routed tokens."""
    world, rank = dist.group.WORLD, dist.get_rank()
    found = []
    for routed in (None, 9):
        # Ranks differ in their microbatches, but each has equal ones.
        equal = [of_shape(1, 2 + rank, routed=routed)] * (1 + rank)
        unequal = [of_shape(1, 2 + k * rank, routed=routed and routed + k * rank) for k in (0, 1)]
        for step in (equal, unequal):
            counts = StepPlan.build(TOKEN_MEAN, step, world).counts
            found.append((counts.positions, counts.unequal, counts.routed_tokens))
        part = [of_shape(1, 2, routed=routed), of_shape(1, 2, routed=routed)]
        counts = StepPlan.build(TOKEN_MEAN, part, world, sharded_over=world).counts
        found.append((counts.positions, counts.unequal, counts.routed_tokens))
    counts = StepPlan.from_mask_sums(TOKEN_MEAN, [[1.0], [2.0]], group=world).counts
    return [*found, (counts.positions, counts.unequal, counts.routed_tokens)]


def test_positions_are_those_of_all_ranks():
    elements = [(2 + 2 * 3, False, None), (2 + 2 + 2 + 3, True, None), (2 * 2 * 2, False, None)]
    routed = [(3 * 9, False, 3 * 9), (3 * 9 + 10, True, 3 * 9 + 10), (2 * 9, False, 2 * 9)]
    for found in run_ranks(positions_on_ranks, 2):
        assert found == [*elements, *routed, (None, False, None)]


# The mask of one sample and its weight, whose coefficient fp32 does not hold beside one of ones.
EXTREME = {
    "token_mean": (3e38, 1.0),
    "sample_mean": (1e-40, 1.0),
    "microbatch_mean": (1e-40, 1.0),
    "prompt_mean": (1e-40, 1.0),
    "sample_sum": (1.0, 1e-40),
}


def refusals_on_ranks() -> list[str]:
    """What this rank hears where one rank has each of `EXTREME`, of whole and of sharded masks."""
    heard, rank = [], dist.get_rank()
    _, cp_group, _, _ = groups_of_rank(1)
    for where, sharded_over in itertools.product(range(2), (None, cp_group)):
        for mode, extreme in EXTREME.items():
            mask, weight = extreme if rank == where else (1.0, 1.0)
            mine = Microbatch(
                torch.tensor([[mask]], dtype=torch.float64),
                prompt_ids=torch.tensor([rank]),
                sample_weights=torch.tensor([weight], dtype=torch.float64),
            )
            agg = aggregation(mode, sample_weights="skip")
            try:
                StepPlan.build(agg, [mine], dist.group.WORLD, sharded_over=sharded_over)
                heard.append("nothing")
            except AggregationError as error:
                heard.append(f"{type(error).__name__}: {error}")
    return heard


def test_every_rank_refuses_coefficients_that_fp32_does_not_hold_on_one():
    first, second = run_ranks(refusals_on_ranks, 2)
    assert first == second
    assert all(text.startswith("MaskError: the coefficients of samples") for text in first)


def sharded_on_one_rank_alone() -> str:
    one, _ = (dist.new_group([rank]) for rank in range(2))
    sharded_over = None if dist.get_rank() else one
    try:
        StepPlan.build(TOKEN_MEAN, [of_shape(1, 2)], dist.group.WORLD, sharded_over=sharded_over)
    except AggregationError as error:
        return str(error)
    return "nothing"


def test_ranks_that_are_told_different_things_of_their_masks_hear_of_it():
    for heard in run_ranks(sharded_on_one_rank_alone, 2):
        assert "or sharded masks on some of them alone; expected the same" in heard


BESIDE = [
    Microbatch(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), dataset_ids=torch.tensor([5, 5])),
    Microbatch(torch.tensor([[1.0, 0.0]]), dataset_ids=torch.tensor([5])),
]


def groups_beside(on_ranks: bool) -> list[Any]:
    """Sums by data set and by the mode's own unit, of `BESIDE` here or on a rank each."""
    found = []
    step, group = BESIDE, None
    if on_ranks:
        step, group = [BESIDE[dist.get_rank()]], dist.group.WORLD
    for unit in ("microbatch", "sample"):
        agg = LossAggregation(mode=f"{unit}_mean")
        plan = StepPlan.build_terms({"a": agg}, step, group, group_by=["dataset"])["a"]
        alone = StepPlan.build(agg, step, group)
        assert all(torch.equal(plan.weights(i), alone.weights(i)) for i in range(len(step)))
        sums = [plan.group_sums(unit, i).tolist() for i in range(len(step))]
        found.append((plan.groups("dataset")[1].tolist(), sums))
    return found


def test_groups_by_id_beside_a_mode_whose_groups_span_no_rank():
    assert groups_beside(on_ranks=False) == [([4], [[3, 3], [1]]), ([4], [[2, 1], [1]])]
    first, second = run_ranks(groups_beside, 2, True)
    assert first == [([4], [[3, 3]]), ([4], [[2, 1]])]
    assert second == [([4], [[1]]), ([4], [[1]])]
