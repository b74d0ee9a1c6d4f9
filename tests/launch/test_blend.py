"""Reports by data set in Megatron's real ``pretrain`` on a real blend: log and TensorBoard.

The expected numbers are made from the losses that the script's loss function got.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import processes
from tests.launch.test_validation_sets import SCRIPT, SHARED

pytestmark = pytest.mark.host

STEPS, N_MB = 6, 2
FLAGS = f"""
    {SHARED} --global-batch-size 4 --train-iters {STEPS} --lr 0.1 --lr-decay-style constant
    --eval-interval {STEPS} --eval-iters 2 --log-interval 2 --tensorboard-log-interval 1 --blend
    --loss-aggregation sample_mean --loss-aggregation-report-datasets
""".split()
Row = tuple[bool, int, int, torch.Tensor, torch.Tensor]


def by_dataset(rows: Iterable[Row]) -> dict[str, float]:
    """The means over tokens and over rows of each data set that has tokens."""
    found: dict[int, list[tuple[float, float]]] = {}
    for _, dataset, _, mask, losses in rows:
        sums = float((mask.double() * losses.double()).sum()), float(mask.sum())
        found.setdefault(dataset, []).append(sums)
    values = {}
    for dataset, of_rows in found.items():
        means = [total / count for total, count in of_rows if count]
        if means:
            total, count = map(sum, zip(*of_rows, strict=True))
            values[f"lm loss of dataset {dataset}"] = total / count
            values[f"sample_mean loss of dataset {dataset}"] = sum(means) / len(means)
    return values


def expected_steps(steps: list[list[Row]]) -> list[dict[str, float]]:
    """Of every step; NaN where a data set is missing, or new after the first step."""
    seen: set[str] = set()
    values = []
    for step in map(by_dataset, steps):
        new = step.keys() - seen if seen else set()
        values.append({k: math.nan if k in new else step.get(k, math.nan) for k in seen | {*step}})
        seen |= step.keys()
    return values


def tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {  # the first of a step: the last step is evaluated again after the training
        tag: {event.step: event.value for event in reversed(events.Scalars(tag))}
        for tag in events.Tags()["scalars"]
    }


def printed(line: str, suffix: str) -> dict[str, float]:
    found = re.findall(rf"(\w+ loss of dataset \d+){suffix}: (\S+)", line)
    return {key: float(value) for key, value in found}


def test_log_tensorboard_and_evaluation_have_each_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    flags = (*FLAGS, "--tensorboard-dir", str(tmp_path / "board"))
    codes, said = processes.run(tmp_path, SCRIPT, *flags, ranks=2)
    assert codes == [0, 0], said[-3000:]
    ranks = [torch.load(tmp_path / f"seen.{rank}") for rank in range(2)]
    trained = [[row for row in rank if row[0]] for rank in ranks]
    steps = [
        [row for rank in trained for row in rank[i : i + N_MB]]
        for i in range(0, STEPS * N_MB, N_MB)
    ]
    assert steps[-1] and len(trained[0]) == STEPS * N_MB
    wanted = expected_steps(steps)
    names = {key for step in wanted for key in step}
    missing = sum(math.isnan(value) for step in wanted for value in step.values())
    assert len(names) == 6 and missing > 4  # some sets are not in every step
    close: Any = {"rel": 2e-6, "nan_ok": True}
    board = tensorboard(tmp_path / "board")
    for number, step in enumerate(wanted, start=1):
        got = {key: board[key][number] for key in names if number in board.get(key, {})}
        assert got == pytest.approx(step, **close)
    lines = re.findall(r"iteration +\d*[02468]/.*", said)  # the first step is logged, too
    assert len(lines) == STEPS // 2
    for line, first, second in zip(lines, wanted[::2], wanted[1::2], strict=True):
        means = {k: (first.get(k, math.nan) + second[k]) / 2 for k in second}
        means = {k: mean for k, mean in means.items() if not math.isnan(mean)}
        assert printed(line, "") == pytest.approx(means, rel=2e-6)
    # The first evaluation, of two iterations.
    rows = [row for rank in ranks for row in [x for x in rank if not x[0]][: 2 * N_MB]]
    (line, *_) = re.findall(r"validation loss at .*", said)
    assert printed(line, " value") == pytest.approx(by_dataset(rows), rel=2e-6)
    for key, value in by_dataset(rows).items():
        assert board[f"{key} validation"][STEPS] == pytest.approx(value, rel=2e-6)
