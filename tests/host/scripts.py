"""Users' scripts, right and wrong, by their masks, losses and calls of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import TokenLoss
from tests.host import gpt

Form = Callable[[Tensor, Tensor], tuple[Any, Any]]
"""A forward step's result, from the losses and the mask of this rank's tokens."""


def returning(form: Form, iterator: Any, model: Any) -> Any:
    """A forward step."""
    losses, loss_func = gpt.forward_step(iterator, model)
    return form(losses, *loss_func.args)


def stock(losses: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
    return losses, functools.partial(gpt.stock_loss_func, mask)


def with_mask(change: Callable[[Tensor], Tensor]) -> Form:
    return lambda losses, mask: stock(losses, change(mask))


def of_terms(iterator: Any, model: Any, names: Iterable[str], step: Any = None) -> Any:
    """Terms of these names, all of the same losses: those of a forward step."""
    losses, loss_func = (step or gpt.forward_step)(iterator, model)
    return losses, TokenLoss(lambda x: dict.fromkeys(names, x), *loss_func.args)


def gathered(iterator: Any, model: Any, step: Any = None) -> Any:
    """The losses of a forward step, gathered: every context-parallel rank has all of them."""
    batch = gpt.received(iterator)
    losses, _ = (step or gpt.forward_step)(iter([batch]), model)
    return losses, TokenLoss(lambda x: x, batch["loss_mask"], lambda x: x)


def by_sample(batch: dict[str, Any], of_mb: tuple[int, ...], **values: Any) -> dict[str, Any]:
    """The batch of the samples ``of_mb``, with more keys: of each sample, its value."""
    return batch | {key: torch.tensor([of[i] for i in of_mb]) for key, of in values.items()}


def without_the_last(batch: Any) -> Microbatch:
    """A reader for scripts whose losses lack the last position, as in reinforcement learning."""
    return Microbatch(batch["loss_mask"][:, :-1])


def with_labels(iterator: Any, model: Any, **change: Any) -> Any:
    """The model computes the losses, as in Megatron's scripts; with other arguments than these."""
    batch = gpt.received(iterator)
    _, labels, mask, _ = gpt.part_of(batch)
    given = {"labels": labels, "loss_mask": mask, **change}
    losses, *_ = gpt.outputs(batch, model, **given)
    if given["labels"] is None:
        losses = losses.sum(dim=-1)
    return losses, functools.partial(gpt.stock_loss_func, mask)
