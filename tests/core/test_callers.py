"""What callers get wrong beside values: types, other ranks, and positions that are no sample's."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import tensor

from megatron_loss_agg import (
    AggregationError,
    CPLayout,
    LossAggregation,
    Microbatch,
    StepPlan,
    predicting_mask,
    token_weights,
    weighted_sum,
)
from megatron_loss_agg.errors import DivisorError, GroupError, LayoutError, MaskError, ModeError
from tests.distributed import run_ranks

MEAN = LossAggregation(mode="sample_mean")

CALLS: list[tuple[Callable[[], Any], type[AggregationError], str]] = [
    (lambda: LossAggregation(mode=[]), ModeError, "unknown mode"),  # type: ignore[arg-type]
    (lambda: LossAggregation(mode="sum", divisor=10**400), DivisorError, "finite number"),
    (lambda: LossAggregation(mode="sum", divisor=1e-320), DivisorError, "finite number"),
    (lambda: token_weights("sum", torch.ones(1, 2)), ModeError, "a str for agg"),  # type: ignore[arg-type]
    (lambda: StepPlan.build(MEAN, [torch.ones(1, 2)]), MaskError, "list of Microbatch"),  # type: ignore[list-item]
    (lambda: token_weights(MEAN, torch.ones(1, 2), dtype=torch.int64), MaskError, "floating"),
    (
        lambda: token_weights(MEAN, tensor([[1e308] * 4], dtype=torch.float64)),
        MaskError,
        "infinite",
    ),
    (
        lambda: token_weights(MEAN, tensor([[1e-310, 0.0]], dtype=torch.float64)),
        MaskError,
        "overflow",
    ),
    (lambda: weighted_sum([1.0], [1.0]), MaskError, "a real tensor"),  # type: ignore[arg-type]
    (lambda: CPLayout.bshd(8, 2, 0.5), LayoutError, "cp_rank=0.5"),  # type: ignore[arg-type]
    (lambda: CPLayout.contiguous(-8, 2, 0), LayoutError, "length -8"),
    (lambda: CPLayout.thd(tensor([0, 8, 4]), 2, 0), LayoutError, "not decrease"),
    (lambda: CPLayout.thd(tensor([4, 8]), 2, 0), LayoutError, "start at 0"),
    (lambda: CPLayout.bshd(8, 2, 0).shard(torch.ones(8), dim=3), LayoutError, "no axis 3"),
    (lambda: predicting_mask(torch.ones(4), tensor([0, 6])), GroupError, "beyond the mask"),
    (lambda: predicting_mask(torch.ones(4)), MaskError, "expected \\[samples, seq\\]"),
]


@pytest.mark.parametrize("call, error, text", CALLS, ids=[text for *_, text in CALLS])
def test_a_wrong_call_is_named(
    call: Callable[[], Any], error: type[AggregationError], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


def test_any_real_number_is_a_divisor() -> None:
    assert LossAggregation(mode="sum", divisor=Fraction(1, 4)).scale == 4.0  # type: ignore[arg-type]


def test_a_first_token_is_not_predicted_from_the_padding_before_it() -> None:
    # Samples of 3 and 2 tokens at 0 and 4: position 3 is padding, and predicts nothing.
    mask = tensor([1.0, 1, 1, 0, 1, 1, 0, 0])
    offsets, padded = tensor([0, 3, 5]), tensor([0, 4, 8])
    moved = predicting_mask(mask, offsets, padded)
    assert moved.tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    token_weights(MEAN, moved, offsets, cu_seqlens_padded=padded)


def errors_on_rank() -> list[str]:
    rank, world = dist.get_rank(), dist.group.WORLD
    mask = torch.ones(1 + rank, 2)
    builds: list[Callable[[], Any]] = [
        lambda: StepPlan.build(
            LossAggregation(mode="sample_mean" if rank else "token_mean"), [Microbatch(mask)], world
        ),
        lambda: StepPlan.build(
            LossAggregation(mode="sum", divisor=1 + rank), [Microbatch(mask)], world
        ),
        lambda: StepPlan.build(MEAN, [Microbatch(mask)], world, sharded_over=world),
        lambda: StepPlan.build(MEAN, [Microbatch(mask)], sharded_over=world),
    ]
    found = []
    for build in builds:
        try:
            build()
            found.append("passed")
        except AggregationError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_ranks_that_disagree_all_stop() -> None:
    for other_mode, other_divisor, other_samples, no_group in run_ranks(errors_on_rank, 2):
        assert other_mode.startswith("ModeError: the ranks have different aggregations")
        assert other_divisor == other_mode
        assert other_samples.startswith("GroupError: ranks that share samples have 1 and 2")
        assert no_group.startswith("GroupError: sharded_over without group")
