"""Means over whole sequences, of values whose tokens lie on several context-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.elementwise import lift
from megatron_loss_agg.errors import LayoutError, MaskError
from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.masks import sample_sums
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.weights import sample_coefficients


class SequenceMean:
    """``out_t = (1 / M_s) sum_{u in s} m_u x_u``, where ``s`` is the sequence that holds ``t``.

    ``M_s`` is the mask sum of the *whole* sequence, known to every rank without asking; the sum is
    taken over all ranks of the context-parallel group, in one collective a call for all sequences
    of the microbatch. It is differentiable: every rank's loss depends on every rank's values, so
    the gradient is summed over the ranks too (the adjoint of an all-reduce, since the loss that is
    differentiated is the sum of the ranks' losses). All ranks must call, and run backward, as often
    as each other, those without active tokens included.

    Values under mask 0 are left out, whatever they are. A sequence without active tokens, and
    tokens outside of all sequences, have mean 0.

    Args:
        microbatch: with the whole mask, the same on every rank of ``group``.
        layout: the tokens that this rank holds; all of them when absent.
        group: the context-parallel group, wanted with a layout of more than one rank.

    Raises:
        LayoutError: the layout does not fit the mask or the group.
    """

    def __init__(
        self,
        microbatch: Microbatch,
        layout: CPLayout | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        _check_group(layout, group)
        mask, position = microbatch.loss_mask.detach(), None
        if layout is not None:
            mask, position = layout.shard(mask), layout.index.to(mask.device)
        sample_T = microbatch.sample_index(position)
        if sample_T is None:
            rows = torch.arange(microbatch.num_samples, device=mask.device)
            sample_T = rows.repeat_interleave(mask.shape[-1])
        # The last entry is for tokens of no sequence, whose mask is 0.
        total_S = torch.nn.functional.pad(sample_sums(microbatch), (0, 1))
        self._share_S = sample_coefficients(total_S, across=1, scale=1.0)
        self._mask = mask.to(torch.float64)
        self._sample_T = sample_T
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None

    def __call__(self, values: Tensor) -> Tensor:
        """Every token's sequence mean.

        Args:
            values: floating, of the shape of this rank's part of the mask.

        Returns:
            the same shape; ``values``' dtype, or fp32 for half precision. Summed in fp64.

        Raises:
            MaskError: another shape, or not a floating tensor.
        """
        if not isinstance(values, Tensor) or not values.is_floating_point():
            kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise MaskError(f"values are {kind}; expected a floating tensor")
        if values.shape != self._mask.shape:
            raise MaskError(
                f"values have shape {tuple(values.shape)}; expected {tuple(self._mask.shape)}, "
                "that of this rank's part of the loss mask"
            )
        kept = values.to(torch.float64).masked_fill(self._mask == 0, 0) * self._mask
        sum_S = torch.zeros_like(self._share_S).index_add(0, self._sample_T, kept.reshape(-1))
        if self._group is not None:
            sum_S = _SumOverRanks.apply(sum_S, self._group)  # type: ignore[no-untyped-call]
        mean_S = sum_S * self._share_S
        return mean_S[self._sample_T].view(values.shape).to(lift(values)[0].dtype)


class _SumOverRanks(torch.autograd.Function):
    """Each rank gets the sum; each rank's input gets the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _check_group(layout: CPLayout | None, group: dist.ProcessGroup | None) -> None:
    parts = 1 if layout is None else layout.cp_size
    ranks = 1 if group is None else dist.get_world_size(group)
    if parts != ranks:
        raise LayoutError(
            f"a layout of {parts} context-parallel ranks and a group of {ranks}; expected the "
            "layout of the group: give both, or neither"
        )
