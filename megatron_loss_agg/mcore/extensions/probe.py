"""A probe: a tiny model that runs through the host, and what the host does to its gradients.

It has one parameter, and a second one if the run's model has experts, whose gradients are reduced
over another group. It runs through the host's real schedule, wrapper and gradient finalization,
under the run's own configuration. Every rank's gradient is different, so that a missing reduction
shows.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import all_gather
from megatron_loss_agg.mcore.host import Call, HostScale, stock

# Of megatron.core.distributed. Tests compare the measurement of each with a training step.
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "TorchFullyShardedDataParallel")

# Configuration that does not apply to the probe.
_OFF = {
    "timers": None,
    "grad_scale_func": None,
    "no_sync_func": None,
    "grad_sync_func": None,
    "param_sync_func": None,
    "init_model_with_meta_device": False,
    "moe_router_enable_expert_bias": False,
    "moe_router_load_balancing_type": "none",
    "mtp_num_layers": None,
    "overlap_moe_expert_parallel_comm": False,
    "hybrid_context_parallel": False,
    "fine_grained_activation_offloading": False,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "experimental_attention_variant": None,
    "flextron": False,
}
_DDP_OFF = {
    "overlap_param_gather": False,
    "align_param_gather": False,
    "fp8_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "pad_buckets_for_high_nccl_busbw": False,
    "check_for_nan_in_grad": False,
    "check_for_large_grads": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "fsdp_manual_registration": False,
    "megatron_fsdp_grad_comm_dtype": torch.float32,
}
_TOKENS = 2  # per microbatch and rank: with 1, a lone microbatch hides a missing division
_PER_RANK = 128  # parameter elements per rank: the shard alignment of the distributed optimizer


class _Kind(NamedTuple):
    """A parameter of the probe: dense, or an expert's. Gradients are of one element, per step."""

    ranks: int  # that its gradient is summed over
    gradient: float  # of this rank's loss
    planned: float  # the sum


def probe_tokens(call: Call) -> int:
    """Of all microbatches of the probe, over data- and context-parallel ranks."""
    return round(_summed(_TOKENS * call.scale.num_microbatches, data_groups(call)))


def measured_factors(call: Call, wrap: Callable[..., Any]) -> Tensor:
    """The host's gradients as a multiple of the planned ones. All ranks must call.

    Args:
        wrap: from `wrapper_of`.

    Returns:
        fp64 [kinds of parameters, 2], the same on all ranks: the least and the greatest of all
        ranks; both are 1 if the host scales as planned, and NaN if one is.
    """
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    kinds = _kinds(call)
    config = _with(call.config, _OFF)
    number = call.scale.num_microbatches
    device = next(call.chunks[-1].parameters()).device
    with _without_logs():
        model = wrap(config, _probe(config, kinds, number, device))
        if call.config.no_sync_func is not None:
            config.no_sync_func = model.no_sync
        if hasattr(model, "zero_grad_buffer"):
            model.zero_grad_buffer()
        stock(forward_backward_no_pipelining)(
            forward_step_func=_forward_step(call.scale, probe_tokens(call)),
            data_iterator=iter([]),
            model=[model],
            num_microbatches=number,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
            **({} if call.pg_collection is None else {"pg_collection": call.pg_collection}),
        )
    rows = torch.tensor([math.inf, -math.inf], dtype=torch.float64).repeat(2, 1)
    for row, gradient, kind in zip(rows, _reduced(model), kinds, strict=False):
        if gradient.numel():  # a small parameter may have no shard here
            factors = gradient.double() / kind.planned
            row.copy_(torch.stack([factors.amin(), factors.amax()]))
    for group in (*data_groups(call), call.groups.tp, call.groups.pp):
        gathered = all_gather(rows.flatten(), group).view(-1, 2, 2)
        rows = torch.stack([gathered[..., 0].amin(0), gathered[..., 1].amax(0)], dim=1)
    return rows[~(rows[:, 0] > rows[:, 1])]  # without experts, a row is as it began


def _reduced(model: Any) -> list[Tensor]:
    """By parameter of the probe, the elements of its gradient that this rank has reduced."""
    if hasattr(model, "expert_parallel_buffers"):  # Megatron's DDP
        return [_shard(buffer) for buffer in (model.buffers[0], *model.expert_parallel_buffers)]
    return [_gradient(parameter) for parameter in model.parameters()]


def _shard(buffer: Any) -> Tensor:
    """Of a buffer of Megatron's DDP that holds one parameter."""
    group = buffer.data_parallel_group
    rank, shards = dist.get_rank(group), dist.get_world_size(group)
    # This shard is reduced, whether by all-reduce or reduce-scatter; past `_PER_RANK` is padding.
    shard: Tensor = buffer.grad_data.view(shards, -1)[rank][:_PER_RANK]
    return shard


def _gradient(parameter: Any) -> Tensor:
    """This rank's part of the parameter's gradient; zeros if the host made none."""
    found = (getattr(parameter, name, None) for name in ("decoupled_grad", "main_grad", "grad"))
    gradient: Any = next((g for g in found if g is not None), torch.zeros_like(parameter))
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


