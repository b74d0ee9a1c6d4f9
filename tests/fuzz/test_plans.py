"""Weights, counts and coefficients of drawn steps in one process: exact, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, Term, token_weights
from tests import oracle
from tests.core.steps import lay
from tests.fuzz.meaning import (
    Read,
    assert_same,
    assert_same_weights,
    called,
    counted,
    exact_or_refused,
    expected_weights,
    listed,
)
from tests.fuzz.strategies import (
    F64,
    INPUTS,
    OPTIONS,
    UNITS,
    aggregations,
    changed,
    changes,
    microbatches,
    with_changes,
)

search = settings(max_examples=250, deadline=None)
dtypes = st.sampled_from([torch.float32, F64, torch.bfloat16])
PACK = lay([oracle.Sample((1.0, 0.5)), oracle.Sample((1.0,))], "thd").inputs
WEIGHTED = {**PACK, "sample_weights": torch.tensor([0.5, 1.0])}
MEAN = {"mode": "sample_mean", "rejected": "skip", "sample_weights": "count"}


@given(aggregations(), microbatches(), dtypes, changes([*INPUTS, "dtype"], OPTIONS))
@example(MEAN, WEIGHTED, F64, {"sample_weights": "sparse"})
@search
@exact_or_refused
def test_weights_of_one_microbatch_are_exact_or_refused(options, given, dtype, changes):
    options, given = with_changes(options, changes), with_changes(given, changes)
    given.pop("rejected", None)
    if "dtype" in changes:
        dtype = changed(None, changes["dtype"])
    agg = called(LossAggregation, changes=changes, **options)
    w = called(token_weights, agg, dtype=dtype, changes=changes, **given)
    assert w.dtype == dtype and w.shape == given["loss_mask"].shape
    assert_same_weights([(w, expected_weights(agg, [[Read.of(given)]])[0][0])], dtype)


@given(
    options=aggregations(),
    given=st.lists(microbatches(), max_size=3),
    i=st.integers(-3, 2),
    dtype=dtypes,
    changes=changes(INPUTS, OPTIONS),
)
@example(options=MEAN, given=[PACK, WEIGHTED], i=-1, dtype=F64, changes={})
@search
@exact_or_refused
def test_everything_that_a_plan_says_is_exact_or_its_input_refused(
    options, given, i, dtype, changes
):
    agg = called(LossAggregation, changes=changes, **with_changes(options, changes))
    given = [with_changes(given[0], changes), *given[1:]] if given else []
    plan = called(lambda: StepPlan.build(agg, [Microbatch(**x) for x in given]), changes=changes)
    step = [Read.of(x) for x in given]
    assert_counts(plan, step)
    wanted = expected_weights(agg, [step])[0]
    if -len(step) <= i < len(step):
        assert torch.equal(plan.weights(i, dtype), plan.weights(range(len(step))[i], dtype))
        assert_same_weights([(plan.weights(i, dtype), wanted[i])], dtype)
        assert_same([(plan.weights(k, F64), w) for k, w in enumerate(wanted)], 2e-14)
        assert_by_sample(plan, step, wanted, range(len(step))[i])
        advantages = torch.linspace(-2, 2, len(wanted[i]), dtype=F64).view_as(plan.weights(i))
        scaled = [a * w for a, w in zip(listed(advantages), wanted[i], strict=True)]
        assert_same([(plan.scaled_advantages(i, advantages), scaled)], 2e-14)


def assert_counts(plan: StepPlan, step: list[Read]) -> None:
    counts, agg = plan.counts, plan.aggregation
    samples = [s for m in step for s in counted(m, agg)]
    kept = [s for m in step for s, gone in zip(m.samples, m.rejected, strict=True) if not gone]
    assert_same(
        [(torch.tensor(counts.tokens, dtype=F64), sum(sum(s.mask) for s in samples))], 1e-13
    )
    assert (counts.samples, counts.microbatches) == (len(samples), len(step))
    assert plan.active_tokens == [sum(x != 0 for x in m.values) for m in step]
    assert plan.is_empty == (not any(any(s.mask) for s in kept))
    for unit in {*UNITS} & {agg.within, agg.across}:
        assert getattr(counts, f"{unit}s") == oracle.number_of([[samples]], unit)


def assert_by_sample(plan: StepPlan, step: list[Read], weights: list[Any], i: int) -> None:
    """Coefficients, mask sums and sums by group of one microbatch."""
    sums = plan.mask_sums(i)
    assert_same([(sums, [sum(s.mask) for s in step[i].samples])], 1e-13)
    by_sample = [sum(weights[i][t] for t in places) for places in step[i].places]
    assert_same([(plan.coefficients(i) * sums, by_sample)], 1e-13)
    agg = plan.aggregation
    if (unit := agg.within) is not None and not any(step[i].rejected):
        of_unit = oracle.mask_sums([[counted(m, agg) for m in step]], unit)
        places = (((0, i, s), sample) for s, sample in enumerate(step[i].samples))
        wanted = [of_unit[oracle.key_of(unit, *place)] for place in places]
        assert_same([(plan.group_sums(unit, i), wanted)], 1e-13)


@given(
    aggregations(),
    st.lists(microbatches(rejected=False), min_size=1, max_size=3),
    changes(["sums", *(f"{unit}_ids" for unit in UNITS)], OPTIONS),
)
@search
@exact_or_refused
def test_coefficients_of_mask_sums_alone_are_exact_or_refused(options, given, changes):
    options.pop("sample_weights")
    agg = called(LossAggregation, changes=changes, **with_changes(options, changes))
    inputs = [
        {"sums": torch.tensor([sum(s.mask) for s in Read.of(x).samples], dtype=F64)}
        | {name: ids for name, ids in x.items() if name.endswith("_ids")}
        for x in given
    ]
    inputs[0] = with_changes(inputs[0], changes)
    of = {name: [x[name] for x in inputs] for name in inputs[0]}
    sums = of.pop("sums")
    plan = called(StepPlan.from_mask_sums, agg, sums, changes=changes, **of)
    reads = [Read.of_sums(*x.values()) for x in inputs]
    for i, wanted in enumerate(expected_weights(agg, [reads])[0]):
        assert_same([(plan.coefficients(i) * plan.mask_sums(i), wanted)], 1e-13)


terms = st.tuples(aggregations(), st.sampled_from([1.0, 0.0, -0.5, 2]))


@given(
    st.lists(terms, min_size=1, max_size=3), microbatches(), st.sampled_from([torch.float32, F64])
)
@search
def test_the_loss_of_several_terms_has_the_gradient_of_each(drawn, given, dtype):
    named = {str(n): Term(LossAggregation(**agg), c) for n, (agg, c) in enumerate(drawn)}
    plans = StepPlan.build_terms(named, [Microbatch(**given)])
    losses = {
        name: torch.rand(given["loss_mask"].shape, dtype=dtype).requires_grad_() for name in named
    }
    total = plans.weighted_sum(0, losses)
    total.backward()
    read, parts = Read.of(given), []
    for name, term in named.items():
        w = expected_weights(term.aggregation, [[read]])[0][0]
        slope = [term.coefficient * a for a in w]
        assert_same_weights([(losses[name].grad, slope)], dtype)
        parts += [a * b for a, b in zip(slope, listed(losses[name]), strict=True)]
    room = (1e-6 if dtype == torch.float32 else 1e-13) * sum(map(abs, parts)) + 1e-44
    assert total.item() == pytest.approx(sum(parts), rel=0, abs=room)
