"""The real Megatron-Core on a CPU or on GPUs: a GPT, its batches, and training steps."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.shapes import MODE, SEED, Gpt, Step

Batch = dict[str, Tensor]
Data = list[Batch] | Iterator[Batch]
LIMIT = timedelta(seconds=90)  # for a collective


@contextlib.contextmanager
def groups(gpu: bool = False) -> Iterator[None]:
    """Megatron's process groups over the ranks in the environment, or over only this rank.

    Without ``gpu``, a CPU stands in for a GPU from then on.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if gpu:
        torch.cuda.set_device(rank)
    else:
        from megatron_loss_agg.mcore import cpu

        cpu.enable()
    from megatron.core import parallel_state, tensor_parallel

    port = int(
        os.environ.get("STORE_PORT", 0)
    )  # of the store in the process that started the ranks
    store = dist.TCPStore("127.0.0.1", port, is_master=not port, timeout=LIMIT)
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LIMIT)
    try:
        divide()
        tensor_parallel.model_parallel_cuda_manual_seed(SEED)
        torch.manual_seed(SEED)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def divide(cp: int = 1) -> None:
    """Make process groups of ``cp`` context-parallel ranks; the others are data-parallel."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        context_parallel_size=cp, create_gloo_process_groups=False
    )


def build(gpt: Gpt, length: int, bf16: bool = False) -> Any:
    """A GPT in Megatron's DDP, for rows of ``length`` tokens, without kernels that need Apex.

    With ``bf16``, its parameters are in bf16 and its gradients in fp32.
    """
    from megatron.core import distributed
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=gpt.layers,
        hidden_size=gpt.hidden,
        num_attention_heads=gpt.heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=distributed.finalize_model_grads,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=gpt.vocabulary,
        max_sequence_length=length,
        position_embedding_type="rope",
    ).cuda()
    if bf16:
        model = Float16Module(config, model)
    settings = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=bf16)
    return distributed.DistributedDataParallel(config, settings, model)


def batches(gpt: Gpt, step: Step) -> list[Batch]:
    """A batch for each microbatch, as from a data loader; the first part of a row is a prompt."""
    generator = torch.Generator().manual_seed(SEED)
    shape = step.microbatches, step.rows, step.length
    tokens = torch.randint(gpt.vocabulary, (*shape[:2], step.length + 1), generator=generator)
    first = torch.randint(step.length // 2, (*shape[:2], 1), generator=generator)
    columns = {
        "tokens": tokens[..., :-1],
        "labels": tokens[..., 1:],
        "loss_mask": (torch.arange(step.length) >= first).float(),
        "prompt_ids": torch.arange(shape[0] * shape[1]).view(shape[:2]) // 3,
    }
    return [
        {name: column[i].contiguous().pin_memory() for name, column in columns.items()}
        for i in range(step.microbatches)
    ]


class Training:
    """Steps of one kind, stock or hooked, over a model that both kinds may share.

    Args:
        hooked: with the plugin.
        data: the batches of every step, or an iterator over the batches of all steps.
        optimizer: None: steps only compute gradients.
        options: arguments of the `LossHook`.
    """

    def __init__(
        self, hooked: bool, ddp: Any, step: Step, data: Data, optimizer: Any = None, **options: Any
    ) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from megatron_loss_agg.mcore import LossHook

        self.ddp, self.step = ddp, step
        self._data, self._optimizer = data, optimizer
        self._causal = torch.ones(1, 1, step.length, step.length, dtype=torch.bool).triu(1).cuda()
        self._schedule = get_forward_backward_func()
        if hooked:
            self._schedule = LossHook(MODE, **options).wrap(self._schedule)

    def run(self) -> None:
        """One step."""
        self.ddp.zero_grad_buffer()
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=iter(self._data) if isinstance(self._data, list) else self._data,
            model=[self.ddp],
            num_microbatches=self.step.microbatches,
            seq_length=self.step.length,
            micro_batch_size=self.step.rows,
            forward_only=False,
        )
        if self._optimizer is not None:
            self._optimizer.step()

    def _forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        batch = {name: x.cuda(non_blocking=True) for name, x in next(data_iterator).items()}
        tokens = batch["tokens"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        losses = model(tokens, positions, self._causal, labels=batch["labels"])
        return losses, functools.partial(loss_func, batch["loss_mask"])


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, Any]:
    """The operations of Megatron's loss function: sum over the mask, number of tokens, report."""
    losses, mask = output_tensor.view(-1).float(), loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}
