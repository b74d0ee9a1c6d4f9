"""SkyRL with our patch, which the command of its page applies, and without it.

The gradient of every parameter is compared with an fp64 process that runs every sample alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from functools import cache
from typing import Any

import pytest
import torch

from tests import oracle
from tests.frameworks import skyrl
from tests.frameworks.harness import COEFFICIENTS, ENTROPY, FP32, KL, patched_copy
from tests.frameworks.skyrl import PROMPTS, REJECTED, ROLLOUTS, STEPS, Run, samples
from tests.host.harness import run_host_ranks
from tests.host.reference import Gradient, Reference, relative_error
from tests.host.steps import Weights
from tests.peers.standins import PEERS

pytestmark = pytest.mark.host

DIVISOR = 2.0  # so small that weights of a microbatch add up to more than 1, to which SkyRL clamps
# Our modes, under SkyRL's names.
MODES = {
    "token_mean": "token_mean",
    "sample_mean": "sequence_mean",
    "prompt_mean": "prompt_mean",
    "constant": "seq_mean_token_sum_norm",
}
TOPOLOGIES: dict[str, dict[str, Any]] = {"dp2": {}, "cp2": {"cp": 2, "packed": True}}
# The further ones in one mode. By tokens, microbatches differ in their number of samples, and a
# rank gets one of padding.
WAYS: dict[str, dict[str, Any]] = {
    **TOPOLOGIES,
    "packed": {"packed": True},
    "calls": {"calls": 2},
    "by tokens": {"packed": True, "max_tokens": 30},
    "clip_cov": {"policy_loss": "clip_cov"},
}
ALL = [(way, mode) for way in TOPOLOGIES for mode in MODES]
FURTHER = [(way, "prompt_mean") for way in WAYS if way not in TOPOLOGIES]
# What else can be chosen, as arguments of `weights`.
CHOICES: dict[str, dict[str, Any]] = {
    "rollouts": {"mode": "rollout_mean"},
    "microbatches": {"mode": "microbatch_mean"},
    "sums": {"mode": "sample_sum"},
    "empty": {"mode": "sample_mean", "empty": "skip"},
    "filtered": {"mode": "prompt_mean", "filtered": True},
    "rejected skipped": {"mode": "prompt_mean", "rejected": "skip", "filtered": True},
    "rejected counted": {"mode": "token_mean", "rejected": "count", "filtered": True},
}
TOKENS = {"mode": "token_mean"}
REFUSED = {
    "ValueError: policy_loss_type='cross_entropy' does not support": Run(
        aggregation=TOKENS, policy_loss="cross_entropy"
    ),
    "ModeError: unknown preset 'skyrl/tokens_mean'": Run(aggregation={"mode": "skyrl/tokens_mean"}),
    "DivisorError: mode 'constant' needs a divisor": Run(aggregation={"mode": "constant"}),
    "ValueError: trainer.strategy='fsdp' does not support": Run(
        aggregation=TOKENS, strategy="fsdp"
    ),
    "ValueError: .*--loss-aggregation sample_mean` differs from": Run(
        aggregation=TOKENS, flags="--loss-aggregation sample_mean"
    ),
    "ValueError: .*has flags without a counterpart": Run(
        flags="--loss-aggregation sum --loss-aggregation-sample-weights skip"
    ),
}


def divisor_of(mode: str) -> float | None:
    return DIVISOR if mode == "constant" else None


def chosen(filtered: bool = False, **aggregation: str) -> Run:
    return Run(aggregation=aggregation, filtered=filtered)


Key = Any
"""Of a run: (way, mode), or what it is about."""
STOCK: dict[Key, Run] = {
    "legacy": Run("token_mean_legacy"),
    **{
        (way, mode): Run(MODES[mode], max_seq_len=divisor_of(mode), **WAYS[way])
        for way, mode in (*ALL, *FURTHER)
    },
}
OURS: dict[Key, Run] = {
    **{
        ("ours", way, mode): Run(
            aggregation={"mode": mode, "divisor": divisor_of(mode)}, **WAYS[way]
        )
        for way, mode in (*ALL, *FURTHER)
    },
    **{name: chosen(**choice) for name, choice in CHOICES.items()},
    "flags": Run(flags="--loss-aggregation skyrl/prompt_mean"),
    **REFUSED,
}
# Rows of each optimizer step's microbatches, by data-parallel rank; -1 is a row of padding.
MICROBATCHES = {
    "dp2": ([[[0, 1], [2, 3]], [[4, 5], [6, -1]]], [[[7, 8]], [[9, 10]]]),
    "cp2": ([[[0, 1], [2, 3], [4, 5], [6]]], [[[7, 8], [9, 10]]]),
}


def weights(
    mode: str, step: int, empty: str = "count", rejected: str | None = None, filtered: bool = False
) -> dict[str, Weights]:
    """By term of the loss, the same mean in all three, over the whole step."""
    gone = set(REJECTED) if filtered else set()
    order = [i for i in range(*STEPS[step]) if not (i in gone and rejected == "skip")]
    rows = [
        oracle.Sample(tuple(samples()[i].mask), PROMPTS.index(PROMPTS[i]), ROLLOUTS[i])
        for i in order
    ]
    if rejected is None:  # then they are samples without tokens
        rows = [
            dataclasses.replace(row, mask=(0.0,) * len(row.mask)) if i in gone else row
            for i, row in zip(order, rows, strict=True)
        ]
    pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    nested = oracle.step_weights(mode, [pairs], divisor=divisor_of(mode), empty=empty)
    of_mode = [w for rank in nested for microbatch in rank for w in microbatch]
    of_term = [(i, w) for i, w in zip(order, of_mode, strict=True) if i not in gone]
    return dict.fromkeys(COEFFICIENTS, of_term)


def stock_weights(mode: str, step: int, way: str) -> dict[str, Weights]:
    """Stock SkyRL's: KL and entropy are means of means of microbatches, padding rows included."""
    kl, entropy, ranks = [], [], MICROBATCHES[way][step]
    for rank, rows in ((r, rows) for r in ranks for rows in r):
        of_microbatch = sum(sum(samples()[i].mask) for i in rows if i >= 0)
        share = 1 / len(ranks) / len(rank)
        for i in set(rows) - {-1}:
            mask = samples()[i].mask
            kl.append((i, [m * share / len(rows) / max(sum(mask), 1) for m in mask]))
            entropy.append((i, [m * share / max(of_microbatch, 1) for m in mask]))
    return {**weights(mode, step), "kl": kl, "entropy": entropy}


