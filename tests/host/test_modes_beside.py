"""The loss under further modes, and the weighing of samples, reported beside the mode that trains.

The numbers are those of the fp64 reference by the oracle's weights, and those that a run in the
other mode reports; the gradient is, bit for bit, that of a run without them.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from megatron_loss_agg import LossAggregation, Microbatch, Term
from megatron_loss_agg.mcore import SampleLoss, WeightReports
from megatron_loss_agg.mcore.parts.modes import Unevenness
from tests.host import gpt, gradients
from tests.host.cases import (
    EVALUATION,
    Case,
    Expected,
    assert_exact,
    by_the_oracle,
    covering,
    models_of,
    reduced,
    take,
)
from tests.host.harness import TOPOLOGIES, run_host_ranks
from tests.host.reference import reference
from tests.host.refusals import Refusal, assert_told, two_rows
from tests.host.scripts import by_sample, gathered, of_terms
from tests.host.steps import PLACES, Weights, aggregation, weights_of
from tests.host.test_by_sample import DATASETS, WEIGHT_OF, V
from tests.host.test_reports import (
    CALLS,
    REJECTING,
    WEIGHTED,
    assert_evaluated,
    lm_and_ours,
    mean_of,
    over_calls,
)
from tests.host.test_reports import MODES as OPTIONS

BESIDE: tuple[str | LossAggregation, ...] = (
    "rollout_mean",
    aggregation("custom"),
    aggregation("constant"),
    "sample_mean",
    LossAggregation(mode="sample_mean", empty="skip", name="without empty"),
    "prompt_mean",
    "microbatch_mean",
    "sum",
)
ALSO = {"also": BESIDE}


def weights_beside(case: Case) -> dict[str, Weights]:
    """The oracle's, by the label of each mode beside that of the case."""
    found = {}
    for beside in BESIDE:
        agg = aggregation(beside) if isinstance(beside, str) else beside
        options = {"empty": "skip"} if agg.empty == "skip" else {}
        found[agg.label] = weights_of(agg.mode, case.places, case.masks, **options)
    return found


def with_modes_beside(case: Case, model: str = "dense", of_term: str = "") -> Expected:
    gradient, reports = by_the_oracle(case, model)
    if case.step is not None:
        del reports["lm loss"]  # a `TokenLoss` reports none
    beside = weights_beside(case)
    return gradient, reports | {
        f"{of_term}{label} loss": reference(model).loss(weights)
        for label, weights in beside.items()
    }


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"call": EVALUATION},
    {"calls": (1, 3)},
    {"step": gathered},
)
ROWS_OF = covering(2, ("thd", "bshd"), (False, True), ("01", "fractional"), WAYS)


@pytest.mark.parametrize("topology", ["dp2-cp2", "pp2-cp2", "tp2-sp"])
def test_each_mode_is_reported_as_the_reference_has_it(topology: str) -> None:
    places = PLACES[TOPOLOGIES[topology].data_parallel_size]
    cases = [
        Case("token_mean", {}, masks, layout, places, flag, hook=ALSO, **way)
        for layout, flag, masks, way in ROWS_OF
        if not (topology == "pp2-cp2" and "calls" in way)
    ]
    assert_exact(TOPOLOGIES[topology], cases, with_modes_beside)


TERMS = {
    "policy": Term(aggregation("token_mean"), 2.0),
    "kl": Term(aggregation("sample_sum"), 0.5),
}


def test_of_several_terms_the_first_one_is_reported() -> None:
    step = partial(of_terms, names=TERMS)
    case = Case("token_mean", terms=TERMS, step=step, hook=ALSO, call=EVALUATION)

    def expected(case: Case) -> Expected:
        gradient, reports = with_modes_beside(case, of_term="policy ")
        return gradient, {x: reports[x] for x in reports if x.startswith("policy ")}

    assert_exact(TOPOLOGIES["dp2-cp2"], [case], expected)


@pytest.mark.parametrize("by_call", [False, True])
def test_evaluations_are_averaged_as_those_of_a_run_in_each_mode(by_call: bool) -> None:
    """As Megatron adds up pairs, or, under ``--sft``, averages their quotients."""
    beside = [aggregation(mode, **OPTIONS[mode]) for mode in OPTIONS if mode != "token_mean"]
    numbers = [over_calls(partial(lm_and_ours, mode), by_call) for mode in OPTIONS]
    wanted = {key: x for of_mode in numbers for key, x in of_mode.items()}
    assert_evaluated({Case("token_mean", hook={"also": beside}): wanted}, by_call)


def of_samples(iterator: Any, model: Any) -> Any:
    """Losses by sample: the sums of each row's losses."""
    losses, loss_func = gpt.forward_step(iterator, model)
    return losses, SampleLoss(lambda sums, lengths: sums, lambda x: x, *loss_func.args)


def read_samples(batch: dict[str, Any]) -> Microbatch:
    mask = batch["loss_mask"]
    return Microbatch.of_samples(
        len(mask), prompt_ids=batch["prompt_ids"], sequences=Microbatch(mask)
    )


COUNTED = {"rejected": "skip", "sample_weights": "count"}
RUNS: tuple[dict[str, Any], ...] = (
    {"options": {"rejected": "skip"}, "batch": REJECTING},
    {"options": {"sample_weights": "count"}, "batch": WEIGHTED},
    {
        "options": {"sample_weights": "count", "dataset_weights": WEIGHT_OF},
        "batch": partial(by_sample, dataset_ids=DATASETS, sample_weights=V),
    },
    {"layout": "bshd", "step": of_samples, "hook": {"read_batch": read_samples}},
    {"per_token": True, "dtype": torch.float32},
)


