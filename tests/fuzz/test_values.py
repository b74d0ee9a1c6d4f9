"""Layouts, means, sums, metrics and token losses of drawn numbers: exact, or refused by name."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_loss_agg import (
    CPLayout,
    Microbatch,
    SequenceMean,
    policy,
    predicting_mask,
    weighted_sum,
)
from megatron_loss_agg.report import Max, Mean, Min, Sum, reduce_reports
from tests.fuzz.meaning import Read, called, exact_or_refused, listed
from tests.fuzz.strategies import (
    F64,
    FLOATS,
    FORMS,
    INPUTS,
    INTEGERS,
    changed,
    changes,
    microbatches,
    with_changes,
)

search = settings(max_examples=150, deadline=None)
MASKED = st.sampled_from([math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-40, 1.0])
"""What may lie where nothing counts."""


def held_by(kind: str, whole: Any, cp: int, rank: int) -> list[int]:
    """The positions that a rank holds: of 2 * cp chunks of a sequence, the r-th from both ends."""
    if kind == "contiguous":
        return [*range(rank * whole // cp, (rank + 1) * whole // cp)]
    held: list[int] = []
    for begin, end in pairwise([0, whole] if kind == "bshd" else whole.tolist()):
        chunk = (end - begin) // (2 * cp)
        parts = (
            [(0, end - begin)]
            if cp == 1
            else [(c * chunk, chunk) for c in (rank, 2 * cp - 1 - rank)]
        )
        for start, length in parts:
            held += range(begin + start, begin + start + length)
    return held


@given(
    kind=st.sampled_from(["bshd", "thd", "contiguous"]),
    cp=st.integers(1, 4),
    chunks=st.lists(st.integers(0, 4), max_size=4),
    shape=st.sampled_from([(-1,), (2, -1), (-1, 3), (2, -1, 1, 2)]),
    form=st.sampled_from([*FORMS]),
    changes=changes(["whole"], ["cp_size", "cp_rank"]),
)
@example("bshd", 2, [1], (-1,), "as it is", {"cp_size": "Fraction(1, 3)"})
@search
@exact_or_refused
def test_every_position_is_held_once_and_joining_is_the_adjoint(
    kind, cp, chunks, shape, form, changes
):
    ends = [0, *accumulate(2 * cp * n for n in chunks)]
    whole: Any = torch.tensor(ends) if kind == "thd" else ends[-1]
    axes = with_changes({"whole": whole, "cp_size": cp, "cp_rank": cp - 1}, changes)
    made = called(getattr(CPLayout, kind), *axes.values(), changes=changes)
    if changes and not all(isinstance(x, (int, Tensor)) for x in axes.values()):
        return  # annotations refuse it
    assert made.index.tolist() == held_by(kind, *axes.values())
    if changes:
        return
    dim = shape.index(-1)
    x = FORMS[form](torch.randn([made.total_len if n == -1 else n for n in shape], dtype=F64))
    ranks = [getattr(CPLayout, kind)(whole, cp, rank) for rank in range(cp)]
    parts = [of_rank.shard(x, dim).detach().requires_grad_() for of_rank in ranks]
    for rank, part in enumerate(parts):
        assert torch.equal(
            part,
            x.index_select(dim, torch.tensor(held_by(kind, whole, cp, rank), dtype=torch.int64)),
        )
    joined, pull = made.unshard(parts, dim=dim), torch.randn(x.shape, dtype=F64)
    (joined * pull).sum().backward()
    assert torch.equal(joined, x)
    for part, of_rank in zip(parts, ranks, strict=True):
        assert torch.equal(part.grad, of_rank.shard(pull, dim))


@given(microbatches(rejected=False), changes(INPUTS[:3]))
@search
@exact_or_refused
def test_a_mask_moves_to_the_position_that_predicts_the_token(given, changes):
    given = {name: given[name] for name in INPUTS[:3] if name in given}
    given = with_changes(given, changes)
    moved = called(predicting_mask, *(given.get(name) for name in INPUTS[:3]), changes=changes)
    read = Read.of(given)
    wanted = [0.0] * len(read.values)
    for places in read.places:
        for t, following in pairwise(places):
            wanted[t] = read.values[following]
    assert (moved.dtype, moved.shape) == (given["loss_mask"].dtype, given["loss_mask"].shape)
    assert listed(moved) == wanted


@given(microbatches(), st.sampled_from([F64, torch.float32]), st.data(), changes(INPUTS))
@search
@exact_or_refused
def test_the_mean_of_a_sequence_and_its_gradient_are_those_of_a_loop(given, dtype, data, changes):
    given = with_changes(given, changes)
    mean = called(lambda: SequenceMean(Microbatch(**given)), changes=changes)
    read = Read.of(given)
    numbers = [data.draw(st.floats(-3, 3) if m else MASKED) for m in read.values]
    x = torch.tensor(numbers, dtype=dtype).view(given["loss_mask"].shape).requires_grad_()
    out = called(mean, x, changes=changes)
    pull = torch.linspace(-1, 2, x.numel(), dtype=dtype).view(x.shape)
    (out * pull).sum().backward()
    wanted, slope = [0.0] * x.numel(), [0.0] * x.numel()
    values, pulls = listed(x), listed(pull)
    for places in read.places:
        if total := math.fsum(read.values[t] for t in places):
            parts = (read.values[t] * values[t] for t in places if read.values[t])
            value, back = math.fsum(parts) / total, math.fsum(pulls[t] for t in places)
            for t in places:
                wanted[t], slope[t] = value, read.values[t] * back / total
    room = 1e-12 if dtype == F64 else 2e-5
    assert listed(out) == pytest.approx(wanted, rel=0, abs=room)
    assert listed(x.grad) == pytest.approx(slope, rel=0, abs=room)


@st.composite
def weighed(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Values and weights of any dtypes; values of weight 0 may be anything."""
    shape = draw(st.sampled_from([(), (0,), (1,), (7,), (2, 3), (2, 0, 2)]))
    dtypes = draw(st.tuples(*2 * [st.sampled_from(FLOATS + INTEGERS)]))
    w = [draw(st.sampled_from([0.0, 0.0, 1.0, 2.0, 0.3])) for _ in range(math.prod(shape))]
    w = torch.tensor(w, dtype=F64).to(dtypes[1])
    v = [draw(st.floats(-9, 9) if x else MASKED) for x in listed(w)]
    v = torch.tensor(v, dtype=F64)
    v = v if dtypes[0].is_floating_point else v.nan_to_num(0, 0, 0).clamp(0, 9)
    form = draw(st.sampled_from([*FORMS]))
    return FORMS[form](v.to(dtypes[0]).view(shape)), w.view(shape)


