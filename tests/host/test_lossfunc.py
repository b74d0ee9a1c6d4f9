"""How the mask is found in whatever a forward step returns; no host is needed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.lossfunc import token_losses

MASK = torch.tensor([1.0, 0.0, 1.0])
LOSSES = torch.tensor([1.0, 2.0, 3.0])


def plain(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return (loss_mask * output_tensor).sum(), {}


def second(scale: float, loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return plain(loss_mask, scale * output_tensor)


def keyword(output_tensor: Tensor, *, loss_mask: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return plain(loss_mask, output_tensor)


def by_position(loss_mask: Tensor, output_tensor: Tensor | None = None, /, **extra: Any) -> Any:
    return torch.zeros(()), {}


@functools.wraps(plain)
def wrapped(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
    return plain(*args, **kwargs)


class Script:
    def method(self, loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return plain(loss_mask, output_tensor)

    def __call__(self, loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return plain(loss_mask, output_tensor)


BOUND = {
    "first": functools.partial(plain, MASK),
    "second": functools.partial(second, 2.0, MASK),
    "keyword": functools.partial(keyword, loss_mask=MASK),
    "position": functools.partial(by_position, MASK, loss_mask=1 - MASK),
    "wrapped": functools.partial(wrapped, MASK),
    "method": functools.partial(Script().method, MASK),
    "object": functools.partial(Script(), MASK),
}


@pytest.mark.parametrize("how", BOUND)
def test_the_bound_mask_is_found(how: str) -> None:
    tokens = token_losses(BOUND[how], LOSSES, ["loss"])
    assert tokens.masks["loss"] is MASK
    assert tokens.losses["loss"].tolist() == LOSSES.tolist()


@pytest.mark.parametrize(
    "function", [lambda x, output_tensor: x, torch.add], ids=["own", "torch's"]
)
def test_a_partial_without_a_mask_is_refused(function: Any) -> None:
    with pytest.raises(HostError, match="carries no mask"):
        token_losses(functools.partial(function, MASK), LOSSES, ["loss"])
