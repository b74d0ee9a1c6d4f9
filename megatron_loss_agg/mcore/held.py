"""Batches that were drawn and wait for their use, while the data iterator returns later ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import StepError
from megatron_loss_agg.transfer import bytes_of, tensors_in


class HeldBatch:
    """A batch, and what tells whether later draws have written to its tensors.

    An iterator may fill the same memory for every batch, which works as long as each is used before
    the next is drawn. torch counts writes to its tensors. It does not see those through numpy or
    another process: values do.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._tensors = tensors_in(batch)
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.note()

    def note(self) -> None:
        """Only later changes count."""
        self._versions = [*map(_version_of, self._tensors)]

    def keep_values(self, tensors: Iterable[Tensor]) -> None:
        """Compare ``tensors``, which were read from the batch, by value, too."""
        self._copies = [(x, x.clone()) for x in tensors]

    def check(self) -> None:
        """Raise StepError if the batch was changed."""
        # Other mappings may make their tensors anew whenever they are asked for them.
        now = tensors_in(self.batch) if isinstance(self.batch, dict) else self._tensors
        replaced = [*map(id, now)] != [*map(id, self._tensors)]
        equal = (torch.equal(bytes_of(x), bytes_of(y)) for x, y in self._copies)
        if replaced or self._written() or not all(equal):
            raise changed()

    def is_overwritten_by(self, batch: Any) -> bool:
        """Whether ``batch`` was written into memory of this one."""
        return not _addresses(self._written()).isdisjoint(_addresses(tensors_in(batch)))

    def _written(self) -> list[Tensor]:
        pairs = zip(self._tensors, self._versions, strict=True)
        return [x for x, version in pairs if _version_of(x) != version]


def changed() -> StepError:
    return StepError(
        "the data iterator changed a batch when it returned a later one; expected new tensors for "
        "every batch, since batches are drawn before their forward passes: copy what it returns, "
        "or give LossHook(read_step=...)"
    )


def _version_of(x: Tensor) -> int:
    """How often ``x`` was written to; unknown of an inference tensor."""
    return 0 if x.is_inference() else x._version


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {x.data_ptr() for x in tensors if x.layout == torch.strided and x.numel()}
