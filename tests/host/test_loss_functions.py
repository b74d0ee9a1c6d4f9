"""What scripts return as loss functions: what the hook takes, and what it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import Loop, TokenLoss
from tests.host import gpt
from tests.host.cases import Case, Expected, assert_exact, by_the_oracle, run
from tests.host.harness import TOPOLOGIES
from tests.host.refusals import Row, assert_told, hook_of
from tests.host.steps import batches


# Loss functions: a masked sum of the model's output, or its mean, in the forms of scripts.
def plain(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return (loss_mask * output).sum(), {}


def mean(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return (loss_mask * output).sum() / loss_mask.sum(), {}


def counted(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return (loss_mask * output).sum(), loss_mask.sum().int(), {}


def second(scale: float, loss_mask: Tensor, output: Tensor) -> Any:
    return plain(loss_mask, scale * output)


def keyword(output: Tensor, *, loss_mask: Tensor) -> Any:
    return plain(loss_mask, output)


def by_position(loss_mask: Tensor, output: Tensor | None = None, /, **extra: Any) -> Any:
    assert output is not None
    return plain(loss_mask, output)


@functools.wraps(plain)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    return plain(*args, **kwargs)


class Script:
    def method(self, loss_mask: Tensor, output: Tensor) -> Any:
        return plain(loss_mask, output)

    __call__ = method


def with_a_term(function: Any, loss_mask: Tensor, output: Tensor) -> Any:
    """Of a hundredth of what the sizes of the losses add up to, or of their mean."""
    loss, *rest = function(loss_mask, output)
    absolute, *_ = function(loss_mask, output.abs())
    return (loss + 0.01 * absolute, *rest)


def finite(loss_mask: Tensor, output: Tensor) -> Any:
    return plain(loss_mask, output.nan_to_num(posinf=0.0))


def of_first(loss_mask: Tensor, output: tuple[Tensor, Tensor]) -> Any:
    return plain(loss_mask, output[0])


def returning(x: Any) -> Any:
    def loss_func(loss_mask: Tensor, output: Tensor) -> Any:
        return x

    return loss_func


# What becomes of the losses before.
def centred(losses: Tensor, mask: Tensor) -> Tensor:
    """As of advantages that are centred in their group: the sum is nothing but rounding."""
    return losses - (losses.detach() * mask).sum() / mask.sum()


def infinite_at_first(losses: Tensor, mask: Tensor) -> Tensor:
    return losses.masked_fill(mask.flatten().cumsum(0).view_as(mask) == 1, torch.inf)


class Form(NamedTuple):
    """What a forward step returns, and what is said of it."""

    make: Callable[[Tensor], Any]  # mask -> loss function
    says: str = ""
    change: Callable[[Tensor, Tensor], Any] = lambda losses, mask: losses
    samples: tuple[int, ...] = (2, 3)
    masks: str = "01"


def bound(function: Any, *arguments: Any) -> Callable[[Tensor], Any]:
    """In the form of Megatron's scripts."""
    return lambda mask: functools.partial(function, *arguments, mask)


ALL = tuple(range(10))  # samples: of enough tokens for a rounding error
NO_SUM = "HostError: the loss function returned ... expected a masked sum"
STOCK_FORM = "(loss, report) or (loss, number of tokens, report)"
RESULTS = {
    "a torch.float64 tensor of shape ()": torch.tensor(1.0, dtype=torch.float64),
    "a torch.float32 tensor of shape (2, 3)": torch.ones(2, 3),
    "1 results": (torch.tensor(1.0),),
    "4 results": (torch.ones(3), torch.ones(3), torch.ones(3), {}),
}
FORMS: dict[str, Form] = {
    "first argument": Form(bound(plain)),
    "second argument": Form(bound(second, 1.0)),
    "keyword": Form(lambda mask: functools.partial(keyword, loss_mask=mask)),
    "position": Form(lambda mask: functools.partial(by_position, mask, loss_mask=1 - mask)),
    "wrapped": Form(bound(wrapped)),
    "method": Form(bound(Script().method)),
    "object": Form(bound(Script())),
    "mask with a gradient": Form(lambda mask: bound(plain)(mask.requires_grad_())),
    "function of torch": Form(bound(torch.add), "HostError: has no mask"),
    "mean over less than a token": Form(bound(mean), samples=(3,), masks="fractional"),
    "infinite losses left out": Form(bound(finite), NO_SUM, infinite_at_first),
    # As of a model with a second output for another loss.
    "two outputs": Form(
        bound(of_first),
        "MaskError: losses are a tuple for a loss mask of ... return a TokenLoss",
        lambda losses, mask: (losses, losses),
    ),
    **{
        f"{function.__name__}, losses that cancel": Form(bound(function), "", centred, ALL)
        for function in (plain, mean, counted)
    },
    **{
        f"{function.__name__}, a term beside losses that cancel": Form(
            bound(with_a_term, function), NO_SUM, centred, ALL
        )
        for function in (plain, mean, counted)
    },
    **{
        f"{got}, stock": Form(
            bound(returning(x)), f"HostError: returned {got}; expected {STOCK_FORM}"
        )
        for got, x in RESULTS.items()
    },
    **{
        f"{got}, of a TokenLoss": Form(
            functools.partial(TokenLoss, lambda _, x=x: x),
            f"HostError: returned {got}; expected (losses, report)",
        )
        for got, x in RESULTS.items()
    },
}


