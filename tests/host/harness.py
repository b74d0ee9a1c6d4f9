"""Run the host on several ranks: its topologies, its models, and what becomes of its steps.

`TOPOLOGIES` are what tests name. In

    "pp2-dp2-distributed-overlap": Topology(4, PP2, ddp={**DISTRIBUTED, **OVERLAP})

four ranks have two pipeline stages; with no other division, two of them have samples of their own.
Megatron's DDP shards the optimizer and reduces gradients while it computes others.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.distributed import run_ranks
from tests.host import gpt

run_host_ranks = functools.partial(run_ranks, preload="tests.host.preload")
"""`run_ranks` on ranks that have the real Megatron-Core imported, on the CPU."""

EXACT = 1e-14
"""Bound of a gradient's error in fp64, norm-wise and relative to the fp64 reference."""

CHUNKS = {"num_layers": 4}  # two chunks on each of two pipeline stages
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_dtype": "fp64",
    "moe_router_load_balancing_type": "none",
    "add_bias_linear": False,
}
AUX = {**MOE, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
# What decides the parameters of each model.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense-chunks": CHUNKS,
    "moe": MOE,
    "moe-chunks": {**MOE, **CHUNKS},
}

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"cp": 2}
EP2 = {"expert_model_parallel_size": 2}
SP = {"sequence_parallel": True}


@dataclass(frozen=True)
class Topology:
    """The number of ranks, their model, and its division over them."""

    world_size: int
    sizes: dict[str, int] = field(default_factory=dict)  # of the groups, under Megatron's names
    config: dict[str, Any] = field(default_factory=dict)  # of the model, apart from its parameters
    ddp: dict[str, Any] = field(default_factory=dict)
    model: str = "dense"
    aligned: bool = True  # overlapped reductions start where the schedule says

    @property
    def chunks(self) -> int:
        """Model chunks of a rank, under interleaved pipelining."""
        return self.sizes.get("virtual_pipeline_model_parallel_size", 1)

    @property
    def data_parallel_size(self) -> int:
        """Ranks with samples of their own: experts are divided over these."""
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "cp")
        return self.world_size // math.prod(self.sizes.get(name, 1) for name in names)

    @property
    def per_token_flags(self) -> tuple[bool, ...]:
        """Megatron refuses to average in the collective what it must divide by tokens."""
        return (False,) if self.ddp.get("average_in_collective") else (False, True)


VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
# With two stages the next one is also the previous one: Megatron then wants the sends apart.
APART = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 2000}
AVERAGE = {"average_in_collective": True}

TOPOLOGIES = {
    "dp1": Topology(1),
    "dp2": Topology(2),
    "cp2": Topology(2, CP2),
    "dp2-cp2": Topology(4, CP2),
    "tp2": Topology(2, TP2),
    "tp2-sp": Topology(2, TP2, SP),
    "tp2-sp-cp2": Topology(4, {**TP2, **CP2}, SP),
    "pp2": Topology(2, PP2),
    "pp2-cp2": Topology(4, {**PP2, **CP2}),
    "pp2-tp2-sp": Topology(4, {**PP2, **TP2}, SP),
    "dp2-distributed-overlap": Topology(2, ddp={**DISTRIBUTED, **OVERLAP}),
    "pp2-dp2-distributed-overlap": Topology(4, PP2, ddp={**DISTRIBUTED, **OVERLAP}),
    "vpp2": Topology(2, VPP2, APART, model="dense-chunks"),
    # The first rank's second chunk and the second rank's first one have no layer.
    "vpp2-empty": Topology(2, VPP2, {**APART, "pipeline_model_parallel_layout": "Ett|||L"}),
    "vpp2-dp2-distributed-overlap": Topology(
        4, VPP2, APART, {**DISTRIBUTED, **OVERLAP}, model="dense-chunks"
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


def build_chunks(
    topology: Topology, per_token: bool, dtype: torch.dtype = torch.float64, **more: Any
) -> list[Any]:
    """This rank's model chunks in DDP, connected as `megatron.training` connects them."""
    stages = range(topology.chunks) if topology.chunks > 1 else [None]
    config = {**MODELS[topology.model], **topology.config, **more}
    models = [gpt.build(dtype, per_token, stage, **config) for stage in stages]
    chunks = [gpt.data_parallel(model, **topology.ddp) for model in models]
    if topology.ddp.get("overlap_grad_reduce"):
        for model in models:
            model.config.no_sync_func = one_or_all([ddp.no_sync for ddp in chunks])
            if topology.aligned:
                model.config.grad_sync_func = one_or_all([ddp.start_grad_sync for ddp in chunks])
    return chunks


def on_ranks_of(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on every rank of each of these topologies; it gets the topology's name."""
    import pytest  # here, since a machine that runs `benchmarks.gpu` may lack it

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("name", names)
        @functools.wraps(test)
        def run(name: str) -> None:
            run_host_ranks(_run, TOPOLOGIES[name].world_size, test.__module__, test.__name__, name)

        return run

    return decorate


def _run(module: str, test: str, name: str) -> None:
    gpt.initialize(**TOPOLOGIES[name].sizes)
    getattr(importlib.import_module(module), test).__wrapped__(name)


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """The error of the call, as "Name: text"; None if it raised none."""
    try:
        call(*args, **kwargs)
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return None


def one_or_all(values: list[Any]) -> Any:
    """Model chunks as Megatron takes them: a list of several; one by itself."""
    return values if len(values) > 1 else values[0]
