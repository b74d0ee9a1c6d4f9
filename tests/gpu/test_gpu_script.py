"""The script that gathers evidence on a GPU, as far as a CPU can try it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import page, runner
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.results import CannotRun, Results, counted, estimate, verdict_of

ROOT = Path(__file__).parents[2]


@pytest.mark.host
def test_every_part_of_a_dry_run_runs_or_says_why_not_and_that_it_is_one(tmp_path: Path) -> None:
    own = {"PYTHON": sys.executable, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    parts = [f"--only={name}" for name in PARTS if name != "tests"]  # which runs pytest
    command = ["bash", "benchmarks/gpu.sh", "--dry", "--out", str(tmp_path), *parts]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["dry_run"] is True
    assert done.stdout.startswith(page.DRY) and page.DRY in (tmp_path / "gpu.md").read_text()
    for name, part in results["parts"].items():
        assert not part["failed"], name
        assert part["figures"] or part["could_not_run"] or part["facts"], name
    figures = [figure for part in results["parts"].values() for figure in part["figures"]]
    assert {"hook's loss function", "step"} <= {figure["what"] for figure in figures}
    judged = [figure for figure in figures if figure["goal"] is not None]
    # Of one rank, of DP 2 and of CP 2: fp32 and bf16, packs and rows. A CPU's times have no goal.
    assert [figure["verdict"] for figure in judged] == ["met"] * 12


def tried(found: Results, seconds: float) -> None:
    """A part that finds one figure and then ends as the environment says."""
    ending = os.environ["ENDING"]
    if os.environ["RANK"] == "1":
        while not found.path.with_name("tried.json").exists():
            time.sleep(0.05)
        os._exit(7)
    found.add("a figure", "here", 1.0, "x")
    if ending == "fails":
        raise ValueError("what went wrong")
    if ending == "dies":
        os._exit(7)
    if ending == "lacks":
        raise CannotRun("needs more")
    if ending == "lacks a module":
        importlib.import_module("no_such_module")
    time.sleep(600)


@pytest.mark.parametrize(
    "ending, kind, reason",
    [
        ("fails", "failed", "ValueError: what went wrong"),
        ("dies", "failed", "its processes ended with [7]"),
        ("hangs", "failed", "still running after 15 s, and was killed"),
        ("one of two dies", "failed", "its processes ended with [None, 7]"),
        ("lacks", "could_not_run", "needs more"),
        ("lacks a module", "could_not_run", "No module named 'no_such_module'"),
    ],
)
def test_a_part_keeps_what_it_found_whatever_becomes_of_it(
    ending: str, kind: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDING", ending)
    part = Part(f"{__name__}:tried", 60, ranks=2 if "two" in ending else 1)
    found = runner.run("tried", part, True, 15.0 if ending == "hangs" else 60.0, tmp_path)
    assert [figure["what"] for figure in found["figures"]] == ["a figure"]
    (row,) = found[kind]
    assert row["reason"].startswith(reason)
    counts = counted([found])
    assert counts["failed"] + counts["could_not_run"] == 1


def test_a_goal_within_the_noise_of_a_median_is_undecided() -> None:
    measured = [(1.003, 0.001), (1.003, 0.004), (1.006, 0.004), (1.006, 0.0)]
    verdicts = [verdict_of(value, 1.005, noise) for value, noise in measured]
    assert verdicts == ["met", "undecided", "undecided", "missed"]
    # Median 3, absolute deviations 2, 1, 0, 1, 2, whose median is 1: 2 * 1.2533 * 1.4826 / sqrt(5).
    assert estimate([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3.0, 1.66197), rel=1e-4)


def test_the_page_keeps_its_head_and_gets_the_results_of_a_whole_run(tmp_path: Path) -> None:
    kinds = [(False, True), (True, True), (False, False)]  # dry, whole
    assert [page.PAGE in page.paths(tmp_path, *kind) for kind in kinds] == [True, False, False]
    found = Results(tmp_path / "part.json")
    found.fact("GPU 0", "a chip | with a bar")
    found.add("step", "here", 1.001, "x stock", "gpu_step", 0.0002)
    found.add("waits", "here", 3, "a step", "gpu_waits")
    found.add("not a number", "here", float("nan"), "x")
    found.could_not_run("gradients of two ranks", "needs 2 GPUs; found 1")
    page.write(tmp_path / "gpu.md", {"part": found.rows}, dry=False)
    text = (tmp_path / "gpu.md").read_text()
    assert text.startswith(page.PAGE.read_text().partition(page.RESULTS)[0])
    assert "No figures yet" not in text and "a chip \\| with a bar" in text
    assert "1.001 ± 0.0002 x stock | at most 1.005 | met |" in text
    assert "3 a step | at most 1 | missed |" in text
    assert "1 met, 1 missed, 0 undecided within the noise. 1 failed, 1 could not run" in text
    assert json.loads((tmp_path / "part.json").read_text()) == found.rows
