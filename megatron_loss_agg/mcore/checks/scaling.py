"""Measures Megatron's scaling of a loss with a tiny model, and compares it with `scale`.

The scaling is measured since it has changed between releases and depends on the model's wrapper.
The tiny model has one parameter, and a second one if the run's model has experts, since their
gradients are reduced over another process group. It goes through Megatron's schedule, data-parallel
wrapper and gradient finalization. Every rank's gradient is different, so that a missing reduction
shows.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import all_gather
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.call import Call, original, without_reduction
from megatron_loss_agg.mcore.finalization import dividing_by, finish_gradients

_Groups = tuple[dist.ProcessGroup, ...]

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "TorchFullyShardedDataParallel")
"""Classes in megatron.core.distributed. Tests compare their measurements with training steps."""

_TOLERANCE = 1e-4
"""Relative tolerance of the measured factor; gradients are in fp32."""
_TOKENS = 2
"""Tokens per microbatch and rank. With 1, a lone microbatch would hide a missing division."""
_PER_RANK = 128
"""Parameter elements per rank: the distributed optimizer's shard alignment."""
_TRUST = "LossHook(trust_unmeasured=True) (--loss-aggregation-unmeasured trust)"

_TURNED_OFF = {
    None: "timers grad_scale_func no_sync_func grad_sync_func param_sync_func mtp_num_layers "
    "experimental_attention_variant",
    False: "init_model_with_meta_device moe_router_enable_expert_bias hybrid_context_parallel "
    "overlap_moe_expert_parallel_comm fine_grained_activation_offloading enable_cuda_graph "
    "flextron overlap_param_gather align_param_gather fp8_param_gather check_for_nan_in_grad "
    "reuse_grad_buf_for_mxfp8_param_ag pad_buckets_for_high_nccl_busbw check_for_large_grads "
    "nccl_ub fsdp_double_buffer fsdp_manual_registration moe_paged_stash",
    "none": "moe_router_load_balancing_type cuda_graph_impl",
    torch.float32: "megatron_fsdp_grad_comm_dtype",
}
"""Settings to disable in the tiny model's copy of the configurations, grouped by their "off" value."""


def check_scaling(call: Call, trust_unmeasured: bool) -> float | None:
    """Measure Megatron's scaling of a training call. All ranks must call; if one raises, all do.

    Returns:
        the gradients as a multiple of the planned ones; None if they were not measured.

    Raises:
        HostError: the gradients differ from the planned ones, or cannot be measured.
    """
    wrap = model_wrapper(call)
    if wrap is None:
        if trust_unmeasured:
            return None
        raise HostError(
            "Megatron's averaging must be measured before the first step, but for a "
            f"{type(call.chunks[-1]).__name__} it cannot be. Wrap the model in one of Megatron's "
            f"{', '.join(WRAPPERS)}, or, if gradients are averaged like in the first of these, "
            f"choose {_TRUST}."
        )
    measured = measured_factor(call, wrap)
    if abs(measured - 1) <= _TOLERANCE:  # False for NaN
        return measured
    finalize: Any = call.config.finalize_model_grads_func
    if finalize is None and trust_unmeasured:
        return None
    from megatron.core import __version__

    raise HostError(
        f"gradients must be the planned ones, got {measured:.6g} times those in megatron-core "
        f"{__version__} with {type(call.chunks[-1]).__name__} and config.finalize_model_grads_func="
        f"{getattr(finalize, '__qualname__', finalize)} ({call.scale}). Use {WRAPPERS[0]} and "
        "finalize_model_grads of Megatron-Core 0.13 to 0.19, or turn off calculate_per_token_loss; "
        "or, if the loop itself reduces and scales gradients after the schedule, leave that "
        f"function None and choose {_TRUST}."
    )


