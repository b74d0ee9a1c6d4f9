"""Forward steps whose losses every context-parallel rank holds whole, gathered in two ways."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.mcore import TokenLoss
from megatron_loss_agg.report import Sum
from tests.host import gpt, parallel_state


class Gathered(torch.autograd.Function):
    """[ranks, *x]: all ranks' ``x``; in backward, the sum of all ranks' gradients of it.

    torch's own scatters in backward over gloo, to ranks of the world.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        group, size, _ = context_parallel()
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        group, _, rank = context_parallel()
        dist.all_reduce(gradient, group=group)
        return gradient[rank]


class Consumed(torch.autograd.Function):
    """Overwrites what it keeps outside of ``save_for_backward``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = torch.ones_like(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.kept.mul_(gradient).clone()


def context_parallel() -> tuple[Any, int, int]:
    """The group, its size, and this rank's place."""
    group = parallel_state.get_context_parallel_group()
    return group, dist.get_world_size(group), dist.get_rank(group)


def gathered(x: Tensor, batch: dict[str, Tensor], kind: str) -> Tensor:
    """``x`` of all tokens of the batch; in backward, a sum over the ranks' gradients of it, or no
    communication.
    """
    parts = [*Gathered.apply(x)]
    if kind == "local_grad":
        parts = [part.detach() for part in parts]
        parts[context_parallel()[2]] = x
    return gpt.layout_of(batch).unshard(parts)


def script(kind: str, **options: Any) -> Callable[..., Any]:
    """`forward_step` with these options."""
    return functools.partial(forward_step, kind=kind, **options)


def forward_step(
    data_iterator: Iterator[Any],
    model: Any,
    *,
    kind: str,
    whole: str | None = "as it is",
    early: bool = False,
    function: Any = None,
    metric: bool = False,
    gathers: bool = True,
) -> tuple[Any, TokenLoss]:
    """Whole losses.

    Args:
        whole: what the loss function says of them.
        gathers: or else losses and mask are this rank's.
        early: gather in the forward step, so that the loss function has a whole input.
        function: of the whole log-probabilities.
        metric: report the losses again, by the weights.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    batch = gpt.received(data_iterator)
    logits, labels, local_mask = gpt.outputs(batch, model)

    def losses_of(logits: Tensor) -> Tensor:
        with gpt.KeepDouble():
            # It overwrites the logits, and its backward pass what it kept for it.
            flat = logits.reshape(1, -1, logits.shape[-1])
            losses = vocab_parallel_cross_entropy(flat, labels.reshape(1, -1))
        losses = losses.view_as(labels)
        if not gathers:
            return losses
        losses = gathered(losses, batch, kind)
        return losses if function is None else function(losses)

    def compute(output: Any, weights: Any = None) -> tuple[Tensor, dict[str, Any]]:
        losses = output["whole"] if early else losses_of(output)
        report = {"again": Sum.of(losses, weights)} if metric else {}
        return losses, report

    output = {"whole": losses_of(logits)} if early else logits
    said = kind if whole == "as it is" else whole
    mask = batch["loss_mask"] if gathers else local_mask
    return output, TokenLoss(compute, mask, said, takes_weights=metric)
