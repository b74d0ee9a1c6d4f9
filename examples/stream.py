"""A step that is counted as it trains: groups of answers train while others are still generated.

    torchrun --nproc-per-node 2 examples/stream.py --cpu      # or without --cpu, on GPUs

Each rank trains the prompts that reach it, in chunks as they arrive; their number is not known
beforehand. The loss itself leaves out tokens that are too unlikely. The example proves that the
gradient equals that of one process with the whole step, whatever the order and the chunks.

The model and the losses come from `custom_loop.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from custom_loop import (
    ANSWERS,
    LENGTH,
    PROMPTS,
    Batch,
    logits_of,
    next_log_probs,
    prove,
    report,
    rollouts,
    start,
    token_losses,
    update,
)
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.mcore import LossHook, MaskedLosses, TokenLoss
from megatron_loss_agg.report import Mean

UNLIKELY = (
    3.5  # tokens whose -log p is at least this are left out; it is ln 32 = 3.47 for a uniform p
)


def is_likely(log_probs: Tensor) -> Tensor:
    return (-log_probs.detach() < UNLIKELY).to(log_probs)


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, TokenLoss]:
    batch = {key: value.cuda() for key, value in next(data_iterator).items()}
    mask = batch["loss_mask"]

    def compute(logits: Tensor) -> MaskedLosses:
        log_probs = next_log_probs(logits, batch["tokens"])
        return MaskedLosses(token_losses(log_probs, batch), mask * is_likely(log_probs))

    return logits_of(model, batch), TokenLoss(compute, mask)


def arriving(whole: Batch, step: int) -> Iterator[list[Batch]]:
    """The prompts of this rank, in chunks that differ in number, size and order in every step."""
    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    order = random.Random(step)
    prompts = list(range(PROMPTS))
    order.shuffle(prompts)
    # A rank may get none at all.
    mine = [prompt for prompt in prompts if order.randrange(ranks) == rank]
    while mine:
        size = order.randint(1, len(mine))
        chunk, mine = mine[:size], mine[size:]
        rows = [slice(prompt * ANSWERS, (prompt + 1) * ANSWERS) for prompt in chunk]
        yield [{key: value[x] for key, value in whole.items()} for x in rows]


def true_gradient(model: Any, whole: Batch) -> list[Tensor]:
    """The gradient of the step, written out: one process, no chunks."""
    whole = {key: value.cuda() for key, value in whole.items()}
    log_probs = next_log_probs(logits_of(model, whole), whole["tokens"])
    losses = token_losses(log_probs, whole)
    mask = whole["loss_mask"] * is_likely(log_probs)
    means = []
    for prompt in range(PROMPTS):
        rows = whole["prompt_ids"] == prompt
        if mask[rows].any():  # empty="skip"
            means.append((losses[rows] * mask[rows]).sum() / mask[rows].sum())
    return list(torch.autograd.grad(torch.stack(means).mean(), list(model.parameters())))


def main() -> None:
    ddp, optimizer = start()
    hook = LossHook(LossAggregation(mode="prompt_mean", empty="skip"))
    forward_backward = hook.wrap(get_forward_backward_func())
    zero = torch.zeros(1)
    no_call = {"prompt_mean loss": Mean.of(zero, zero)}  # all ranks must report the same names

    for step in range(5):
        whole = rollouts(step)
        ddp.zero_grad_buffer()
        reports = []
        with hook.stream(model=[ddp]):
            for chunk in arriving(whole, step):
                reports += forward_backward(
                    forward_step_func=forward_step,
                    data_iterator=iter(chunk),
                    model=[ddp],
                    num_microbatches=len(chunk),
                    seq_length=LENGTH,
                    micro_batch_size=1,
                )
        error = prove(step, ddp, true_gradient(ddp.module, whole))
        update(ddp, optimizer)
        report(step, reports or [no_call], error)


if __name__ == "__main__":
    main()
