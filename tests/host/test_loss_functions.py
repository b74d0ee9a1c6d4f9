"""What scripts return as loss functions: what the hook takes, what it refuses, what each may be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import AggregationError, LossAggregation
from megatron_loss_agg.errors import MaskError
from megatron_loss_agg.mcore import Audit, LossHook, TokenLoss
from tests.host.harness import error_of, run_host_ranks
from tests.host.reference import relative_error
from tests.host.steps import aggregation, batches

pytestmark = pytest.mark.host


def plain(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return (loss_mask * output).sum(), {}


def mean(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return (loss_mask * output).sum() / loss_mask.sum(), {}


def counted(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return (loss_mask * output).sum(), loss_mask.sum().int(), {}


SUMS = {function.__name__: function for function in (plain, mean, counted)}


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

    def __call__(self, loss_mask: Tensor, output: Tensor) -> Any:
        return plain(loss_mask, output)


def centred(losses: Tensor, mask: Tensor) -> Tensor:
    """As of advantages that are centred in their group: the sum is nothing but rounding."""
    return losses - (losses.detach() * mask).sum() / mask.sum()


def with_a_term(function: Any, loss_mask: Tensor, output: Tensor) -> Any:
    """Of a hundredth of what the sizes of the losses add up to, or of their mean."""
    loss, *rest = function(loss_mask, output)
    absolute, *_ = function(loss_mask, output.abs())
    return (loss + 0.01 * absolute, *rest)


def infinite_at_first(losses: Tensor, mask: Tensor) -> Tensor:
    return losses.masked_fill(mask.flatten().cumsum(0).view_as(mask) == 1, torch.inf)


def finite(loss_mask: Tensor, output: Tensor) -> Any:
    return plain(loss_mask, output.nan_to_num(posinf=0.0))


def of_first(loss_mask: Tensor, output: tuple[Tensor, Tensor]) -> Any:
    return plain(loss_mask, output[0])


Make = Callable[[Tensor], Any]
"""The loss function of a mask."""
Change = Callable[[Tensor, Tensor], Any]
"""What becomes of losses and mask before."""


def bound(function: Any, *arguments: Any) -> Make:
    """In the form of Megatron's scripts."""
    return lambda mask: functools.partial(function, *arguments, mask)


def returning(x: Any) -> Any:
    def loss_func(loss_mask: Tensor, output: Tensor) -> Any:
        return x

    return loss_func


ALL = tuple(range(10))  # samples: of enough tokens for a rounding error
NO_SUM = "HostError: the loss function returned| expected a masked sum"
STOCK_FORM = "(loss, report) or (loss, number of tokens, report)"
RESULTS = {
    "a torch.float64 tensor of shape ()": torch.tensor(1.0, dtype=torch.float64),
    "a torch.float32 tensor of shape (2, 3)": torch.ones(2, 3),
    "1 results": (torch.tensor(1.0),),
    "4 results": (torch.ones(3), torch.ones(3), torch.ones(3), {}),
}


@dataclass(frozen=True)
class Case:
    """A step, and what is said of it: how the error starts, and parts of its text."""

    make: Make
    error: str | None = None
    change: Change | None = None
    samples: tuple[int, ...] = (2, 3)
    masks: str = "01"


CASES: dict[str, Case] = {
    "first argument": Case(bound(plain)),
    "second argument": Case(bound(second, 1.0)),
    "keyword": Case(lambda mask: functools.partial(keyword, loss_mask=mask)),
    "position": Case(lambda mask: functools.partial(by_position, mask, loss_mask=1 - mask)),
    "wrapped": Case(bound(wrapped)),
    "method": Case(bound(Script().method)),
    "object": Case(bound(Script())),
    "mask with a gradient": Case(lambda mask: bound(plain)(mask.requires_grad_())),
    "function of torch": Case(bound(torch.add), "HostError: |has no mask"),
    "mean over less than a token": Case(bound(mean), samples=(3,), masks="fractional"),
    "infinite losses left out": Case(bound(finite), NO_SUM, infinite_at_first),
    # As of a model with a second output for another loss.
    "two outputs": Case(
        bound(of_first),
        "MaskError: losses are a tuple for a loss mask of |return a TokenLoss",
        lambda losses, mask: (losses, losses),
    ),
}
for name, function in SUMS.items():
    CASES[f"{name}, losses that cancel"] = Case(bound(function), None, centred, ALL)
    beside = bound(with_a_term, function)
    CASES[f"{name}, a term beside losses that cancel"] = Case(beside, NO_SUM, centred, ALL)
