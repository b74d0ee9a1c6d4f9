"""On the real Megatron-Core, in one CPU process: a training step, and a policy loss's memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import megatron
from benchmarks.memory import LiveBytes
from benchmarks.results import Results, rounds_of
from benchmarks.shapes import AGGREGATIONS, LOGITS, MODEL, SMALL_MODEL, TRAINING_STEP, Gpt
from megatron_loss_agg import policy

NAMES = ("token_mean", "prompt_mean")


def measure(results: Results) -> None:
    """Steps and memory."""
    with megatron.one_rank():
        _training_step(results)
        _policy_memory(results)


def _training_step(results: Results) -> None:
    """Steps as such differ by more than the hook adds; so that is measured where it can be."""
    tokens = TRAINING_STEP.rows * TRAINING_STEP.length
    where = f"GPT {MODEL.layers} x {MODEL.hidden}, {TRAINING_STEP.microbatches} x {tokens} tokens"
    base, others = _steps(MODEL, rounds=10)
    results.add("stock step", where, base, "s")
    for name, seconds in others.items():
        results.add(f"step with {name}", where, 1 + statistics.median(seconds) / base, "x stock")
    _, small = _steps(SMALL_MODEL, rounds=120)
    for name in NAMES:
        added = statistics.median(small[name])
        results.add(f"added by {name}", where, 1e3 * added, "ms", "added_ms")
        results.add(f"added by {name}", where, added / base, "of a stock step", "step")


def _steps(gpt: Gpt, rounds: int) -> tuple[float, dict[str, list[float]]]:
    """CPU seconds of a stock step, and what other steps took beyond it; ``stock again`` is one."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg.mcore import LossHook

    ddp, stock = megatron.build(gpt, TRAINING_STEP.length), get_forward_backward_func()
    data = megatron.batches(TRAINING_STEP, gpt.vocabulary)
    schedules = {name: LossHook(AGGREGATIONS[name]).wrap(stock) for name in NAMES}
    schedules["stock again"] = stock

    def seconds(schedule: Callable[..., object]) -> float:
        begin = time.process_time()
        megatron.train(schedule, ddp, iter(data), TRAINING_STEP)
        return time.process_time() - begin

    for _ in range(2):
        for schedule in schedules.values():
            seconds(schedule)
    base: list[float] = []
    beyond: dict[str, list[float]] = {name: [] for name in schedules}
    for _ in range(rounds_of(rounds)):
        before = seconds(stock)
        taken = {name: seconds(schedule) for name, schedule in schedules.items()}
        base.append((before + seconds(stock)) / 2)  # on both sides, so that a drift cancels
        for name in schedules:
            beyond[name].append(taken[name] - base[-1])
    return statistics.median(base), beyond


def _policy_memory(results: Results) -> None:
    """Log-probabilities, and a policy loss of them, from logits that nobody else holds."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from megatron_loss_agg.mcore import logprobs

    tokens, vocabulary = LOGITS
    labels = torch.randint(vocabulary, (tokens, 1))
    advantages = torch.randn(tokens, 1)

    def policy_loss(logits: Tensor, labels: Tensor) -> Tensor:
        log_probs, entropy = logprobs.vocab_parallel_log_probs_and_entropy(logits, labels)
        surrogate = policy.clipped_policy_loss(log_probs, log_probs.detach(), advantages)
        penalty = policy.kl_penalty(log_probs, log_probs.detach(), "k3")
        return surrogate.losses + 0.01 * penalty - 0.01 * entropy

    def peak(function: Callable[[Tensor, Tensor], Tensor]) -> int:
        leaf = torch.randn(tokens, 1, vocabulary, requires_grad=True)
        with LiveBytes() as counted:
            function(leaf * 1.0, labels).sum().backward()
        return counted.peak

    theirs = peak(vocab_parallel_cross_entropy)
    ours = {
        "log-probs": logprobs.vocab_parallel_log_probs,
        "policy, KL, entropy": policy_loss,
    }
    for name, function in ours.items():
        where = f"{tokens} tokens, vocabulary {vocabulary}"
        ratio = peak(function) / theirs
        results.add(f"peak memory, {name}", where, ratio, "x Megatron's", "policy_memory")
