"""The auxiliary losses of routers, averaged over the whole step by tokens.

Let ``a_k`` be the auxiliary loss of microbatch ``k`` as the host defines it, over all tensor- and
context-parallel ranks, ``T_k`` the tokens that a router sees in it, and ``T`` their sum over all
microbatches of all data-parallel ranks. For each layer and kind of loss the step's loss is::

    L = sum_k T_k / T * a_k

Megatron-Core 0.19 multiplies ``a_k`` by what ``config.moe_grad_scale_func`` returns, and then as it
does a returned loss; under ``calculate_per_token_loss`` by ``T_k`` besides. So with `HostScale`'s
multiplier ``m``, which undoes the former, the function returns ``m * T_k / T``, or ``m / T``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import failing_together
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.extension import Extension, Watch
from megatron_loss_agg.mcore.host import Call, replaced
from megatron_loss_agg.mcore.step import PlannedStep

_FLAG = "--loss-aggregation-moe step (RouterLosses())"
_UNKNOWN = -1
_ELSEWHERE = "routers of another rank saw other tokens; expected the planned ones: see its error"


class RouterLosses(Extension):
    """Weighs the auxiliary losses of routers in training."""

    needs = frozenset({"stages"})

    def __init__(self) -> None:
        # In this step: tokens that a router saw in a microbatch, over all ranks, or `_UNKNOWN`.
        self._seen: list[Tensor | int] = []
        self._compared = False  # in some step

    def settings(self) -> Mapping[str, object]:
        return {"moe": "step"}

    def words(self) -> str:
        return "moe: step"

    def start(self, call: Call) -> None:
        if call.trains:
            check_config(call.config, call.scale.data_parallel_size)

    @contextmanager
    def around(self, call: Call, plan: PlannedStep | None) -> Iterator[Watch | None]:
        if not call.trains:
            yield None
            return
        assert plan is not None  # every stage has it
        if call.begins_step:
            self._seen.clear()
        factors = _factors(call, plan)
        asked: list[float] = []
        scale = functools.partial(_scale, call, factors, asked)
        with _watching(call, self._seen), replaced(call.config, "moe_grad_scale_func", scale):
            yield None
        if len(asked) != (passes := len(factors) * len(call.chunks)):
            raise HostError(
                f"the schedule called config.moe_grad_scale_func {len(asked)} times in {passes} "
                f"forward passes; expected once each, as in Megatron-Core 0.19: drop {_FLAG}"
            )
        if call.ends_step:
            groups = [call.groups.tp, call.groups.cp, call.groups.dp, call.groups.pp]
            # Exchanging failures makes ranks wait: only where one is likely.
            with failing_together([] if self._compared else groups, _ELSEWHERE):
                _check_tokens(self._seen, plan)
            self._compared = True


def check_config(config: Any, ranks: int) -> None:
    """Raise HostError if the losses of the model cannot be exact on data-parallel ``ranks``."""
    from megatron.core import __version__

    # Snapshots between releases (0.19.0rc0) ask for the weights and apply others. In a git checkout
    # a release is 0.19.2+commit.
    if not re.fullmatch(r"0\.19\.\d+(\+.*)?", __version__):
        why = (
            f"with Megatron-Core {__version__}, whose weights of these losses are not known; "
            "expected a release of 0.19"
        )
    elif config.num_moe_experts is None:
        why = "with a model without experts; expected --num-experts"
    # One kind, or a list of them.
    elif ranks > 1 and "global_aux_loss" in config.moe_router_load_balancing_type:
        why = (
            f"with global_aux_loss over {ranks} data-parallel ranks, which depends on how "
            "microbatches are dealt to them; expected one, or aux_loss or seq_aux_loss"
        )
    else:
        return
    raise HostError(f"{_FLAG} {why}: or drop it")


def _factors(call: Call, plan: PlannedStep) -> list[float]:
    """What the host multiplies each microbatch's losses by, besides its own averaging.

    Raises HostError on every rank alike, where one factor would have to serve for several.
    """
    positions = plan.first.counts.positions
    assert positions is not None  # masks are known
    # The host averages these losses even where it takes the main loss for normalized.
    scale = dataclasses.replace(call.scale, normalized=False)
    unit = scale.multiplier(plan.total_tokens) / max(positions, 1)
    if scale.per_token:
        return [unit] * scale.num_microbatches
    # Backward passes may run after the forward pass of a later microbatch.
    in_flight = dist.get_world_size(call.groups.pp) > 1 or len(call.chunks) > 1
    if in_flight and plan.first.counts.unequal:
        raise HostError(
            f"{_FLAG} with microbatches of different numbers of tokens over pipeline stages: "
            f"{sorted(set(plan.routed))} on this data-parallel rank, which get one weight; "
            "expected --calculate-per-token-loss, one stage, or microbatches of one size"
        )
    start, end = call.first_index, call.first_index + call.scale.num_microbatches
    return [unit * tokens for tokens in plan.routed[start:end]]


def _scale(call: Call, factors: list[float], asked: list[float]) -> Tensor:
    """The host's scale of every loss, times the factor of this forward pass, added to ``asked``."""
    asked.append(factors[len(asked) % len(factors)])
    one = torch.ones(1, device=next(call.chunks[0].parameters()).device)
    of_losses = call.config.grad_scale_func
    given: Tensor = one if of_losses is None else of_losses(one)
    return given * asked[-1]


@contextmanager
def _watching(call: Call, seen: list[Tensor | int]) -> Iterator[None]:
    """Add to ``seen`` how many tokens routers see in each microbatch."""
    from megatron.core.transformer.moe.router import Router

    ranks = dist.get_world_size(call.groups.tp) * call.groups.cp_size

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("input", "padding_mask"), args, strict=False)) | kwargs
        padding = given.get("padding_mask")
        if padding is None:
            seen.append(given["input"].shape[:-1].numel() * ranks)
        else:
            seen.append((~padding).sum() if ranks == 1 else _UNKNOWN)

    with ExitStack() as stack:
        for chunk in call.chunks:
            for module in chunk.modules():
                if isinstance(module, Router):
                    handle = module.register_forward_pre_hook(note, with_kwargs=True)
                    stack.callback(handle.remove)
        yield


def _check_tokens(seen: list[Tensor | int], plan: PlannedStep) -> None:
    """Raise HostError if routers saw other tokens than planned."""
    if others := {int(number) for number in seen} - {*plan.routed}:
        raise HostError(
            f"routers saw microbatches of {sorted(others)} tokens, planned are "
            f"{sorted(set(plan.routed))}; expected as many as the batch's mask has elements, or "
            "Microbatch(routed_tokens=): without padding if the model gets a padding_mask, which "
            f"needs one tensor- and context-parallel rank ({_UNKNOWN} on others); or drop {_FLAG}"
        )
