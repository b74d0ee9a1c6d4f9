"""Metrics: exact over microbatches and ranks, each with its own denominator."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan
from megatron_loss_agg.errors import ReportError
from megatron_loss_agg.report import Max, Mean, Min, reduce_reports
from tests.core.ranks import Collectives
from tests.distributed import run_ranks

F64 = torch.float64


def test_a_mean_of_masked_values():
    # (1 * 2 + 0.5 * 8) / (1 + 0.5) = 4; the NaN lies under mask 0.
    mean = Mean.of(torch.tensor([2.0, math.nan, 8.0]), torch.tensor([1.0, 0.0, 0.5]))
    assert mean.value().item() == 4
    assert mean.pair().tolist() == [6.0, 1.5]


def test_a_mean_of_flags_under_a_mask_of_integers():
    mean = Mean.of(torch.tensor([True, False, True]), torch.tensor([1, 1, 0]))
    assert mean.value().item() == 0.5


def test_a_mean_keeps_the_precision_of_its_weights():
    assert Mean.of(torch.ones(1), torch.tensor([1 + 1e-9], dtype=F64)).count.item() == 1 + 1e-9


def test_means_add_up_by_tokens_and_not_by_microbatches():
    # Microbatches with means 1 (one token) and 4 (three tokens). Right: (1 + 12) / 4 = 3.25;
    # the mean of the means would be 2.5.
    first = Mean.of(torch.tensor([1.0]), torch.ones(1))
    second = Mean.of(torch.full((3,), 4.0), torch.ones(3))
    assert ((first.value() + second.value()) / 2).item() == 2.5
    assert (first + second).value().item() == 3.25
    assert reduce_reports([{"x": first}, {"x": second}], None) == {"x": 3.25}


def test_a_mean_in_the_weights_of_a_plan_is_that_aggregation():
    # Rewards 1, 0, 1 of prompts 7, 7, 9: ((1 + 0) / 2 + 1) / 2 = 0.75, and not 2 / 3.
    one_each = Microbatch(torch.ones(3, 1), prompt_ids=torch.tensor([7, 7, 9]))
    plan = StepPlan.build(LossAggregation(mode="prompt_mean"), [one_each])
    rewards = torch.tensor([[1.0], [0.0], [1.0]])
    assert Mean.of(rewards, plan.weights(0, F64)).value().item() == 0.75


def test_nothing_counted_is_zero():
    assert Mean.of(torch.tensor([math.inf]), torch.zeros(1)).value().item() == 0
    assert Mean.of(torch.empty(0), torch.empty(0)).value().item() == 0


def test_no_gradient_and_no_rounding():
    values = torch.ones(1, requires_grad=True)
    assert not Mean.of(values, torch.ones(1)).sum.requires_grad
    # 4099 tokens are beyond what bf16 counts one by one (256).
    many = Mean.of(torch.ones(4099, dtype=torch.bfloat16), torch.ones(4099, dtype=torch.bfloat16))
    assert many.pair().tolist() == [4099, 4099]


def test_extremes_look_at_active_positions_alone():
    values, mask = torch.tensor([math.nan, -3.0, 5.0, 9.0]), torch.tensor([0.0, 1.0, 0.5, 0.0])
    assert Max.of(values, mask).value().item() == 5
    assert Min.of(values, mask).value().item() == -3
    assert Max.of(values, torch.zeros(4)).value().item() == -math.inf
    assert Min.of(torch.empty(0), torch.empty(0)).value().item() == math.inf


def test_a_nan_that_counts_is_shown():
    values = torch.tensor([1.0, math.nan])
    assert math.isnan(Max.of(values, torch.ones(2)).value())
    assert math.isnan(Min.of(values, torch.ones(2)).value())


def reduced_on_every_rank() -> tuple[dict[str, float], list[str]]:
    """Two microbatches a rank; values and tokens differ over both."""
    rank = dist.get_rank()
    reports = [
        {
            "loss": Mean.of(torch.full((n,), 1.0 + 3 * rank), torch.ones(n)),
            "pair": torch.tensor([float(rank), 5.0]),
            "never": Mean(torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)),
            "max": Max.of(torch.tensor([10.0 * rank + n]), torch.ones(1)),
            "min": Min.of(torch.tensor([10.0 * rank + n]), torch.ones(1)),
        }
        for n in (1, 1 + 2 * rank)
    ]
    with Collectives() as collectives:
        return reduce_reports(reports, dist.group.WORLD), collectives.names


def test_every_metric_is_reduced_by_its_own_kind_and_count_in_one_collective():
    # loss: rank 0 has 1 + 1 tokens of 1, rank 1 has 1 + 3 of 4: (2 + 16) / 6 = 3.
    # pair: (0 + 0 + 1 + 1) / 20. max: 10 + 3. min: 0 + 1.
    expected = {"loss": 3.0, "pair": 0.1, "never": 0.0, "max": 13.0, "min": 1.0}
    for answer, collectives in run_ranks(reduced_on_every_rank, 2):
        assert answer == pytest.approx(expected)
        assert len(collectives) == 1


def reduced_in_any_order(names: list[str]) -> dict[str, float] | str:
    rank = dist.get_rank()
    ordered = names if rank == 0 else names[::-1]
    mean = {"a": 10.0, "b": 1.0, "c": 5.0}
    report = {name: Mean.of(torch.tensor([mean[name]]), torch.ones(1)) for name in ordered}
    if rank == 1 and "c" in report:
        report["d"] = report.pop("c")
    try:
        return reduce_reports([report], dist.group.WORLD)
    except ReportError as error:
        return str(error)


def test_ranks_may_order_their_metrics_as_they_like_but_must_have_the_same():
    assert run_ranks(reduced_in_any_order, 2, ["a", "b"]) == [{"a": 10.0, "b": 1.0}] * 2
    for answer in run_ranks(reduced_in_any_order, 2, ["a", "c"]):
        assert "another rank other metrics; expected the same names" in answer


def test_a_nan_count_is_shown():
    assert math.isnan(reduce_reports([{"a": torch.tensor([5.0, math.nan])}], None)["a"])


def test_one_denominator_for_all_metrics_would_be_another_number():
    # Trap: two means whose counts differ, divided by one of them.
    loss, accuracy = Mean.of(torch.ones(4), torch.ones(4)), Mean.of(torch.ones(2), torch.ones(2))
    assert (accuracy.sum / loss.count).item() == 0.5
    answer = reduce_reports([{"loss": loss, "accuracy": accuracy}], None)
    assert answer == {"loss": 1.0, "accuracy": 1.0}


def test_reports_that_differ_are_refused():
    mean, extreme = Mean.of(torch.ones(1), torch.ones(1)), Max.of(torch.ones(1), torch.ones(1))
    assert reduce_reports([], None) == {}
    with pytest.raises(ReportError, match=r"microbatch 1 reports \['b'\] and the first \['a'\]"):
        reduce_reports([{"a": mean}, {"b": mean}], None)
    with pytest.raises(ReportError, match="'a' is Mean and Max in different microbatches"):
        reduce_reports([{"a": mean}, {"a": extreme}], None)
    three = Mean(torch.ones(3), torch.ones(3))
    with pytest.raises(ReportError, match="expected a Mean, Max or Min of scalars"):
        reduce_reports([{"a": three}], None)
    for metric in (Mean, Max, Min):
        with pytest.raises(ReportError, match=r"values \(2,\) under a mask \(2, 2\)"):
            metric.of(torch.ones(2), torch.ones(2, 2))
        with pytest.raises(ReportError, match="a metric of list and Tensor; expected two tensors"):
            metric.of([1.0], torch.ones(1))
    with pytest.raises(ReportError, match=r"'a' is tensor\(1.\); expected a Mean, Max or Min"):
        reduce_reports([{"a": torch.tensor(1.0)}], None)
