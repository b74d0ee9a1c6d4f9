"""Direct preference optimization on Megatron-Core: a loss by pair, exact over the whole step.

    torchrun --nproc-per-node 2 examples/dpo.py --cpu      # or without --cpu, on GPUs

A preference loss has one number for each pair of answers, not one for each token:

    loss = -log sigmoid(beta * ((log p_c - log q_c) - (log p_r - log q_r)))

with the log-probabilities of a chosen and a rejected answer under the model, ``p``, and under a
reference model, ``q``: a copy of the model from before the first step. For the hook, a pair is a
sample with one loss. It reads the number of pairs (1) and gets a loss function of sums over whole
answers (2). It computes these sums from numbers by token, also under context parallelism.
``sample_mean`` is the mean over pairs, ``prompt_mean`` the mean over prompts. The example proves
that the gradient of every step equals that of the whole step in one process. The model, and the
code around a step, come from custom_loop.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from custom_loop import (
    LENGTH,
    VOCAB,
    Batch,
    build,
    logits_of,
    my_microbatches,
    next_log_probs,
    prove,
    report,
    start,
    update,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_loss_agg import LossAggregation, Microbatch, predicting_mask
from megatron_loss_agg.mcore import LossHook, SampleLoss

PAIRS_BY_PROMPT, BETA = (1, 3, 5, 7), 0.5
PROMPTS, PAIRS = len(PAIRS_BY_PROMPT), sum(PAIRS_BY_PROMPT)


def preferences(step: int) -> Batch:
    """The whole step: pairs [pairs, 2, ...], the chosen answer first."""
    generator = torch.Generator().manual_seed(step)
    length = torch.randint(3, LENGTH + 1, (PAIRS, 2, 1), generator=generator)
    position = torch.arange(LENGTH)
    response = ((position >= 2) & (position < length)).double()  # after a prompt of two tokens
    return {
        "tokens": torch.randint(0, VOCAB, (PAIRS, 2, LENGTH), generator=generator),
        "loss_mask": predicting_mask(response.flatten(0, 1)).view_as(response),
        "prompt_ids": torch.arange(PROMPTS).repeat_interleave(torch.tensor(PAIRS_BY_PROMPT)),
    }


def answers(batch: Batch) -> Batch:
    """Rows [2 * pairs, seq]."""
    return {"tokens": batch["tokens"].flatten(0, 1), "loss_mask": batch["loss_mask"].flatten(0, 1)}


def pair_losses(answer_sums: Tensor, batch: Batch) -> Tensor:
    """Losses [pairs], from the log-probabilities of whole answers, [2 * pairs]."""
    chosen, rejected = (answer_sums.view(-1, 2) - batch["reference"]).unbind(dim=1)
    return -logsigmoid(BETA * (chosen - rejected))


def whole_log_probs(model: Any, batch: Batch) -> Tensor:
    """Log-probabilities of whole answers, [2 * pairs], in one process."""
    rows = answers(batch)
    log_probs = next_log_probs(logits_of(model, rows), rows["tokens"])
    return (log_probs * rows["loss_mask"]).sum(dim=1)


def read(batch: Batch) -> Microbatch:
    sequences = Microbatch(answers(batch)["loss_mask"])
    pairs, prompt_ids = len(batch["tokens"]), batch["prompt_ids"]
    return Microbatch.of_samples(pairs, sequences=sequences, prompt_ids=prompt_ids)  # (1)


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, SampleLoss]:
    batch = {key: value.cuda() for key, value in next(data_iterator).items()}
    rows = answers(batch)

    def losses(log_probs: Tensor, lengths: Tensor) -> Tensor:
        return pair_losses(log_probs, batch)

    log_probs = partial(next_log_probs, tokens=rows["tokens"])
    return logits_of(model, rows), SampleLoss(losses, log_probs, rows["loss_mask"])  # (2)


def prompt_mean_gradient(model: Any, whole: Batch) -> list[Tensor]:
    """The true gradient of the step, written out: one process, no microbatches."""
    losses, prompt = pair_losses(whole_log_probs(model, whole), whole), whole["prompt_ids"]
    means = [losses[prompt == p].mean() for p in range(PROMPTS)]
    return list(torch.autograd.grad(torch.stack(means).mean(), list(model.parameters())))


def main() -> None:
    ddp, optimizer = start()
    reference = build().requires_grad_(False)
    reference.load_state_dict(ddp.module.state_dict())
    hook = LossHook(LossAggregation(mode="prompt_mean"), read_batch=read)
    forward_backward = hook.wrap(get_forward_backward_func())

    for step in range(5):
        whole = {key: value.cuda() for key, value in preferences(step).items()}
        whole["reference"] = whole_log_probs(reference, whole).view(-1, 2)
        microbatches = my_microbatches(whole)
        ddp.zero_grad_buffer()
        reports = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=[ddp],
            num_microbatches=len(microbatches),
            seq_length=LENGTH,
            micro_batch_size=1,
        )
        error = prove(step, ddp, prompt_mean_gradient(ddp.module, whole))
        update(ddp, optimizer)
        report(step, reports, error)


if __name__ == "__main__":
    main()
