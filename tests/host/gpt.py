"""A tiny GPT on the real Megatron-Core, its forward step, and one step of the schedule.

For the ranks alone: the import needs the stand-ins for a GPU that `tests.host.preload` enables.
"""

from __future__ import annotations

import contextlib
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
    FullyShardedDataParallel,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.overrides import TorchFunctionMode

from megatron_loss_agg import CPLayout
from megatron_loss_agg.mcore import LossHook
from tests.host import gradients
from tests.host.steps import VOCAB, Sequence

Model = DistributedDataParallel | list[DistributedDataParallel]  # its chunks under interleaving

SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "use_cpu_initialization": True,
    "moe_token_dispatcher_type": "alltoall",  # required with microbatches of unequal size
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "attention_softmax_in_fp32": False,
    "finalize_model_grads_func": finalize_model_grads,
}


# Of a host with patches/megatron-lm, whose other contracts a released one has, too.
KNOWS_NORMALIZED = hasattr(TransformerConfig, "loss_is_normalized")


class KeepDouble(TorchFunctionMode):
    """Keeps fp64 where Megatron casts to fp32: in its router's softmax and its cross entropy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.softmax and args[0].dtype == torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **kwargs)


def precision(config: TransformerConfig) -> contextlib.AbstractContextManager[Any]:
    """`KeepDouble` for the models that need it; without it, a cast of the plugin's shows too."""
    casts = config.num_moe_experts or config.mtp_num_layers
    return KeepDouble() if casts else contextlib.nullcontext()


def initialize(cp: int = 1, **sizes: int) -> None:
    """Megatron's process groups over all ranks; ``sizes`` under Megatron's names."""
    if parallel_state.model_parallel_is_initialized():
        return
    parallel_state.initialize_model_parallel(context_parallel_size=cp, **sizes)
    model_parallel_cuda_manual_seed(1)


def data_rank() -> int:
    """This rank among those with data of their own."""
    return parallel_state.get_data_parallel_rank()


def reads_data() -> bool:
    """As in Megatron's scripts, only the first rank of a tensor-parallel group has an iterator."""
    return parallel_state.get_tensor_model_parallel_rank() == 0


def build(
    dtype: torch.dtype = torch.float64,
    per_token: bool = False,
    vp_stage: int | None = None,
    layer: Callable[[Any], Any] | None = None,
    parallel_output: bool = True,
    **config: Any,
) -> GPTModel:
    """This rank's part of the model, or one chunk of it, of the host's layers or of others.

    The same weights whatever the parallelism and dtype: each is an fp32 number.
    """
    torch.set_default_dtype(dtype)
    pipelined = parallel_state.get_pipeline_model_parallel_world_size() > 1
    settings = {
        **SETTINGS,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": pipelined,  # microbatches are of unequal size here
        "calculate_per_token_loss": per_token,
        **({"loss_is_normalized": not per_token} if KNOWS_NORMALIZED else {}),
        **_parallel_sizes(),
        **config,
    }
    kind = MLATransformerConfig if "multi_latent_attention" in config else TransformerConfig
    transformer = kind(**settings)
    layer = layer or (lambda x: get_gpt_layer_local_spec(num_experts=x.num_moe_experts))
    spec = layer(transformer)
    mtp = None
    if transformer.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(transformer, spec, False, vp_stage)
    place = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    model = GPTModel(
        transformer,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=256,
        position_embedding_type="rope",
        parallel_output=parallel_output,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )
    for name, parameter in gradients.parts(model):
        parameter.data = gradients.initial_value(name, parameter).to(dtype)
    return model.to(dtype)  # routers keep a mean, in fp32


def _parallel_sizes() -> dict[str, Any]:
    """Of the groups that exist, as the configuration of a model names them."""
    kinds = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")
    return {
        f"{kind}_parallel_size": getattr(parallel_state, f"get_{kind}_parallel_world_size")()
        for kind in (*kinds, "expert_model", "expert_tensor")
    }


def data_parallel(model: GPTModel, **options: Any) -> DistributedDataParallel:
    """``model`` in Megatron's DDP, its gradients in the dtype of its parameters."""
    if options.get("average_in_collective"):
        _average(model)
    settings = {"grad_reduce_in_fp32": False, "overlap_grad_reduce": False, **options}
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(**settings), model)


def _average(model: GPTModel) -> None:
    """For wrappers that average by themselves, and refuse a loss that is normalized."""
    if KNOWS_NORMALIZED:
        model.config.loss_is_normalized = False


