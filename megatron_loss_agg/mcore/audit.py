"""Measures what the installed host does to a returned loss, and compares it with the plan.

A model of one parameter (two, if experts are divided over ranks: theirs are averaged over another
group) goes through the host's real schedule, DDP and gradient finalization under the run's own
configuration. `scaling` says what the gradient must be; a host that has moved a
factor is caught before it trains anything.
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
from megatron_loss_agg.mcore.host import HostScale

TOLERANCE = 1e-4
"""Of a factor measured in fp32 (or, with gradients communicated in bf16, in that)."""

# Of the model's configuration: what a model of one parameter has no use for.
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
_PER_RANK = 128  # parameter elements a rank: what the distributed optimizer aligns shards to


def measured_scale(model: Any, scale: HostScale, pg_collection: Any = None) -> float | None:
    """The gradient that the host gives, as a multiple of the planned one. Every rank must call.

    Args:
        model: the run's model chunk in Megatron's DDP, whose configuration is taken.
        scale: the plan for the run.

    Returns:
        1.0 for a host that does what `HostScale` says; the farther from it of dense and expert
        parameters; None if ``model`` is not in Megatron's DDP, so that nothing can be measured.
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
    """NaN is farther than any number."""
    return max(factors, key=lambda factor: math.inf if math.isnan(factor) else abs(factor - 1))


def _reduced(buffer: Any) -> float:
    """The gradient of ``buffer``'s only parameter, all of whose elements have the same."""
    shards = dist.get_world_size(buffer.data_parallel_group)
    shard = buffer.grad_data.view(shards, -1)[dist.get_rank(buffer.data_parallel_group)]
    # Reduced here whether the host all-reduces or only reduce-scatters; the rest is padding.
    return float(shard[: min(_PER_RANK, shard.numel())].max())


class Auditor:
    """Checks `measured_scale` before the first step, or before the first of every size.

    Args:
        repeat: check again before the first step of every further `HostScale`, and print what was
            measured.
    """

    def __init__(self, repeat: bool) -> None:
        self._repeat = repeat
        self._checked: set[HostScale] = set()

    def check(self, scale: HostScale, kwargs: dict[str, Any]) -> None:
        """Measure the host for the call of the schedule with ``kwargs``. Every rank must call.

        Raises:
            HostError: the measured factor is not the planned one; with both numbers.
        """
        if scale in self._checked or (self._checked and not self._repeat):
            return
        model = kwargs["model"]
        chunk = model[-1] if isinstance(model, list) else model
        measured = measured_scale(chunk, scale, kwargs.get("pg_collection"))
        undone = 1.0 / scale.multiplier(_tokens(scale))
        if measured is not None and not abs(measured - 1) <= TOLERANCE:  # NaN, too
            raise HostError(_mismatch(measured, undone, scale))
        self._checked.add(scale)  # only now: a loop that catches the error is refused again
        if measured is not None and self._repeat and dist.get_rank() == 0:
            print(
                f"loss aggregation audit: the host multiplies a returned loss by "
                f"{measured * undone:.6g}, the plugin undoes {undone:.6g}: gradients are "
                f"{measured:.6f} of the planned ones",
                flush=True,
            )


def _mismatch(measured: float, undone: float, scale: HostScale) -> str:
    from megatron.core import __version__

    return (
        f"megatron-core {__version__} multiplies a returned loss by {measured * undone:.6g} under "
        f"this configuration ({scale}), and the plugin undoes {undone:.6g}: gradients would be "
        f"{measured:.6g} times the planned ones; expected the averaging of Megatron-Core 0.13 to "
        "0.19: install one of these, or report this version"
    )


def _tokens(scale: HostScale) -> int:
    """Tokens of the probe's step: one for each microbatch and rank."""
    return scale.reports


def _forward_step(scale: HostScale) -> Callable[..., Any]:
    """Every microbatch's loss is the parameters' sum: the gradient of the step is their number."""

    def loss_func(output: Tensor) -> tuple[Any, ...]:
        one = torch.ones((), dtype=torch.int, device=output.device)
        return scale.returned(output, one, _tokens(scale), {})

    def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        return model(), loss_func

    return forward_step


def _probe(config: Any, ranks: list[int], device: torch.device) -> Any:
    """A model of a dense parameter and, if ``ranks`` has a second number, of an expert's.

    Args:
        ranks: size of the group that each parameter's gradient is reduced over.
    """
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    class Probe(MegatronModule):
        """The sum of all elements, with what finalization asks of a model."""

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
                parameter.allreduce = False  # by which Megatron knows experts that it divides

        def set_input_tensor(self, input_tensor: Any) -> None:
            """A first stage takes none."""

        def forward(self) -> Tensor:
            return torch.stack([parameter.sum() for parameter in self.kinds]).sum()

    return Probe()


def _with(config: Any, changes: dict[str, Any]) -> Any:
    changed = copy.copy(config)
    for name, value in changes.items():
        if hasattr(changed, name):
            setattr(changed, name, value)
    return changed
