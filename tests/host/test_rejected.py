"""Rejected samples in steps that could do without a look-ahead, were nothing rejected in them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests import oracle
from tests.host.ranks import run_host_ranks
from tests.host.steps import batch_of, sequences

pytestmark = pytest.mark.host

EXACT = 1e-12
MODES = {"sample_mean": None, "constant": 7.0, "sum": None, "token_mean": None}
STEPS = ([0, 1], [2, 4])  # samples of each step, one microbatch
REJECTED = ([False, True], [True, False])


def errors_on_host(choice: str | None) -> dict[Any, Any]:
    """One rank, for each (mode, per-token flag): every step's gradient error, or what it says."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg import AggregationError, LossAggregation
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize()
    chosen = sequences(fractional=False)
    reference = gpt.build(torch.float64, per_token=False)
    answers: dict[Any, Any] = {}
    for per_token, mode in product((False, True), MODES):
        model = gpt.data_parallel(gpt.build(torch.float64, per_token))
        aggregation = LossAggregation(mode=mode, divisor=MODES[mode], rejected=choice)
        hook = LossHook(aggregation, in_training_loop=True)
        answers[mode, per_token] = found = []
        for step, (places, rejected) in enumerate(zip(STEPS, REJECTED, strict=True)):
            samples = [chosen[i] for i in places]
            batch = batch_of(samples, "bshd")
            if choice is not None or step == 1:
                batch["rejected"] = torch.tensor(rejected)
            try:
                schedule = hook.wrap(get_forward_backward_func())
                gpt.run_step(schedule, model, iter([batch]), 1, micro_batch_size=len(samples))
            except AggregationError as error:
                found.append(str(error))
                continue
            if choice is not None:
                kept = [not r for r in rejected]
                counted = [s for s, k in zip(samples, kept, strict=True) if k or choice == "count"]
                ((weights,),) = oracle.step_weights(
                    mode, [[[s.sample for s in counted]]], divisor=MODES[mode]
                )
                by_sample = {id(s): w for s, w in zip(counted, weights, strict=True)}
                left = [s for s, k in zip(samples, kept, strict=True) if k]
                wanted = gpt.plain_gradient(reference, left, [by_sample[id(s)] for s in left])
                found.append(gpt.relative_error(gpt.gradient(model), wanted))
    return answers


@pytest.mark.parametrize("choice", ["count", "skip"])
def test_every_step_is_exact(choice: str) -> None:
    (answers,) = run_host_ranks(errors_on_host, 1, choice)
    assert len(answers) == 2 * len(MODES)
    for case, found in answers.items():
        assert len(found) == len(STEPS) and max(found) <= EXACT, case


def test_without_a_choice_they_are_an_error_in_every_mode() -> None:
    # The first step has no rejected samples, and later ones may not be read ahead any more.
    (answers,) = run_host_ranks(errors_on_host, 1, None)
    for case, found in answers.items():
        assert len(found) == 1 and "expected LossAggregation(rejected='count')" in found[0], case
