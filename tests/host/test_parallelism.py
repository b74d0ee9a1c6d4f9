"""Every parallelism of the host: the gradient of each rank's parameters is that of the whole step.

As in `test_gradients`, Megatron's own schedules, DDP and gradient finalization run on gloo ranks,
and one fp64 process that runs every sample alone is the reference. A rank that holds a part of the
model is compared with that part of the reference. Each row also passes the plugin's audit, which
measures the host's averaging before a rank's first step.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.host.cases import Case, gradient_errors
from tests.host.harness import EXACT, TOPOLOGIES
from tests.host.steps import MODES, PLACES

pytestmark = pytest.mark.host

# Of those with data- and context-parallel ranks alone, `test_gradients` runs more cases.
ELSEWHERE = {"dp1", "dp2", "cp2", "dp2-cp2", "pp2-dp2-distributed-overlap"}


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name not in ELSEWHERE])
def test_gradient_is_that_of_the_whole_step(name: str) -> None:
    topology = TOPOLOGIES[name]
    places = PLACES[topology.data_parallel_size]
    cases = [
        Case(mode, layout=layout, places=places, per_token=per_token)
        for mode, layout, per_token in product(MODES, ("thd", "bshd"), topology.per_token_flags)
    ]
    errors = gradient_errors(topology, cases)
    assert {case.name: error for case, error in errors.items() if not error <= EXACT} == {}
