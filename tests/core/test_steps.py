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
    LossAggregation,
    Microbatch,
    StepPlan,
    Term,
)
from megatron_loss_agg.collectives import gather_objects
from megatron_loss_agg.counting import Samples
from megatron_loss_agg.exchange import failing_in_exchange
from megatron_loss_agg.report import Max, Mean, reduce_reports
from tests.core.meaning import (
    F64,
    UNITS,
    Read,
    aggregation,
    assert_plans,
    assert_same,
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
TOPOLOGIES = [(3, 1), (2, 2)]  # data-parallel ranks, and ranks with the same data
Terms = dict[str, tuple[dict[str, Any], float]]  # arguments of aggregations, and multipliers


@dataclass(frozen=True)
class Drawn:
    """One step: what every data-parallel rank is given, and what is changed on ``where`` alone."""

    terms: Terms
    given: list[list[dict[str, Any]]]
    where: int = 0
    changes: Changes = field(default_factory=dict)  # of inputs, of options or of "step"
    masks_by_term: tuple[int, ...] = ()  # ranks that give a microbatch for each term

    def on(self, rank: int) -> list[dict[str, Any]]:
        """The inputs of a rank, with its changes."""
        how = self.changes if rank == self.where else {}
        return [with_changes(x, how) for x in self.given[rank]]

    @property
    def has_masks_by_term(self) -> bool:
        """Whether some rank gives a microbatch for each term."""
        ranks = [r for r in self.masks_by_term if "step" not in self.changes or r != self.where]
        return any(self.given[rank] for rank in ranks)

    def run(self, rank: int, group: Any) -> dict[str, StepPlan]:
        """The loop of one rank."""
        how = self.changes if rank == self.where else {}
        with failing_in_exchange(group):
            terms = {
                name: Term(LossAggregation(**with_changes(options, how)), multiplier)
                for name, (options, multiplier) in self.terms.items()
            }
            step: Any = [microbatch_of(x) for x in self.on(rank)]
        if rank in self.masks_by_term:
            step = [dict.fromkeys(terms, x) for x in step]
        step = changed(None, how["step"]) if "step" in how else step
        return StepPlan.build_terms(terms, step, group)


multipliers = st.sampled_from([1.0, 0.0, -0.5, Fraction(2, 3), 2])


@st.composite
def drawn_steps(draw: st.DrawFn, dp: int) -> Drawn:
    weighted = draw(st.booleans())
    of_rank = st.lists(microbatches(weighted=weighted), max_size=3)
    given = [draw(of_rank) for _ in range(dp)]
    if draw(st.booleans()):
        for x in (x for of in given for x in of):
            x["routed_tokens"] = draw(st.integers(0, 9))
    of_terms = st.lists(st.tuples(aggregations(weighted), multipliers), min_size=1, max_size=3)
    terms = dict(zip("abc", draw(of_terms), strict=False))
    where = draw(st.integers(0, dp - 1))
    how = draw(changes([*INPUTS, "routed_tokens"], [*OPTIONS, "step"]))
    by_term = tuple(rank for rank in range(dp) if draw(st.booleans()))
    return Drawn(terms, given, where, how, by_term)


def assert_sums_alike(step: Drawn, plan: StepPlan, rank: int, group: Any) -> None:
    """A plan from what a controller knows of the samples has the same coefficients and groups."""
    given, sums = step.given[rank], [plan.mask_sums(i) for i in range(len(step.given[rank]))]
    flags = [
        x.get("rejected", torch.zeros(s.shape).bool()) for x, s in zip(given, sums, strict=True)
    ]
    weighted = plan.aggregation.sample_weights is not None
    of_sums = StepPlan.from_mask_sums(
        plan.aggregation,
        sums,
        **{f"{unit}_ids": [x[f"{unit}_ids"] for x in given] for unit in UNITS},
        ids={unit: [names_of(x)[unit] for x in given] for unit in names_of({})},
        rejected=flags,
        sample_weights=[x["sample_weights"] for x in given] if weighted else None,
        group=group,
    )
    units = {*UNITS, *plan.aggregation.by_id}
    for i in range(len(sums)):
        assert_same(of_sums.coefficients(i), plan.coefficients(i), 1e-13)
        assert all(torch.equal(of_sums.ids(unit, i), plan.ids(unit, i)) for unit in units)
    table = of_sums.samples
    tokens = {"active_tokens": None, "model_tokens": int(table.mask_sum.count_nonzero())}
    assert of_sums.counts == plan.counts._replace(**tokens)
    assert [*of_sums.shapes, *of_sums.model_tokens] == []


def overwritten(step: Drawn, rank: int) -> None:
    """A loader's later use of its batches, once they were planned."""
    for microbatch in step.given[rank]:
        for x in microbatch.values():
            if isinstance(x, torch.Tensor):
                x.data.fill_(3)  # which no version counter sees


def outcome(step: Drawn, rank: int, group: Any = None) -> Any:
    """The results that all data-parallel ranks must share, or the error that this one raised.

    Its plans are exact.
    """
    ours = pickle.loads(pickle.dumps(step))
    try:
        with Operations() as made:
            plans = ours.run(rank, group)
        # Headers, and then the samples, of each table; 0 would mean that no ranks were counted.
        tables = len(ours.terms) if ours.has_masks_by_term else 1
        assert len(made.collectives) == (0 if group is None else 2 * tables)
        if not step.changes:
            assert_sums_alike(ours, plans["a"], rank, group)
            overwritten(ours, rank)
    except Exception as error:
        # Torch's or Python's own error is one of the rank that got the bad input.
        own = step.changes and rank == step.where
        if not isinstance(error, AggregationError) and not own:
            raise
        return error
    given = [step.on(rank) for rank in range(len(step.given))]
    if "step" in step.changes:
        given[step.where] = []
    assert_plans(plans, [[Read.of(x) for x in of] for of in given], rank)
    return told(plans)


def told(plans: dict[str, StepPlan]) -> list[Any]:
    """The part that must be the same on all ranks."""
    aggregations = {name: plan.aggregation for name, plan in plans.items()}
    means = [(x.mode, x.path, x.across, x.within, x.inverse_divisor) for x in aggregations.values()]
    options = [(x.empty, x.rejected, x.sample_weights) for x in aggregations.values()]
    return [*aggregations, means, options, [plan.counts for plan in plans.values()]]


def judged(step: Drawn, found: list[Any], copies: int = 1) -> str:
    """Whether it was exact or refused; so many neighbours have the data of one rank."""
    errors = [x for x in found if isinstance(x, Exception)]
    if not errors:
        assert all(x == found[0] for x in found)
        return "exact"
    assert step.changes, f"valid input was refused: {errors[0]!r}"
    assert len(errors) == len(found), f"refused by some ranks alone: {found}"
    # All say the same; or name the rank with the bad input, and its error.
    own, peer = errors[copies * step.where], f"rank(s) [{step.where}] of the group failed while"
    cause = f"{type(own).__name__}: {own}"
    for error in map(str, errors):
        assert error == str(own) or (peer in error and cause in error), errors
    return "refused"


MEAN = {"a": ({"mode": "sample_mean", "rejected": "skip", "sample_weights": "count"}, 1.0)}
OF_MICROBATCHES = {"a": ({"mode": "microbatch_mean", "rejected": "skip"}, 1.0)}
PACK = lay([Sample((1.0, 0.5)), Sample((1.0,))], "thd")
WEIGHTED = {**PACK, "sample_weights": torch.tensor([0.5, 1.0])}


@given(drawn_steps(1))
@example(Drawn(MEAN, [[WEIGHTED, WEIGHTED]]))
@example(Drawn(MEAN, [[WEIGHTED]], changes={"sample_weights": "sparse"}))
@example(Drawn(OF_MICROBATCHES, [[PACK, lay([], "thd")]]))
@settings(max_examples=300, deadline=None)
def test_a_step_of_one_process_is_exact_or_refused(step):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about prototypes
        judged(step, [outcome(step, 0)])


def outcomes(steps: list[Drawn], copies: int) -> list[Any]:
    """Of each step on this rank."""
    warnings.simplefilter("ignore")
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    # As context-parallel ranks, neighbours have the same data; the others' ranks are not 0, 1, ...
    groups = [dist.new_group([*range(c, world, copies)], timeout=PATIENCE) for c in range(copies)]
    for step in steps:
        try:
            found.append(outcome(step, rank // copies, groups[rank % copies]))
        except AssertionError as error:
            error.add_note(f"in the step {step}")
            raise
        dist.barrier()  # so that a rank that left another one alone is found in this step
    return found


@pytest.mark.parametrize(("dp", "copies"), TOPOLOGIES)
def test_ranks_are_exact_in_two_collectives_or_all_of_them_refuse(dp, copies):
    steps: list[Drawn] = []

    @settings(
        max_examples=NUMBER,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn_steps(dp))
    def collect(step: Drawn) -> None:
        steps.append(step)

    collect()
    verdicts = []
    for step, *found in zip(steps, *run_ranks(outcomes, dp * copies, steps, copies), strict=True):
        try:
            verdicts.append(judged(step, found, copies))
        except AssertionError as error:
            error.add_note(f"in the step {step}")
            raise
    assert verdicts.count("exact") > NUMBER / 50
    assert verdicts.count("refused") > NUMBER / 50


SAMPLES = [Sample((1.0, 0.5), prompt=1), Sample((1.0,), prompt=2), Sample((1.0, 1.0), prompt=1)]
# Two samples of rank 0, of prompts 1 and 2; and one of rank 1, of prompt 1 again. Of prompt 1 there
# are 3.5 tokens, of prompt 2 one: 1 / (2 * 3.5) and 1 / (2 * 1).
OF_RANKS = [[lay(SAMPLES[:1], "bshd"), lay(SAMPLES[1:2], "thd")], [lay(SAMPLES[2:], "bshd")]]
BY_PROMPT = [[[1 / 7], [1 / 2]], [[1 / 7]]]


def mean_over_prompts(samples: Samples) -> torch.Tensor:
    """``prompt_mean`` as a user's function."""
    prompts = samples.groups("prompt")
    return 1 / (prompts.sums(samples.mask_sum)[prompts.group_S] * len(prompts.ids_G))


def by_function(step: list[list[dict[str, Any]]]) -> list[list[float]]:
    """The coefficients of this rank's samples by microbatch."""
    agg = aggregation("custom", function=mean_over_prompts)
    plan = StepPlan.build(agg, [Microbatch(**x) for x in step[dist.get_rank()]], dist.group.WORLD)
    return [plan.coefficients(i).tolist() for i in range(len(plan.sizes))]


def test_a_custom_function_has_the_samples_of_all_ranks():
    assert run_ranks(by_function, 2, OF_RANKS) == BY_PROMPT


def without_samples(steps: list[list[Any]]) -> list[list[list[float]]]:
    """The weights under ``prompt_mean`` of rank 0; rank 1 has one of the steps after another."""
    found = []
    terms = {"a": aggregation("prompt_mean"), "b": aggregation("token_mean")}
    masks = [Microbatch(**x) for x in OF_RANKS[0]]
    by_term = [{"a": masks[0], "b": masks[1]}, dict.fromkeys("ab", masks[1])]
    for step in steps:
        mine = [masks, by_term] if dist.get_rank() == 0 else [step, step]
        plans = [StepPlan.build_terms(terms, x, dist.group.WORLD) for x in mine]
        found.append(
            [plan.coefficients(i).tolist() for x in plans for plan in x.values() for i in range(2)]
            if dist.get_rank() == 0
            else [[plan.counts.tokens] for x in plans for plan in x.values()]
        )
    return found


def test_a_rank_without_samples_changes_nothing_and_needs_no_ids():
    padding = Microbatch(torch.zeros(0, 4))
    pack = Microbatch(torch.zeros(4), torch.tensor([0]), cu_seqlens_padded=torch.tensor([0, 4]))
    steps = [[], [padding], [pack, padding]]
    first, second = run_ranks(without_samples, 2, steps)
    # Two prompts of 1.5 and 1 tokens, M = 2.5; where b has the second mask twice, M = 2.
    shared = [[1 / 3], [1 / 2], [1 / 2.5], [1 / 2.5]]
    assert first == [[*shared, [1 / 3], [1 / 2], [1 / 2], [1 / 2]]] * len(steps)
    assert second == [[[2.5], [2.5], [2.5], [2.0]]] * len(steps)


IDS = {"prompt_ids": torch.tensor([1, 2])}
GOOD = Microbatch(torch.ones(2, 3), rollout_ids=torch.tensor([3, 4]), **IDS)
PROMPT_MEAN, SUM = aggregation("prompt_mean"), aggregation("sum")
NESTED = aggregation("nested_mean", levels=("prompt", "sample"))
TERMS = {"a": PROMPT_MEAN, "b": SUM, "c": NESTED}
Call = Callable[[Any, Any], Any]  # of all ranks, and of this rank alone


def build(terms: Any = TERMS, *step: Any) -> Call:
    return lambda world, alone: StepPlan.build_terms(terms, step or [GOOD], world)


def counting_weights(choice: str) -> Call:
    terms = {"": aggregation("prompt_mean", sample_weights=choice)}
    return build(terms, replace(GOOD, sample_weights=torch.ones(2)))


def of_sums(sum_of_one: float) -> Call:
    return lambda world, alone: StepPlan.from_mask_sums(SUM, [sum_of_one], group=world)


def of_one_sample(mask: float) -> Call:
    """Whose coefficient fp32 may not hold."""
    step = Microbatch(torch.tensor([[mask]], dtype=F64))
    return build({"": aggregation("sample_mean")}, step)


def by_prompt(step: Microbatch) -> Call:
    """Of a function that asks for groups, whose ids a rank may lack."""
    return build({"": aggregation("custom", function=mean_over_prompts)}, step)


def routed(tokens: int | None) -> Call:
    return build({"": SUM}, replace(GOOD, routed_tokens=tokens))


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


OTHERS = "^OptionError: all ranks must have the same aggregations, got .* and .*. Give every rank"
OTHER_CHOICES = {"count": "sample", "empty": "skip", "rejected": "skip"}
OTHER_TERMS = {
    "fewer": {"a": PROMPT_MEAN, "b": SUM},
    "in another order": {"b": SUM, "a": PROMPT_MEAN, "c": NESTED},
    "of another name": {"a": PROMPT_MEAN, "b": SUM, "d": NESTED},
    "of another mode": TERMS | {"b": aggregation("token_mean")},
    "of another divisor": TERMS | {"b": aggregation("sum", divisor=2)},
    "of other levels": TERMS | {"c": aggregation("nested_mean", levels=("prompt", "rollout"))},
    **{
        f"with another {name}": TERMS | {"a": aggregation("prompt_mean", **{name: choice})}
        for name, choice in OTHER_CHOICES.items()
    },
}
OTHER_METRICS = "^DataError: all ranks must report the same metrics, got .* and .*. Report the same"
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
    "masks by term": (build(TERMS, dict.fromkeys(TERMS, GOOD)), build(), "nothing"),
    "sums": (of_sums(1.0), build({"": SUM}), "nothing"),
    "ids": (
        by_prompt(GOOD),
        by_prompt(Microbatch(torch.ones(2, 3))),
        "^DataError: samples grouped by 'prompt' need its ids, got ids of .*. Give 'prompt_",
    ),
    "routed tokens": (
        routed(6),
        routed(None),
        "^DataError: all or none of a step's .* must have routed_tokens, got 1 of 3. Give",
    ),
    "extremes": (
        of_one_sample(1e-40),
        of_one_sample(1.0),
        "^DataError: coefficients of samples must be in the range of fp32, got .*. Give a loss_",
    ),
    **{
        f"reports {name}": (reporting(reports), reporting(), OTHER_METRICS)
        for name, reports in OTHER_REPORTS.items()
    },
}
OF_RANK_1 = r"^PeerError: rank\(s\) \[1\] of the group failed while {}. Fix the error of rank 1 "
OF_RANK_1 += "first: {}"
PLANNING, REPORTING = "reading the step", "reading its reports"
# What is wrong on rank 1, what the others do meanwhile, and the error that they are told of.
DEFECTS: dict[str, tuple[Call, Call, str, str]] = {
    "bad sums": (of_sums(-1.0), build(), PLANNING, "DataError: loss_mask must be finite, >= 0"),
    "no mask of a term": (
        build(TERMS, {"a": GOOD}),
        build(),
        PLANNING,
        r"DataError: a microbatch must have a mask for each term, got \['a'\] without 'b'. Add",
    ),
    "bad sequences": (
        build({"": SUM}, Microbatch.of_samples(1, sequences=Microbatch(-torch.ones(2, 3)))),
        build({"": SUM}),
        PLANNING,
        "DataError: loss_mask must be finite, >= 0",
    ),
    "other reports": (
        reporting(two(), {}),
        reporting(),
        REPORTING,
        "DataError: metric 'a' must be of one kind and in every microbatch, got a Mean in 1 of 2",
    ),
    "no metric": (
        reporting({"a": 1.0}),
        reporting(),
        REPORTING,
        "DataError: metric 'a' must be a Mean, Sum, Max or Min of scalars, .*, got 1.0. Make it",
    ),
    "no batch": (loading, reporting(), REPORTING, "SystemExit: of the loader"),
}


def only_rank_0_succeeds() -> str:
    try:
        gather_objects(lambda: 1 / (dist.get_rank() == 0), dist.group.WORLD, "dividing")
    except (AggregationError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_of_several_ranks_that_failed_the_first_is_named_beside_its_error():
    own = "ZeroDivisionError: division by zero"
    told = "PeerError: rank(s) [1, 2] of the group failed while dividing. Fix the error of rank 1 "
    assert run_ranks(only_rank_0_succeeds, 3) == [f"{told}first: {own}", own, own]


def heard_on_ranks() -> list[str]:
    """The error of this rank in each case, where rank 1 fails."""
    rank, world, heard = dist.get_rank(), dist.group.WORLD, []
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    for bad, good, *_ in (*DIFFERENT.values(), *DEFECTS.values()):
        try:
            (bad if rank == 1 else good)(world, alone)
            heard.append("nothing")
        except (AggregationError, SystemExit) as error:
            heard.append(f"{type(error).__name__}: {error}")
    return heard


def test_what_one_rank_does_otherwise_stops_every_rank_by_name():
    for rank, heard in enumerate(run_ranks(heard_on_ranks, 3)):
        expected = [(name, text) for name, (*_, text) in DIFFERENT.items()]
        for name, (*_, doing, cause) in DEFECTS.items():
            expected.append((name, f"^{cause}" if rank == 1 else OF_RANK_1.format(doing, cause)))
        for (name, text), said in zip(expected, heard, strict=True):
            assert re.search(text, said), (rank, name, said)
