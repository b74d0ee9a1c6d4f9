"""Measures how the installed host scales a returned loss, and compares it with `host`.

A model of one parameter (two with expert parallelism, whose gradients are averaged over another
group) runs through the host's real schedule, DDP and gradient finalization, under the run's own
configuration. A host that scales differently is caught before the first step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.host import Call, HostScale

TOLERANCE = 1e-4
"""Relative tolerance of the measured factor. It is measured in fp32, or in bf16 if gradients are
reduced in it."""

# Model configuration that does not apply to a model of one parameter.
_OFF = {
    "timers": None,
    "grad_scale_func": None,
    "no_sync_func": None,
    "grad_sync_func": None,
    "param_sync_func": None,
    "num_moe_experts": None,
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
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "align_param_gather": False,
    "fp8_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "pad_buckets_for_high_nccl_busbw": False,
    "check_for_nan_in_grad": False,
    "check_for_large_grads": False,
    "nccl_ub": False,
}
_TOKENS = 2  # per microbatch and rank: with 1, a lone microbatch hides a missing division
_PER_RANK = 128  # parameter elements per rank: the shard alignment of the distributed optimizer


def measured_scale(model: Any, scale: HostScale, pg_collection: Any = None) -> float | None:
    """The host's gradient as a multiple of the planned one. All ranks must call.

    Args:
        model: the run's model chunk in Megatron's DDP; its configuration is used.
        scale: the scaling that the plugin assumes.

    Returns:
        1.0 if the host scales as assumed. Of dense and expert parameters, the value farther from 1.
        None if ``model`` is not in Megatron's DDP, so that nothing can be measured.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    if not isinstance(model, DistributedDataParallel):
        return None
    groups = {} if pg_collection is None else {"pg_collection": pg_collection}
    ranks = scale.data_parallel_size * scale.context_parallel_size
    experts = [buffer.data_parallel_group.size() for buffer in model.expert_parallel_buffers[:1]]
    config = _with(model.config, _OFF)
    probe = _probe(config, [ranks, *experts], next(model.parameters()).device)
    ddp = DistributedDataParallel(config, _with(model.ddp_config, _DDP_OFF), probe, **groups)
    ddp.zero_grad_buffer()
    forward_backward_no_pipelining(
        forward_step_func=_forward_step(scale),
        data_iterator=iter([]),
        model=[ddp],
        num_microbatches=scale.num_microbatches,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
        **groups,
    )
    buffers = [ddp.buffers[0], *ddp.expert_parallel_buffers]
    measured = [
        _reduced(buffer) / (number * scale.num_microbatches)
        for buffer, number in zip(buffers, [ranks, *experts], strict=True)
    ]
    return farthest_from_one(measured)


def farthest_from_one(factors: Sequence[float]) -> float:
    """The factor farthest from 1; NaN is farthest of all."""
    return max(factors, key=lambda factor: math.inf if math.isnan(factor) else abs(factor - 1))


def _reduced(buffer: Any) -> float:
    """The gradient of the only parameter in ``buffer``, the same in all its elements."""
    shards = dist.get_world_size(buffer.data_parallel_group)
    shard = buffer.grad_data.view(shards, -1)[dist.get_rank(buffer.data_parallel_group)]
    # This shard is reduced, whether by all-reduce or reduce-scatter; past `_PER_RANK` is padding.
    return float(shard[:_PER_RANK].max())


class Auditor:
    """Checks `measured_scale` before the first step.

    Args:
        repeat: check again before the first step of every new `HostScale`, and print the results.
    """

    def __init__(self, repeat: bool) -> None:
        self._repeat = repeat
        self._checked: set[HostScale] = set()

    def check(self, call: Call) -> None:
        """Measure the host for a call of its schedule. All ranks must call.

        Raises:
            HostError: the measured factor differs from the planned one.
        """
        scale = call.scale
        if scale in self._checked or (self._checked and not self._repeat):
            return
        measured = measured_scale(call.chunks[-1], scale, call.pg_collection)
        undone = 1.0 / scale.multiplier(_TOKENS * scale.reports)
        if measured is not None and not abs(measured - 1) <= TOLERANCE:  # also refuses NaN
            raise HostError(_mismatch(measured, undone, scale))
        self._checked.add(scale)  # not earlier: a loop that catches the error must fail again
        if measured is not None and self._repeat and dist.get_rank() == 0:
            text = (
                f"the host multiplies a returned loss by {measured * undone:.6g}, the plugin "
                f"undoes {undone:.6g}: gradients are {measured:.6f} of the planned ones"
            )
            print(f"loss aggregation audit: {text}", flush=True)


def _mismatch(measured: float, undone: float, scale: HostScale) -> str:
    from megatron.core import __version__

    return (
        f"megatron-core {__version__} multiplies a returned loss by {measured * undone:.6g} under "
        f"this configuration ({scale}), but the plugin undoes {undone:.6g}: gradients would be "
        f"{measured:.6g} times the planned ones; expected the loss averaging of Megatron-Core 0.13 "
        "to 0.19: install one of these, or report this version"
    )


def _forward_step(scale: HostScale) -> Callable[..., Any]:
    """The loss is the sum of the parameters, with `_TOKENS` tokens per microbatch and rank."""

    def loss_func(output: Tensor) -> tuple[Any, ...]:
        num_tokens = torch.full((), _TOKENS, dtype=torch.int, device=output.device)
        return scale.returned(output, num_tokens, _TOKENS * scale.reports, {})

    def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        return model(), loss_func

    return forward_step


def _probe(config: Any, ranks: list[int], device: torch.device) -> Any:
    """A model of one dense parameter and, if ``ranks`` has two entries, one expert parameter.

    Args:
        ranks: for each parameter, the size of the group that its gradient is reduced over.
    """
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    class Probe(MegatronModule):
        """The sum of all elements, with the attributes that gradient finalization reads."""

        model_type = ModelType.encoder_or_decoder
        share_embeddings_and_output_weights = False
        pre_process = post_process = True

        def __init__(self) -> None:
            super().__init__(config)
            self.kinds = torch.nn.ParameterList(
                torch.nn.Parameter(torch.zeros(number * _PER_RANK, device=device))
                for number in ranks
            )
            for parameter in self.kinds[1:]:
                parameter.allreduce = False  # how Megatron marks expert parameters

        def set_input_tensor(self, input_tensor: Any) -> None:
            """Required by the schedule; a single stage has no input."""

        def forward(self) -> Tensor:
            return torch.stack([parameter.sum() for parameter in self.kinds]).sum()

    return Probe()


def _with(config: Any, changes: dict[str, Any]) -> Any:
    """A copy with those ``changes`` that apply to this release's configuration."""
    changed = copy.copy(config)
    for name, value in changes.items():
        if hasattr(changed, name):
            setattr(changed, name, value)
    return changed
