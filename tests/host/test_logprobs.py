"""Log-probabilities and entropy of a split vocabulary, against plain PyTorch on the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import policy, weighted_sum
from megatron_loss_agg.mcore import logprobs
from tests.host import gpt
from tests.host.harness import error_of, run_host_ranks

SEQ, BATCH, VOCAB = 19, 2, 12  # 38 tokens: the parts that they are worked in are unequal
F64 = torch.float64
LOG_PROBS, ENTROPY = logprobs.vocab_parallel_log_probs, logprobs.vocab_parallel_entropy
BOTH = logprobs.vocab_parallel_log_probs_and_entropy
# What the logits are like, and the temperature.
CASES = [("normal", 1.0), ("normal", 0.7), ("wide", 1.0), ("wide", 0.3), ("filtered", 1.0)]


def data(kind: str = "normal") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole logits and labels, and the gradients of log-probability and entropy."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(SEQ, BATCH, VOCAB, generator=g, dtype=F64)
    labels = torch.randint(VOCAB, (SEQ, BATCH), generator=g)
    pull = torch.randn(2, SEQ, BATCH, generator=g, dtype=F64)
    if kind == "wide":  # exponentials of which fp64 holds only a few
        logits *= 300
    if kind == "filtered":  # tokens that cannot be drawn, all of one rank's among them
        logits[..., VOCAB // 2 :] = -torch.inf
        logits[..., 0] = -torch.inf
        labels = 1 + labels % (VOCAB // 2 - 1)
    return logits, labels, pull[0], pull[1]


def ours(logits: Tensor, labels: Tensor, temperature: float) -> dict[str, tuple[Tensor, ...]]:
    # Not the leaf: fp64 under KeepDouble is worked on in place, as fp32 is.
    return {
        "log_probs": (LOG_PROBS(logits * 1, labels, temperature),),
        "entropy": (ENTROPY(logits * 1, temperature),),
        "both": BOTH(logits * 1, labels, temperature),
    }


def plain(logits: Tensor, labels: Tensor, temperature: float) -> dict[str, tuple[Tensor, ...]]:
    log_p = (logits / temperature).log_softmax(dim=-1)
    chosen = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(dim=-1)
    return {"log_probs": (chosen,), "entropy": (entropy,), "both": (chosen, entropy)}


def taken(functions: Any, tp: int, kind: str, temperature: float) -> dict[str, list[Tensor]]:
    """By function: values, and the gradient of this rank's part of the logits."""
    logits, labels, *pulls = data(kind)
    leaf = logits.chunk(tp, dim=-1)[dist.get_rank() if tp > 1 else 0].clone().requires_grad_()
    found = {}
    for name, values in functions(leaf, labels, temperature).items():
        of_values = {"log_probs": pulls[:1], "entropy": pulls[1:], "both": pulls}[name]
        (gradient,) = torch.autograd.grad(values, leaf, of_values, retain_graph=True)
        found[name] = [*(x.detach() for x in values), gradient]
    return found


def on_ranks(tp: int) -> list[dict[str, list[Tensor]]]:
    gpt.initialize(tensor_model_parallel_size=tp)
    with gpt.KeepDouble():
        return [taken(ours, tp, *case) for case in CASES]


@pytest.mark.parametrize("tp", [1, 2])
def test_values_and_gradients(tp: int) -> None:
    for rank, cases in enumerate(run_host_ranks(on_ranks, tp, tp)):
        for got, case in zip(cases, CASES, strict=True):
            for name, (*values, grad) in taken(plain, 1, *case).items():
                part = grad.chunk(tp, dim=-1)[rank]
                for x, ref in zip(got[name], [*values, part], strict=True):
                    # A softmax near 0 or 1 has a gradient near 0, of probabilities rounded near 1.
                    assert (x - ref).norm() <= 1e-12 * ref.norm() + 1e-15, (name, case)


