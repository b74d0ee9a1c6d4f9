"""A training batch for SkyRL, two optimizer steps of it, and their fp64 reference.

Imports nothing of SkyRL but on a rank: `tests.frameworks.skyrl_ranks` trains on the same samples.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests import oracle
from tests.frameworks import reference
from tests.frameworks.reference import COEFFICIENTS
from tests.host.reference import Gradient, Reference

VOCAB = 100  # SkyRL fills microbatches of padding with any tokens below
DIVISOR = 2  # so small that weights of a microbatch add up to more than 1, to which SkyRL clamps
# Optimizer steps, as rows of the batch. With two data-parallel ranks, the first is padded by a row.
STEPS = ((0, 7), (7, 11))
PROMPTS = ("ab", "ab", "ab", "c-", "c-", "9f", "9f", "", "", "7", "x")  # SkyRL's uids
PROMPT_LENGTHS = (3, 3, 3, 5, 5, 2, 2, 4, 4, 1, 3)
LENGTHS = (9, 2, 17, 1, 6, 12, 5, 20, 3, 8, 11)  # of the responses
ROLLOUTS = (0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 8)  # samples of one rollout are steps of a trajectory
EMPTY = (4, 9)  # samples whose mask is all 0
REWARDS = (0, 1, 2, 3, 4, 5, 5, 7, 8, 9, 10)
REJECTED = (5, 6)  # by SkyRL's filter of prompts whose rewards are equal


class Sample(NamedTuple):
    """One response. Vectors have the length of the response, right after the prompt."""

    prompt: list[int]
    response: list[int]
    mask: list[float]
    advantage: float
    old: Tensor  # log-probabilities minus those of the model, of the policy that sampled
    base: Tensor  # and of the reference policy


class Run(NamedTuple):
    """How to train on the batch."""

    loss_reduction: str = "token_mean"  # SkyRL's own
    aggregation: Mapping[str, Any] | None = None  # keys of ours, which replaces it
    flags: str = ""  # of ours, in the environment
    filtered: bool = False  # whether SkyRL's filter rejects samples
    cp: int = 1
    packed: bool = False  # SkyRL's remove_microbatch_padding, which context parallelism requires
    max_tokens: int = 0  # of a microbatch; 0: microbatches of two samples
    calls: int = 1  # of forward_backward in each optimizer step
    policy_loss: str = "regular"
    max_seq_len: int | None = None  # SkyRL's divisor
    strategy: str = "megatron"
    refused: bool = False


# Our modes, under SkyRL's names.
MODES = {
    "token_mean": "token_mean",
    "sample_mean": "sequence_mean",
    "prompt_mean": "prompt_mean",
    "constant": "seq_mean_token_sum_norm",
}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "dp2": {},
    "cp2": {"cp": 2, "packed": True},
}
# The further ones in one mode. By tokens, microbatches differ in their number of samples, and a
# rank gets one of padding.
WAYS: dict[str, dict[str, Any]] = {
    **TOPOLOGIES,
    "packed": {"packed": True},
    "calls": {"calls": 2},
    "by tokens": {"packed": True, "max_tokens": 30},
    "clip_cov": {"policy_loss": "clip_cov"},
}


OURS = "ours "
"""Begins the names of runs that need the patch."""


def _runs() -> dict[str, Run]:
    runs = {"token_mean_legacy": Run("token_mean_legacy")}
    for way, options in WAYS.items():
        for mode in MODES if way in TOPOLOGIES else ("prompt_mean",):
            divisor = DIVISOR if mode == "constant" else None
            ours = {"mode": mode, "divisor": divisor}
            runs[f"{way} {mode}"] = Run(MODES[mode], max_seq_len=divisor, **options)
            runs[f"{OURS}{way} {mode}"] = Run(aggregation=ours, **options)
    return runs


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


def _chosen(filtered: bool = False, **aggregation: str) -> Run:
    return Run(aggregation=aggregation, filtered=filtered)


TOKENS = {"mode": "token_mean"}
REFUSED = {
    "loss": Run(aggregation=TOKENS, policy_loss="cross_entropy"),
    "name": Run(aggregation={"mode": "skyrl/tokens_mean"}),
    "divisor": Run(aggregation={"mode": "constant"}),
    "strategy": Run(aggregation=TOKENS, strategy="fsdp"),
    "conflict": Run(aggregation=TOKENS, flags="--loss-aggregation sample_mean"),
    "flags": Run(flags="--loss-aggregation sum --loss-aggregation-sample-weights skip"),
}
RUNS = {
    **_runs(),
    **{f"{OURS}{name}": _chosen(**choice) for name, choice in CHOICES.items()},
    f"{OURS}by flags": Run(flags="--loss-aggregation skyrl/prompt_mean"),
    **{f"{OURS}{name}": run._replace(refused=True) for name, run in REFUSED.items()},
}


@functools.cache
def samples() -> tuple[Sample, ...]:
    generator = torch.Generator().manual_seed(3)
    prompts = {
        uid: torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        for uid, length in zip(PROMPTS, PROMPT_LENGTHS, strict=True)
    }
    result = []
    for i, (uid, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        # Of a fixed dtype: the same draw whatever the default dtype is.
        mask = (torch.rand(length, generator=generator, dtype=torch.float64) < 0.7).double()
        mask[0] = 1
        response = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        advantage = float(torch.randn((), generator=generator, dtype=torch.float64))
        old, base = torch.randn(2, length, generator=generator, dtype=torch.float64) * 0.15
        kept = (mask * (i not in EMPTY)).tolist()
        result.append(Sample(prompts[uid], response, kept, advantage, old, base))
    return tuple(result)


Weights = dict[str, list[tuple[int, list[float]]]]
"""Of a step and by term of the loss: its samples, and the weight of each of their tokens."""


def weights(
    mode: str, step: int, empty: str = "count", rejected: str | None = None, filtered: bool = False
) -> Weights:
    """The same mean in all three terms, over the whole step."""
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
    divisor = float(DIVISOR) if mode == "constant" else None
    pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    nested = oracle.step_weights(mode, [pairs], divisor=divisor, empty=empty)
    of_mode = [w for rank in nested for microbatch in rank for w in microbatch]
    of_term = [(i, w) for i, w in zip(order, of_mode, strict=True) if i not in gone]
    return dict.fromkeys(COEFFICIENTS, of_term)


def stock_weights(mode: str, step: int, microbatches: list[list[list[int]]]) -> Weights:
    """Stock SkyRL's: KL and entropy are means of means of microbatches, padding rows included.

    Args:
        microbatches: rows by data-parallel rank and microbatch; -1 is a padding row.
    """
    kl, entropy = [], []
    for rank in microbatches:
        for rows in rank:
            of_microbatch = sum(sum(samples()[i].mask) for i in rows if i >= 0)
            for i in set(rows) - {-1}:
                mask = samples()[i].mask
                share = 1 / len(microbatches) / len(rank)
                kl.append((i, [m * share / len(rows) / max(sum(mask), 1) for m in mask]))
                entropy.append((i, [m * share / max(of_microbatch, 1) for m in mask]))
    return {**weights(mode, step), "kl": kl, "entropy": entropy}


def gradient(terms: dict[str, Reference], weights: Weights) -> Gradient:
    """Of the whole loss."""
    parts = [(factor, terms[t].gradient(weights[t])) for t, factor in COEFFICIENTS.items()]
    return {name: sum(factor * part[name] for factor, part in parts) for name in parts[0][1]}


def build(dtype: torch.dtype) -> Any:
    """On a rank: the model of the host tests, with this vocabulary."""
    from tests.host import gpt

    gpt.VOCAB = VOCAB
    return gpt.build(dtype)


def train_all(
    package: str, cp: int, runs: dict[str, Run], log_probs: list[Tensor]
) -> dict[str, Any]:
    """On a rank: results of the runs, by name, with SkyRL from a folder; an error as its text."""
    from tests.frameworks.skyrl_standins import use_skyrl

    use_skyrl(package)
    from tests.frameworks import skyrl_ranks
    from tests.host import gpt

    gpt.initialize(cp)
    results: dict[str, Any] = {}
    for name, run in runs.items():
        try:
            results[name] = skyrl_ranks.train(run, log_probs)
        except (AssertionError, ValueError) as error:
            if not run.refused:
                raise
            results[name] = f"{type(error).__name__}: {error}"
    return results


def references() -> dict[str, Reference]:
    """On a rank of its own: the terms of the loss, and the model's log-probabilities."""
    from tests.host import gpt

    gpt.initialize()
    model = build(torch.float64)

    def terms(sample: Sample) -> reference.Terms:
        tokens = torch.tensor(sample.prompt + sample.response)
        lp, entropy = reference.token_values(model, tokens, len(sample.prompt))
        old, base = lp.detach() + sample.old, lp.detach() + sample.base
        return {"lp": lp, **reference.grpo(lp, entropy, old, base, sample.advantage)}

    return reference.references(model, map(terms, samples()), COEFFICIENTS)
