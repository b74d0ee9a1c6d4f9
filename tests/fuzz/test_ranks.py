"""Drawn steps over gloo ranks, one of which may get bad input: exact, or refused by all ranks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_loss_agg import AggregationError, LossAggregation, Microbatch, StepPlan
from tests.distributed import run_ranks
from tests.fuzz.meaning import Read, assert_same, expected_weights
from tests.fuzz.strategies import F64, INPUTS, Changes, aggregations, changed, changes, microbatches

PATIENCE = timedelta(seconds=30)
"""After which a rank that waits for another one gives up; a step takes milliseconds."""
NUMBER = 150  # of steps


@dataclass(frozen=True)
class Drawn:
    """One step: what every rank is given, and what is changed on rank ``where`` alone."""

    kind: str
    options: dict[str, Any]
    given: list[list[dict[str, Any]]]
    where: int = 0
    changes: Changes = field(default_factory=dict)  # of inputs, of "step" or of "mode"

    def run(self, rank: int, group: Any) -> list[torch.Tensor]:
        """What a loop does on one rank: its weights."""
        how, step = self.changes if rank == self.where else {}, self.given[rank]
        agg = LossAggregation(**self.options)
        if "mode" in how:
            agg = LossAggregation(mode="sum", divisor=3)
        try:
            step = [{k: changed(v, how[k]) if k in how else v for k, v in x.items()} for x in step]
            made = [Microbatch(**x) for x in step]
        except Exception:
            StepPlan.abandon(group)
            raise
        if self.kind == "terms":
            terms = {"a": agg, "b": LossAggregation(**self.options)}
            plan = StepPlan.build_terms(terms, replaced(made, how), group)["a"]
        else:
            plan = StepPlan.build(agg, replaced(made, how), group)
        return [plan.weights(i, F64) for i in range(len(plan.microbatches))]


def replaced(given: list[Any], how: Changes) -> Any:
    return changed(None, how["step"]) if "step" in how else given


@st.composite
def drawn_steps(draw: st.DrawFn, world: int) -> Drawn:
    of_rank = st.lists(microbatches(), max_size=3)
    given = [draw(of_rank) for _ in range(world)]
    kind = draw(st.sampled_from(["build", "terms"]))
    how = draw(changes(INPUTS, ["step", "mode"]))
    return Drawn(kind, draw(aggregations()), given, draw(st.integers(0, world - 1)), how)


def outcomes(steps: list[Drawn]) -> list[Any]:
    """Of each step on this rank: its result, or the error that it raised."""
    warnings.simplefilter("ignore")
    group, found = dist.new_group(timeout=PATIENCE), []
    for step in steps:
        try:
            found.append(step.run(dist.get_rank(), group))
        except Exception as error:
            # Torch's or Python's own error is one of the rank that got the bad input.
            if not isinstance(error, AggregationError) and dist.get_rank() != step.where:
                raise
            found.append(error)
        dist.barrier(group)  # so that a rank that left another one alone is found in this step
    return found


def judged(step: Drawn, found: tuple[Any, ...]) -> str:
    """Whether it was exact or refused."""
    errors = [x for x in found if isinstance(x, Exception)]
    if errors:
        assert step.changes, f"valid input was refused: {errors[0]!r}"
        assert len(errors) == len(found), f"refused by some ranks alone: {found}"
        return "refused"
    how, given = step.changes, [[*of] for of in step.given]
    for i, x in enumerate(given[step.where]):
        given[step.where][i] = {k: changed(v, how[k]) if k in how else v for k, v in x.items()}
    if "step" in how:
        given[step.where] = []
    assert "mode" not in how or step.options == {"mode": "sum", "divisor": 3}
    reads = [[Read.of(x) for x in of] for of in given]
    for got, wanted in zip(
        found, expected_weights(LossAggregation(**step.options), reads), strict=True
    ):
        assert_same(zip(got, wanted, strict=True), 1e-13)
    return "exact"


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_are_exact_or_all_of_them_refuse(world):
    steps: list[Drawn] = []

    @settings(
        max_examples=NUMBER,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn_steps(world))
    def collect(step: Drawn) -> None:
        steps.append(step)

    collect()
    verdicts = []
    for step, *found in zip(steps, *run_ranks(outcomes, world, steps), strict=True):
        try:
            verdicts.append(judged(step, tuple(found)))
        except AssertionError as error:
            error.add_note(f"in the step {step}")
            raise
    assert min(verdicts.count("exact"), verdicts.count("refused")) > NUMBER / 10
