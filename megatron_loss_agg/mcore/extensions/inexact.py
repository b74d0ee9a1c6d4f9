"""The host's settings under which the plugin would not be exact."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.host import Call


class InexactSettings(Extension):
    """Refuses a model's configuration under which the plugin would not be exact."""

    def start(self, call: Call) -> None:
        wrapper = getattr(call.chunks[0], "ddp_config", None)
        instances = getattr(wrapper, "num_distributed_optimizer_instances", 1)
        inexact = inexact_setting(call.config, instances, dist.get_world_size(call.groups.pp))
        if inexact is not None:
            raise HostError(f"the model's {inexact.setting}: {inexact.reason}")


class InexactSetting(NamedTuple):
    """A setting under which the plugin would not be exact."""

    name: str
    value: str
    reason: str  # and what was expected

    @property
    def setting(self) -> str:
        return self.name + self.value


def inexact_setting(settings: Any, instances: int, stages: int) -> InexactSetting | None:
    """The first setting under which the plugin would not be exact; None if there is none.

    Args:
        settings: Megatron's parsed flags, or a model's configuration; absent ones are off.
        instances: of the distributed optimizer.
        stages: of the pipeline.
    """
    for name in ("hybrid_context_parallel", "dynamic_context_parallel"):
        if getattr(settings, name, False):
            reason = "samples have context-parallel groups of their own; expected one group for all"
            return InexactSetting(name, "", reason)
    name = "overlap_moe_expert_parallel_comm"
    if getattr(settings, name, False):
        reason = (
            "its schedule calls the model's layers and not the model, so packs cannot be checked; "
            "expected it off"
        )
        return InexactSetting(name, "", reason)
    if instances > 1 and stages > 1 and getattr(settings, "calculate_per_token_loss", False):
        reason = (
            "with calculate_per_token_loss over pipeline stages Megatron itself computes other "
            "gradients; expected one instance, or one stage, or calculate_per_token_loss off"
        )
        return InexactSetting("num_distributed_optimizer_instances", " > 1", reason)
    graph = _full_iteration_graph(settings)
    if graph is not None:
        reason = "it replays one step's weights for all; expected CUDA graphs of layers, or none"
        return InexactSetting(graph, " full_iteration", reason)
    return None


def _full_iteration_graph(settings: Any) -> str | None:
    """The name of the setting that asks for a CUDA graph of the whole iteration, if one does.

    From 0.18 on it is an implementation; before, a scope of graphs that other settings turn on.
    Later releases take it as a scope, too, and convert it when they validate their flags.
    """
    implementation = getattr(settings, "cuda_graph_impl", None) or "none"
    if implementation == "full_iteration":
        return "cuda_graph_impl"
    if implementation == "none" and not getattr(settings, "enable_cuda_graph", False):
        return None
    for name in ("cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules"):
        value = getattr(settings, name, None)
        parts = value if isinstance(value, list) else [value]
        if "full_iteration" in [getattr(x, "name", x) for x in parts]:  # an enumeration, or text
            return name.removesuffix("_deprecated")
    return None
