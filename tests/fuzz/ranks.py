"""Steps over gloo ranks, on which one rank may get bad input: exact, or refused by all of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_loss_agg import AggregationError, LossAggregation, Microbatch, StepPlan
from megatron_loss_agg.report import Max, Mean, Min, reduce_reports
from tests.distributed import RankFailed, run_ranks
from tests.fuzz import inputs
from tests.fuzz.draw import F64, Draw
from tests.fuzz.judge import require, same
from tests.fuzz.reading import Read, expected_weights, listed

PATIENCE = timedelta(seconds=10)
"""After which a rank that waits for another one gives up; a step takes milliseconds."""
ONES = torch.ones(3, dtype=F64)


class Step:
    """What every rank of one step does; each rank draws all of it."""

    def __init__(self, seed: int, world: int) -> None:
        torch.manual_seed(seed)
        draw = Draw(seed)
        draw.rate, draw.far = 0.0, False
        self.kind = draw.choice(("build", "build", "terms", "sums", "reports"))
        self.agg: Any = inputs.aggregation(draw)
        self.aggs = [self.agg] * world
        counts = [draw.randrange(4) for _ in range(world)]
        rejected = draw.flag(0.3)
        self.given = [
            [inputs.microbatch(draw, rejected, draw.flag(0.3)) for _ in range(n)] for n in counts
        ]
        self.sums = [[inputs.mask_values(draw, n) for n in range(number)] for number in counts]
        self.ids = [[torch.randint(-2, 3, x.shape) for x in sums] for sums in self.sums]
        self.values = [[torch.randn(3, dtype=F64) for _ in range(max(counts))] for _ in counts]
        self.instead: Any = None  # of the list of microbatches, or of reports
        self.bad = draw.randrange(world) if draw.flag() else None
        if self.bad is not None:
            draw.rate = 0.3
            self._spoil(draw, self.bad)

    def _spoil(self, draw: Draw, bad: int) -> None:
        self.given[bad] = [{k: draw.maybe(x) for k, x in m.items()} for m in self.given[bad]]
        for inputs_of in (self.sums, self.values):
            inputs_of[bad] = [draw.maybe(x) for x in inputs_of[bad]]
        if draw.flag(0.3):
            self.aggs[bad] = draw.choice((None, LossAggregation(mode="sum", divisor=3), self.agg))
        self.instead = draw.option(None)
        if isinstance(self.instead, (list, tuple)) and not self.instead:
            self.given[bad], self.sums[bad], self.ids[bad], self.values[bad] = [], [], [], []

    def run(self, rank: int, group: Any) -> Any:
        """What a loop does on one rank: its weights, or its metrics."""
        agg, ids = self.aggs[rank], self.ids[rank]
        instead = self.instead if rank == self.bad else None
        if self.kind == "reports":
            reports = [_report(x) for x in self.values[rank]]
            return reduce_reports(reports if instead is None else instead, group)
        if self.kind == "sums":
            sums: Any = self.sums[rank] if instead is None else instead
            plan = StepPlan.from_mask_sums(
                agg, sums, prompt_ids=ids, rollout_ids=ids, dataset_ids=ids, group=group
            )
            return [plan.coefficients(i) * plan.mask_sums(i) for i in range(len(ids))]
        try:
            made = [Microbatch(**given) for given in self.given[rank]]
        except Exception:
            StepPlan.abandon(group)
            raise
        microbatches: Any = made if instead is None else instead
        if self.kind == "terms":
            terms = {"a": agg, "b": self.agg}
            plan = StepPlan.build_terms(terms, microbatches, group)["a"]
        else:
            plan = StepPlan.build(agg, microbatches, group)
        return [plan.weights(i, F64) for i in range(len(made))]

    def judged(self, outcomes: list[Any]) -> str:
        """``exact`` or ``refused``; raises Finding if it is neither."""
        errors = [x for x in outcomes if isinstance(x, Exception)]
        if errors:
            require(self.bad is not None, f"valid input was refused: {outcomes}")
            require(len(errors) == len(outcomes), f"refused by some ranks alone: {outcomes}")
            return "refused"
        if self.kind == "reports":
            self._check_metrics(outcomes)
            return "exact"
        require(all(agg is self.agg for agg in self.aggs), "other aggregations were accepted")
        if self.kind == "sums":
            pairs = [zip(*of, strict=True) for of in zip(self.sums, self.ids, strict=True)]
            step = [[Read.of_sums(x, *[i.tolist()] * 3) for x, i in of] for of in pairs]
        else:
            step = [[Read.of(given) for given in of] for of in self.given]
        for got, wanted in zip(outcomes, expected_weights(self.agg, step), strict=True):
            same("weights", zip(got, wanted, strict=True), 1e-13, 0)
        return "exact"

    def _check_metrics(self, outcomes: list[Any]) -> None:
        found = outcomes[0]
        require(all(repr(x) == repr(found) for x in outcomes), f"ranks reduce to {outcomes}")
        values = [x for of in self.values for v in of for x in listed(v)]
        if values and all(abs(x) < 1e30 for x in values):
            require(found["max"] == max(values) and found["min"] == min(values), "extremes")
            room = 1e-5 * max(map(abs, values))
            require(abs(found["mean"] - sum(values) / len(values)) <= room, "mean")


def _report(values: Any) -> Any:
    """A report, or an error in its place, as a loop might hand on."""
    try:
        return {name: of(values, ONES) for name, of in METRICS.items()}
    except Exception as error:
        return error


METRICS: dict[str, Any] = {"mean": Mean.of, "max": Max.of, "min": Min.of}


def run_steps(seed: int, number: int) -> list[Any]:
    """On every rank: the outcome of each step, or the error that it raised."""
    warnings.simplefilter("ignore")
    group = dist.new_group(timeout=PATIENCE)
    outcomes: list[Any] = []
    for one in range(seed, seed + number):
        step = Step(one, dist.get_world_size())
        try:
            outcomes.append(step.run(dist.get_rank(), group))
        except Exception as error:
            # Torch's or Python's own error is one of the rank that got the bad input.
            if not isinstance(error, AggregationError) and dist.get_rank() != step.bad:
                raise
            outcomes.append(error)
        dist.barrier(group)  # so that a rank that left another one alone is found in this step
    return outcomes


def search(seed: int, number: int, world: int) -> Iterator[tuple[int, str]]:
    """Each seed with ``exact``, ``refused``, or what was found."""
    try:
        by_rank = run_ranks(run_steps, world, seed, number, timeout=60 + 0.1 * number)
    except RankFailed as failure:
        if number == 1:
            yield seed, str(failure)
            return
        half = number // 2
        yield from search(seed, half, world)
        yield from search(seed + half, number - half, world)
        return
    for one, *outcomes in zip(range(seed, seed + number), *by_rank, strict=True):
        try:
            yield one, Step(one, world).judged(outcomes)
        except Exception as error:
            yield one, f"{type(error).__name__}: {error}"
