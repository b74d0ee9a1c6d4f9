"""What is wrong with a step's data or with how it is read; no rank waits for one that failed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.host import scripts
from tests.host.refusals import Row, assert_told, hook_of
from tests.host.steps import Counted, aggregation

pytestmark = pytest.mark.host

NO_OFFSETS = "GroupError: has no 'cu_seqlens' ... add it"


def then_rejected(rank: int) -> Iterator[Any]:
    """A good step, and one with rejected samples."""
    data = Counted(rank)
    for rejected in ({}, {"rejected": torch.tensor([True, False])}):
        yield from ({**next(data), **rejected} for _ in range(Counted.N_MB))


def read_too_many(iterator: Any, number: int) -> list[Any]:
    return [next(iterator)] * (number + 1)


def packed(says: str = "", mode: str = "sample_mean", **options: Any) -> Row:
    """The model is called with packs, of which the batch says nothing."""
    return Row(says, **{"step": scripts.packed_call, "hook": hook_of(mode), **options})


BATCHES = {
    "no prompts": Row(
        "GroupError: have no 'prompt_ids' ... add that key",
        data=partial(Counted, without=("prompt_ids",)),
    ),
    "no mask": Row(
        "MaskError: expected a mapping with the tensor 'loss_mask'",
        data=partial(Counted, without=("loss_mask",)),
    ),
    "no mapping": Row(
        "MaskError: the data iterator gave Tensor",
        data=lambda rank: itertools.repeat(torch.ones(3)),
    ),
    "two batches a microbatch": Row(
        "StepError: drew 4 batches for 2 microbatches ... once each",
        step=scripts.draws_twice,
        hook=hook_of("sum"),
        data=lambda rank: itertools.repeat(next(Counted(rank))),
    ),
    "another number of microbatches": Row(
        "FunctionError: 3 microbatches for a call of the schedule with num_microbatches=2",
        hook=hook_of("sum", read_step=read_too_many),
    ),
    **{
        f"rejected samples without a choice, {mode}": Row(
            "GroupError: expected LossAggregation(rejected='count')",
            data=then_rejected,
            hook=hook_of(mode),
            before=[{}],
        )
        for mode in ("token_mean", "sample_mean", "sum")
    },
    "packs without offsets": packed(NO_OFFSETS),
    "packs without offsets later": packed(NO_OFFSETS, before=[{}]),
    "packs without offsets, by position": packed(
        NO_OFFSETS, step=partial(scripts.packed_call, by_position=True)
    ),
    "packs without offsets on tensor-parallel ranks": packed(NO_OFFSETS, topology="tp2"),
    "packs without offsets, of no sample": packed(mode="sum"),
}


def failing_at_the_second(error: BaseException, good: Iterator[Any]) -> Iterator[Any]:
    yield next(good)
    raise error


DISK = partial(failing_at_the_second, OSError("disk"))


def on_rank(failing: int, change: Any, says: str, topology: str = "dp2") -> Row:
    """The data iterator of one rank is a bad one, made by ``change``."""

    def data(rank: int) -> Any:
        good = Counted(rank)
        return change(good) if dist.get_rank() == failing else good

    return Row("PeerError", {failing: says}, topology, hook_of("token_mean"), data)


def mean_or_nan(failing: int, plan: Any, i: int) -> Tensor:
    """A custom aggregation, which fails on a rank."""
    mask = plan.microbatches[i].loss_mask
    return mask * math.nan if dist.get_rank() == failing else mask / plan.counts.tokens


def by_function(failing: int, topology: str) -> Row:
    hook = hook_of(aggregation("custom", function=partial(mean_or_nan, failing)))
    says = "FunctionError: the aggregation function returned weights that"
    return Row("PeerError: see ", {failing: says}, topology, hook)


def then_masked(rank: int) -> Iterator[Any]:
    """A good step, and one without active tokens."""
    for active in ((0, 1), ()):
        data = Counted(rank, active=active)
        yield from (next(data) for _ in range(Counted.N_MB))


FAILED = {
    **{
        f"a reader that fails on rank {rank}, {name}": on_rank(rank, DISK, "OSError: disk", name)
        for name, rank in (("dp2", 1), ("cp2", 1), ("pp2", 1), ("tp2", 0))
    },
    **{
        f"a function that fails on rank {rank}, {name}": by_function(rank, name)
        for name, rank in (("dp2", 1), ("pp2", 1), ("tp2", 0))
    },
    "data that ends in a step": on_rank(
        *(1, lambda good: iter([next(good)])),
        "StepError: the data iterator ended after 1 of the 2 batches",
    ),
    "data that ended": on_rank(1, lambda good: iter([]), "StopIteration"),
    "an interrupted reader": on_rank(
        1, partial(failing_at_the_second, KeyboardInterrupt()), "KeyboardInterrupt"
    ),
    "no iterator": on_rank(
        1, lambda good: None, "HostError: data_iterator is a NoneType on a rank that reads data"
    ),
    # Every stage hears of the first step in any case.
    "an empty step": Row(
        "PeerError: last pipeline stage",
        {1: "MaskError: every token of the step is masked or rejected"},
        "pp2",
        hook_of("token_mean", empty_step="error"),
        then_masked,
        before=[{}],
    ),
}
GOOD = {f"a good step, {name}": Row(topology=name) for name in ("dp2", "cp2", "pp2", "tp2")}
ROWS = {**BATCHES, **FAILED, **GOOD}


@pytest.mark.parametrize("name", ROWS)
def test_bad_data_is_named_and_no_rank_waits_for_one_that_failed(name: str) -> None:
    assert_told(__name__, name)