@torch.enable_grad()  # a loop may call the schedule without gradients
def measured_factor(call: Call, wrap: Callable[..., Any]) -> float:
    """Megatron's gradients as a multiple of the planned ones: the multiple that is farthest from 1.

    All ranks must call. The result is the same on all ranks, and NaN if any gradient is.
    """
    reduced_over = _reduced_over(call)
    factor = torch.ones(1, dtype=torch.float64)
    for gradient, groups in zip(_gradients(call, wrap, reduced_over), reduced_over, strict=False):
        # A rank's gradient is 1 + rank before the reduction, so the sum is 1 + ... + ranks.
        planned = math.prod(n * (n + 1) / 2 for n in map(dist.get_world_size, groups))
        factors = gradient.detach().cpu().double().flatten() / planned
        factor = _farthest(torch.cat([factor, factors]))
    for group in (*_data_groups(call), call.groups.tp, call.groups.pp):
        factor = _farthest(all_gather(factor, group).flatten())
    return float(factor)


def _farthest(factors: Tensor) -> Tensor:
    """[1]: the factor that is farthest from 1."""
    return factors[(factors - 1).abs().nan_to_num(math.inf).argmax()].view(1)


def _gradients(
    call: Call, wrap: Callable[..., Any], reduced_over: Sequence[_Groups]
) -> list[Tensor]:
    """The tiny model's gradients after a step: of each, the elements that this rank has reduced."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    config, number = _simplified(call.config), call.scale.num_microbatches
    numbers = all_gather(torch.tensor([number]), call.groups.dp)  # may differ between ranks
    total_tokens = _TOKENS * int(numbers.sum()) * call.groups.cp_size
    # A step that is counted at its end divides its loss by a sum of denominators at its end.
    denominator, total_denominator = torch.zeros((), dtype=torch.float64), 1.0
    if call.groups.is_end_counted:
        ranks, rank = dist.get_world_size(call.groups.dp), dist.get_rank(call.groups.dp)
        total_denominator = float(ranks * (ranks + 1))
        if call.groups.cp_rank == 0:
            denominator += 2 * (1 + rank)
    # Different on each rank that a gradient is reduced over.
    factors = [math.prod(1 + dist.get_rank(group) for group in groups) for groups in reduced_over]

    def loss_func(output: Tensor) -> tuple[Any, ...]:
        return call.scale.returned(output, _TOKENS, total_tokens, {})

    def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        return model() * total_denominator / number, loss_func

    model = wrap(config, _tiny_model(config, factors, call.device))
    if call.config.no_sync_func is not None:
        config.no_sync_func = model.no_sync
    if hasattr(model, "zero_grad_buffer"):
        model.zero_grad_buffer()
    denominator = denominator.to(next(model.parameters()).device)
    is_end_counted, reduces = call.groups.is_end_counted, call.ends_step
    with contextlib.ExitStack() as stack:
        if is_end_counted and reduces:
            stack.enter_context(dividing_by(lambda: denominator, config))
        elif is_end_counted:
            stack.enter_context(without_reduction([model], config))
        original(forward_backward_no_pipelining)(
            forward_step_func=forward_step,
            data_iterator=iter([]),
            model=[model],
            num_microbatches=number,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
            **({} if call.pg_collection is None else {"pg_collection": call.pg_collection}),
        )
    if is_end_counted and not reduces:
        finish_gradients(replace(call, chunks=(model,), config=config), denominator)
    return _reduced(model)


def _reduced(model: Any) -> list[Tensor]:
    gradients = []
    if hasattr(model, "expert_parallel_buffers"):  # Megatron's DDP has a buffer for each kind
        for buffer in (model.buffers[0], *model.expert_parallel_buffers):
            group = buffer.data_parallel_group
            shards = buffer.grad_data.view(dist.get_world_size(group), -1)
            # An all-reduce and a reduce-scatter both reduce this rank's shard; it ends in padding.
            gradients.append(shards[dist.get_rank(group)][:_PER_RANK])
        return gradients
    for parameter in model.parameters():
        names = ("decoupled_grad", "main_grad", "grad")
        present = [x for name in names if (x := getattr(parameter, name, None)) is not None]
        gradient = present[0] if present else torch.zeros_like(parameter)
        gradients.append(gradient.to_local() if hasattr(gradient, "to_local") else gradient)
    return gradients


def _reduced_over(call: Call) -> list[_Groups]:
    """The process groups that reduce gradients: of dense parameters and, if any, of experts."""
    from megatron.core import parallel_state

    # Megatron marks experts with ``allreduce``. Its FSDP replaces parameters and keeps these marks
    # on the originals.
    marked = (getattr(x, "orig_param", x) for x in call.parameters())
    if all(getattr(x, "allreduce", True) for x in marked):
        return [_data_groups(call)]
    pg = call.pg_collection
    expert_group = parallel_state.get_expert_data_parallel_group() if pg is None else pg.expt_dp
    return [_data_groups(call), (expert_group,)]


def _data_groups(call: Call) -> _Groups:
    return call.groups.dp, call.groups.cp


def model_wrapper(call: Call) -> Callable[[Any, Any], Any] | None:
    """(configuration, tiny model) -> the tiny model, wrapped like the run's; None if unknown."""
    from megatron.core import distributed

    chunk, groups = call.chunks[-1], call.pg_collection
    # From 0.20 on, FullyShardedDataParallel makes one of two classes; older releases have only V1.
    bases = (x for x in type(chunk).__mro__ if x.__module__.startswith(distributed.__name__))
    names = (base.__name__.removesuffix("V1") for base in bases)
    name = next((name for name in names if name in WRAPPERS), None)
    if name is None:
        alone = all(dist.get_world_size(group) == 1 for group in _data_groups(call))
        return (lambda config, model: model) if alone else None  # alone, it averages over nothing
    options = {} if groups is None else {"pg_collection": groups}
    if options and name == "TorchFullyShardedDataParallel":
        options = {"process_group": groups.dp_cp}
    try:
        inspect.signature(type(chunk)).bind(None, None, None, **options)
    except TypeError:
        return None  # a subclass with other arguments
    settings = _simplified(chunk.ddp_config)

    def wrap(config: Any, model: Any) -> Any:
        units = getattr(chunk, "fsdp_unit_modules", None)
        if units:  # Megatron FSDP needs the model to contain one
            options["fsdp_unit_modules"] = [type(model)]
        return type(chunk)(config, settings, model, **options)

    return wrap


