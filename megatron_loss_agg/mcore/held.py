"""Batches that were drawn and wait for their use, while the data iterator returns later ones."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.errors import StepError
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.transfer import bytes_of, tensors_in


class _Seen(NamedTuple):
    """A tensor, and what tells whether it was written to since."""

    tensor: Tensor
    version: int
    values: Tensor | None  # of a part of a larger tensor, whose parts share one version

    @classmethod
    def now(cls, x: Tensor) -> _Seen:
        is_part = x.layout == torch.strided and x.untyped_storage().nbytes() > x.nbytes
        return cls(x, _version_of(x), x.clone() if is_part else None)

    @property
    def is_written(self) -> bool:
        if _version_of(self.tensor) == self.version:
            return False
        return self.values is None or not _are_equal(self.tensor, self.values)


class HeldBatch:
    """A batch, or a list of some, and what tells whether later draws have written to its tensors.

    An iterator may fill the same memory for every batch, which works as long as each is used before
    the next is drawn. torch counts writes to its tensors. It does not see those through numpy or
    another process: values do.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.note()

    def note(self) -> None:
        """Compare with the batch as it is now: the function that reads it may add to it."""
        self._seen = [*map(_Seen.now, tensors_in(self.batch))]
        self._copies: list[tuple[Tensor, Tensor]] = []

    def keep_values(self, read: object) -> None:
        """Compare the tensors of a microbatch that was read from the batch by value, too."""
        if isinstance(read, Microbatch):
            self._copies += [(x, x.clone()) for x in tensors_in(vars(read))]

    def check(self) -> None:
        """Raise StepError if the batch was changed."""
        tensors = [seen.tensor for seen in self._seen]
        # Other mappings may make their tensors anew whenever they are asked for them.
        now = tensors_in(self.batch) if isinstance(self.batch, dict) else tensors
        replaced = [*map(id, now)] != [*map(id, tensors)]
        written = any(seen.is_written for seen in self._seen)
        if replaced or written or not all(_are_equal(x, y) for x, y in self._copies):
            raise changed()

    def is_overwritten_by(self, batch: Any) -> bool:
        """Whether ``batch`` was written into memory of this one."""
        places = map(_address, tensors_in(batch))
        return any(
            self._by_address[place].is_written for place in places if place in self._by_address
        )

    @cached_property
    def _by_address(self) -> dict[int, _Seen]:
        """What lies where."""
        found = ((_address(seen.tensor), seen) for seen in self._seen)
        return {address: seen for address, seen in found if address}


def changed() -> StepError:
    return StepError(
        "the data iterator changed a batch when it returned a later one; expected new tensors for "
        "every batch, since batches are drawn before their forward passes: copy what it returns, "
        "or give LossHook(read_step=...)"
    )


def _version_of(x: Tensor) -> int:
    """How often ``x`` was written to; unknown of an inference tensor."""
    return 0 if x.is_inference() else x._version


def _are_equal(x: Tensor, y: Tensor) -> bool:
    """Whether they have the same bytes."""
    return torch.equal(bytes_of(x), bytes_of(y))


def _address(x: Tensor) -> int:
    """Where ``x`` begins in memory; 0 if it has none."""
    return x.data_ptr() if x.layout == torch.strided else 0
