"""The results of forward steps: the hook takes them, or refuses them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.mcore import TokenLoss
from megatron_loss_agg.mcore.checks.loss_function import fits_masked_sum
from tests.host import gpt
from tests.host.cases import EVALUATION, Call, Case, Expected, assert_exact, by_the_oracle
from tests.host.harness import TOPOLOGIES, error_of
from tests.host.refusals import Refusal, assert_told, two_rows
from tests.host.scripts import Form, returning, stock, with_mask
from tests.host.steps import MODES, NO_TOKENS, PLACES


# Loss functions: a masked sum of the model's output, or its mean, in the forms of scripts.
def plain(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return (loss_mask * output).sum(), {}


def mean(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return (loss_mask * output).sum() / loss_mask.sum(), {}


def counted(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return (loss_mask * output).sum(), loss_mask.sum().int(), {}


def mean_beside_count(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return mean(loss_mask, output)[0], loss_mask.sum().int(), {}


def mean_over_ranks(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """This rank's part of the mean over the tokens of all context-parallel ranks."""
    tokens = loss_mask.sum()
    dist.all_reduce(tokens)
    return (loss_mask * output).sum() / tokens, {}


def second(scale: float, loss_mask: Tensor, output: Tensor) -> Any:
    return plain(loss_mask, scale * output)


def keyword(output: Tensor, *, loss_mask: Tensor) -> Any:
    return plain(loss_mask, output)


@functools.wraps(plain)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    return plain(*args, **kwargs)


def decorated(function: Any) -> Any:
    """All functions that it makes have the same code."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class Divided:
    """A loss function by its type, the same for every divisor."""

    def __init__(self, divisor: float) -> None:
        self.divisor = divisor

    def __call__(self, loss_mask: Tensor, output: Tensor) -> Any:
        loss, *others = gpt.stock_loss_func(loss_mask, output)
        return (loss / self.divisor, *others)


def with_a_term(function: Any, loss_mask: Tensor, output: Tensor) -> Any:
    """Of a hundredth of what the sizes of the losses add up to, or of their mean."""
    loss, *rest = function(loss_mask, output)
    absolute, *_ = function(loss_mask, output.abs())
    return (loss + 0.01 * absolute, *rest)


def finite(loss_mask: Tensor, output: Tensor) -> Any:
    return plain(loss_mask, output.nan_to_num(posinf=0.0))


def divided(loss_mask: Tensor, output: Tensor) -> Any:
    loss, *others = gpt.stock_loss_func(loss_mask, output)
    return (loss / 7, *others)


def in_place(loss_mask: Tensor, output: Tensor) -> Any:
    return plain(loss_mask, output.mul_(2))


def of_first(loss_mask: Tensor, output: tuple[Tensor, Tensor]) -> Any:
    return plain(loss_mask, output[0])


def another_name(tokens: Tensor, output: Tensor) -> Any:
    return plain(tokens, output)


def giving(x: Any, loss_mask: Tensor, output: Tensor) -> Any:
    return x


def bound(function: Any, *arguments: Any) -> Form:
    """In the form of Megatron's scripts."""
    return lambda losses, mask: (losses, partial(function, *arguments, mask))


def with_losses(change: Callable[[Tensor], Tensor]) -> Form:
    return lambda losses, mask: (losses, TokenLoss(change, mask))


def centred(form: Form) -> Form:
    """As of advantages that are centred in their group: the sum is nothing but rounding."""
    return lambda losses, mask: form(losses - (losses.detach() * mask).sum() / mask.sum(), mask)


