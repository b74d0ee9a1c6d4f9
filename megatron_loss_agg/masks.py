"""Masks shifted inside their sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_loss_agg.counting import sums_by_sample
from megatron_loss_agg.microbatch import Microbatch, brought_to_cpu


def predicting_mask(
    loss_mask: Tensor, cu_seqlens: Tensor | None = None, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """Shift a mask of tokens to the positions whose logits predict them.

    ``out[t] = loss_mask[t + 1]`` inside a sequence and 0 at its last position, since a causal
    model's loss for token ``t + 1`` is at position ``t``. Nothing predicts a sequence's first
    token, so its mask is dropped.

    Args:
        loss_mask: [samples, seq]; or [tokens] or [1, tokens] with ``cu_seqlens``.
        cu_seqlens, cu_seqlens_padded: as in `Microbatch`.

    Raises:
        DataError: as `StepPlan.build` does.
    """
    microbatch = Microbatch(loss_mask, cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    sums_by_sample(brought_to_cpu([microbatch]))
    return shifted(loss_mask, microbatch.sample_starts, 1)


def shifted(values: Tensor, starts: Tensor | None, by: int) -> Tensor:
    """``values[..., t + by]`` at ``t``; 0 where ``t + by`` is outside the sequence of ``t``.

    Args:
        starts: offsets [sequences + 1] of a pack; None: each row is a sequence.
    """
    length = values.shape[-1]
    result = torch.zeros_like(values)
    result[..., : max(length - by, 0)] = values[..., by:]
    if starts is None:
        return result
    position = torch.arange(length, device=values.device)
    ends = starts[1:].to(position).contiguous()
    sequence = torch.searchsorted(ends, position, right=True)
    leaves_sequence = torch.searchsorted(ends, position + by, right=True) != sequence
    return result.masked_fill(leaves_sequence, 0)
