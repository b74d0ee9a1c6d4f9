"""Every parallelism of the host: the gradient of each rank's parameters is that of the whole step.

As in `test_gradients`, Megatron's own schedules, DDP and gradient finalization run on gloo ranks,
and one fp64 process that runs every sample alone is the reference. A rank that holds a part of the
model is compared with that part of the reference. Each row also passes the plugin's audit, which
measures the host's averaging before a rank's first step.
"""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.host import cases
from tests.host.cases import Case, gradient_errors, grid
from tests.host.harness import EXACT, TOPOLOGIES
from tests.host.steps import MODES, PLACES

pytestmark = pytest.mark.host

# Of those with data- and context-parallel ranks alone, `test_gradients` runs more cases.
ELSEWHERE = {"dp1", "dp2", "cp2", "dp2-cp2", "pp2-dp2-distributed-overlap"}


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name not in ELSEWHERE])
def test_gradient_is_that_of_the_whole_step(name: str) -> None:
    topology = TOPOLOGIES[name]
    places = PLACES[topology.data_parallel_size]
    runs = [
        Case(mode, layout=layout, places=places, per_token=per_token)
        for mode, layout, per_token in grid(
            2, list(MODES), ("thd", "bshd"), topology.per_token_flags
        )
    ]
    errors = gradient_errors(topology, runs)
    assert {case.name: error for case, error in errors.items() if not error <= EXACT} == {}


def test_a_covering_grid_lacks_no_three_values(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = [range(size) for size in (4, 7, 2, 2, 2)]
    assert grid(3, *axes) == list(product(*axes)) or cases.COVERS
    monkeypatch.setattr(cases, "COVERS", True)
    rows = grid(3, *axes)
    assert len(set(rows)) == len(rows) < 70 < len(list(product(*axes)))
    for three in combinations(range(len(axes)), 3):
        found = {tuple(row[i] for i in three) for row in rows}
        assert found == set(product(*(axes[i] for i in three)))
