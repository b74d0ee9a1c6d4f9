"""On a GPU: the values of the CPU, no wait, and capture in a CUDA graph.

And the script that gathers evidence on a GPU, as far as a CPU can try it.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import page, runner
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.results import CannotRun, Results, counted, estimate, verdict_of
from megatron_loss_agg import CPLayout, LossAggregation, Microbatch, StepPlan, weighted_sum

ROOT = Path(__file__).parents[2]
without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(test: Callable[..., None]) -> Any:
    return pytest.mark.gpu(without_gpu(test))


SAMPLES, LENGTH = 37, 24


def microbatch(layout: str, device: str) -> Microbatch:
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(SAMPLES, LENGTH, generator=generator) < 0.6).double()
    ids = {"prompt_ids": torch.arange(SAMPLES) // 3, "rollout_ids": torch.arange(SAMPLES) // 2}
    ids = {name: x.to(device) for name, x in ids.items()}
    if layout == "bshd":
        return Microbatch(mask.to(device), **ids)
    starts = (LENGTH * torch.arange(SAMPLES + 1, dtype=torch.int32)).to(device)
    mask[:, -4:] = 0  # padding between the samples
    real = (LENGTH - 4) * torch.arange(SAMPLES + 1, dtype=torch.int32).to(device)
    return Microbatch(mask.view(-1).to(device), real, cu_seqlens_padded=starts, **ids)


def loss_and_gradient(mode: str, layout: str, device: str) -> tuple[Any, Any]:
    """In fp64, with NaN wherever the mask is 0; computed twice, the second time without a wait."""
    whole = microbatch(layout, device)
    generator = torch.Generator().manual_seed(2)
    losses = torch.randn(whole.loss_mask.shape, generator=generator, dtype=torch.float64).to(device)
    losses = losses.masked_fill(whole.loss_mask == 0, math.nan).requires_grad_()
    plan = StepPlan.build(LossAggregation(mode=mode), [whole])
    for waiting in ("default", "error"):
        losses.grad = None
        torch.cuda.set_sync_debug_mode(waiting)
        total = weighted_sum(plan.weights(0, torch.float64), losses)
        total.backward()
        torch.cuda.set_sync_debug_mode("default")
    return total.detach().cpu(), losses.grad.cpu()


@on_gpu
@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("mode", ["token_mean", "rollout_mean", "prompt_mean", "microbatch_mean"])
def test_values_and_gradients_are_those_of_the_cpu_and_nobody_waits(mode: str, layout: str) -> None:
    expected, got = (loss_and_gradient(mode, layout, device) for device in ("cpu", "cuda"))
    for x, y in zip(expected, got, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-15)


@on_gpu
def test_the_sum_can_be_captured_in_a_graph() -> None:
    whole = microbatch("thd", "cuda")
    w = StepPlan.build(LossAggregation(mode="prompt_mean"), [whole]).weights(0)
    losses = torch.ones_like(w, requires_grad=True)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            losses.grad = None
            weighted_sum(w, losses).backward()
    torch.cuda.current_stream().wait_stream(side)
    losses.grad = None
    with torch.cuda.graph(graph):
        weighted_sum(w, losses).backward()
    losses.grad.zero_()
    graph.replay()
    torch.testing.assert_close(losses.grad, w)


@on_gpu
@pytest.mark.parametrize("size", [2, 4, 8])
def test_packs_are_split_as_transformer_engine_splits_them(size: int) -> None:
    tex = pytest.importorskip("transformer_engine_torch")
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        lengths = 2 * size * torch.randint(1, 9, (7,), generator=generator)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        for rank in range(size):
            given = offsets.cuda(), int(offsets[-1]), size, rank
            theirs = tex.thd_get_partitioned_indices(*given).cpu().long()
            assert torch.equal(theirs, CPLayout.thd(offsets, size, rank).index)


def tried(found: Results, seconds: float) -> None:
    """A part that finds one figure and then ends as its name says."""
    ending = found.path.name.partition(".")[0]
    if os.environ["RANK"] == "1":
        while not found.path.with_name(f"{ending}.json").exists():
            time.sleep(0.05)
        os._exit(7)
    found.add("a figure", "here", 1.0, "x")
    if ending == "fails":
        raise ValueError("what went wrong")
    if ending == "lacks":
        raise CannotRun("needs more")
    if ending == "lacks a module":
        importlib.import_module("no_such_module")
    time.sleep(600)


# Of each ending, where it is noted, and how.
ENDINGS = {
    "hangs": ("failed", "still running after 45 s, and was killed"),
    "fails": ("failed", "ValueError: what went wrong"),
    "one of two dies": ("failed", "its processes ended with [None, 7]"),
    "lacks": ("could_not_run", "needs more"),
    "lacks a module": ("could_not_run", "No module named 'no_such_module'"),
}


# pytest is what runs here; and `tests/test_tools.py` measures every part of the CPU's benchmarks.
ELSEWHERE = ("tests", "loss function")


def dry_run(out: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    own = {"PYTHON": sys.executable, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    parts = [f"--only={name}" for name in PARTS if name not in ELSEWHERE]
    command = ["bash", "benchmarks/gpu.sh", "--dry", "--out", str(out), *parts]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 1100}
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, **options), out


def ended(out: Path, ending: str) -> dict[str, Any]:
    """The findings of a part of `tried`."""
    part = Part(f"{__name__}:tried", 200, ranks=2 if "two" in ending else 1)
    return runner.run(ending, part, True, 45.0 if ending == "hangs" else 200.0, out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """Two at a time: the part that hangs only waits to be ended."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            ending: pool.submit(ended, tmp_path_factory.mktemp("part"), ending)
            for ending in ENDINGS
        }


@pytest.mark.extended
def test_every_part_of_a_dry_run_runs_or_says_why_not_and_that_it_is_one(tmp_path: Path) -> None:
    done, out = dry_run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / "gpu.json").read_text())
    assert results["dry_run"] is True
    assert done.stdout.startswith(page.DRY) and page.DRY in (out / "gpu.md").read_text()
    for name, part in results["parts"].items():
        assert not part["failed"], name
        assert part["figures"] or part["could_not_run"] or part["facts"], name
    figures = [figure for part in results["parts"].values() for figure in part["figures"]]
    assert {"stock step", "step"} <= {figure["what"] for figure in figures}
    judged = [figure for figure in figures if figure["goal"] is not None]
    # Of one rank, of DP 2 and of CP 2: fp32 and bf16, packs and rows. A CPU's times have no goal.
    assert [figure["verdict"] for figure in judged] == ["met"] * 12


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_part_keeps_what_it_found_whatever_becomes_of_it(
    ending: str, runs: dict[str, Future[Any]]
) -> None:
    found = runs[ending].result()
    kind, reason = ENDINGS[ending]
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
