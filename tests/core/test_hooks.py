"""Hooks and token losses without a host: what they are, and which options are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import AggregationError, LossAggregation
from megatron_loss_agg.mcore import Audit, LossHook, TokenLoss

# Without a hook, a `TokenLoss` is a stock loss function: losses, mask, and their sum and count.
HALF, LOSSES, MASK = torch.tensor(0.5), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0, 1])
TOTALS: dict[str, tuple[Tensor, Tensor, float, int]] = {
    # fp16 ends at 65504, and bf16 counts to 256 one by one.
    **{
        f"mask of {dtype}": (HALF.expand(70001), torch.ones(70001).to(dtype), 35000.5, 70001)
        for dtype in (torch.float16, torch.bfloat16, torch.bool, torch.int32)
    },
    **{
        f"losses of {dtype}": (HALF.expand(140002).to(dtype), torch.ones(140002), 70001, 140002)
        for dtype in (torch.float16, torch.bfloat16, torch.float64)
    },
    "flat losses": (LOSSES, MASK.view(1, 3), 4, 2),
    "flat mask": (LOSSES.view(1, 3), MASK, 4, 2),
    "a column": (LOSSES.view(1, 3), MASK.view(3, 1), 4, 2),
    "NaN where the mask is 0": (torch.tensor([1.0, torch.nan, 3.0]), MASK, 4, 2),
}


@pytest.mark.parametrize("name", TOTALS)
def test_without_a_hook_a_token_loss_sums_over_the_mask(name: str) -> None:
    losses, mask, *expected = TOTALS[name]
    losses = losses.clone().requires_grad_()
    total, number, report = TokenLoss(lambda x: (x, {"own": 1}), mask)(losses)
    assert [total.item(), number.item()] == expected
    assert number.dtype == torch.int  # Megatron's counter
    assert (total.dtype, report) == (torch.promote_types(losses.dtype, torch.float32), {"own": 1})
    total.backward()
    assert torch.equal(losses.grad.flatten(), (mask.flatten() != 0).to(losses))


def of_two_rows(losses: Tensor, **options: Any) -> Any:
    """A `TokenLoss` that is called without a hook."""
    return TokenLoss(lambda x: (x, {}), torch.ones(2, 3), **options)(losses)


SUM = LossAggregation(mode="sum")
OPTIONS: list[tuple[Callable[[], Any], str]] = [
    (lambda: LossHook(SUM, empty_step="ignore"), "^empty_step='ignore'; expected one of step, err"),
    (lambda: LossHook({"lm": SUM}), "expected different names .* no term 'lm'"),
    *(
        (
            lambda total=total: LossHook({"kl": SUM, "policy": SUM}, total=total),
            "^reports named .*; expected different names",
        )
        for total in ("lm loss", "kl loss", None)
    ),
    (lambda: LossHook(SUM, extensions=[Audit]), "^<class .* among extensions; expected objects"),
    (lambda: LossHook(SUM, extensions=["audit"]), "^'audit' among extensions; expected objects"),
    (
        lambda: LossHook(SUM, extensions=[Audit(), type("OwnAudit", (Audit,), {})()]),
        "^several extensions have the settings",
    ),
    (lambda: of_two_rows(torch.ones(2, 3), whole="yes"), "^whole='yes'; .* or 'reduced_grad'$"),
    (lambda: of_two_rows(torch.ones(2, 3), whole="local_grad"), "was called without a hook"),
    (lambda: of_two_rows(torch.ones(2, 3), takes_weights=True), "was called without a hook"),
    (lambda: of_two_rows(torch.ones(3, 2)), "expected one loss per token"),  # transposed
]


@pytest.mark.parametrize("make, text", OPTIONS)
def test_wrong_options_are_refused_before_any_step(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(AggregationError, match=text):
        make()


def test_a_loss_is_named_by_its_preset() -> None:
    assert [*LossHook(LossAggregation.preset("verl/token-mean")).terms] == ["verl/token-mean"]
    assert [*LossHook(LossAggregation(mode="token_mean")).terms] == ["token_mean"]
