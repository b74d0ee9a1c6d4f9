"""Moves the tensors of a step between CPU and GPU together, in one copy.

A copy to the CPU waits for the GPU, and one from pageable memory makes the CPU wait for the copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_loss_agg.microbatch import Microbatch, MicrobatchOfTerms, for_each_term

_Microbatch = TypeVar("_Microbatch", bound=MicrobatchOfTerms)
_CPU = torch.device("cpu")
_ALIGNMENT = 8  # bytes, of the widest elements


class Kind(NamedTuple):
    """What a tensor is besides its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def kinds_of(tensors: Sequence[Tensor]) -> list[Kind]:
    return [Kind(x.dtype, tuple(x.shape)) for x in tensors]


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors in mappings, lists and tuples; not in lists of numbers or strings."""
    if isinstance(x, Tensor):
        return [x]
    parts: Iterable[Any] = ()
    if isinstance(x, Mapping):
        parts = x.values()
    elif isinstance(x, (list, tuple)) and x and not isinstance(x[0], (str, int, float)):
        parts = x
    return [tensor for part in parts for tensor in tensors_in(part)]


def bytes_of(x: Tensor) -> Tensor:
    """uint8 [bytes]; a view if ``x`` is contiguous."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def joined(tensors: Sequence[Tensor], pinned: bool = False) -> Tensor:
    """uint8: the bytes of one tensor or more on one device, each filled up to `_ALIGNMENT`.

    Args:
        pinned: in page-locked memory, from which copies to a GPU are asynchronous. torch does not
            use it again before they are done.
    """
    parts: list[Tensor] = []
    fill = tensors[0].new_zeros(_ALIGNMENT, dtype=torch.uint8)
    for x in tensors:
        part = bytes_of(x)
        parts += [part, fill[: -len(part) % _ALIGNMENT]]
    whole = fill.new_empty(sum(map(len, parts)), pin_memory=pinned)
    return torch.cat(parts, out=whole)


def split(whole: Tensor, kinds: Sequence[Kind]) -> list[Tensor]:
    """The tensors that were `joined`, as views."""
    begins = accumulate((kind.size + -kind.size % _ALIGNMENT for kind in kinds), initial=0)
    return [
        whole[begin : begin + kind.size].view(kind.dtype).view(kind.shape)
        for begin, kind in zip(begins, kinds, strict=False)
    ]


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """``tensors`` on ``device``: one copy of all that are on another one.

    A copy to the CPU waits for the device; a copy to a GPU is asynchronous.
    """
    found = list(tensors)
    elsewhere = defaultdict(list)
    for place, x in enumerate(tensors):
        if x.device != device:
            elsewhere[x.device].append(place)
    for source, places in elsewhere.items():
        given = [tensors[place] for place in places]
        pinned = source.type == "cpu" and device.type == "cuda"
        whole = joined(given, pinned).to(device, non_blocking=pinned)
        for place, x in zip(places, split(whole, kinds_of(given)), strict=True):
            found[place] = x
    return found


class Arriving(NamedTuple):
    """A tensor on its way to the CPU."""

    copy: Tensor
    copied: torch.cuda.Event | None  # None: it was on the CPU

    @classmethod
    def of(cls, x: Tensor) -> Arriving:
        """Starts the copy, into page-locked memory, and does not wait for it."""
        copy, copied = x.to(_CPU, non_blocking=True), None
        if x.is_cuda:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(x.device))
        return cls(copy, copied)

    def arrived(self) -> Tensor:
        """Waits for the copy, but for nothing that the GPU was given after it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.copy


class Stage:
    """Tensors of one step that its losses need on their device.

    All of them are copied when the first is asked for.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._device: torch.device | None = None  # of all of them

    def add(self, x: Tensor) -> Staged:
        self._tensors.append(x)
        self._device = None
        return Staged(self, len(self._tensors) - 1)

    def on(self, device: torch.device, place: int) -> Tensor:
        if self._device != device:
            self._tensors, self._device = moved(self._tensors, device), device
        return self._tensors[place]


class Staged(NamedTuple):
    """One of the tensors of a `Stage`."""

    stage: Stage
    place: int

    def on(self, device: torch.device) -> Tensor:
        return self.stage.on(device, self.place)


def brought_to_cpu(
    microbatches: Sequence[_Microbatch],
    needs_token_ids: Callable[[Microbatch], bool] = lambda _: False,
) -> Sequence[_Microbatch]:
    """``microbatches`` with tensors on the CPU; waits for the device once, if any are on it.

    Those that terms share are still shared.

    Args:
        needs_token_ids: whether a microbatch's token ids are needed, too; otherwise they stay.
    """
    needed: dict[int, Tensor] = {}
    for given in microbatches:
        for microbatch in [given] if isinstance(given, Microbatch) else given.values():
            tensors = [x for x in vars(microbatch).values() if isinstance(x, Tensor)]
            tensors += microbatch.token_ids if needs_token_ids(microbatch) else ()
            needed |= {id(x): x for x in tensors if not x.is_cpu}
    if not needed:
        return microbatches
    copies = dict(zip(needed, moved([*needed.values()], _CPU), strict=True))

    def copied(microbatch: Microbatch) -> Microbatch:
        own = microbatch.changed(lambda x: copies.get(id(x), x))
        vars(own)["token_ids"] = tuple(copies.get(id(x), x) for x in microbatch.token_ids)
        return own

    return [for_each_term(copied, given) for given in microbatches]
