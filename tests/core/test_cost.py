"""Cost: the same tensor operations for any number of samples, and no wait for the device.

Counted and not timed: a Python loop over samples or tokens shows as more operations, a wait
(``.item()``, ``bool(tensor)``, a data-dependent shape) as one of the operations in `WAITS`. Memory
is counted as the storages that operations make.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.memory import LiveBytes
from megatron_loss_agg import (
    CPLayout,
    LossAggregation,
    Microbatch,
    StepPlan,
    predicting_mask,
    weighted_sum,
)
from tests.distributed import run_ranks

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}
VIEWS = {f"aten::{name}" for name in ("detach", "slice", "split", "split_with_sizes", "view")}
MODES = ["token_mean", "sample_mean", "rollout_mean", "prompt_mean", "microbatch_mean"]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def microbatch(samples: int, layout: str) -> Microbatch:
    ids = {"prompt_ids": torch.arange(samples) // 2, "rollout_ids": torch.arange(samples)}
    if layout == "bshd":
        return Microbatch(torch.ones(samples, 6), **ids)
    real = torch.arange(samples + 1, dtype=torch.int32)
    mask = (torch.arange(4 * samples) % 4 < 1).float()
    return Microbatch(mask, cu_seqlens=real, cu_seqlens_padded=4 * real, **ids)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("mode", MODES)
def test_planning_takes_the_same_operations_for_any_number_of_samples(mode, layout):
    def operations(samples: int) -> int:
        with Operations() as counted:
            StepPlan.build(LossAggregation(mode=mode), [microbatch(samples, layout)])
        return len(counted.names)

    assert operations(3) == operations(300)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_planning_many_microbatches_takes_a_copy_more_for_each_and_a_sum_of_rows(layout):
    def operations(number: int) -> int:
        step = [microbatch(3, layout) for _ in range(number)]
        with Operations() as counted:
            StepPlan.build(LossAggregation(mode="prompt_mean"), step)
        return sum(name not in VIEWS for name in counted.names)

    assert operations(100) == operations(10) + 90 * {"bshd": 2, "thd": 1}[layout]


def test_rows_of_many_lengths_and_packs_with_and_without_padding_are_read_together():
    def operations(number: int) -> int:
        rows = [Microbatch(torch.ones(2, 3 + i)) for i in range(number)]
        packs = [microbatch(3, "thd") for _ in range(number)]
        packs[1::2] = [Microbatch(torch.ones(6), 2 * torch.arange(4)) for _ in packs[1::2]]
        with Operations() as counted:
            StepPlan.build(LossAggregation(mode="sample_mean"), [*rows, *packs])
        return sum(name not in VIEWS for name in counted.names)

    assert operations(100) == operations(10) + 90 * 3


@pytest.mark.parametrize("number", [1, 4])
def test_reading_a_step_of_rows_takes_little_memory(number):
    step = [Microbatch(torch.ones(512, 1024)) for _ in range(number)]
    with LiveBytes() as counted:
        StepPlan.build(LossAggregation(mode="sample_mean"), step)
    assert counted.peak <= (number + 0.5) * step[0].loss_mask.nbytes


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("mode", MODES)
def test_a_microbatch_takes_few_operations_and_no_wait(mode, layout):
    def operations(samples: int) -> list[str]:
        plan = StepPlan.build(LossAggregation(mode=mode), [microbatch(samples, layout)])
        loss = torch.ones_like(plan.microbatches[0].loss_mask)
        with Operations() as counted:
            weighted_sum(plan.weights(0), loss)
        return counted.names

    assert operations(3) == operations(300)
    assert not WAITS & set(operations(3))


@pytest.mark.parametrize("sequences", [2, 300])
def test_sharding_does_not_wait(sequences):
    layout = CPLayout.thd(8 * torch.arange(sequences + 1), 2, 1)
    x = torch.ones(8 * sequences)
    with Operations() as counted:
        layout.shard(x)
    assert not WAITS & set(counted.names)
    assert len(counted.names) <= 2


def test_layouts_take_the_same_operations_for_any_number_of_sequences():
    def operations(sequences: int) -> int:
        with Operations() as counted:
            CPLayout.thd(8 * torch.arange(sequences + 1), 2, 1)
        return len(counted.names)

    assert operations(2) == operations(300)


def test_moving_a_mask_takes_the_same_operations_for_any_number_of_sequences():
    def operations(sequences: int) -> int:
        with Operations() as counted:
            predicting_mask(torch.ones(4 * sequences), 4 * torch.arange(sequences + 1))
        return len(counted.names)

    assert operations(2) == operations(300)


def collectives_of_terms(number: int) -> list[str]:
    """Of one plan of ``number`` terms that group by prompt and by rollout; every rank."""
    terms: dict[str, Any] = {
        f"term {i}": LossAggregation(mode=("prompt_mean", "rollout_mean")[i % 2])
        for i in range(number)
    }
    with Operations() as counted:
        StepPlan.build_terms(terms, [microbatch(4, "bshd")], torch.distributed.group.WORLD)
    return [name for name in counted.names if name.startswith("c10d::")]


@pytest.mark.parametrize("terms", [1, 5])
def test_a_plan_takes_two_collectives_for_any_number_of_terms(terms):
    for counted in run_ranks(collectives_of_terms, 2, terms):
        assert counted == ["c10d::_allgather_base_"] * 2


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("mode", MODES)
def test_a_plan_keeps_a_few_numbers_a_sample_and_none_a_token(mode, layout):
    samples, length = 64, 4096
    mask = torch.ones(samples, length)
    ids = {"prompt_ids": torch.arange(samples), "rollout_ids": torch.arange(samples)}
    step = Microbatch(mask, **ids)
    if layout == "thd":
        step = Microbatch(mask.view(-1), length * torch.arange(samples + 1), **ids)
    with LiveBytes() as counted:
        plan = StepPlan.build(LossAggregation(mode=mode), [step])
        before = sum(x.nbytes for x in (mask, *ids.values())) + 8 * (samples + 1)
        assert counted.now <= before + 8 * 10 * samples
    assert plan.counts.tokens == samples * length
