"""Megatron settings with which a loss is not exact, and settings that differ between ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist

from megatron_loss_agg.collectives import gather_objects
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.extension import Extension

_FURTHER_DATA = "it adds ranks that have their own data"
_REFUSED = {
    "logits_load_ignore_errors": (
        "a microbatch whose teacher fails would count in the denominators but lack a term"
    ),
    "gtp_weight_remat_size": _FURTHER_DATA,
    "expert_gtp_weight_remat_size": _FURTHER_DATA,
}
"""Settings refused if on, or more than 1, for these reasons."""
_OTHER_SCHEDULES = (
    "hybrid_context_parallel",
    "dynamic_context_parallel",
    "overlap_moe_expert_parallel_comm",
)


def check_settings(settings: Any, wrapper_settings: Any) -> None:
    """Raise HostError for the first setting with which a loss is not exact.

    Args:
        settings: Megatron's parsed flags, or a model's configuration; absent settings are off.
        wrapper_settings: settings of its data-parallel wrapper; Megatron's flags include both.
    """
    for name, reason in _REFUSED.items():
        value = getattr(settings, name, None) or 0  # True, or a number of ranks
        if value is True or value > 1:
            raise _refusal(name, "", reason)
    _check_dynamic_context_parallel(settings)
    _check_optimizer_instances(settings, wrapper_settings)
    _check_fused_cross_entropy(settings)
    _check_indexer_loss(settings)
    _check_cuda_graphs(settings)


def added_losses(config: Any) -> dict[str, str]:
    """The losses that Megatron itself adds to the loss function's, and scales.

    Returns:
        by name (``"moe"``, ``"mtp"``, ``"dsa"``), the loss in words, with its flags.
    """
    losses = {}
    if getattr(config, "num_moe_experts", None) and _has_router_losses(config):
        losses["moe"] = "losses of routers (--moe-aux-loss-coeff, --moe-z-loss-coeff)"
    if getattr(config, "mtp_num_layers", None) and getattr(config, "mtp_loss_scaling_factor", None):
        losses["mtp"] = "losses of MTP (--mtp-num-layers)"
    if has_indexer_loss(config):
        losses["dsa"] = "the loss of DSA's indexer (--dsa-indexer-loss-coeff)"
    return losses


def _has_router_losses(config: Any) -> bool:
    names = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    values = [getattr(config, name, None) for name in names]
    kinds, coefficients = (x if isinstance(x, list) else [x] for x in values)
    # Other kinds of balancing have no loss, whatever the coefficient.
    has_balancing_loss = any(
        coefficient and str(kind).endswith("aux_loss")
        for kind, coefficient in zip(kinds, coefficients, strict=True)
    )
    return has_balancing_loss or bool(getattr(config, "moe_z_loss_coeff", None))


def check_added_losses(call: Call, extensions: Iterable[Extension]) -> None:
    """Raise HostError if the losses that Megatron adds would grow with the step's number of calls.

    Megatron divides them by the number of microbatches in each call, unless all losses are divided
    by the step's tokens.

    Args:
        call: the first call of the step.
    """
    if call.scale.per_token or call.ends_step:
        return
    scaled = {name for x in extensions for name in x.scaled_losses}
    for name, loss in added_losses(call.config).items():
        if name not in scaled:
            raise HostError(
                "a step of several calls must have no losses that Megatron averages over each call, got "
                f"{loss}. Set calculate_per_token_loss, make the step one call, or add an extension "
                f"whose scaled_losses name {name!r} (for 'mtp': MTPAggregation)."
            )


def has_indexer_loss(settings: Any) -> bool:
    """True if Megatron adds the loss that trains the indexer of sparse attention (DSA)."""
    is_dsa = getattr(settings, "experimental_attention_variant", None) == "dsa"
    return is_dsa and bool(getattr(settings, "dsa_indexer_loss_coeff", None))


def check_logits_are_split(call: Call) -> None:
    """Raise HostError if a model that computes its loss gathers its logits first.

    Megatron's cross entropy adds up exponentials over tensor-parallel ranks. With gathered logits,
    each rank has all of them, so they count several times.
    """
    ranks = dist.get_world_size(call.groups.tp)
    gathers = any(getattr(x, "parallel_output", True) is False for x in call.chunks[-1].modules())
    if gathers and ranks > 1:
        raise HostError(
            "a model that is called with labels must have split logits, since Megatron's loss counts "
            f"gathered ones {ranks} times, once for each tensor-parallel rank, got parallel_output="
            "False. Build it with parallel_output=True, or call it without labels."
        )


def check_same_on_all_ranks(call: Call, settings: Mapping[str, object]) -> None:
    """Raise OptionError, on all ranks of the model, unless they have the same settings."""
    texts = tuple(f"{name}={value}" for name, value in settings.items())
    ranks_by_texts = {texts: [dist.get_rank()]}
    # One axis after another: each rank passes on the settings from the previous axes, so in the end
    # it has the settings of all ranks, without a process group of all ranks.
    for axis in ("tp", "cp", "dp", "pp"):
        part: Callable[[], Any] = functools.partial(dict, ranks_by_texts)
        gathered = gather_objects(part, getattr(call.groups, axis), "comparing settings")
        ranks_by_texts = {}
        for rank_part in gathered:
            for texts, ranks in rank_part.items():
                merged = {*ranks_by_texts.get(texts, []), *ranks}
                ranks_by_texts[texts] = sorted(merged)
    if len(ranks_by_texts) > 1:
        common = set.intersection(*({*texts} for texts in ranks_by_texts))
        lists = []
        for texts, ranks in sorted(ranks_by_texts.items()):
            different = [x for x in texts if x not in common]
            lists.append(f"{', '.join(different) or 'none of it'} on rank(s) {ranks}")
        raise OptionError(
            f"all ranks must have the same settings, got {'; '.join(lists)}. Give every rank the same "
            "LossHook, or the same --loss-aggregation flags."
        )


def check_schedule(call: Call, flag: str) -> None:
    """Raise HostError for a schedule with which the losses of ``flag`` are not right.

    The flag's extension observes the model's forward pass, so the schedule must call that, with the
    same context-parallel ranks for all microbatches.
    """
    on = [name for name in _OTHER_SCHEDULES if getattr(call.config, name, False)]
    if on:
        names = " and ".join("--" + name.replace("_", "-") for name in on)
        raise HostError(
            f"{flag} needs the model's own forward pass, over the same context-parallel ranks for all "
            f"microbatches, got {names}. Drop one of them."
        )


def _check_dynamic_context_parallel(settings: Any) -> None:
    for name in ("hybrid_context_parallel", "dynamic_context_parallel"):
        is_on = getattr(settings, name, False)
        if is_on and not getattr(settings, "calculate_per_token_loss", False):
            raise HostError(
                f"--{name.replace('_', '-')} needs --calculate-per-token-loss, since otherwise "
                "Megatron averages over each rank's own number of samples. Add that flag."
            )


def _check_optimizer_instances(settings: Any, wrapper_settings: Any) -> None:
    instances = getattr(wrapper_settings, "num_distributed_optimizer_instances", 1)
    stages = getattr(settings, "pipeline_model_parallel_size", 1)
    per_token = getattr(settings, "calculate_per_token_loss", False)
    if instances > 1 and stages > 1 and per_token:
        reason = (
            "Megatron itself computes different gradients with calculate_per_token_loss over "
            "several pipeline stages"
        )
        raise _refusal("num_distributed_optimizer_instances", " > 1", reason)


def has_transformer_engine_loss(settings: Any) -> bool:
    """True if the flags select Transformer Engine's cross entropy.

    Megatron raises an error if that is not installed.
    """
    is_fused = getattr(settings, "cross_entropy_loss_fusion", False)
    return is_fused and getattr(settings, "cross_entropy_fusion_impl", "") == "te"


def _check_fused_cross_entropy(settings: Any) -> None:
    if not has_transformer_engine_loss(settings):
        return
    from megatron.core.utils import get_te_version, is_te_min_version

    is_installed = get_te_version().release != (0, 0, 0)  # Megatron's word for none
    if is_installed and not is_te_min_version("2.11.0"):
        reason = (
            f"Transformer Engine {get_te_version()}, like all before 2.11, multiplies gradients of "
            "tokens by the weights of other tokens"
        )
        raise _refusal("cross_entropy_fusion_impl", " te", reason)


def _check_indexer_loss(settings: Any) -> None:
    if not has_indexer_loss(settings):
        return
    from megatron.core.transformer.transformer_config import TransformerConfig

    # In releases without this field, schedules do not scale the loss of any microbatch.
    if not hasattr(TransformerConfig, "experimental_attention_variant_loss_scale_func"):
        reason = (
            "Megatron-Core before 0.19 does not average the indexer's loss over microbatches, so its "
            "gradient grows with their number"
        )
        raise _refusal("dsa_indexer_loss_coeff", "", reason)


def _check_cuda_graphs(settings: Any) -> None:
    # From 0.18 on, a graph of the whole iteration is a value of cuda_graph_impl. Before, it was a
    # scope, which later releases still accept until they validate their flags.
    has_graphs = (getattr(settings, "cuda_graph_impl", None) or "none") != "none"
    if not has_graphs and not getattr(settings, "enable_cuda_graph", False):
        return
    for name in ("impl", "scope", "scope_deprecated", "modules"):
        value = getattr(settings, f"cuda_graph_{name}", None)
        values = value if isinstance(value, list) else [value]
        if "full_iteration" in [getattr(x, "name", x) for x in values]:  # an enumeration or text
            reason = "it replays one step's weights for all steps, unlike graphs of layers"
            flag = f"cuda_graph_{name.removesuffix('_deprecated')}"
            raise _refusal(flag, " full_iteration", reason)


def _refusal(name: str, value: str, reason: str) -> HostError:
    flag = "--" + name.replace("_", "-")
    return HostError(
        f"{flag}{value} cannot go with an exact loss: {reason}. Change that flag, or drop "
        "--loss-aggregation (the LossHook)."
    )