def _tiny_model(config: Any, gradients: Sequence[float], device: torch.device) -> Any:
    """A model with a dense parameter, then an expert's; they get these ``gradients``."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    class TinyModel(MegatronModule):
        """Has the attributes that gradient finalization reads."""

        model_type = ModelType.encoder_or_decoder
        share_embeddings_and_output_weights = False
        pre_process = post_process = True

        def __init__(self) -> None:
            super().__init__(config)
            self.kinds = torch.nn.ModuleDict()
            # Megatron's DDP recognizes experts' parameters by an attribute, its FSDP by their name.
            size = _PER_RANK * dist.get_world_size()
            for name in ("dense", "experts")[: len(gradients)]:
                zeros = torch.zeros(size, dtype=torch.float32, device=device)
                parameter: Any = torch.nn.Parameter(zeros)
                parameter.allreduce = name == "dense"
                self.kinds[name] = torch.nn.ParameterList([parameter])

        def set_input_tensor(self, input_tensor: Any) -> None:
            """Does nothing: the schedule requires it, but a single stage has no input."""

        def forward(self) -> Tensor:
            losses = [p.sum() * x for p, x in zip(self.parameters(), gradients, strict=True)]
            return torch.stack(losses).sum()

    return TinyModel()


def _simplified(config: Any) -> Any:
    """A copy of ``config`` with the settings in `_TURNED_OFF` turned off, if this release has them."""
    changed = copy.copy(config)
    for value, names in _TURNED_OFF.items():
        for name in names.split():
            if hasattr(config, name):
                setattr(changed, name, value)
    return changed
