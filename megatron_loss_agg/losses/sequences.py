"""Means over whole sequences whose tokens are sharded over context-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import ranks_of
from megatron_loss_agg.errors import LayoutError, MaskError
from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.masks import brought_to_cpu, sums_by_sample
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.weights import at_least_fp32, check_tensors, sample_coefficients


class SequenceMean:
    """``out_t = (1 / M_s) sum_{u in s} m_u x_u``, where ``s`` is the sequence that contains ``t``.

    ``M_s`` is the mask sum of the *whole* sequence. A call takes one all-reduce over the
    context-parallel group, and so does its backward, since every rank's loss depends on every
    rank's values. All ranks must therefore call it, and run backward, the same number of times,
    even without active tokens.

    Values at masked positions are ignored, even NaN. The mean is 0 for sequences without active
    tokens and for tokens outside all sequences.

    Args:
        microbatch: with the whole mask, the same on all ranks of ``group``.
        layout: the tokens that this rank holds; None: all of them.
        group: the context-parallel group; required if the layout has more than one rank.

    Waits for the device once, to check the values of the mask; a call does not wait.

    Raises:
        MaskError, GroupError: no `Microbatch`, or bad values, as in `StepPlan.build`.
        LayoutError: the layout does not match the mask or ``group``.
    """

    def __init__(
        self,
        microbatch: Microbatch,
        layout: CPLayout | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        if not isinstance(microbatch, Microbatch):
            raise MaskError(f"a {type(microbatch).__name__}; expected a Microbatch")
        parts, ranks = 1 if layout is None else layout.cp_size, ranks_of(group)
        if parts != ranks:
            raise LayoutError(
                f"a layout of {parts} context-parallel ranks and a group of {ranks}; expected the "
                "layout of the group: give both, or neither"
            )
        sums_S = sums_by_sample(brought_to_cpu([microbatch]))
        mask, position = microbatch.loss_mask.detach(), None
        if layout is not None:
            mask, position = layout.shard(mask), layout.index.to(mask.device)
        sample_T = microbatch.sample_index(position)
        if sample_T is None:
            rows = torch.arange(microbatch.num_samples, device=mask.device)
            sample_T = rows.repeat_interleave(mask.shape[-1])
        # The extra entry is for tokens outside all sequences; their mask is 0.
        total_S = torch.nn.functional.pad(sums_S, (0, 1)).to(mask.device)
        self._coefficient_S = sample_coefficients(total_S, across=1, scale=1.0)
        self._mask = mask.to(torch.float64, copy=True)  # the script may change its own
        self._sample_T = sample_T
        self._group = group if ranks > 1 else None

    def __call__(self, values: Tensor) -> Tensor:
        """The sequence mean at every token; ``values``' dtype, or fp32 for half precision.

        Args:
            values: floating-point, in the shape of this rank's shard of the mask. Summed in fp64.

        Raises:
            MaskError: wrong shape, or not a floating-point tensor.
        """
        check_tensors(MaskError, "floating-point", local_loss_mask=self._mask, values=values)
        kept = values.to(torch.float64).masked_fill(self._mask == 0, 0) * self._mask
        sum_S = torch.zeros_like(self._coefficient_S).index_add(0, self._sample_T, kept.reshape(-1))
        if self._group is not None:
            sum_S = _SumOverRanks.apply(sum_S, self._group)  # type: ignore[no-untyped-call]
        mean_T = (sum_S * self._coefficient_S)[self._sample_T]
        return mean_T.view(values.shape).to(at_least_fp32(values.dtype))


class _SumOverRanks(torch.autograd.Function):
    """All-reduce in forward and backward."""

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
