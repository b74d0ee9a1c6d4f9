"""A custom training loop on Megatron-Core with exact loss aggregation, in two lines.

    torchrun --nproc-per-node 2 examples/custom_loop.py --cpu      # or without --cpu, on GPUs

A loop as in reinforcement learning frameworks: it calls Megatron's forward-backward function itself,
with a different loss than Megatron's (here REINFORCE). It proves that the gradient of every step
equals that of the whole step in one process. The plugin's two lines are marked with (1) and (2).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

if "--cpu" in sys.argv:
    from megatron_loss_agg.mcore import cpu

    cpu.enable()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_loss_agg import LossAggregation, predicting_mask
from megatron_loss_agg.mcore import LossHook, TokenLoss
from megatron_loss_agg.report import reduce_reports

VOCAB, LENGTH, PROMPTS, ANSWERS = 32, 16, 4, 4
Batch = dict[str, Tensor]


def rollouts(step: int) -> Batch:
    """The whole step: several answers of various lengths to each prompt, and their advantages."""
    generator = torch.Generator().manual_seed(step)
    number = PROMPTS * ANSWERS
    length = torch.randint(3, LENGTH + 1, (number, 1), generator=generator)
    position = torch.arange(LENGTH)
    response = ((position >= 2) & (position < length)).double()  # after a prompt of two tokens
    return {
        "tokens": torch.randint(0, VOCAB, (number, LENGTH), generator=generator),
        "lengths": length.squeeze(1),
        # The loss of token t + 1 is at position t.
        "loss_mask": predicting_mask(response),
        "advantages": torch.randn(number, 1, generator=generator, dtype=torch.float64),
        "prompt_ids": torch.arange(PROMPTS).repeat_interleave(ANSWERS),
    }


def next_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """``log p(next token)``, [rows, seq]."""
    following = tokens.roll(-1, dims=1).unsqueeze(-1)
    return logits.log_softmax(-1).gather(-1, following).squeeze(-1)


def token_losses(log_probs: Tensor, batch: Batch) -> Tensor:
    """REINFORCE, per token: ``-advantage * log p(next token)``."""
    return -batch["advantages"].to(log_probs) * log_probs


def logits_of(model: Any, batch: Batch) -> Tensor:
    tokens = batch["tokens"]
    later = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
    positions = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
    return model(tokens, positions, later)


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, TokenLoss]:
    batch = {key: value.cuda() for key, value in next(data_iterator).items()}

    def compute(logits: Tensor) -> Tensor:
        return token_losses(next_log_probs(logits, batch["tokens"]), batch)

    return logits_of(model, batch), TokenLoss(compute, batch["loss_mask"])


def my_microbatches(whole: Batch) -> list[Batch]:
    """This data-parallel rank's rows, in two microbatches, whose sizes differ from rank to rank.

    A rank needs two rows, so that neither microbatch is empty: 16 rows are enough for 8 ranks.
    """
    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    rows = torch.arange(len(whole["tokens"]))[rank::ranks]  # a prompt's are on several ranks
    cut = 1 + rank % (len(rows) - 1)
    return [{k: v[part] for k, v in whole.items()} for part in (rows[:cut], rows[cut:])]


def prompt_mean_gradient(model: GPTModel, whole: Batch) -> list[Tensor]:
    """The true gradient of the step, written out: one process, no microbatches."""
    whole = {key: value.cuda() for key, value in whole.items()}
    log_probs = next_log_probs(logits_of(model, whole), whole["tokens"])
    losses, mask = token_losses(log_probs, whole), whole["loss_mask"]
    means = []
    for prompt in range(PROMPTS):
        rows = whole["prompt_ids"] == prompt
        means.append((losses[rows] * mask[rows]).sum() / mask[rows].sum())
    return list(torch.autograd.grad(torch.stack(means).mean(), list(model.parameters())))


def build() -> GPTModel:
    torch.set_default_dtype(torch.float64)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
    ).cuda()


def distribute(model: GPTModel) -> DistributedDataParallel:
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=False)
    return DistributedDataParallel(model.config, settings, model)


def start() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    if "--cpu" not in sys.argv:
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("gloo" if "--cpu" in sys.argv else "nccl")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    ddp = distribute(build())
    return ddp, torch.optim.SGD(ddp.module.parameters(), lr=0.5)


def prove(step: int, ddp: DistributedDataParallel, expected: list[Tensor]) -> float:
    """The error of the gradient, relative and norm-wise; raises if it is more than rounding."""
    got = [parameter.main_grad for parameter in ddp.module.parameters()]
    difference = sum((a - b).square().sum() for a, b in zip(got, expected, strict=True))
    error = float((difference / sum(b.square().sum() for b in expected)).sqrt())
    if not error < 1e-14:  # also raises for NaN
        raise ArithmeticError(f"step {step}: relative gradient error {error:.1e}, not < 1e-14")
    return error


def update(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for parameter in ddp.module.parameters():
        parameter.grad = parameter.main_grad
    optimizer.step()
    optimizer.zero_grad()


def report(step: int, reports: list[Batch], error: float) -> None:
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
    loss = reduce_reports(reports, ranks)["prompt_mean loss"]
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss:.6f}, gradient error {error:.1e}")


def main() -> None:
    ddp, optimizer = start()

    hook = LossHook(LossAggregation(mode="prompt_mean"))  # (1)
    forward_backward = hook.wrap(get_forward_backward_func())  # (2)

    for step in range(5):
        whole = rollouts(step)
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
