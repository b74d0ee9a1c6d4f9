"""Metrics: exact over microbatches and ranks, and no rank waits for a bad one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg.errors import PeerError, ReportError
from megatron_loss_agg.report import Max, Mean, Min, Sum, reduce_reports
from tests.core.meaning import F64
from tests.core.operations import Operations
from tests.distributed import run_ranks


def test_a_mean_of_masked_values():
    # (1 * 2 + 0.5 * 8) / (1 + 0.5) = 4; the NaN lies under mask 0.
    mean = Mean.of(torch.tensor([2.0, math.nan, 8.0]), torch.tensor([1.0, 0.0, 0.5]))
    assert mean.value().item() == 4
    assert mean.pair().tolist() == [6.0, 1.5]
    assert Mean.of(torch.tensor([math.inf]), torch.zeros(1)).value().item() == 0
    assert Mean.of(torch.empty(0), torch.empty(0)).value().item() == 0
    # 4099 tokens are beyond what bf16 counts one by one (256).
    values = torch.ones(4099, dtype=torch.bfloat16, requires_grad=True)
    many = Mean.of(values, torch.ones_like(values))
    assert many.pair().tolist() == [4099, 4099] and not many.sum.requires_grad
    assert Mean.of(torch.ones(1), torch.tensor([1 + 1e-9], dtype=F64)).count.item() == 1 + 1e-9


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_add_up_exactly(dtype):
    # 2**24 + 1 is the first integer that fp32 rounds, to 2**24.
    n = 2**24 + 1
    lengths, ones = torch.tensor([n, 0], dtype=dtype), torch.ones(2)
    for values, weights in ((lengths, ones), (lengths, ones.int()), (lengths, ones.bool())):
        assert Mean.of(values, weights).pair().tolist() == [n, 2]
    for values in (ones, ones.bool()):
        assert Mean.of(values, lengths).pair().tolist() == [n, n]
    metrics = {"sum": Mean.of(lengths, ones), "max": Max.of(lengths, ones)}
    metrics |= {"min": Min.of(lengths[:1], ones[:1]), "by hand": Mean(torch.tensor(n), ones[:1])}
    expected = {"sum": n / 2, "max": n, "min": n, "by hand": n}
    assert reduce_reports([metrics] * 2, None) == expected


@pytest.mark.parametrize("mask", [torch.float32, torch.bfloat16, torch.bool])
def test_losses_are_not_copied_to_fp64(mask):
    for values in (torch.float32, torch.bfloat16):
        with Operations() as made:
            Mean.of(torch.ones(8, dtype=values), torch.ones(8, dtype=mask))
        assert F64 not in made.dtypes


def test_extremes_look_at_active_positions_alone():
    values, mask = torch.tensor([math.nan, -3.0, 5.0, 9.0]), torch.tensor([0.0, 1.0, 0.5, 0.0])
    for metric, extreme, nothing in ((Max, 5, -math.inf), (Min, -3, math.inf)):
        assert metric.of(values, mask).value().item() == extreme
        for unseen in (values, values[:0]):
            assert metric.of(unseen, torch.zeros_like(unseen)).value().item() == nothing
        assert math.isnan(metric.of(values, torch.ones(4)).value())
    assert math.isnan(reduce_reports([{"a": torch.tensor([5.0, math.nan])}], None)["a"])


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


def two(name: str = "a", kind: Any = Mean) -> Any:
    one = kind.of(torch.ones(1), torch.ones(1))
    return {"loss": one, name: torch.tensor([1.0, 1.0])}


def one_of_them_fails() -> Any:
    yield two()
    raise SystemExit("of the loader")


SAME: dict[str, Callable[[], Any]] = {
    "in another order": lambda: [dict(reversed(two().items()))],
    "in more microbatches": lambda: [two()] * 2,
}
OTHERS = "and another rank of the group other metrics; expected the same"
# What one rank reports, and what it hears; the others hear of other metrics, or of that rank.
DIFFERENT: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: [{}], f"^ReportError: this rank reports nothing, {OTHERS}"),
    "a name": (lambda: [two("b")], OTHERS),
    "a kind": (lambda: [two("a", Max)], OTHERS),
    "a row more": (lambda: [two() | {f"more {i}": two()["a"] for i in range(32)}], OTHERS),
    "some microbatches": (lambda: [two(), {}], "^ReportError: .*in 1 of 2 microbatches"),
    "no metric": (lambda: [{"a": 1.0}], "^ReportError: .*expected a Mean, Sum, Max or Min"),
    "an error of its own": (one_of_them_fails, "^SystemExit: of the loader"),
}


def reduce_with_defects(where: int) -> dict[str, Any]:
    """What this rank sees when rank ``where`` reports otherwise."""
    seen: dict[str, Any] = {}
    made = SAME | {name: of for name, (of, _) in DIFFERENT.items()}
    for name, reports in made.items():
        mine = reports() if dist.get_rank() == where else [two()]
        try:
            seen[name] = reduce_reports(mine, dist.group.WORLD)
        except (SystemExit, PeerError, ReportError) as error:
            seen[name] = f"{type(error).__name__}: {error}"
    return seen


def test_no_rank_waits_for_one_whose_reports_are_bad_or_missing():
    for rank, seen in enumerate(run_ranks(reduce_with_defects, 3, 1, timeout=60.0)):
        for name in SAME:
            assert seen.pop(name) == {"a": 1.0, "loss": 1.0}
        for name, said in seen.items():
            own = expected = DIFFERENT[name][1]
            if rank != 1:
                of_peer = r"^PeerError: bad metrics on rank\(s\) \[1\] of the group"
                here = f"^ReportError: this rank reports Mean 'a', Mean 'loss', {OTHERS}"
                expected = here if OTHERS in own else of_peer
            assert re.search(expected, said), (rank, name, said)
