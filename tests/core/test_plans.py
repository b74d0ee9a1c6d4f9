"""Drawn steps in one process: exact however they are split, or refused by name."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_loss_agg import (
    LossAggregation,
    Microbatch,
    StepPlan,
    Term,
    token_weights,
    weighted_sum,
)
from megatron_loss_agg.errors import GroupError, MaskError
from tests.core.meaning import (
    F64,
    MODES,
    UNITS,
    Read,
    aggregation,
    assert_plan,
    assert_same,
    assert_same_weights,
    called,
    cp_layout,
    exact_or_refused,
    expected_weights,
    lay,
    listed,
    products,
)
from tests.core.strategies import (
    INPUTS,
    NESTED,
    OPTIONS,
    PATHS,
    aggregations,
    changed,
    changes,
    microbatches,
    samples,
    weighed,
    with_changes,
)
from tests.oracle import Sample

search = settings(max_examples=250, deadline=None)
PACK = lay([Sample((1.0, 0.5)), Sample((1.0,))], "thd")
WEIGHTED = {**PACK, "sample_weights": torch.tensor([0.5, 1.0])}
MEAN = {"mode": "sample_mean", "rejected": "skip", "sample_weights": "count"}


@given(
    options=aggregations(),
    given=st.lists(microbatches(), max_size=3),
    i=st.integers(-3, 2),
    dtype=st.sampled_from([torch.float32, F64, torch.bfloat16]),
    changes=changes([*INPUTS, "dtype"], OPTIONS),
)
@example(options=MEAN, given=[PACK, WEIGHTED], i=-1, dtype=F64, changes={})
@example(options=MEAN, given=[WEIGHTED], i=0, dtype=F64, changes={"sample_weights": "sparse"})
@settings(max_examples=500, deadline=None)
@exact_or_refused
def test_everything_that_a_plan_says_is_exact_or_its_input_refused(
    options, given, i, dtype, changes
):
    agg = called(LossAggregation, changes=changes, **with_changes(options, changes))
    given = [with_changes(given[0], changes), *given[1:]] if given else []
    plan = called(lambda: StepPlan.build(agg, [Microbatch(**x) for x in given]), changes=changes)
    step = [Read.of(x) for x in given]
    assert_plan(plan, [step])
    if not -len(step) <= i < len(step):
        return
    if "dtype" in changes:
        dtype = changed(None, changes["dtype"])
    w, wanted = called(plan.weights, i, dtype, changes=changes), expected_weights(agg, [step])[0][i]
    assert (w.dtype, w.shape, w.requires_grad) == (dtype, given[i]["loss_mask"].shape, False)
    assert_same_weights([(w, wanted)], dtype)
    wide = plan.weights(range(len(step))[i], torch.promote_types(dtype, torch.float32))
    assert torch.equal(w, wide.to(dtype))  # half precision is rounded once
    if len(step) == 1 and "rejected" not in given[0]:
        assert torch.equal(w, token_weights(agg, **given[0], dtype=dtype))
    advantages = torch.linspace(-2, 2, w.numel(), dtype=F64).view_as(w)
    if any(x < 0 for x in wanted):
        with pytest.raises(MaskError, match="negative token_factors flip"):
            plan.scaled_advantages(i, advantages)
        return
    scaled = [a * x for a, x in zip(listed(advantages), wanted, strict=True)]
    advantages[torch.tensor(wanted, dtype=F64).view_as(w) == 0] = math.nan
    assert_same([(plan.scaled_advantages(i, advantages), scaled)], 2e-14)


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
        {"sums": torch.tensor(Read.of(x).sums, dtype=F64)}
        | {name: ids for name, ids in x.items() if name.endswith("_ids")}
        for x in given
    ]
    inputs[0] = with_changes(inputs[0], changes)
    of = {name: [x[name] for x in inputs] for name in inputs[0]}
    plan = called(StepPlan.from_mask_sums, agg, of.pop("sums"), changes=changes, **of)
    # As if each sample were a row of one token.
    masks = [torch.as_tensor(x["sums"], dtype=F64).view(-1, 1) for x in inputs]
    rows = [x | {"loss_mask": mask} for x, mask in zip(inputs, masks, strict=True)]
    assert_plan(plan, [[Read.of(x) for x in rows]])


@given(
    st.sampled_from([(), ("prompt",)]),
    st.lists(microbatches(), min_size=1, max_size=3),
    st.sampled_from(["count", "skip"]),
)
@search
def test_a_level_of_any_name_is_one(outer, given, choice):
    """As prompts and rollouts are, whose ids it has here."""
    found: list[Any] = []
    choices = dict.fromkeys(("empty", "rejected", "sample_weights"), choice)
    for task, session in (("prompt", "rollout"), ("prompt", "session"), ("task", "session")):
        levels = (*[task for _ in outer], session, "sample")
        agg = LossAggregation(mode="nested_mean", levels=levels, **choices)
        named = given
        if session == "session":
            own = [{"session": x["rollout_ids"], "task": x["prompt_ids"]} for x in given]
            named = [x | {"ids": y, "rollout_ids": None} for x, y in zip(given, own, strict=True)]
        try:
            plan = StepPlan.build(agg, [Microbatch(**x) for x in named])
        except GroupError as error:  # a rollout of two prompts
            found.append(str(error).replace("session", "rollout").replace("task", "prompt"))
        else:
            weights = [listed(plan.weights(i, F64)) for i in range(len(given))]
            found.append([weights, *map(listed, plan.groups(session))])
    assert found[0] == found[1] == found[2]


terms = st.tuples(
    aggregations(PATHS + NESTED), st.sampled_from([1.0, 0.0, -0.5, Fraction(2, 3), 2])
)


@given(
    st.lists(terms, min_size=1, max_size=3), microbatches(), st.sampled_from([torch.float32, F64])
)
@search
def test_the_loss_of_several_terms_has_the_gradient_of_each(drawn, given, dtype):
    """NaN is no loss where nothing counts, nor in a term of coefficient 0."""
    named = {str(n): Term(LossAggregation(**agg), c) for n, (agg, c) in enumerate(drawn)}
    plans = StepPlan.build_terms(named, iter([Microbatch(**given)]))  # read once for all terms
    read, losses, parts = Read.of(given), {}, []
    for name, term in named.items():
        w = expected_weights(term.aggregation, [[read]])[0][0]
        losses[name] = torch.rand(len(w), dtype=dtype)
        parts += [term.coefficient * a * float(x) for a, x in zip(w, losses[name], strict=True)]
        losses[name][torch.tensor(w) * term.coefficient == 0] = math.nan
        losses[name] = losses[name].view(given["loss_mask"].shape).requires_grad_()
    total = plans.weighted_sum(0, losses)
    total.backward()
    for name, term in named.items():
        w = expected_weights(term.aggregation, [[read]])[0][0]
        assert_same_weights([(losses[name].grad, [term.coefficient * a for a in w])], dtype)
    room = (1e-6 if dtype == torch.float32 else 1e-13) * sum(map(abs, parts)) + 1e-44
    assert total.item() == pytest.approx(sum(parts), rel=0, abs=room)
    trained = any(term.coefficient for term in named.values())
    assert plans.is_empty == (plans["0"].is_empty or not trained)


@pytest.mark.parametrize("mode", MODES)
@given(
    samples=samples(min_size=1, max_size=10),
    microbatches=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    layouts=st.lists(st.sampled_from(["thd", "bshd", "contiguous"]), min_size=1, max_size=3),
    cp=st.integers(1, 4),
    empty=st.sampled_from(["count", "skip"]),
)
@settings(max_examples=40, deadline=None)
def test_any_split_sums_to_the_whole_step(mode, samples, microbatches, seed, layouts, cp, empty):
    """Over microbatches, and each over context-parallel ranks; NaN where there is no token."""
    rng = random.Random(seed)
    split: list[list[Sample]] = [[] for _ in range(microbatches)]
    for sample in rng.sample(samples, len(samples)):
        rng.choice(split).append(sample)
    agg = aggregation(mode, empty=empty)
    # Only microbatch_mean depends on how the step is split.
    whole = split if mode == "microbatch_mean" else [[s for of in split for s in of]]
    wanted = listed(expected_weights(agg, [[Read.of(lay(of, "thd")) for of in whole]]))
    # The gradient of the sum of all parts, by the losses of the step as one vector.
    losses = (torch.arange(len(wanted), dtype=F64) * 0.7).sin().mul(3).requires_grad_()
    parts = losses.split([sum(len(s.mask) for s in of) for of in split])
    kinds = [layouts[k % len(layouts)] for k in range(microbatches)]
    laid = [
        lay(of, "thd" if kind == "thd" else "bshd", multiple=2 * cp)
        for of, kind in zip(split, kinds, strict=True)
    ]
    plan, total = StepPlan.build(agg, [Microbatch(**x) for x in laid]), losses.new_zeros(())
    for k, inputs in enumerate(laid):
        owned = zip(split[k], Read.of(inputs).places, strict=True)
        places = torch.tensor([t for s, of_row in owned for t in of_row[: len(s.mask)]]).long()
        w = plan.weights(k, F64)
        here = torch.full((w.numel(),), math.nan, dtype=F64).index_put((places,), parts[k])
        for rank in range(cp):
            local = cp_layout(inputs, cp, rank, kinds[k])
            total = total + weighted_sum(local.shard(w), local.shard(here.view_as(w)))
    total.backward()
    assert_same([(losses.grad, wanted)], 1e-13)
    products = [w * x for w, x in zip(wanted, listed(losses), strict=True)]
    room = 1e-13 * sum(map(abs, products))
    assert total.item() == pytest.approx(math.fsum(products), rel=0, abs=room)


@given(weighed(), changes(["w", "token_loss"]))
@settings(max_examples=300, deadline=None)
@exact_or_refused
def test_a_weighted_sum_and_its_gradient_are_those_of_a_loop(drawn, changes):
    given = with_changes(dict(zip(("token_loss", "w"), drawn, strict=True)), changes)
    total = called(weighted_sum, changes=changes, **given)
    w, losses = given["w"], given["token_loss"]
    floats = [x.dtype for x in (w, losses) if x.is_floating_point()] or [torch.float32]
    assert total.dtype == torch.promote_types(floats[0], floats[-1]) and total.dim() == 0
    terms, limit = products(losses, w), torch.finfo(total.dtype)
    size = sum(map(abs, terms))
    if size < limit.max / 4:
        room = 16 * limit.eps * size + limit.smallest_normal
        assert total.item() == pytest.approx(math.fsum(terms), rel=0, abs=room)
    if losses.requires_grad and not changes:
        (grad,) = torch.autograd.grad(total, losses)
        assert listed(grad) == pytest.approx(listed(w), rel=2 * torch.finfo(losses.dtype).eps)


def test_a_finite_sum_on_a_cpu_needs_no_repair():
    loss = torch.tensor([1.0, 2.0], requires_grad=True)
    with mock.patch("megatron_loss_agg.weights.where_weighted", side_effect=AssertionError):
        assert weighted_sum(torch.tensor([0.5, 0.0]), loss).item() == 0.5
    assert weighted_sum(torch.tensor([1.0, 0.0]), loss * math.nan).isnan()  # what counts is shown


def test_many_tokens_add_up_in_the_wider_dtype():
    # (1 + 2**-7)**2 - (1 + 2**-6) = 2**-14, whose terms are equal in bf16.
    a, b = (torch.tensor(x).bfloat16() for x in ([1 + 2**-7, -1], [1 + 2**-7, 1 + 2**-6]))
    assert weighted_sum(a, b).item() == 2**-14
    # 200 * 2 + 100 * 3 = 700, which uint8 cannot hold.
    total = weighted_sum(*(torch.tensor(x, dtype=torch.uint8) for x in ([2, 3], [200, 100])))
    assert total.item() == 700
    loss = torch.rand(2**22, generator=torch.Generator().manual_seed(0)) + 1
    found = weighted_sum(torch.full_like(loss, 2.0**-22), loss).item()
    assert found == pytest.approx(loss.double().mean().item(), rel=1e-6)


@pytest.mark.parametrize("poison", [1.0, math.nan])
def test_it_compiles_as_one_graph(poison):
    w = torch.tensor([0.0, 0.5, 2.0])
    loss = torch.tensor([poison, 2.0, 3.0], requires_grad=True)
    total = torch.compile(weighted_sum, fullgraph=True, backend="aot_eager")(w, loss)
    total.backward()
    assert total.item() == 7.0
    assert torch.equal(loss.grad, w)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_without_values_add_up(device):
    with FakeTensorMode():
        loss = torch.ones(2, 3, device=device, requires_grad=True)
        total = weighted_sum(torch.ones(2, 3, device=device), loss)
    assert total.device.type == device and total.requires_grad
