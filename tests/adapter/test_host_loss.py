"""How the mask is found in whatever a forward step returns."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.errors import HostError, MaskError
from megatron_loss_agg.mcore.extensions.masked_sum import fits_masked_sum
from megatron_loss_agg.mcore.token_loss import TokenLoss, token_losses, token_masks

MASK = torch.tensor([1.0, 0.0, 1.0])
LOSSES = torch.tensor([1.0, 2.0, 3.0])


def read(loss_func: Any, output: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Losses, mask, and what a stock loss function returned."""
    masks = token_masks(loss_func, ["loss"])
    losses, _, returned = token_losses(loss_func, output, masks)
    return losses["loss"], masks["loss"], returned


def is_masked_sum(losses: Tensor, mask: Tensor, returned: Any) -> bool:
    """Or mean, of a function that returns no number of tokens."""
    loss, *others = returned
    return bool(fits_masked_sum(loss, losses, mask, may_be_mean=len(others) == 1))


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
    "second": functools.partial(second, 1.0, MASK),
    "keyword": functools.partial(keyword, loss_mask=MASK),
    "position": functools.partial(by_position, MASK, loss_mask=1 - MASK),
    "wrapped": functools.partial(wrapped, MASK),
    "method": functools.partial(Script().method, MASK),
    "object": functools.partial(Script(), MASK),
}


@pytest.mark.parametrize("how", BOUND)
def test_the_bound_mask_is_found(how: str) -> None:
    losses, mask, returned = read(BOUND[how], LOSSES)
    assert mask.data_ptr() == MASK.data_ptr()
    assert losses.tolist() == LOSSES.tolist()
    if how != "position":  # which computes nothing
        assert is_masked_sum(losses, mask, returned)


def test_masks_lose_their_gradients_and_stay_shared():
    mask = torch.ones(3, requires_grad=True)
    losses = {"a": LOSSES, "b": LOSSES}
    for given in (mask, {"a": mask, "b": mask}):
        masks = token_masks(TokenLoss(lambda output: (losses, {}), given), ["a", "b"])
        assert masks["a"] is masks["b"]
        assert not masks["a"].requires_grad


@pytest.mark.parametrize(
    "function", [lambda x, output_tensor: x, torch.add], ids=["own", "torch's"]
)
def test_a_partial_without_a_mask_is_refused(function: Any) -> None:
    with pytest.raises(HostError, match="has no mask"):
        read(functools.partial(function, MASK), LOSSES)


def mean(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
    loss, report = plain(loss_mask, output_tensor)
    return loss / loss_mask.sum(), report


def counted(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    loss, report = plain(loss_mask, output_tensor)
    return loss, loss_mask.sum().int(), report


@pytest.mark.parametrize("function", [plain, mean, counted])
def test_losses_that_cancel_are_a_masked_sum(function: Any) -> None:
    # As of advantages that are centred in their group: the sum itself is nothing but rounding.
    mask = torch.ones(1, 4096)
    for seed in range(20):
        losses = torch.randn(1, 4096, generator=torch.Generator().manual_seed(seed))
        losses -= losses.mean()
        assert is_masked_sum(*read(functools.partial(function, mask), losses))


def test_a_mean_over_less_than_a_token_is_a_masked_mean():
    assert is_masked_sum(*read(functools.partial(mean, 0.25 * MASK), LOSSES))


@pytest.mark.parametrize("repeats", [1, 1024])
@pytest.mark.parametrize("function", [plain, mean, counted])
def test_a_term_beside_losses_that_cancel_is_none(function: Any, repeats: int) -> None:
    def with_a_term(loss_mask: Tensor, output_tensor: Tensor) -> Any:
        loss, *rest = function(loss_mask, output_tensor)
        # A hundredth of what the sizes of the losses add up to, or of their mean.
        absolute, *_ = function(loss_mask, output_tensor.abs())
        return (loss + 0.01 * absolute, *rest)

    losses = torch.tensor([1.0, -1.0, 2.0, -2.0]).repeat(repeats)
    mask = torch.ones_like(losses)
    assert not is_masked_sum(*read(functools.partial(with_a_term, mask), losses))


def test_a_function_that_leaves_infinite_losses_out_returns_none() -> None:
    def finite(loss_mask: Tensor, output_tensor: Tensor) -> Any:
        return plain(loss_mask, output_tensor.nan_to_num(posinf=0.0))

    losses = torch.tensor([1.0, torch.inf, 2.0])
    assert not is_masked_sum(*read(functools.partial(finite, torch.ones(3)), losses))


def total_of(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Without a hook."""
    return TokenLoss(lambda x: (x, {"own": 1}), mask)(losses)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.int32])
def test_without_a_hook_a_mask_of_any_dtype_counts(dtype: torch.dtype) -> None:
    # fp16 ends at 65504, and bf16 counts to 256 one by one.
    total, number, _ = total_of(torch.full((1, 70001), 0.5), torch.ones(1, 70001).to(dtype))
    assert (total.item(), number.item(), number.dtype) == (35000.5, 70001, torch.int)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_without_a_hook_losses_add_up_in_fp32_or_better(dtype: torch.dtype) -> None:
    losses = torch.full((1, 140002), 0.5, dtype=dtype, requires_grad=True)
    total, _, _ = total_of(losses, torch.ones(1, 140002))
    assert (total.item(), total.dtype) == (70001.0, torch.promote_types(dtype, torch.float32))
    total.backward()
    assert losses.grad is not None and bool((losses.grad == 1).all())


def test_without_a_hook_one_may_be_flat_but_not_transposed() -> None:
    for shape, of_losses in (((1, 3), (3,)), ((3,), (1, 3)), ((3, 1), (1, 3))):
        assert total_of(LOSSES.reshape(of_losses), MASK.reshape(shape))[:2] == (4.0, 2)
    with pytest.raises(MaskError, match="expected one loss per token"):
        total_of(torch.ones(3, 2), torch.ones(2, 3))


def test_without_a_hook_it_is_a_stock_loss_function() -> None:
    # 1 + 3 over the mask, whose 2 tokens Megatron counts in int32; what is masked may be NaN.
    total, number, report = total_of(torch.tensor([1.0, torch.nan, 3.0]), MASK)
    assert (total.item(), number.item(), number.dtype, report) == (4.0, 2, torch.int, {"own": 1})


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (torch.tensor(1.0), "a torch.float32 tensor of shape ()"),
        (torch.ones(2, 3), "a torch.float32 tensor of shape (2, 3)"),
        ((torch.tensor(1.0),), "1 results"),
        ((LOSSES, MASK, MASK, {}), "4 results"),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_another_number_of_results_is_refused(returned: Any, got: str, own: bool) -> None:
    def stock(loss_mask: Tensor, output: Tensor) -> Any:
        return returned

    loss_func = TokenLoss(lambda _: returned, MASK) if own else functools.partial(stock, MASK)
    wanted = "(losses, report)" if own else "(loss, report) or (loss, number of tokens, report)"
    with pytest.raises(HostError, match=re.escape(f"returned {got}; expected {wanted}")):
        read(loss_func, LOSSES)
