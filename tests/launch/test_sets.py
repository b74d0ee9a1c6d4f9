"""Numbers of several data sets in Megatron's real ``pretrain``: in its log and in TensorBoard.

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
from torch import Tensor

from tests.launch.processes import LENGTH, SETS_FLAGS, SETS_SCRIPT, run, tensorboard

pytestmark = pytest.mark.host

SIZES = (6, 10)  # rows of each validation set; one row of the first has no active token
STEPS, N_MB = 6, 2
Row = tuple[bool, int, int, Tensor, Tensor]


def launched(
    folder: Path, ranks: int, *flags: str, patch: pytest.MonkeyPatch
) -> tuple[list[list[Row]], str]:
    """What each rank's loss function got, and what was said."""
    patch.setenv("SEEN", str(folder / "seen"))
    codes, said = run(folder, SETS_SCRIPT, *SETS_FLAGS.split(), *flags, ranks=ranks)
    assert codes == [0] * ranks, said[-3000:]
    return [torch.load(folder / f"seen.{rank}") for rank in range(ranks)], said


def means(rows: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Over tokens, and over rows with tokens, of pairs (sum, number of tokens)."""
    sums, counts = zip(*rows, strict=True)
    quotients = [s / n for s, n in zip(sums, counts, strict=True) if n]
    return sum(sums) / sum(counts), sum(quotients) / len(quotients)


def pair(mask: Tensor, losses: Tensor) -> tuple[float, float]:
    return float((mask.double() * losses.double()).sum()), float(mask.sum())


CP2 = ("--context-parallel-size", "2")
# Iterations of an evaluation have different numbers of tokens, and must weigh as much.
VALIDATIONS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "data-parallel": (2, "sample_mean", ("--loss-aggregation-empty", "skip")),
    "context-parallel": (2, "token_mean", CP2),
    "quotients": (1, "token_mean", ("--sft",)),
}


@pytest.mark.parametrize("name", VALIDATIONS)
def test_each_validation_set_is_reduced_over_all_of_its_tokens_or_samples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, mode, flags = VALIDATIONS[name]
    run_flags = ["--global-batch-size", "2", "--train-iters", "1", "--lr", "0.1", "--skip-train"]
    run_flags += ["--multiple-validation-sets", "--full-validation", "--loss-aggregation", mode]
    ranks, said = launched(tmp_path, number, *run_flags, *flags, patch=monkeypatch)
    # By place, since a set is gone through as often as there are microbatches.
    parts = {(s, row, i): x for i, rank in enumerate(ranks) for _, s, row, *x in rank}
    for dataset, size in enumerate(SIZES):
        rows = []
        for row in range(size):
            of_row = [x for place, x in parts.items() if place[:2] == (dataset, row)]
            mask, losses = (torch.cat(x) for x in zip(*of_row, strict=True))
            assert len(mask) == LENGTH
            rows.append(pair(mask, losses))
        assert rows.count((0.0, 0.0)) == (dataset == 0)
        tokens, samples = means(rows)
        assert abs(tokens - samples) > 1e-3 * tokens  # the masks tell the means apart
        (line,) = re.findall(f"validation-{dataset} loss at .*", said)
        logged = [float(re.findall(f"{key} loss value: (\\S+)", line)[0]) for key in ("lm", mode)]
        expected = [tokens, tokens if mode == "token_mean" else samples]
        assert logged == pytest.approx(expected, rel=2e-6)


def by_dataset(rows: Iterable[Row]) -> dict[str, float]:
    """The means over tokens and over rows of each data set that has tokens."""
    found: dict[int, list[tuple[float, float]]] = {}
    for _, dataset, _, mask, losses in rows:
        found.setdefault(dataset, []).append(pair(mask, losses))
    values = {}
    for dataset, of_rows in found.items():
        if any(count for _, count in of_rows):
            names = [f"{key} loss of dataset {dataset}" for key in ("lm", "sample_mean")]
            values |= dict(zip(names, means(of_rows), strict=True))
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


def printed(line: str, suffix: str) -> dict[str, float]:
    found = re.findall(rf"(\w+ loss of dataset \d+){suffix}: (\S+)", line)
    return {key: float(value) for key, value in found}


BLEND = f"""
    --global-batch-size 4 --train-iters {STEPS} --lr 0.1 --lr-decay-style constant
    --eval-interval {STEPS} --eval-iters 2 --log-interval 2 --tensorboard-log-interval 1 --blend
    --loss-aggregation sample_mean --loss-aggregation-report-datasets
""".split()


def test_log_tensorboard_and_evaluation_have_each_data_set_of_a_blend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board_flags = ("--tensorboard-dir", str(tmp_path / "board"))
    ranks, said = launched(tmp_path, 2, *BLEND, *board_flags, patch=monkeypatch)
    trained = [[row for row in rank if row[0]] for rank in ranks]
    assert len(trained[0]) == STEPS * N_MB
    starts = range(0, STEPS * N_MB, N_MB)
    wanted = expected_steps([[x for rank in trained for x in rank[i : i + N_MB]] for i in starts])
    names = {key for step in wanted for key in step}
    missing = sum(math.isnan(value) for step in wanted for value in step.values())
    assert len(names) == 6 and missing > 4  # some sets are not in every step
    close: Any = {"rel": 2e-6, "nan_ok": True}
    board = tensorboard(tmp_path / "board")
    for number, step in enumerate(wanted, start=1):
        got = {key: board[key][number] for key in names if number in board.get(key, {})}
        assert got == pytest.approx(step, **close)
    lines = re.findall(r"iteration +\d*[02468]/.*", said)  # the first step is logged, too
    for line, first, second in zip(lines, wanted[::2], wanted[1::2], strict=True):
        both = {k: (first.get(k, math.nan) + second[k]) / 2 for k in second}
        both = {k: mean for k, mean in both.items() if not math.isnan(mean)}
        assert printed(line, "") == pytest.approx(both, rel=2e-6)
    # The first evaluation, of two iterations.
    of_rows = by_dataset(x for rank in ranks for x in [y for y in rank if not y[0]][: 2 * N_MB])
    (line, *_) = re.findall(r"validation loss at .*", said)
    assert printed(line, " value") == pytest.approx(of_rows, rel=2e-6)
    logged = {key: board[f"{key} validation"][STEPS] for key in of_rows}
    assert logged == pytest.approx(of_rows, rel=2e-6)
