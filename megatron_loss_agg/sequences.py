"""Sums and means over whole sequences whose tokens are sharded over context-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.collectives import ranks_of
from megatron_loss_agg.cp_layout import CPLayout
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.masks import brought_to_cpu, sums_by_sample
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.tensors import at_least_fp32, check_tensors


class SequenceSum:
    """``out_s = sum_{u in s} m_u x_u`` of each sequence ``s``: [sequences], the same on all ranks.

    With log-probabilities of tokens as ``x``, these are those of whole answers. A call takes one
    all-reduce over the context-parallel group, and so does its backward, since every rank's loss
    depends on every rank's values: for a `TokenLoss` that is ``whole="reduced_grad"``. All ranks
    must therefore call it, and run backward, the same number of times, even without active tokens.

    Values at masked positions are ignored, even NaN.

    Args:
        microbatch: with the whole mask, the same on all ranks of ``group``.
        layout: the tokens that this rank holds; None: all of them.
        group: the context-parallel group; required if the layout has more than one rank.

    Waits for the device once, to check the values of the mask; a call does not wait.

    Raises:
        DataError: no `Microbatch`, or bad values, as in `StepPlan.build`.
        DataError: the layout does not match the mask or ``group``.
    """

    def __init__(
        self,
        microbatch: Microbatch,
        layout: CPLayout | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        if not isinstance(microbatch, Microbatch):
            raise DataError(f"a {type(microbatch).__name__}; expected a Microbatch")
        parts, ranks = 1 if layout is None else layout.cp_size, ranks_of(group)
        if parts != ranks:
            raise DataError(
                f"a layout of {parts} context-parallel ranks and a group of {ranks}; expected the "
                "layout of the group: give both, or neither"
            )
        self.mask_sum_S = sums_by_sample(brought_to_cpu([microbatch]))  # of the whole sequences
        mask, position = microbatch.loss_mask.detach(), None
        if layout is not None:
            mask, position = layout.shard(mask), layout.index.to(mask.device)
        sample_T = microbatch.sample_index(position)
        if sample_T is None:
            rows = torch.arange(microbatch.num_samples, device=mask.device)
            sample_T = rows.repeat_interleave(mask.shape[-1])
        self.sample_T = sample_T  # of each local token, the number of sequences outside all
        self._mask = mask.to(torch.float64, copy=True)  # the script may change its own
        self._group = group if ranks > 1 else None

    def __call__(self, values: Tensor) -> Tensor:
        """The sums, in ``values``' dtype, or in fp32 for half precision.

        Args:
            values: floating-point, in the shape of this rank's shard of the mask. Summed in fp64.

        Raises:
            DataError: wrong shape, or not a floating-point tensor.
        """
        return self.in_fp64(values).to(at_least_fp32(values.dtype))

    def in_fp64(self, values: Tensor) -> Tensor:
        """The sums, not rounded."""
        check_tensors(DataError, "floating-point", local_loss_mask=self._mask, values=values)
        kept = values.to(torch.float64).masked_fill(self._mask == 0, 0) * self._mask
        # The extra entry is for tokens outside all sequences; their mask is 0.
        zero_S = kept.new_zeros(len(self.mask_sum_S) + 1)
        sum_S = zero_S.index_add(0, self.sample_T, kept.reshape(-1))[:-1]
        if self._group is None:
            return sum_S
        total_S: Tensor = _SumOverRanks.apply(sum_S, self._group)  # type: ignore[no-untyped-call]
        return total_S


class SequenceMean:
    """``out_t = (1 / M_s) sum_{u in s} m_u x_u``, where ``s`` is the sequence that contains ``t``.

    ``M_s`` is the mask sum of the *whole* sequence. Takes the collectives of a `SequenceSum`, whose
    arguments and errors it has. The mean is 0 for sequences without active tokens and for tokens
    outside all sequences.
    """

    def __init__(
        self,
        microbatch: Microbatch,
        layout: CPLayout | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        self._sum = SequenceSum(microbatch, layout, group)
        coefficient_S = (1 / self._sum.mask_sum_S).masked_fill(self._sum.mask_sum_S == 0, 0.0)
        self._coefficient_S = coefficient_S.to(microbatch.loss_mask.device)

    def __call__(self, values: Tensor) -> Tensor:
        """The sequence mean at every token; ``values``' dtype, or fp32 for half precision.

        Args:
            values: as of a `SequenceSum`.
        """
        mean_S = self._sum.in_fp64(values) * self._coefficient_S
        mean_T = pad(mean_S, (0, 1))[self._sum.sample_T]
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
