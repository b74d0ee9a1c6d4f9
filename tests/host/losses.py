"""Losses besides the stock one: their gradients by token, and losses gathered on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.mcore import TokenLoss
from megatron_loss_agg.report import Sum
from tests.host import gpt, parallel_state
from tests.host.harness import run_host_ranks
from tests.host.reference import Gradient, Reference, gradient_of
from tests.host.steps import Sequence, Weights, sequences

LossesOf = Callable[[Any, Sequence], Mapping[str, Tensor]]
"""Of the model and a sample alone: by name, a loss for each token of the sample."""


def references(losses_of: LossesOf, **config: Any) -> dict[str, Reference]:
    """Each of these losses, by one fp64 process that runs every sample alone."""
    return run_host_ranks(_by_token, 1, losses_of, config)[0]  # type: ignore[no-any-return]


def _by_token(losses_of: LossesOf, config: dict[str, Any]) -> dict[str, Reference]:
    gpt.initialize()
    model = gpt.build(**config)
    found: dict[str, Reference] = {}
    for sequence in sequences():
        for name, losses in losses_of(model, sequence).items():
            rows = [gradient_of(loss, model) for loss in losses]
            losses_by_sample, gradients = found.setdefault(name, Reference([], []))
            losses_by_sample.append(losses.detach())
            gradients.append({key: torch.stack([row[key] for row in rows]) for key in rows[0]})
    return found


def gradient_of_sum(*parts: tuple[float, Reference, Weights]) -> Gradient:
    """Of ``sum coefficient * sum w * loss``."""
    gradients = [(factor, reference.gradient(weights)) for factor, reference, weights in parts]
    return {name: sum(factor * g[name] for factor, g in gradients) for name in gradients[0][1]}


class Gathered(torch.autograd.Function):
    """[ranks, *x]: all ranks' ``x``; in backward, the sum of all ranks' gradients of it.

    torch's own scatters in backward over gloo, to ranks of the world.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        dist.all_reduce(gradient, group=group)
        return gradient[dist.get_rank(group)]


def gathered(x: Tensor, batch: dict[str, Tensor], kind: str) -> Tensor:
    """``x`` of all tokens of the batch; in backward, a sum over the ranks' gradients of it
    ("reduced_grad"), or no communication ("local_grad").
    """
    parts = [*Gathered.apply(x)]
    if kind == "local_grad":
        parts = [part.detach() for part in parts]
        parts[parallel_state.get_context_parallel_rank()] = x
    return gpt.layout_of(batch).unshard(parts)


def whole_losses(
    iterator: Iterator[Any] | None,
    model: Any,
    *,
    kind: str,
    said: str | None = "as it is",
    early: bool = False,
) -> tuple[Any, TokenLoss]:
    """A forward step whose losses every context-parallel rank has whole; reports them again.

    Args:
        kind: how they are gathered, see `gathered`.
        said: what the loss function says of that.
        early: gathers in the forward step, so that the loss function has a whole input.
    """
    batch = gpt.received(iterator)
    losses, _ = gpt.forward_step(iter([batch]), model)

    def compute(x: Any, weights: Tensor) -> tuple[Tensor, dict[str, Any]]:
        if not early:
            x = x.mul_(2) / 2  # overwrites its input, as Megatron's cross entropy does
            x = gathered(x, batch, kind)
        return x, {"again": Sum.of(x, weights)}

    output = gathered(losses, batch, kind) if early else losses
    said = kind if said == "as it is" else said
    return output, TokenLoss(compute, batch["loss_mask"], said, takes_weights=True)


def whole(kind: str, **options: Any) -> Callable[..., Any]:
    return functools.partial(whole_losses, kind=kind, **options)
