"""The weights of a step that is at hand as a whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.microbatch import Ids, Microbatch
from megatron_loss_agg.plan import StepPlan


def token_weights(
    agg: LossAggregation,
    loss_mask: Tensor,
    cu_seqlens: Tensor | None = None,
    prompt_ids: Ids | None = None,
    rollout_ids: Ids | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    cu_seqlens_padded: Tensor | None = None,
    dataset_ids: Ids | None = None,
    ids: Mapping[str, Ids] | None = None,
    sample_weights: Tensor | None = None,
    token_factors: Tensor | None = None,
) -> Tensor:
    """Weights of a step that is one microbatch on one rank.

    ``(token_weights(agg, mask) * token_loss).sum()`` is the aggregated loss. Equivalent code for
    ``sample_mean`` on rows:

        sum((mask[s] * loss[s]).sum() / mask[s].sum() for s in range(batch)) / batch

    Args:
        loss_mask: [samples, seq] or, with ``cu_seqlens``, [tokens]. It and the others are as for
            `Microbatch`.

    Returns:
        ``dtype``, as for `StepPlan.weights`, in the shape of ``loss_mask``.

    Raises:
        AggregationError: as `Microbatch`, `StepPlan.build` and `StepPlan.weights`.
    """
    microbatch = Microbatch(
        loss_mask,
        cu_seqlens,
        prompt_ids,
        rollout_ids,
        cu_seqlens_padded=cu_seqlens_padded,
        dataset_ids=dataset_ids,
        ids=ids or {},
        sample_weights=sample_weights,
        token_factors=token_factors,
    )
    return StepPlan.build(agg, [microbatch]).weights(0, dtype)