for got, x in RESULTS.items():
    said = f"HostError: |returned {got}; expected "
    CASES[f"{got}, stock"] = Case(bound(returning(x)), said + STOCK_FORM)
    own = functools.partial(TokenLoss, lambda _, x=x: x)
    CASES[f"{got}, of a TokenLoss"] = Case(own, said + "(losses, report)")


def steps_on_host() -> dict[str, tuple[str | None, float]]:
    """One rank: how a step in fp32 ends, and the error of its gradient beside a stock one's."""
    from tests.host import gpt, gradients

    gpt.initialize()
    model = gpt.ddp_model(dtype=torch.float32)

    def step(case: Case) -> Any:
        def forward_step(iterator: Any, chunk: Any) -> Any:
            losses, loss_func = gpt.forward_step(iterator, chunk)
            (mask,) = loss_func.args
            return case.change(losses, mask) if case.change else losses, case.make(mask)

        hook, data = LossHook(aggregation("sum")), batches((case.samples,), "bshd", case.masks)
        error = error_of(gpt.run_step, hook, model, data, 1, forward_step_func=forward_step)
        return error, gradients.of(model)

    found = {}
    for name, case in CASES.items():
        error, got = step(case)
        _, stock = step(replace(case, make=bound(counted), change=None))
        found[name] = error, relative_error(got, stock)
    return found


@functools.cache
def found() -> dict[str, tuple[str | None, float]]:
    return run_host_ranks(steps_on_host, 1)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_loss_function_in_any_form_is_exact_or_refused(name: str) -> None:
    (error, difference), expected = found()[name], CASES[name].error
    if expected is None:
        assert (error, difference) == (None, pytest.approx(0, abs=1e-6))
        return
    start, *others = expected.split("|")
    assert error is not None and error.startswith(start)
    assert [text for text in others if text not in error] == []


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


# Options that are wrong before any step.
SUM = LossAggregation(mode="sum")


class OwnAudit(Audit):
    """One more of a check that every hook has."""


def called_without_a_hook(**options: Any) -> Any:
    return TokenLoss(lambda x: (x, {}), torch.ones(1), **options)(torch.ones(1))


OPTIONS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: LossHook(SUM, empty_step="ignore"),
        "^empty_step='ignore'; expected one of step, error, skip$",
    ),
    (lambda: LossHook({"lm": SUM}), "expected different names .* no term 'lm'"),
    *(
        (
            lambda total=total: LossHook({"kl": SUM, "policy": SUM}, total=total),
            "^reports named .*; expected different names",
        )
        for total in ("lm loss", "kl loss", None)
    ),
    *(
        (lambda given=given: LossHook(SUM, extensions=given), text)
        for given, text in (
            (
                [Audit],
                r"^<class 'megatron_loss_agg\..*\.Audit'> among extensions; expected objects",
            ),
            (["audit"], "^'audit' among extensions; expected objects"),
            ([Audit(), OwnAudit()], "^several extensions have the settings"),
        )
    ),
    (
        lambda: called_without_a_hook(whole="yes"),
        "^whole='yes'; .* 'local_grad' or 'reduced_grad'$",
    ),
    (lambda: called_without_a_hook(whole="local_grad"), "was called without a hook"),
    (lambda: called_without_a_hook(takes_weights=True), "was called without a hook"),
]


@pytest.mark.parametrize("make, text", OPTIONS)
def test_wrong_options_are_refused_before_any_step(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(AggregationError, match=text):
        make()


def test_without_a_hook_losses_may_not_be_transposed() -> None:
    with pytest.raises(MaskError, match="expected one loss per token"):
        TokenLoss(lambda x: (x, {}), torch.ones(2, 3))(torch.ones(3, 2))


def test_a_loss_is_named_by_its_preset() -> None:
    assert [*LossHook(LossAggregation.preset("verl/token-mean")).terms] == ["verl/token-mean"]
    assert [*LossHook(LossAggregation(mode="token_mean")).terms] == ["token_mean"]
