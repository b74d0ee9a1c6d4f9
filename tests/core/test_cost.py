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

MODES = ("token_mean", "sample_mean", "prompt_mean", "microbatch_mean")
LAYOUTS = ("bshd", "thd")
OfSamples = Callable[[int], Callable[[], Any]]  # what is called, with so many samples


def microbatch(samples: int, layout: str, length: int = 4) -> Microbatch:
    """Rows, or a pack with padding, of which every sample has one token."""
    mask, ids = (torch.arange(length * samples) % length < 1).float(), torch.arange(samples) // 2
    if layout == "bshd":
        return Microbatch(mask.view(samples, length), prompt_ids=ids)
    real = torch.arange(samples + 1, dtype=torch.int32)
    return Microbatch(mask, real, prompt_ids=ids, cu_seqlens_padded=length * real)


def planning(mode: str, layout: str) -> OfSamples:
    return lambda n: partial(StepPlan.build, aggregation(mode), [microbatch(n, layout)])


def weighing(mode: str, layout: str) -> OfSamples:
    def of(samples: int) -> Callable[[], Any]:
        plan = planning(mode, layout)(samples)()
        loss = torch.ones_like(plan.microbatches[0].loss_mask)
        return lambda: weighted_sum(plan.weights(0), loss)

    return of


def taking_means(layout: str) -> OfSamples:
    def of(samples: int) -> Callable[[], Any]:
        given = microbatch(samples, layout)
        mean, x = SequenceMean(given), torch.ones_like(given.loss_mask).requires_grad_()
        return lambda: mean(x).sum().backward()

    return of


def halves(sequences: int) -> CPLayout:
    return CPLayout.thd(4 * torch.arange(sequences + 1), 2, 1)


WAITING: dict[str, OfSamples] = {
    **{f"plan {m} {layout}": planning(m, layout) for m in MODES for layout in LAYOUTS},
    "layout": lambda n: partial(halves, n),
    "predict": lambda n: partial(predicting_mask, torch.ones(4 * n), 4 * torch.arange(n + 1)),
    "means": lambda n: partial(SequenceMean, microbatch(n, "thd")),
}
OF_A_MICROBATCH: dict[str, OfSamples] = {
    **{f"weigh {layout}": weighing("prompt_mean", layout) for layout in LAYOUTS},
    "shard": lambda n: partial(halves(n).shard, torch.ones(4 * n)),
    **{f"mean {layout}": taking_means(layout) for layout in LAYOUTS},
}


def operations(call: Callable[[], Any]) -> Operations:
    with Operations() as made:
        call()
    return made


@pytest.mark.parametrize("name", [*WAITING, *OF_A_MICROBATCH])
def test_any_number_of_samples_takes_the_same_operations_and_a_microbatch_no_wait(name):
    few, many = (operations((WAITING | OF_A_MICROBATCH)[name](n)) for n in (20, 2000))
    assert few.names == many.names
    assert name in WAITING or not many.waits
    assert name != "shard" or len(few.names) <= 2


@pytest.mark.parametrize(("layout", "more"), [("bshd", 7 + 2), ("thd", 26 + 4)])
def test_planning_reads_and_copies_every_microbatch_in_the_same_operations(layout, more):
    """As many to read it, and to copy what was given."""

    def made(number: int) -> int:
        step = [microbatch(3, layout) for _ in range(number)]
        return operations(lambda: StepPlan.build(aggregation("prompt_mean"), step)).but_views

    assert made(100) == made(10) + 90 * more


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_keeps_a_copy_of_the_mask_and_a_few_numbers_a_sample(layout):
    step = [microbatch(64, layout, length=2**14) for _ in range(4)]
    with LiveBytes() as counted:
        plan = StepPlan.build(aggregation("prompt_mean"), step)
        given = 4 * (step[0].loss_mask.nbytes + 8 * 4 * 64)
        assert counted.now <= 2 * given + 8 * 20 * 4 * 64
    assert layout == "thd" or counted.peak <= 2.13 * given  # a mask of rows is read as it is
    assert plan.counts.tokens == 4 * 64
