"""Steps that are out of the ordinary and mean the same: masks, losses, iterators, empty ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import Loop, LossHook, TokenLoss
from tests.host.harness import EXACT, error_of, run_host_ranks
from tests.host.reference import relative_error
from tests.host.steps import EMPTY, Counted, aggregation, batches

pytestmark = pytest.mark.host

N_MB = Counted.N_MB
ROWS, LENGTH = 2, 250
# 475 active tokens: bf16 counts to 256 one by one, uint8 to 255.
MASK = torch.ones(ROWS, LENGTH, dtype=torch.float64)
MASK[:, :25] = torch.tensor([[0.0], [1.0]])
DTYPES = (torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64, torch.float32)


def with_mask(change: Callable[[Tensor], Tensor], losses: Tensor, mask: Tensor) -> Any:
    from tests.host import gpt

    return losses, functools.partial(gpt.stock_loss_func, change(mask))


def poisoned(value: float, losses: Tensor, mask: Tensor) -> Any:
    return with_mask(lambda x: x, losses + torch.where(mask == 0, value, 0.0), mask)


def flat(losses: Tensor, mask: Tensor) -> Any:
    """In another shape than the mask, and without a reduction."""
    return losses, TokenLoss(lambda output: (output.flatten(), {}), mask)


# What a forward step makes of losses and mask; all mean the same.
CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "stock": functools.partial(with_mask, lambda x: x),
    "transposed in memory": functools.partial(with_mask, lambda x: x.t().contiguous().t()),
    **{f"{x}": functools.partial(with_mask, lambda mask, x=x: mask.to(x)) for x in DTYPES},
    **{f"{x} where the mask is 0": functools.partial(poisoned, x) for x in (torch.nan, torch.inf)},
    "flat losses": flat,
}
# What weighs tokens in different ways: the per-token flag, and the mode.
WEIGHED = [(False, "prompt_mean"), (True, "prompt_mean"), (True, "token_mean")]


def changed_steps() -> dict[Any, float]:
    """One rank: the worst error of two steps' gradients and reports, beside stock ones."""
    from tests.host import gpt, gradients

    gpt.initialize()
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 32, (ROWS, LENGTH + 1), generator=generator)
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": MASK}
    batch["prompt_ids"] = torch.arange(ROWS)
    models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}

    def steps(per_token: bool, mode: str, change: Any) -> Any:
        def forward_step(iterator: Any, model: Any) -> Any:
            losses, loss_func = gpt.forward_step(iterator, model)
            return change(losses, loss_func.args[0])

        hook = LossHook(aggregation(mode), loop=Loop(of_megatron=True))
        for _ in range(2):
            data, model = iter([batch] * N_MB), models[per_token]
            made = gpt.run_step(hook, model, data, N_MB, ROWS, forward_step_func=forward_step)
            yield gradients.of(model), {key: torch.stack([x[key] for x in made]) for key in made[0]}

    def error(weighed: Any, change: Any) -> float:
        both = zip(steps(*weighed, change), steps(*weighed, CHANGES["stock"]), strict=True)
        pairs = [pair for step in both for pair in zip(*step, strict=True)]
        # A `TokenLoss` has no report of the stock loss function's.
        return max(relative_error(got, {key: stock[key] for key in got}) for got, stock in pairs)

    return {(name, *w): error(w, change) for w, (name, change) in product(WEIGHED, CHANGES.items())}


def test_a_mask_of_any_dtype_and_masked_nan_or_infinity_change_nothing() -> None:
    (errors,) = run_host_ranks(changed_steps, 1)
    assert len(errors) == len(CHANGES) * len(WEIGHED)
    assert {case: error for case, error in errors.items() if not error <= EXACT} == {}


EMPTIED = ((False, "sample_sum"), (True, "sample_sum"), (True, "token_mean"))
ACTIVE = ((0, 1), (0,), (1,), ())  # data-parallel ranks with active tokens


def unusual_steps() -> dict[Any, Any]:
    """Every rank, DP 2: iterators of a virtual pipeline, whose last chunk computes the loss; a step
    that collects other data; and ranks without active tokens.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.host import gpt, gradients

    gpt.initialize()
    number = gpt.data_rank()
    models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}

    def step(mode: str, data: Any, per_token: bool = False, **options: Any) -> Any:
        hook, ddp = LossHook(aggregation(mode)), models[per_token]
        reports = gpt.run_step(hook, ddp, data, N_MB, Counted.ROWS, **options)
        return gradients.flat(ddp), reports

    chunks, passed = [Counted(number), Counted(number)], []

    def last_chunk(**kwargs: Any) -> Any:
        passed.extend(kwargs["data_iterator"])
        return get_forward_backward_func()(**{**kwargs, "data_iterator": passed[-1]})

    expected, _ = step("prompt_mean", Counted(number))
    of_last, _ = step("prompt_mean", chunks, schedule=last_chunk)
    data = Counted(number)
    collect = gpt.forward_step_with(
        lambda stock, mask: lambda output, non_loss_data: (data.given, non_loss_data)
    )
    options = {"forward_step_func": collect, "forward_only": True, "collect_non_loss_data": True}
    found: dict[Any, Any] = {
        "chunks": (passed[0] is chunks[0], chunks[0].given, chunks[1].given),
        "error": float((of_last - expected).norm() / expected.norm()),
        "other data": step("prompt_mean", data, **options)[1],
        "tokens": sum(float(next(data)["loss_mask"].sum()) for _ in range(N_MB)),
    }
    for (per_token, mode), active in product(EMPTIED, ACTIVE):
        found[per_token, mode, active], _ = step(mode, Counted(number, active=active), per_token)
    return found


@functools.cache
def unusual() -> list[dict[Any, Any]]:
    return run_host_ranks(unusual_steps, 2)


def test_lists_of_iterators_and_other_data_are_understood() -> None:
    for found in unusual():
        assert found["error"] <= EXACT
        assert found["chunks"] == (True, 0, N_MB)
        assert found["other data"] == [(k + 1, True) for k in range(N_MB)]  # untouched


def test_a_rank_without_active_tokens_takes_part_in_the_step() -> None:
    m, n = (found["tokens"] for found in unusual())
    for found, (per_token, mode) in product(unusual(), EMPTIED):
        both, one, other, none = (found[per_token, mode, active] for active in ACTIVE)
        # Samples count whether empty or not, so the parts add up; tokens do not.
        parts = (m * one + n * other) / (m + n) if mode == "token_mean" else one + other
        assert float((both - parts).norm() / both.norm()) <= EXACT
        assert one.norm() > 0 < other.norm()
        assert not none.any()  # nor NaN


def twofold(loss_mask: Tensor, output: Tensor) -> Any:
    from tests.host import gpt

    loss, *others = gpt.stock_loss_func(loss_mask, output)
    return (2 * loss, *others)


def after_an_empty_step() -> list[str | None]:
    from tests.host import gpt

    gpt.initialize()
    ddp, hook = gpt.ddp_model(), LossHook(aggregation("sum"))
    script = gpt.forward_step_with(lambda _, mask: functools.partial(twofold, mask))
    return [
        error_of(gpt.run_step, hook, ddp, batches(place, "bshd"), 1, forward_step_func=script)
        for place in (((EMPTY,),), ((0,),))
    ]


def test_a_step_without_tokens_verifies_nothing() -> None:
    ((empty, full),) = run_host_ranks(after_an_empty_step, 1)
    assert empty is None
    assert full is not None and "HostError: the loss function returned" in full
