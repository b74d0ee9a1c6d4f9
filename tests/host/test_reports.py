"""Logged reports: reduced over microbatches, ranks and calls as Megatron's loops do it.

``lm loss`` is the mean over the tokens in every mode, ``<mode> loss`` the aggregated loss, of a
step or of an evaluation of several calls, of all samples or of a data set; each as the losses of
the fp64 reference and the oracle's weights give it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import product
from statistics import mean
from typing import Any

import pytest
import torch
from routers import RouterLosses
from torch import Tensor

from megatron_loss_agg.mcore import DatasetReports, TokenLoss
from tests import oracle
from tests.host import gpt
from tests.host.cases import (
    Batch,
    Case,
    Expected,
    assert_exact,
    by_the_oracle,
    covering,
    evaluate,
    models_of,
    run,
)
from tests.host.harness import EXACT, MODELS, TOPOLOGIES, run_host_ranks
from tests.host.reference import reference
from tests.host.refusals import Refusal, assert_told, two_rows
from tests.host.scripts import by_sample, gathered, of_terms, returning
from tests.host.steps import (
    EMPTY,
    NO_TOKENS,
    PLACES,
    PROMPTS,
    Places,
    aggregation,
    deal,
    sequences,
    weights_of,
    weights_with,
)
from tests.host.test_gradients import LOSSES


def with_another_key(losses: Tensor, mask: Tensor) -> Any:
    """Reports another pair of the script's own."""

    def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> Any:
        *loss, report = gpt.stock_loss_func(loss_mask, output_tensor)
        return *loss, {**report, "other": torch.tensor([3.0, 4.0])}

    return losses, partial(loss_func, mask)


LOOPS = {"training": {}, "evaluation": {"call": {"forward_only": True}}}
STEPS = covering(2, LOSSES, (False, True), tuple(LOOPS))


def with_the_scripts_own(case: Case) -> Expected:
    gradient, reports = by_the_oracle(case)
    return gradient, {**reports, "other": 3 / 4}


def test_reports_are_those_of_the_whole_step_and_the_rest_is_left_alone() -> None:
    way = {"places": deal(2, 3), "step": partial(returning, with_another_key)}
    cases = [
        dataclasses.replace(loss, per_token=flag, **way, **LOOPS[loop])
        for loss, flag, loop in STEPS
    ]
    assert_exact(TOPOLOGIES["dp2-cp2"], cases, with_the_scripts_own)


def ones_summed_in_bf16(iterator: Iterator[Batch], model: Any) -> Any:
    """Losses of 1, and a loss function that adds up their products with the mask in bf16."""
    losses, loss_func = gpt.forward_step(iterator, model)
    (mask,) = loss_func.args
    ones = (0 * losses + 1).bfloat16()
    return ones, partial(gpt.stock_loss_func, mask.bfloat16())


def test_a_sum_in_half_precision_is_reported_without_further_rounding() -> None:
    # A seventh of the 58 tokens is no number in bf16. The second step takes the sum of the loss
    # function, which the first one has verified.
    seven = tuple((i,) for i in (0, 1, 2, 3, 4, 8, 9))
    case = Case("sum", places=(seven,), step=ones_summed_in_bf16, times=2)
    ((_, reports),) = run(TOPOLOGIES["dp1"], [case])[case]
    assert reports["lm loss"] == pytest.approx(1.0, rel=1e-6)


def of_one_data_set(case: Case) -> Expected:
    gradient, reports = by_the_oracle(dataclasses.replace(case, mode="token_mean"))
    return gradient, {"dataset_mean loss": reports["token_mean loss"]}


def test_a_validation_set_without_ids_is_one_data_set() -> None:
    case = Case("dataset_mean", call={"forward_only": True})
    assert_exact(TOPOLOGIES["dp2"], [case], of_one_data_set)


# Of each sample; a prompt's samples with tokens are of one. That of `EMPTY` is never reported.
DATASETS = (3, 3, 0, 12, 3, 5, 12, 3, 3, 0)
MEANS: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {"empty": "skip"},
    "prompt_mean": {},
    "microbatch_mean": {"empty": "skip"},
}
SUMS: dict[str, dict[str, Any]] = {
    "sample_sum": {},
    "constant": {"divisor": 7.0},
    "sum": {},
    "custom": {},
}
MODES = MEANS | SUMS


