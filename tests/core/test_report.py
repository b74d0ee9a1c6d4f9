"""Metrics: exact over microbatches and ranks, and no rank waits for a bad one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan
from megatron_loss_agg.errors import PeerError, ReportError
from megatron_loss_agg.report import Max, Mean, Min, Sum, reduce_reports
from tests.core.operations import Operations
from tests.distributed import run_ranks

F64 = torch.float64


def test_a_mean_of_masked_values():
    # (1 * 2 + 0.5 * 8) / (1 + 0.5) = 4; the NaN lies under mask 0.
    mean = Mean.of(torch.tensor([2.0, math.nan, 8.0]), torch.tensor([1.0, 0.0, 0.5]))
    assert mean.value().item() == 4
    assert mean.pair().tolist() == [6.0, 1.5]
    assert Mean.of(torch.tensor([math.inf]), torch.zeros(1)).value().item() == 0
    assert Mean.of(torch.empty(0), torch.empty(0)).value().item() == 0


def test_a_mean_keeps_the_precision_of_its_weights():
    flags = Mean.of(torch.tensor([True, False, True]), torch.tensor([1, 1, 0]))
    assert flags.value().item() == 0.5
    assert Mean.of(torch.ones(1), torch.tensor([1 + 1e-9], dtype=F64)).count.item() == 1 + 1e-9


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_add_up_exactly(dtype):
    # 2**24 + 1 is the first integer that fp32 rounds, to 2**24.
    n = 2**24 + 1
    lengths, ones = torch.tensor([n, 0], dtype=dtype), torch.ones(2)
    for weights in (ones, ones.int(), ones.bool()):
        assert Mean.of(lengths, weights).pair().tolist() == [n, 2]
    assert Mean.of(ones, lengths).pair().tolist() == [n, n]
    assert Mean.of(torch.tensor([True, False]), lengths).pair().tolist() == [n, n]
    assert Max.of(lengths, ones).value().item() == n
    assert Min.of(lengths[:1], ones[:1]).value().item() == n
    metrics = {"sum": Mean.of(lengths, ones), "max": Max.of(lengths, ones)}
    assert reduce_reports([metrics] * 2, None) == {"sum": n / 2, "max": n}
    # So do metrics made by hand.
    one, many = torch.ones(()), torch.tensor(2.0**24)
    reports = [{"a": Mean(many, one)}, {"a": Mean(one.view(1), one)}]
    assert reduce_reports(reports, None) == {"a": (2**24 + 1) / 2}


@pytest.mark.parametrize("mask", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
def test_losses_are_not_copied_to_fp64(values, mask):
    with Operations() as made:
        Mean.of(torch.ones(8, dtype=values), torch.ones(8, dtype=mask))
    assert F64 not in made.dtypes


def test_a_mean_in_the_weights_of_a_plan_is_that_aggregation():
    # Rewards 1, 0, 1 of prompts 7, 7, 9: ((1 + 0) / 2 + 1) / 2 = 0.75, and not 2 / 3.
    one_each = Microbatch(torch.ones(3, 1), prompt_ids=torch.tensor([7, 7, 9]))
    plan = StepPlan.build(LossAggregation(mode="prompt_mean"), [one_each])
    rewards = torch.tensor([[1.0], [0.0], [1.0]])
    assert Mean.of(rewards, plan.weights(0, F64)).value().item() == 0.75


def test_no_gradient_and_no_rounding():
    # 4099 tokens are beyond what bf16 counts one by one (256).
    values = torch.ones(4099, dtype=torch.bfloat16, requires_grad=True)
    many = Mean.of(values, torch.ones_like(values))
    assert many.pair().tolist() == [4099, 4099] and not many.sum.requires_grad


def test_extremes_look_at_active_positions_alone():
    values, mask = torch.tensor([math.nan, -3.0, 5.0, 9.0]), torch.tensor([0.0, 1.0, 0.5, 0.0])
    for metric, extreme, nothing in ((Max, 5, -math.inf), (Min, -3, math.inf)):
        assert metric.of(values, mask).value().item() == extreme
        for unseen in (values, values[:0]):
            assert metric.of(unseen, torch.zeros_like(unseen)).value().item() == nothing
        assert math.isnan(metric.of(values, torch.ones(4)).value())
    assert math.isnan(reduce_reports([{"a": torch.tensor([5.0, math.nan])}], None)["a"])


ONE, GREATEST = Mean.of(torch.ones(1), torch.ones(1)), Max.of(torch.ones(1), torch.ones(1))
NO_METRIC = "expected a Mean, Sum, Max or Min"
BAD_REPORTS = [
    ([{"a": ONE}, {"b": ONE}], "'a' is a Mean in 1 of 2 microbatches"),
    ([{"a": ONE}, {"a": GREATEST}], "'a' is a Max or Mean in 2 of 2 microbatches"),
    ([{"a": Mean(torch.ones(3), torch.ones(3))}], f"{NO_METRIC} of scalars"),
    ([{"a": torch.tensor(1.0)}], rf"'a' is tensor\(1.\); {NO_METRIC}"),
    ([{"a": Mean(1.0, 2.0)}], NO_METRIC),
]


@pytest.mark.parametrize("reports, text", BAD_REPORTS, ids=[text for _, text in BAD_REPORTS])
def test_reports_that_differ_or_are_none_are_refused(reports, text):
    with pytest.raises(ReportError, match=text):
        reduce_reports(reports, None)


@pytest.mark.parametrize("metric", [Mean, Sum, Max, Min])
def test_a_metric_is_of_two_real_tensors_of_one_shape(metric):
    assert reduce_reports([], None) == {}
    with pytest.raises(ReportError, match=r"has shape \(2, 2\) and values \(2,\); expected"):
        metric.of(torch.ones(2), torch.ones(2, 2))
    with pytest.raises(ReportError, match="values is a list; expected a real, dense tensor"):
        metric.of([1.0], torch.ones(1))
    with pytest.raises(ReportError, match=r"values is a torch\.complex64 .*; expected a real"):
        metric.of(torch.ones(2, dtype=torch.complex64), torch.ones(2))


NUMBERS = [0, 1, 100]


def reduced_on_every_rank() -> list[tuple[dict[str, float], int]]:
    """Two microbatches a rank, of all kinds; then one of each of NUMBERS of metrics."""
    rank = dist.get_rank()
    steps: list[Any] = [
        [
            {
                "loss": Mean.of(torch.full((n,), 1.0 + 3 * rank), torch.ones(n)),
                "sum": Sum.of(torch.full((n,), 1.0 + 3 * rank), torch.full((n,), 0.5)),
                "pair": torch.tensor([float(rank), 5.0]),
                "never": Mean(torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)),
                "max": Max.of(torch.tensor([10.0 * rank + n]), torch.ones(1)),
                "min": Min.of(torch.tensor([10.0 * rank + n]), torch.ones(1)),
            }
            for n in (1, 1 + 2 * rank)
        ]
    ]
    for number in NUMBERS:
        # Metric i is i on rank 0 and i + 2**24 + 1 on rank 1, which fp32 could not tell.
        values = torch.arange(number) + rank * (2**24 + 1)
        steps.append([{f"{i:03}": Max.of(x, torch.ones(())) for i, x in enumerate(values)}])
    answers = []
    for reports in steps:
        with Operations() as made:
            answer = reduce_reports(reports, dist.group.WORLD)
        answers.append((answer, len(made.collectives)))
    return answers


def test_every_metric_is_reduced_by_its_own_kind_and_count_in_two_collectives_at_most():
    # loss: rank 0 has 1 + 1 tokens of 1, rank 1 has 1 + 3 of 4: (2 + 16) / 6 = 3. sum: 18 / 2.
    # pair: (0 + 0 + 1 + 1) / 20. max: 10 + 3. min: 0 + 1.
    expected = {"loss": 3.0, "sum": 9.0, "pair": 0.1, "never": 0.0, "max": 13.0, "min": 1.0}
    for (answer, collectives), *of_numbers in run_ranks(reduced_on_every_rank, 2):
        assert answer == pytest.approx(expected)
        assert collectives == 2
        for number, (answer, collectives) in zip(NUMBERS, of_numbers, strict=True):
            assert answer == {f"{i:03}": i + 2**24 + 1 for i in range(number)}
            assert collectives == 1 + (number > 0)


def two(name: str = "a", loss: Any = ONE) -> Any:
    return {"loss": loss, name: torch.tensor([1.0, 1.0])}


def one_of_them_fails() -> Any:
    yield two()
    raise SystemExit("of the loader")


DIFFERENT = {
    "as the others, in another order": lambda: [dict(reversed(two().items()))],
    "as the others, in more microbatches": lambda: [two()] * 2,
    "nothing": list,
    "empty": lambda: [{}],
    "one metric less": lambda: [{"a": two()["a"]}],
    "a name": lambda: [two("b")],
    "a kind": lambda: [two("a", GREATEST)],
    "a row more": lambda: [two() | {f"more {i}": two()["a"] for i in range(32)}],
}


def reduce_with_defects(where: int) -> dict[str, tuple[str, Any]]:
    """For each defect what this rank sees when rank ``where`` has it."""
    answers: dict[str, tuple[str, Any]] = {}
    made = [(defect, of_defect()) for defect, of_defect in DIFFERENT.items()]
    made += [(str(reports), reports) for reports, _ in BAD_REPORTS]
    for defect, reports in [*made, ("an error of its own", one_of_them_fails())]:
        mine = reports if dist.get_rank() == where else [two()]
        try:
            answers[defect] = "", reduce_reports(mine, dist.group.WORLD)
        except (SystemExit, PeerError, ReportError) as error:
            answers[defect] = type(error).__name__, str(error)
    return answers


def test_no_rank_waits_for_one_whose_reports_are_bad_or_missing():
    ranks, where = 3, 1
    for rank, answers in enumerate(run_ranks(reduce_with_defects, ranks, where, timeout=60.0)):
        for defect in DIFFERENT:
            name, said = answers.pop(defect)
            if defect.startswith("as the others"):
                assert (name, said) == ("", {"a": 1.0, "loss": 1.0}), defect
                continue
            assert name == "ReportError", defect
            assert "and another rank of the group other metrics; expected the same" in said
            if rank != where:
                assert said.startswith("this rank reports Mean 'a', Mean 'loss', and"), defect
            elif defect in ("nothing", "empty"):
                assert said.startswith("this rank reports nothing, and"), defect
        assert len(answers) == len(BAD_REPORTS) + 1
        for defect, (name, said) in answers.items():
            own = "SystemExit" if defect == "an error of its own" else "ReportError"
            assert name == (own if rank == where else "PeerError"), defect
            assert rank == where or "bad metrics on rank(s) [1] of the group" in said
