"""Batches that were drawn and wait for their use, while the data iterator returns later ones."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import StepError
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.transfer import bytes_of, tensors_in


class HeldBatch:
    """A batch, or a list of some, and what tells whether later draws have written to its tensors.

    An iterator may fill the same memory for every batch, which works as long as each is used before
    the next is drawn. torch counts writes to its tensors. It does not see those through numpy or
    another process: values do.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._tensors = tensors_in(batch)
        self._versions = [*map(_version_of, self._tensors)]
        self._copies: list[tuple[Tensor, Tensor]] = []

    def keep_values(self, read: object) -> None:
        """Compare the tensors of a microbatch that was read from the batch by value, too."""
        if isinstance(read, Microbatch):
            self._copies += [(x, x.clone()) for x in tensors_in(vars(read))]

    def check(self) -> None:
        """Raise StepError if the batch was changed."""
        # Other mappings may make their tensors anew whenever they are asked for them.
        now = tensors_in(self.batch) if isinstance(self.batch, dict) else self._tensors
        replaced = [*map(id, now)] != [*map(id, self._tensors)]
        written = [*map(_version_of, self._tensors)] != self._versions
        equal = (torch.equal(bytes_of(x), bytes_of(y)) for x, y in self._copies)
        if replaced or written or not all(equal):
            raise changed()

    def is_overwritten_by(self, batch: Any) -> bool:
        """Whether ``batch`` was written into memory of this one."""
        places = map(_address, tensors_in(batch))
        shared = [self._by_address[place] for place in places if place in self._by_address]
        return any(_version_of(x) != version for x, version in shared)

    @cached_property
    def _by_address(self) -> dict[int, tuple[Tensor, int]]:
        """Where its tensors lie, and their versions."""
        found = zip(map(_address, self._tensors), self._tensors, self._versions, strict=True)
        return {address: (x, version) for address, x, version in found if address}


def changed() -> StepError:
    return StepError(
        "the data iterator changed a batch when it returned a later one; expected new tensors for "
        "every batch, since batches are drawn before their forward passes: copy what it returns, "
        "or give LossHook(read_step=...)"
    )


def _version_of(x: Tensor) -> int:
    """How often ``x`` was written to; unknown of an inference tensor."""
    return 0 if x.is_inference() else x._version


def _address(x: Tensor) -> int:
    """Where ``x`` begins in memory; 0 if it has none."""
    return x.data_ptr() if x.layout == torch.strided else 0
