"""Sums and means over whole sequences whose tokens are sharded over context-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.collectives import SumOverRanks, ranks_of
from megatron_loss_agg.counting import sums_by_sample
from megatron_loss_agg.cp_layout import CPLayout
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.microbatch import Microbatch, brought_to_cpu
from megatron_loss_agg.tensors import at_least_fp32, check_tensors


class SequenceSum:
    """Sum of mask times value over each sequence's tokens: [sequences], the same on all ranks.

    With log-probabilities of tokens as values, these are the log-probabilities of whole answers, as
    needed by preference losses such as DPO. Losses that use an answer's mean divide by `lengths`:

        mean_log_prob = sums(log_probs) / sums.lengths      # IPO, SimPO

    A call takes one all-reduce over the context-parallel group, and its backward pass another one:
    every rank's loss depends on every rank's values, so the gradients of all results are summed. All
    ranks must therefore call it, and run backward, the same number of times, even without active
    tokens.

    Values at masked positions are ignored, even NaN.

    Args:
        microbatch: has the whole mask and is the same on all ranks of ``group``.
        layout: the tokens that this rank holds; None: all of them.
        group: the context-parallel group; required if the layout has more than one rank.

    Attributes:
        lengths: fp64 [sequences], the mask sum of each whole sequence, on the mask's device.
        sample_index: int64 [local tokens], flat: the sequence of each token that this rank holds;
            the number of sequences for tokens outside all sequences. It expands a value per
            sequence to a value per token: ``pad(x, (0, 1))[sums.sample_index]``.

    Construction waits for the device once, to check the mask's values; a call does not wait.

    Raises:
        DataError: not a `Microbatch`, or bad values, as in `StepPlan.build`.
        DataError: the layout does not match the mask or ``group``.
    """

    def __init__(
        self,
        microbatch: Microbatch,
        layout: CPLayout | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        if not isinstance(microbatch, Microbatch):
            raise DataError(
                f"microbatch must be a Microbatch, got a {type(microbatch).__name__}. Pass "
                "Microbatch(loss_mask, ...)."
            )
        layout_ranks = 1 if layout is None else layout.cp_size
        if layout_ranks != ranks_of(group):
            raise DataError(
                f"group must have the layout's {layout_ranks} context-parallel ranks, got "
                f"{ranks_of(group)}. Give both layout and group, or neither."
            )
        mask, position = microbatch.loss_mask.detach(), None
        self.lengths = sums_by_sample(brought_to_cpu([microbatch])).to(mask.device)
        if layout is not None:
            mask, position = layout.shard(mask), layout.index.to(mask.device)
        sample_index = microbatch.sample_index(position)
        if sample_index is None:  # rows
            rows = torch.arange(microbatch.num_samples, device=mask.device)
            sample_index = rows.repeat_interleave(mask.shape[-1])
        self.sample_index = sample_index
        self._mask = mask.to(torch.float64, copy=True)  # the script may change its mask later
        self._group = group if ranks_of(group) > 1 else None

    def __call__(self, values: Tensor) -> Tensor:
        """The sums, in ``values``' dtype, or in fp32 for half precision.

        Args:
            values: floating-point, in the shape of this rank's shard of the mask. Summed in fp64.

        Raises:
            DataError: wrong shape, or not a floating-point tensor.
        """
        return self.in_fp64(values).to(at_least_fp32(values.dtype))

    def in_fp64(self, values: Tensor) -> Tensor:
        """The sums in fp64."""
        check_tensors(DataError, "floating-point", local_loss_mask=self._mask, values=values)
        masked = values.to(torch.float64).masked_fill(self._mask == 0, 0) * self._mask
        # The extra entry is for tokens outside all sequences; their mask is 0.
        zeros = masked.new_zeros(len(self.lengths) + 1)
        local_sums = zeros.index_add(0, self.sample_index, masked.reshape(-1))[:-1]
        if self._group is None:
            return local_sums
        sums: Tensor = SumOverRanks.apply(  # type: ignore[no-untyped-call]
            local_sums, self._group
        )
        return sums


class SequenceMean:
    """Mean over the active tokens of each sequence, at each of its tokens.

    That is ``sum(mask * value) / sum(mask)`` over the *whole* sequence. Arguments, collectives and
    errors are as in `SequenceSum`. The mean is 0 for sequences without active tokens and for tokens
    outside all sequences.
    """

    def __init__(
        self,
        microbatch: Microbatch,
        layout: CPLayout | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        self._sum = SequenceSum(microbatch, layout, group)
        lengths = self._sum.lengths
        self._inverse_lengths = torch.where(lengths == 0, 0, 1 / lengths)

    def __call__(self, values: Tensor) -> Tensor:
        """The sequence mean at every token; ``values``' dtype, or fp32 for half precision.

        Args:
            values: as in `SequenceSum`.
        """
        means = self._sum.in_fp64(values) * self._inverse_lengths
        mean_of_token = pad(means, (0, 1))[self._sum.sample_index]
        return mean_of_token.view(values.shape).to(at_least_fp32(values.dtype))