def samples(places: Places) -> list[int]:
    return [i for rank in places for of_mb in rank for i in of_mb]


def active(places: Places) -> list[int]:
    return [i for i in samples(places) if i != EMPTY]


def chosen(places: Places, keep: Callable[[int], bool]) -> Places:
    return tuple(tuple(tuple(i for i in of_mb if keep(i)) for of_mb in rank) for rank in places)


# What a mean is over: as much each call of an evaluation weighs.
DENOMINATORS: dict[str, Callable[[Places], float]] = {
    "token_mean": lambda x: sum(sum(sequences()[i].sample.mask) for i in samples(x)),
    "sample_mean": lambda x: len(active(x)),
    "prompt_mean": lambda x: len({PROMPTS[i] for i in samples(x)}),
    "microbatch_mean": lambda x: sum(bool(active(((mb,),))) for rank in x for mb in rank),
    **dict.fromkeys(("sample_sum", "constant"), lambda x: len(samples(x))),
    **dict.fromkeys(("sum", "custom"), lambda _: 1),
}


def mean_of(calls: list[Places], mode: str, dataset: int | None = None) -> float:
    """Over the calls; of a data set a mean over its samples alone, or its part of a sum."""
    total, denominators = 0.0, 0.0
    for call in calls:
        of_dataset = chosen(call, lambda i: dataset in (None, DATASETS[i]))
        if not samples(of_dataset):
            continue
        alone = of_dataset if mode in MEANS else call
        weights = weights_of(mode, alone, **MODES[mode])
        weights = [(i, w) for i, w in weights if i in samples(of_dataset)]
        total += DENOMINATORS[mode](alone) * reference().loss(weights)
        denominators += DENOMINATORS[mode](alone)
    return total / (denominators or 1.0)


def values(mode: str, calls: list[Places]) -> dict[str, float]:
    """By data set."""
    found = {}
    for d in sorted({DATASETS[i] for call in calls for i in active(call)}):
        found[f"lm loss of dataset {d}"] = mean_of(calls, "token_mean", d)
        found[f"{mode} loss of dataset {d}"] = mean_of(calls, mode, d)
    return found


