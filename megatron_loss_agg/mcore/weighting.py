"""The weights of this rank's own tokens, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import PeerError
from megatron_loss_agg.exchange import communication_device
from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.mcore.ranks import Ranks
from megatron_loss_agg.mcore.scaling import HostScale
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.weights import sample_coefficients, spread


class StepWeights(Protocol):
    """Weights of one step on one rank."""

    total_tokens: int  # active tokens of the whole step; 0 where nothing needs them
    mask_sum: float  # sum of the masks of the whole step; likewise
    rows: int  # samples of the whole step if each is a row; 0 if some are packed

    @property
    def planned(self) -> PlannedWeights | None:
        """The plan that they come from, on a rank that reads its data."""
        ...

    def of(self, i: int, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights of this rank's tokens of microbatch ``i``, whose local mask is ``mask``."""
        ...


class PlannedWeights:
    """From the plan of the whole step, on a rank that reads its data."""

    def __init__(self, plan: StepPlan, ranks: Ranks) -> None:
        self.plan = plan
        self.total_tokens = plan.counts.active_tokens
        self.mask_sum = plan.counts.tokens
        self.rows = 0 if plan.counts.packed_microbatches else plan.counts.samples
        self._ranks = ranks

    @property
    def planned(self) -> PlannedWeights:
        return self

    def of(self, i: int, mask: Tensor, dtype: torch.dtype) -> Tensor:
        weights = self.plan.weights(i, dtype)
        return local_part(weights, self.plan.microbatches[i], self._ranks).to(
            mask.device, non_blocking=True
        )

    def local_mask(self, i: int) -> Tensor:
        """What this rank's part of the mask of microbatch ``i`` must be."""
        microbatch = self.plan.microbatches[i]
        return local_part(microbatch.loss_mask, microbatch, self._ranks)


class SharedWeights:
    """From the rank of the tensor-parallel group that reads the data, for all of its ranks.

    Two broadcasts a step inside the group: sizes and totals, then the local weights.
    """

    def __init__(
        self, read: Callable[[], PlannedWeights] | None, number: int, ranks: Ranks
    ) -> None:
        """Every rank of the group must call.

        Args:
            read: plans the step, on the rank that reads the data.
            number: of microbatches.

        Raises:
            PeerError: the rank that reads the data failed (it raises its own error).
        """
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.planned: PlannedWeights | None = None
        parts: list[Tensor] = []
        header = _header(number)
        if read is not None:
            try:
                self.planned = planned = read()
                # Only dtype and device of the mask argument matter to a plan.
                masks = [microbatch.loss_mask for microbatch in planned.plan.microbatches]
                parts = [planned.of(i, mask, dtype).reshape(-1) for i, mask in enumerate(masks)]
            except Exception:
                _broadcast(_header(number, failed=1), ranks.tensor)
                raise
            sizes = [part.numel() for part in parts]
            numbers = [0, planned.mask_sum, planned.total_tokens, planned.rows, *sizes]
            header = torch.tensor(numbers, dtype=torch.float64)
        failed, self.mask_sum, *counts = _broadcast(header, ranks.tensor).tolist()
        self.total_tokens, self.rows, *sizes = map(int, counts)
        if failed:
            raise PeerError(
                "the rank that reads the data of this tensor-parallel group failed; "
                "expected it to succeed: see its error"
            )
        flat = torch.cat(parts) if parts else torch.empty(sum(sizes), dtype=dtype)
        self._weights = _broadcast(flat, ranks.tensor).split(sizes)

    def of(self, i: int, mask: Tensor, dtype: torch.dtype) -> Tensor:
        return self._weights[i].to(mask.device, dtype, non_blocking=True)


class RowWeights:
    """From the local rows alone: modes whose denominators are known before the data is read."""

    total_tokens = 0
    mask_sum: float = 0
    rows = 0
    planned: PlannedWeights | None = None

    def __init__(self, aggregation: LossAggregation, scale: HostScale, rows: int) -> None:
        self._aggregation = aggregation
        self._per_token = scale.per_token
        self._samples = rows * scale.num_microbatches * scale.data_parallel_size

    @staticmethod
    def suffice(aggregation: LossAggregation, scale: HostScale, fixed_rows: bool) -> bool:
        """Whether no look-ahead is needed.

        Args:
            fixed_rows: every microbatch of the run has the same number of samples, one a row.
        """
        if scale.per_token:
            # The host itself divides by the token total that it counts.
            return aggregation.mode == "token_mean"
        if aggregation.mode == "sum":
            return True
        if aggregation.across != "sample" or aggregation.empty == "skip" or not fixed_rows:
            return False
        whole_rows = scale.context_parallel_size == 1
        return aggregation.within is None or (aggregation.within == "sample" and whole_rows)

    def of(self, i: int, mask: Tensor, dtype: torch.dtype) -> Tensor:
        rows = mask if mask.dim() == 2 else mask.view(1, -1)
        if self._per_token:
            return rows.to(dtype)
        if self._aggregation.within is None:
            within = rows.new_ones(len(rows), dtype=torch.float64)
        else:
            within = rows.to(torch.float64).sum(dim=1)
        across = 1 if self._aggregation.across is None else self._samples
        coefficients = sample_coefficients(within, across, self._aggregation.scale)
        return spread(coefficients, rows, None, dtype)


def local_part(x: Tensor, microbatch: Microbatch, ranks: Ranks) -> Tensor:
    """This context-parallel rank's tokens of ``x``, which has the shape of the whole mask."""
    size, rank = dist.get_world_size(ranks.context), dist.get_rank(ranks.context)
    if size == 1:
        return x
    starts = microbatch.sample_starts
    layout = (
        CPLayout.bshd(x.shape[-1], size, rank)
        if starts is None
        else CPLayout.thd(starts, size, rank)
    )
    return layout.shard(x)


def _header(number: int, failed: float = 0) -> Tensor:
    """What is broadcast before the weights: failure, totals, rows, and each weight's size."""
    header = torch.zeros(number + 4, dtype=torch.float64)
    header[0] = failed
    return header


def _broadcast(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    carried = x.to(communication_device(group))
    dist.broadcast(carried, src=dist.get_global_rank(group, 0), group=group)
    return carried
