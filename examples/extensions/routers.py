"""Auxiliary losses of routers (MoE), averaged over the whole step by tokens.

In a launch, from the root of this repository:

    PYTHONPATH=$PWD/examples/extensions torchrun ... -m megatron_loss_agg pretrain_gpt.py ... \
        --num-experts 8 --loss-aggregation MODE \
        --loss-aggregation-extension routers:RouterLosses

In a loop:

    hook = LossHook(LossAggregation(mode="prompt_mean"), extensions=[RouterLosses()])

Let ``a_k`` be the auxiliary loss of microbatch ``k`` as Megatron defines it, over all tensor- and
context-parallel ranks, ``T_k`` the number of tokens that a router sees in it, and ``T`` the sum of
``T_k`` over all microbatches of all data-parallel ranks. Each layer and each kind of loss adds to
the step's loss

    L = sum_k T_k / T * a_k

Megatron-Core 0.19 multiplies ``a_k`` by the result of ``config.moe_grad_scale_func``, and then by its
scale of a returned loss; under ``calculate_per_token_loss`` also by ``T_k``. So with the inverse
``s`` of that scale (`MegatronScale`), the function returns ``s * T_k / T``, or ``s / T``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import StepPlan
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore import Call, Extension

_OTHER_PASSES = (
    "hybrid_context_parallel",
    "dynamic_context_parallel",
    "overlap_moe_expert_parallel_comm",
)
_UNKNOWN = -1


class RoutedTokens(NamedTuple):
    """The numbers of tokens that routers see."""

    by_microbatch: Sequence[int]  # T_k, for this data-parallel rank's microbatches
    total: int  # T
    model_tokens: int  # the step's tokens, as Megatron counts them

    def in_call(self, first: int, end: int) -> RoutedTokens:
        """The numbers for a call with the step's microbatches from ``first`` up to ``end``."""
        return self._replace(by_microbatch=self.by_microbatch[first:end])


class RouterLosses(Extension):
    """Weights the auxiliary losses of routers in training by tokens over the whole step.

    Raises:
        HostError: in a call, losses cannot be exact, microbatches would need different weights at
            once, or routers saw other tokens than planned.
    """

    scaled_losses = ("moe",)

    def __init__(self) -> None:
        self._has_compared = False
        self._tokens = RoutedTokens([], 0, 0)  # of the running step

    @contextlib.contextmanager
    def around(self, call: Call, plans: Mapping[str, StepPlan] | None) -> Iterator[None]:
        if not call.trains:
            yield
            return
        _check_call(call)
        if call.begins_step:
            self._tokens = _planned_tokens(call, plans)
        end = call.first_index + call.scale.num_microbatches
        tokens = self._tokens.in_call(call.first_index, end)
        self._raise_on_all_ranks(_weights_conflict(call, tokens))
        weights = _weights(call, tokens)
        used_weights: list[float] = []
        seen: list[Tensor | int] = []
        scale = functools.partial(_scale, call, weights, used_weights)
        weighted = mock.patch.object(call.config, "moe_grad_scale_func", scale)
        with _observed_routers(call, seen), weighted:
            yield
        num_passes = len(weights) * len(call.chunks)
        if len(used_weights) != num_passes:
            raise HostError(
                "the schedule must call config.moe_grad_scale_func once in each of "
                f"{num_passes} forward passes, as Megatron-Core 0.19 does, got {len(used_weights)} "
                "calls. Drop RouterLosses."
            )
        self._raise_on_all_ranks(_tokens_conflict(seen, tokens))
        self._has_compared = True

    def _raise_on_all_ranks(self, conflict: str | None) -> None:
        """Raise HostError for the first rank's conflict; after the first step, only there."""
        conflicts = [conflict]
        if not self._has_compared:  # later steps should not make ranks wait for each other
            conflicts = [None] * dist.get_world_size()
            dist.all_gather_object(conflicts, conflict)
        for text in conflicts:
            if text is not None:
                raise HostError(text)


def _check_call(call: Call) -> None:
    """Raise HostError if the losses of the model cannot be exact."""
    from megatron.core import __version__
    from packaging.version import Version

    release = Version(__version__)
    # Snapshots between releases (0.19.0rc0) ask for the weights and apply others.
    if release.release[:2] != (0, 19) or release.is_prerelease:
        raise HostError(
            f"RouterLosses needs a release of Megatron-Core 0.19, got {__version__}, whose weights of "
            "routers' losses are not known. Drop RouterLosses."
        )
    if on := [name for name in _OTHER_PASSES if getattr(call.config, name, False)]:
        flags = " and ".join("--" + name.replace("_", "-") for name in on)
        raise HostError(
            "RouterLosses needs the model's own forward pass, over the same context-parallel ranks for "
            f"all microbatches, got {flags}. Drop one of them."
        )
    if call.config.num_moe_experts is None:
        raise HostError(
            "RouterLosses needs a model with experts, got one without. Set --num-experts, or drop "
            "RouterLosses."
        )
    num_ranks = call.scale.data_parallel_size
    # The setting is one kind, or a list of kinds.
    if num_ranks > 1 and "global_aux_loss" in call.config.moe_router_load_balancing_type:
        raise HostError(
            f"RouterLosses needs aux_loss or seq_aux_loss, got global_aux_loss over {num_ranks} "
            "data-parallel ranks, which depends on how microbatches are dealt to them. Change "
            "--moe-router-load-balancing-type, or drop RouterLosses."
        )


