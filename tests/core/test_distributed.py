"""StepPlan over processes: counts cross ranks, nothing hangs, errors reach all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import AggregationError, Microbatch, StepPlan
from tests.core.operations import Operations
from tests.core.steps import (
    CONFIGS,
    HOLES,
    aggregation,
    assert_counts,
    assert_weights,
    expected_weights,
    fixed_step,
    lay,
    random_step,
)
from tests.distributed import run_ranks
from tests.oracle import Step

F64 = torch.float64


def plan_every_mode(steps: list[Step]) -> tuple[list[Any], list[Any]]:
    """On each rank: for every step and config its weights, counts and collectives.

    And for every step what a plan of the first config without a group counts.
    """
    rank = dist.get_rank()
    answers, alone = [], []
    for n, step in enumerate(steps):
        answers.append([])
        laid = [lay(mb, ("thd_padded", "bshd")[(n + k) % 2]) for k, mb in enumerate(step[rank])]
        microbatches = [Microbatch(**x.inputs) for x in laid]
        with Operations() as made:
            counts = StepPlan.build(aggregation(CONFIGS[0][0]), microbatches).counts
        alone.append((counts, len(made.collectives)))
        for mode, empty in CONFIGS:
            with Operations() as made:
                plan = StepPlan.build(
                    aggregation(mode, empty=empty), microbatches, group=dist.group.WORLD
                )
                weights = [plan.weights(k, dtype=F64) for k in range(len(laid))]
            by_sample = [x.samples(w) for x, w in zip(laid, weights, strict=True)]
            answers[-1].append((by_sample, plan.counts, len(made.collectives)))
    return answers, alone


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
                weights, counts, collectives = answers[rank][0][n][c]
                assert_weights(weights, expected[rank])
                assert_counts(counts, step, mode)
                assert collectives in (1, 2)  # 0 would mean that nothing was counted
        for rank in range(ranks):  # without a group, a rank plans alone
            counts, collectives = answers[rank][1][n]
            assert_counts(counts, [step[rank]], CONFIGS[0][0])
            assert collectives == 0


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
    "small": (build(Microbatch(torch.full((2, 3), 1e-42), **IDS)), "MaskError"),
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
