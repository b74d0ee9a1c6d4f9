"""The auxiliary losses of routers, averaged over the whole step by tokens.

Let ``a_k`` be the auxiliary loss of microbatch ``k`` as Megatron defines it, over all tensor- and
context-parallel ranks, ``T_k`` the tokens that a router sees in it, and ``T`` their sum over all
microbatches of all data-parallel ranks. For each layer and kind of loss the step's loss is

    L = sum_k T_k / T * a_k

Megatron-Core 0.19 multiplies ``a_k`` by what ``config.moe_grad_scale_func`` returns, and then as it
does a returned loss; under ``calculate_per_token_loss`` by ``T_k`` besides. So with the inverse ``s``
of Megatron's scale, see `MegatronScale`, the function returns ``s * T_k / T``, or ``s / T``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import any_rank, broadcast_result, failing_together
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.call import Call, replaced
from megatron_loss_agg.mcore.checks.before import check_schedule
from megatron_loss_agg.plan import plan_of_first_term

if TYPE_CHECKING:
    from megatron_loss_agg.mcore.hook import LossHook

_FLAG = "--loss-aggregation-moe whole (aggregate_routers)"
_UNKNOWN = -1
_ANOTHER_RANK_FAILED = (
    "routers of another rank saw other tokens than planned. Fix the error of that rank first."
)


class RoutedTokens(NamedTuple):
    """Tokens that routers see."""

    by_microbatch: Sequence[int]  # T_k of this data-parallel rank's microbatches in the call
    total: int  # T
    model_tokens: int  # of the step, as Megatron counts them


def aggregate_routers(hook: LossHook, schedule: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule that weighs routers' auxiliary losses in training by tokens over the whole step.

        hook = LossHook(LossAggregation(mode="prompt_mean"), wrappers=[aggregate_routers])

    Raises:
        HostError: when called: losses that cannot be exact, see `check_config`; microbatches that
            would need different weights at once; or routers that saw other tokens than planned.
    """
    has_compared = False

    @functools.wraps(schedule)
    def aggregated(**arguments: Any) -> Any:
        nonlocal has_compared
        call = hook.call
        if call is None or not call.trains:
            return schedule(**arguments)
        check_schedule(call, _FLAG)
        check_config(call.config, call.scale.data_parallel_size)
        tokens = _planned_tokens(hook, call)
        weights = _weights(call, tokens)
        seen: list[Tensor | int] = []
        asked: list[float] = []
        scale = functools.partial(_scale, call, weights, asked)
        with _watched(call, seen), replaced(call.config, "moe_grad_scale_func", scale):
            result = schedule(**arguments)
        passes = len(weights) * len(call.chunks)
        if len(asked) != passes:
            raise HostError(
                f"the schedule must call config.moe_grad_scale_func once in each of {passes} forward "
                f"passes, as Megatron-Core 0.19 does, got {len(asked)} calls. Drop {_FLAG}."
            )
        if has_compared:  # later, ranks would wait for each other without need
            _check_tokens(seen, tokens)
        else:
            groups = [call.groups.tp, call.groups.cp, call.groups.dp, call.groups.pp]
            with failing_together(groups, _ANOTHER_RANK_FAILED):
                _check_tokens(seen, tokens)
            has_compared = True
        return result

    return aggregated


def check_config(config: Any, ranks: int) -> None:
    """Raise HostError if the losses of the model cannot be exact on data-parallel ``ranks``."""
    from megatron.core import __version__

    # Snapshots between releases (0.19.0rc0) ask for the weights and apply others. In a git checkout
    # a release is 0.19.2+commit.
    if not re.fullmatch(r"0\.19\.\d+(\+.*)?", __version__):
        raise HostError(
            f"{_FLAG} needs a release of Megatron-Core 0.19, got {__version__}, whose weights of "
            "routers' losses are not known. Drop the flag."
        )
    if config.num_moe_experts is None:
        raise HostError(
            f"{_FLAG} needs a model with experts, got one without. Set --num-experts, or drop the flag."
        )
    # One kind, or a list of them.
    if ranks > 1 and "global_aux_loss" in config.moe_router_load_balancing_type:
        raise HostError(
            f"{_FLAG} needs aux_loss or seq_aux_loss, got global_aux_loss over {ranks} data-parallel "
            "ranks, which depends on how microbatches are dealt to them. Change "
            "--moe-router-load-balancing-type, or drop the flag."
        )


