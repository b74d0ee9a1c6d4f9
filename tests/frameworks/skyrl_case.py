"""A training batch for SkyRL, two optimizer steps of it, and their fp64 reference.

Imports nothing of SkyRL: `tests.frameworks.run_skyrl` gives the same samples to its trainer.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests import oracle
from tests.host.reference import Gradient

VOCAB = 100  # SkyRL fills microbatches of padding with any tokens below
KL_COEF, ENTROPY_COEF = 0.3, 0.2
DIVISOR = 2  # so small that weights of a microbatch add up to more than 1, to which SkyRL clamps
CLIP = 0.2
# Optimizer steps, as rows of the batch. With two data-parallel ranks, the first is padded by a row.
STEPS = ((0, 7), (7, 11))
PROMPTS = ("ab", "ab", "ab", "c-", "c-", "9f", "9f", "", "", "7", "x")  # SkyRL's uids
PROMPT_LENGTHS = (3, 3, 3, 5, 5, 2, 2, 4, 4, 1, 3)
LENGTHS = (9, 2, 17, 1, 6, 12, 5, 20, 3, 8, 11)  # of the responses
EMPTY = (4, 9)  # samples whose mask is all 0


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

    loss_reduction: str
    cp: int = 1
    packed: bool = False  # SkyRL's remove_microbatch_padding, which context parallelism requires
    max_tokens: int = 0  # of a microbatch; 0: microbatches of two samples
    calls: int = 1  # of forward_backward in each optimizer step
    policy_loss: str = "regular"
    divisor: int | None = None  # SkyRL's max_seq_len
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


def _runs() -> dict[str, Run]:
    runs = {}
    for way, options in WAYS.items():
        modes = MODES.values() if way in TOPOLOGIES else ("prompt_mean",)
        for name in [f"{prefix}{mode}" for mode in modes for prefix in ("", "skyrl/")]:
            divisor = DIVISOR if "norm" in name else None
            runs[f"{way} {name}"] = Run(name, divisor=divisor, **options)
    return runs


REFUSED = {
    "loss": Run("skyrl/token_mean", policy_loss="importance_sampling", refused=True),
    "name": Run("skyrl/tokens_mean", refused=True),
    "rollouts": Run("slime/sample_mean", refused=True),
    "divisor": Run("skyrl/seq_mean_token_sum_norm", refused=True),
    "strategy": Run("skyrl/token_mean", strategy="fsdp", refused=True),
}
LEGACY = {name: Run(name) for name in ("token_mean_legacy", "skyrl/token_mean_legacy")}
RUNS = {**_runs(), **LEGACY, **REFUSED}


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


class Weights(NamedTuple):
    """Of a step: for each of its samples, the weight of every token in each term of the loss."""

    policy: list[list[float]]
    kl: list[list[float]]
    entropy: list[list[float]]


def weights(mode: str, step: int) -> Weights:
    """The same mean in all three terms, over the whole step."""
    rows = [
        oracle.Sample(tuple(samples()[i].mask), PROMPTS.index(PROMPTS[i]))
        for i in range(*STEPS[step])
    ]
    options = {"divisor": float(DIVISOR)} if mode == "constant" else {}
    pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    nested = oracle.step_weights(mode, [pairs], **options)
    of_mode = [w for rank in nested for microbatch in rank for w in microbatch]
    return Weights(of_mode, of_mode, of_mode)


def stock_weights(mode: str, step: int, microbatches: list[list[list[int]]]) -> Weights:
    """Stock SkyRL's: KL and entropy are means of means of microbatches, padding rows included.

    Args:
        microbatches: rows by data-parallel rank and microbatch; -1 is a padding row.
    """
    first, end = STEPS[step]
    kl, entropy = {}, {}
    for rank in microbatches:
        for rows in rank:
            of_microbatch = sum(sum(samples()[i].mask) for i in rows if i >= 0)
            for i in set(rows) - {-1}:
                mask = samples()[i].mask
                share = 1 / len(microbatches) / len(rank)
                kl[i] = [m * share / len(rows) / max(sum(mask), 1) for m in mask]
                entropy[i] = [m * share / max(of_microbatch, 1) for m in mask]
    order = range(first, end)
    return Weights(weights(mode, step).policy, [kl[i] for i in order], [entropy[i] for i in order])


class Reference(NamedTuple):
    """Of a step with some weights: the gradient by parameter, and the terms of the loss."""

    gradient: Gradient
    policy: float
    kl: float
    entropy: float


def build(dtype: torch.dtype) -> Any:
    """On a rank: the model of the host tests, with this vocabulary."""
    from tests.host import gpt

    gpt.VOCAB = VOCAB
    return gpt.build(dtype)


def references(wanted: list[tuple[int, Weights]]) -> tuple[list[Tensor], list[Reference]]:
    """On a rank of its own, sample by sample in fp64.

    Args:
        wanted: optimizer steps, and the weights in them.

    Returns:
        The model's log-probabilities of each response, and the reference of each step.
    """
    from tests.host import gpt

    gpt.initialize()
    model = build(torch.float64)
    log_probs = [_token_terms(model, sample)[0].detach() for sample in samples()]
    return log_probs, [_reference(model, step, w) for step, w in wanted]


def _reference(model: Any, step: int, step_weights: Weights) -> Reference:
    first, end = STEPS[step]
    totals: list[Any] = [0.0, 0.0, 0.0]
    for n, i in enumerate(range(first, end)):
        sample = samples()[i]
        log_probs, entropy = _token_terms(model, sample)
        ratio = (log_probs - log_probs.detach() - sample.old).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        policy = -torch.minimum(ratio * sample.advantage, clipped * sample.advantage)
        delta = sample.base + log_probs.detach() - log_probs
        terms = (policy, delta.exp() - delta - 1, entropy)
        for t, (w, term) in enumerate(zip(step_weights, terms, strict=True)):
            totals[t] = totals[t] + (torch.tensor(w[n], dtype=torch.float64) * term).sum()
    loss = totals[0] + KL_COEF * totals[1] - ENTROPY_COEF * totals[2]
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters)
    return Reference(dict(zip(names, found, strict=True)), *(float(t) for t in totals))


def _token_terms(model: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy at each token of the response; the sample alone, unpadded."""
    tokens = torch.tensor([sample.prompt + sample.response])
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    logits = model(tokens, positions, None)[0, len(sample.prompt) - 1 : -1]
    of_all = F.log_softmax(logits, dim=-1)
    chosen = of_all.gather(-1, torch.tensor(sample.response).unsqueeze(-1)).squeeze(-1)
    return chosen, -(of_all.exp() * of_all).sum(-1)
