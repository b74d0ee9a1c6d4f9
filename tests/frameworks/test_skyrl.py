"""SkyRL with our patch, which the command of its page applies: its real trainer, worker and loss.

The gradient of every parameter is compared with an fp64 process that runs every sample alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks import skyrl_case as case
from tests.host.harness import run_host_ranks
from tests.host.reference import relative_error
from tests.peers.standins import PEERS

pytestmark = pytest.mark.host

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/frameworks/skyrl.md"
# Rows of each optimizer step's microbatches, by data-parallel rank; -1 is a row of padding.
MICROBATCHES = {
    "dp2": ([[[0, 1], [2, 3]], [[4, 5], [6, -1]]], [[[7, 8]], [[9, 10]]]),
    "cp2": ([[[0, 1], [2, 3], [4, 5], [6]]], [[[7, 8], [9, 10]]]),
}
ALL = [(way, mode) for way in case.TOPOLOGIES for mode in case.MODES]
Results = dict[str, Any]


@cache
def references() -> tuple[list[torch.Tensor], dict[tuple[str, str, int], case.Reference]]:
    """The model's log-probabilities; by mode, whole step or stock's topology, and step."""
    wanted = {}
    for step in (0, 1):
        for mode in (*case.MODES, "microbatch_mean"):
            wanted[mode, "step", step] = case.weights(mode, step)
        for mode in case.MODES:
            for topology, steps in MICROBATCHES.items():
                wanted[mode, topology, step] = case.stock_weights(mode, step, steps[step])
    asked = [(key[-1], weights) for key, weights in wanted.items()]
    log_probs, found = run_host_ranks(case.references, 1, asked)[0]
    return log_probs, dict(zip(wanted, found, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder: Path = tmp_path_factory.mktemp("skyrl")
    torch.save(references()[0], folder / "log_probs")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def stock(folder: Path) -> Results:
    return results(folder, "stock", PEERS)


@pytest.fixture(scope="module")
def patched(folder: Path) -> Results:
    shutil.copytree(PEERS / "skyrl", folder / "package/skyrl")
    (command,) = re.findall(r"^patch .*$", PAGE.read_text(), re.MULTILINE)
    environment = {**os.environ, "SKYRL": str(folder / "package")}
    subprocess.run(command, shell=True, check=True, cwd=ROOT, env=environment)
    return results(folder, "patched", folder / "package")


def results(folder: Path, package: str, where: Path) -> Results:
    """Of the runs of `case.RUNS` that the package knows: what each rank returned."""
    arguments = (package, str(folder / "log_probs"), str(folder / package))
    done = subprocess.run(
        [sys.executable, "-m", "tests.frameworks.run_skyrl", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "SKYRL": str(where), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: Results = torch.load(folder / package)
    return found


def error(ranks: list[dict[str, Any]], mode: str, of: str = "step") -> float:
    """The largest of all ranks and both optimizer steps; ``of`` as in `references`."""
    return max(
        relative_error(rank["gradients"][step], references()[1][mode, of, step].gradient)
        for rank in ranks
        for step in (0, 1)
    )


@pytest.mark.parametrize("way, mode", ALL)
def test_every_term_of_the_loss_is_exact(
    stock: Results, patched: Results, way: str, mode: str
) -> None:
    name = case.MODES[mode]
    own = error(stock[f"{way} {name}"], mode, way)  # of stock, in its own formula
    assert own < 1e-6
    assert error(patched[f"{way} skyrl/{name}"], mode) <= min(2 * own, 1e-6)


@pytest.mark.parametrize("way, mode", ALL)
def test_stock_takes_means_of_microbatches_for_kl_and_entropy(
    stock: Results, way: str, mode: str
) -> None:
    assert error(stock[f"{way} {case.MODES[mode]}"], mode) > 2e-2


@pytest.mark.parametrize("way", ["packed", "calls", "by tokens"])
def test_other_ways_to_run_a_step_are_exact(stock: Results, patched: Results, way: str) -> None:
    assert error(patched[f"{way} skyrl/prompt_mean"], "prompt_mean") < 1e-6
    assert error(stock[f"{way} prompt_mean"], "prompt_mean") > 2e-2


def test_means_of_microbatches_count_every_sample(stock: Results, patched: Results) -> None:
    assert error(patched["skyrl/token_mean_legacy"], "microbatch_mean") < 1e-6
    # Stock leaves out the last sample of a step with an odd number of them.
    assert error(stock["token_mean_legacy"], "microbatch_mean") > 2e-2


@pytest.mark.parametrize("way, mode", ALL)
def test_metrics_follow_the_aggregation(
    stock: Results, patched: Results, way: str, mode: str
) -> None:
    name = case.MODES[mode]
    found = patched[f"{way} skyrl/{name}"][0]["metrics"]
    steps = [references()[1][mode, "step", step] for step in (0, 1)]
    for key in ("policy", "kl", "entropy"):
        expected = sum(getattr(step, key) for step in steps) / 2
        metric = "policy_loss" if key == "policy" else f"policy_{key}"
        assert found[metric] == pytest.approx(expected, rel=1e-5)
    theirs = stock[f"{way} {name}"][0]["metrics"]
    followed = {"policy_loss", "policy_kl", "policy_entropy", "final_loss"}
    assert {k: v for k, v in found.items() if k not in followed} == {
        k: v for k, v in theirs.items() if k not in followed
    }
    if way != "cp2":  # there each rank has a part of the entropy, in stock too
        total = found["policy_loss"] + case.KL_COEF * found["policy_kl"]
        total -= case.ENTROPY_COEF * found["policy_entropy"]
        assert found["final_loss"] == pytest.approx(total, rel=1e-5)


def test_clip_cov_sees_the_advantages_as_they_are(stock: Results, patched: Results) -> None:
    metric = "loss_metrics/clip_ratio"
    assert stock["clip_cov prompt_mean"][0]["metrics"][metric] == 0
    assert patched["clip_cov skyrl/prompt_mean"][0]["metrics"][metric] > 0.01


def test_without_a_preset_the_patch_changes_no_bit(stock: Results, patched: Results) -> None:
    further = len(case.WAYS) - len(case.TOPOLOGIES)
    assert len(stock) == len(ALL) + further + 1  # and the old token mean
    for name, ranks in stock.items():
        for mine, theirs in zip(patched[name], ranks, strict=True):
            assert mine["metrics"] == theirs["metrics"]
            for step in (0, 1):
                for parameter, gradient in theirs["gradients"][step].items():
                    assert torch.equal(mine["gradients"][step][parameter], gradient)


@pytest.mark.parametrize(
    "run, message",
    [
        ("loss", "skyrl/token_mean: importance_sampling must call reduce_loss"),
        ("name", "ModeError: unknown preset 'skyrl/tokens_mean'"),
        ("rollouts", "GroupError: .*rollout_ids"),
        ("divisor", "DivisorError: preset 'skyrl/seq_mean_token_sum_norm' needs a divisor"),
        ("strategy", "invalid loss_reduction: skyrl/token_mean"),
    ],
)
def test_what_cannot_be_exact_is_refused(patched: Results, run: str, message: str) -> None:
    for of_rank in patched[run]:
        assert re.search(message, of_rank)
