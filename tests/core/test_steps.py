"""Drawn steps in one process and over gloo ranks: exact, or refused by name on every rank."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from megatron_loss_agg import (
    AggregationError,
    CPLayout,
    LossAggregation,
    Microbatch,
    StepPlan,
    StepTerms,
    Term,
)
from megatron_loss_agg.report import Max, Mean, reduce_reports
from tests.core.meaning import (
    F64,
    LAYOUTS,
    UNITS,
    Read,
    aggregation,
    assert_plans,
    assert_same,
    cp_layout,
    lay,
    microbatch_of,
    names_of,
)
from tests.core.operations import Operations
from tests.core.strategies import (
    INPUTS,
    OPTIONS,
    Changes,
    aggregations,
    changed,
    changes,
    microbatches,
    with_changes,
)
from tests.distributed import run_ranks
from tests.oracle import Sample

PATIENCE = timedelta(seconds=30)
"""After which a rank that waits for another one gives up; a step takes milliseconds."""
NUMBER = 80  # of steps over ranks
TOPOLOGIES = [(3, 1), (2, 2)]  # data-parallel and context-parallel ranks
Terms = dict[str, tuple[dict[str, Any], float]]  # arguments of aggregations, and coefficients


@dataclass(frozen=True)
class Drawn:
    """One step: what every data-parallel rank is given, and what is changed on ``where`` alone."""

    terms: Terms
    given: list[list[dict[str, Any]]]
    where: int = 0
    changes: Changes = field(default_factory=dict)  # of inputs, of options or of "step"

    def on(self, rank: int) -> list[dict[str, Any]]:
        """What a rank is given, with its changes."""
        how = self.changes if rank == self.where else {}
        return [with_changes(x, how) for x in self.given[rank]]

    def run(self, rank: int, group: Any) -> StepTerms:
        """What a loop does on one rank."""
        how = self.changes if rank == self.where else {}
        try:
            by_name = {
                name: Term(LossAggregation(**with_changes(options, how)), coefficient)
                for name, (options, coefficient) in self.terms.items()
            }
            step: Any = [microbatch_of(x) for x in self.on(rank)]
        except Exception:
            StepPlan.abandon(group)
            raise
        step = changed(None, how["step"]) if "step" in how else step
        return StepPlan.build_terms(by_name, step, group)


coefficients = st.sampled_from([1.0, 0.0, -0.5, Fraction(2, 3), 2])


@st.composite
def drawn_steps(draw: st.DrawFn, dp: int, cp: int) -> Drawn:
    layouts = LAYOUTS if cp == 1 else ("thd", "thd_row", "bshd")
    weighted = draw(st.booleans())
    of_rank = st.lists(microbatches(layouts, 2 * cp if cp > 1 else 1, weighted), max_size=3)
    given = [draw(of_rank) for _ in range(dp)]
    if draw(st.booleans()):
        for x in (x for of in given for x in of):
            x["routed_tokens"] = draw(st.integers(0, 9))
    of_terms = st.lists(st.tuples(aggregations(weighted), coefficients), min_size=1, max_size=3)
    terms = dict(zip("abc", draw(of_terms), strict=False))
    where = draw(st.integers(0, dp - 1))
    if cp > 1:
        return Drawn(terms, given, where)
    return Drawn(terms, given, where, draw(changes([*INPUTS, "routed_tokens"], [*OPTIONS, "step"])))


def sharded(given: dict[str, Any], layout: CPLayout) -> Microbatch:
    """The microbatch as this rank sees it: local mask, local offsets, same samples."""
    masks = {"loss_mask", "token_factors"} & given.keys()
    local = given | {name: layout.shard(given[name]) for name in masks}
    if "cu_seqlens" in given:
        local["cu_seqlens"] = local.pop("cu_seqlens_padded", given["cu_seqlens"]) // layout.cp_size
    return microbatch_of(local)


def assert_sharded_alike(step: Drawn, plan: StepPlan, rank: int, cp_group: Any) -> None:
    """A plan from parts of the masks has this rank's part of the weights, and the same counts."""
    cp, given = dist.get_world_size(cp_group), step.given[rank]
    layouts = [cp_layout(x, cp, dist.get_rank(cp_group)) for x in given]
    parts = [sharded(x, layout) for x, layout in zip(given, layouts, strict=True)]
    found = StepPlan.build(plan.aggregation, parts, dist.group.WORLD, sharded_over=cp_group)
    for i, layout in enumerate(layouts):
        assert_same(found.weights(i, F64), layout.shard(plan.weights(i, F64)), 1e-13)
    of_parts, of_whole = ([float(n or 0) for n in x.counts] for x in (found, plan))
    assert_same(of_parts, of_whole, 1e-13)


