"""The gradient of one rank's parameters, and which part of the undivided model these are.

Under two pipeline stages of two tensor-parallel ranks each, the first layer of the second stage is
``decoder.layers.0`` there; `parts` gives it the name ``decoder.layers.1`` that it has in the undivided
model. Of the whole gradient of its ``mlp.linear_fc1.weight``, `part_of` gives each of the two ranks
half of the rows. `error` compares all that a rank holds.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.nn import Parameter

from tests.host.reference import Gradient, relative_error


def parts(model: torch.nn.Module) -> Iterator[tuple[str, Parameter]]:
    """The parameters of a model chunk, by the names that they have in the undivided model."""
    layers = {str(i): layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    first_expert = 0
    if model.config.num_moe_experts:
        size = parallel_state.get_expert_model_parallel_world_size()
        local_experts = model.config.num_moe_experts // size
        first_expert = local_experts * parallel_state.get_expert_model_parallel_rank()
    for name, parameter in model.named_parameters():
        name = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda i: str(layers[i[0]]), name)
        name = re.sub(r"(?<=local_experts\.)\d+", lambda i: str(int(i[0]) + first_expert), name)
        if model.share_embeddings_and_output_weights and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def initial_value(name: str, parameter: Parameter, gated: bool = False) -> Tensor:
    """This rank's part of the whole parameter: the same fp32 numbers in every topology."""
    shape = list(parameter.shape)
    if is_split(parameter):
        shape[parameter.partition_dim] *= dist.get_world_size(group_of(parameter))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator, dtype=torch.float32)
    return part_of(noise * 0.2 + (len(shape) == 1), parameter, gated)


def part_of(whole: Tensor, parameter: Parameter, gated: bool = False) -> Tensor:
    """This rank's part of ``whole``, which belongs to the undivided parameter.

    Args:
        gated: the parameter is a gate and, behind it, a projection, each of which is divided.
    """
    if not is_split(parameter):
        return whole
    group, dim = group_of(parameter), parameter.partition_dim
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = whole.chunk(1 + gated, dim=dim)
    return torch.cat([part.chunk(ranks, dim=dim)[rank] for part in parts], dim=dim)


def whole_of(parameter: Parameter, gated: bool = False) -> Tensor:
    """The undivided parameter, from the parts of all ranks."""
    mine = parameter.detach().clone()
    if not is_split(parameter):
        return mine
    group, dim = group_of(parameter), parameter.partition_dim
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, mine, group=group)
    parts = zip(*(x.chunk(1 + gated, dim=dim) for x in of_ranks), strict=True)
    return torch.cat([piece for part in parts for piece in part], dim=dim)


def of(model: Any) -> Gradient:
    """Gradients of this rank's parameters, by their names in the undivided model.

    Args:
        model: in DDP, or a list of its chunks.
    """
    found = {}
    for ddp in _chunks(model):
        _gather_shards(ddp)
        found.update({name: p.main_grad.clone() for name, p in parts(ddp.module)})
    return found


def flat(model: Any) -> Tensor:
    return torch.cat([g.view(-1) for g in of(model).values()])


def error(model: Any, whole: Gradient) -> float:
    """`relative_error` of the gradient in ``model``, over this rank's parameters."""
    expected = {
        name: part_of(whole[name], p) for ddp in _chunks(model) for name, p in parts(ddp.module)
    }
    return relative_error(of(model), expected)


def _chunks(model: Any) -> list[Any]:
    return model if isinstance(model, list) else [model]


def _gather_shards(ddp: Any) -> None:
    """Fill the gradient buffers, of which a distributed optimizer's ranks reduce a shard each."""
    if not ddp.ddp_config.use_distributed_optimizer:
        return
    for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shards = bucket.grad_data.view(dist.get_world_size(group), -1)
            mine = shards[dist.get_rank(group)].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)


def is_split(parameter: Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def group_of(parameter: Parameter) -> dist.ProcessGroup:
    """The tensor-parallel ranks that hold the other pieces of a parameter."""
    if not getattr(parameter, "allreduce", True):  # an expert's
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()