def against_megatron(dtype: torch.dtype) -> list[list[Tensor]]:
    """Value and gradient of Megatron's own cross entropy, negated, and of ours."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    gpt.initialize(tensor_model_parallel_size=2)
    logits, labels, pull, _ = data()
    results = []
    for function, sign in ((vocab_parallel_cross_entropy, -1), (LOG_PROBS, 1)):
        leaf = logits.chunk(2, dim=-1)[dist.get_rank()].to(dtype).requires_grad_()
        value = sign * function(leaf * 1, labels)
        results.append([value.detach(), *torch.autograd.grad(value, leaf, pull.float())])
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_megatrons_to_the_bit(dtype: torch.dtype) -> None:
    for (theirs, their_grad), (ours, our_grad) in run_host_ranks(against_megatron, 2, dtype):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs)
        assert our_grad.dtype == dtype and torch.equal(our_grad, their_grad)


def overwritten() -> list[str | None]:
    """One rank: which calls leave logits as they were; and the errors of those that did not."""
    gpt.initialize()
    labels, kept = torch.zeros(2, 1, dtype=torch.int64), torch.randn(2, 1, 5)
    logits, halved = kept.clone(), kept.bfloat16()
    expected = ENTROPY(logits)
    assert torch.equal(logits, kept)
    LOG_PROBS(halved, labels)
    assert torch.equal(halved, kept.bfloat16())
    assert not ENTROPY(halved).isnan().any()
    with torch.inference_mode():
        LOG_PROBS(logits.clone(), labels)
    LOG_PROBS(logits, labels)
    assert not torch.equal(logits, kept)
    errors = [error_of(ENTROPY, logits), error_of(BOTH, logits, labels)]
    logits.copy_(kept)  # a buffer that is filled anew is logits again
    assert torch.equal(ENTROPY(logits), expected)
    return errors


def test_overwritten_logits_are_refused() -> None:
    text = (
        "PolicyError: an earlier call has overwritten these fp32 logits with their softmax; "
        "expected logits: call vocab_parallel_log_probs_and_entropy once, or pass each call a clone"
    )
    assert run_host_ranks(overwritten, 1) == [[text, text]]


def unusable() -> tuple[list[list[float]], list[str | None]]:
    """Gradients at tokens of weight 0 whose logits are unusable, and at one that counts; errors."""
    gpt.initialize()
    w, labels = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.int64)
    rows = [[torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf], [0.0, 0.0]]
    gradients = []
    for function in (lambda x: LOG_PROBS(x, labels), ENTROPY, lambda x: sum(BOTH(x, labels))):
        leaf = torch.tensor(rows, requires_grad=True)
        total = weighted_sum(w, function(leaf * 1))
        assert total.isfinite()
        gradients.append(torch.autograd.grad(total, leaf)[0].view(-1).tolist())
    logits, labels = torch.zeros(3, 2, 4), torch.zeros(3, 2, dtype=torch.int64)
    return gradients, [
        error_of(LOG_PROBS, logits, labels.t()),
        error_of(LOG_PROBS, logits.transpose(0, 1), labels.t()),
        error_of(LOG_PROBS, logits, labels, 0.0),
        error_of(ENTROPY, labels),
    ]


def test_unused_tokens_may_hold_anything_and_refusals_say_what_to_change() -> None:
    (((log_probs, entropy, both), errors),) = run_host_ranks(unusable, 1)
    # Of log p = log 1/2: [1 - 1/2, -1/2]; the entropy is at its maximum.
    assert log_probs == both == [0.0] * 6 + [0.5, -0.5]
    assert entropy == [0.0] * 8
    assert errors == [
        "PolicyError: labels are (2, 3); expected (3, 2), one per token",
        "PolicyError: logits of shape (2, 3, 4) are not contiguous; pass them untransposed, and "
        "labels as they are",
        "PolicyError: temperature=0.0; expected a number > 0",
        "PolicyError: logits is a torch.int64 tensor of shape (3, 2); expected a floating-point, "
        "dense tensor",
    ]


def peaks(dtype: torch.dtype) -> dict[str, float]:
    """Most bytes alive in forward and backward, as a multiple of Megatron's cross entropy's."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from benchmarks.memory import LiveBytes

    gpt.initialize(tensor_model_parallel_size=2)
    tokens, vocab = 64, 4096
    labels = torch.arange(tokens).view(tokens, 1)
    w = torch.full((tokens, 1), 1 / tokens)

    def policy_loss(log_probs: Tensor) -> Tensor:
        return policy.clipped_policy_loss(log_probs, log_probs.detach(), w).losses

    def with_entropy(logits: Tensor) -> Tensor:
        log_probs, entropy = BOTH(logits, labels, 0.7)
        return policy_loss(log_probs) - entropy

    def plain(logits: Tensor) -> Tensor:
        log_p = logits.float().log_softmax(dim=-1)
        return -(log_p.exp() * log_p).sum(dim=-1) - log_p.gather(-1, labels.unsqueeze(-1))[..., 0]

    def peak(function: Any) -> int:
        leaf = torch.zeros(tokens, 1, 1, dtype=dtype, requires_grad=True)
        with LiveBytes() as memory:
            # Made here, so that a buffer that replaces the logits is not held against it.
            losses = function(leaf.expand(-1, -1, vocab) + 0)
            weighted_sum(w, losses).backward()
        return memory.peak

    stock = peak(lambda logits: vocab_parallel_cross_entropy(logits, labels))
    functions = {
        "policy": lambda x: policy_loss(LOG_PROBS(x, labels)),
        "policy and entropy": with_entropy,
        "entropy": ENTROPY,
        "plain": plain,
    }
    return {name: peak(function) / stock for name, function in functions.items()}


def test_no_second_copy_of_the_logits() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for ratio in run_host_ranks(peaks, 2, dtype):
            # Of tokens, and of one part in 32 of the vocabulary's buffer, there is some more.
            assert ratio["policy"] < 1.02
            assert ratio["policy and entropy"] < 1.08
            # Its gradient is a buffer of its own, beside the logits that it leaves as they are.
            assert ratio["entropy"] < (2.2 if dtype == torch.float32 else 1.0)
            assert ratio["plain"] > 3  # so the measure tells
