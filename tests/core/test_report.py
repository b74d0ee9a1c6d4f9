"""Metrics as (sum, count): exact over microbatches and ranks, each with its own denominator."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg.report import Mean, reduce_means
from tests.distributed import run_ranks

F64 = torch.float64


def test_a_mean_of_masked_values():
    # (1 * 2 + 0.5 * 8) / (1 + 0.5) = 4; the NaN lies under mask 0.
    mean = Mean.of(torch.tensor([2.0, math.nan, 8.0]), torch.tensor([1.0, 0.0, 0.5]))
    assert mean.value().item() == 4
    assert mean.pair().tolist() == [6.0, 1.5]


def test_means_add_up_by_tokens_and_not_by_microbatches():
    # Microbatches with means 1 (one token) and 4 (three tokens). Right: (1 + 12) / 4 = 3.25;
    # the mean of the means would be 2.5.
    first = Mean.of(torch.tensor([1.0]), torch.ones(1))
    second = Mean.of(torch.full((3,), 4.0), torch.ones(3))
    assert ((first.value() + second.value()) / 2).item() == 2.5
    assert (first + second).value().item() == 3.25


def test_nothing_counted_is_zero():
    assert Mean.of(torch.tensor([math.inf]), torch.zeros(1)).value().item() == 0
    assert Mean.of(torch.empty(0), torch.empty(0)).value().item() == 0


def test_no_gradient_and_no_rounding():
    values = torch.ones(1, requires_grad=True)
    assert not Mean.of(values, torch.ones(1)).sum.requires_grad
    # 4099 tokens are beyond what bf16 counts one by one (256).
    many = Mean.of(torch.ones(4099, dtype=torch.bfloat16), torch.ones(4099, dtype=torch.bfloat16))
    assert many.pair().tolist() == [4099, 4099]


def means_of_rank() -> dict[str, float]:
    rank = dist.get_rank()
    means = {
        "loss": Mean.of(torch.full((1 + 2 * rank,), 1.0 + 3 * rank), torch.ones(1 + 2 * rank)),
        "accuracy": Mean(torch.tensor(float(rank), dtype=F64), torch.tensor(5.0, dtype=F64)),
        "never": Mean(torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)),
    }
    reduced = reduce_means(means, dist.group.WORLD)
    return {name: mean.value().item() for name, mean in reduced.items()}


def test_every_metric_is_reduced_with_its_own_count():
    # loss: (1 * 1 + 3 * 4) / (1 + 3); accuracy: (0 + 1) / (5 + 5).
    expected = {"loss": 3.25, "accuracy": 0.1, "never": 0.0}
    for answer in run_ranks(means_of_rank, 2):
        assert answer == pytest.approx(expected)


def test_one_process_needs_no_group():
    means = {"loss": Mean.of(torch.tensor([2.0, 4.0]), torch.ones(2))}
    assert reduce_means(means, None)["loss"].value().item() == 3
    assert reduce_means({}, None) == {}
