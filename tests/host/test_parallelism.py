"""Every parallelism of the host: the gradient of each rank's parameters is that of the whole step.

As in `test_gradients`, Megatron's own schedules, DDP and gradient finalization run on gloo ranks,
and one fp64 process that runs every sample alone is the reference. A rank that holds a part of the
model is compared with that part of the reference. Each row also passes the plugin's audit, which
measures the host's averaging before a rank's first step.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch

from tests import oracle
from tests.host.ranks import run_host_ranks
from tests.host.steps import sequences
from tests.host.topology import MODELS, MODES, KeepDouble, Topology, build_chunks, data_for

pytestmark = pytest.mark.host

EXACT = 1e-12
LAYOUTS = ("thd", "bshd")
# Samples by microbatch, for each number of data-parallel ranks. Sample 5, all of whose tokens are
# masked, is a microbatch of its own.
PLACES = {
    1: [[[0, 1], [5], [2, 3], [4, 6, 7, 8, 9]]],
    2: [[[5], [0, 1], [2], [3]], [[4], [6, 7], [8], [9]]],
}
N_MB = 4

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
CP2 = {"cp": 2}
EP2 = {"expert_model_parallel_size": 2}
SP = {"sequence_parallel": True}
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
    "vpp2": Topology(2, VPP2, APART),
    "vpp2-dp2-distributed-overlap": Topology(4, VPP2, APART, {**DISTRIBUTED, **OVERLAP}),
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


def weights_of(mode: str) -> list[list[float]]:
    """The oracle's weights, by sample: the same whatever the split of the step."""
    samples = [s.sample for s in sequences(fractional=False)]
    ((weights,),) = oracle.step_weights(mode, [[samples]], **MODES[mode])
    return weights


def reference_gradients(config: dict[str, Any]) -> dict[str, Any]:
    """One process: the gradient of each mode."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.build(torch.float64, per_token=False, **config)
    with KeepDouble():
        return {
            mode: gpt.plain_gradient(model, sequences(fractional=False), weights_of(mode))
            for mode in MODES
        }


def host_gradients(
    topology: Topology, references: dict[str, Any]
) -> dict[tuple[str, str, bool], float]:
    """Every rank: the error of each (mode, layout, per-token flag) over its own parameters."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg import LossAggregation
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize(**topology.sizes)
    places = PLACES[parallel_state.get_data_parallel_world_size()]
    errors = {}
    for per_token in topology.per_token_flags:
        chunks = build_chunks(topology, per_token)
        for mode, layout in product(MODES, LAYOUTS):
            hook = LossHook(LossAggregation(mode=mode, **MODES[mode]))
            forward_backward = hook.wrap(get_forward_backward_func())
            with KeepDouble():
                data = data_for(topology, places, layout)
                gpt.run_step(forward_backward, chunks, data, N_MB)
            errors[mode, layout, per_token] = gpt.gradient_error(chunks, references[mode])
    return errors


@functools.cache
def references(model: str) -> dict[str, Any]:
    return run_host_ranks(reference_gradients, 1, MODELS[model])[0]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_gradient_is_that_of_the_whole_step(name: str) -> None:
    topology = TOPOLOGIES[name]
    expected = references(topology.model)
    ranks = run_host_ranks(host_gradients, topology.world_size, topology, expected, timeout=300)
    worst = {run: max(rank[run] for rank in ranks) for run in ranks[0]}
    assert len(worst) == len(MODES) * len(LAYOUTS) * len(topology.per_token_flags)
    assert {run: error for run, error in worst.items() if not error <= EXACT} == {}
