"""A small GPT, Megatron's DDP around it and Megatron's optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from examples.grpo import task
from examples.grpo.options import Options


def start(options: Options) -> None:
    """Set up process groups and random state, from the environment that ``torchrun`` has set."""
    if not dist.is_initialized():
        dist.init_process_group("gloo" if options.cpu else "nccl")
    if not options.cpu:
        torch.cuda.set_device(dist.get_node_local_rank())
    parallel_state.initialize_model_parallel(context_parallel_size=options.context_parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
    torch.manual_seed(options.seed)


def build(options: Options) -> Any:
    """The bare model: fp32 on a CPU; bf16 on a GPU, as attention over packed sequences needs."""
    bf16 = not options.cpu
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=4,
        context_parallel_size=options.context_parallel,
        use_cpu_initialization=True,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        deterministic_mode=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    spec = get_gpt_layer_local_spec if options.cpu else get_gpt_layer_with_transformer_engine_spec
    model = GPTModel(
        config,
        spec(),
        vocab_size=task.VOCAB_SIZE,
        # Room for the padding of up to 10 context-parallel ranks. Initial weights depend on this
        # length, so it does not depend on the ranks.
        max_sequence_length=task.PROMPT + task.MAX_ANSWER + 8,
        position_embedding_type="learned_absolute",
    ).cuda()
    return Float16Module(config, model) if bf16 else model


def distribute(model: Any) -> DistributedDataParallel:
    """``model`` in Megatron's DDP: it reduces gradients over data- and context-parallel ranks."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(model.config, settings, model)


def build_optimizer(ddp: DistributedDataParallel, options: Options) -> Any:
    """Megatron's optimizer. Zero its gradients before every step: they are aliases of DDP's."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        weight_decay=0.0,
        adam_beta2=0.99,
        clip_grad=1.0,
        bf16=not options.cpu,
        params_dtype=torch.float32 if options.cpu else torch.bfloat16,
    )
    return get_megatron_optimizer(config, [ddp])
