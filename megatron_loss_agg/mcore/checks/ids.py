"""Ids that begin anew in every microbatch, by which different prompts are taken for one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from megatron_loss_agg.plan import StepPlan


def warn_of_restarting_ids(plans: Mapping[str, StepPlan]) -> None:
    """Warn if all microbatches of the step have the same ids, from 0 on, of prompts or rollouts.

    A step may be so, such as one with a sample of every prompt in each microbatch.

    Args:
        plans: by term, with the samples of all ranks.
    """
    samples_by_unit = {x: plan.samples for plan in plans.values() for x in plan.aggregation.by_id}
    for unit in samples_by_unit.keys() & {"prompt", "rollout"}:
        samples = samples_by_unit[unit]
        assert samples is not None
        number, ids = len(samples.microbatch.unique()), samples.ids[unit].unique()
        ids_of_microbatches = torch.stack([samples.microbatch, samples.ids[unit]]).unique(dim=1)
        have_the_same = ids_of_microbatches.shape[1] == number * len(ids)
        if number > 1 and have_the_same and torch.equal(ids, torch.arange(len(ids))):
            warnings.warn(
                f"all {number} microbatches of the step have the same {unit}_ids, 0 to {len(ids) - 1}, "
                f"and equal ids are one {unit} over the whole step. If they are several {unit}s, number "
                f"them on through all microbatches and ranks (the batch key '{unit}_ids').",
                stacklevel=2,
            )
