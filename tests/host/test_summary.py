"""The one line that says what was understood of the first training step."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

from megatron_loss_agg import LossAggregation, Term
from megatron_loss_agg.mcore import LossHook, TokenLoss
from tests.host.harness import TOPOLOGIES, build_chunks, data_for, run_host_ranks
from tests.host.steps import PLACES, sequences

pytestmark = pytest.mark.host

TOKENS = sum(sum(s.sample.mask) for s in sequences())
TERMS = {
    "policy": LossAggregation.preset("skyrl/prompt_mean"),
    "kl": Term(LossAggregation(mode="sum", divisor=1634, sample_weights="skip"), 0.5),
}
SAID = {
    ("dp2", "bshd", False): (
        "token_mean (verl/token-mean); a step of 8 microbatches on 2 data-parallel ranks, "
        "10 samples (rows)",
        "",
    ),
    ("dp2-cp2", "thd", False): (
        "token_mean (verl/token-mean); a step of 8 microbatches on 2 data-parallel ranks, "
        "10 samples (packed sequences)",
        "; context-parallel split: zigzag inside every sequence",
    ),
    ("pp2", "thd", True): (
        "policy: prompt_mean (skyrl/prompt_mean) + "
        "0.5 * kl: sum (divisor: 1634, sample weights: skip); "
        "a step of 4 microbatches on 1 data-parallel rank, 10 samples (packed sequences), "
        "4 prompts",
        "",
    ),
}


def said(name: str, layout: str, terms: bool) -> list[str]:
    """What a rank prints in each of two steps."""
    from tests.host import gpt

    topology = TOPOLOGIES[name]
    gpt.initialize(**topology.sizes)
    chunks, places = build_chunks(topology, False), PLACES[topology.data_parallel_size]
    hook = LossHook(TERMS if terms else LossAggregation.preset("verl/token-mean"))
    options: dict[str, Any] = {}
    if terms:
        options["forward_step_func"] = gpt.forward_step_with(
            lambda _, mask: TokenLoss(lambda losses: (dict.fromkeys(TERMS, losses), {}), mask)
        )
    printed = []
    for _ in range(2):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            data = data_for(topology, places, layout)
            gpt.run_step(hook, chunks, data, len(places[0]), 1, **options)
        printed.append(output.getvalue())
    return printed


@pytest.mark.parametrize("case", SAID, ids=str)
def test_one_rank_says_it_once(case: tuple[str, str, bool]) -> None:
    before, after = SAID[case]
    line = (
        f"loss aggregation: {before}, {TOKENS:g} tokens{after}; "
        "measured gradients: 1.000000 times the planned ones\n"
    )
    ranks = run_host_ranks(said, TOPOLOGIES[case[0]].world_size, *case)
    first = len(ranks) // 2 if case[0] == "pp2" else 0  # of the last stage
    for i, (in_first_step, in_second) in enumerate(ranks):
        assert in_first_step == (line if i == first else "")
        assert in_second == ""
