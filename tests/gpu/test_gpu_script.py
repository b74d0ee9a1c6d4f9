"""The script that gathers evidence on a GPU, as far as a CPU can try it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import evidence, page, runner
from benchmarks.gpu.evidence import Evidence, Measured, estimate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What the script printed and wrote, without the part that runs pytest."""
    out = tmp_path_factory.mktemp("gpu")
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONWARNINGS": "ignore",
    }
    parts = [f"--only={name}" for name in runner.PARTS if name != "tests"]
    command = ["bash", "benchmarks/gpu.sh", "--dry", "--out", str(out), *parts]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
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
    steps = {figure["what"] for figure in figures if figure["what"].startswith("step, ")}
    assert {"step, token_mean", "step, prompt_mean", "step, policy + KL"} <= steps
    judged = [figure for figure in figures if figure["goal"] is not None]
    # Of one rank, of DP 2 and of CP 2: fp32 and bf16, packs and rows. A CPU's times have no goal.
    assert [figure["verdict"] for figure in judged] == ["met"] * 12


def fails(found: Evidence, dry: bool, seconds: float, folder: Path) -> None:
    found.add("a figure", "here", 1.0, "x")
    raise ValueError("what went wrong")


def dies(found: Evidence, dry: bool, seconds: float, folder: Path) -> None:
    found.add("a figure", "here", 1.0, "x")
    os._exit(7)


def hangs(found: Evidence, dry: bool, seconds: float, folder: Path) -> None:
    found.add("a figure", "here", 1.0, "x")
    time.sleep(600)


def lacks(found: Evidence, dry: bool, seconds: float, folder: Path) -> None:
    found.add("a figure", "here", 1.0, "x")
    raise evidence.CannotRun("needs 2 GPUs")


@pytest.mark.parametrize(
    "function, kind, reason",
    [
        ("fails", "failed", "ValueError: what went wrong"),
        ("dies", "failed", "its process ended with 7"),
        ("hangs", "failed", "still running after 4 s, and was killed"),
        ("lacks", "could_not_run", "needs 2 GPUs"),
    ],
)
def test_a_part_keeps_what_it_found_whatever_becomes_of_it(
    function, kind, reason, tmp_path, monkeypatch
):
    monkeypatch.setitem(runner.PARTS, "tried", runner.Part(__name__, function, 60, ()))
    monkeypatch.setattr(runner, "LEAST", 1.0)
    found = runner.run("tried", True, 4.0 if function == "hangs" else 60.0, tmp_path)
    assert [figure["what"] for figure in found["figures"]] == ["a figure"]
    assert [row["reason"].partition(";")[0] for row in found[kind]] == [reason]
    counts = page.count({"tried": found})
    assert counts["failed"] + counts["could_not_run"] == 1


def test_a_part_without_its_modules_names_them(tmp_path, monkeypatch):
    part = runner.Part(__name__, "fails", 60, ("no_such_module",))
    monkeypatch.setitem(runner.PARTS, "tried", part)
    found = runner.run("tried", True, 30.0, tmp_path)
    (row,) = found["could_not_run"]
    assert "cannot import no_such_module" in row["reason"] and not found["failed"]


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
    assert Measured("step", "here", value, "x", 1.005, noise=noise).verdict == verdict


def test_the_noise_is_twice_the_standard_error_of_the_median():
    # Median 3, absolute deviations 2, 1, 0, 1, 2, whose median is 1: 2 * 1.2533 * 1.4826 / sqrt(5).
    assert estimate([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3.0, 1.66197), rel=1e-4)


@pytest.mark.parametrize(
    "dry, whole, in_docs", [(False, True, 1), (True, True, 0), (False, False, 0)]
)
def test_only_a_whole_run_on_a_gpu_writes_the_page_of_the_docs(dry, whole, in_docs, tmp_path):
    assert page.paths(tmp_path, dry, whole).count(page.PAGE) == in_docs


def test_the_page_keeps_its_head_and_gets_the_results(tmp_path):
    found = Evidence(tmp_path / "part.json", dry=False)
    found.fact("GPU 0", "a chip | with a bar")
    found.add("step", "here", 1.001, "x stock", "gpu_step", 0.0002)
    found.add("waits", "here", 3, "a step", "gpu_waits")
    found.add("not a number", "here", float("nan"), "x")
    found.could_not_run("ranks", "needs 2 GPUs; found 1")
    part = {**json.loads((tmp_path / "part.json").read_text()), "seconds": 1.0}
    page.write(tmp_path / "gpu.md", {"part": part}, dry=False)
    text = (tmp_path / "gpu.md").read_text()
    assert text.startswith(page.PAGE.read_text().partition(page.RESULTS)[0])
    assert "No figures yet" not in text and "a chip \\| with a bar" in text
    assert "1.001 ± 0.0002 x stock | at most 1.005 | met |" in text
    assert "3 a step | at most 0 | missed |" in text
    assert "1 met, 1 missed, 0 undecided within the noise. 1 failed, 1 could not run" in text
