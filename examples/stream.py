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
import torch.distributed as dist
from custom_loop import (
    ANSWERS,
    LENGTH,
    PROMPTS,
    Batch,
    logits_of,
    prove,
    rollouts,
    start,
    token_losses,
    update,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.mcore import LossHook, MaskedLosses, TokenLoss

UNLIKELY = 4.0  # tokens with at least this loss are left out


def is_trusted(losses: Tensor) -> Tensor:
    return (losses.detach().abs() < UNLIKELY).to(losses)


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, TokenLoss]:
    batch = {key: value.cuda() for key, value in next(data_iterator).items()}
    mask = batch["loss_mask"]

    def compute(logits: Tensor) -> MaskedLosses:
        losses = token_losses(logits, batch)
        return MaskedLosses(losses, mask * is_trusted(losses))

    return logits_of(model, batch), TokenLoss(compute, mask)


def arriving(whole: Batch, step: int) -> Iterator[list[Batch]]:
    """The prompts of this rank, in chunks that differ in number, size and order in every step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
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
    losses = token_losses(logits_of(model, whole), whole)
    mask = whole["loss_mask"] * is_trusted(losses)
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

    for step in range(5):
        whole = rollouts(step)
        ddp.zero_grad_buffer()
        reports, calls = [], 0
        with hook.stream(model=[ddp]):
            for chunk in arriving(whole, step):
                calls += 1
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
        loss = sum((x["prompt_mean loss"] for x in reports), torch.zeros(2).cuda())
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            mean = float(loss[0] / loss[1])
            print(f"step {step}: {calls} calls here, loss {mean:.6f}, gradient error {error:.1e}")


if __name__ == "__main__":
    main()
