"""Drawn steps over gloo ranks, one of which may get bad input: exact, or refused by all ranks."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_loss_agg import AggregationError, CPLayout, LossAggregation, Microbatch, StepPlan
from tests.core.meaning import (
    F64,
    UNITS,
    Read,
    aggregation,
    assert_plan,
    assert_same,
    cp_layout,
    listed,
)
from tests.core.operations import Operations
from tests.core.strategies import INPUTS, Changes, aggregations, changed, changes, microbatches
from tests.distributed import run_ranks

PATIENCE = timedelta(seconds=30)
"""After which a rank that waits for another one gives up; a step takes milliseconds."""
NUMBER = 100  # of steps
TOPOLOGIES = [(2, 1), (3, 1), (2, 2)]  # data-parallel and context-parallel ranks
BY_SAMPLE = (*(f"{unit}_ids" for unit in UNITS), "rejected", "sample_weights")


@dataclass(frozen=True)
class Drawn:
    """One step: what every data-parallel rank is given, and what is changed on ``where`` alone."""

    terms: dict[str, dict[str, Any]]
    given: list[list[dict[str, Any]]]
    where: int = 0
    changes: Changes = field(default_factory=dict)  # of inputs, of "step" or of "mode"

    def on(self, rank: int) -> list[dict[str, Any]]:
        """What a rank is given, with its changes."""
        if rank != self.where:
            return self.given[rank]
        how = self.changes
        return [
            {name: changed(x, how[name]) if name in how else x for name, x in of.items()}
            for of in self.given[rank]
        ]

    def run(self, rank: int, group: Any) -> dict[str, StepPlan]:
        """What a loop does on one rank."""
        terms = {name: LossAggregation(**options) for name, options in self.terms.items()}
        how = self.changes if rank == self.where else {}
        if "mode" in how:
            terms["a"] = LossAggregation(mode="sum", divisor=3)
        try:
            step: Any = [Microbatch(**x) for x in self.on(rank)]
        except Exception:
            StepPlan.abandon(group)
            raise
        step = changed(None, how["step"]) if "step" in how else step
        if len(terms) == 1:
            return {"a": StepPlan.build(terms["a"], step, group)}
        return {**StepPlan.build_terms(terms, step, group)}


@st.composite
def drawn_steps(draw: st.DrawFn, dp: int, cp: int) -> Drawn:
    layouts = ("thd", "thd_row", "thd_padded", "bshd") if cp == 1 else ("thd", "thd_row", "bshd")
    of_rank = st.lists(microbatches(layouts=layouts, multiple=2 * cp if cp > 1 else 1), max_size=3)
    given = [draw(of_rank) for _ in range(dp)]
    terms = draw(st.lists(aggregations(), min_size=1, max_size=3))
    how = draw(changes(INPUTS, ["step", "mode"])) if cp == 1 else {}
    return Drawn(dict(zip("abc", terms, strict=False)), given, draw(st.integers(0, dp - 1)), how)


def sharded(given: dict[str, Any], layout: CPLayout) -> Microbatch:
    """The microbatch as this rank sees it: local mask, local offsets, same samples."""
    masks = {"loss_mask", "token_factors"} & given.keys()
    local = given | {name: layout.shard(given[name]) for name in masks}
    if "cu_seqlens" in given:
        local["cu_seqlens"] = local.pop("cu_seqlens_padded", given["cu_seqlens"]) // layout.cp_size
    return Microbatch(**local)


def assert_sharded_alike(step: Drawn, plan: StepPlan, rank: int, cp_group: Any) -> None:
    """A plan from parts of the masks has this rank's part of the weights, and the same counts."""
    cp, given = dist.get_world_size(cp_group), step.given[rank // dist.get_world_size(cp_group)]
    layouts = [cp_layout(x, cp, rank % cp) for x in given]
    parts = [sharded(x, layout) for x, layout in zip(given, layouts, strict=True)]
    found = StepPlan.build(plan.aggregation, parts, dist.group.WORLD, sharded_over=cp_group)
    for i, layout in enumerate(layouts):
        assert_same([(found.weights(i, F64), layout.shard(plan.weights(i, F64)))], 1e-13)
    assert_same([[[float(number or 0) for number in x.counts] for x in (found, plan)]], 1e-13)


def assert_sums_alike(step: Drawn, plan: StepPlan, rank: int, group: Any) -> None:
    """A plan from what a controller knows of the samples has the same coefficients."""
    sums = [plan.mask_sums(i) for i in range(len(step.given[rank]))]
    defaults = {"rejected": torch.bool, "sample_weights": F64}
    of = {
        name: [
            x.get(name, torch.full(s.shape, name == "sample_weights", dtype=defaults.get(name)))
            for x, s in zip(step.given[rank], sums, strict=True)
        ]
        for name in BY_SAMPLE
    }
    found = StepPlan.from_mask_sums(plan.aggregation, sums, **of, group=group)
    for i in range(len(sums)):
        assert_same([(found.coefficients(i), plan.coefficients(i))], 1e-13)


def outcomes(steps: list[Drawn], cp: int) -> list[Any]:
    """Of each step on this rank: its plans, or the error that it raised."""
    warnings.simplefilter("ignore")
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    # Context-parallel ranks are neighbours.
    cp_group = [dist.new_group([*range(a, a + cp)]) for a in range(0, world, cp)][rank // cp]
    dp_groups = [dist.new_group([*range(c, world, cp)], timeout=PATIENCE) for c in range(cp)]
    group = dp_groups[rank % cp]
    for step in steps:
        try:
            with Operations() as made:
                plans = step.run(rank // cp, group)
            assert 1 <= len(made.collectives) <= 2  # 0 would mean that nothing was counted
            if not step.changes:
                assert_sums_alike(step, plans["a"], rank // cp, group)
            if cp > 1:
                assert_sharded_alike(step, plans["a"], rank, cp_group)
            found.append(plans)
        except Exception as error:
            # Torch's or Python's own error is one of the rank that got the bad input.
            own = step.changes and rank // cp == step.where
            if not isinstance(error, AggregationError) and not own:
                raise
            found.append(error)
        dist.barrier()  # so that a rank that left another one alone is found in this step
    return found


def judged(step: Drawn, found: tuple[Any, ...], cp: int) -> str:
    """Whether it was exact or refused."""
    errors = [x for x in found if isinstance(x, Exception)]
    if errors:
        assert step.changes, f"valid input was refused: {errors[0]!r}"
        assert len(errors) == len(found), f"refused by some ranks alone: {found}"
        # All say the same, or name the rank with the bad input.
        own, peer = str(errors[step.where]), f"on rank(s) [{step.where}] of"
        assert all(str(x) == own or peer in str(x) for x in errors), errors
        return "refused"
    assert "mode" not in step.changes or step.terms["a"] == {"mode": "sum", "divisor": 3}
    given = [step.on(rank) for rank in range(len(step.given))]
    if "step" in step.changes:
        given[step.where] = []
    reads = [[Read.of(x) for x in of] for of in given]
    for rank, plans in enumerate(found):
        for plan in plans.values():
            assert_plan(plan, reads, rank // cp)
    return "exact"


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
            verdicts.append(judged(step, tuple(found), cp))
        except AssertionError as error:
            error.add_note(f"in the step {step}")
            raise
    assert verdicts.count("exact") > NUMBER / 50
    assert cp > 1 or verdicts.count("refused") > NUMBER / 50


def routed_on_ranks() -> list[Any]:
    """Routed tokens, with masks whole and sharded; ranks differ in their microbatches."""
    rank, world, agg = dist.get_rank(), dist.group.WORLD, aggregation("token_mean")

    def counted(*tokens: int, **options: Any) -> tuple[Any, ...]:
        step = [Microbatch(torch.ones(1, 2), routed_tokens=n) for n in tokens]
        counts = StepPlan.build(agg, step, world, **options).counts
        return counts.positions, counts.unequal, counts.routed_tokens

    return [counted(*[9] * (1 + rank)), counted(9, 9 + rank), counted(9, 9, sharded_over=world)]


def test_routed_tokens_are_those_of_all_ranks_that_share_no_samples():
    for found in run_ranks(routed_on_ranks, 2):
        assert found == [(3 * 9, False, 3 * 9), (3 * 9 + 10, True, 3 * 9 + 10), (18, False, 18)]


def sessions_on_ranks() -> list[Any]:
    """The first rank has two sessions, of 1 and 2 samples; the last one has no microbatch."""
    rank, world = dist.get_rank(), dist.group.WORLD
    ids = [{"session": ["a", "b"]}, {"session": ["b"]}]
    step = [Microbatch(torch.ones(len(x["session"]), 1), ids=x) for x in ids[rank : rank + 1]]
    agg = LossAggregation(mode="nested_mean", levels=("session", "sample"))
    plan = StepPlan.build(agg, step, world)
    sums = [torch.ones(m.num_samples) for m in step]
    given = {"session": [x["session"] for x in ids[rank : rank + 1]]}
    alone = StepPlan.from_mask_sums(agg, sums, ids=given, group=world)
    return [listed(x.coefficients(i)) for x in (plan, alone) for i in range(len(step))]


def test_ids_of_any_name_may_be_missing_where_a_rank_has_no_microbatch():
    # 1 / (2 sessions * 1 or 2 samples).
    first, second, third = run_ranks(sessions_on_ranks, 3)
    assert (first, second, third) == ([[0.5, 0.25]] * 2, [[0.25]] * 2, [])


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


IDS = {"prompt_ids": torch.tensor([1, 2])}
ONES = torch.ones(2, 3)
GOOD = Microbatch(ONES, **IDS)
AGG, TOKEN_MEAN = aggregation("prompt_mean"), aggregation("token_mean")
Call = Callable[[Any, Any], Any]  # of all ranks, and of this rank alone


def build(*microbatches: Any, agg: Any = AGG) -> Call:
    return lambda world, alone: StepPlan.build(agg, [GOOD, *microbatches], group=world)


def build_terms(terms: Any, *step: Any, **options: Any) -> Call:
    return lambda world, alone: StepPlan.build_terms(terms, step or [GOOD], world, **options)


OTHERS = "ModeError: ranks have different aggregations, or other terms"
OF_RANK_1 = r"PeerError: .*rank\(s\) \[1\]"
SKIP = aggregation("prompt_mean", sample_weights="skip")
COUNT = aggregation("prompt_mean", sample_weights="count")
# What rank 1 does, and the error that it sees; the others are named the rank to look at.
DEFECTS: dict[str, tuple[Call, str]] = {
    "negative": (build(Microbatch(-ONES, **IDS)), "MaskError"),
    "no ids": (build(Microbatch(ONES)), "GroupError"),
    "no list": (lambda world, _: StepPlan.build(AGG, GOOD, group=world), "MaskError"),
    "no mode": (build(agg="prompt_mean"), "ModeError"),
    "no terms": (build_terms({}), "ModeError"),
    "no mask of a term": (build_terms({"a": AGG, "b": AGG}, {"a": GOOD}), "MaskError"),
    "bad sums": (lambda world, _: StepPlan.from_mask_sums(AGG, [-1.0], group=world), "MaskError"),
    "no choice": (build(Microbatch(ONES, **IDS, sample_weights=torch.ones(2))), "GroupError"),
    "abandoned": (lambda world, _: StepPlan.abandon(world), "nothing"),
}


def of_mask(mask: float, is_sharded: bool) -> Call:
    """One sample, whose coefficient fp32 may not hold."""

    def call(world: Any, alone: Any) -> StepPlan:
        mine = Microbatch(torch.tensor([[mask]], dtype=F64))
        over = alone if is_sharded else None
        return StepPlan.build(aggregation("sample_mean"), [mine], world, sharded_over=over)

    return call


def sharing(*step: Microbatch) -> Call:
    return lambda world, _: StepPlan.build(AGG, [*step], world, sharded_over=world)


# What rank 1 does, what all others do, and what every rank hears.
DIFFERENT: dict[str, tuple[Call, Call, str]] = {
    "nothing else": (build(), build(), "nothing"),
    "choice of weights": (build(agg=COUNT), build(agg=SKIP), OTHERS),
    "groups": (build_terms({"a": AGG}, group_by=("prompt",)), build_terms({"a": AGG}), OTHERS),
    "sharded alone": (
        lambda world, alone: StepPlan.build(AGG, [GOOD], world, sharded_over=alone),
        build(),
        "or sharded masks on some of them alone; expected the same",
    ),
    "samples": (
        sharing(GOOD, GOOD),
        sharing(GOOD),
        "GroupError: ranks that share samples have 2 and 4 of them",
    ),
    **{
        f"extreme{' sharded' * sharded}": (
            of_mask(1e-40, sharded),
            of_mask(1.0, sharded),
            "MaskError: the coefficients of samples",
        )
        for sharded in (False, True)
    },
}
TERMS: dict[str, dict[str, Any]] = {
    "one": {"policy": TOKEN_MEAN},
    "in another mode": {"policy": aggregation("sample_mean")},
    "with a divisor": {"policy": aggregation("sum")},
    "with another divisor": {"policy": aggregation("sum", divisor=2)},
    "two": {"policy": TOKEN_MEAN, "kl": TOKEN_MEAN},
    "in another order": {"kl": TOKEN_MEAN, "policy": TOKEN_MEAN},
    "under another name": {"policy": TOKEN_MEAN, "entropy": TOKEN_MEAN},
}
CASES: dict[str, tuple[Call, Call, str, str]] = {
    name: (bad, good, said, said) for name, (bad, good, said) in DIFFERENT.items()
}
for _name, (_bad, _own) in DEFECTS.items():
    CASES[_name] = (_bad, build(), _own, OF_RANK_1)
for _one, _other in itertools.combinations(TERMS, 2):
    _calls = build_terms(TERMS[_one]), build_terms(TERMS[_other])
    CASES[f"{_one} and {_other}"] = (*_calls, OTHERS, OTHERS)


def heard_on_ranks() -> dict[str, str]:
    """What this rank hears in each case, where rank 1 does what is wrong."""
    rank, world, heard = dist.get_rank(), dist.group.WORLD, {}
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    for name, (bad, good, *_) in CASES.items():
        try:
            (bad if rank == 1 else good)(world, alone)
            heard[name] = "nothing"
        except AggregationError as error:
            heard[name] = f"{type(error).__name__}: {error}"
    return heard


@pytest.fixture(scope="module")
def heard() -> list[dict[str, str]]:
    return run_ranks(heard_on_ranks, 3, timeout=60.0)


@pytest.mark.parametrize("name", CASES)
def test_what_one_rank_does_wrong_stops_every_rank_by_name(heard, name):
    *_, own, of_others = CASES[name]
    for rank, said in enumerate(heard):
        assert re.search(own if rank == 1 else of_others, said[name]), (rank, said[name])
