"""Metrics over microbatches and ranks, and a `TokenLoss` without a hook."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.mcore import LossHook, TokenLoss
from megatron_loss_agg.report import Max, Mean, Min, Sum, reduce_reports
from tests.core.meaning import F64
from tests.core.operations import Operations
from tests.distributed import run_ranks


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


SEEN, UNSEEN = (tensor(math.nan, -3, 5, 9), tensor(0, 1, 0.5, 0)), (tensor(math.nan), tensor(0))
NONE = (tensor(), tensor())
MANY = torch.ones(4099, dtype=torch.bfloat16, requires_grad=True)  # bf16 counts to 256 one by one
N = 2**24 + 1  # the first integer that fp32 rounds, to 2**24
LENGTHS, ONES = torch.tensor([N, 0]), torch.ones(2)
# A metric, and its numbers: of a mean, sum and count.
METRICS: dict[str, tuple[Any, list[float]]] = {
    # 1 * -3 + 0.5 * 5 and 1 + 0.5; the NaN lies under mask 0.
    "a mean": (Mean.of(*SEEN), [-0.5, 1.5]),
    "a mean of nothing": (Mean.of(*UNSEEN), [0, 0]),
    "a mean without values": (Mean.of(*NONE), [0, 0]),
    "a mean that is not a number": (Mean(torch.tensor(5.0), torch.tensor(math.nan)), [5, math.nan]),
    "a mean of many": (Mean.of(MANY, torch.ones_like(MANY)), [4099, 4099]),
    "a mean in fp64": (Mean.of(torch.ones(1), tensor(1 + 1e-9)), [1 + 1e-9, 1 + 1e-9]),
    "a mean of integers": (Mean.of(LENGTHS, ONES), [N, 2]),
    "a mean of integers by flags": (Mean.of(LENGTHS, ONES.bool()), [N, 2]),
    "a mean over integers": (Mean.of(ONES, LENGTHS.int()), [N, N]),
    "a mean of flags over integers": (Mean.of(ONES.bool(), LENGTHS.int()), [N, N]),
    "a mean by hand": (Mean(torch.tensor(N), ONES[:1]), [N, 1]),
    "a maximum": (Max.of(*SEEN), [5]),
    "a maximum of nothing": (Max.of(*UNSEEN), [-math.inf]),
    "a maximum without values": (Max.of(*NONE), [-math.inf]),
    "a maximum that is not a number": (Max.of(SEEN[0], torch.ones(4)), [math.nan]),
    "a maximum of integers": (Max.of(LENGTHS, ONES), [N]),
    "a minimum": (Min.of(*SEEN), [-3]),
    "a minimum of nothing": (Min.of(*UNSEEN), [math.inf]),
    "a minimum that is not a number": (Min.of(SEEN[0], torch.ones(4)), [math.nan]),
    "a minimum of integers": (Min.of(LENGTHS[:1], ONES[:1]), [N]),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_of_the_values_that_count_and_rounds_no_integer(name):
    metric, numbers = METRICS[name]
    found = [x.item() for x in vars(metric).values()]
    assert found == pytest.approx(numbers, rel=0, nan_ok=True)
    assert not any(x.requires_grad for x in vars(metric).values())
    value = numbers[0] / (numbers[1] or 1) if len(numbers) == 2 else numbers[0]
    assert metric.value().item() == pytest.approx(value, rel=1e-6, nan_ok=True)
    of_step = reduce_reports([{"": metric}] * 2, None)
    assert of_step[""] == pytest.approx(value, rel=0, nan_ok=True)


@pytest.mark.parametrize("mask", [torch.float32, torch.bfloat16, torch.bool])
def test_losses_are_not_copied_to_fp64(mask):
    for dtype in (torch.float32, torch.bfloat16):
        with Operations() as made:
            Mean.of(torch.ones(8, dtype=dtype), torch.ones(8, dtype=mask))
        assert F64 not in made.dtypes


def reduced_on_every_rank() -> list[tuple[dict[str, float], int]]:
    """Metrics of all kinds, and how many collectives they take; then of none.

    The second rank has them in another order, and in three microbatches and not in two.
    """
    rank = dist.get_rank()
    # Number i is i on rank 0 and i + 2**24 + 1 on rank 1, which fp32 could not tell.
    numbers = torch.arange(100) + rank * (2**24 + 1)
    reports: list[dict[str, Any]] = [
        {
            **{f"{i:03}": Max.of(x, torch.ones(())) for i, x in enumerate(numbers)},
            "loss": Mean.of(torch.full((n,), 1.0 + 3 * rank), torch.ones(n)),
            "sum": Sum.of(torch.full((n,), 1.0 + 3 * rank), torch.full((n,), 0.5)),
            "pair": torch.tensor([float(rank), 5.0]),
            "never": Mean(torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)),
            "max": Max.of(torch.tensor([10.0 * rank + n]), torch.ones(1)),
            "min": Min.of(torch.tensor([10.0 * rank + n]), torch.ones(1)),
        }
        for n in ((1, 1), (1, 1, 2))[rank]
    ]
    if rank:
        reports = [dict(reversed(x.items())) for x in reports]
    answers = []
    for given in (reports, [{}]):
        with Operations() as made:
            answer = reduce_reports(given, dist.group.WORLD)
        answers.append((answer, len(made.collectives)))
    return answers


def test_every_metric_is_reduced_by_its_own_kind_and_count_in_two_collectives():
    # loss: rank 0 has 1 + 1 tokens of 1, rank 1 has 1 + 1 + 2 of 4: (2 + 16) / 6 = 3. sum: 18 / 2.
    # pair: (0 + 0 + 1 + 1 + 1) / 25. max: 10 + 2. min: 0 + 1.
    expected = {"loss": 3.0, "sum": 9.0, "pair": 0.12, "never": 0.0, "max": 12.0, "min": 1.0}
    numbers = {f"{i:03}": i + 2**24 + 1 for i in range(100)}
    for (answer, collectives), of_none in run_ranks(reduced_on_every_rank, 2):
        assert {name: answer.pop(name) for name in numbers} == numbers
        assert answer == pytest.approx(expected)
        assert collectives == 2 and of_none == ({}, 2)
    assert Mean.of(*SEEN).pair().tolist() == [-0.5, 1.5]


# Without a hook, a `TokenLoss` is a stock loss function: losses, mask, and their sum and count.
HALF, THREE, MASK = torch.tensor(0.5), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0, 1])
TOTALS: dict[str, tuple[Any, Any, float, int]] = {
    # fp16 ends at 65504, and bf16 counts to 256 one by one.
    "mask of fp16": (HALF.expand(70001), torch.ones(70001).half(), 35000.5, 70001),
    "mask of bf16": (HALF.expand(70001), torch.ones(70001).bfloat16(), 35000.5, 70001),
    "losses of fp16": (HALF.expand(140002).half(), torch.ones(140002), 70001, 140002),
    "losses of fp64": (HALF.expand(140002).double(), torch.ones(140002), 70001, 140002),
    "flat losses": (THREE, MASK.view(1, 3), 4, 2),
    "a fractional mask": (THREE, MASK / 2, 2, 1),
    "a column": (THREE.view(1, 3), MASK.view(3, 1), 4, 2),
    "NaN where the mask is 0": (torch.tensor([1.0, torch.nan, 3.0]), MASK, 4, 2),
}


@pytest.mark.parametrize("name", TOTALS)
def test_without_a_hook_a_token_loss_sums_over_the_mask(name):
    losses, mask, *expected = TOTALS[name]
    losses = losses.clone().requires_grad_()
    total, number, report = TokenLoss(lambda x: (x, {"own": 1}), mask)(losses)
    assert [total.item(), number.item()] == expected
    assert number.dtype == torch.int  # Megatron's counter
    assert (total.dtype, report) == (torch.promote_types(losses.dtype, torch.float32), {"own": 1})
    total.backward()
    assert torch.equal(losses.grad.flatten(), mask.flatten().to(losses))


@pytest.mark.filterwarnings("error")
def test_training_without_the_hook_that_the_process_has_warns():
    losses = HALF.expand(3).clone().requires_grad_()
    stock = TokenLoss(lambda x: x, MASK)
    stock(losses)
    hook = LossHook(LossAggregation(mode="token_mean"))
    stock(losses.detach())  # evaluates
    with pytest.warns(UserWarning, match=r"there is a LossHook\. Call .* hook\.wrap\(get_"):
        stock(losses)
    del hook
    stock(losses)


def test_a_loss_is_named_by_its_preset():
    assert [*LossHook(LossAggregation.preset("verl/token-mean")).terms] == ["verl/token-mean"]
    assert [*LossHook(LossAggregation(mode="token_mean")).terms] == ["token_mean"]
