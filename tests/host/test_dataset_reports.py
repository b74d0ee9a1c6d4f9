"""Reports by data set, reduced as Megatron's training loop and its evaluation do it.

The oracle reduces the losses of the fp64 reference over each data set's samples alone.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch

from megatron_loss_agg.mcore import DatasetReports, RouterLosses, read_batch
from tests.host import gpt
from tests.host.cases import Batch, Case, evaluate, models_of, reduced, take
from tests.host.harness import EXACT, MODELS, TOPOLOGIES, run_host_ranks
from tests.host.reference import reference
from tests.host.refusals import Row, assert_told, hook_of, thd
from tests.host.scripts import by_sample
from tests.host.steps import (
    EMPTY,
    N_MB,
    PLACES,
    PROMPTS,
    Places,
    Weights,
    factored,
    weights_of,
    with_factors,
)

# Of each sample; a prompt's samples with tokens are of one. 5 has no token, and is never reported.
DATASETS = (3, 3, 0, 12, 3, 5, 12, 3, 3, 0)
MEANS: dict[str, dict[str, Any]] = {"token_mean": {}, "sample_mean": {}, "prompt_mean": {}}
SUMS: dict[str, dict[str, Any]] = {"constant": {"divisor": 7.0}, "sum": {}, "custom": {}}
MODES = MEANS | SUMS
RUNS = [*(("thd", mode, False) for mode in MODES)]
RUNS += [("bshd", "sample_mean", False), ("bshd", "constant", False)]
# With factors of tokens, which multiply losses and are in no denominator.
RUNS += [("thd", "sample_mean", True), ("bshd", "token_mean", True), ("thd", "custom", True)]
Values = dict[str, float]


def chosen(places: Places, keep: Any) -> Places:
    return tuple(tuple(tuple(i for i in of_mb if keep(i)) for of_mb in rank) for rank in places)


ALL: Places = (((1, 2, 3), (5, 0)), ((4, 6, 7), (8, 9)))
WITHOUT_12, WITHOUT_0 = (chosen(ALL, lambda i, d=d: DATASETS[i] != d) for d in (12, 0))
# Data set 12 comes in the second step, and 0 is missing in the third.
STEPS = [WITHOUT_12, ALL, WITHOUT_0]
# Two calls: one lacks a data set, the other some samples of another one.
EVALUATION = [WITHOUT_12, chosen(ALL, lambda i: i not in (0, 8))]


def with_ids(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    key = "dataset_ids" if "cu_seqlens" in batch else "dataset_id"
    return by_sample(with_factors(batch, of_mb), of_mb, **{key: DATASETS})


def case_of(mode: str, layout: str = "thd", has_factors: bool = False) -> Case:
    read = functools.partial(read_batch, factors="factors") if has_factors else read_batch
    hook = {"extensions": [DatasetReports()], "read_batch": read}
    return Case(mode, MODES[mode], layout=layout, batch=with_ids, hook=hook)


def reported(name: str) -> dict[Any, Any]:
    """Every rank: what is reported by each step, and by an evaluation."""
    topology, found = TOPOLOGIES[name], {}
    chunks = models_of(topology)(case_of("sum"))
    for layout, mode, has_factors in RUNS:
        case = case_of(mode, layout, has_factors)
        hook = case.new_hook()
        steps = [take(replace(case, places=x), topology, chunks, hook) for x in STEPS]
        evaluated = evaluate(case, EVALUATION, topology, chunks, hook)
        found[layout, mode, has_factors] = [*map(reduced, steps)], evaluated
    found["calls"] = of_calls(chunks)
    return found


def of_calls(chunks: Any) -> list[tuple[Values, Values]]:
    """What is reported by steps of two calls, with evaluations between them; and of one call."""
    hook, other = (case_of("sample_mean").new_hook() for _ in range(2))
    found = []
    for places in STEPS[::-1]:
        batches = [*replace(case_of("sample_mean"), places=places).data(gpt.data_rank())]
        reports: list[Any] = []
        with hook.step([read_batch(batch) for batch in batches]):
            for batch in batches:
                reports += gpt.run_step(hook, chunks, iter([batch]), 1, zero_grad=not reports)
                with torch.no_grad():
                    gpt.run_step(hook, chunks, iter([batch]), 1, forward_only=True, zero_grad=False)
        of_one_call = gpt.run_step(other, chunks, iter(batches), 2)
        found.append((reduced(reports), reduced(of_one_call)))
    return found


@functools.cache
def facts(topology: str) -> dict[Any, Any]:
    of_rank, *others = run_host_ranks(reported, TOPOLOGIES[topology].world_size, topology)
    assert {*map(repr, others)} == {repr(of_rank)}
    return of_rank


def expected(mode: str, calls: list[Places], has_factors: bool) -> Values:
    """Means of each data set's samples alone; parts of sums, averaged as the loss is,
    over the calls that have the data set.
    """

    def loss(weights: Weights) -> float:
        return loss_of(factored(weights) if has_factors else weights)

    whole: Places = tuple(sum(ranks, ()) for ranks in zip(*calls, strict=True))
    found = {}
    for d in {DATASETS[i] for i in samples(whole) if i != EMPTY}:
        key = f"loss of dataset {d}"
        found[f"lm {key}"] = loss_of(weights_of("token_mean", alone(whole, d)))
        if mode in ("token_mean", "sample_mean"):
            found[f"{mode} {key}"] = loss(weights_of(mode, alone(whole, d), empty="skip"))
            continue
        if mode == "prompt_mean":  # a prompt counts in each call
            losses = [loss(weights_of(mode, alone(c, d), empty="skip")) for c in calls]
            counts = [len({PROMPTS[i] for i in samples(alone(c, d)) if i != EMPTY}) for c in calls]
        else:
            having = [c for c in calls if samples(alone(c, d))]
            of_calls = [weights_of(mode, c, **MODES[mode]) for c in having]
            losses = [loss([(i, w) for i, w in of_c if DATASETS[i] == d]) for of_c in of_calls]
            counts = [len(samples(c)) if mode == "constant" else 1 for c in having]
        total = sum(n * x for n, x in zip(counts, losses, strict=True))
        found[f"{mode} {key}"] = total / sum(counts)
    return found


def alone(places: Places, dataset: int) -> Places:
    """The samples of one data set."""
    return chosen(places, lambda i: DATASETS[i] == dataset)


def loss_of(weights: Weights) -> float:
    return reference().loss(weights) if weights else 0.0


def samples(places: Places) -> list[int]:
    return [i for rank in places for of_mb in rank for i in of_mb]


def by_dataset(values: Values) -> Values:
    return {key: value for key, value in values.items() if " of dataset " in key}


@pytest.mark.parametrize("layout, mode, has_factors", RUNS)
@pytest.mark.parametrize("topology", ["dp2", "dp2-cp2"])
def test_each_data_set_is_reduced_alone(
    topology: str, layout: str, mode: str, has_factors: bool
) -> None:
    trained, evaluated = facts(topology)[layout, mode, has_factors]
    for number, (values, places) in enumerate(zip(trained, STEPS, strict=True)):
        wanted = expected(mode, [places], has_factors)
        for key in wanted:
            if number == 1 and key.endswith(" 12") and not key.startswith(tuple(SUMS)):
                wanted[key] = math.nan  # new
        if number == 2:
            missing = math.nan if mode in MEANS else 0.0
            wanted |= {"lm loss of dataset 0": math.nan, f"{mode} loss of dataset 0": missing}
        assert by_dataset(values) == pytest.approx(wanted, rel=EXACT, abs=0, nan_ok=True)
        if mode in SUMS:
            parts = [x for key, x in by_dataset(values).items() if key.startswith(mode)]
            assert sum(parts) == pytest.approx(values[f"{mode} loss"], rel=EXACT, abs=0)
    wanted = expected(mode, EVALUATION, has_factors)
    assert by_dataset(evaluated) == pytest.approx(wanted, rel=EXACT, abs=0)


def test_a_step_of_several_calls_is_one_step_of_the_log() -> None:
    for values, of_one_call in facts("dp2")["calls"]:
        assert values == pytest.approx(of_one_call, rel=EXACT, abs=0, nan_ok=True)


RELEASE = version("megatron-core")
ROWS = {
    "no data sets": Row(
        "GroupError: a report groups by dataset and a microbatch has",
        hook=hook_of("sum", extensions=[DatasetReports()]),
    ),
    "routers": Row(
        ""
        if RELEASE.startswith("0.19.")
        else f"HostError: --loss-aggregation-moe step (RouterLosses()) with Megatron-Core {RELEASE}"
        " ... whose weights of these losses are not known; expected a release of 0.19",
        topology="dp1",
        hook=hook_of("token_mean", extensions=[RouterLosses()]),
        data=thd(*PLACES[1]),
        number=N_MB,
        per_token=True,
        model={
            **MODELS["moe"],
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1.0,
        },
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_part_without_what_it_needs_is_refused(name: str) -> None:
    """Ids in the batches; and a release of the host whose weights of its losses are known."""
    assert_told(__name__, name)