def assert_sums_alike(step: Drawn, plan: StepPlan, rank: int, group: Any) -> None:
    """A plan from what a controller knows of the samples has the same coefficients and groups."""
    given, sums = step.given[rank], [plan.mask_sums(i) for i in range(len(step.given[rank]))]
    flags = [
        x.get("rejected", torch.zeros(s.shape).bool()) for x, s in zip(given, sums, strict=True)
    ]
    weighted = plan.aggregation.sample_weights is not None
    found = StepPlan.from_mask_sums(
        plan.aggregation,
        sums,
        **{f"{unit}_ids": [x[f"{unit}_ids"] for x in given] for unit in UNITS},
        ids={unit: [names_of(x)[unit] for x in given] for unit in names_of({})},
        rejected=flags,
        sample_weights=[x["sample_weights"] for x in given] if weighted else None,
        group=group,
    )
    for i in range(len(sums)):
        assert_same(found.coefficients(i), plan.coefficients(i), 1e-13)
    unknown = {"active_tokens": None, "positions": None, "routed_tokens": None, "unequal": False}
    assert found.counts == plan.counts._replace(**unknown)
    for unit in plan.aggregation.by_id:
        assert all(map(torch.equal, found.groups(unit), plan.groups(unit)))


def overwritten(step: Drawn, rank: int) -> None:
    """What a loader may do with its batches once they were planned."""
    for microbatch in step.given[rank]:
        for x in microbatch.values():
            if isinstance(x, torch.Tensor):
                x.data.fill_(3)  # which no version counter sees


def outcome(step: Drawn, rank: int, group: Any = None, cp_group: Any = None) -> Any:
    """The plans of a data-parallel rank, or the error that it raised."""
    try:
        with Operations() as made:
            plans = step.run(rank, group)
        # 0 would mean that nothing was counted over ranks.
        assert len(made.collectives) in ((0,) if group is None else (1, 2))
        if not step.changes:
            assert_sums_alike(step, plans["a"], rank, group)
            if cp_group is not None:
                assert_sharded_alike(step, plans["a"], rank, cp_group)
            overwritten(step, rank)
        return plans
    except Exception as error:
        # Torch's or Python's own error is one of the rank that got the bad input.
        own = step.changes and rank == step.where
        if not isinstance(error, AggregationError) and not own:
            raise
        return error


def told(plans: StepTerms) -> list[Any]:
    """What must be the same on all ranks."""
    terms = [(name, term.aggregation) for name, term in plans.terms.items()]
    options = [(agg.empty, agg.rejected, agg.sample_weights) for _, agg in terms]
    return [options, [(name, agg.mode, agg.path, agg.across, agg.scale) for name, agg in terms]]


