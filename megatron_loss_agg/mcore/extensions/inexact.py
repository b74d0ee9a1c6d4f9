"""The host's settings under which the plugin would not be exact."""

from __future__ import annotations

from typing import Any

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.host import Call

_OWN_GROUPS = "samples have context-parallel groups of their own"
_OWN_DATA = "it adds ranks with data of their own"
_OFF = {
    "hybrid_context_parallel": _OWN_GROUPS,
    "dynamic_context_parallel": _OWN_GROUPS,
    "overlap_moe_expert_parallel_comm": (
        "its schedule calls the model's layers and not the model, so packs cannot be checked"
    ),
    "logits_load_ignore_errors": (
        "a microbatch whose teacher fails would count in the denominators and lack a term"
    ),
    "gtp_weight_remat_size": _OWN_DATA,
    "expert_gtp_weight_remat_size": _OWN_DATA,
}


class InexactSettings(Extension):
    """Refuses a model's configuration under which the plugin would not be exact."""

    def start(self, call: Call) -> None:
        check_exact(call.config, getattr(call.chunks[0], "ddp_config", None))


def check_exact(settings: Any, of_wrapper: Any) -> None:
    """Raise HostError for the first setting under which the plugin would not be exact.

    Args:
        settings: Megatron's parsed flags, or a model's configuration; absent ones are off.
        of_wrapper: the settings of its data-parallel wrapper; the flags, too, have them.
    """
    for name, reason in _OFF.items():
        value = getattr(settings, name, None) or 1  # True, or a number of ranks
        if value is True or value > 1:
            raise _inexact(name, "", reason)
    instances = getattr(of_wrapper, "num_distributed_optimizer_instances", 1)
    stages = getattr(settings, "pipeline_model_parallel_size", 1)
    if instances > 1 and stages > 1 and getattr(settings, "calculate_per_token_loss", False):
        reason = (
            "Megatron itself computes other gradients with calculate_per_token_loss over several "
            "pipeline stages"
        )
        raise _inexact("num_distributed_optimizer_instances", " > 1", reason)
    fused = getattr(settings, "cross_entropy_loss_fusion", False)
    if fused and getattr(settings, "cross_entropy_fusion_impl", "") == "te":
        from megatron.core.utils import get_te_version, is_te_min_version

        if not is_te_min_version("2.11.0"):
            reason = (
                f"Transformer Engine {get_te_version()}, as all before 2.11, multiplies gradients "
                "of tokens by the weights of others"
            )
            raise _inexact("cross_entropy_fusion_impl", " te", reason)
    # A graph of the whole iteration is a value of cuda_graph_impl from 0.18 on. Before, it was a
    # scope, which later releases still take until they validate their flags.
    graphs = (getattr(settings, "cuda_graph_impl", None) or "none") != "none"
    if graphs or getattr(settings, "enable_cuda_graph", False):
        for name in ("impl", "scope", "scope_deprecated", "modules"):
            value = getattr(settings, f"cuda_graph_{name}", None)
            parts = value if isinstance(value, list) else [value]
            if "full_iteration" in [getattr(x, "name", x) for x in parts]:  # an enumeration or text
                name = f"cuda_graph_{name.removesuffix('_deprecated')}"
                reason = "it replays one step's weights for all, as graphs of layers do not"
                raise _inexact(name, " full_iteration", reason)


def _inexact(name: str, value: str, reason: str) -> HostError:
    flag = "--" + name.replace("_", "-")
    return HostError(
        f"{flag}{value}, with which no loss is aggregated exactly: {reason}; expected another "
        "value: change it, or drop the hook (--loss-aggregation)"
    )
