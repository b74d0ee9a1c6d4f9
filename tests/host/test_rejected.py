"""Rejected samples, also in steps that would need no look-ahead if nothing were rejected."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from megatron_loss_agg.mcore import LossHook
from tests.host.harness import EXACT, error_of, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import aggregation, batch_of, sequences, weights_of

pytestmark = pytest.mark.host

MODES = ("sample_mean", "constant", "sum", "token_mean")
STEPS = ((0, 1), (2, 4))  # samples of each step, one microbatch
REJECTED = ([False, True], [True, False])


def wanted(choice: str | None, mode: str) -> list[Any]:
    """Each step's gradient: rejected samples count, or are left out."""
    found = []
    for places, rejected in zip(STEPS, REJECTED, strict=True):
        kept = [i for i, r in zip(places, rejected, strict=True) if not r]
        counted = places if choice == "count" else tuple(kept)
        weights = weights_of(mode, ((counted,),))
        found.append(reference().gradient([(i, w) for i, w in weights if i in kept]))
    return found


def steps_on_host(choice: str | None, expected: dict[str, list[Any]]) -> dict[Any, Any]:
    """One rank, for each (mode, per-token flag): every step's gradient error, or what it says."""
    from tests.host import gpt, gradients

    gpt.initialize()
    answers: dict[Any, Any] = {}
    for per_token, mode in product((False, True), MODES):
        model = gpt.ddp_model(per_token)
        hook = LossHook(aggregation(mode, rejected=choice), in_training_loop=True)
        answers[mode, per_token] = found = []
        for step, (places, rejected) in enumerate(zip(STEPS, REJECTED, strict=True)):
            batch = batch_of([sequences()[i] for i in places], "bshd")
            if choice is not None or step == 1:
                batch["rejected"] = torch.tensor(rejected)
            error = error_of(gpt.run_step, hook, model, iter([batch]), 1, len(places))
            found.append(error or gradients.error(model, expected[mode][step]))
    return answers


def answers(choice: str | None) -> dict[Any, Any]:
    expected = {mode: wanted(choice, mode) for mode in MODES}
    (found,) = run_host_ranks(steps_on_host, 1, choice, expected)
    assert len(found) == 2 * len(MODES)
    return found


@pytest.mark.parametrize("choice", ["count", "skip"])
def test_every_step_is_exact(choice: str) -> None:
    for case, errors in answers(choice).items():
        assert len(errors) == len(STEPS) and max(errors) <= EXACT, case


def test_without_a_choice_they_are_an_error_in_every_mode() -> None:
    # The first step has no rejected samples, and later ones may not be read ahead any more.
    for case, (first, later) in answers(None).items():
        assert isinstance(first, float)
        assert "expected LossAggregation(rejected='count')" in later, case
