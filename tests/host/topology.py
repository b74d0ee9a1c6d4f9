"""A way to run the host: its process groups, model chunks and data iterators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.host.steps import batches, sequences


@dataclass(frozen=True)
class Topology:
    """How many ranks run which model, and how it is divided over them."""

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
    def per_token_flags(self) -> tuple[bool, ...]:
        """Megatron refuses to average in the collective what it must divide by tokens."""
        return (False,) if self.ddp.get("average_in_collective") else (False, True)


# A few aggregations, and their options: `test_gradients` has them all.
MODES: dict[str, dict[str, float]] = {
    "token_mean": {},
    "sample_mean": {},
    "prompt_mean": {},
    "constant": {"divisor": 7.0},
}
# What decides the parameters of each model.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"num_layers": 4},
    "moe": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_dtype": "fp64",
        "moe_router_load_balancing_type": "none",
        "add_bias_linear": False,
    },
}


class KeepDouble(TorchFunctionMode):
    """Keeps fp64 where Megatron casts to fp32: in its router's softmax and its cross entropy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.softmax and args[0].dtype == torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **kwargs)


def build_chunks(topology: Topology, per_token: bool) -> list[Any]:
    """This rank's model chunks in DDP, fp64, connected as `megatron.training` connects them."""
    from tests.host import gpt

    stages = range(topology.chunks) if topology.chunks > 1 else [None]
    config = {**MODELS[topology.model], **topology.config}
    models = [gpt.build(torch.float64, per_token, stage, **config) for stage in stages]
    chunks = [gpt.data_parallel(model, **topology.ddp) for model in models]
    if topology.ddp.get("overlap_grad_reduce"):
        for model in models:
            model.config.no_sync_func = _one_or_all([ddp.no_sync for ddp in chunks])
            if topology.aligned:
                model.config.grad_sync_func = _one_or_all([ddp.start_grad_sync for ddp in chunks])
    return chunks


def data_for(topology: Topology, places: list[list[list[int]]], layout: str) -> Any:
    """What stock scripts give the schedule: data on the first tensor-parallel rank alone.

    Args:
        places: indices of the samples, by data-parallel rank and microbatch.
    """
    from megatron.core import parallel_state

    chosen = sequences(fractional=False)
    place = places[parallel_state.get_data_parallel_rank()]
    reads = parallel_state.get_tensor_model_parallel_rank() == 0
    return _one_or_all(
        [batches(chosen, place, layout) if reads else None for _ in range(topology.chunks)]
    )


def _one_or_all(values: list[Any]) -> Any:
    return values if len(values) > 1 else values[0]
