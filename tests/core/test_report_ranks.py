"""Metrics over processes: exact, in few collectives, and no rank waits for a bad one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg.errors import PeerError, ReportError
from megatron_loss_agg.report import METRICS_A_ROW, Max, Mean, Min, reduce_reports
from tests.core.operations import Operations
from tests.distributed import run_ranks

F64 = torch.float64


NUMBERS = [0, 1, METRICS_A_ROW, METRICS_A_ROW + 1, 3 * METRICS_A_ROW]


def reduced_on_every_rank() -> list[tuple[dict[str, float], int]]:
    """Two microbatches a rank, of all kinds; then one of each of NUMBERS of metrics."""
    rank = dist.get_rank()
    steps: list[Any] = [
        [
            {
                "loss": Mean.of(torch.full((n,), 1.0 + 3 * rank), torch.ones(n)),
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
    # loss: rank 0 has 1 + 1 tokens of 1, rank 1 has 1 + 3 of 4: (2 + 16) / 6 = 3.
    # pair: (0 + 0 + 1 + 1) / 20. max: 10 + 3. min: 0 + 1.
    expected = {"loss": 3.0, "pair": 0.1, "never": 0.0, "max": 13.0, "min": 1.0}
    for (answer, collectives), *of_numbers in run_ranks(reduced_on_every_rank, 2):
        assert answer == pytest.approx(expected)
        assert collectives == 1
        for number, (answer, collectives) in zip(NUMBERS, of_numbers, strict=True):
            assert answer == {f"{i:03}": i + 2**24 + 1 for i in range(number)}
            assert collectives == 1 + (number > METRICS_A_ROW)


def two(name: str = "a", kind: Any = Mean) -> Any:
    return {"loss": kind.of(torch.ones(1), torch.ones(1)), name: torch.tensor([1.0, 1.0])}


def one_of_them_fails() -> Any:
    yield two()
    raise KeyError("of the loader")


DIFFERENT = {
    "as the others, in another order": lambda: [dict(reversed(two().items()))],
    "as the others, in more microbatches": lambda: [two()] * 2,
    "nothing": list,
    "empty": lambda: [{}],
    "one metric less": lambda: [{"a": two()["a"]}],
    "a name": lambda: [two("b")],
    "a kind": lambda: [two("a", Max)],
    "a row more": lambda: [two() | {f"more {i}": two()["a"] for i in range(METRICS_A_ROW)}],
}
BAD = {
    "no list": lambda: None,
    "one report": two,
    "no report": lambda: [None],
    "no metric": lambda: [{"loss": torch.ones(()), "a": torch.ones(2)}],
    "a mean of vectors": lambda: [{"loss": Mean(torch.ones(3), torch.ones(3))}],
    "a mean of numbers": lambda: [{"loss": Mean(1.0, 2.0)}],
    "another name later": lambda: [two(), two("b")],
    "another kind later": lambda: [two(), two("a", Max)],
    "an error of its own": one_of_them_fails,
}


def reduce_with_defects(where: int) -> dict[str, tuple[str, Any]]:
    """For each defect what this rank sees when rank ``where`` has it."""
    answers: dict[str, tuple[str, Any]] = {}
    for defect, reports in (DIFFERENT | BAD).items():
        mine = reports() if dist.get_rank() == where else [two()]
        try:
            answers[defect] = "", reduce_reports(mine, dist.group.WORLD)
        except (KeyError, PeerError, ReportError) as error:
            answers[defect] = type(error).__name__, str(error)
    return answers


def test_no_rank_waits_for_one_whose_reports_are_bad_or_missing():
    ranks, where = 3, 1
    for rank, answers in enumerate(run_ranks(reduce_with_defects, ranks, where, timeout=60.0)):
        others = [0, 2] if rank == where else [where]
        for defect in DIFFERENT:
            name, said = answers.pop(defect)
            if defect.startswith("as the others"):
                assert (name, said) == ("", {"a": 1.0, "loss": 1.0}), defect
                continue
            assert name == "ReportError", defect
            assert f", and rank(s) {others} of the group other metrics; expected the same" in said
            if rank != where:
                assert said.startswith("this rank reports Mean 'a', Mean 'loss', and"), defect
            elif defect in ("nothing", "empty"):
                assert said.startswith("this rank reports nothing, and"), defect
        for defect in BAD:
            name, said = answers.pop(defect)
            if rank == where:
                own = "KeyError" if defect == "an error of its own" else "ReportError"
                assert name == own, defect
            else:
                assert name == "PeerError", defect
                assert "bad metrics on rank(s) [1] of the group" in said
        assert not answers