def with_ids(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    key = "dataset_ids" if "cu_seqlens" in batch else "dataset_id"
    return by_sample(batch, of_mb, **{key: DATASETS})


def by_dataset(mode: str, **more: Any) -> Case:
    hook = {"extensions": [DatasetReports()], "aggregate_evaluation": True}
    return Case(mode, **{"options": MODES[mode], "batch": with_ids, "hook": hook, **more})


def nan_at_padding(losses: Tensor, mask: Tensor) -> tuple[Tensor, TokenLoss]:
    return losses, TokenLoss(lambda x: x.masked_fill(mask == 0, math.nan), mask)


OF_DATASETS = [mode for mode in MODES if mode != "microbatch_mean"]
# Besides those of packs: a mean and a sum.
WAYS: list[dict[str, Any]] = [{"layout": "bshd"}, {"calls": (1, 1)}, {"step": gathered}]
WAYS += [{"step": partial(returning, nan_at_padding)}]
ROWS_AND_CALLS = [*product(("sample_mean", "sample_sum"), WAYS)]
WHOLE: Places = (((1, 2, 3), (5, 0)), ((4, 7), (6, 8, 9)))  # 12 in both microbatches
WITHOUT_12, WITHOUT_0 = (chosen(WHOLE, lambda i, d=d: DATASETS[i] != d) for d in (12, 0))


def test_each_data_set_is_reduced_alone() -> None:
    """Data set 12 comes in the second step, and 0 is missing in the third."""
    wanted: dict[Case, dict[str, float]] = {}
    rows: list[tuple[str, dict[str, Any]]] = [(mode, {}) for mode in OF_DATASETS]
    for mode, way in [*rows, *ROWS_AND_CALLS]:
        step = by_dataset(mode, places=WITHOUT_12, **way)
        evaluation = by_dataset(mode, after=step, call={"forward_only": True})
        evaluation = dataclasses.replace(evaluation, places=WHOLE)
        second, third = (
            dataclasses.replace(step, places=places, after=step) for places in (WHOLE, WITHOUT_0)
        )
        for case in (step, evaluation, second, third):
            wanted[case] = values(mode, [case.places])
        of_mode = f"{mode} loss of dataset"
        wanted[second]["lm loss of dataset 12"] = math.nan  # the log has no mean of 12 before
        if mode in MEANS:
            wanted[second][f"{of_mode} 12"] = math.nan
        missing = math.nan if mode in MEANS else 0.0
        wanted[third] |= {"lm loss of dataset 0": math.nan, f"{of_mode} 0": missing}
    for case, ranks in run(TOPOLOGIES["dp2-cp2"], [*wanted]).items():
        for _, reports in ranks:
            found = {key: x for key, x in reports.items() if " of dataset " in key}
            assert found == pytest.approx(wanted[case], rel=EXACT, abs=0, nan_ok=True), case


def test_a_data_set_without_weight_has_the_mean_over_its_tokens_alone() -> None:
    options = {"sample_weights": "count", "dataset_weights": {0: 1.0, 3: 0.0, 5: 1.0, 12: 2.0}}
    step = dataclasses.replace(by_dataset("sample_mean"), options=options)
    evaluation = dataclasses.replace(step, after=step, call={"forward_only": True})
    wanted = values("sample_mean", [step.places]) | {"sample_mean loss of dataset 3": math.nan}
    ignored = reference().gradient(weights_of("sample_mean", step.places))
    for ranks in run(TOPOLOGIES["dp2"], [step, evaluation], [ignored] * 2).values():
        for _, reports in ranks:
            found = {key: x for key, x in reports.items() if " of dataset " in key}
            assert found == pytest.approx(wanted, rel=EXACT, nan_ok=True)


def test_data_sets_are_those_of_the_step_on_every_stage_and_tensor_parallel_rank() -> None:
    case = by_dataset("sample_mean", places=PLACES[1])
    ranks = [reports for _, reports in run(TOPOLOGIES["pp2-tp2-sp"], [case])[case] if reports]
    assert len(ranks) == 2  # of the last stage
    for reports in ranks:
        found = {key: x for key, x in reports.items() if " of dataset " in key}
        assert found == pytest.approx(values("sample_mean", [PLACES[1]]), rel=EXACT)


# Evaluations of several calls, of which one lacks a data set, and one has no tokens. Megatron adds
# up the pairs of all calls; under ``--sft`` it averages the quotients of each call, and the calls.
CALLS: list[Places] = [
    (((0, 1), (2,)), ((3,), (4, 6))),
    NO_TOKENS,
    (((7,), (EMPTY,)), ((8,), (9,))),
]
V = (2.0, 0.5, 1.0, 3.0, 0.25, 1.0, 0.0, 4.0, 1.5, 1.0)  # weights of the samples
WEIGHTED = partial(by_sample, sample_weights=V)
REJECTING = partial(by_sample, rejected=[i % 3 == 0 for i in range(len(V))])
COUNTED = {"sample_weights": "count"}
TERMS = {"nll": aggregation("token_mean"), "rows": aggregation("sample_sum")}


def evaluated(cases: list[Case], by_call: bool) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Every rank: of all calls; and of a second evaluation, which begins anew, without tokens."""
    topology, found = TOPOLOGIES["dp2"], []
    models = models_of(topology)
    for case in cases:
        case = dataclasses.replace(case, hook={"aggregate_evaluation": True, **case.hook})
        way = topology, models(case), case.new_hook(), by_call
        found.append((evaluate(case, CALLS, *way), evaluate(case, [NO_TOKENS], *way)))
    return found


def assert_evaluated(wanted: dict[Case, dict[str, float]], by_call: bool = False) -> None:
    for rank in run_host_ranks(evaluated, 2, [*wanted], by_call):
        for (case, numbers), (found, empty) in zip(wanted.items(), rank, strict=True):
            ours = {key: found[key] for key in numbers}
            assert ours == pytest.approx(numbers, rel=EXACT, abs=0), case
            assert case.terms or empty[f"{case.mode} loss"] == 0.0


def over_calls(of: Callable[[list[Places]], dict[str, float]], by_call: bool) -> dict[str, float]:
    """``of`` all calls; or each number's mean over the calls that have it."""
    if not by_call:
        return of(CALLS)
    of_calls = [of([call]) for call in CALLS]
    keys = {key for numbers in of_calls for key in numbers}
    return {key: mean(x[key] for x in of_calls if key in x) for key in sorted(keys)}


def lm_and_ours(mode: str, calls: list[Places]) -> dict[str, float]:
    return {"lm loss": mean_of(calls, "token_mean"), f"{mode} loss": mean_of(calls, mode)}


@pytest.mark.parametrize("by_call", [False, True])
def test_a_call_weighs_as_much_as_its_denominator_where_megatron_adds_up_pairs(
    by_call: bool,
) -> None:
    wanted = {}
    for mode, options in MODES.items():
        case = Case(mode, options)
        wanted[case] = over_calls(partial(lm_and_ours, mode), by_call)
        rejecting = {"options": {"rejected": "skip"}, "batch": REJECTING}
        if mode == "sample_mean":
            lm_loss = {"lm loss": wanted[case]["lm loss"]}
            wanted[dataclasses.replace(case, **rejecting)] = lm_loss
    for mode in OF_DATASETS:
        wanted[by_dataset(mode)] = over_calls(partial(values, mode), by_call)
    assert_evaluated(wanted, by_call)


def test_sample_weights_that_count_weigh_calls() -> None:
    def sample(i: int, _: tuple[int, ...]) -> oracle.Sample:
        return dataclasses.replace(sequences()[i].sample, weight=V[i])

    wanted = {}
    whole: Places = tuple(sum(of_rank, ()) for of_rank in zip(*CALLS, strict=True))
    for mode in ("token_mean", "sample_mean"):
        loss = reference().loss(weights_with(mode, whole, sample, **COUNTED))
        wanted[Case(mode, COUNTED, batch=WEIGHTED)] = {f"{mode} loss": loss}
    assert_evaluated(wanted)


def without_the_first_of_3(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    """The samples of data set 3 in the first of `CALLS` weigh 0."""
    weights = [float(i not in (0, 1, 4)) for i in range(len(DATASETS))]
    return by_sample(with_ids(batch, of_mb), of_mb, sample_weights=weights)


def test_a_call_in_which_a_data_set_weighs_nothing_leaves_its_mean_to_the_others() -> None:
    case = by_dataset("sample_mean", options=COUNTED, batch=without_the_first_of_3)
    name = "sample_mean loss of dataset 3"
    assert_evaluated({case: {name: values("sample_mean", CALLS[2:])[name]}})


def test_each_term_has_its_own_denominator_and_their_sum_is_averaged_over_calls() -> None:
    case = Case("", terms=TERMS, step=partial(of_terms, names=TERMS))
    modes = {"nll": "token_mean", "rows": "sample_sum"}
    numbers = {f"{name} loss": mean_of(CALLS, mode) for name, mode in modes.items()}
    totals = [mean_of([call], mode) for call in CALLS for mode in modes.values()]
    assert_evaluated({case: {**numbers, "loss": sum(totals) / len(CALLS)}})


RELEASE = version("megatron-core")
UNKNOWN = (
    f"HostError: RouterLosses needs a release of Megatron-Core 0.19, got {RELEASE} ... "
    "whose weights of routers' losses are not known. Drop RouterLosses."
)
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
ROWS = {
    "no data sets": Refusal(
        "DataError: reports by data set need ids in every batch, got a microbatch without. Give",
        two_rows("sum", hook={"extensions": [DatasetReports()]}),
    ),
    "no data sets over stages": Refusal(
        "PeerError: another rank has batches without ids of data sets",
        two_rows("sum", places=PLACES[1], hook={"extensions": [DatasetReports()]}),
        "pp2",
        {1: "DataError: reports by data set need ids in every batch"},
    ),
    "routers": Refusal(
        "" if RELEASE.startswith("0.19.") else UNKNOWN,
        Case(
            "token_mean",
            places=PLACES[1],
            per_token=True,
            config={**MODELS["moe"], **BALANCED},
            hook={"extensions": [RouterLosses()]},
        ),
        "dp1",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_part_without_what_it_needs_is_refused(name: str) -> None:
    """Ids in the batches; and a release of the host whose weights of its losses are known."""
    assert_told(__name__, name)