def _planned_tokens(call: Call, plans: Mapping[str, StepPlan] | None) -> RoutedTokens:
    """The planned tokens of the step, from the ranks that read its batches, on all ranks."""
    tokens, groups = None, call.groups
    if plans is not None and groups.reads_data:
        plan = next(iter(plans.values()))
        numbers = [
            m.loss_mask.numel() if m.routed_tokens is None else m.routed_tokens
            for m in plan.microbatches
        ]
        totals = [0] * dist.get_world_size(groups.count_group)
        dist.all_gather_object(totals, sum(numbers), groups.count_group)
        tokens = RoutedTokens(numbers, sum(totals), plan.counts.model_tokens)
    # To the tensor-parallel ranks of the last stage, and from there to all stages.
    for group, source in ((groups.tp, 0), (groups.pp, dist.get_world_size(groups.pp) - 1)):
        box = [tokens]
        dist.broadcast_object_list(box, dist.get_global_rank(group, source), group)
        (tokens,) = box
    assert tokens is not None
    return tokens


def _weights_conflict(call: Call, tokens: RoutedTokens) -> str | None:
    """An error if microbatches of different sizes would have to share one weight."""
    # Backward passes may run after the forward pass of a later microbatch.
    is_pipelined = dist.get_world_size(call.groups.pp) > 1 or len(call.chunks) > 1
    sizes = sorted({*tokens.by_microbatch})
    if call.scale.per_token or not is_pipelined or len(sizes) == 1:
        return None
    return (
        "RouterLosses over pipeline stages needs microbatches of one number of tokens, since Megatron "
        f"has one weight for all in flight, got {sizes} on a data-parallel rank. Set "
        "--calculate-per-token-loss, use one stage, or pad microbatches to one size."
    )


def _weights(call: Call, tokens: RoutedTokens) -> list[float]:
    """Factor of each microbatch's losses, in addition to Megatron's averaging."""
    # Megatron averages these losses even if it only adds up the main loss (``loss_is_normalized``).
    scale = dataclasses.replace(call.scale, normalized=False)
    token_weight = scale.inverse(tokens.model_tokens) / max(tokens.total, 1)
    if scale.per_token:
        return [token_weight] * scale.num_microbatches
    return [token_weight * number for number in tokens.by_microbatch]


def _scale(call: Call, weights: Sequence[float], used_weights: list[float]) -> Tensor:
    """Megatron's scale of every loss, times the next weight, which is added to ``used_weights``."""
    used_weights.append(weights[len(used_weights) % len(weights)])
    one = torch.ones(1, device=next(call.chunks[0].parameters()).device)
    scale_loss = call.config.grad_scale_func
    scaled: Tensor = one if scale_loss is None else scale_loss(one)
    return scaled * used_weights[-1]


@contextlib.contextmanager
def _observed_routers(call: Call, seen: list[Tensor | int]) -> Iterator[None]:
    """Add to ``seen`` the number of tokens that each router sees, over all ranks, or `_UNKNOWN`."""
    from megatron.core.transformer.moe.router import Router

    num_ranks = dist.get_world_size(call.groups.tp) * call.groups.cp_size

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = dict(zip(("input", "padding_mask"), args, strict=False)) | kwargs
        padding = inputs.get("padding_mask")
        if padding is None:
            seen.append(inputs["input"].shape[:-1].numel() * num_ranks)
        else:
            seen.append((~padding).sum() if num_ranks == 1 else _UNKNOWN)

    with contextlib.ExitStack() as stack:
        for chunk in call.chunks:
            for module in chunk.modules():
                if isinstance(module, Router):
                    handle = module.register_forward_pre_hook(note, with_kwargs=True)
                    stack.callback(handle.remove)
        yield


def _tokens_conflict(seen: Sequence[Tensor | int], tokens: RoutedTokens) -> str | None:
    """An error if routers saw other tokens than planned."""
    planned = sorted({*tokens.by_microbatch})
    others = sorted({int(number) for number in seen} - {*planned})
    if not others:
        return None
    return (
        f"routers must see microbatches of the planned {planned} tokens, got {others}. Give "
        "Microbatch(routed_tokens=) where that is not the number of elements of the batch's mask: "
        "without padding if the model gets a padding_mask, which needs one tensor- and "
        f"context-parallel rank ({_UNKNOWN} on others); or drop RouterLosses."
    )
