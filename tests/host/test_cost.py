"""What the hook adds to a step of the real host, counted: operations, collectives and memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import policy, weighted_sum
from megatron_loss_agg.mcore import LossHook, TokenLoss, logprobs
from tests.core.operations import WAITS, Operations
from tests.host.harness import run_host_ranks
from tests.host.steps import aggregation, batch_of, sequences

pytestmark = pytest.mark.host

FEW, MANY = 2, 12  # samples a microbatch


def batch(samples: int, layout: str) -> dict[str, Any]:
    return batch_of(list(sequences(lengths=(36,) * samples)), layout)


def forward_step(data_iterator: Any, model: Any, names: Sequence[str]) -> Any:
    """Terms of the same losses."""
    from tests.host import gpt

    losses, loss_func = gpt.forward_step(data_iterator, model)
    return losses, TokenLoss(lambda x: (dict.fromkeys(names, x), {}), *loss_func.args)


def counted_on_host() -> dict[Any, Any]:
    """Every rank, DP 2: operations of one microbatch's loss, and all-gathers of one step."""
    from tests.host import gpt

    gpt.initialize()
    ddp = gpt.ddp_model()
    losses: list[list[str]] = []

    def count(loss: Any, output: Any) -> Any:
        with Operations() as operations:
            result = loss(output)
        losses.append(operations.names)
        return result

    def run(names: list[str], samples: int, layout: str) -> tuple[list[str], int]:
        """Operations of the last loss of a second step, and its all-gathers."""
        hook = LossHook({name: aggregation("prompt_mean") for name in names})
        step = partial(forward_step, names=names)
        options = {"forward_step_func": step, "schedule": gpt.schedule_with(count)}
        for _ in range(2):  # the first step also compares what it was told with what it is given
            data = iter([batch(samples, layout) for _ in range(2)])
            with Operations() as operations:
                gpt.run_step(hook, ddp, data, 2, samples, **options)
        return losses[-1], len([name for name in operations.names if "allgather" in name])

    names = ["policy", "kl", "entropy", "value", "distillation"]
    return {
        (layout, terms, samples): run(names[:terms], samples, layout)
        for layout, terms, samples in product(("bshd", "thd"), (1, 5), (FEW, MANY))
    }


@pytest.fixture(scope="module")
def counted():
    return run_host_ranks(counted_on_host, 2)[0]


@pytest.mark.parametrize("terms", [1, 5])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_any_number_of_samples_costs_the_same_no_wait_and_two_collectives(counted, layout, terms):
    (few, _), (many, all_gathers) = (counted[layout, terms, samples] for samples in (FEW, MANY))
    assert few == many
    assert len(few) <= (30 if layout == "bshd" else 50) * terms
    assert not WAITS & set(many)
    assert all_gathers == 2  # of the whole step


@pytest.mark.parametrize(("layout", "most"), [("bshd", 17), ("thd", 26)])
def test_a_term_more_costs_its_weights_its_sum_and_its_report(counted, layout, most):
    one, five = (counted[layout, terms, MANY][0] for terms in (1, 5))
    sums = [made.count("aten::hardshrink_backward") for made in (one, five)]
    assert sums[1] == sums[0] + 4
    assert len(five) <= len(one) + most * 4


def bytes_before_the_schedule(samples: int) -> int:
    """Every rank, TP 2, of which the first alone reads: what is broadcast of the step's plan."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from torch.distributed import distributed_c10d

    from tests.host import gpt

    gpt.initialize(tensor_model_parallel_size=2)
    names = ("policy", "kl")
    hook = LossHook({name: aggregation("prompt_mean") for name in names})
    step = partial(forward_step, names=names)
    ddp, sent, before = gpt.ddp_model(), [0], [0]
    stock = distributed_c10d.broadcast

    def counting(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += x.numel() * x.element_size()
        return stock(x, *args, **kwargs)

    def schedule(**arguments: Any) -> Any:
        before[0] = sent[0]
        return get_forward_backward_func()(**arguments)

    data = iter([batch(samples, "thd")]) if gpt.reads_data() else None
    with mock.patch.object(distributed_c10d, "broadcast", counting):
        gpt.run_step(hook, ddp, data, 1, samples, forward_step_func=step, schedule=schedule)
    return before[0]


def test_ranks_that_read_no_data_get_a_few_numbers_a_sample() -> None:
    few, many = (run_host_ranks(bytes_before_the_schedule, 2, n)[0] for n in (FEW, MANY))
    assert few > 0
    # In fp32 its weights would take 4 * 2 * 36 = 288 bytes a sample, and its mask 144 or 288.
    assert many - few <= 100 * (MANY - FEW)


def peaks(dtype: torch.dtype) -> dict[str, float]:
    """Most bytes alive in forward and backward, as a multiple of Megatron's cross entropy's."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from benchmarks.memory import LiveBytes
    from tests.host import gpt

    gpt.initialize(tensor_model_parallel_size=2)
    tokens, vocab = 64, 4096
    labels = torch.arange(tokens).view(tokens, 1)
    w = torch.full((tokens, 1), 1 / tokens)

    def policy_loss(log_probs: Tensor) -> Tensor:
        return policy.clipped_policy_loss(log_probs, log_probs.detach(), w).losses

    def with_entropy(logits: Tensor) -> Tensor:
        log_probs, entropy = logprobs.vocab_parallel_log_probs_and_entropy(logits, labels, 0.7)
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
        "policy": lambda x: policy_loss(logprobs.vocab_parallel_log_probs(x, labels)),
        "policy and entropy": with_entropy,
        "entropy": logprobs.vocab_parallel_entropy,
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
