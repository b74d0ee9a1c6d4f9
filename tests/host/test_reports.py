"""What is logged: reduced over microbatches, ranks and calls as Megatron's loops do it.

``lm loss`` is the mean over the tokens in every mode, ``<mode> loss`` the aggregated loss, of a
step or of an evaluation of several calls; both as the losses of the fp64 reference and the oracle's
weights give them.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import Loop
from tests import oracle
from tests.host import gpt
from tests.host.cases import Case, Found, evaluate, grid, models_of, run
from tests.host.harness import EXACT, TOPOLOGIES, run_host_ranks
from tests.host.reference import reference
from tests.host.scripts import by_sample, of_terms
from tests.host.steps import (
    EMPTY,
    PROMPTS,
    Places,
    aggregation,
    deal,
    sequences,
    weights_of,
    weights_with,
)
from tests.host.test_gradients import LOSSES

SFT = Loop(averages_quotients=True)  # how Megatron evaluates under --sft


def forward_step(data_iterator: Any, model: Any) -> Any:
    """Reports another pair of the script's own."""

    def with_another_key(stock: Any, mask: Tensor) -> Any:
        def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> Any:
            *loss, report = stock(loss_mask, output_tensor)
            return *loss, {**report, "other": torch.tensor([3.0, 4.0])}

        return partial(loss_func, mask)

    return gpt.forward_step_with(with_another_key)(data_iterator, model)


LOOPS = {"train": (False, Loop()), "eval": (True, Loop()), "sft_eval": (True, SFT)}
STEPS: dict[str, Case] = {}
for loss, flag, way in grid(2, LOSSES, (False, True), tuple(LOOPS)):
    forward_only, loop = LOOPS[way]
    case = dataclasses.replace(
        loss,
        places=deal(2, 3),
        per_token=flag,
        step=forward_step,
        hook={"loop": loop},
        call={"forward_only": forward_only},
    )
    STEPS[f"{case.name}-{way}"] = case


@functools.cache
def steps() -> dict[Case, list[Found]]:
    return run(TOPOLOGIES["dp2-cp2"], list(STEPS.values()))


@pytest.mark.parametrize("name", STEPS)
def test_reports_are_those_of_the_whole_step_and_the_rest_is_left_alone(name: str) -> None:
    case = STEPS[name]
    wanted = {
        "lm loss": reference().loss(weights_of("token_mean", case.places, case.masks)),
        f"{case.mode} loss": reference().loss(case.weights),
        "other": 3 / 4,
    }
    for error, reports in steps()[case]:
        assert reports == pytest.approx(wanted, rel=EXACT, abs=0)
        # Without any gradient, the error is the whole of it.
        assert error == 1 if case.call["forward_only"] else error <= EXACT


# Evaluations of several calls. Megatron adds up the pairs of all calls, or averages the calls'
# values under ``--sft``.
NO_TOKENS: Places = (((EMPTY,), (EMPTY,)),) * 2
CALLS: list[Places] = [
    (((0, 1), (2,)), ((3,), (4, 6))),
    NO_TOKENS,
    (((7,), (EMPTY,)), ((8,), (9,))),
]
SET: Places = tuple(sum((call[rank] for call in CALLS), ()) for rank in range(2))
OF_SET = {
    "token_mean": {},
    "sample_mean": {"empty": "skip"},
    "sample_sum": {},
    "constant": {"divisor": 7.0},
    "microbatch_mean": {"empty": "skip"},
}
MODES: dict[str, dict[str, Any]] = {**OF_SET, "prompt_mean": {}, "sum": {}, "custom": {}}
V = (2.0, 0.5, 1.0, 3.0, 0.25, 1.0, 0.0, 4.0, 1.5, 1.0)  # weights of the samples


