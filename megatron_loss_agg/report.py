"""Metrics that carry their own count, so that their reduction over ranks is exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.exchange import communication_device


@dataclass(frozen=True)
class Mean:
    """A mean as its (sum, count): over microbatches and ranks both add up, and then divide."""

    sum: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Mean:
        """``sum m * v`` over ``sum m``, in fp64; values under mask 0 are left out."""
        kept = values.detach().masked_fill(mask == 0, 0).to(torch.float64)
        return cls((kept * mask).sum(), mask.to(torch.float64).sum())

    def __add__(self, other: object) -> Mean:
        if not isinstance(other, Mean):
            return NotImplemented
        return Mean(self.sum + other.sum, self.count + other.count)

    def value(self) -> Tensor:
        """``sum / count``; 0 where nothing was counted."""
        return torch.where(self.count > 0, self.sum / self.count, torch.zeros_like(self.sum))

    def pair(self) -> Tensor:
        """[sum, count], as Megatron's training loop takes a report."""
        return torch.stack([self.sum, self.count])


def reduce_means(means: Mapping[str, Mean], group: dist.ProcessGroup | None) -> dict[str, Mean]:
    """Add up each mean over ``group``, each with its own count. One collective for all of them.

    Args:
        means: the same names in the same order on every rank of ``group``.
        group: ranks that hold *different* tokens; a replicated value must not be summed.
    """
    if group is None or not means:
        return dict(means)
    stacked = torch.stack([mean.pair() for mean in means.values()])
    total = stacked.to(communication_device(group))
    dist.all_reduce(total, group=group)
    return {name: Mean(*row) for name, row in zip(means, total.to(stacked.device), strict=True)}
