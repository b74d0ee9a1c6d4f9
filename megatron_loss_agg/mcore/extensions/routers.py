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

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import failing_together
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step import PlannedStep

_FLAG = "--loss-aggregation-moe step (RouterLosses())"
_KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_ELSEWHERE = (
    "the routers of another rank saw other tokens than planned; expected as many: see its error"
)


class RouterLosses(Extension):
    """Weighs the auxiliary losses of routers in training."""

    needs = frozenset({"stages"})

    def __init__(self) -> None:
        # In this step: tokens that routers saw, over all ranks of a microbatch; -1: unknown.
        self._seen: list[Tensor | int] = []
        self._compared = False  # in some step

    def settings(self) -> Mapping[str, object]:
        return {"moe": "step"}

    def words(self) -> str:
        return "moe: step"

    def start(self, call: Call) -> None:
        if call.trains:
            check_config(call.config, call.scale.data_parallel_size)

    @contextlib.contextmanager
    def around(
        self, call: Call, plan: PlannedStep | None
    ) -> Iterator[Callable[[MicrobatchLoss], None] | None]:
        if not call.trains:
            yield None
            return
        assert plan is not None  # every stage has it
        _check_equal(call, plan)
        if not call.first:
            self._seen.clear()
        factors = _factors(call, plan)
        with _watching(call, self._seen), _scaling(call, factors) as asked:
            yield None
        expected = len(factors) * len(call.chunks)
        if len(asked) != expected:
            raise HostError(
                f"the schedule called config.moe_grad_scale_func {len(asked)} times for {expected} "
                "forward passes; expected once each, as in Megatron-Core 0.19: drop "
                f"{_FLAG}"
            )
        if call.ends_step:
            groups = [call.groups.tp, call.groups.cp, call.groups.dp, call.groups.pp]
            # Exchanging failures makes ranks wait: only where one is likely.
            with failing_together([] if self._compared else groups, _ELSEWHERE):
                _check_tokens(self._seen, plan)
            self._compared = True


def _check_equal(call: Call, plan: PlannedStep) -> None:
    """Raise HostError, on every rank alike, where one weight would have to serve for several."""
    # Backward passes may run after the forward pass of a later microbatch.
    in_flight = dist.get_world_size(call.groups.pp) > 1 or len(call.chunks) > 1
    if in_flight and not call.scale.per_token and plan.first.counts.unequal:
        raise HostError(
            f"{_FLAG} with microbatches of different numbers of tokens over pipeline stages: "
            f"{sorted(set(plan.routed))} on this data-parallel rank. Megatron has one weight for "
            "all microbatches in flight; expected calculate_per_token_loss "
            "(--calculate-per-token-loss), one stage, or microbatches of one size"
        )


def _factors(call: Call, plan: PlannedStep) -> list[float]:
    """What the host multiplies each microbatch's losses by, besides its own averaging."""
    positions = plan.first.counts.positions
    assert positions is not None  # masks are known
    unit = call.scale.multiplier(plan.total_tokens) / max(positions, 1)
    if call.scale.per_token:
        return [unit] * call.scale.num_microbatches
    return [unit * tokens for tokens in plan.routed[call.first : call.last + 1]]


def _check_tokens(seen: list[Tensor | int], plan: PlannedStep) -> None:
    """Raise HostError if routers saw other tokens than planned; waits for the device once."""
    counted = [x for x in seen if isinstance(x, Tensor)]
    numbers = {x for x in seen if isinstance(x, int)}
    numbers |= {*torch.stack(counted).tolist()} if counted else set()
    if -1 in numbers:
        raise HostError(
            f"{_FLAG} with a padding_mask over tensor- or context-parallel ranks, where Megatron "
            "weighs each rank's part by its own tokens; expected the model called without one, or "
            "one such rank: otherwise drop it"
        )
    if others := numbers - {*plan.routed}:
        raise HostError(
            f"routers saw microbatches of {sorted(others)} tokens, planned are "
            f"{sorted(set(plan.routed))}; expected as many as the batch's mask has elements, or "
            "Microbatch(routed_tokens=): tokens without padding if the model gets a padding_mask; "
            f"or drop {_FLAG}"
        )