WEIGHTED = partial(by_sample, sample_weights=V)
REJECTING = partial(by_sample, rejected=[i % 3 == 0 for i in range(len(V))])
BY_CALL = Loop(of_megatron=True, averages_quotients=True)
BY_TOKENS = Loop(of_megatron=True)
WEIGHED, COUNTED = ("token_mean", "sample_mean"), {"sample_weights": "count"}
TERMS = {"nll": aggregation("token_mean"), "rows": aggregation("sample_sum")}
EVALUATIONS: dict[Any, Case] = {
    **{("weighted", mode): Case(mode, COUNTED, batch=WEIGHTED) for mode in WEIGHED},
    "terms": Case("", terms=TERMS, step=partial(of_terms, names=TERMS)),
}
for flag in (False, True):
    loop = {"loop": BY_CALL if flag else BY_TOKENS}
    for mode, options in MODES.items():
        EVALUATIONS[mode, flag] = Case(mode, options, hook=loop)
    rejected = Case("sample_mean", {"rejected": "skip"}, hook=loop, batch=REJECTING)
    EVALUATIONS["rejected", flag] = rejected


def evaluated(cases: dict[Any, Case]) -> dict[Any, dict[str, float]]:
    """Every rank: of all calls; and of a second evaluation, which begins anew, without tokens."""
    topology, found = TOPOLOGIES["dp2"], {}
    models = models_of(topology)
    for key, case in cases.items():
        given = topology, models(case), case.new_hook()
        found[key] = evaluate(case, CALLS, *given)
        found[key, "empty"] = evaluate(case, [NO_TOKENS], *given)
    return found


@functools.cache
def evaluations() -> dict[Any, dict[str, float]]:
    of_rank, other = run_host_ranks(evaluated, 2, EVALUATIONS)
    assert repr(of_rank) == repr(other)
    return of_rank


def of_calls(mode: str) -> list[float]:
    return [reference().loss(weights_of(mode, places, **MODES[mode])) for places in CALLS]


def of_evaluation(mode: str) -> float:
    """By the oracle's weights: over the set, where the mode has such a mean."""
    if mode in OF_SET:
        return reference().loss(weights_of(mode, SET, **MODES[mode]))
    numbers = [1] * len(CALLS)
    if mode == "prompt_mean":  # a prompt counts in each call
        numbers = [len({PROMPTS[i] for rank in c for mb in rank for i in mb}) for c in CALLS]
    return sum(n * x for n, x in zip(numbers, of_calls(mode), strict=True)) / sum(numbers)


def exactly(value: float) -> Any:
    return pytest.approx(value, rel=EXACT, abs=0)


@pytest.mark.parametrize("by_call", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_call_weighs_as_much_as_its_denominator(mode: str, by_call: bool) -> None:
    values = evaluations()[mode, by_call]
    assert values["lm loss"] == exactly(of_evaluation("token_mean"))
    assert values[f"{mode} loss"] == exactly(of_evaluation(mode))
    if mode not in ("sum", "custom"):
        mean_of_calls = sum(of_calls(mode)) / len(CALLS)
        assert of_evaluation(mode) != pytest.approx(mean_of_calls, rel=1e-3)
    assert evaluations()[(mode, by_call), "empty"][f"{mode} loss"] == 0.0


def test_rejected_samples_are_in_the_mean_over_tokens() -> None:
    for by_call in (False, True):
        assert evaluations()["rejected", by_call]["lm loss"] == exactly(of_evaluation("token_mean"))


@pytest.mark.parametrize("mode", WEIGHED)
def test_sample_weights_that_count_weigh_calls(mode: str) -> None:
    def sample(i: int, _: tuple[int, ...]) -> oracle.Sample:
        return dataclasses.replace(sequences()[i].sample, weight=V[i])

    weights = weights_with(mode, SET, sample, **COUNTED)
    assert evaluations()["weighted", mode][f"{mode} loss"] == exactly(reference().loss(weights))


def test_each_term_has_its_own_denominator_and_their_sum_is_averaged_over_calls() -> None:
    values = evaluations()["terms"]
    assert values["nll loss"] == exactly(of_evaluation("token_mean"))
    assert values["rows loss"] == exactly(of_evaluation("sample_sum"))
    totals = sum(of_calls("token_mean")) + sum(of_calls("sample_sum"))
    assert values["loss"] == exactly(totals / len(CALLS))
