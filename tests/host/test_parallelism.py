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
from tests.host.harness import CP2, EP2, EXACT, PP2, SP, TP2, Topology
from tests.host.steps import MODES, PLACES

pytestmark = pytest.mark.host

VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
# With two stages the next one is also the previous one: Megatron then wants the sends apart.
APART = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 2000}
AVERAGE = {"average_in_collective": True}

TOPOLOGIES = {
    "tp2": Topology(2, TP2),
    "tp2-sp": Topology(2, TP2, SP),
    "tp2-sp-cp2": Topology(4, {**TP2, **CP2}, SP),
    "pp2": Topology(2, PP2),
    "pp2-cp2": Topology(4, {**PP2, **CP2}),
    "pp2-tp2-sp": Topology(4, {**PP2, **TP2}, SP),
    "vpp2": Topology(2, VPP2, APART, model="deep"),
    "vpp2-dp2-distributed-overlap": Topology(
        4, VPP2, APART, {**DISTRIBUTED, **OVERLAP}, model="deep"
    ),
    "ep2": Topology(2, EP2, model="moe"),
    "ep2-cp2": Topology(4, {**EP2, **CP2}, model="moe"),
    "ep2-tp2-sp": Topology(4, {**EP2, **TP2, "expert_tensor_parallel_size": 1}, SP, model="moe"),
    "ep2-distributed-overlap": Topology(2, EP2, ddp={**DISTRIBUTED, **OVERLAP}, model="moe"),
    "ep2-average": Topology(2, EP2, ddp=AVERAGE, model="moe"),
    "dp2-average": Topology(2, ddp=AVERAGE),
    "dp2-distributed": Topology(2, ddp=DISTRIBUTED),
    "dp2-cp2-distributed": Topology(4, CP2, ddp=DISTRIBUTED),
    "dp2-overlap": Topology(2, ddp=OVERLAP),
    "dp2-overlap-unaligned": Topology(2, ddp=OVERLAP, aligned=False),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_gradient_is_that_of_the_whole_step(name: str) -> None:
    topology = TOPOLOGIES[name]
    cases = [
        Case(
            mode,
            layout=layout,
            places=PLACES[topology.data_parallel_size],
            per_token=per_token,
        )
        for mode, layout, per_token in product(MODES, ("thd", "bshd"), topology.per_token_flags)
    ]
    errors = gradient_errors(topology, cases)
    assert {case.name: error for case, error in errors.items() if not error <= EXACT} == {}
