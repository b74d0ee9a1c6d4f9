"""What users' scripts do with masks, losses, models and schedules, right and wrong.

The loss functions are made of the stock one and its mask, see `gpt.forward_step_with`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.mcore import TokenLoss
from tests.host.steps import Counted


def without_mask(stock: Any, mask: Tensor) -> Any:
    return lambda output: stock(mask, output)


def with_another_name(stock: Any, mask: Tensor) -> Any:
    def own_loss(tokens: Tensor, output: Tensor) -> Any:
        return stock(tokens, output)

    return functools.partial(own_loss, mask)


class HoldsMask:
    """A loss function of the user's that is no partial."""

    def __init__(self, stock: Any, mask: Tensor) -> None:
        self.stock, self.loss_mask = stock, mask

    def __call__(self, output: Tensor) -> Any:
        return self.stock(self.loss_mask, output)


def with_a_term(stock: Any, mask: Tensor) -> Any:
    def loss_and_term(loss_mask: Tensor, output: Tensor) -> Any:
        loss, num_tokens, report = stock(loss_mask, output)
        return loss + 0.1 * output.square().sum(), num_tokens, report

    return functools.partial(loss_and_term, mask)


def with_a_changed_mask(stock: Any, mask: Tensor) -> Any:
    """Each sample's mask becomes another one's."""
    return functools.partial(stock, mask.roll(1, dims=0))


def with_first_token(value: float, stock: Any, mask: Tensor) -> Any:
    return functools.partial(stock, mask.masked_fill(mask.cumsum(dim=-1) == 1, value))


def with_every_token(stock: Any, mask: Tensor) -> Any:
    return functools.partial(stock, torch.ones_like(mask))


def with_part_of_the_losses(stock: Any, mask: Tensor) -> Any:

    return TokenLoss(lambda output: (output[:, 1:], {}), mask)


def with_detached_losses(stock: Any, mask: Tensor) -> Any:
    return TokenLoss(lambda output: (output.detach(), {}), mask)


def with_part_of_the_mask(stock: Any, mask: Tensor) -> Any:
    return functools.partial(stock, mask[..., 1:])  # at which it fails by itself


def mean_and_no_count(stock: Any, mask: Tensor) -> Any:
    """A 2-tuple with the mean, as legacy loss functions return it."""

    def mean(loss_mask: Tensor, output: Tensor) -> Any:
        loss, _, report = stock(loss_mask, output)
        return loss / loss_mask.sum().clamp(min=1), report

    return functools.partial(mean, mask)


def transposed(iterator: Any, model: Any) -> Any:
    """As of a model whose output is [seq, samples]."""
    from tests.host import gpt

    losses, loss_func = gpt.forward_step(iterator, model)
    (mask,) = loss_func.args
    return losses.T, functools.partial(loss_func.func, mask.T.contiguous())


def packed_call(iterator: Any, model: Any, by_position: bool = False, **options: Any) -> Any:
    """Calls the model with packed sequences, whatever the batch says."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from tests.host import gpt

    batch = next(iterator)
    tokens, mask = batch["tokens"].view(1, -1), batch["loss_mask"]
    length = tokens.shape[1]
    starts = torch.tensor([0, length], dtype=torch.int32)
    packed = PackedSeqParams("thd", starts, starts, starts, starts, length, length, **options)
    given = [tokens, torch.arange(length).unsqueeze(0), None]
    if by_position:
        logits = model(*given, None, None, None, packed)
    else:
        logits = model(*given, packed_seq_params=packed)
    losses = logits.logsumexp(-1).view_as(mask)  # of the right shape, and no more is needed
    return losses, functools.partial(gpt.stock_loss_func, mask)


def edits_its_mask(iterator: Any, model: Any) -> Any:
    """Shifts the mask of the batch in place before it is used."""
    from tests.host import gpt

    batch = next(iterator)
    batch["loss_mask"].copy_(batch["loss_mask"].roll(1, dims=-1))
    batch["loss_mask"][..., 0] = 0
    return gpt.forward_step(iter([batch]), model)


def draws_twice(iterator: Any, model: Any) -> Any:
    """Takes two batches for a microbatch, and uses the second."""
    from tests.host import gpt

    next(iterator)
    return gpt.forward_step(iterator, model)


def past_the_model(iterator: Any, model: Any) -> Any:
    """Computes losses with the model's layers, and without the model's own call."""
    from tests.host import gpt

    mask = next(iterator)["loss_mask"]
    weight = next(model.parameters())
    return weight.sum() + torch.zeros_like(mask), functools.partial(gpt.stock_loss_func, mask)


def other_number(more: int, **kwargs: Any) -> Any:
    """Megatron's schedule, for more microbatches than it is told."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    number = kwargs.pop("num_microbatches") + more
    return get_forward_backward_func()(**kwargs, num_microbatches=number)


def masks_with(value: float, rank: int) -> Any:
    """A data iterator whose first mask is fractional, and whose second one has ``value``."""
    data = Counted(rank)
    fraction, batch = next(data), next(data)
    for x, number in ((fraction, 0.5), (batch, value)):
        x["loss_mask"] = x["loss_mask"].masked_fill(x["loss_mask"].cumsum(dim=-1) == 1, number)
    return iter([fraction, batch])


def with_labels(data_iterator: Any, model: Any) -> Any:
    """As in Megatron's scripts, the model computes the losses: its own, and those of MTP."""
    from tests.host import gpt

    tokens, labels, mask, packed = gpt.local_batch(data_iterator)
    arguments = {"labels": labels, "loss_mask": mask, "packed_seq_params": packed}
    losses = model(tokens, gpt.positions_like(tokens), None, **arguments)
    return losses, functools.partial(gpt.stock_loss_func, mask)
