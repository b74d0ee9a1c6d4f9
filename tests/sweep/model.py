"""The parameters of one rank, and which part of the undivided model they are."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tests.host.gradients import group_of, is_split, parts


class Part(NamedTuple):
    """A piece of an undivided parameter, as one rank holds it."""

    name: str  # in the undivided model
    value: Tensor
    dim: int  # the axis that is divided; -1: the whole parameter
    pieces: int
    piece: int
    gated: bool  # each rank holds its piece of the gate, then its piece of the up projection

    def of(self, whole: Tensor) -> Tensor:
        """What of the undivided ``whole`` belongs here."""
        if self.dim < 0:
            return whole
        if not self.gated:
            return whole.chunk(self.pieces, dim=self.dim)[self.piece]
        halves = whole.chunk(2, dim=self.dim)
        return torch.cat([h.chunk(self.pieces, dim=self.dim)[self.piece] for h in halves], self.dim)


def parts_of(model: Any) -> list[Part]:
    return [
        _part(name, parameter, model.config)._replace(value=parameter.detach().clone())
        for name, parameter in parts(model)
    ]


def initial_parts(model: Any) -> None:
    """Fill ``model`` with weights that do not depend on how it is divided."""
    for name, parameter in parts(model):
        part = _part(name, parameter, model.config)
        shape = list(parameter.shape)
        if part.dim >= 0:
            shape[part.dim] *= part.pieces
        parameter.data.copy_(part.of(initial_value(name, shape)))


def initial_value(name: str, shape: list[int]) -> Tensor:
    """fp32, and the same number in bf16 and fp16."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator)
    # Of this size a loss is far from uniform, and a router's choices are far from ties.
    return (noise * 0.2 + (len(shape) == 1)).bfloat16().float()


def _part(name: str, parameter: Parameter, config: Any) -> Part:
    gated = config.gated_linear_unit and "linear_fc1." in name
    if not is_split(parameter):
        return Part(name, parameter, -1, 1, 0, gated)
    group = group_of(parameter)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return Part(name, parameter, parameter.partition_dim, size, rank, gated)
