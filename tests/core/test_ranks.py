"""Over processes: every rank plans its part of the whole step, in at most two collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import CPLayout, Microbatch, StepPlan
from tests import oracle
from tests.core.operations import Operations
from tests.core.steps import (
    CONFIGS,
    HOLES,
    Laid,
    aggregation,
    assert_counts,
    assert_weights,
    cp_layout,
    expected_weights,
    fixed_step,
    lay,
    random_step,
    weighted,
)
from tests.distributed import run_ranks
from tests.oracle import Step

F64 = torch.float64
OPTIONS = [
    (mode, {"empty": empty, "sample_weights": choice})
    for mode, empty in CONFIGS
    for choice in ("count", "skip")
]
TERMS = {str(n): aggregation(mode, **options) for n, (mode, options) in enumerate(OPTIONS)}
HERE = [*HOLES, *(weighted(step, n) for n, step in enumerate(HOLES))]
# Data-parallel and context-parallel ranks, and steps.
CASES = {
    "2": (2, 1, [fixed_step(2), *(random_step(seed, 2) for seed in range(4))]),
    "4": (4, 1, [fixed_step(4), *(weighted(random_step(seed, 4)) for seed in range(100, 104))]),
    "2 times 2": (
        2,
        2,
        [fixed_step(2), *HERE, *(random_step(seed, 2) for seed in range(200, 206))],
    ),
}


def sharded(inputs: dict[str, Any], layout: CPLayout) -> Microbatch:
    """The microbatch as this rank sees it: local mask, local offsets, same samples."""
    local = {**inputs, "loss_mask": layout.shard(inputs["loss_mask"])}
    if "cu_seqlens" in inputs:
        local["cu_seqlens"] = local.pop("cu_seqlens_padded", inputs["cu_seqlens"]) // layout.cp_size
    return Microbatch(**local)


def from_sums_alone(n: int, laid: list[Laid], group: Any) -> StepPlan:
    """The plan of one term, from what a controller knows of the samples."""
    names = [f"{unit}_ids" for unit in ("prompt", "rollout", "dataset")]
    of: dict[str, Any] = {name: [x.inputs[name] for x in laid] for name in names}
    ones = [torch.ones(len(x.index), dtype=F64) for x in laid]
    of["sample_weights"] = [
        x.inputs.get("sample_weights", one) for x, one in zip(laid, ones, strict=True)
    ]
    sums = [Microbatch(**x.inputs) for x in laid]
    sums = [
        StepPlan.build(aggregation("sum", sample_weights="skip"), [m]).mask_sums(0) for m in sums
    ]
    return StepPlan.from_mask_sums(TERMS[str(n)], sums, **of, group=group)


def plan_on_ranks(steps: list[Step], cp: int) -> list[dict[str, Any]]:
    """For every step what this rank's plans say, of whole masks and of masks sharded over CP."""
    rank, world, answers = dist.get_rank(), dist.get_world_size(), []
    # Context-parallel ranks are neighbours.
    cp_group = [dist.new_group([*range(a, a + cp)]) for a in range(0, world, cp)][rank // cp]
    dp_group = [dist.new_group([*range(c, world, cp)]) for c in range(cp)][rank % cp]
    for n, step in enumerate(steps):
        laid = [lay(mb, ("thd", "bshd")[n % 2], multiple=2 * cp) for mb in step[rank // cp]]
        maps = [cp_layout(x.inputs, cp, rank % cp) for x in laid]
        wholes = [Microbatch(**x.inputs) for x in laid]
        parts = [sharded(x.inputs, m) for x, m in zip(laid, maps, strict=True)]
        with Operations() as made:
            whole = StepPlan.build_terms(TERMS, wholes, dp_group, group_by=["dataset"])
        part = StepPlan.build_terms(TERMS, parts, dist.group.WORLD, sharded_over=cp_group)
        with Operations() as made_alone:
            alone = StepPlan.build(TERMS[str(n)], wholes, dp_group)
        of_sums = from_sums_alone(n, laid, dp_group)
        for k in range(len(laid)):
            assert torch.equal(alone.weights(k, F64), whole[str(n)].weights(k, F64))
            close = {"rtol": 1e-13, "atol": 0}
            torch.testing.assert_close(of_sums.coefficients(k), alone.coefficients(k), **close)
        found: dict[str, Any] = {
            "collectives": (len(made.collectives), len(made_alone.collectives))
        }
        for name in TERMS:
            weights = [whole[name].weights(k, F64) for k in range(len(laid))]
            unit = TERMS[name].within
            found[name] = {
                "weights": [x.samples(w) for x, w in zip(laid, weights, strict=True)],
                "shards": [m.shard(w).tolist() for m, w in zip(maps, weights, strict=True)],
                "sharded": [part[name].weights(k, F64).tolist() for k in range(len(laid))],
                "counts": (whole[name].counts, part[name].counts),
                "sums": unit
                and [whole[name].group_sums(unit, k).tolist() for k in range(len(laid))],
                "datasets": [x.tolist() for x in whole[name].groups("dataset")],
            }
        answers.append(found)
    return answers


@pytest.mark.parametrize("case", CASES)
def test_every_rank_plans_its_part_of_the_whole_step_in_at_most_two_collectives(case):
    dp, cp, steps = CASES[case]
    for rank, answers in enumerate(run_ranks(plan_on_ranks, dp * cp, steps, cp, timeout=300.0)):
        for step, found in zip(steps, answers, strict=True):
            assert {1, 2} >= {*found["collectives"]}  # 0 would mean that nothing was counted
            for name, (mode, options) in zip(TERMS, OPTIONS, strict=True):
                assert_term(found[name], step, rank // cp, mode, options)


def assert_term(
    found: dict[str, Any], step: Step, rank: int, mode: str, options: dict[str, str]
) -> None:
    """What a rank's plan says of one term against the oracle."""
    assert_weights(found["weights"], expected_weights(mode, step, **options)[rank])
    assert_weights(found["sharded"], found["shards"])
    for counts in found["counts"]:
        assert_counts(counts, step, mode)
    of_sets = oracle.mask_sums(step, "dataset")
    ids, sums = found["datasets"]
    assert ids == sorted(of_sets)
    assert sums == pytest.approx([of_sets[x] for x in ids], rel=1e-13)
    if (unit := oracle.INNER[mode]) is not None:
        of_unit = oracle.mask_sums(step, unit)
        wanted = [
            [of_unit[oracle.key_of(unit, (rank, k, s), sample)] for s, sample in enumerate(mb)]
            for k, mb in enumerate(step[rank])
        ]
        assert_weights(found["sums"], wanted)


def of_shape(*shape: int, routed: int | None = None) -> Microbatch:
    return Microbatch(torch.ones(shape), routed_tokens=routed)


def positions(step: list[Microbatch], group: Any = None, **options: Any) -> tuple[Any, ...]:
    counts = StepPlan.build(aggregation("token_mean"), step, group, **options).counts
    return counts.positions, counts.unequal, counts.routed_tokens


def test_positions_are_routed_tokens_or_elements_of_masks():
    assert positions([of_shape(2, 3), of_shape(3, 2)]) == (12, False, None)
    assert positions([of_shape(2, 3), of_shape(2, 4)]) == (14, True, None)
    assert positions([of_shape(2, 3, routed=5), of_shape(2, 4, routed=5)]) == (10, False, 10)
    assert positions([of_shape(2, 3, routed=5), of_shape(2, 3, routed=6)]) == (11, True, 11)
    assert positions([Microbatch(torch.zeros(7), torch.tensor([0, 3]))]) == (7, False, None)
    assert positions([])[:2] == (0, False)
    of_sums = StepPlan.from_mask_sums(aggregation("token_mean"), [[1.0], [2.0, 3.0]]).counts
    assert (of_sums.positions, of_sums.unequal) == (None, False)


def positions_on_ranks() -> list[Any]:
    """Of whole masks and of masks sharded over all ranks, with and without routed tokens."""
    world, rank, found = dist.group.WORLD, dist.get_rank(), []
    for routed in (None, 9):
        # Ranks differ in their microbatches, but each has equal ones.
        found.append(positions([of_shape(1, 2 + rank, routed=routed)] * (1 + rank), world))
        more = [0, rank]
        step = [of_shape(1, 2 + k, routed=routed and routed + k) for k in more]
        found.append(positions(step, world))
        found.append(positions([of_shape(1, 2, routed=routed)] * 2, world, sharded_over=world))
    # Of one rank alone: (1 + 2 + 1 + 1) / 4.
    weights = torch.tensor([1.0, 2.0]) if rank == 0 else None
    agg = aggregation("token_mean", sample_weights="count")
    mine = Microbatch(torch.ones(2, 3), sample_weights=weights)
    return [*found, StepPlan.build(agg, [mine], world).counts.across]


def test_positions_and_sample_weights_are_those_of_all_ranks():
    elements = [(2 + 2 * 3, False, None), (2 + 2 + 2 + 3, True, None), (2 * 2 * 2, False, None)]
    routed = [(3 * 9, False, 3 * 9), (3 * 9 + 10, True, 3 * 9 + 10), (2 * 9, False, 2 * 9)]
    for found in run_ranks(positions_on_ranks, 2):
        assert found == [*elements, *routed, 1.25]


def unshard_and_pull_back() -> None:
    """For every layout: the shards make the whole, and the gradient of this rank's is right."""
    rank, offsets = dist.get_rank(), torch.tensor([0, 4, 4, 16])
    for layout, dim in (
        (CPLayout.bshd(16, 2, rank), -1),
        (CPLayout.thd(offsets, 2, rank), 0),
        (CPLayout.contiguous(16, 2, rank), -1),
    ):
        x = torch.arange(32.0, dtype=F64).reshape((2, 16) if dim == -1 else (16, 2))
        handed_back = [(x + 1) ** (1 + r) for r in range(2)]  # by each rank, for the whole
        local = layout.shard(x, dim=dim).requires_grad_()
        whole = layout.unshard(local, group=dist.group.WORLD, dim=dim)
        (whole * handed_back[rank]).sum().backward()
        assert torch.equal(whole, x)
        assert torch.equal(local.grad, layout.shard(sum(handed_back), dim=dim))


def test_the_gradient_of_joined_shards_is_summed_over_ranks():
    # Every rank's result depends on every rank's shard, so a shard's gradient is the sum over
    # ranks of what they hand back for its positions; averaging or keeping one's own is wrong.
    run_ranks(unshard_and_pull_back, 2)