def products(values: Tensor, weights: Tensor) -> list[float]:
    pairs = zip(listed(values), listed(weights), strict=True)
    return [v * w for v, w in pairs if w != 0]


@given(weighed(), changes(["w", "token_loss"]))
@search
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
        assert listed(grad) == pytest.approx(listed(w), rel=1e-2)


@given(st.lists(weighed(), min_size=1, max_size=2), changes(["values", "weights"]))
@search
@exact_or_refused
def test_metrics_are_those_of_active_positions_over_all_microbatches(drawn, changes):
    of_first = with_changes(dict(zip(("values", "weights"), drawn[0], strict=True)), changes)
    pairs = [tuple(of_first.values()), *drawn[1:]]
    kinds = {"mean": Mean, "sum": Sum, "max": Max, "min": Min}
    reports = [
        {name: called(kind.of, v, w, changes=changes) for name, kind in kinds.items()}
        for v, w in pairs
    ]
    found = called(reduce_reports, reports, None, changes=changes)
    if changes:
        return
    kept = [v for x, w in pairs for v, m in zip(listed(x), listed(w), strict=True) if m]
    assert (found["max"], found["min"]) == (max([-math.inf, *kept]), min([math.inf, *kept]))
    terms = [x for v, w in pairs for x in products(v, w)]
    count = math.fsum(m for _, w in pairs for m in listed(w))
    room = 1e-5 * sum(map(abs, terms))
    assert found["sum"] == pytest.approx(math.fsum(terms), rel=0, abs=room)
    mean = math.fsum(terms) / (count or 1)
    assert found["mean"] == pytest.approx(mean, rel=0, abs=room / (count or 1))


BOUND = policy.LOG_RATIO_BOUND
Number = tuple[float, float]  # value and slope


def ratio_of(x: float) -> float:
    return math.exp(min(max(x, -BOUND), BOUND))


def ppo(
    lp: float, old: float, a: float, clip_low: float, clip_high: float, dual_clip=None
) -> Number:
    r, inside = ratio_of(lp - old), abs(lp - old) <= BOUND
    limit = min(max(r, 1 - clip_low), 1 + clip_high)
    loss, slope = (-a * r, -a * r * inside) if -a * r >= -a * limit else (-a * limit, 0.0)
    if dual_clip is not None and a < 0 and loss > -dual_clip * a:
        return -dual_clip * a, 0.0
    return loss, slope


