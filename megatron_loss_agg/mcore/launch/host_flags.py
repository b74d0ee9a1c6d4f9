"""Megatron's flags under which the plugin would not be exact."""

from __future__ import annotations

from typing import Any

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.extensions.inexact import inexact_setting
from megatron_loss_agg.mcore.launch.flags import FLAG, flag_of


def check_host_flags(args: Any) -> None:
    """Raise HostError, which names the flag, for flags under which the plugin would not be exact.

    Args:
        args: Megatron's parsed flags; absent ones are not checked.
    """
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if getattr(args, name, 1) > 1:
            raise HostError(f"{flag_of(name)} > 1 adds ranks with data of their own; drop it")
    if getattr(args, "logits_load_dir", None) and getattr(args, "logits_load_ignore_errors", False):
        raise HostError(
            f"--logits-load-ignore-errors with {FLAG}: a microbatch whose teacher fails would "
            "count in the denominators and lack a term; expected the run to end there: drop it"
        )
    instances = getattr(args, "num_distributed_optimizer_instances", 1)
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    inexact = inexact_setting(args, instances, stages)
    if inexact is not None:
        name, value, reason = inexact
        raise HostError(
            f"{flag_of(name)}{value} with {FLAG}: {reason}: change the flag, or drop one of the two"
        )
