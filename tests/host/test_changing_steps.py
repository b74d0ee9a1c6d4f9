"""One hook over a run whose number of microbatches changes, with evaluations between the steps.

Gradients of every training step and reports of every evaluation are compared with the fp64
reference. Rows have a fixed number of samples a microbatch, as Megatron's batches have.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megatron_loss_agg.mcore import Loop, LossHook
from tests.host.harness import EXACT, TOPOLOGIES, Topology, build_chunks, data_for, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import LENGTHS, MODES, Places, aggregation, weights_of

pytestmark = pytest.mark.host

ROWS = 2  # samples a microbatch


def step(k: int, samples: int, evaluates: bool = False) -> tuple[bool, tuple[int, ...]]:
    """What the run does next, with which samples."""
    return evaluates, tuple((3 * k + i) % len(LENGTHS) for i in range(samples))


def deal(samples: tuple[int, ...], ranks: int) -> Places:
    """By data-parallel rank and microbatch."""
    microbatches = tuple(samples[i : i + ROWS] for i in range(0, len(samples), ROWS))
    each = len(microbatches) // ranks
    return tuple(microbatches[r * each : (r + 1) * each] for r in range(ranks))


# 1, 3, 2, 2, 1 and 3 microbatches on two data-parallel ranks.
RUN = [step(0, 4), step(1, 12), step(2, 8, True), step(3, 8), step(4, 4, True), step(5, 12)]


def wanted(evaluates: bool, samples: tuple[int, ...]) -> dict[str, Any]:
    """Every mode's gradient, or its loss."""
    of = reference().loss if evaluates else reference().gradient
    return {mode: of(weights_of(mode, deal(samples, 1))) for mode in MODES}


def errors_of_run(topology: Topology, expected: list[dict[str, Any]]) -> dict[Any, list[float]]:
    """Every rank, for each (mode, layout, per-token flag): the error of every step."""
    from megatron.core import parallel_state

    from tests.host import gpt, gradients

    gpt.initialize(**topology.sizes)
    errors = {}
    for per_token in (False, True):
        chunks = build_chunks(topology, per_token)
        for mode, layout in product(MODES, ("thd", "bshd")):
            hook = LossHook(aggregation(mode), loop=Loop(of_megatron=True))
            found = errors[mode, layout, per_token] = []
            for (evaluates, samples), of_modes in zip(RUN, expected, strict=True):
                places = deal(samples, topology.data_parallel_size)
                data, number = data_for(topology, places, layout), len(places[0])
                rows = ROWS if layout == "bshd" else 1
                reports = gpt.run_step(hook, chunks, data, number, rows, forward_only=evaluates)
                if not evaluates:
                    found.append(gradients.error(chunks, of_modes[mode]))
                elif parallel_state.is_pipeline_last_stage():
                    pairs = ((f"{mode} loss", mode), ("lm loss", "token_mean"))
                    losses = [gpt.reported(reports, key) / of_modes[of] for key, of in pairs]
                    found.append(max(abs(loss - 1) for loss in losses))
    return errors


@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2"])
def test_every_step_is_exact(name: str) -> None:
    topology = TOPOLOGIES[name]
    expected = [wanted(*step) for step in RUN]
    ranks = run_host_ranks(errors_of_run, topology.world_size, topology, expected, timeout=300)
    for rank in ranks:
        assert len(rank) == len(MODES) * 2 * 2
        assert {run: found for run, found in rank.items() if not max(found) <= EXACT} == {}
    assert {len(found) for found in ranks[-1].values()} == {len(RUN)}