def _kinds(call: Call) -> list[_Kind]:
    """A dense parameter and, if the model has experts, one of these."""
    groups = data_groups(call)
    reduced = [(math.prod(1 + dist.get_rank(group) for group in groups), groups)]
    if any(map(_is_of_expert, call.chunks[-1].parameters())):
        experts = _expert_group(call.pg_collection)
        reduced.append((1 + dist.get_rank(experts), (experts,)))
    return [
        _Kind(math.prod(map(dist.get_world_size, groups)), gradient, _summed(gradient, groups))
        for gradient, groups in reduced
    ]


def _is_of_expert(parameter: Any) -> bool:
    # Megatron FSDP replaces parameters, and keeps those that Megatron has marked.
    return not getattr(getattr(parameter, "orig_param", parameter), "allreduce", True)


def _summed(value: float, groups: Sequence[dist.ProcessGroup]) -> float:
    for group in groups:
        value = float(all_gather(torch.tensor([value], dtype=torch.float64), group).sum())
    return value


def data_groups(call: Call) -> tuple[dist.ProcessGroup, ...]:
    return call.groups.dp, call.groups.cp


def _expert_group(pg_collection: Any) -> dist.ProcessGroup:
    """The ranks that have the same experts."""
    from megatron.core import parallel_state

    if pg_collection is None:
        return parallel_state.get_expert_data_parallel_group()
    return pg_collection.expt_dp


def wrapper_of(call: Call) -> Callable[[Any, Any], Any] | None:
    """(configuration, probe) -> the probe, wrapped as the model is; None if that is not known."""
    from megatron.core import distributed

    chunk, groups = call.chunks[-1], call.pg_collection
    known = (name for name in WRAPPERS if isinstance(chunk, getattr(distributed, name, ())))
    name = next(known, None)
    if name is None:
        alone = all(dist.get_world_size(group) == 1 for group in data_groups(call))
        return (lambda config, probe: probe) if alone else None  # alone, it averages over nothing
    options = {} if groups is None else {"pg_collection": groups}
    if options and name == "TorchFullyShardedDataParallel":
        options = {"process_group": groups.dp_cp}
    try:
        inspect.signature(type(chunk)).bind(None, None, None, **options)
    except TypeError:
        return None  # a subclass with other arguments
    settings = _with(chunk.ddp_config, _DDP_OFF)

    def wrap(config: Any, probe: Any) -> Any:
        units = getattr(chunk, "fsdp_unit_modules", None)
        if units:  # Megatron FSDP expects to find one
            options["fsdp_unit_modules"] = [type(probe)]
        return type(chunk)(config, settings, probe, **options)

    return wrap


def _forward_step(scale: HostScale, total_tokens: int) -> Callable[..., Any]:
    """The loss is the probe's output, with `_TOKENS` tokens per microbatch and rank."""

    def loss_func(output: Tensor) -> tuple[Any, ...]:
        return scale.returned(output, _TOKENS, total_tokens, {})

    def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        return model(), loss_func

    return forward_step


def _probe(config: Any, kinds: list[_Kind], num_microbatches: int, device: torch.device) -> Any:
    """A model with a parameter of each of ``kinds``."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    class Probe(MegatronModule):
        """Its loss has the gradients of ``kinds``; with what gradient finalization reads."""

        model_type = ModelType.encoder_or_decoder
        share_embeddings_and_output_weights = False
        pre_process = post_process = True

        def __init__(self) -> None:
            super().__init__(config)
            self.kinds = torch.nn.ModuleDict()
            # Megatron's DDP knows experts' parameters by their attribute, its FSDP by their name.
            for name, kind in zip(("dense", "experts"), kinds, strict=False):
                parameter: Any = torch.nn.Parameter(
                    torch.zeros(kind.ranks * _PER_RANK, dtype=torch.float32, device=device)
                )
                parameter.allreduce = name == "dense"
                self.kinds[name] = torch.nn.ParameterList([parameter])

        def set_input_tensor(self, input_tensor: Any) -> None:
            """Required by the schedule; a single stage has no input."""

        def forward(self) -> Tensor:
            losses = [p.sum() * k.gradient for p, k in zip(self.parameters(), kinds, strict=True)]
            return torch.stack(losses).sum() / num_microbatches

    return Probe()


def _with(config: Any, changes: dict[str, Any]) -> Any:
    """A copy with those ``changes`` that apply to this release's configuration."""
    changed = copy.copy(config)
    for name, value in changes.items():
        if hasattr(changed, name):
            setattr(changed, name, value)
    return changed


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Megatron logs every wrapper that it makes: a run would seem to have one more."""
    package = "megatron.core.distributed"
    known = logging.root.manager.loggerDict.items()
    loggers = [
        logger
        for name, logger in known
        if name.startswith(package) and isinstance(logger, logging.Logger) and not logger.disabled
    ]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger in loggers:
            logger.disabled = False