def compared(modes: tuple[str, ...]) -> list[tuple[bool, dict[str, float], dict[str, float]]]:
    """Of each run: whether the gradient is the same with ``also``; its reports; and other runs'."""
    topology, found = TOPOLOGIES["dp2-cp2"], []
    models = models_of(topology)
    for way in RUNS:
        alone = Case("token_mean", **way)
        beside = dataclasses.replace(alone, hook={**alone.hook, "also": modes})
        chunks = models(alone)
        take(alone, topology, chunks)
        gradient = gradients.flat(chunks).clone()
        reports = reduced(take(beside, topology, chunks))
        is_same = bool(gradient.any()) and torch.equal(gradients.flat(chunks), gradient)
        of_runs = {}
        for mode in modes:
            run = dataclasses.replace(alone, mode=mode)
            of_run = reduced(take(run, topology, chunks))
            of_runs[f"{mode} loss"] = of_run[f"{mode} loss"]
        found.append((is_same, reports, of_runs))
    return found


def test_each_number_is_that_of_a_run_in_its_mode_and_the_gradient_stays_the_same() -> None:
    for rank in run_host_ranks(compared, 4, ("sample_mean", "prompt_mean", "microbatch_mean")):
        for way, (is_same, reports, of_runs) in zip(RUNS, rank, strict=True):
            assert is_same, way
            rel = 1e-12 if "dtype" not in way else 1e-6
            assert {x: reports[x] for x in of_runs} == pytest.approx(of_runs, rel=rel), way
            assert len({*of_runs.values(), reports["token_mean loss"]}) >= 3


def weighing_of(case: Case) -> tuple[float, float]:
    """The effective samples, and the weight of the longest tenth, by the oracle's weights."""
    by_length = sorted(((len([w for w in ws if w]), sum(ws)) for _, ws in case.weights))[::-1]
    samples = [(length, w) for length, w in by_length if w]
    total, left, share = sum(w for _, w in samples), len(samples) / 10, 0.0
    for length in dict.fromkeys(length for length, _ in samples):
        alike = [w for other, w in samples if other == length]
        taken = min(left, len(alike))
        share += sum(alike) * taken / len(alike)
        left -= taken
    return total**2 / sum(w * w for _, w in samples), share / total


def with_weighing(case: Case) -> Expected:
    gradient, reports = by_the_oracle(case)
    effective, longest = weighing_of(case)
    return gradient, {
        **reports,
        "effective samples": effective,
        "weight of longest tenth": longest,
    }


@pytest.mark.parametrize("topology", ["dp2-cp2", "tp2-sp"])
def test_the_weighing_of_the_samples_is_reported_of_training(topology: str) -> None:
    places = PLACES[TOPOLOGIES[topology].data_parallel_size]
    cases = [
        Case(mode, places=places, hook={"extensions": [WeightReports()]}, **way)
        for mode, way in (
            ("token_mean", {}),
            ("sample_mean", {"per_token": True}),
            ("prompt_mean", {"calls": (3, 1)}),
            ("sample_sum", {"layout": "bshd"}),
        )
    ]
    cases.append(dataclasses.replace(cases[0], masks="single", after=cases[0]))  # another step
    assert_exact(TOPOLOGIES[topology], cases, with_weighing)


def test_weights_that_cancel_have_no_effective_number() -> None:
    """As of a user's function of both signs: (W_1 + W_2)^2 = 0, and shares of 0 mean nothing."""
    mask_sums, coefficients = torch.tensor([[2.0, 4.0], [1.0, -0.5]], dtype=torch.float64)
    assert Unevenness.of(mask_sums, coefficients) == (0.0, 0.0)


def without_prompts(batch: dict[str, Any], _: tuple[int, ...]) -> dict[str, Any]:
    return {name: x for name, x in batch.items() if name != "prompt_ids"}


PROMPTLESS = {"batch": without_prompts, "hook": {"also": ["prompt_mean", "sample_mean"]}}
NO_IDS = "DataError: 'prompt_mean' in also= groups by prompt, and a microbatch has no prompt_ids"
NO_IDS += (
    " ... Megatron's --sft with --loss-aggregation-sft-prompt-field FIELD), or remove that mode"
)
ROWS = {
    "no ids": Refusal(NO_IDS, two_rows("sum", **PROMPTLESS)),
    "no ids over stages": Refusal(
        "PeerError: another rank's batches lack what a mode of also= ... needs",
        two_rows("sum", places=PLACES[1], **PROMPTLESS),
        "pp2",
        {1: NO_IDS},
    ),
    "no weights of samples": Refusal(
        "DataError: sample_weights='count' needs a weight ... the batch key 'sample_weights'",
        two_rows("sum", hook={"also": [aggregation("sample_mean", sample_weights="count")]}),
    ),
    "other modes": Refusal(
        "OptionError: all ranks must have the same settings, got also=['sample_mean'] on rank(s) [0]",
        two_rows("sum", hook={"also": ["sample_mean"]}),
        unlike={1: two_rows("sum", hook={"also": ["token_mean"]})},
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_mode_without_what_it_needs_and_ranks_that_differ_are_refused(name: str) -> None:
    assert_told(__name__, name)


def test_an_evaluation_without_ids_reports_the_modes_that_need_none() -> None:
    modes = ["prompt_mean", aggregation("sample_mean", **OPTIONS["sample_mean"])]
    case = Case("token_mean", batch=without_prompts, hook={"also": modes})
    assert_evaluated({case: {"sample_mean loss": mean_of(CALLS, "sample_mean")}})
