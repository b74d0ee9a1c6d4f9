"""The one line that says what was understood of the first training step."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import Any

import pytest

from megatron_loss_agg import LossAggregation, Term
from megatron_loss_agg.mcore import TokenLoss
from tests.host.cases import Case, models_of, take
from tests.host.harness import TOPOLOGIES, run_host_ranks
from tests.host.steps import PLACES, sequences

pytestmark = pytest.mark.host

TOKENS = sum(sum(s.sample.mask) for s in sequences())
PRESET = LossAggregation.preset("verl/token-mean")
TERMS = {
    "policy": LossAggregation.preset("skyrl/prompt_mean"),
    "kl": Term(LossAggregation(mode="sum", divisor=1634, sample_weights="skip"), 0.5),
}


def losses_of_terms(data_iterator: Any, model: Any) -> Any:
    from tests.host import gpt

    losses, loss_func = gpt.forward_step(data_iterator, model)
    mask = loss_func.args[0]
    return losses, TokenLoss(lambda x: (dict.fromkeys(TERMS, x), {}), mask)


# The case; what is said around the number of tokens.
SAID: dict[str, tuple[Case, str, str]] = {
    "dp2-cp2": (
        Case("", terms=PRESET),
        "token_mean (verl/token-mean); a step of 8 microbatches on 2 data-parallel ranks, "
        "10 samples (packed sequences)",
        "; context-parallel split: zigzag inside every sequence",
    ),
    "pp2": (
        Case("", layout="bshd", places=PLACES[1], terms=TERMS, step=losses_of_terms),
        "policy: prompt_mean (skyrl/prompt_mean) + "
        "0.5 * kl: sum (divisor: 1634, sample weights: skip); "
        "a step of 4 microbatches on 1 data-parallel rank, 10 samples (rows), 4 prompts",
        "",
    ),
}


def said(name: str) -> str:
    """What a rank prints in two steps."""
    case = dataclasses.replace(SAID[name][0], times=2)
    chunks = models_of(TOPOLOGIES[name])(case)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        take(case, TOPOLOGIES[name], chunks)
    return output.getvalue()


@pytest.mark.parametrize("name", SAID)
def test_one_rank_says_it_once(name: str) -> None:
    _, before, after = SAID[name]
    line = (
        f"loss aggregation: {before}, {TOKENS:g} tokens{after}; "
        "measured gradients: 1.000000 times the planned ones\n"
    )
    ranks = run_host_ranks(said, TOPOLOGIES[name].world_size, name)
    first = len(ranks) // 2 if name == "pp2" else 0  # of the last stage
    assert ranks == [line if i == first else "" for i in range(len(ranks))]