def cispo(lp: float, old: float, a: float, clip_low: float, clip_high: float) -> Number:
    weight = min(max(ratio_of(lp - old), 1 - clip_low), 1 + clip_high)
    return -weight * a * lp, -weight * a


def kl(lp: float, ref: float, estimator: str) -> Number:
    x = lp - ref
    if estimator == "k1":
        return x, 1.0
    if estimator == "k2":
        return x * x / 2, x
    y = min(max(x, -BOUND), BOUND)
    return math.expm1(-y) + y, -math.expm1(-y) * (x == y)


def value(v: float, old: float, returned: float, clip: float) -> Number:
    near = min(max(v, old - clip), old + clip)
    if (near - returned) ** 2 > (v - returned) ** 2:
        return (near - returned) ** 2 / 2, 0.0
    return (v - returned) ** 2 / 2, v - returned


clips = st.sampled_from([0.0, 0.2, 0.28, 1.0, 5, math.inf])
CLIPS = {"clip_low": clips, "clip_high": clips}
LOSSES: dict[str, tuple[Any, Any, int, dict[str, Any]]] = {
    "ppo": (
        policy.clipped_policy_loss,
        ppo,
        3,
        {**CLIPS, "dual_clip": st.sampled_from([None, 3.0, 1.5])},
    ),
    "cispo": (policy.cispo_loss, cispo, 3, CLIPS),
    "kl": (policy.kl_penalty, kl, 2, {"estimator": st.sampled_from(["k1", "k2", "k3"])}),
    "value": (policy.clipped_value_loss, value, 3, {"clip": clips}),
}


@pytest.mark.parametrize("name", LOSSES)
@given(data=st.data())
@search
@exact_or_refused
def test_token_losses_and_gradients_are_those_of_a_loop(name, data):
    function, loop, arity, choices = LOSSES[name]
    options = {key: data.draw(of, label=key) for key, of in choices.items()}
    weights = data.draw(st.lists(st.sampled_from([0.0, 1.0, 0.5]), max_size=5))
    inputs = [[data.draw(st.floats(-3, 3) if w else MASKED) for w in weights] for _ in range(arity)]
    given = {str(n): torch.tensor(x, dtype=F64) for n, x in enumerate(inputs)}
    how = data.draw(changes([*given], [*options]))
    given = with_changes({"0": given["0"].requires_grad_(), **given}, how)
    out = called(function, *given.values(), changes=how, **with_changes(options, how))
    if how:
        return
    total = weighted_sum(torch.tensor(weights, dtype=F64), getattr(out, "losses", out))
    total.backward()
    expected = [
        loop(*x, **options) if w else (0, 0) for w, *x in zip(weights, *inputs, strict=True)
    ]
    # At a kink either slope is right.
    kinks = [
        {loop(x[0] + d, *x[1:], **options)[1] for d in (-1e-9, 1e-9)} if w else {0}
        for w, *x in zip(weights, *inputs, strict=True)
    ]
    wanted = math.fsum(w * v for w, (v, _) in zip(weights, expected, strict=True))
    room = 1e-12 * (1 + sum(abs(v) for v, _ in expected))
    assert total.item() == pytest.approx(wanted, rel=0, abs=room)
    for w, got, (_, slope), beside in zip(
        weights, listed(given["0"].grad), expected, kinks, strict=True
    ):
        near = [pytest.approx(w * x, rel=1e-6, abs=1e-12) for x in beside]
        assert got == pytest.approx(w * slope, rel=1e-12, abs=1e-14) or got in near


@given(st.lists(st.lists(st.one_of(st.floats(-9, 9), MASKED), min_size=3, max_size=3), max_size=3))
@search
def test_entropy_is_that_of_a_loop_and_never_poisons_a_gradient(rows):
    logits = torch.tensor(rows, dtype=F64).view(-1, 3).requires_grad_()
    entropy = policy.token_entropy(logits)
    weighted_sum(torch.tensor([n % 2.0 for n in range(len(rows))], dtype=F64), entropy).backward()
    for n, (row, got, slope) in enumerate(zip(rows, listed(entropy), logits.grad, strict=True)):
        assert n % 2 or not slope.any()
        if not math.isfinite(max(row)) or any(map(math.isnan, row)):
            assert math.isnan(got)
            continue
        p = [math.exp(z - max(row)) for z in row]
        wanted = -math.fsum(x / sum(p) * math.log(x / sum(p)) for x in p if x)
        assert got == pytest.approx(wanted, abs=1e-12)
        assert bool(slope.isfinite().all())
