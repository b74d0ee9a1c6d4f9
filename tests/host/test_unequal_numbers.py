"""Data-parallel ranks with different numbers of microbatches: gradients and reports stay exact."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megatron_loss_agg.mcore import Audit, LossHook
from tests.host.harness import EXACT, TOPOLOGIES, Topology, build_chunks, data_for, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import Places, aggregation, weights_of

pytestmark = pytest.mark.host

MODES = ("token_mean", "sample_mean", "microbatch_mean")
# Two steps: one and three microbatches on the data-parallel ranks, then two and one.
STEPS: tuple[Places, ...] = (
    (((0, 1, 2),), ((3,), (5,), (4, 6))),
    (((7,), (8, 9)), ((0, 1),)),
)


def wanted() -> list[dict[str, Any]]:
    """By step and mode: the reference's gradient and loss."""
    weights = [{mode: weights_of(mode, places) for mode in MODES} for places in STEPS]
    return [
        {mode: (reference().gradient(w), reference().loss(w)) for mode, w in of_step.items()}
        for of_step in weights
    ]


def errors(topology: Topology, expected: list[dict[str, Any]], audit: bool) -> dict[Any, float]:
    """A rank: the worst error of gradient and report, by step, mode and per-token flag."""
    from megatron.core import parallel_state

    from tests.host import gpt, gradients

    gpt.initialize(**topology.sizes)
    found: dict[Any, float] = {}
    for per_token in (False, True):
        chunks = build_chunks(topology, per_token)
        for mode in MODES:
            hook = LossHook(aggregation(mode), extensions=[Audit(repeat=audit)])
            for i, places in enumerate(STEPS):
                data, number = data_for(topology, places, "thd"), len(places[gpt.data_rank()])
                reports = gpt.run_step(hook, chunks, data, number)
                gradient, loss = expected[i][mode]
                worst = gradients.error(chunks, gradient)
                if parallel_state.is_pipeline_last_stage():
                    worst = max(worst, abs(gpt.reported(reports, f"{mode} loss") / loss - 1))
                found[i, mode, per_token] = worst
    return found


@pytest.mark.parametrize("name, audit", [("dp2", False), ("dp2", True), ("dp2-cp2", True)])
def test_every_step_is_exact(name: str, audit: bool) -> None:
    topology = TOPOLOGIES[name]
    for rank in run_host_ranks(errors, topology.world_size, topology, wanted(), audit):
        assert set(rank) == set(product(range(len(STEPS)), MODES, (False, True)))
        assert {case: error for case, error in rank.items() if not error <= EXACT} == {}
