"""One hook over a run whose number of microbatches changes, with evaluations between the steps.

Gradients of every training step and reports of every evaluation are compared with one fp64
process, as in `test_parallelism`. Rows have a fixed number of samples a microbatch, as Megatron's
batches have, so that the hook may stop reading ahead after its first step.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from tests import oracle
from tests.host.ranks import run_host_ranks
from tests.host.steps import sequences
from tests.host.topology import MODELS, MODES, Topology, build_chunks, data_for

pytestmark = pytest.mark.host

EXACT = 1e-12
ROWS = 2  # samples a microbatch


class Step(NamedTuple):
    """What the run does next, with which samples."""

    evaluate: bool
    chosen: tuple[int, ...]


def step(k: int, samples: int, evaluate: bool = False) -> Step:
    return Step(evaluate, tuple((3 * k + i) % len(sequences(False)) for i in range(samples)))


# 1, 3, 2, 2, 1 and 3 microbatches on two data-parallel ranks.
RUN = [step(0, 4), step(1, 12), step(2, 8, True), step(3, 8), step(4, 4, True), step(5, 12)]
TOPOLOGIES = {
    "dp2": Topology(2),
    "tp2": Topology(2, {"tensor_model_parallel_size": 2}),
    "pp2": Topology(2, {"pipeline_model_parallel_size": 2}),
}


def places_of(step: Step, ranks: int) -> list[list[list[int]]]:
    """The step's samples by data-parallel rank and microbatch."""
    microbatches = [list(step.chosen[i : i + ROWS]) for i in range(0, len(step.chosen), ROWS)]
    each = len(microbatches) // ranks
    return [microbatches[r * each : (r + 1) * each] for r in range(ranks)]


def reference() -> list[dict[str, Any]]:
    """One process, for each step: every mode's gradient, or its loss beside the token mean."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.build(torch.float64, per_token=False, **MODELS["dense"])
    expected = []
    for step in RUN:
        chosen = [sequences(fractional=False)[i] for i in step.chosen]
        weights = {}
        for mode, options in MODES.items():
            ((weights[mode],),) = oracle.step_weights(
                mode, [[[s.sample for s in chosen]]], **options
            )
        if not step.evaluate:
            expected.append({m: gpt.plain_gradient(model, chosen, w) for m, w in weights.items()})
            continue
        with torch.no_grad():
            losses = torch.cat([gpt.plain_losses(model, s) for s in chosen])
        flat = {m: torch.cat([torch.tensor(sample) for sample in w]) for m, w in weights.items()}
        expected.append({m: float(w @ losses) for m, w in flat.items()})
    return expected


def errors_of_run(topology: Topology, expected: list[dict[str, Any]]) -> dict[Any, list[float]]:
    """Every rank, for each (mode, layout, per-token flag): the error of every step."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg import LossAggregation
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize(**topology.sizes)
    ranks = parallel_state.get_data_parallel_world_size()
    errors = {}
    for per_token in (False, True):
        chunks = build_chunks(topology, per_token)
        for mode, layout in product(MODES, ("thd", "bshd")):
            aggregation = LossAggregation(mode=mode, **MODES[mode])
            hook = LossHook(aggregation, in_training_loop=True)
            found = errors[mode, layout, per_token] = []
            for step, wanted in zip(RUN, expected, strict=True):
                places = places_of(step, ranks)
                reports = gpt.run_step(
                    hook.wrap(get_forward_backward_func()),
                    chunks,
                    data_for(topology, places, layout),
                    num_microbatches=len(places[0]),
                    micro_batch_size=ROWS if layout == "bshd" else 1,
                    forward_only=step.evaluate,
                )
                if not step.evaluate:
                    found.append(gpt.gradient_error(chunks, wanted[mode]))
                elif parallel_state.is_pipeline_last_stage():
                    found.append(report_error(reports, mode, wanted))
    return errors


def report_error(reports: list[dict[str, Any]], mode: str, expected: dict[str, float]) -> float:
    """Of the two losses that the step reports, reduced as Megatron reduces them."""
    from megatron.core import parallel_state

    worst = 0.0
    for key, wanted in ((f"{mode} loss", mode), ("lm loss", "token_mean")):
        pair = sum(report[key] for report in reports)
        torch.distributed.all_reduce(pair, group=parallel_state.get_data_parallel_group())
        worst = max(worst, abs(float(pair[0] / pair[1]) / expected[wanted] - 1))
    return worst


@functools.cache
def expected() -> list[dict[str, Any]]:
    return run_host_ranks(reference, 1)[0]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_step_is_exact(name: str) -> None:
    topology = TOPOLOGIES[name]
    ranks = run_host_ranks(errors_of_run, topology.world_size, topology, expected(), timeout=300)
    assert len(ranks[-1]) == len(MODES) * 2 * 2
    for rank in ranks:
        inexact = {run: found for run, found in rank.items() if not max(found) <= EXACT}
        assert inexact == {}
    assert {len(found) for found in ranks[-1].values()} == {len(RUN)}
