"""Losses that every context-parallel rank holds whole, gathered from the ranks.

Ranks gather log-probabilities, or losses, in both ways that loops have. The gradient is that of the
fp64 reference. Steps of several terms are in `test_terms`.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.host import whole
from tests.host.cases import Case, Expected, assert_exact, covering
from tests.host.harness import CP2, TOPOLOGIES, TP2, Topology
from tests.host.reference import reference
from tests.host.steps import PLACES

# Modes by topology. The losses of "token_mean" are gathered in the forward step.
MODES = {
    "cp2": ("prompt_mean",),
    "dp2": ("prompt_mean",),
    "dp2-cp2": ("prompt_mean", "token_mean", "constant"),
    "tp2-cp2": ("prompt_mean",),
}


def case_of(mode: str, kind: str, layout: str, flag: bool, ranks: int, masks: str = "01") -> Case:
    return Case(
        mode,
        masks=masks,
        layout=layout,
        places=PLACES[ranks],
        per_token=flag,
        step=whole.script(kind, early=mode == "token_mean", metric=True),
        times=2,  # the first step measures
    )


def expected(case: Case) -> Expected:
    loss = reference().loss(case.weights)
    return reference().gradient(case.weights), {f"{case.mode} loss": loss, "again": loss}


@pytest.mark.parametrize("name", MODES)
def test_gradients_and_reports_of_whole_losses_are_exact(name: str) -> None:
    topology = TOPOLOGIES.get(name, Topology(4, {**TP2, **CP2}))
    ways = [("local_grad", "reduced_grad"), ("thd", "bshd"), (False, True)]
    cases = [case_of(*row, topology.data_parallel_size) for row in covering(2, MODES[name], *ways)]
    # The last tokens of sequences are on the first context-parallel rank.
    cases += [
        case_of("sample_mean", kind, "thd", flag, topology.data_parallel_size, "single")
        for kind, flag in product(ways[0], ways[2])
    ]
    assert_exact(topology, cases, expected)
