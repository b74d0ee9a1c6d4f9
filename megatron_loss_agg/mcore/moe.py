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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import all_gather, communication_device, failing_together
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step_weights import StepWeights

_FLAG = "--loss-aggregation-moe"
_KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_ELSEWHERE = (
    "the routers of another rank saw other tokens than planned; expected as many: see its error"
)


class _Tokens(NamedTuple):
    """Of one optimizer step."""

    routed: list[int]  # of each microbatch of this data-parallel rank: what routers see
    all_routed: int  # their sum over all data-parallel ranks
    of_host: int  # what the host counts, see `StepWeights.total_tokens`


class RouterLosses:
    """Weighs the auxiliary losses of routers, if ``choice`` is ``step``.

    Args:
        choice: ``host`` or ``step``; ``host`` does nothing.
    """

    def __init__(self, choice: str) -> None:
        self._on = choice == "step"
        self._step = _Tokens([], 0, 0)
        # Tokens that routers saw in this step, once for each call of one; -1: unknown.
        self._seen: list[Tensor | int] = []
        self._compared = False  # in some step

    def check(self, call: Call) -> None:
        """Raise HostError, on every rank alike, if the losses of ``call`` cannot be weighed."""
        if self._on:
            check_config(call.config, call.scale.data_parallel_size)

    def waits(self, call: Call) -> bool:
        """Whether all pipeline stages wait for the last one's plan."""
        return self._on and dist.get_world_size(call.groups.pp) > 1

    def plan(self, call: Call, weights: StepWeights) -> None:
        """Count a step's tokens; on every rank of the last pipeline stage. One collective.

        Raises:
            HostError: one weight cannot serve for all microbatches where it has to.
        """
        if not self._on:
            return
        tokens = weights.routed_tokens
        unequal = _pipelined(call) and not call.scale.per_token and len(set(tokens)) > 1
        mine = torch.tensor([sum(tokens), unequal], dtype=torch.float64)
        total, ranks = all_gather(mine, call.groups.dp).sum(dim=0).tolist()
        if ranks:
            found = f": {sorted(set(tokens))} on this rank" if unequal else " on another rank"
            raise HostError(
                f"moe='step' ({_FLAG} step) with microbatches of different numbers of tokens over "
                f"pipeline stages{found}. Megatron has one weight for all microbatches in flight; "
                "expected calculate_per_token_loss (--calculate-per-token-loss), one stage, or "
                "microbatches of one size"
            )
        self._step = _Tokens(list(tokens), round(total), weights.total_tokens)

    def tell_stages(self, call: Call, number: int) -> None:
        """Tell all pipeline stages what the last one counted in ``number`` microbatches."""
        if not self.waits(call):
            return
        pp = call.groups.pp
        row = torch.zeros(2 + number, dtype=torch.float64)
        if call.groups.last_stage:
            row[:] = row.new_tensor([*self._step[1:], *self._step.routed])
        row = row.to(communication_device(pp))
        dist.broadcast(row, src=dist.get_global_rank(pp, dist.get_world_size(pp) - 1), group=pp)
        all_routed, of_host, *routed = map(round, row.tolist())
        self._step = _Tokens(routed, all_routed, of_host)

    @contextlib.contextmanager
    def scaled(self, call: Call, first: int, is_last: bool) -> Iterator[None]:
        """Give the host the weights of a call of the schedule.

        Args:
            first: index in the step of the call's first microbatch.
            is_last: no further call belongs to the step.

        Raises:
            HostError: the schedule did not ask for them, or routers saw other tokens.
        """
        if not self._on:
            yield
            return
        asked = 0
        factors, base = self._factors(call, first), _loss_scale(call)

        def scale() -> Tensor:
            nonlocal asked
            asked += 1
            return base() * factors[(asked - 1) % len(factors)]

        with contextlib.ExitStack() as stack:
            if not first:
                self._seen.clear()
            stack.enter_context(_watching(call, self._seen))
            call.config.moe_grad_scale_func = scale
            stack.callback(setattr, call.config, "moe_grad_scale_func", None)
            yield
        expected = len(factors) * len(call.chunks)
        if asked != expected:
            raise HostError(
                f"the schedule called config.moe_grad_scale_func {asked} times for {expected} "
                f"forward passes; expected once each, as in Megatron-Core 0.19: choose {_FLAG} host"
            )
        if is_last:
            groups = [call.groups.tp, call.groups.cp, call.groups.dp, call.groups.pp]
            # Exchanging failures makes ranks wait: only where one is likely.
            with failing_together([] if self._compared else groups, _ELSEWHERE):
                self._compare()
            self._compared = True

    def _factors(self, call: Call, first: int) -> list[float]:
        """What the host multiplies each microbatch's losses by, besides its own averaging."""
        number = call.scale.num_microbatches
        unit = call.scale.multiplier(self._step.of_host) / max(self._step.all_routed, 1)
        if call.scale.per_token:
            return [unit] * number
        return [unit * tokens for tokens in self._step.routed[first : first + number]]

    def _compare(self) -> None:
        planned, seen = set(self._step.routed), {x for x in self._seen if isinstance(x, int)}
        counted = [x for x in self._seen if isinstance(x, Tensor)]
        seen |= {*torch.stack(counted).tolist()} if counted else set()  # waits for the device once
        if -1 in seen:
            raise HostError(
                f"moe='step' ({_FLAG} step) with a padding_mask over tensor- or context-parallel "
                "ranks, where Megatron weighs each rank's part by its own tokens; expected the "
                "model called without one, or one such rank, or choose 'host'"
            )
        if seen - planned:
            raise HostError(
                f"routers saw microbatches of {sorted(seen - planned)} tokens, planned are "
                f"{sorted(planned)}; expected as many as the batch's mask has elements, or "
                "Microbatch(routed_tokens=): tokens without padding if the model gets a "
                f"padding_mask; or choose {_FLAG} host"
            )


def check_config(config: Any, ranks: int) -> None:
    """Raise HostError if ``step`` cannot be exact for the model, on data-parallel ``ranks``."""
    reason = _reason_against(config, ranks)
    if reason is not None:
        raise HostError(f"moe='step' ({_FLAG} step) {reason}, or choose 'host'")


def _reason_against(config: Any, ranks: int) -> str | None:
    """Why ``step`` cannot be exact, and what to change; None if it can."""
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


def _pipelined(call: Call) -> bool:
    """Whether backward passes may run after the forward pass of a later microbatch."""
    return dist.get_world_size(call.groups.pp) > 1 or len(call.chunks) > 1


def _loss_scale(call: Call) -> Callable[[], Tensor]:
    """The host's scale of every loss, as for fp16; a new tensor [1] each time."""
    device = next(call.chunks[0].parameters()).device

    def scale() -> Tensor:
        one = torch.ones(1, device=device)
        given = call.config.grad_scale_func
        return one if given is None else torch.as_tensor(given(one), device=device).view(1)

    return scale


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
