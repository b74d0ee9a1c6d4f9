"""A tiny GPT on the real Megatron-Core: its parameters, its forward step and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_loss_agg import CPLayout
from tests.host import shards
from tests.host.steps import VOCAB, Sequence

Gradient = dict[str, Tensor]


def initialize(cp: int = 1, **sizes: int) -> None:
    """Megatron's process groups over all ranks; ``sizes`` under Megatron's names."""
    if parallel_state.model_parallel_is_initialized():
        return
    parallel_state.initialize_model_parallel(context_parallel_size=cp, **sizes)
    model_parallel_cuda_manual_seed(1)


def build(
    dtype: torch.dtype, per_token: bool, vp_stage: int | None = None, **config: Any
) -> GPTModel:
    """This rank's part of the model, or one chunk of it.

    The same weights whatever the parallelism and dtype: each is an fp32 number.
    """
    torch.set_default_dtype(dtype)
    pipelined = parallel_state.get_pipeline_model_parallel_world_size() > 1
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": pipelined,  # microbatches are of unequal size here
        "moe_token_dispatcher_type": "alltoall",  # required with that
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "attention_softmax_in_fp32": False,
        "calculate_per_token_loss": per_token,
        "finalize_model_grads_func": finalize_model_grads,
        **_parallel_sizes(),
        **config,
    }
    transformer = TransformerConfig(**settings)
    layer = get_gpt_layer_local_spec(num_experts=transformer.num_moe_experts)
    mtp = None
    if transformer.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(transformer, layer, use_transformer_engine=False)
    place = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    model = GPTModel(
        transformer,
        layer,
        vocab_size=VOCAB,
        max_sequence_length=256,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )
    for name, parameter in shards.parts(model):
        parameter.data = shards.initial_value(name, parameter).to(dtype)
    return model


def _parallel_sizes() -> dict[str, Any]:
    """Of the groups that exist, as the configuration of a model names them."""
    return {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": (
            parallel_state.get_virtual_pipeline_model_parallel_world_size()
        ),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def data_parallel(model: GPTModel, **options: Any) -> DistributedDataParallel:
    """``model`` in Megatron's DDP, its gradients in the dtype of its parameters."""
    settings = {"grad_reduce_in_fp32": False, "overlap_grad_reduce": False, **options}
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(**settings), model)


def gradient(ddp: DistributedDataParallel) -> Gradient:
    """Of this rank's parameters, by their names in the undivided model."""
    shards.gather_gradients(ddp)
    return {name: p.main_grad.clone() for name, p in shards.parts(ddp.module)}


def gradient_error(chunks: list[DistributedDataParallel], whole: Gradient) -> float:
    """`relative_error` over this rank's parameters, of the gradients in ``chunks``."""
    got = {name: g for ddp in chunks for name, g in gradient(ddp).items()}
    expected = {
        name: shards.part_of(whole[name], p)
        for ddp in chunks
        for name, p in shards.parts(ddp.module)
    }
    return relative_error(got, expected)


def stock_loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, Any]:
    """The shape of the loss function in Megatron-LM's pretrain_gpt.py."""
    loss = (output_tensor.reshape(-1) * loss_mask.reshape(-1)).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    report = torch.cat([loss.detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Iterator[Any] | None, model: Any
) -> tuple[Tensor, Callable[..., Any]]:
    """Per-token losses of this context-parallel rank's part of the next batch.

    The cross entropy is torch's, in the model's dtype: Megatron's own casts to fp32.
    """
    tokens, labels, mask, packed = local_batch(data_iterator)
    output = model(tokens, positions_like(tokens), None, packed_seq_params=packed)
    loss_func = partial(stock_loss_func, mask.to(output.dtype))
    if not model.module.post_process:
        return output, loss_func
    logits = gather_from_tensor_model_parallel_region(output)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(tokens), loss_func


def local_batch(
    data_iterator: Iterator[Any] | None,
) -> tuple[Tensor, Tensor, Tensor, PackedSeqParams | None]:
    """Tokens, labels and mask of this context-parallel rank, and how they are packed.

    As in Megatron's scripts, only the first rank of a tensor-parallel group has an iterator.
    """
    received = [None if data_iterator is None else next(data_iterator)]
    group = parallel_state.get_tensor_model_parallel_group()
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(received, src=dist.get_global_rank(group, 0), group=group)
    (batch,) = received
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    starts = batch.get("cu_seqlens_padded")
    packed = None
    if starts is None:
        layout = CPLayout.bshd(batch["tokens"].shape[1], size, rank)
    else:
        layout = CPLayout.thd(starts, size, rank)
        longest = int(starts.diff().max())
        packed = PackedSeqParams("thd", starts, starts, starts, starts, longest, longest)
    tokens, labels, mask = (layout.shard(batch[k]) for k in ("tokens", "labels", "loss_mask"))
    return tokens, labels, mask, packed


def positions_like(tokens: Tensor) -> Tensor:
    """What a model without position embeddings only takes for its shape."""
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def run_step(
    forward_backward: Callable[..., Any],
    model: DistributedDataParallel | list[DistributedDataParallel],
    data_iterator: Any,
    num_microbatches: int,
    micro_batch_size: int = 1,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """One step of ``forward_backward``; the gradients are left in ``model``."""
    chunks = model if isinstance(model, list) else [model]
    for ddp in chunks:
        ddp.zero_grad_buffer()
    arguments = {
        "forward_step_func": forward_step,
        "data_iterator": data_iterator,
        "model": chunks,
        "num_microbatches": num_microbatches,
        "seq_length": 1,
        "micro_batch_size": micro_batch_size,
        "forward_only": False,
        **options,
    }
    return forward_backward(**arguments)


def plain_losses(model: GPTModel, sequence: Sequence) -> Tensor:
    """[tokens], the sequence alone and unpadded."""
    positions = torch.arange(len(sequence.tokens)).unsqueeze(0)
    logits = model(sequence.tokens.unsqueeze(0), positions, None).squeeze(0)
    return F.cross_entropy(logits, sequence.labels, reduction="none")


def plain_gradient(model: GPTModel, chosen: list[Sequence], weights: list[list[float]]) -> Gradient:
    """Gradient of ``sum w * loss``, by this process alone."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    total = sum(
        (torch.tensor(w) * plain_losses(model, s)).sum()
        for s, w in zip(chosen, weights, strict=True)
    )
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def relative_error(got: Gradient, expected: Gradient) -> float:
    """Norm-wise over all parameters, in fp64."""
    difference = sum((got[n].double() - g.double()).square().sum() for n, g in expected.items())
    norm = sum(g.double().square().sum() for g in expected.values())
    return float((difference / norm).sqrt())