def check_config(config: Any, ranks: int) -> None:
    """Raise HostError if the losses of the model cannot be exact on data-parallel ``ranks``."""
    reason = _reason_against(config, ranks)
    if reason is not None:
        raise HostError(f"{_FLAG} {reason}: or drop it")


def _reason_against(config: Any, ranks: int) -> str | None:
    """Why they cannot be exact, and what to change; None if they can."""
    from megatron.core import __version__

    # Snapshots between releases (0.19.0rc0) ask for the weights and apply others. In a git checkout
    # a release is 0.19.2+commit.
    known = re.fullmatch(r"0\.19\.\d+(\+.*)?", __version__)
    if not known or not hasattr(config, "moe_grad_scale_func"):
        return (
            f"with Megatron-Core {__version__}, whose weights of these losses are not known; "
            "expected a release of 0.19, which asks config.moe_grad_scale_func for them"
        )
    if config.moe_grad_scale_func is not None:
        return "with a config.moe_grad_scale_func of the script's own; expected None: remove it"
    kinds = _kinds(config)
    if not kinds and getattr(config, "moe_z_loss_coeff", None) is None:
        return (
            "with a model that has no auxiliary loss of routers; expected num_moe_experts, and "
            f"moe_router_load_balancing_type {', '.join(_KINDS)} or moe_z_loss_coeff: drop it"
        )
    if "global_aux_loss" in kinds and ranks > 1:
        return (
            f"with global_aux_loss over {ranks} data-parallel ranks, where Megatron's expert "
            "counts, and so the loss, depend on how microbatches are dealt to ranks; expected one "
            "such rank, or aux_loss or seq_aux_loss"
        )
    return None


def _kinds(config: Any) -> list[str]:
    """The load-balancing losses that the configuration turns on."""
    if config.num_moe_experts is None:
        return []
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    # Megatron refuses lists of different lengths itself, but later.
    kinds, coefficients = (x if isinstance(x, list) else [x] for x in (kinds, coefficients))
    pairs = zip(kinds, coefficients, strict=False)
    return [kind for kind, coefficient in pairs if kind in _KINDS and coefficient]


@contextlib.contextmanager
def _scaling(call: Call, factors: list[float]) -> Iterator[list[float]]:
    """Give the host ``factors`` besides its scale of every loss; yields those it asked for."""
    asked: list[float] = []
    device, of_losses = next(call.chunks[0].parameters()).device, call.config.grad_scale_func

    def scale() -> Tensor:
        asked.append(factors[len(asked) % len(factors)])
        one = torch.ones(1, device=device)
        given = one if of_losses is None else torch.as_tensor(of_losses(one), device=device)
        return given.view(1) * asked[-1]

    call.config.moe_grad_scale_func = scale
    try:
        yield asked
    finally:
        call.config.moe_grad_scale_func = None


@contextlib.contextmanager
def _watching(call: Call, seen: list[Tensor | int]) -> Iterator[None]:
    """Add to ``seen`` how many tokens routers see in a microbatch, over all ranks; -1: unknown."""
    from megatron.core.transformer.moe.router import Router

    ranks = dist.get_world_size(call.groups.tp) * call.scale.context_parallel_size

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("input", "padding_mask"), args, strict=False)) | kwargs
        padding = given.get("padding_mask")
        if padding is None:
            seen.append(given["input"].shape[:-1].numel() * ranks)
        else:
            seen.append((~padding).sum() if ranks == 1 else -1)

    with contextlib.ExitStack() as stack:
        for chunk in call.chunks:
            for module in chunk.modules():
                if isinstance(module, Router):
                    handle = module.register_forward_pre_hook(note, with_kwargs=True)
                    stack.callback(handle.remove)
        yield
