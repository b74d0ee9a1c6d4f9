"""Masks that the model makes: gradients and reports are those of the whole step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from megatron_loss_agg import Term
from megatron_loss_agg.mcore import LateMicrobatch, LossHook, TokenLoss, read_samples
from tests.host.harness import EXACT, TOPOLOGIES, build_chunks, data_for, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import PLACES, aggregation, weights_of

pytestmark = pytest.mark.host

OPTIONS: dict[str, dict[str, Any]] = {"sum": {"divisor": 3.0}}
SUMMED = ("sample_mean", "microbatch_mean")  # need sums of masks
MODES = ("sum", "constant", "sample_sum", *SUMMED)
# A pack's samples are not told apart, as `sample_mean` needs.
PLANNED = {
    ("dp2", "bshd"): MODES,
    ("dp2", "thd"): MODES[:3] + MODES[4:],
    ("cp2", "bshd"): MODES,
    ("cp2", "thd"): MODES[:3] + MODES[4:],
    ("tp2-sp", "bshd"): SUMMED,
    ("pp2", "bshd"): SUMMED,
}
CASES = [
    (*place, mode, "01" if mode == "token_mean" else "fractional", per_token)
    for place, modes in PLANNED.items()
    for per_token in (False, True)
    for mode in [*modes, *["token_mean"] * per_token]
]


def hidden(data: Iterator[Any] | None) -> Iterator[Any] | None:
    """Batches whose mask the hook cannot read."""
    return data and ({**b, "made": b["loss_mask"], "loss_mask": None} for b in data)


def forward_step(data_iterator: Any, model: Any, script: Any = None) -> Any:
    """`gpt.forward_step` or ``script``; shows the mask to the loss function alone."""
    from tests.host import gpt

    batch = data_iterator and next(data_iterator)
    return (script or gpt.forward_step)(
        batch and iter([{**batch, "loss_mask": batch["made"]}]), model
    )


def count(batch: Any) -> LateMicrobatch:
    offsets = batch.get("cu_seqlens")
    return LateMicrobatch(len(batch["tokens"]) if offsets is None else len(offsets) - 1)


def step(chunks: Any, data: Any, hook: LossHook, number: int = 4, **options: Any) -> Any:
    from tests.host import gpt

    return gpt.run_step(
        hook, chunks, data, number, **{"forward_step_func": forward_step, **options}
    )


def places_of(topology: str) -> Any:
    return PLACES[TOPOLOGIES[topology].data_parallel_size]


def facts_of_rank(topology: str, cases: list[Any]) -> dict[Any, Any]:
    """By case: the error of the gradient, and what was reported."""
    from tests.host import gpt, gradients

    shape, places, found = TOPOLOGIES[topology], places_of(topology), {}
    gpt.initialize(**shape.sizes)
    models = {flag: build_chunks(shape, flag) for flag in (False, True)}
    for (layout, mode, masks, per_token), expected in cases:
        chunks, data = models[per_token], hidden(data_for(shape, places, layout, masks))
        agg = aggregation(mode, **OPTIONS.get(mode, {}))
        hook = LossHook(agg, read_batch=count if layout == "thd" else read_samples)
        reports = step(chunks, data, hook)
        names = ("lm loss", f"{mode} loss") if reports else ()
        found[layout, mode, masks, per_token] = (
            gradients.error(chunks, expected),
            {name: gpt.reported(reports, name) for name in names},
        )
    return found


def weights(topology: str, mode: str, masks: str) -> Any:
    return weights_of(mode, places_of(topology), masks, **OPTIONS.get(mode, {}))


@functools.cache
def facts(topology: str) -> list[dict[Any, Any]]:
    cases = [
        (case, reference().gradient(weights(topology, *case[1:3])))
        for of, *rest in CASES
        if of == topology and (case := tuple(rest))
    ]
    return run_host_ranks(facts_of_rank, TOPOLOGIES[topology].world_size, topology, cases)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_gradient_and_the_reports_are_those_of_the_whole_step(case: Any) -> None:
    topology, layout, mode, masks, per_token = case
    for rank in facts(topology):
        error, reports = rank[layout, mode, masks, per_token]
        assert error <= EXACT
        for name, value in reports.items():
            shown = "token_mean" if name == "lm loss" else mode
            expected = reference().loss(weights(topology, shown, masks))
            assert value == pytest.approx(expected, rel=1e-13)


# On two context-parallel ranks: how each gathers the losses of all tokens, or another way to train.
OTHERS = [
    (way, mode, per_token)
    for way in ("local_grad", "reduced_grad", "two calls")
    for mode, per_token in product(SUMMED, (False, True))
] + [(way, "token_mean", True) for way in ("local_grad", "reduced_grad", "two calls")]
OTHERS += [("two terms", "sample_mean", flag) for flag in (False, True)]


def errors_of_others(expected: dict[str, Any]) -> dict[Any, float]:
    from tests.host import gpt, gradients, whole

    gpt.initialize(cp=2)
    models, places = {flag: gpt.ddp_model(flag) for flag in (False, True)}, places_of("cp2")
    found = {}
    for way, mode, per_token in OTHERS:
        ddp, data = models[per_token], hidden(data_for(TOPOLOGIES["cp2"], places, "bshd"))
        hook = LossHook(aggregation(mode), read_batch=read_samples)
        if way == "two terms":  # of the same losses
            terms = {"a": aggregation(mode), "b": Term(aggregation("sum"), coefficient=0.5)}
            both = gpt.forward_step_with(
                lambda _, mask: TokenLoss(lambda x: ({"a": x, "b": x}, {}), mask)
            )
            shown = functools.partial(forward_step, script=both)
            step(ddp, data, LossHook(terms, read_batch=read_samples), forward_step_func=shown)
        elif way == "two calls":
            with hook.step([LateMicrobatch(len(rows)) for rows in places[0]]):
                step(ddp, data, hook, 1)
                step(ddp, data, hook, 3, zero_grad=False)
        else:
            gathers = functools.partial(forward_step, script=whole.script(way))
            step(ddp, data, hook, forward_step_func=gathers)
        wanted = expected["two terms" if way == "two terms" else mode]
        found[way, mode, per_token] = gradients.error(ddp, wanted)
    return found


@functools.cache
def other_facts() -> list[dict[Any, float]]:
    modes = {mode for _, mode, _ in OTHERS}
    places = places_of("cp2")
    weights = {mode: weights_of(mode, places) for mode in modes}
    half = [(i, [0.5 * x for x in w]) for i, w in weights_of("sum", places)]
    weights["two terms"] = weights["sample_mean"] + half
    wanted = {name: reference().gradient(of) for name, of in weights.items()}
    return run_host_ranks(errors_of_others, 2, wanted)


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: "-".join(map(str, case)))
def test_whole_losses_several_calls_and_several_terms_are_exact(case: Any) -> None:
    assert max(rank[case] for rank in other_facts()) <= EXACT
