"""A data iterator that counts what it gave, and the aggregations of the hook's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation
from tests.host.steps import batch_of, sequences

N_MB = 2
ROWS = 2  # samples a microbatch


class Counted:
    """A data iterator like Megatron's own, with ``__next__`` alone; counts what it gave.

    Every step has the same batches, so that the first step's gradient is also the later ones'.

    Args:
        active: data-parallel ranks with active tokens.
        without: keys that the batches lack.
    """

    def __init__(
        self,
        data_rank: int,
        layout: str = "bshd",
        *,
        active: tuple[int, ...] = (0, 1),
        fractional: bool = False,
        without: tuple[str, ...] = (),
    ) -> None:
        chosen = sequences(fractional)
        self.given = 0
        self._batches = []
        for k in range(N_MB):
            start = (data_rank * N_MB + k) * ROWS
            batch = batch_of(chosen[start : start + ROWS], layout)
            if data_rank not in active:
                batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
            self._batches.append({key: x for key, x in batch.items() if key not in without})

    def __next__(self) -> dict[str, Any]:
        self.given += 1
        return {**self._batches[(self.given - 1) % N_MB], "number": self.given - 1}


def square_mask(plan: Any, i: int) -> Tensor:
    """A custom aggregation: ``m^2 / samples``."""
    return plan.microbatches[i].loss_mask ** 2 / plan.counts.samples


def aggregation(mode: str, empty: str = "count") -> LossAggregation:
    return LossAggregation(
        mode=mode,
        divisor=7.0 if mode == "constant" else None,
        function=square_mask if mode == "custom" else None,
        empty=empty,
    )
