"""Batches that were drawn ahead, and must stay as they are until the script gets them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import StepError
from megatron_loss_agg.transfer import bytes_of


class HeldBatch:
    """A batch, and what tells whether its tensors were written to since it was drawn.

    An iterator may fill the same memory for every batch, which works as long as each is used before
    the next is drawn. torch counts writes to its tensors. It does not see those through numpy or
    another process: values do.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._tensors = tensors_in(batch)  # kept, so that no other tensor gets their ids
        self._state = _state_of(self._tensors)
        self._copies: list[tuple[Tensor, Tensor]] = []

    def keep_values(self, tensors: Iterable[Tensor]) -> None:
        """Compare ``tensors``, which were read from the batch, by value, too."""
        self._copies = [(x, x.clone()) for x in tensors]

    def check(self) -> None:
        """Raise StepError if the batch was changed."""
        written = _state_of(tensors_in(self._batch)) != self._state
        if written or not all(torch.equal(bytes_of(x), bytes_of(y)) for x, y in self._copies):
            raise changed()

    def taken(self) -> Any:
        """The batch; raises StepError if it was changed."""
        self.check()
        return self._batch

    def is_overwritten_by(self, batch: Any) -> bool:
        """Whether ``batch`` was written into memory of this one."""
        now = zip(self._tensors, self._state, _state_of(self._tensors), strict=True)
        written = _addresses(x for x, before, after in now if before != after)
        return not written.isdisjoint(_addresses(tensors_in(batch)))


def changed() -> StepError:
    return StepError(
        "a batch was changed between its draw and its forward step; expected new tensors for every "
        "batch, since a step's batches are drawn before its first forward pass: copy what your "
        "data iterator returns, or give LossHook(read_step=...)"
    )


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors in mappings, lists and tuples."""
    if isinstance(x, Tensor):
        return [x]
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def _state_of(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Which tensors they are, and how often each was written to; unknown of inference tensors."""
    return [(id(x), 0 if x.is_inference() else x._version) for x in tensors]


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {x.data_ptr() for x in tensors if x.layout == torch.strided and x.numel()}
