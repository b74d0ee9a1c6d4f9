"""Detects ids that restart in every microbatch, so that different prompts count as one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from megatron_loss_agg.plan import StepPlan


def warn_of_restarting_ids(plans: Mapping[str, StepPlan]) -> None:
    """Warn if the ids of prompts or rollouts are 0, 1, 2 and so on in every microbatch of the step.

    This is a warning, not an error, since such ids may be right: each microbatch may have a sample
    of each prompt.

    Args:
        plans: by term, with the samples of all ranks.
    """
    samples_by_unit = {x: plan.samples for plan in plans.values() for x in plan.aggregation.by_id}
    for unit in samples_by_unit.keys() & {"prompt", "rollout"}:
        samples = samples_by_unit[unit]
        assert samples is not None
        # Sorted by microbatch, then by id.
        microbatches, ids = torch.stack([samples.microbatch, samples.ids[unit]]).unique(dim=1)
        counts = microbatches.unique(return_counts=True)[1].tolist()
        if len(counts) > 1 and torch.equal(ids, torch.cat([torch.arange(n) for n in counts])):
            warnings.warn(
                f"the {unit}_ids start at 0 in each of the {len(counts)} microbatches with "
                f"samples, and equal ids mean one {unit} over the whole step. If they are "
                f"different {unit}s, number them consecutively over all microbatches and ranks "
                f"(the batch key '{unit}_ids').",
                stacklevel=2,
            )
