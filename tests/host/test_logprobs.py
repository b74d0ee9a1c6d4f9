"""Log-probabilities and entropy of a split vocabulary, against plain PyTorch on the whole one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.grpo import logprobs
from megatron_loss_agg import weighted_sum
from tests.host.harness import error_of, on_ranks_of

SEQ, BATCH, VOCAB = 19, 2, 12  # 38 tokens: chunks of them are unequal
F64 = torch.float64
LOG_PROBS, ENTROPY = logprobs.vocab_parallel_log_probs, logprobs.vocab_parallel_entropy
BOTH = logprobs.vocab_parallel_log_probs_and_entropy
# What the logits are like, and the temperature.
CASES = [("normal", 1.0), ("normal", 0.7), ("wide", 0.3), ("filtered", 1.0)]


def data(kind: str = "normal") -> tuple[Tensor, Tensor, Tensor]:
    """Whole logits and labels, and the gradients of log-probability and entropy."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(SEQ, BATCH, VOCAB, generator=g, dtype=F64)
    labels = torch.randint(VOCAB, (SEQ, BATCH), generator=g)
    pulls = torch.randn(2, SEQ, BATCH, generator=g, dtype=F64)
    if kind == "wide":  # exponentials of which fp64 holds only a few
        logits *= 300
    if kind == "filtered":  # tokens that cannot be drawn, all of one rank's among them
        logits[..., VOCAB // 2 :] = -torch.inf
        logits[..., 0] = -torch.inf
        labels = 1 + labels % (VOCAB // 2 - 1)
    return logits, labels, pulls


def rank_part(logits: Tensor) -> Tensor:
    return logits.chunk(2, dim=-1)[dist.get_rank()].clone()


def plain(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits / temperature).log_softmax(dim=-1)
    chosen = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen, -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(dim=-1)


def differences(kind: str, temperature: float, transposed: bool) -> list[tuple[float, float]]:
    """Of values and gradients from those of plain code, and the size of these."""
    logits, labels, pulls = data(kind)
    logits.requires_grad_()
    values = plain(logits, labels, temperature)
    calls: list[tuple[Callable[[Tensor], Any], slice]] = [
        (lambda x: [LOG_PROBS(x, labels, temperature)], slice(1)),
        (lambda x: [ENTROPY(x, temperature)], slice(1, 2)),
        (lambda x: BOTH(x, labels, temperature), slice(2)),
    ]
    differences = []
    for call, which in calls:
        shard = rank_part(logits.detach())
        leaf = (shard.transpose(0, 1).contiguous() if transposed else shard).requires_grad_()
        ours = call(leaf.transpose(0, 1) if transposed else leaf)
        (gradient,) = torch.autograd.grad(ours, leaf, pulls[which].unbind())
        gradient = gradient.transpose(0, 1) if transposed else gradient
        wanted = torch.autograd.grad(
            values[which], logits, pulls[which].unbind(), retain_graph=True
        )
        pairs = zip((*ours, gradient), (*values[which], rank_part(wanted[0])), strict=True)
        differences += [(float((x - y).norm()), float(y.norm())) for x, y in pairs]
    return differences


@on_ranks_of("tp2")
def test_values_and_gradients(name: str) -> None:
    for (kind, temperature), transposed in product(CASES, (False, True)):
        for error, size in differences(kind, temperature, transposed):
            # A softmax near 0 or 1 has a gradient near 0, of probabilities rounded near 1.
            assert error <= 1e-12 * size + 1e-15, (kind, temperature, transposed)


@on_ranks_of("tp2")
def test_log_probabilities_are_megatrons_to_the_bit(name: str) -> None:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits, labels, pulls = data()
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for function, sign in ((vocab_parallel_cross_entropy, -1), (LOG_PROBS, 1)):
            leaf = rank_part(logits).to(dtype).requires_grad_()
            value = sign * function(leaf * 1, labels)
            results.append((value.detach(), *torch.autograd.grad(value, leaf, pulls[0].float())))
        (theirs, their_gradient), (ours, our_gradient) = results
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs)
        assert our_gradient.dtype == dtype and torch.equal(our_gradient, their_gradient)


@on_ranks_of("tp2")
def test_nothing_is_overwritten_and_two_calls_on_the_same_logits_are_right(name: str) -> None:
    logits, labels, (pulls, _) = data()
    for dtype in (torch.float32, torch.bfloat16, F64):
        before = rank_part(logits).to(dtype)
        leaf = before.clone().requires_grad_()
        same = leaf * 1
        values, (again, entropy) = LOG_PROBS(same, labels), BOTH(same, labels)
        assert torch.equal(values, again) and torch.equal(entropy, ENTROPY(same))
        gradients = [
            torch.autograd.grad(x, leaf, pulls.to(x), retain_graph=True)[0]
            for x in (values, again, values)  # backward through the first call runs twice
        ]
        assert gradients[0].norm() > 1
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
        assert torch.equal(same, before) and torch.equal(leaf, before)


@on_ranks_of("tp2")
def test_in_inference_mode_values_are_the_same(name: str) -> None:
    logits, labels, _ = data()
    expected = [x.float() for x in plain(logits, labels, 1.0)]
    shard = rank_part(logits).float()
    with torch.inference_mode():
        for x in (shard, shard.clone(), shard * 1):  # the last two are inference tensors
            values = [LOG_PROBS(x, labels), ENTROPY(x)]
            torch.testing.assert_close(values, expected)
            torch.testing.assert_close([*BOTH(x, labels)], expected)


@on_ranks_of("dp1")
def test_a_function_may_be_recomputed_in_the_backward_pass(name: str) -> None:
    from megatron.core.tensor_parallel import checkpoint

    logits, labels, _ = data()

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = logits.float().requires_grad_()
        checkpoint(function, False, leaf * 1).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def by_halves(x: Tensor) -> Tensor:
        parts = zip(x.split(SEQ // 2), labels.split(SEQ // 2), strict=True)
        return torch.cat([LOG_PROBS(*part) for part in parts])

    expected = gradient(lambda x: plain(x, labels, 1.0)[0])
    for function in (lambda x: LOG_PROBS(x, labels), by_halves):
        torch.testing.assert_close(gradient(function), expected)


@on_ranks_of("tp2")
def test_gathered_logits_are_refused_on_all_ranks(name: str) -> None:
    logits, labels, _ = data()
    text = (
        "HostError: logits must be this rank's shard of the vocabulary, got the same logits on all "
        "2 tensor-parallel ranks. Build the model with parallel_output=True."
    )
    not_a_number = logits.clone()
    not_a_number[3] = torch.nan
    for gathered in (logits, logits.bfloat16(), not_a_number, logits[:1]):
        y = labels[: len(gathered)]
        assert error_of(LOG_PROBS, gathered, y) == error_of(BOTH, gathered, y) == text
        assert error_of(ENTROPY, gathered) == text


@on_ranks_of("tp2")
def test_shards_that_are_alike_for_some_tokens_are_not_refused(name: str) -> None:
    logits, labels, _ = data()
    gathered = rank_part(logits)
    gathered[1:] = logits[1:, :, : VOCAB // 2]  # all tokens but the first row's
    for shard in (gathered, torch.zeros_like(gathered), gathered[:0]):  # zeros: a new output layer
        whole = [torch.empty_like(shard) for _ in range(2)]
        dist.all_gather(whole, shard)
        y = labels[: len(shard)]
        expected = plain(torch.cat(whole, dim=-1), y, 1.0)
        torch.testing.assert_close(BOTH(shard, y), expected, rtol=1e-12, atol=1e-12)


@on_ranks_of("dp1")
def test_labels_and_results_may_be_transposed(name: str) -> None:
    logits, labels, (pulls, _) = data()
    whole = logits.requires_grad_()
    wanted = torch.autograd.grad(plain(whole, labels, 1.0)[0], whole, pulls)[0].float()
    for function in (LOG_PROBS, lambda *x: BOTH(*x)[0]):
        leaf = logits.detach().float().requires_grad_()
        result = function(leaf * 1, labels.t().contiguous().t()).t()
        (gradient,) = torch.autograd.grad(result, leaf, pulls.float().t().contiguous())
        torch.testing.assert_close(gradient, wanted)


@on_ranks_of("dp1")
def test_tokens_of_weight_0_may_hold_anything(name: str) -> None:
    w, labels = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.int64)
    rows = [[torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf], [0.0, 0.0]]
    # Of log p = log 1/2: [1 - 1/2, -1/2]; the entropy is at its maximum.
    log_prob_grad, entropy_grad = [0.0] * 6 + [0.5, -0.5], [0.0] * 8
    for function, gradient in (
        (lambda x: LOG_PROBS(x, labels), log_prob_grad),
        (ENTROPY, entropy_grad),
        (lambda x: sum(BOTH(x, labels)), log_prob_grad),
    ):
        leaf = torch.tensor(rows, requires_grad=True)
        total = weighted_sum(w, function(leaf * 1))
        assert total.isfinite()
        assert torch.autograd.grad(total, leaf)[0].view(-1).tolist() == gradient


LOGITS, LABELS = torch.zeros(3, 2, 4), torch.zeros(3, 2, dtype=torch.int64)
LABELS_MUST = "labels must be integers of shape (3, 2), got"
REFUSED = [
    (
        (LOGITS, LABELS.t()),
        f"{LABELS_MUST} a torch.int64 tensor of shape (2, 3). Pass one label for each token of the "
        "logits.",
    ),
    (
        (LOGITS, LABELS.float()),
        f"{LABELS_MUST} a torch.float32 tensor of shape (3, 2). Pass one label for each token of "
        "the logits.",
    ),
    (
        (LOGITS, LABELS, 0.0),
        "temperature must be a number > 0, got 0.0. Pass that of the rollout.",
    ),
    (
        (LABELS, LABELS),
        "logits must be a floating-point, dense tensor, got a torch.int64 tensor of shape (3, 2). "
        "Convert it.",
    ),
]


@on_ranks_of("dp1")
def test_refusals_say_what_to_change(name: str) -> None:
    for args, text in REFUSED:
        assert error_of(LOG_PROBS, *args) == f"OptionError: {text}"


@on_ranks_of("tp2")
def test_beside_the_logits_there_is_their_gradient_alone(name: str) -> None:
    """Most bytes alive in forward and backward, as a multiple of Megatron's cross entropy's.

    That overwrites fp32 logits with their gradient, and copies half-precision ones to fp32.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from benchmarks.memory import LiveBytes

    tokens, vocab = 64, 4096
    labels = torch.arange(tokens).view(tokens, 1)
    # Different on the two ranks.
    row = torch.linspace(0, 1 + dist.get_rank(), vocab)

    def peak(function: Any, dtype: torch.dtype) -> int:
        leaf = torch.zeros(tokens, 1, 1, dtype=dtype, requires_grad=True)
        with LiveBytes() as memory:
            # Made here, so that a buffer that replaces the logits is not held against it.
            function(leaf.expand(-1, -1, vocab) + row.to(dtype)).sum().backward()
        return memory.peak

    for dtype, multiple in ((torch.float32, 2.3), (torch.bfloat16, 1.0)):
        stock = peak(lambda x: vocab_parallel_cross_entropy(x, labels), dtype)
        assert peak(lambda x: LOG_PROBS(x, labels), dtype) < multiple * stock
        assert peak(lambda x: sum(BOTH(x, labels, 0.7)), dtype) < multiple * stock
        assert peak(ENTROPY, dtype) < multiple * stock