def _planned_tokens(hook: LossHook, call: Call) -> RoutedTokens:
    """From the plan of the last pipeline stage, on every stage."""

    def of_plan() -> RoutedTokens:
        assert hook.plans is not None  # on the last stage
        plan = plan_of_first_term(hook.plans)
        end = call.first_index + call.scale.num_microbatches
        of_call = plan.positions[call.first_index : end]
        return RoutedTokens(of_call, plan.counts.positions, plan.counts.model_tokens)

    pp = call.groups.pp
    return broadcast_result(of_plan, pp, dist.get_world_size(pp) - 1)


def _weights(call: Call, tokens: RoutedTokens) -> list[float]:
    """Factor of each microbatch's losses, besides Megatron's own averaging.

    Raises HostError on every rank alike, where one factor would have to serve for several.
    """
    # Megatron averages these losses even where it takes the main loss for normalized.
    scale = dataclasses.replace(call.scale, normalized=False)
    by_token = scale.inverse(tokens.model_tokens) / max(tokens.total, 1)
    if scale.per_token:
        return [by_token] * scale.num_microbatches
    # Backward passes may run after the forward pass of a later microbatch.
    is_pipelined = dist.get_world_size(call.groups.pp) > 1 or len(call.chunks) > 1
    if is_pipelined and any_rank(len({*tokens.by_microbatch}) > 1, call.groups.dp):
        raise HostError(
            f"{_FLAG} over pipeline stages needs microbatches of one number of tokens, since Megatron "
            f"has one weight for all in flight, got {sorted({*tokens.by_microbatch})} on this "
            "data-parallel rank. Set --calculate-per-token-loss, use one stage, or pad microbatches to "
            "one size."
        )
    return [by_token * number for number in tokens.by_microbatch]


def _scale(call: Call, weights: Sequence[float], asked: list[float]) -> Tensor:
    """Megatron's scale of every loss, times the weight of this forward pass, added to ``asked``."""
    asked.append(weights[len(asked) % len(weights)])
    one = torch.ones(1, device=next(call.chunks[0].parameters()).device)
    scale_loss = call.config.grad_scale_func
    scaled: Tensor = one if scale_loss is None else scale_loss(one)
    return scaled * asked[-1]


@contextmanager
def _watched(call: Call, seen: list[Tensor | int]) -> Iterator[None]:
    """Add to ``seen`` the number of tokens that each router sees, over all ranks, or `_UNKNOWN`."""
    from megatron.core.transformer.moe.router import Router

    ranks = dist.get_world_size(call.groups.tp) * call.groups.cp_size

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = dict(zip(("input", "padding_mask"), args, strict=False)) | kwargs
        padding = inputs.get("padding_mask")
        if padding is None:
            seen.append(inputs["input"].shape[:-1].numel() * ranks)
        else:
            seen.append((~padding).sum() if ranks == 1 else _UNKNOWN)

    with ExitStack() as stack:
        for chunk in call.chunks:
            for module in chunk.modules():
                if isinstance(module, Router):
                    handle = module.register_forward_pre_hook(note, with_kwargs=True)
                    stack.callback(handle.remove)
        yield


def _check_tokens(seen: Sequence[Tensor | int], tokens: RoutedTokens) -> None:
    """Raise HostError if routers saw other tokens than planned."""
    planned = sorted({*tokens.by_microbatch})
    others = sorted({int(number) for number in seen} - {*planned})
    if others:
        raise HostError(
            f"routers must see microbatches of the planned {planned} tokens, got {others}. Give "
            "Microbatch(routed_tokens=) where that is not the number of elements of the batch's mask: "
            "without padding if the model gets a padding_mask, which needs one tensor- and "
            f"context-parallel rank ({_UNKNOWN} on others); or drop {_FLAG}."
        )