@cache
def fp64() -> dict[str, Reference]:
    found: dict[str, Reference] = run_host_ranks(skyrl.references, 1)[0]
    return found


@cache
def expected(name: str, step: int, stock_way: str = "") -> Gradient:
    """Of the whole step, in a mode or with a choice; or of stock SkyRL's formula."""
    if stock_way:
        of_terms = stock_weights(name, step, stock_way)
    else:
        of_terms = weights(**CHOICES.get(name, {"mode": name}), step=step)
    parts = [(factor, fp64()[t].gradient(of_terms[t])) for t, factor in COEFFICIENTS.items()]
    return {p: sum(factor * part[p] for factor, part in parts) for p in parts[0][1]}


def error(ranks: list[Any], name: str, stock_way: str = "") -> float:
    """The largest of all ranks and both optimizer steps; ``name`` as in `expected`."""
    assert not isinstance(ranks[0], str), ranks
    return max(
        relative_error(rank["gradients"][step], expected(name, step, stock_way))
        for rank in ranks
        for step in (0, 1)
    )


Results = dict[Key, list[Any]]


def results(package: str, runs: dict[Key, Run]) -> Results:
    """What each rank returned, with SkyRL from the folder ``package``."""
    found: Results = {}
    for cp in (1, 2):
        of_cp = {name: run for name, run in runs.items() if run.cp == cp}
        given = package, cp, of_cp, fp64()["lp"].losses
        ranks = run_host_ranks(skyrl.train, 2, *given, timeout=200)
        found |= {name: [rank[name] for rank in ranks] for name in of_cp}
    return found


