"""Evaluations of several calls: their reports reduce to means over the tokens or samples of all.

Megatron adds up the pairs of all calls, or averages the calls' values under ``--sft``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.mcore import Loop, LossHook, TokenLoss
from tests.host.harness import EXACT, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import EMPTY, PROMPTS, Places, aggregation, batches, sequences, weights_of
from tests.host.test_reports import mean_of_means

pytestmark = pytest.mark.host

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
WEIGHTED = {"weighted tokens": "token_mean", "weighted samples": "sample_mean"}
TERMS = {"nll": LossAggregation(mode="token_mean"), "rows": LossAggregation(mode="sample_sum")}


def means(hook: LossHook, ddp: Any, calls: list[Places], by_call: bool, **options: Any) -> Any:
    """What Megatron's ``evaluate`` makes of the reports, by name."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.host import gpt

    schedule = hook.wrap(get_forward_backward_func())
    values: dict[str, list[Any]] = {}
    for places in calls:
        place = places[dist.get_rank()]
        data = batches(place, "thd")
        if hook.terms.keys() <= {*WEIGHTED}:
            data = (
                {**batch, "sample_weights": torch.tensor([V[i] for i in of_mb])}
                for batch, of_mb in zip(data, place, strict=True)
            )
        if hook.terms.keys() == {"rejected"}:
            data = (
                {**batch, "rejected": torch.tensor([i % 3 == 0 for i in of_mb])}
                for batch, of_mb in zip(data, place, strict=True)
            )
        with torch.no_grad():
            reports = gpt.run_step(
                None, ddp, data, 2, schedule=schedule, forward_only=True, **options
            )
        for key in reports[0]:
            pairs = torch.stack([report[key] for report in reports]).sum(dim=0)
            dist.all_reduce(pairs)
            value = mean_of_means(reports, key) if by_call else pairs
            values.setdefault(key, []).append(value)
    if by_call:
        return {key: sum(of_calls) / len(calls) for key, of_calls in values.items()}
    sums = {key: sum(of_calls).tolist() for key, of_calls in values.items()}
    return {key: a / b if b else math.nan for key, (a, b) in sums.items()}


def two_terms(data_iterator: Any, model: Any) -> Any:
    from tests.host import gpt

    losses, loss_func = gpt.forward_step(data_iterator, model)
    return losses, TokenLoss(lambda x: ({"nll": x, "rows": x}, {}), loss_func.args[0])


def evaluated() -> dict[Any, Any]:
    """Every rank: values by mode and way of evaluation."""
    from tests.host import gpt

    gpt.initialize()
    ddp, facts = gpt.ddp_model(), {}
    for mode, options in MODES.items():
        for by_call in (False, True):
            hook = LossHook(
                aggregation(mode, **options),
                loop=Loop(of_megatron=True, averages_quotients=by_call),
            )
            for _ in range(2):  # a second evaluation begins anew
                facts[mode, by_call] = means(hook, ddp, CALLS, by_call)
            facts[mode, by_call, "empty"] = means(hook, ddp, [NO_TOKENS], by_call)
    for name, mode in WEIGHTED.items():
        terms = {name: aggregation(mode, sample_weights="count")}
        facts[name] = means(LossHook(terms), ddp, CALLS, False)
    for by_call in (False, True):
        rejects = {"rejected": aggregation("sample_mean", rejected="skip")}
        hook = LossHook(rejects, loop=Loop(of_megatron=True, averages_quotients=by_call))
        facts["rejected", by_call] = means(hook, ddp, CALLS, by_call)
    facts["terms"] = means(LossHook(TERMS), ddp, CALLS, False, forward_step_func=two_terms)
    return facts


@functools.cache
def facts() -> dict[Any, Any]:
    of_rank, other = run_host_ranks(evaluated, 2)
    assert repr(of_rank) == repr(other)
    return of_rank


def of_calls(mode: str) -> list[float]:
    return [reference().loss(weights_of(mode, places, **MODES[mode])) for places in CALLS]


def expected(mode: str) -> float:
    """By the oracle's weights: over the set, where the mode has such a mean."""
    if mode in OF_SET:
        return reference().loss(weights_of(mode, SET, **MODES[mode]))
    numbers = [1] * len(CALLS)
    if mode == "prompt_mean":  # a prompt counts in each call
        numbers = [len({PROMPTS[i] for rank in c for mb in rank for i in mb}) for c in CALLS]
    return sum(n * x for n, x in zip(numbers, of_calls(mode), strict=True)) / sum(numbers)


@pytest.mark.parametrize("by_call", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_call_weighs_as_much_as_its_denominator(mode: str, by_call: bool) -> None:
    values = facts()[mode, by_call]
    tokens = reference().loss(weights_of("token_mean", SET))
    assert values["lm loss"] == pytest.approx(tokens, rel=EXACT, abs=0)
    assert values[f"{mode} loss"] == pytest.approx(expected(mode), rel=EXACT, abs=0)
    if mode not in ("sum", "custom"):
        mean_of_calls = sum(of_calls(mode)) / len(CALLS)
        assert expected(mode) != pytest.approx(mean_of_calls, rel=1e-3)


@pytest.mark.parametrize("by_call", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_set_without_tokens_has_the_loss_0(mode: str, by_call: bool) -> None:
    assert facts()[mode, by_call, "empty"][f"{mode} loss"] == 0.0


def test_rejected_samples_are_in_the_mean_over_tokens() -> None:
    tokens = reference().loss(weights_of("token_mean", SET))
    for by_call in (False, True):
        values = facts()["rejected", by_call]
        assert values["lm loss"] == pytest.approx(tokens, rel=EXACT, abs=0)


def test_sample_weights_that_count_weigh_calls() -> None:
    everywhere = [i for rank in SET for of_mb in rank for i in of_mb]
    sums = [torch.tensor([0.0, 0.0, 0.0, 0.0], dtype=torch.float64)]
    for i in everywhere:
        mask = torch.tensor(sequences()[i].sample.mask, dtype=torch.float64)
        total = (mask * reference().losses[i]).sum()
        mean = total / mask.sum() if mask.any() else 0 * total
        sums.append(V[i] * torch.stack([total, mask.sum(), mean, torch.ones_like(mean)]))
    a, b, c, d = torch.stack(sums).sum(dim=0).tolist()
    for name, value in (("weighted tokens", a / b), ("weighted samples", c / d)):
        assert facts()[name][f"{name} loss"] == pytest.approx(value, rel=EXACT, abs=0)


def test_each_term_has_its_own_denominator_and_their_sum_is_averaged_over_calls() -> None:
    values = facts()["terms"]
    assert values["nll loss"] == pytest.approx(expected("token_mean"), rel=EXACT, abs=0)
    assert values["rows loss"] == pytest.approx(expected("sample_sum"), rel=EXACT, abs=0)
    totals = sum(of_calls("token_mean")) + sum(of_calls("sample_sum"))
    assert values["loss"] == pytest.approx(totals / len(CALLS), rel=EXACT, abs=0)
