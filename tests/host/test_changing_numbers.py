"""One hook over a run whose number of microbatches changes, over steps and over ranks.

Gradients of every training step and reports of every step are compared with the fp64 reference.
Evaluations come between the steps.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megatron_loss_agg.mcore import Audit, Loop, LossHook
from tests.host.harness import EXACT, TOPOLOGIES, Topology, build_chunks, data_for, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import MODES, Places, aggregation, weights_of

pytestmark = pytest.mark.host

OF_RUN = {**MODES, "microbatch_mean": {}}
# By step: whether it evaluates, and the samples by data-parallel rank and microbatch.
RUN: list[tuple[bool, Places]] = [
    (False, (((0, 1),), ((2, 3),))),
    (False, (((3, 4), (5, 6), (7, 8)), ((9, 0),))),
    (True, (((6, 7), (8, 9)), ((0, 1), (2, 3)))),
    (False, (((9, 0), (1, 2)), ((3,), (5,)))),
    (True, (((2, 3),), ((4, 5),))),
    (False, (((5, 6),), ((9,), (1, 2), (3, 4)))),
]


def places_on(ranks: int, places: Places) -> Places:
    """Of two data-parallel ranks; or all on one."""
    return places if ranks == 2 else (tuple(mb for rank in places for mb in rank),)


def wanted(ranks: int) -> list[dict[str, Any]]:
    """By step and mode: the reference's gradient and loss."""
    steps = []
    for _, places in RUN:
        weights = {mode: weights_of(mode, places_on(ranks, places)) for mode in OF_RUN}
        steps.append(
            {m: (reference().gradient(w), reference().loss(w)) for m, w in weights.items()}
        )
    return steps


def errors_of_run(topology: Topology, expected: list[dict[str, Any]]) -> dict[Any, list[float]]:
    """Every rank, for each (mode, layout, per-token flag): the error of every step."""
    from megatron.core import parallel_state

    from tests.host import gpt, gradients

    gpt.initialize(**topology.sizes)
    errors = {}
    for per_token in (False, True):
        chunks = build_chunks(topology, per_token)
        for mode, layout in product(OF_RUN, ("thd", "bshd")):
            audit = Audit(repeat=layout == "thd")  # or else of the first step alone
            loop = Loop(of_megatron=True)
            hook = LossHook(aggregation(mode), loop=loop, extensions=[audit])
            found = errors[mode, layout, per_token] = []
            for (evaluates, of_all), of_modes in zip(RUN, expected, strict=True):
                places = places_on(topology.data_parallel_size, of_all)
                data, number = data_for(topology, places, layout), len(places[gpt.data_rank()])
                reports = gpt.run_step(hook, chunks, data, number, forward_only=evaluates)
                gradient, _ = of_modes[mode]
                worst = [] if evaluates else [gradients.error(chunks, gradient)]
                if parallel_state.is_pipeline_last_stage():
                    for key, of in ((f"{mode} loss", mode), ("lm loss", "token_mean")):
                        worst.append(abs(gpt.reported(reports, key) / of_modes[of][1] - 1))
                found.append(max(worst, default=0.0))
    return errors


@pytest.mark.parametrize("name", ["dp2", "dp2-cp2", "tp2", "pp2"])
def test_every_step_is_exact_whatever_the_number_of_microbatches(name: str) -> None:
    topology = TOPOLOGIES[name]
    expected = wanted(topology.data_parallel_size)
    ranks = run_host_ranks(errors_of_run, topology.world_size, topology, expected, timeout=300)
    for rank in ranks:
        assert len(rank) == len(OF_RUN) * 2 * 2
        for case, errors in rank.items():
            assert len(errors) == len(RUN)
            assert max(errors) <= EXACT, case
