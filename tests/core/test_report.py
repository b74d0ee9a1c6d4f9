"""Metrics: exact over microbatches, each with its own denominator."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan
from megatron_loss_agg.errors import ReportError
from megatron_loss_agg.report import Max, Mean, Min, reduce_reports

F64 = torch.float64


def test_a_mean_of_masked_values():
    # (1 * 2 + 0.5 * 8) / (1 + 0.5) = 4; the NaN lies under mask 0.
    mean = Mean.of(torch.tensor([2.0, math.nan, 8.0]), torch.tensor([1.0, 0.0, 0.5]))
    assert mean.value().item() == 4
    assert mean.pair().tolist() == [6.0, 1.5]


def test_a_mean_keeps_the_precision_of_its_weights():
    flags = Mean.of(torch.tensor([True, False, True]), torch.tensor([1, 1, 0]))
    assert flags.value().item() == 0.5
    assert Mean.of(torch.ones(1), torch.tensor([1 + 1e-9], dtype=F64)).count.item() == 1 + 1e-9


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_add_up_exactly(dtype):
    # 2**24 + 1 is the first integer that fp32 rounds, to 2**24.
    n = 2**24 + 1
    lengths, ones = torch.tensor([n, 0], dtype=dtype), torch.ones(2)
    assert Mean.of(lengths, ones).pair().tolist() == [n, 2]
    assert Mean.of(lengths, torch.tensor([1, 1])).pair().tolist() == [n, 2]
    assert Mean.of(lengths, torch.tensor([True, True])).pair().tolist() == [n, 2]
    assert Mean.of(ones, lengths).pair().tolist() == [n, n]
    assert Mean.of(torch.tensor([True, False]), lengths).pair().tolist() == [n, n]
    assert Max.of(lengths, ones).value().item() == n
    assert Min.of(lengths[:1], ones[:1]).value().item() == n
    metrics = {"sum": Mean.of(lengths, ones), "max": Max.of(lengths, ones)}
    assert reduce_reports([metrics] * 2, None) == {"sum": n / 2, "max": n}


def test_metrics_made_by_hand_add_up_in_fp64():
    one, many = torch.ones(()), torch.tensor(2.0**24)
    reports = [{"a": Mean(many, one)}, {"a": Mean(one.view(1), one)}]
    assert reduce_reports(reports, None) == {"a": (2**24 + 1) / 2}


class VectorTypes(TorchDispatchMode):
    """Dtypes of the tensors of several elements that the calls inside made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.numel() > 1]
        self.found.update(x.dtype for x in made)
        return out


@pytest.mark.parametrize("mask", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
def test_losses_are_not_copied_to_fp64(values, mask):
    with VectorTypes() as made:
        Mean.of(torch.ones(8, dtype=values), torch.ones(8, dtype=mask))
    assert F64 not in made.found


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
    for metric in (Max, Min):
        assert math.isnan(metric.of(torch.tensor([1.0, math.nan]), torch.ones(2)).value())
    assert math.isnan(reduce_reports([{"a": torch.tensor([5.0, math.nan])}], None)["a"])


ONE, GREATEST = Mean.of(torch.ones(1), torch.ones(1)), Max.of(torch.ones(1), torch.ones(1))
NO_METRIC = "expected a Mean, Max or Min"
BAD_REPORTS = [
    ([{"a": ONE}, {"b": ONE}], r"microbatch 1 reports \['b'\] and the first \['a'\]"),
    ([{"a": ONE}, {"a": GREATEST}], "'a' is Mean and Max in different microbatches"),
    ([{"a": Mean(torch.ones(3), torch.ones(3))}], f"{NO_METRIC} of scalars"),
    ([{"a": torch.tensor(1.0)}], rf"'a' is tensor\(1.\); {NO_METRIC}"),
    ([{"a": Mean(1.0, 2.0)}], NO_METRIC),
    (None, "NoneType; expected a list of mappings"),
    *((bad, "expected a mapping") for bad in ({"a": ONE}, [None], [{1: ONE}], [ONE])),
]


@pytest.mark.parametrize("reports, text", BAD_REPORTS, ids=[text for _, text in BAD_REPORTS])
def test_reports_that_differ_or_are_none_are_refused(reports, text):
    with pytest.raises(ReportError, match=text):
        reduce_reports(reports, None)


@pytest.mark.parametrize("metric", [Mean, Max, Min])
def test_a_metric_is_of_two_real_tensors_of_one_shape(metric):
    assert reduce_reports([], None) == {}
    with pytest.raises(ReportError, match=r"values \(2,\) under a mask \(2, 2\)"):
        metric.of(torch.ones(2), torch.ones(2, 2))
    with pytest.raises(ReportError, match="a metric of list and Tensor; expected two tensors"):
        metric.of([1.0], torch.ones(1))
    with pytest.raises(ReportError, match=r"of torch.complex64 and torch.float32; expected"):
        metric.of(torch.ones(2, dtype=torch.complex64), torch.ones(2))
