"""Cost: the same tensor operations for any number of samples, and a microbatch waits for no device.

Counted and not timed: a Python loop over samples or tokens shows as more operations, a wait
(``.item()``, ``bool(tensor)``, a data-dependent shape) as one of them. Memory is counted as the
storages that operations make.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.memory import LiveBytes
from megatron_loss_agg import (
    CPLayout,
    Microbatch,
    SequenceMean,
    StepPlan,
    predicting_mask,
    weighted_sum,
)
from tests.core.meaning import aggregation
from tests.core.operations import Operations

MODES = ["token_mean", "sample_mean", "rollout_mean", "prompt_mean", "microbatch_mean"]
in_every_mode = pytest.mark.parametrize("mode", MODES)
in_both_layouts = pytest.mark.parametrize("layout", ["bshd", "thd"])


def microbatch(samples: int, layout: str) -> Microbatch:
    ids = {"prompt_ids": torch.arange(samples) // 2, "rollout_ids": torch.arange(samples)}
    if layout == "bshd":
        return Microbatch(torch.ones(samples, 6), **ids)
    real = torch.arange(samples + 1, dtype=torch.int32)
    mask = (torch.arange(4 * samples) % 4 < 1).float()
    return Microbatch(mask, cu_seqlens=real, cu_seqlens_padded=4 * real, **ids)


def operations(call: Callable[[], Any]) -> Operations:
    with Operations() as made:
        call()
    return made


@in_both_layouts
@in_every_mode
def test_any_number_of_samples_takes_the_same_operations_and_a_microbatch_no_wait(mode, layout):
    def planned_and_weighed(samples: int) -> tuple[int, Operations]:
        with Operations() as planning:
            plan = StepPlan.build(aggregation(mode), [microbatch(samples, layout)])
        loss = torch.ones_like(plan.microbatches[0].loss_mask)
        return len(planning.names), operations(lambda: weighted_sum(plan.weights(0), loss))

    (planning, weighing), (of_many, weighing_many) = map(planned_and_weighed, (300, 3000))
    assert planning == of_many
    assert weighing.names == weighing_many.names
    assert not weighing.waits


@pytest.mark.parametrize("layout, more", [("bshd", 7 + 3), ("thd", 27 + 5)])
def test_planning_reads_and_copies_every_microbatch_in_the_same_operations(layout, more):
    """As many to read it, and to copy what was given."""

    def planning(number: int) -> int:
        step = [microbatch(3, layout) for _ in range(number)]
        return operations(lambda: StepPlan.build(aggregation("prompt_mean"), step)).but_views

    assert planning(100) == planning(10) + 90 * more


def halves(sequences: int) -> CPLayout:
    return CPLayout.thd(8 * torch.arange(sequences + 1), 2, 1)


def taking_means(whole: Microbatch) -> Callable[[], Any]:
    x, mean = torch.ones_like(whole.loss_mask).requires_grad_(), SequenceMean(whole)
    return lambda: mean(x).sum().backward()


# What is done to some sequences, and whether it may wait for the device.
OF_SEQUENCES: dict[str, tuple[Callable[[int], Callable[[], Any]], bool]] = {
    "layout": (lambda n: lambda: halves(n), True),
    "shard": (lambda n: partial(halves(n).shard, torch.ones(8 * n)), False),
    "predict": (
        lambda n: lambda: predicting_mask(torch.ones(4 * n), 4 * torch.arange(n + 1)),
        True,
    ),
    "means": (lambda n: lambda: SequenceMean(microbatch(n, "thd")), True),
    "mean of rows": (lambda n: taking_means(microbatch(n, "bshd")), False),
    "mean of packs": (lambda n: taking_means(microbatch(n, "thd")), False),
}


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_any_number_of_sequences_takes_the_same_operations(name):
    of, may_wait = OF_SEQUENCES[name]
    few, many = operations(of(2)), operations(of(300))
    assert few.names == many.names
    assert may_wait or not (few.waits or many.waits)
    assert name != "shard" or len(few.names) <= 2


def test_reading_a_step_of_rows_takes_little_memory():
    step = [Microbatch(torch.ones(1024, 1024)) for _ in range(4)]
    with LiveBytes() as counted:
        StepPlan.build(aggregation("sample_mean"), step)
    assert counted.peak <= (2 * 4 + 0.5) * step[0].loss_mask.nbytes  # the masks and copies


@in_both_layouts
@in_every_mode
def test_a_plan_keeps_a_copy_of_the_mask_and_a_few_numbers_a_sample(mode, layout):
    samples, length = 64, 4096
    mask = torch.ones(samples, length)
    ids = {"prompt_ids": torch.arange(samples), "rollout_ids": torch.arange(samples)}
    step = Microbatch(mask, **ids)
    if layout == "thd":
        step = Microbatch(mask.view(-1), length * torch.arange(samples + 1), **ids)
    with LiveBytes() as counted:
        plan = StepPlan.build(aggregation(mode), [step])
        given = sum(x.nbytes for x in (mask, *ids.values())) + 8 * (samples + 1)
        assert counted.now <= 2 * given + 8 * 10 * samples
    assert plan.counts.tokens == samples * length
