"""Hands what the first rank of a tensor-parallel group planned to the others, which read no data.

Two broadcasts: of two sizes, and of one message, the bytes of a pickle without tensors, and then
those of the tensors.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import communication_device
from megatron_loss_agg.errors import PeerError
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.transfer import Kind, joined, kinds_of, split

_T = TypeVar("_T")


def on_group(plan_here: Callable[[], _T], groups: ParallelGroups) -> _T:
    """What ``plan_here`` returns where the data is read, on all ranks of the tensor-parallel group.

    Every rank must call. Tensors of the result are on the CPU.

    Raises:
        PeerError: the rank that reads the data failed; it raises its own error.
    """
    group, first = groups.tp, dist.get_global_rank(groups.tp, 0)
    if dist.get_world_size(group) == 1:
        return plan_here()
    device = communication_device(group)
    message, text = torch.empty(0, dtype=torch.uint8), 0
    try:
        if groups.reads_data:
            found = plan_here()
            # Whatever fails here, the others must hear a size of 0.
            made, length = packed(found, pinned=device.type == "cuda")
            message, text = made.to(device, non_blocking=True), length
    finally:
        sizes = torch.tensor([message.numel(), text], device=device)
        dist.broadcast(sizes, first, group)
    if groups.reads_data:
        dist.broadcast(message, first, group)
        return found
    size, text = sizes.tolist()
    if not size:
        raise PeerError(
            "the rank that reads the data of this tensor-parallel group failed; "
            "expected it to succeed: see its error"
        )
    message = torch.empty(size, dtype=torch.uint8, device=device)
    dist.broadcast(message, first, group)
    received: _T = unpacked(message.cpu(), text)
    return received


def packed(found: object, pinned: bool = False) -> tuple[Tensor, int]:
    """A message with all of ``found``, whose tensors are on the CPU; and its text's length."""
    body = io.BytesIO()
    pickler = _Pickler(body, pickle.HIGHEST_PROTOCOL)
    pickler.dump(found)
    tensors = list(pickler.tensors.values())
    text = pickle.dumps((kinds_of(tensors), body.getvalue()), pickle.HIGHEST_PROTOCOL)
    first = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return joined([first, *tensors], pinned), len(text)


def unpacked(message: Tensor, text: int) -> Any:
    """What was `packed`; its tensors are views of ``message``."""
    kinds, body = pickle.loads(message[:text].numpy().tobytes())
    unpickler = _Unpickler(io.BytesIO(body))
    _, *unpickler.tensors = split(message, [Kind(torch.uint8, (text,)), *kinds])
    return unpickler.load()


class _Pickler(pickle.Pickler):
    """Pickles the places of tensors instead of these."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tensors: dict[int, Tensor] = {}  # by id, in the order of their places
        self._places: dict[int, int] = {}

    def persistent_id(self, x: Any) -> int | None:
        if type(x) is not Tensor:
            return None
        self.tensors[id(x)] = x
        return self._places.setdefault(id(x), len(self._places))


class _Unpickler(pickle.Unpickler):
    tensors: list[Tensor]

    def persistent_load(self, place: int) -> Tensor:
        return self.tensors[place]
