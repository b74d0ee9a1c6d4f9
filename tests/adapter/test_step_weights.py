"""Counts what a step's weights take: what equal microbatches have in common is made once."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fake_groups import fake_groups
from benchmarks.hook import recognised
from megatron_loss_agg import LossAggregation, Microbatch, StepPlan
from megatron_loss_agg.mcore.step_weights import StepWeights, Wanted
from tests.core.operations import Operations


@pytest.mark.parametrize("length", [16, 96], ids=["short", "long"])
def test_rows_of_one_length_share_their_split_over_context_parallel_ranks(length: int) -> None:
    """A split takes some 40 operations; a microbatch's weights and sums take a dozen or two."""
    terms = {"loss": LossAggregation(mode="sample_mean")}
    counted = []
    with fake_groups(2) as (groups,):
        for number in (2, 12):
            step = [Microbatch(torch.ones(2, length)) for _ in range(number)]
            plans = StepPlan.build_terms(terms, step)
            with Operations() as operations:
                StepWeights.of(plans, groups, recognised(groups), Wanted(masks=False))
            counted.append(operations.but_views)
    assert counted[1] - counted[0] <= 10 * 20