def ddp_model(per_token: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """The model of a test that does not divide it: `build` in `data_parallel`."""
    return data_parallel(build(dtype, per_token))


def fully_sharded(model: GPTModel, strategy: str) -> Any:
    """``model`` in Megatron FSDP, which shards by ``strategy``; in torch's FSDP2 for ``torch``.

    Gradients are fp32 in the first; in the dtype of the parameters in the second.
    """
    _put_meshes_on_cpu()
    if strategy == "torch":
        _average(model)
        settings = TorchFullyShardedDataParallelConfig()
        return TorchFullyShardedDataParallel(model.config, settings, model)
    settings = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=True,
        grad_reduce_in_fp32=True,
        megatron_fsdp_main_grads_dtype=torch.float32,
        gradient_reduce_div_fusion=False,  # gloo has no scaled sums
    )
    ddp = FullyShardedDataParallel(model.config, settings, model)
    model.config.no_sync_func = ddp.no_sync  # as `megatron.training` does with this overlap
    return ddp


def _put_meshes_on_cpu() -> None:
    """Megatron's wrappers ask for device meshes of GPUs."""
    stock = DeviceMesh.from_group
    if stock.__module__ != __name__:

        def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
            return stock(group, "cpu", *args, **kwargs)

        DeviceMesh.from_group = staticmethod(from_group)


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
    output, labels, mask = outputs(received(data_iterator), model)
    loss_func = partial(stock_loss_func, mask.to(output.dtype))
    if not get_attr_wrapped_model(model, "post_process"):
        return output, loss_func
    logits = gather_from_tensor_model_parallel_region(output)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(labels), loss_func


def schedule_with(change: Callable[[Callable[..., Any], Tensor], Any]) -> Callable[..., Any]:
    """Megatron's schedule, with ``change(loss_func, output)`` in place of ``loss_func(output)``."""

    def changed(**arguments: Any) -> Any:
        inner = arguments.pop("forward_step_func")

        def forward_step(*args: Any) -> Any:
            output, loss_func = inner(*args)
            return output, partial(change, loss_func)

        return get_forward_backward_func()(**arguments, forward_step_func=forward_step)

    return changed


def reported(reports: list[dict[str, Tensor]], key: str) -> float:
    """Of a step, as Megatron's ``train_step`` makes it of all microbatches' (sum, count)."""
    total = torch.stack([report[key] for report in reports]).sum(dim=0)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(total, group=group)
    return float(total[0] / total[1])


def received(data_iterator: Iterator[Any] | None) -> dict[str, Any]:
    """The next batch, on every tensor-parallel rank; only the first one has an iterator."""
    batches = [None if data_iterator is None else next(data_iterator)]
    group = parallel_state.get_tensor_model_parallel_group()
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(batches, src=dist.get_global_rank(group, 0), group=group)
    (batch,) = batches
    return batch


def layout_of(batch: dict[str, Any]) -> CPLayout:
    """Which of the batch's tokens this context-parallel rank holds."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    starts = batch.get("cu_seqlens_padded")
    if starts is None:
        return CPLayout.bshd(batch["tokens"].shape[1], size, rank)
    return CPLayout.thd(starts, size, rank)


Part = tuple[Tensor, Tensor, Tensor, PackedSeqParams | None]
"""Tokens, labels and mask of this context-parallel rank, and how they are packed."""


def part_of(batch: dict[str, Any]) -> Part:
    layout, packed, starts = layout_of(batch), None, batch.get("cu_seqlens_padded")
    if starts is not None:
        longest = int(starts.diff().max())
        packed = PackedSeqParams("thd", starts, starts, starts, starts, longest, longest)
    tokens, labels, mask = (layout.shard(batch[k]) for k in ("tokens", "labels", "loss_mask"))
    return tokens, labels, mask, packed


def local_batch(data_iterator: Iterator[Any] | None) -> Part:
    """Of the next batch."""
    return part_of(received(data_iterator))


def outputs(batch: dict[str, Any], model: Any, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The model's output for this rank's part of the batch; and its labels and mask."""
    tokens, labels, mask, packed = part_of(batch)
    arguments = {"packed_seq_params": packed, **given}
    return model(tokens, positions_like(tokens), None, **arguments), labels, mask


def positions_like(tokens: Tensor) -> Tensor:
    """Positions, of which a model without position embeddings takes only the shape."""
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def run_step(
    hook: LossHook | None,
    model: Model,
    data_iterator: Any,
    num_microbatches: int,
    micro_batch_size: int = 1,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """One step of Megatron's schedule, or of the option ``schedule``; gradients are left in
    ``model``.
    """
    chunks = model if isinstance(model, list) else [model]
    if options.pop("zero_grad", True):
        for ddp in chunks:
            ddp.zero_grad_buffer()
    schedule = options.pop("schedule", None) or get_forward_backward_func()
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
    with precision(chunks[0].config):
        return (schedule if hook is None else hook.wrap(schedule))(**arguments)


def plain_losses(model: GPTModel, sequence: Sequence) -> Tensor:
    """[tokens], the sequence alone and unpadded."""
    positions = torch.arange(len(sequence.tokens)).unsqueeze(0)
    with precision(model.config):
        logits = model(sequence.tokens.unsqueeze(0), positions, None).squeeze(0)
    return F.cross_entropy(logits, sequence.labels, reduction="none")