def infinite_at_first(losses: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
    first = mask.flatten().cumsum(0).view_as(mask) == 1
    return losses.masked_fill(first, torch.inf), partial(finite, mask)


def transposed(losses: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
    """As of a model whose output is [seq, samples]."""
    return stock(losses.T, mask.T.contiguous())


def in_columns(losses: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
    """A mask whose memory is [seq, samples], beside flat losses."""
    return losses, TokenLoss(Tensor.flatten, mask.T.contiguous().T)


ALL = tuple(range(10))  # samples: of enough tokens for a rounding error
# Of 529 active tokens: bf16 counts to 256 one by one, uint8 to 255.
MANY = (0, 8, 4) * 11 + (3,)
DTYPES = (torch.bfloat16, torch.uint8, torch.bool, torch.int64)
# The stock loss function, and its mask or its losses where the mask is 0 in other forms.
OF_STOCK: dict[str, Form] = {
    "flat mask": with_mask(Tensor.flatten),
    **{f"mask of {x}": with_mask(lambda mask, x=x: mask.to(x)) for x in DTYPES},
    **{
        f"{x} where the mask is 0": lambda losses, mask, x=x: stock(
            losses + torch.where(mask == 0, x, 0.0), mask
        )
        for x in (torch.nan, torch.inf)
    },
}
# They report nothing by themselves.
FUNCTIONS: dict[str, Form] = {
    "second argument": bound(second, 1.0),
    "keyword": lambda losses, mask: (losses, partial(keyword, loss_mask=mask)),
    "wrapped": bound(wrapped),
    "flat losses": with_losses(Tensor.flatten),
    "a mask in columns": in_columns,
}
CANCELLING: dict[str, Form] = {
    f"{x.__name__} of losses that cancel": centred(bound(x)) for x in (plain, mean, counted)
}
FORMS = {**OF_STOCK, **FUNCTIONS, **CANCELLING, "mean": bound(mean), "stock": stock}
INFERRED = ("stock", "flat mask")


def in_form(name: str, iterator: Any, model: Any) -> Any:
    """A forward step of `FORMS`."""
    return returning(FORMS[name], iterator, model)


@pytest.mark.parametrize(
    "mode, per_token", [("prompt_mean", False), ("prompt_mean", True), ("token_mean", True)]
)
def test_a_masked_sum_or_mean_in_any_form_is_exact(mode: str, per_token: bool) -> None:
    way = {"layout": "bshd", "per_token": per_token, "hook": {"aggregate_evaluation": True}}
    cases = {
        Case(mode, step=partial(in_form, name), places=((MANY,),), times=times, **way): name
        for name, times in product(FORMS, (1, 2))
    }
    # Of less than a token.
    fraction = {"masks": "fractional", "places": (((3,),),)}
    cases[Case(mode, step=partial(in_form, "mean"), **fraction, **way)] = "mean"

    def expected(case: Case) -> Expected:
        gradient, reports = by_the_oracle(case)
        name = cases[case]
        if name not in {*OF_STOCK, "stock"}:
            del reports["lm loss"]
        return gradient, {} if name in CANCELLING else reports

    assert_exact(TOPOLOGIES["dp1"], [*cases], expected)


def test_rounding_of_losses_that_cancel_fits_and_shows_no_factor() -> None:
    for seed in range(20):
        x = torch.rand(2, 1200, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        mask = (x[0] < 0.5).double()
        losses = x[1] - (mask * x[1]).sum() / mask.sum()
        fits, shows, _ = fits_masked_sum((mask * losses).sum(), losses, mask, may_be_mean=False)
        assert fits and not shows


def in_inference_mode(hook: Any, model: Any, call: Call) -> Any:
    """An evaluation on tensors that count no writes."""
    with torch.inference_mode():
        return call(1, **EVALUATION)


def test_an_evaluation_in_inference_mode_is_exact() -> None:
    way = {"layout": "bshd", "places": ((ALL,),), "run": in_inference_mode, "call": EVALUATION}
    cases = [Case(mode, step=partial(in_form, x), **way) for mode in MODES for x in INFERRED]
    assert_exact(TOPOLOGIES["dp1"], cases)


def with_a_metric(losses: Tensor, mask: Tensor) -> Any:
    """Of a name that stock loss functions report."""
    return losses, TokenLoss(lambda x: (x, {"lm loss": torch.tensor([3.0, 4.0])}), mask)


def test_a_token_loss_may_report_an_lm_loss_of_its_own() -> None:
    case = Case(step=partial(returning, with_a_metric))

    def expected(case: Case) -> Expected:
        gradient, reports = by_the_oracle(case)
        return gradient, {**reports, "lm loss": 3 / 4}

    assert_exact(TOPOLOGIES["dp2"], [case], expected)


CHANGED = (
    "DataError: the loss function's mask must be this rank's part ... LossHook(read_batch=...)"
)
NO_SUM = (
    "HostError: a loss function must return the masked sum of ... got ... where this rank's masked sum "
    "is ... such as the context-parallel size, and divisions, or return a TokenLoss"
)
NO_MASK = "HostError: a forward step must return functools.partial(loss_func, loss_mask)"


def refused(says: str, form: Form, samples: tuple[int, ...] = (2, 3)) -> Refusal:
    """On one rank."""
    case = Case("sum", layout="bshd", places=((samples,),), step=partial(returning, form))
    return Refusal(says, case, "dp1")


DIVIDED = two_rows(step=partial(returning, bound(divided)))
# They verify nothing.
EMPTY_STEP = replace(DIVIDED, places=NO_TOKENS)
LOSSES_OF_0 = two_rows(
    step=partial(returning, lambda losses, mask: bound(divided)(0 * losses, mask))
)


def caught_once(hook: Any, model: Any, call: Call) -> None:
    """A loop that goes on after an error."""
    assert error_of(call, 2) is not None
    call(2)


FUNCTIONS_REFUSED = {
    "no mask": refused(
        f"{NO_MASK} ... or a TokenLoss, got ",
        lambda losses, mask: (losses, lambda x: plain(mask, x)),
    ),
    "a mask of another name": refused(
        f"{NO_MASK} ... a parameter named loss_mask ... got partial(another_name)",
        bound(another_name),
    ),
    "function of torch": refused(NO_MASK, bound(torch.add)),
    "infinite losses left out": refused(NO_SUM, infinite_at_first),
    **{
        f"{x.__name__}, and a term beside losses that cancel": refused(
            NO_SUM, centred(bound(with_a_term, x)), ALL
        )
        for x in (plain, mean, counted)
    },
    "a mean beside a token count": refused(NO_SUM, bound(mean_beside_count)),
    "factors of its own on context-parallel ranks": Refusal(
        NO_SUM, replace(DIVIDED, places=PLACES[1]), "cp2"
    ),
    "a mean over context-parallel ranks": Refusal(
        case=two_rows(step=partial(returning, bound(mean_over_ranks)), places=PLACES[1]),
        topology="cp2",
    ),
    "a factor near 1": refused(NO_SUM, bound(Divided(1.01))),
    "factors of its own after an empty step": Refusal(NO_SUM, replace(DIVIDED, after=EMPTY_STEP)),
    "factors of its own after losses of 0": Refusal(NO_SUM, replace(DIVIDED, after=LOSSES_OF_0)),
    **{
        f"factors of its own after {name}": Refusal(
            NO_SUM,
            two_rows(
                step=partial(returning, bound(second)),
                after=two_rows(step=partial(returning, bound(first))),
            ),
        )
        for name, first, second in (
            ("a function with one decorator", decorated(counted), decorated(divided)),
            ("an object of one type", Divided(1.0), Divided(7.0)),
        )
    },
    "losses changed in place": refused(
        "HostError: a loss function must not write into the model's losses ... partial(in_place) does",
        bound(in_place),
    ),
    "factors of its own, refused before": Refusal(
        NO_SUM, replace(DIVIDED, iterator=itertools.cycle, run=caught_once)
    ),
    "losses that are not summed": refused(
        "HostError: a loss function must return the masked sum ... got ... tensor of shape (3,)",
        bound(giving, (torch.ones(3), torch.tensor(1), {})),
    ),
    **{
        f"{got}, stock": refused(
            f"HostError: a loss function must return (loss, report) or (loss, number of ... got {got}",
            bound(giving, x),
        )
        for got, x in {
            "a torch.float32 tensor of shape ()": torch.tensor(1.0, dtype=torch.float32),
            "1 results": (torch.tensor(1.0),),
        }.items()
    },
    "4 results, of a TokenLoss": refused(
        "HostError: compute must return losses or (losses, report), got 4 results",
        lambda losses, mask: (losses, TokenLoss(lambda x: (x, x, x, {}), mask)),
    ),
    # As of a model with a second output for another loss.
    "two outputs": refused(
        "DataError: losses of the model's output must have one value ... got a tuple ... TokenLoss",
        lambda losses, mask: ((losses, losses), partial(of_first, mask)),
    ),
    "losses [seq, samples]": refused(
        "DataError: the loss function's mask must have the shape of this rank's part ... not transposed",
        transposed,
    ),
    "a part of the losses": refused(
        "DataError: losses of a TokenLoss must have one value for each element of the loss mask",
        with_losses(lambda x: x[:, 1:]),
    ),
    "a part of losses and mask": refused(
        "DataError: the loss function's mask must have the shape of this ... a batch that is whole",
        lambda losses, mask: stock(losses[..., 1:], mask[..., 1:]),
    ),
    "detached losses": refused(
        "HostError: losses of a training step must have a gradient, but these were detached",
        with_losses(Tensor.detach),
    ),
}


def of_first_token(value: float) -> Callable[[Tensor], Tensor]:
    """Each row's first active token has another mask."""
    return lambda mask: mask.masked_fill(mask.cumsum(dim=-1) == 1, value)


def changed(change: Any, says: str = CHANGED, case: Any = two_rows, **options: Any) -> Refusal:
    return Refusal(says, case(step=partial(returning, with_mask(change)), **options))


def opposite(samples: Any) -> Tensor:
    """One sample of a microbatch against the other: their weights cancel but for rounding."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(len(samples.mask_sum) // 2)
    return signs / (3 * samples.mask_sum.clamp(min=1))


OPPOSITE = partial(two_rows, "custom", {"function": opposite})


EVALUATING = {"hook": {"aggregate_evaluation": True}}
LATER = {"after": two_rows(**EVALUATING), **EVALUATING}
MASKS = {
    "a changed mask": changed(
        lambda mask: mask.roll(1, dims=0),
        CHANGED.replace("part ...", "part ... its mask sum of a sample must be ..."),
    ),
    "a mask changed after an evaluation": changed(
        lambda mask: mask / 2, after=two_rows(call=EVALUATION)
    ),
    "a mask that is nearly the counted one": changed(lambda mask: 0.999 * mask),
    "a mask changed later": changed(of_first_token(0.0), **LATER),
    # Their sums stay 0, and the sum of the mask tells.
    "a mask changed later, of weights that cancel": changed(
        lambda mask: mask / 2,
        CHANGED.replace("part ...", "part ... its mask sum must be ..."),
        case=OPPOSITE,
        after=OPPOSITE(),
    ),
    "a mask of NaN later": changed(of_first_token(torch.nan), **LATER),
}


def between_samples(mask: Tensor) -> Tensor:
    """Moves a token's mask from the first sample to padding of the second; the sum stays."""
    mask = mask.clone()
    mask[0, 0], mask[0, 27] = mask[0, 27].item(), mask[0, 0].item()
    return mask


def within_a_sample(mask: Tensor) -> Tensor:
    mask = mask.clone()
    first, place = (int(x.nonzero()[0]) for x in (mask[0] != 0, mask[0] == 0))
    mask[0, place], mask[0, first] = 1.0, 0.0
    return mask


# By mode, a token that moves in the mask of a pack; and whether the first step refuses it, and
# later ones.
MOVES = (
    ("sample_mean", between_samples, True, True),
    ("token_mean", between_samples, True, False),  # its samples do not matter
    ("sample_mean", within_a_sample, False, False),
    ("custom", between_samples, True, True),
)
PACK = (((0, 1),),)


def moved(mode: str, change: Any, is_refused: bool, later: bool) -> Refusal:
    usual = Case(mode, places=PACK)
    step = partial(returning, with_mask(change))
    case = replace(usual, step=step, after=usual if later else None)
    return Refusal(CHANGED if is_refused else "", case, "dp1")


MOVED = {
    f"a mask that moved {change.__name__}, {mode}, {'later' if later else 'at first'}": moved(
        mode, change, is_refused, later
    )
    for mode, change, *answers in MOVES
    for later, is_refused in zip((False, True), answers, strict=True)
}
ROWS = {**FUNCTIONS_REFUSED, **MASKS, **MOVED, "a good step": Refusal()}


@pytest.mark.parametrize("name", ROWS)
def test_every_rank_refuses_what_is_no_masked_sum_or_was_not_counted(name: str) -> None:
    assert_told(__name__, name)
