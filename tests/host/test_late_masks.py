"""Masks that the model makes: gradients and reports are exact, the rest is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from megatron_loss_agg.mcore import LateMicrobatch, LossHook
from tests.host.harness import EXACT, TOPOLOGIES, build_chunks, data_for, error_of, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import PLACES, aggregation, weights_of

pytestmark = pytest.mark.host

ROWS = {"sum": {"divisor": 3.0}, "constant": {}, "sample_sum": {}, "microbatch_mean": {}}
ALWAYS = {**ROWS, "sample_mean": {}}
# By topology: layouts; a pack's samples are not told apart, as `sample_mean` needs.
LAYOUTS = {"dp2": ("bshd", "thd"), "cp2": ("bshd", "thd"), "tp2-sp": ("bshd",), "pp2": ("bshd",)}
CASES = [
    (topology, layout, mode, masks, per_token)
    for topology, layouts in LAYOUTS.items()
    for layout, per_token in product(layouts, (False, True))
    for mode in [*(ALWAYS if layout == "bshd" else ROWS), *["token_mean"] * per_token]
    for masks in (["01"] if mode == "token_mean" or topology == "pp2" else ["01", "fractional"])
]


def hidden(data: Iterator[Any] | None) -> Iterator[Any] | None:
    """Batches whose mask the hook cannot read."""
    return data and ({**b, "made": b["loss_mask"], "loss_mask": None} for b in data)


def forward_step(data_iterator: Any, model: Any) -> Any:
    """Shows the mask to the loss function alone."""
    from tests.host import gpt

    batch = data_iterator and next(data_iterator)
    return gpt.forward_step(batch and iter([{**batch, "loss_mask": batch["made"]}]), model)


def count(batch: Any) -> LateMicrobatch:
    offsets = batch.get("cu_seqlens")
    return LateMicrobatch(len(batch["tokens"]) if offsets is None else len(offsets) - 1)


def step(chunks: Any, data: Any, hook: LossHook, number: int = 4, **options: Any) -> Any:
    from tests.host import gpt

    return gpt.run_step(
        hook, chunks, hidden(data), number, **{"forward_step_func": forward_step, **options}
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
        chunks, data = models[per_token], data_for(shape, places, layout, masks)
        read = {"read_batch": count} if layout == "thd" else {}
        agg = aggregation(mode, **ALWAYS.get(mode, {}))
        reports = step(chunks, data, LossHook(agg, mask="model", **read))
        names = ("lm loss", f"{mode} loss") if reports else ()
        found[layout, mode, masks, per_token] = (
            gradients.error(chunks, expected),
            {name: gpt.reported(reports, name) for name in names},
        )
    return found


def weights(topology: str, mode: str, masks: str) -> Any:
    return weights_of(mode, places_of(topology), masks, **ALWAYS.get(mode, {}))


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
