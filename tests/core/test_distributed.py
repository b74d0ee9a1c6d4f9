"""StepPlan over data-parallel processes: counts cross ranks, nothing hangs, errors reach all."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import AggregationError, LossAggregation, Microbatch, StepPlan
from tests import oracle
from tests.core.ranks import (
    CONFIGS,
    HOLES,
    Collectives,
    assert_weights,
    divisor_of,
    fixed_step,
    random_step,
)
from tests.core.steps import lay
from tests.distributed import run_ranks
from tests.oracle import Step

F64 = torch.float64


def plan_every_mode(steps: list[Step]) -> list[list[tuple[Any, Any, int]]]:
    """On each rank: for every step and config its weights, its counts, its collectives."""
    rank = dist.get_rank()
    answers = []
    for n, step in enumerate(steps):
        answers.append([])
        laid = [lay(mb, ("thd_padded", "bshd")[(n + k) % 2]) for k, mb in enumerate(step[rank])]
        microbatches = [Microbatch(**x.inputs) for x in laid]
        for mode, empty in CONFIGS:
            agg = LossAggregation(mode=mode, divisor=divisor_of(mode), empty=empty)
            with Collectives() as collectives:
                plan = StepPlan.build(agg, microbatches, group=dist.group.WORLD)
                weights = [plan.weights(k, dtype=F64) for k in range(len(laid))]
            by_sample = [x.samples(w) for x, w in zip(laid, weights, strict=True)]
            answers[-1].append((by_sample, plan.counts, len(collectives.names)))
    return answers


STEPS = {
    2: [fixed_step(2), *HOLES, *(random_step(seed, 2) for seed in range(12))],
    4: [fixed_step(4), *(random_step(seed, 4) for seed in range(100, 108))],
}


@functools.cache
def planned(ranks: int) -> list[Any]:
    """The answers of ``plan_every_mode``, by rank; one run for all tests."""
    return run_ranks(plan_every_mode, ranks, STEPS[ranks], timeout=300.0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_are_exact_over_the_ranks(ranks):
    for n, step in enumerate(STEPS[ranks]):
        for c, (mode, empty) in enumerate(CONFIGS):
            expected = oracle.step_weights(mode, step, divisor=divisor_of(mode), empty=empty)
            for rank in range(ranks):
                assert_weights(planned(ranks)[rank][n][c][0], expected[rank])


@pytest.mark.parametrize("ranks", [2, 4])
def test_counts_are_of_the_whole_step_on_every_rank(ranks):
    for answers in planned(ranks):
        for step, per_config in zip(STEPS[ranks], answers, strict=True):
            values = [m for _, sample in oracle.samples_of(step) for m in sample.mask]
            for (mode, _), (_, counts, _) in zip(CONFIGS, per_config, strict=True):
                assert float(counts.tokens) == pytest.approx(sum(values), rel=1e-13)
                assert int(counts.active_tokens) == sum(1 for m in values if m)
                assert int(counts.samples) == oracle.number_of(step, "sample")
                assert int(counts.microbatches) == sum(len(rank) for rank in step)
                if mode == "prompt_mean":
                    assert int(counts.prompts) == oracle.number_of(step, "prompt")
                if mode == "rollout_mean":
                    assert int(counts.rollouts) == oracle.number_of(step, "rollout")


@pytest.mark.parametrize("ranks", [2, 4])
def test_at_most_two_collectives_a_step(ranks):
    for answers in planned(ranks):
        numbers = {number for per_config in answers for _, _, number in per_config}
        assert numbers <= {1, 2}  # 0 would mean that nothing was counted


def without_a_group() -> tuple[float, int]:
    with Collectives() as collectives:
        plan = StepPlan.build(LossAggregation(mode="token_mean"), [Microbatch(torch.ones(1, 4))])
    return float(plan.counts.tokens), len(collectives.names)


def test_without_a_group_a_rank_plans_alone():
    assert run_ranks(without_a_group, 2) == [(4.0, 0), (4.0, 0)]


DEFECTS = {  # and the error of the rank that has it
    "negative": "MaskError",
    "nan": "MaskError",
    "padding": "MaskError",
    "no ids": "GroupError",
    "offsets": "GroupError",
    "small": "MaskError",
    "no list": "MaskError",
    "no microbatch": "MaskError",
    "no aggregation": "ModeError",
    "no term": "ModeError",
    "no terms": "ModeError",
    "abandon": "abandoned",
    "none": "nothing",
}


def build_with_defects(where: int) -> list[tuple[str, str]]:
    """For each defect the error this rank sees when rank ``where`` has it."""
    ids = {"prompt_ids": torch.tensor([1, 2])}
    good = Microbatch(torch.ones(2, 3), **ids)
    bad = {
        "negative": Microbatch(-torch.ones(2, 3), **ids),
        "nan": Microbatch(torch.full((2, 3), torch.nan), **ids),
        "no ids": Microbatch(torch.ones(2, 3)),
        "padding": Microbatch(torch.ones(6), cu_seqlens=torch.tensor([0, 2, 5]), **ids),
        "offsets": Microbatch(torch.ones(6), cu_seqlens=torch.tensor([0, 7, 6]), **ids),
        "small": Microbatch(torch.full((2, 3), 1e-42), **ids),
        "no microbatch": torch.ones(2, 3),
        "none": good,
    }
    agg = LossAggregation(mode="prompt_mean")

    def outcome(defect: str) -> tuple[str, str]:
        try:
            if dist.get_rank() != where:
                StepPlan.build(agg, [good], group=dist.group.WORLD)
            elif defect == "abandon":
                StepPlan.abandon(dist.group.WORLD)
                return "abandoned", ""
            elif defect == "no list":
                StepPlan.build(agg, good, group=dist.group.WORLD)
            elif defect == "no aggregation":
                StepPlan.build("prompt_mean", [good], group=dist.group.WORLD)
            elif defect == "no term":
                StepPlan.build_terms({"loss": "prompt_mean"}, [good], group=dist.group.WORLD)
            elif defect == "no terms":
                StepPlan.build_terms({}, [good], group=dist.group.WORLD)
            else:
                StepPlan.build(agg, [good, bad[defect]], group=dist.group.WORLD)
        except AggregationError as error:
            return type(error).__name__, str(error)
        return "nothing", ""

    return [outcome(defect) for defect in DEFECTS]


def test_bad_input_on_one_rank_stops_every_rank():
    ranks, where = 3, 1
    for rank, outcomes in enumerate(run_ranks(build_with_defects, ranks, where, timeout=60.0)):
        for (defect, own), (name, text) in zip(DEFECTS.items(), outcomes, strict=True):
            if rank == where or defect == "none":
                assert name == own, defect
            else:
                assert name == "PeerError", defect
                assert str(where) in text  # which rank to look at