@pytest.fixture(scope="session")
def stock() -> Results:
    return results(str(PEERS), STOCK)


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("skyrl")
    patched_copy("skyrl", folder)
    return results(str(folder), {**STOCK, **OURS})


@pytest.mark.parametrize("way, mode", ALL)
def test_every_term_of_the_loss_is_exact_where_stocks_are_means_of_microbatches(
    stock: Results, patched: Results, way: str, mode: str
) -> None:
    own = error(stock[way, mode], mode, way)  # of stock, in its own formula
    assert own < FP32
    assert error(patched["ours", way, mode], mode) <= min(2 * own, FP32)
    assert all(error(patched["ours", way, mode], other) > 2e-3 for other in {*MODES} - {mode})
    assert error(stock[way, mode], mode) > 2e-2


@pytest.mark.parametrize("way", ["packed", "calls", "by tokens"])
def test_other_ways_to_run_a_step_are_exact(stock: Results, patched: Results, way: str) -> None:
    assert error(patched["ours", way, "prompt_mean"], "prompt_mean") < FP32
    assert error(stock[way, "prompt_mean"], "prompt_mean") > 2e-2


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_is_exact_and_none_is_another(patched: Results, choice: str) -> None:
    assert error(patched[choice], choice) < FP32
    for other in {*MODES, *CHOICES} - {choice}:
        pairs = ((expected(choice, step), expected(other, step)) for step in (0, 1))
        assert max(itertools.starmap(relative_error, pairs)) > 2e-3


def test_flags_in_the_environment_do_the_same(patched: Results) -> None:
    assert error(patched["flags"], "prompt_mean") < FP32


def test_stock_leaves_out_the_last_sample_of_an_odd_number(stock: Results) -> None:
    assert error(stock["legacy"], "microbatches") > 2e-2


@pytest.mark.parametrize("way, mode", ALL)
def test_metrics_follow_the_aggregation(
    stock: Results, patched: Results, way: str, mode: str
) -> None:
    found = dict(patched["ours", way, mode][0]["metrics"])
    theirs = stock[way, mode][0]["metrics"]
    ours = {"policy": "policy_loss", "kl": "policy_kl", "entropy": "policy_entropy"}
    value = {term: found.pop(name) for term, name in ours.items()}
    for term in COEFFICIENTS:
        of_steps = [fp64()[term].loss(weights(mode, step)[term]) for step in (0, 1)]
        assert value[term] == pytest.approx(sum(of_steps) / 2, rel=1e-5)
    total = value["policy"] + KL * value["kl"] - ENTROPY * value["entropy"]
    final = found.pop("final_loss")
    if way != "cp2":  # there each rank has a part of the entropy, in stock too
        assert final == pytest.approx(total, rel=1e-5)
    followed = {*ours.values(), "final_loss"}
    assert found == {name: x for name, x in theirs.items() if name not in followed}


def test_clip_cov_sees_the_advantages_as_they_are(stock: Results, patched: Results) -> None:
    metric = "loss_metrics/clip_ratio"
    assert stock["clip_cov", "prompt_mean"][0]["metrics"][metric] == 0
    assert patched["ours", "clip_cov", "prompt_mean"][0]["metrics"][metric] > 0.01


def test_without_the_switch_the_patch_changes_no_bit(stock: Results, patched: Results) -> None:
    for name in STOCK:
        for mine, theirs in zip(patched[name], stock[name], strict=True):
            assert mine["metrics"] == theirs["metrics"]
            for after, before in zip(mine["gradients"], theirs["gradients"], strict=True):
                assert all(torch.equal(after[p], gradient) for p, gradient in before.items())


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_exact_is_refused(patched: Results, message: str) -> None:
    assert all(re.match(message, of_rank) for of_rank in patched[message])
