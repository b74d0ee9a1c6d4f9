"""Over processes: counts cross data-parallel and context-parallel ranks, and errors reach all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import AggregationError, CPLayout, Microbatch, StepPlan
from tests.core.operations import Operations
from tests.core.steps import (
    CONFIGS,
    HOLES,
    aggregation,
    assert_counts,
    assert_weights,
    cp_layout,
    expected_weights,
    fixed_step,
    lay,
    random_step,
)
from tests.distributed import run_ranks
from tests.oracle import Step

F64 = torch.float64


def plan_every_mode(steps: list[Step]) -> list[Any]:
    """On each rank: for every step and config its weights, counts and collectives."""
    answers: list[Any] = []
    for n, step in enumerate(steps):
        answers.append([])
        of_rank = step[dist.get_rank()]
        laid = [lay(mb, ("thd_padded", "bshd")[(n + k) % 2]) for k, mb in enumerate(of_rank)]
        microbatches = [Microbatch(**x.inputs) for x in laid]
        for mode, empty in CONFIGS:
            with Operations() as made:
                plan = StepPlan.build(
                    aggregation(mode, empty=empty), microbatches, group=dist.group.WORLD
                )
                weights = [plan.weights(k, dtype=F64) for k in range(len(laid))]
            by_sample = [x.samples(w) for x, w in zip(laid, weights, strict=True)]
            answers[-1].append((by_sample, plan.counts, len(made.collectives)))
    return answers


STEPS = {
    2: [fixed_step(2), *HOLES, *(random_step(seed, 2) for seed in range(8))],
    4: [fixed_step(4), *(random_step(seed, 4) for seed in range(100, 105))],
}


@pytest.mark.parametrize("ranks", STEPS)
def test_weights_and_counts_are_of_the_whole_step_in_at_most_two_collectives(ranks):
    answers = run_ranks(plan_every_mode, ranks, STEPS[ranks], timeout=300.0)
    for n, step in enumerate(STEPS[ranks]):
        for c, (mode, empty) in enumerate(CONFIGS):
            expected = expected_weights(mode, step, empty=empty)
            for rank in range(ranks):
                weights, counts, collectives = answers[rank][n][c]
                assert_weights(weights, expected[rank])
                assert_counts(counts, step, mode)
                assert collectives in (1, 2)  # 0 would mean that nothing was counted


IDS = {"prompt_ids": torch.tensor([1, 2])}
GOOD = Microbatch(torch.ones(2, 3), **IDS)
AGG = aggregation("prompt_mean")


def build(*microbatches: Any) -> Callable[[Any], Any]:
    return lambda group: StepPlan.build(AGG, [GOOD, *microbatches], group=group)


# What the rank does that has the defect, and the error that it sees.
DEFECTS: dict[str, tuple[Callable[[Any], Any] | None, str]] = {
    "negative": (build(Microbatch(-torch.ones(2, 3), **IDS)), "MaskError"),
    "nan": (build(Microbatch(torch.full((2, 3), torch.nan), **IDS)), "MaskError"),
    "padding": (build(Microbatch(torch.ones(6), torch.tensor([0, 2, 5]), **IDS)), "MaskError"),
    "no ids": (build(Microbatch(torch.ones(2, 3))), "GroupError"),
    "offsets": (build(Microbatch(torch.ones(6), torch.tensor([0, 7, 6]), **IDS)), "GroupError"),
    "no microbatch": (build(torch.ones(2, 3)), "MaskError"),
    "no list": (lambda group: StepPlan.build(AGG, GOOD, group=group), "MaskError"),
    "no mode": (lambda group: StepPlan.build("prompt_mean", [GOOD], group=group), "ModeError"),
    "no term": (lambda group: StepPlan.build_terms({"a": "sum"}, [GOOD], group=group), "ModeError"),
    "no terms": (lambda group: StepPlan.build_terms({}, [GOOD], group=group), "ModeError"),
    "term without a mask": (
        lambda group: StepPlan.build_terms({"a": AGG, "b": AGG}, [{"a": GOOD}], group=group),
        "MaskError",
    ),
    "abandoned": (StepPlan.abandon, "nothing"),
    "none": (None, "nothing"),
}


def build_with_defects(where: int, several_terms: bool) -> list[tuple[str, str]]:
    """For each defect the error this rank sees when rank ``where`` has it."""
    world = dist.group.WORLD

    def outcome(defect: Callable[[Any], Any] | None) -> tuple[str, str]:
        try:
            if defect and dist.get_rank() == where:
                defect(world)
            elif several_terms:
                terms = {"a": AGG, "b": aggregation("token_mean")}
                StepPlan.build_terms(terms, [GOOD], group=world)
            else:
                StepPlan.build(AGG, [GOOD], group=world)
        except AggregationError as error:
            return type(error).__name__, str(error)
        return "nothing", ""

    return [outcome(defect) for defect, _ in DEFECTS.values()]


@pytest.mark.parametrize("several_terms", [False, True])
def test_bad_input_on_one_rank_stops_every_rank(several_terms):
    ranks, where = 3, 1
    answers = run_ranks(build_with_defects, ranks, where, several_terms, timeout=60.0)
    for rank, outcomes in enumerate(answers):
        for (defect, (_, own)), (name, text) in zip(DEFECTS.items(), outcomes, strict=True):
            if rank == where or defect == "none":
                assert name == own, defect
            else:
                assert name == "PeerError", defect
                assert f"rank(s) [{where}]" in text  # which rank to look at


def groups_of_rank(cp: int) -> tuple[Any, Any, int, int]:
    """(data-parallel group without CP, CP group, dp rank, cp rank); CP ranks are neighbours."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cp_groups = [dist.new_group(list(range(a, a + cp))) for a in range(0, world, cp)]
    dp_groups = [dist.new_group(list(range(c, world, cp))) for c in range(cp)]
    return dp_groups[rank % cp], cp_groups[rank // cp], rank // cp, rank % cp


def laid_out(microbatches: Any, layout: str, cp: int, cp_rank: int) -> tuple[list[Any], ...]:
    """This rank's microbatches: as laid out, their shards' maps, whole, and in shards."""
    laid = [lay(mb, layout, multiple=2 * cp) for mb in microbatches]
    maps = [cp_layout(x.inputs, cp, cp_rank) for x in laid]
    wholes = [Microbatch(**x.inputs) for x in laid]
    parts = [sharded(x.inputs, m) for x, m in zip(laid, maps, strict=True)]
    return laid, maps, wholes, parts


def plan_over_cp(steps: list[Step], cp: int) -> list[Any]:
    """For every step and config: what the oracle is to be compared with."""
    dp_group, cp_group, dp_rank, cp_rank = groups_of_rank(cp)
    answers = []
    for n, step in enumerate(steps):
        laid, maps, wholes, parts = laid_out(step[dp_rank], ("thd", "bshd")[n % 2], cp, cp_rank)
        answers.append([])
        for mode, empty in CONFIGS:
            agg = aggregation(mode, empty=empty)
            whole = StepPlan.build(agg, wholes, group=dp_group)
            with Operations() as made:
                part = StepPlan.build(agg, parts, group=dist.group.WORLD, sharded_over=cp_group)
            weights = [whole.weights(k, dtype=F64) for k in range(len(laid))]
            by_sample = [x.samples(w) for x, w in zip(laid, weights, strict=True)]
            shards = [m.shard(w).tolist() for m, w in zip(maps, weights, strict=True)]
            of_parts = [part.weights(k, dtype=F64).tolist() for k in range(len(laid))]
            counts = (whole.counts, part.counts)
            answers[-1].append((by_sample, shards, of_parts, counts, len(made.collectives)))
    return answers


def sharded(inputs: dict[str, Any], layout: CPLayout) -> Microbatch:
    """The microbatch as this rank sees it: local mask, local offsets, same samples."""
    local = {**inputs, "loss_mask": layout.shard(inputs["loss_mask"])}
    if "cu_seqlens" in inputs:
        local["cu_seqlens"] = local.pop("cu_seqlens_padded", inputs["cu_seqlens"]) // layout.cp_size
    return Microbatch(**local)


def test_whole_and_sharded_masks_give_the_same_weights_and_counts():
    cp, dp = 2, 2
    steps = [fixed_step(dp), fixed_step(dp), *HOLES, *(random_step(s, dp) for s in range(200, 208))]
    answers = run_ranks(plan_over_cp, dp * cp, steps, cp, timeout=300.0)
    for n, step in enumerate(steps):
        for c, (mode, empty) in enumerate(CONFIGS):
            expected = expected_weights(mode, step, empty=empty)
            for rank in range(dp * cp):
                by_sample, shards, of_parts, counts, collectives = answers[rank][n][c]
                assert_weights(by_sample, expected[rank // cp])
                assert_weights(of_parts, shards)
                for of_masks in counts:
                    assert_counts(of_masks, step, mode)
                assert 1 <= collectives <= 2


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


def test_unshard_gradient_is_the_adjoint():
    # Every rank's result depends on every rank's shard, so a shard's gradient is the sum over
    # ranks of what they hand back for its positions; averaging or keeping one's own is wrong.
    run_ranks(unshard_and_pull_back, 2)
