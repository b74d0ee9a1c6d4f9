"""The weights of a microbatch's tokens on this rank, and what is known of its mask.

Weights of rows are computed in the loss function, from one coefficient per row and this rank's
shard of the mask. Weights of packs, of short rows, of custom functions and of a loss with MTP's are
computed before the step, since finding the sample of every token takes longer than summing losses.

Suffixes: ``_S`` samples of a microbatch, ``_T`` this rank's tokens of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.mcore.datasets import StepDatasets
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.mcore.mtp import DepthWeights
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.transfer import Stage, Staged
from megatron_loss_agg.weights import at_least_fp32, dot, in_dtype, token_weights_of

_SHORT_ROW = 32
"""Weights of rows with fewer local tokens are computed before the step."""


class LocalMask(NamedTuple):
    """What the plan knows about a microbatch's mask on this rank; tensors are on the CPU."""

    shape: tuple[int, ...]
    packed: bool
    own_tokens: int  # this rank's part of the tokens that the host counts
    sums: Tensor  # fp64: of each row, or of the pack
    total: float
    values: Tensor | None  # if the loss function's mask is compared by value
    token_ids: tuple[Tensor, ...]  # vectors; if the model's tokens are compared
    dataset_T: Staged | None = None  # index in `StepDatasets.ids`; if they are reported

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        i: int,
        layout: CPLayout | None,
        keeps_values: bool,
        keeps_ids: bool,
        groups: ParallelGroups,
        stage: Stage,
        datasets: StepDatasets | None,
    ) -> LocalMask:
        microbatch, packed = plan.microbatches[i], plan.microbatches[i].cu_seqlens is not None
        mask, total, active = microbatch.loss_mask, plan.mask_totals[i], plan.active_tokens[i]
        sums = plan.mask_sums(i)
        token_ids = microbatch.token_ids if keeps_ids else ()
        if layout is not None:
            mask = layout.shard(mask)
            sums, active = mask.sum(dim=-1, dtype=torch.float64), int(mask.count_nonzero())
            total = float(sums.sum())
            token_ids = [layout.shard(x) for x in token_ids]
        routed = microbatch.routed_tokens
        if layout is None or routed is not None:
            active = groups.cp_part(active if routed is None else routed)
        if packed:
            sums = torch.tensor([total], dtype=torch.float64)
        values = mask if keeps_values else None
        flat_ids = tuple(x.reshape(-1) for x in token_ids)
        dataset_T = None if datasets is None else stage.add(datasets.index_of(microbatch, layout))
        return cls(tuple(mask.shape), packed, active, sums, total, values, flat_ids, dataset_T)

    def fits(self, mask: Tensor) -> bool:
        """Whether a loss function's mask has the planned values, or these were not kept."""
        if self.values is None:
            return True
        given, planned = mask.detach().reshape(-1).cpu(), self.values.reshape(-1)
        # In the coarser dtype: a script may cast its mask, as to that of its losses.
        floats = [x.dtype for x in (given, planned) if x.dtype.is_floating_point]
        coarse = min(floats, key=lambda dtype: dtype.itemsize, default=torch.int64)
        return torch.equal(given.to(coarse), planned.to(coarse))


class LocalWeights(NamedTuple):
    """Weights of one microbatch on this rank; terms with equal weights share them."""

    mask: LocalMask
    coefficient_S: Staged | None  # fp32 or fp64
    weight_T: Staged | None  # if they are computed before the step
    signed: bool  # some weights may be negative
    checksum: Tensor  # fp64, of the planned mask; see `checksum_of`
    of_depths: DepthWeights | None = None  # for MTP's losses

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        i: int,
        layout: CPLayout | None,
        mask: LocalMask,
        stage: Stage,
        depths: int = 0,
    ) -> LocalWeights:
        custom = plan.aggregation.function is not None
        dtype = at_least_fp32(torch.get_default_dtype())
        if not (mask.packed or custom or depths) and mask.shape[-1] >= _SHORT_ROW:
            return cls(mask, stage.add(plan.coefficients(i).to(dtype)), None, False, mask.sums)
        weights = plan.weights(i, dtype)
        planned = plan.microbatches[i].loss_mask
        of_depths = None
        if depths:
            of_depths = DepthWeights.of(plan.microbatches[i], weights, depths, layout, stage)
        if layout is not None:
            weights, planned = layout.shard(weights), layout.shard(planned)
        checksum = _checksum(planned.double(), weights.double(), custom)
        return cls(mask, None, stage.add(weights.reshape(-1)), custom, checksum, of_depths)

    def made_for(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens], on the device of ``mask``, which is this rank's shard."""
        if self.weight_T is not None:
            return in_dtype(self.weight_T.on(mask.device), dtype)
        assert self.coefficient_S is not None
        coefficient_S = self.coefficient_S.on(mask.device)
        return token_weights_of(coefficient_S, self._rows(mask), None, dtype).reshape(-1)

    def compared_for(self, mask: Tensor) -> Tensor:
        """All weights that are made for ``mask``, in fp64."""
        made = self.made_for(mask, torch.float64)
        if self.of_depths is None:
            return made
        return torch.cat([made, self.of_depths.weights.on(mask.device).to(made).reshape(-1)])

    def checksum_of(self, mask: Tensor) -> Tensor:
        """The checksum of a loss function's mask; on its device.

        Row sums are enough for rows: their weights are made from the loss function's own mask.
        Otherwise it is the mask's product with the weights, to which tokens of weight 0 add
        nothing, and its sum.
        """
        if self.weight_T is None:
            return self._rows(mask).sum(dim=-1, dtype=torch.float32)
        weight_T = self.weight_T.on(mask.device)
        return _checksum(in_dtype(mask, weight_T.dtype).flatten(), weight_T, self.signed).float()

    def _rows(self, mask: Tensor) -> Tensor:
        return mask if mask.shape == self.mask.shape else mask.reshape(self.mask.shape)


def _checksum(mask: Tensor, weights: Tensor, signed: bool) -> Tensor:
    """[2]: the sum of a mask's products with its weights' absolute values, and its own sum."""
    return torch.stack([dot(mask, weights.abs() if signed else weights), mask.sum()])
