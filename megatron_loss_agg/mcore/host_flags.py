"""Megatron's flags under which the plugin would not be exact."""

from __future__ import annotations

from typing import Any

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.flags import FLAG, flag_of
from megatron_loss_agg.mcore.host import (
    GROUPS_BY_SAMPLE,
    full_iteration_graph,
)


def check_host_flags(args: Any) -> None:
    """Refuse flags of Megatron under which the plugin would not be exact.

    Args:
        args: Megatron's parsed flags; absent ones are not checked.

    Raises:
        HostError: names the flag and what to change.
    """
    for name in GROUPS_BY_SAMPLE:
        if getattr(args, name, False):
            raise HostError(
                f"{flag_of(name)} with {FLAG}: samples have context-parallel groups of their own; "
                "drop one of the two flags"
            )
    if getattr(args, "overlap_moe_expert_parallel_comm", False):
        raise HostError(
            f"--overlap-moe-expert-parallel-comm with {FLAG}: its schedule calls the model's "
            "layers and not the model, so packs cannot be checked; drop one of the two flags"
        )
    if getattr(args, "perform_rl_step", False):
        _check_rl(args)
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        if getattr(args, name, 1) > 1:
            raise HostError(f"{flag_of(name)} > 1 adds ranks with data of their own; drop it")
    instances = getattr(args, "num_distributed_optimizer_instances", 1)
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    if instances > 1 and stages > 1 and getattr(args, "calculate_per_token_loss", False):
        raise HostError(
            "--num-distributed-optimizer-instances > 1 with --calculate-per-token-loss and "
            "--pipeline-model-parallel-size > 1: Megatron itself computes other gradients there; "
            "expected one instance, or one stage: drop one of the flags"
        )
    graph = full_iteration_graph(args)
    if graph is not None:
        raise HostError(
            f"{flag_of(graph)} full_iteration replays one step's weights for all; "
            "expected another value: choose graphs of layers, or none"
        )


def _check_rl(args: Any) -> None:
    if not getattr(args, "loss_aggregation_batch", None):
        raise HostError(
            f"--perform-rl-step with {FLAG}: the RL loop's batches are tuples without "
            "a key 'loss_mask'; expected a function that reads their masks: add "
            f"{FLAG}-batch module:name, or drop one of the two flags"
        )
    if args.context_parallel_size > 1:
        raise HostError(
            "--perform-rl-step with --context-parallel-size > 1: the RL loop gives every "
            "context-parallel rank the whole batch; expected 1: drop the second flag"
        )
