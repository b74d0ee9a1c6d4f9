"""Weights, counts and coefficients of steps on one process."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, Term, token_weights
from tests import oracle
from tests.fuzz import inputs
from tests.fuzz.draw import F64, Draw
from tests.fuzz.judge import called, require, same, same_weights
from tests.fuzz.reading import Read, expected_weights, listed

DTYPES = (torch.float32, F64, torch.bfloat16)


def one_microbatch(draw: Draw) -> None:
    """`token_weights`."""
    agg = draw.option(inputs.aggregation(draw))
    given = inputs.microbatch(draw, weighted=draw.flag(0.3))
    dtype = draw.option(draw.choice(DTYPES), torch.float16, torch.int64)
    w = called(lambda: token_weights(agg, dtype=dtype, **given), strange=draw.strange)
    require(w.dtype == dtype and w.shape == given["loss_mask"].shape, "another shape or dtype")
    same_weights("weights", [(w, expected_weights(agg, [[Read.of(given)]])[0][0])], dtype)


def plan(draw: Draw) -> None:
    """`StepPlan.build`, and everything that a plan says."""
    agg = inputs.aggregation(draw)
    given = [
        inputs.microbatch(draw, rejected=draw.flag(), weighted=draw.flag(0.3))
        for _ in range(draw.randrange(4))
    ]
    microbatches = [called(lambda g=g: Microbatch(**g), strange=draw.strange) for g in given]
    listing = draw.option(microbatches, [*microbatches, None], iter(microbatches))
    built = called(lambda: StepPlan.build(agg, listing), strange=draw.strange)
    step = [Read.of(g) for g in given] if listing else []
    _check_counts(built, step)
    if not step:
        return
    i = draw.option(draw.randrange(len(step)), len(step), "0")
    dtype = draw.choice(DTYPES)
    got = called(lambda: built.weights(i, dtype), strange=draw.strange)
    wanted = expected_weights(agg, [step])[0]
    pairs = [(built.weights(k, dtype), w) for k, w in enumerate(wanted)]
    same_weights("weights", pairs, dtype)
    require(torch.equal(got, pairs[i][0]), "weights differ from call to call")
    _check_samples(built, agg, step, draw, i)
    _check_advantages(built, wanted[i], draw, i)


def _check_counts(built: StepPlan, step: list[Read]) -> None:
    counts, agg = built.counts, built.aggregation
    kept = [(s, gone) for m in step for s, gone in zip(m.samples, m.rejected, strict=True)]
    counted = [s for s, gone in kept if not (gone and agg.rejected == "skip")]
    one = [[counted]]
    tokens = sum(m for s in counted for m in s.mask)
    same("tokens", [(torch.tensor(counts.tokens, dtype=F64), tokens)], 1e-13, 0)
    require(counts.samples == len(counted), f"{counts.samples} samples of {len(counted)}")
    require(counts.microbatches == len(step), f"{counts.microbatches} microbatches")
    require(built.active_tokens == [sum(x != 0 for x in m.values) for m in step], "active tokens")
    require(built.is_empty == (not any(m for s, gone in kept if not gone for m in s.mask)), "empty")
    for unit in inputs.UNITS:
        if unit in (agg.within, agg.across):
            wanted = oracle.number_of(one, unit)
            require(getattr(counts, f"{unit}s") == wanted, f"not {wanted} {unit}s")


def _check_samples(
    built: StepPlan, agg: LossAggregation, step: list[Read], draw: Draw, i: int
) -> None:
    """Coefficients and sums, which are by sample."""
    i = range(len(step))[i]  # also from the end
    of_sample = [sum(s.mask) for s in step[i].samples]
    same("mask sums", [(built.mask_sums(i), of_sample)], 1e-13, 0)
    weights = expected_weights(agg, [step])[0][i]
    by_sample = [sum(weights[t] for t in places) for places in step[i].places]
    same("coefficients", [(built.coefficients(i) * built.mask_sums(i), by_sample)], 1e-13, 0)
    unit = draw.option(agg.within or "sample", *inputs.UNITS, "step", "token")
    sums = called(lambda: built.group_sums(unit, i), strange=draw.strange)
    skips = agg.rejected == "skip"
    counted = [
        [s for s, gone in zip(m.samples, m.rejected, strict=True) if not (gone and skips)]
        for m in step
    ]
    total = oracle.mask_sums([counted], unit)
    ordinal = iter(range(len(step[i].samples)))
    wanted = []
    for s, gone in zip(step[i].samples, step[i].rejected, strict=True):
        skipped = gone and skips
        place = (0, i, -1 if skipped else next(ordinal))
        alone = skipped and unit == "sample"
        wanted.append(0.0 if alone else total.get(oracle.key_of(unit, place, s), 0.0))
    same(f"sums by {unit}", [(sums, wanted)], 1e-13, 0)


def _check_advantages(built: StepPlan, weights: list[float], draw: Draw, i: int) -> None:
    mask = built.microbatches[i].loss_mask
    values = torch.tensor([draw.uniform(-2, 2) for _ in weights], dtype=F64).view(mask.shape)
    given = draw.maybe(values.to(draw.choice((torch.float32, F64, torch.bfloat16))))
    got = called(lambda: built.scaled_advantages(i, given), strange=draw.strange)
    dtype = torch.promote_types(given.dtype, torch.float32)
    require(got.dtype == dtype, "advantages of another dtype")
    wanted = [
        a * w if w else 0.0
        for a, w in zip(given.detach().double().reshape(-1).tolist(), weights, strict=True)
    ]
    if all(abs(x) < 1e38 for x in wanted):
        same_weights("advantages", [(got, wanted)], dtype)


def sums_alone(draw: Draw) -> None:
    """`StepPlan.from_mask_sums`, by microbatch or for all samples at once."""
    agg = inputs.aggregation(draw)
    sizes = [draw.randrange(4) for _ in range(draw.randrange(1, 4))]
    if draw.flag():
        sizes = [sum(sizes)]
    form = draw.choice((torch.Tensor.clone, torch.Tensor.tolist, torch.Tensor.numpy))
    sums = [draw.maybe(form(inputs.mask_values(draw, n))) for n in sizes]
    ids = {f"{unit}_ids": [draw.maybe(inputs.ids(draw, n)) for n in sizes] for unit in inputs.UNITS}
    given: Any = sums
    if len(sizes) == 1 and draw.flag():
        given, ids = sums[0], {name: of_all for name, (of_all,) in ids.items()}
    built = called(lambda: StepPlan.from_mask_sums(agg, given, **ids), strange=draw.strange)
    one = given is sums[0] or all(isinstance(x, float) for x in given)
    by_microbatch = [given] if one else sums
    if isinstance(given, (list, tuple)) and not given:
        by_microbatch = []  # a rank without microbatches
    ends = [*accumulate(map(len, by_microbatch), initial=0)]
    of_all = [_ids(x, ends[-1]) for x in ids.values()]
    reads = [
        Read.of_sums(x, *(of[begin : begin + len(x)] for of in of_all))
        for x, begin in zip(by_microbatch, ends, strict=False)
    ]
    for i, wanted in enumerate(expected_weights(agg, [reads])[0]):
        same("coefficients", [(built.coefficients(i) * built.mask_sums(i), wanted)], 1e-13, 0)


def _ids(given: Any, number: int) -> list[Any]:
    """Of all samples."""
    if given is None:
        return [0] * number
    if isinstance(given, torch.Tensor):
        return given.tolist()
    return [x for part in given for x in ([part] if isinstance(part, str) else _ids(part, 0))]


def terms(draw: Draw) -> None:
    """`StepPlan.build_terms` and the loss of all terms, with its gradient."""
    first, given = (inputs.microbatch(draw, weighted=draw.flag(0.3)) for _ in range(2))
    names = ["policy", "kl", "value"][: draw.randrange(1, 4)]
    coefficients = [draw.option(draw.choice((1.0, 0.0, -0.5, 2)), -1e3) for _ in names]
    wanted_terms = {
        name: called(lambda c=c: Term(inputs.aggregation(draw), c), strange=draw.strange)
        for name, c in zip(names, coefficients, strict=True)
    }
    masks = {name: draw.choice((first, given)) if draw.flag(0.2) else first for name in names}
    masks = {name: x for name, x in masks.items() if x is first or _same_shape(x, first)}
    masks = {name: masks.get(name, first) for name in names}
    made = {
        name: called(lambda x=x: Microbatch(**x), strange=draw.strange) for name, x in masks.items()
    }
    entry = draw.option(
        made if draw.flag() or len({*map(id, masks.values())}) > 1 else made[names[0]]
    )
    built = called(lambda: StepPlan.build_terms(wanted_terms, [entry]), strange=draw.strange)
    dtype = draw.choice((torch.float32, F64))
    shape = first["loss_mask"].shape
    losses = {
        name: torch.tensor([draw.uniform(-2, 2) for _ in range(shape.numel())], dtype=dtype)
        .view(shape)
        .requires_grad_()
        for name in names
    }
    given_losses = draw.option({name: draw.maybe(x) for name, x in losses.items()})
    total = called(lambda: built.weighted_sum(0, given_losses), strange=draw.strange)
    if draw.strange:
        return
    total.backward()
    parts, size = [], 0.0
    for name in names:
        term = wanted_terms[name]
        w = expected_weights(term.aggregation, [[Read.of(masks[name])]])[0][0]
        flat = losses[name].detach().double().reshape(-1).tolist()
        of_term = [term.coefficient * a * b for a, b in zip(w, flat, strict=True)]
        parts, size = parts + of_term, size + sum(map(abs, of_term))
        slope = [term.coefficient * a for a in w]
        same_weights(f"gradient of {name}", [(losses[name].grad, slope)], dtype)
    off = abs(total.item() - sum(parts))
    require(off <= (1e-6 if dtype == torch.float32 else 1e-13) * size + 1e-44, "the loss")


def _same_shape(one: dict[str, Any], other: dict[str, Any]) -> bool:
    shapes = [getattr(x["loss_mask"], "shape", None) for x in (one, other)]
    return shapes[0] == shapes[1]


def custom(draw: Draw) -> None:
    """A custom function's weights, taken as they are or refused."""
    mask = inputs.mask_values(draw, 6).view(2, 3)
    values = torch.tensor([draw.uniform(-2, 2) for _ in range(6)], dtype=F64).view(2, 3)
    returned = draw.maybe(values.masked_fill(mask == 0, 0))
    function = draw.option(lambda plan, i: returned)
    agg = called(
        lambda: LossAggregation(mode="custom", function=function, rejected="skip"),
        strange=draw.strange,
    )
    rejected = torch.tensor([draw.flag(0.1), False])
    microbatch = Microbatch(mask, rejected=rejected)
    built = called(lambda: StepPlan.build(agg, [microbatch]), strange=draw.strange)
    dtype = draw.choice(DTYPES)
    strange = draw.strange or bool(rejected.any())
    # `object` is callable, and says itself that it takes no arguments.
    w = called(lambda: built.weights(0, dtype), strange=strange)
    require(not w[mask == 0].any() and not w[rejected].any(), "weights where there are none")
    for got, wanted in zip(listed(w), listed(returned), strict=True):
        require(abs(got - wanted) <= 2.0**-8 * abs(wanted) + 1e-38, f"{got} for {wanted}")
