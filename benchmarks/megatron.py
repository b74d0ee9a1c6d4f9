"""The real Megatron-Core in one CPU process: a GPT, its batches, and training steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.loss_function import loss_func
from benchmarks.shapes import SEED, Gpt, Step

Batch = dict[str, Tensor]


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Megatron's process groups. Turns the CPU stand-in for a GPU on, and that for good."""
    from megatron_loss_agg.mcore import cpu

    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(SEED)
        torch.manual_seed(SEED)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(gpt: Gpt, length: int) -> Any:
    """A GPT in Megatron's DDP, for rows of ``length`` tokens."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    model = gpt_model(gpt, length, get_gpt_layer_local_spec(), use_cpu_initialization=True)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=False)
    return DistributedDataParallel(model.config, settings, model)


def gpt_model(gpt: Gpt, length: int, spec: Any, **settings: Any) -> Any:
    """A GPT of layers ``spec``, with ``settings`` besides; without kernels that need Apex."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=gpt.layers,
        hidden_size=gpt.hidden,
        num_attention_heads=gpt.heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        **settings,
    )
    return GPTModel(
        config,
        spec,
        vocab_size=gpt.vocabulary,
        max_sequence_length=length,
        position_embedding_type="rope",
    )


def causal_mask(length: int) -> Tensor:
    """What a token must not attend to, bool [1, 1, length, length]; for local layers."""
    return torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)


def batches(step: Step, vocabulary: int) -> list[Batch]:
    """One for each microbatch; the first part of every row is masked, as a prompt is."""
    generator = torch.Generator().manual_seed(SEED)
    number, rows, length = step.microbatches, step.rows, step.length
    tokens = torch.randint(vocabulary, (number, rows, length + 1), generator=generator)
    first = torch.randint(length // 2, (number, rows, 1), generator=generator)
    masks = (torch.arange(length) >= first).float()
    ids = torch.zeros(rows, dtype=torch.int64)
    return [
        {"tokens": t, "loss_mask": m, "prompt_ids": ids} for t, m in zip(tokens, masks, strict=True)
    ]


def train(
    forward_backward: Callable[..., Any], ddp: Any, data_iterator: Iterator[Batch], step: Step
) -> None:
    """One step, without the optimizer's part."""
    ddp.zero_grad_buffer()
    forward_backward(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=[ddp],
        num_microbatches=step.microbatches,
        seq_length=step.length,
        micro_batch_size=step.rows,
        forward_only=False,
    )


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
    """As in Megatron's own scripts: the model computes the losses."""
    batch = next(data_iterator)
    tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    losses = model(tokens, positions, causal_mask(length), labels=labels)
    return losses, functools.partial(loss_func, batch["loss_mask"])