def judged(step: Drawn, found: list[Any], cp: int = 1) -> str:
    """Whether it was exact or refused."""
    errors = [x for x in found if isinstance(x, Exception)]
    if errors:
        assert step.changes, f"valid input was refused: {errors[0]!r}"
        assert len(errors) == len(found), f"refused by some ranks alone: {found}"
        # All say the same, or name the rank with the bad input.
        own, peer = str(errors[step.where]), f"on rank(s) [{step.where}] of"
        assert all(str(x) == own or peer in str(x) for x in errors), errors
        return "refused"
    given = [step.on(rank) for rank in range(len(step.given))]
    if "step" in step.changes:
        given[step.where] = []
    reads = [[Read.of(x) for x in of] for of in given]
    for rank, plans in enumerate(found):
        assert told(plans) == told(found[0])
        assert_plans(plans, reads, rank // cp)
    return "exact"


MEAN = {"a": ({"mode": "sample_mean", "rejected": "skip", "sample_weights": "count"}, 1.0)}
OF_MICROBATCHES = {"a": ({"mode": "microbatch_mean", "rejected": "skip"}, 1.0)}
PACK = lay([Sample((1.0, 0.5)), Sample((1.0,))], "thd")
WEIGHTED = {**PACK, "sample_weights": torch.tensor([0.5, 1.0])}


@given(drawn_steps(1, 1))
@example(Drawn(MEAN, [[WEIGHTED, WEIGHTED]]))
@example(Drawn(MEAN, [[WEIGHTED]], changes={"sample_weights": "sparse"}))
@example(Drawn(OF_MICROBATCHES, [[PACK, lay([], "thd")]]))
@settings(max_examples=300, deadline=None)
def test_a_step_of_one_process_is_exact_or_refused(step):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about prototypes
        judged(step, [outcome(pickle.loads(pickle.dumps(step)), 0)])


def outcomes(steps: list[Drawn], cp: int) -> list[Any]:
    """Of each step on this rank."""
    warnings.simplefilter("ignore")
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    # Context-parallel ranks are neighbours.
    cp_group = [dist.new_group([*range(a, a + cp)]) for a in range(0, world, cp)][rank // cp]
    dp_groups = [dist.new_group([*range(c, world, cp)], timeout=PATIENCE) for c in range(cp)]
    for step in steps:
        cp_groups = {"cp_group": cp_group} if cp > 1 else {}
        found.append(outcome(step, rank // cp, dp_groups[rank % cp], **cp_groups))
        dist.barrier()  # so that a rank that left another one alone is found in this step
    return found


@pytest.mark.parametrize(("dp", "cp"), TOPOLOGIES)
def test_ranks_are_exact_in_two_collectives_or_all_of_them_refuse(dp, cp):
    steps: list[Drawn] = []

    @settings(
        max_examples=NUMBER,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn_steps(dp, cp))
    def collect(step: Drawn) -> None:
        steps.append(step)

    collect()
    verdicts = []
    for step, *found in zip(steps, *run_ranks(outcomes, dp * cp, steps, cp), strict=True):
        try:
            verdicts.append(judged(step, found, cp))
        except AssertionError as error:
            error.add_note(f"in the step {step}")
            raise
    assert verdicts.count("exact") > NUMBER / 50
    assert cp > 1 or verdicts.count("refused") > NUMBER / 50


IDS = {"prompt_ids": torch.tensor([1, 2])}
GOOD = Microbatch(torch.ones(2, 3), **IDS)
PROMPT_MEAN, SUM = aggregation("prompt_mean"), aggregation("sum")
NESTED = aggregation("nested_mean", levels=("prompt", "sample"))
TERMS = {"a": PROMPT_MEAN, "b": SUM, "c": NESTED}
Call = Callable[[Any, Any], Any]  # of all ranks, and of this rank alone


def build(terms: Any = TERMS, *step: Any, **options: Any) -> Call:
    return lambda world, alone: StepPlan.build_terms(terms, step or [GOOD], world, **options)


def counting_weights(choice: str) -> Call:
    terms = {"": aggregation("prompt_mean", sample_weights=choice)}
    return build(terms, replace(GOOD, sample_weights=torch.ones(2)))


def of_sums(sum_of_one: float) -> Call:
    return lambda world, alone: StepPlan.from_mask_sums(SUM, [sum_of_one], group=world)


def sharing(*step: Microbatch) -> Call:
    return lambda world, alone: StepPlan.build(SUM, [*step], world, sharded_over=world)


def sharded_alone(mask: float) -> Call:
    """One sample, whose coefficient fp32 may not hold."""
    step = [Microbatch(torch.tensor([[mask]], dtype=F64))]
    agg = aggregation("sample_mean")
    return lambda world, alone: StepPlan.build(agg, step, world, sharded_over=alone)


def by_prompt(step: Microbatch) -> Call:
    """Of a function that asks for groups, whose ids this rank may lack."""
    agg = aggregation("custom", function=lambda plan, i: plan.group_sums("prompt", i))
    return lambda world, alone: StepPlan.build(agg, [step], world).weights(0)


def two(name: str = "a", kind: Any = Mean) -> dict[str, Any]:
    one = kind.of(torch.ones(1), torch.ones(1))
    return {"loss": one, name: one}


def reporting(*reports: Any) -> Call:
    return lambda world, alone: reduce_reports(reports or [two()], world)


def loading(world: Any, alone: Any) -> None:
    """One microbatch's reports; then the loader fails."""

    def reports() -> Iterator[dict[str, Any]]:
        yield two()
        raise SystemExit("of the loader")

    reduce_reports(reports(), world)


OTHERS = "^OptionError: ranks have different aggregations, or other terms or groups, or the same"
OTHER_CHOICES = {"count": "sample", "empty": "skip", "rejected": "skip"}
OTHER_TERMS = {
    "fewer": {"a": PROMPT_MEAN, "b": SUM},
    "in another order": {"b": SUM, "a": PROMPT_MEAN, "c": NESTED},
    "of another name": {"a": PROMPT_MEAN, "b": SUM, "d": NESTED},
    "of another mode": TERMS | {"b": aggregation("token_mean")},
    "of another divisor": TERMS | {"b": aggregation("sum", divisor=2)},
    "of other levels": TERMS | {"c": aggregation("nested_mean", levels=("prompt",))},
    **{
        f"with another {name}": TERMS | {"a": aggregation("prompt_mean", **{name: choice})}
        for name, choice in OTHER_CHOICES.items()
    },
}
OTHER_METRICS = "^DataError: this rank reports .*, and another rank of the group other metrics;"
OTHER_REPORTS = {
    "nothing": {},
    "of another name": two("b"),
    "of another kind": two("a", Max),
    "and more of them": two() | {f"more {i}": two()["a"] for i in range(32)},
}
# What rank 1 does, what all others do, and what every rank hears, or rank 1 alone.
DIFFERENT: dict[str, tuple[Call, Call, str]] = {
    "nothing": (build(), build(), "nothing"),
    **{f"terms {name}": (build(terms), build(), OTHERS) for name, terms in OTHER_TERMS.items()},
    "the weights of samples": (counting_weights("skip"), counting_weights("count"), OTHERS),
    "groups": (build(group_by=("prompt",)), build(), OTHERS),
    "sums": (of_sums(1.0), build({"": SUM}), OTHERS),
    "sharded masks": (sharded_alone(1.0), build({"": aggregation("sample_mean")}), OTHERS),
    "samples": (sharing(GOOD, GOOD), sharing(GOOD), "DataError: ranks that share samples have 2"),
    "ids": (
        by_prompt(GOOD),
        by_prompt(Microbatch(torch.ones(2, 3))),
        "DataError: no sums by 'prompt' in thi",
    ),
    "extremes": (sharded_alone(1e-40), sharded_alone(1.0), "DataError: the coefficients of samp"),
    **{
        f"reports {name}": (reporting(reports), reporting(), OTHER_METRICS)
        for name, reports in OTHER_REPORTS.items()
    },
}
OF_RANK_1 = r"PeerError: .*rank\(s\) \[1\]"
DEFECTS: dict[str, tuple[Call, Call, str]] = {
    "bad sums": (of_sums(-1.0), build(), "DataError"),
    "no mask of a term": (build(TERMS, {"a": GOOD}), build(), "DataError"),
    "abandoned": (lambda world, alone: StepPlan.abandon(world), build(), "nothing"),
    "other reports": (reporting(two(), {}), reporting(), "^DataError: .*in 1 of 2 microbatches"),
    "no metric": (reporting({"a": 1.0}), reporting(), "^DataError: .*expected a Mean, Sum, Max"),
    "no batch": (loading, reporting(), "^SystemExit: of the loader"),
}


def heard_on_ranks() -> list[str]:
    """What this rank hears in each case, where rank 1 does what is wrong."""
    rank, world, heard = dist.get_rank(), dist.group.WORLD, []
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    for bad, good, _ in (*DIFFERENT.values(), *DEFECTS.values()):
        try:
            (bad if rank == 1 else good)(world, alone)
            heard.append("nothing")
        except (AggregationError, SystemExit) as error:
            heard.append(f"{type(error).__name__}: {error}")
    return heard


def test_what_one_rank_does_otherwise_stops_every_rank_by_name():
    for rank, heard in enumerate(run_ranks(heard_on_ranks, 3, timeout=60.0)):
        expected = [(name, said) for name, (_, _, said) in DIFFERENT.items()]
        expected += [(name, own if rank == 1 else OF_RANK_1) for name, (*_, own) in DEFECTS.items()]
        for (name, text), said in zip(expected, heard, strict=True):
            assert re.search(text, said), (rank, name, said)
