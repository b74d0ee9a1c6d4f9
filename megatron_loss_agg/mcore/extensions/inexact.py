"""The host's settings under which the plugin would not be exact."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.host import Call

_OWN_GROUPS = "samples have context-parallel groups of their own; expected one group for all"
_REASONS = {
    "hybrid_context_parallel": _OWN_GROUPS,
    "dynamic_context_parallel": _OWN_GROUPS,
    "overlap_moe_expert_parallel_comm": (
        "its schedule calls the model's layers and not the model, so packs cannot be checked; "
        "expected it off"
    ),
}


class InexactSettings(Extension):
    """Refuses a model's configuration under which the plugin would not be exact."""

    def start(self, call: Call) -> None:
        wrapper = getattr(call.chunks[0], "ddp_config", None)
        instances = getattr(wrapper, "num_distributed_optimizer_instances", 1)
        inexact = inexact_setting(call.config, instances, dist.get_world_size(call.groups.pp))
        if inexact is not None:
            name, value, reason = inexact
            raise HostError(f"the model's {name}{value}: {reason}")


def inexact_setting(settings: Any, instances: int, stages: int) -> tuple[str, str, str] | None:
    """The first setting under which the plugin would not be exact, its value, and why; or None.

    Args:
        settings: Megatron's parsed flags, or a model's configuration; absent ones are off.
        instances: of the distributed optimizer.
        stages: of the pipeline.
    """
    for name, reason in _REASONS.items():
        if getattr(settings, name, False):
            return name, "", reason
    if instances > 1 and stages > 1 and getattr(settings, "calculate_per_token_loss", False):
        reason = (
            "with calculate_per_token_loss over pipeline stages Megatron itself computes other "
            "gradients; expected one instance, or one stage, or calculate_per_token_loss off"
        )
        return "num_distributed_optimizer_instances", " > 1", reason
    # A graph of the whole iteration is an implementation from 0.18 on. It was a scope of graphs
    # that other settings turn on, which later releases take, too, until they validate their flags.
    graphs = (getattr(settings, "cuda_graph_impl", None) or "none") != "none"
    if graphs or getattr(settings, "enable_cuda_graph", False):
        for name in ("impl", "scope", "scope_deprecated", "modules"):
            value = getattr(settings, f"cuda_graph_{name}", None)
            parts = value if isinstance(value, list) else [value]
            if "full_iteration" in [getattr(x, "name", x) for x in parts]:  # an enumeration or text
                name = f"cuda_graph_{name.removesuffix('_deprecated')}"
                reason = "it replays one step's weights for all; expected CUDA graphs of layers"
                return name, " full_iteration", reason
    return None
