"""The script that gathers evidence on a GPU, as far as a CPU can try it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import page, runner
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.results import CannotRun, Results, counted, estimate, verdict_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What the script printed and wrote, without the part that runs pytest."""
    out = tmp_path_factory.mktemp("gpu")
    own = {"PYTHON": sys.executable, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    parts = [f"--only={name}" for name in PARTS if name != "tests"]
    command = ["bash", "benchmarks/gpu.sh", "--dry", "--out", str(out), *parts]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((out / "gpu.json").read_text()), out


@pytest.mark.host
def test_a_dry_run_says_that_it_is_one(dry_run):
    printed, results, out = dry_run
    assert results["dry_run"] is True
    assert printed.startswith(page.DRY) and page.DRY in (out / "gpu.md").read_text()


@pytest.mark.host
def test_every_part_runs_or_says_why_not(dry_run):
    _, results, _ = dry_run
    for name, part in results["parts"].items():
        assert not part["failed"], name
        assert part["figures"] or part["could_not_run"] or part["facts"], name
    figures = [figure for part in results["parts"].values() for figure in part["figures"]]
    assert {"hook's loss function", "step"} <= {figure["what"] for figure in figures}
    judged = [figure for figure in figures if figure["goal"] is not None]
    # Of one rank, of DP 2 and of CP 2: fp32 and bf16, packs and rows. A CPU's times have no goal.
    assert [figure["verdict"] for figure in judged] == ["met"] * 12


def fails(found: Results, seconds: float) -> None:
    found.add("a figure", "here", 1.0, "x")
    raise ValueError("what went wrong")


def dies(found: Results, seconds: float) -> None:
    found.add("a figure", "here", 1.0, "x")
    os._exit(7)


def hangs(found: Results, seconds: float) -> None:
    found.add("a figure", "here", 1.0, "x")
    time.sleep(600)


def one_of_two_dies(found: Results, seconds: float) -> None:
    if os.environ["RANK"] == "1":
        while not found.path.with_name("tried.json").exists():
            time.sleep(0.05)
        os._exit(7)
    found.add("a figure", "here", 1.0, "x")
    time.sleep(600)


def lacks(found: Results, seconds: float) -> None:
    found.add("a figure", "here", 1.0, "x")
    raise CannotRun("needs more")


def lacks_a_module(found: Results, seconds: float) -> None:
    found.add("a figure", "here", 1.0, "x")
    importlib.import_module("no_such_module")


@pytest.mark.parametrize(
    "function, kind, reason",
    [
        ("fails", "failed", "ValueError: what went wrong"),
        ("dies", "failed", "its processes ended with [7]"),
        ("hangs", "failed", "still running after 15 s, and was killed"),
        ("one_of_two_dies", "failed", "its processes ended with [None, 7]"),
        ("lacks", "could_not_run", "needs more"),
        ("lacks_a_module", "could_not_run", "No module named 'no_such_module'"),
    ],
)
def test_a_part_keeps_what_it_found_whatever_becomes_of_it(function, kind, reason, tmp_path):
    part = Part(f"{__name__}:{function}", 60, ranks=2 if "two" in function else 1)
    found = runner.run("tried", part, True, 15.0 if function == "hangs" else 60.0, tmp_path)
    assert [figure["what"] for figure in found["figures"]] == ["a figure"]
    (row,) = found[kind]
    assert row["reason"].startswith(reason)
    counts = counted([found])
    assert counts["failed"] + counts["could_not_run"] == 1


@pytest.mark.parametrize(
    "value, noise, verdict",
    [
        (1.003, 0.001, "met"),
        (1.003, 0.004, "undecided"),
        (1.006, 0.004, "undecided"),
        (1.006, 0.0, "missed"),
    ],
)
def test_a_goal_within_the_noise_is_undecided(value, noise, verdict):
    assert verdict_of(value, 1.005, noise) == verdict


def test_the_noise_is_twice_the_standard_error_of_the_median():
    # Median 3, absolute deviations 2, 1, 0, 1, 2, whose median is 1: 2 * 1.2533 * 1.4826 / sqrt(5).
    assert estimate([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3.0, 1.66197), rel=1e-4)


@pytest.mark.parametrize(
    "dry, whole, in_docs", [(False, True, 1), (True, True, 0), (False, False, 0)]
)
def test_only_a_whole_run_on_a_gpu_writes_the_page_of_the_docs(dry, whole, in_docs, tmp_path):
    assert page.paths(tmp_path, dry, whole).count(page.PAGE) == in_docs


def test_the_page_keeps_its_head_and_gets_the_results(tmp_path):
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
