"""SkyRL with our patch, which the command of its page applies: its real trainer, worker and loss.

The gradient of every parameter is compared with an fp64 process that runs every sample alone.
"""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import Any

import pytest
import torch

from tests.frameworks import skyrl_case as case
from tests.frameworks.patched import patched_copy
from tests.frameworks.reference import COEFFICIENTS, ENTROPY, KL
from tests.host.harness import run_host_ranks
from tests.host.reference import Gradient, Reference, relative_error
from tests.peers.standins import PEERS

pytestmark = pytest.mark.host

# Rows of each optimizer step's microbatches, by data-parallel rank; -1 is a row of padding.
MICROBATCHES = {
    "dp2": ([[[0, 1], [2, 3]], [[4, 5], [6, -1]]], [[[7, 8]], [[9, 10]]]),
    "cp2": ([[[0, 1], [2, 3], [4, 5], [6]]], [[[7, 8], [9, 10]]]),
}
ALL = [(way, mode) for way in case.TOPOLOGIES for mode in case.MODES]
Results = dict[str, Any]


@cache
def fp64() -> dict[str, Reference]:
    found: dict[str, Reference] = run_host_ranks(case.references, 1)[0]
    return found


@cache
def expected(mode: str, of: str, step: int) -> Gradient:
    """Of the whole step, in a mode or with a choice; or of stock SkyRL in a topology."""
    if of in MICROBATCHES:
        return case.gradient(fp64(), case.stock_weights(mode, step, MICROBATCHES[of][step]))
    return case.gradient(fp64(), case.weights(**case.CHOICES.get(mode, {"mode": mode}), step=step))


@pytest.fixture(scope="session")
def stock() -> Results:
    own = {name: run for name, run in case.RUNS.items() if not name.startswith(case.OURS)}
    return results(str(PEERS), own)


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("skyrl")
    patched_copy("skyrl", folder)
    return results(str(folder), case.RUNS)


def results(package: str, runs: dict[str, case.Run]) -> Results:
    """What each rank returned, with SkyRL from the folder ``package``."""
    found: Results = {}
    for cp in (1, 2):
        of_cp = {name: run for name, run in runs.items() if run.cp == cp}
        ranks = run_host_ranks(
            case.train_all, 2, package, cp, of_cp, fp64()["lp"].losses, timeout=200
        )
        found |= {name: [rank[name] for rank in ranks] for name in of_cp}
    return found


def error(ranks: list[dict[str, Any]], mode: str, of: str = "step") -> float:
    """The largest of all ranks and both optimizer steps; ``of`` as in `expected`."""
    return max(
        relative_error(rank["gradients"][step], expected(mode, of, step))
        for rank in ranks
        for step in (0, 1)
    )


@pytest.mark.parametrize("way, mode", ALL)
def test_every_term_of_the_loss_is_exact(
    stock: Results, patched: Results, way: str, mode: str
) -> None:
    own = error(stock[f"{way} {mode}"], mode, way)  # of stock, in its own formula
    assert own < 1e-6
    assert error(patched[f"{case.OURS}{way} {mode}"], mode) <= min(2 * own, 1e-6)


@pytest.mark.parametrize("way, mode", ALL)
def test_stock_takes_means_of_microbatches_for_kl_and_entropy(
    stock: Results, way: str, mode: str
) -> None:
    assert error(stock[f"{way} {mode}"], mode) > 2e-2


@pytest.mark.parametrize("way", ["packed", "calls", "by tokens"])
def test_other_ways_to_run_a_step_are_exact(stock: Results, patched: Results, way: str) -> None:
    assert error(patched[f"{case.OURS}{way} prompt_mean"], "prompt_mean") < 1e-6
    assert error(stock[f"{way} prompt_mean"], "prompt_mean") > 2e-2


@pytest.mark.parametrize("choice", case.CHOICES)
def test_every_choice_is_exact(patched: Results, choice: str) -> None:
    assert error(patched[f"{case.OURS}{choice}"], choice) < 1e-6


def test_choices_differ() -> None:
    for pair in itertools.combinations([*case.MODES, *case.CHOICES], 2):
        apart = (relative_error(*(expected(x, "step", step) for x in pair)) for step in (0, 1))
        assert max(apart) > 2e-3


def test_flags_in_the_environment_do_the_same(patched: Results) -> None:
    assert error(patched[f"{case.OURS}by flags"], "prompt_mean") < 1e-6


def test_stock_leaves_out_the_last_sample_of_an_odd_number(stock: Results) -> None:
    assert error(stock["token_mean_legacy"], "microbatches") > 2e-2


@pytest.mark.parametrize("way, mode", ALL)
def test_metrics_follow_the_aggregation(
    stock: Results, patched: Results, way: str, mode: str
) -> None:
    found = patched[f"{case.OURS}{way} {mode}"][0]["metrics"]
    for term in COEFFICIENTS:
        of_steps = [fp64()[term].loss(case.weights(mode, step)[term]) for step in (0, 1)]
        metric = "policy_loss" if term == "policy" else f"policy_{term}"
        assert found[metric] == pytest.approx(sum(of_steps) / 2, rel=1e-5)
    theirs = stock[f"{way} {mode}"][0]["metrics"]
    followed = {"policy_loss", "policy_kl", "policy_entropy", "final_loss"}
    assert {k: v for k, v in found.items() if k not in followed} == {
        k: v for k, v in theirs.items() if k not in followed
    }
    if way != "cp2":  # there each rank has a part of the entropy, in stock too
        total = found["policy_loss"] + KL * found["policy_kl"]
        total -= ENTROPY * found["policy_entropy"]
        assert found["final_loss"] == pytest.approx(total, rel=1e-5)


def test_clip_cov_sees_the_advantages_as_they_are(stock: Results, patched: Results) -> None:
    metric = "loss_metrics/clip_ratio"
    assert stock["clip_cov prompt_mean"][0]["metrics"][metric] == 0
    assert patched[f"{case.OURS}clip_cov prompt_mean"][0]["metrics"][metric] > 0.01


def test_without_the_switch_the_patch_changes_no_bit(stock: Results, patched: Results) -> None:
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
        ("loss", "ValueError: policy_loss_type='cross_entropy' does not support"),
        ("name", "ModeError: unknown preset 'skyrl/tokens_mean'"),
        ("divisor", "DivisorError: mode 'constant' needs a divisor"),
        ("strategy", "ValueError: trainer.strategy='fsdp' does not support"),
        ("conflict", "ValueError: .*--loss-aggregation sample_mean` differs from"),
        ("flags", "ValueError: .*has flags without a counterpart"),
    ],
)
def test_what_cannot_be_exact_is_refused(patched: Results, run: str, message: str) -> None:
    for of_rank in patched[f"{case.OURS}{run}"]:
        assert re.search(message, of_rank)