def in_form(name: str, iterator: Any, model: Any) -> Any:
    """A forward step."""
    losses, loss_func = gpt.forward_step(iterator, model)
    (mask,) = loss_func.args
    form = (FORMS | MASKS)[name]
    return form.change(losses, mask), form.make(mask)


def test_a_masked_sum_or_mean_in_any_form_is_exact() -> None:
    one = {"layout": "bshd", "dtype": torch.float32}
    cases = [
        Case(
            "sum", masks=x.masks, places=((x.samples,),), step=functools.partial(in_form, n), **one
        )
        for n, x in FORMS.items()
        if not x.says
    ]
    for case, (found,) in run(TOPOLOGIES["dp1"], cases).items():
        assert found.error <= 1e-6, case.step


# Other forms of the stock mask and losses; all mean the same. Of 529 active tokens: bf16 counts to
# 256 one by one, uint8 to 255.
MANY = (0, 8, 4) * 11 + (3,)
DTYPES = (torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64, torch.float32)
MASKS: dict[str, Form] = {
    **{
        name: Form(lambda mask, change=change: functools.partial(gpt.stock_loss_func, change(mask)))
        for name, change in {
            "flat mask": Tensor.flatten,
            "transposed in memory": lambda mask: mask.t().contiguous().t(),
            **{f"{x}": lambda mask, x=x: mask.to(x) for x in DTYPES},
        }.items()
    },
    **{
        f"{x} where the mask is 0": Form(
            lambda mask: functools.partial(gpt.stock_loss_func, mask),
            change=lambda losses, mask, x=x: losses + torch.where(mask == 0, x, 0.0),
        )
        for x in (torch.nan, torch.inf)
    },
    # In another shape than the mask, and without a reduction.
    "flat losses": Form(lambda mask: TokenLoss(lambda output: (output.flatten(), {}), mask)),
}


@pytest.mark.parametrize(
    "mode, per_token", [("prompt_mean", False), ("prompt_mean", True), ("token_mean", True)]
)
def test_a_mask_of_any_dtype_and_masked_nan_or_infinity_change_nothing(
    mode: str, per_token: bool
) -> None:
    way = {"layout": "bshd", "places": ((MANY,),), "hook": {"loop": Loop(of_megatron=True)}}
    cases = {
        Case(
            mode, per_token=per_token, step=functools.partial(in_form, name), times=times, **way
        ): name
        for name, times in product(MASKS, (1, 2))
    }

    def expected(case: Case) -> Expected:
        gradient, reports = by_the_oracle(case)
        if cases[case] == "flat losses":  # which reports nothing by itself
            del reports["lm loss"]
        return gradient, reports

    assert_exact(TOPOLOGIES["dp1"], [*cases], expected)


ROWS = {
    name: Row(
        form.says,
        topology="dp1",
        hook=hook_of("sum"),
        data=lambda rank, form=form: batches((form.samples,), "bshd", form.masks),
        number=1,
        step=functools.partial(in_form, name),
        dtype=torch.float32,
    )
    for name, form in FORMS.items()
    if form.says
}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_no_masked_sum_is_refused(name: str) -> None:
    assert_told(__name__, name)
