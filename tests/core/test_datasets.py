"""Data sets: their ids in batches, and what a plan says of those of the whole step."""

from __future__ import annotations

from collections import defaultdict
from math import fsum
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, Term
from megatron_loss_agg.errors import GroupError, ModeError
from megatron_loss_agg.mcore.reading.keys import read_batch, reading
from tests.core.operations import Operations
from tests.core.steps import aggregation, lay, random_step
from tests.distributed import run_ranks
from tests.oracle import Step, samples_of

F64 = torch.float64
TERMS = {"a": aggregation("token_mean"), "b": aggregation("sample_sum")}


def expected_groups(step: Step) -> dict[int, float]:
    sums: dict[int, list[float]] = defaultdict(list)
    for _, sample in samples_of(step):
        sums[sample.dataset].extend(sample.mask)
    return {dataset: fsum(sums[dataset]) for dataset in sorted(sums)}


def groups_on_ranks(steps: list[Step]) -> list[Any]:
    """For each step: ids and sums by term, whether weights stay, and the collectives."""
    answers, world = [], dist.group.WORLD
    for step in steps:
        microbatches = [Microbatch(**lay(mb, "thd").inputs) for mb in step[dist.get_rank()]]
        with Operations() as made:
            plans = StepPlan.build_terms(TERMS, microbatches, world, group_by=("dataset",))
        without = StepPlan.build_terms(TERMS, microbatches, world)
        same = all(
            torch.equal(plans[name].weights(i, F64), without[name].weights(i, F64))
            for name in TERMS
            for i in range(len(microbatches))
        )
        groups = [[x.tolist() for x in plans[name].groups("dataset")] for name in TERMS]
        answers.append((groups, same, len(made.collectives)))
    with pytest.raises(ModeError, match="ranks have different aggregations"):
        StepPlan.build_terms(TERMS, [], world, group_by=("dataset", "prompt")[: dist.get_rank()])
    return answers


def test_every_rank_knows_the_data_sets_of_the_step_in_the_same_two_collectives():
    steps = [random_step(seed, 2) for seed in range(6)]
    for answers in run_ranks(groups_on_ranks, 2, steps):
        for step, (groups, same, collectives) in zip(steps, answers, strict=True):
            expected = expected_groups(step)
            assert same and collectives <= 2
            for ids, sums in groups:
                assert ids == [*expected]
                assert sums == pytest.approx([*expected.values()], rel=1e-13)


def test_groups_that_a_plan_lacks_are_refused_by_name():
    step = [Microbatch(torch.ones(2, 3), dataset_ids=["x", "y"])]
    plan = StepPlan.build(aggregation("token_mean"), step)
    for unit in ("dataset", "sample", "x"):
        with pytest.raises(GroupError, match=f"no groups by '{unit}'.* or that group_by names"):
            plan.groups(unit)
    assert len(StepPlan.build(aggregation("dataset_mean"), step).groups("dataset")[0]) == 2
    with pytest.raises(GroupError, match=r"group_by=\['sample'\]; expected some of prompt,"):
        StepPlan.build_terms(TERMS, step, group_by=["sample"])
    with pytest.raises(GroupError, match=r"a report groups by dataset and .* no dataset_ids"):
        StepPlan.build_terms(TERMS, [Microbatch(torch.ones(1, 3))], group_by=["dataset"])


ROWS = {"loss_mask": torch.ones(3, 4), "dataset_id": torch.tensor([1, 0, 1], dtype=torch.int16)}
# Two packs of four tokens: two samples each, and fill in the first.
PACKS = {
    "loss_mask": torch.ones(2, 4),
    "cu_seqlens": torch.tensor([[0, 3, 4, 4], [0, 1, 4, 4]]),
    "dataset_id": torch.tensor([5, 6]),
}
# The last sample is empty and starts where the pack ends.
ENDING = {
    "loss_mask": torch.ones(1, 4),
    "cu_seqlens": torch.tensor([0, 2, 4, 4]),
    "prompt_ids": torch.tensor([0, 0, 1]),
    "dataset_id": torch.tensor([8]),
}
# Padded inside the first pack, so that the second one starts at 4 and not at 2.
PADDED = {
    "loss_mask": torch.tensor([[1.0, 0, 1, 0], [1, 1, 1, 1]]),
    "cu_seqlens": torch.tensor([0, 1, 2, 5, 6]),
    "cu_seqlens_padded": torch.tensor([0, 2, 4, 7, 8]),
    "dataset_id": torch.tensor([[9], [1]]),
}


@pytest.mark.parametrize(
    ("batch", "ids"),
    [(ROWS, [1, 0, 1]), (PACKS, [5, 5, 6, 6]), (ENDING, [8, 8, 8]), (PADDED, [9, 9, 1, 1])],
)
def test_the_key_of_blended_data_sets_is_one_id_for_each_row_or_pack(batch, ids):
    read = read_batch(batch, dataset_id=True)
    assert read.dataset_ids.tolist() == ids
    assert read.dataset_ids.dtype == torch.int64
    assert read_batch(batch).dataset_ids is None
    own = torch.arange(len(ids))
    both = read_batch({**batch, "dataset_ids": own}, dataset_id=True)
    assert torch.equal(both.dataset_ids, own)


def test_the_key_is_read_only_where_data_sets_matter():
    bad = {"loss_mask": torch.ones(3, 4), "dataset_id": "wikipedia"}

    def terms(**options: Any) -> dict[str, Term]:
        return {"loss": Term(LossAggregation(**options))}

    for options in ({"mode": "token_mean"}, {"mode": "sample_mean", "count": "prompt"}):
        assert reading(read_batch, terms(**options)) is read_batch
        assert read_batch(bad).dataset_ids is None
    for options in ({"mode": "dataset_mean"}, {"mode": "sample_mean", "count": "dataset"}):
        read = reading(read_batch, terms(**options))
        assert read(ROWS).dataset_ids.tolist() == [1, 0, 1]
        with pytest.raises(GroupError, match="'dataset_id' is a str beside a loss_mask of 3 rows"):
            read(bad)
        with pytest.raises(GroupError, match="expected an integer for each row"):
            read({**ROWS, "dataset_id": torch.tensor([1, 2])})
    assert reading(read_batch, terms(mode="sum"), dataset_id=True)(ROWS).dataset_ids is not None
    assert reading(len, terms(mode="dataset_mean")) is len  # a function of the user's
