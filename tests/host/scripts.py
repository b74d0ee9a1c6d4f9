"""What users' scripts do with masks, losses and the model, right and wrong.

A change of a loss function is made of the stock one and its mask, see `gpt.forward_step_with`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg import CPLayout, Microbatch
from megatron_loss_agg.mcore import LateMicrobatch, TokenLoss
from tests.host import gpt, parallel_state


def without_mask(stock: Any, mask: Tensor) -> Any:
    return lambda output: stock(mask, output)


def with_another_name(stock: Any, mask: Tensor) -> Any:
    def own_loss(tokens: Tensor, output: Tensor) -> Any:
        return stock(tokens, output)

    return functools.partial(own_loss, mask)


def divided(stock: Any, mask: Tensor) -> Any:
    def own(loss_mask: Tensor, output: Tensor) -> Any:
        loss, *others = stock(loss_mask, output)
        return (loss / 7, *others)

    return functools.partial(own, mask)


def with_mask(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Any]:
    """The stock loss function has another mask."""
    return lambda stock, mask: functools.partial(stock, change(mask))


def of_terms(iterator: Any, model: Any, names: Iterable[str], step: Any = None) -> Any:
    """Terms of these names, all of the same losses: those of a forward step."""
    losses, loss_func = (step or gpt.forward_step)(iterator, model)
    return losses, TokenLoss(lambda x: (dict.fromkeys(names, x), {}), *loss_func.args)


def by_sample(batch: dict[str, Any], of_mb: tuple[int, ...], **values: Any) -> dict[str, Any]:
    """The batch of the samples ``of_mb``, with more keys: of each sample, its value."""
    return batch | {key: torch.tensor([of[i] for i in of_mb]) for key, of in values.items()}


def with_losses(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Any]:
    return lambda stock, mask: TokenLoss(lambda output: (change(output), {}), mask)


def first_token(value: float) -> Callable[[Tensor], Tensor]:
    """Each row's first active token has another mask."""
    return lambda mask: mask.masked_fill(mask.cumsum(dim=-1) == 1, value)


def without_the_last(batch: Any) -> Microbatch:
    """A reader for scripts whose losses lack the last position, as in reinforcement learning."""
    return Microbatch(batch["loss_mask"][:, :-1])


def samples_alone(batch: Any) -> LateMicrobatch:
    """A reader of rows or a pack, whose mask the model makes."""
    offsets = batch.get("cu_seqlens")
    return LateMicrobatch(len(batch["tokens"]) if offsets is None else len(offsets) - 1)


def transposed(iterator: Any, model: Any) -> Any:
    """As of a model whose output is [seq, samples]."""
    losses, loss_func = gpt.forward_step(iterator, model)
    (mask,) = loss_func.args
    return losses.T, functools.partial(loss_func.func, mask.T.contiguous())


def packed_call(iterator: Any, model: Any, by_position: bool = False, **more: Any) -> Any:
    """Calls the model with packed sequences, whatever the batch says; and ``more`` of them."""
    from megatron.core.packed_seq_params import PackedSeqParams

    batch = gpt.received(iterator)
    tokens, mask = batch["tokens"].view(1, -1), batch["loss_mask"]
    length = tokens.shape[1]
    starts = torch.tensor([0, length], dtype=torch.int32)
    packed = PackedSeqParams("thd", starts, starts, starts, starts, length, length, **more)
    given = [tokens, gpt.positions_like(tokens), None]
    if by_position:
        logits = model(*given, None, None, None, packed)
    else:
        logits = model(*given, packed_seq_params=packed)
    losses = logits.logsumexp(-1).view_as(mask)  # of the right shape, and no more is needed
    return losses, functools.partial(gpt.stock_loss_func, mask)


def edits_its_mask(iterator: Any, model: Any) -> Any:
    """Shifts the mask of the batch in place before it is used."""
    batch = next(iterator)
    batch["loss_mask"].copy_(batch["loss_mask"].roll(1, dims=-1))
    batch["loss_mask"][..., 0] = 0
    return gpt.forward_step(iter([batch]), model)


def draws_twice(iterator: Any, model: Any) -> Any:
    """Takes two batches for a microbatch, and uses the second."""
    next(iterator)
    return gpt.forward_step(iterator, model)


def past_the_model(iterator: Any, model: Any) -> Any:
    """Computes losses with the model's layers, and without the model's own call."""
    mask = next(iterator)["loss_mask"]
    weight = next(model.parameters())
    return weight.sum() + torch.zeros_like(mask), functools.partial(gpt.stock_loss_func, mask)


def with_labels(iterator: Any, model: Any, **change: Any) -> Any:
    """The model computes the losses, as in Megatron's scripts; with other arguments than these."""
    batch = gpt.received(iterator)
    _, labels, mask, _ = gpt.part_of(batch)
    given = {"labels": labels, "loss_mask": mask, **change}
    losses, *_ = gpt.outputs(batch, model, **given)
    if given["labels"] is None:
        losses = losses.sum(dim=-1)
    return losses, functools.partial(gpt.stock_loss_func, mask)


def of_parts(
    part: Callable[[int], int] = int,
    tokens: Callable[[Tensor], Tensor] = Tensor.clone,
    own_tokens: Callable[[Tensor], Tensor] = Tensor.clone,
    mask: Callable[[Tensor, int], Tensor] = lambda mask, rank: mask,
) -> Callable[..., Any]:
    """A forward step whose losses have no labels.

    Args:
        part: the context-parallel rank whose part a rank takes.
        tokens, own_tokens, mask: changes of the batch's tokens, of the rank's and of its mask.
    """

    def forward_step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)
        size = parallel_state.get_context_parallel_world_size()
        rank = parallel_state.get_context_parallel_rank()
        layout = CPLayout.bshd(batch["tokens"].shape[1], size, part(rank))
        own = own_tokens(layout.shard(tokens(batch["tokens"])))
        losses = model(own, gpt.positions_like(own), None).logsumexp(-1)
        own_mask = mask(layout.shard(batch["loss_mask"]), rank)
        return losses, functools.partial(gpt.stock_loss_func, own_mask)

    return forward_step
