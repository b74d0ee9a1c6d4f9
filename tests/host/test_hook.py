"""What the hook makes of loss functions, iterators and losses, and what it leaves alone."""

from __future__ import annotations

import functools
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
POISON = (float("nan"), float("inf"))
# What weighs tokens in different ways: (per-token flag, mode).
POISONED = ((False, "prompt_mean"), (True, "prompt_mean"), (True, "token_mean"))
EMPTIED = ((False, "sample_sum"), (True, "sample_sum"), (True, "token_mean"))
ACTIVE = ((0, 1), (0,), (1,), ())  # data-parallel ranks with active tokens


class Rank:
    """A rank of two data-parallel ones: its models, and steps of the hook on these."""

    def __init__(self) -> None:
        from tests.host import gpt

        gpt.initialize()
        self.number = gpt.data_rank()
        self.models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}

    def step(self, mode: str, data: Any = None, per_token: bool = False, **options: Any) -> Any:
        """The gradient of one step, and its reports."""
        from tests.host import gpt, gradients

        ddp, data = self.models[per_token], data or Counted(self.number)
        hook = LossHook(aggregation(mode))
        reports = gpt.run_step(hook, ddp, data, N_MB, Counted.ROWS, **options)
        return gradients.of(ddp), reports


def unusual(rank: Rank) -> dict[str, Any]:
    """Losses in another shape than the mask and without a reduction, the iterators of a virtual
    pipeline, of whose chunks the last computes the loss, and a step that collects other data.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.host import gpt

    report = {"own": torch.tensor([1.0, 2.0])}
    own_losses = gpt.forward_step_with(
        lambda _, mask: TokenLoss(lambda output: (output.flatten(), report), mask)
    )
    chunks = [Counted(rank.number), Counted(rank.number)]
    passed: list[Any] = []

    def last_chunk(**kwargs: Any) -> Any:
        passed.extend(kwargs["data_iterator"])
        return get_forward_backward_func()(**{**kwargs, "data_iterator": passed[-1]})

    data = Counted(rank.number)
    collect = gpt.forward_step_with(
        lambda stock, mask: lambda output, non_loss_data: (data.given, non_loss_data)
    )
    options = {"forward_step_func": collect, "forward_only": True, "collect_non_loss_data": True}
    expected, _ = rank.step("prompt_mean")
    own, reports = rank.step("prompt_mean", forward_step_func=own_losses)
    of_last, _ = rank.step("prompt_mean", chunks, schedule=last_chunk)
    return {
        "errors": [relative_error(own, expected), relative_error(of_last, expected)],
        "report": sorted(reports[0]),
        "chunks": (passed[0] is chunks[0], chunks[0].given, chunks[1].given),
        "other data": rank.step("prompt_mean", data, **options)[1],
    }


def poisoned(rank: Rank) -> dict[Any, tuple[float, bool]]:
    """Gradient error with NaN and infinity where the mask is 0, and are the reports the same?"""
    from tests.host import gpt

    def poisoned_step(poison: float, iterator: Any, model: Any) -> Any:
        losses, loss_func = gpt.forward_step(iterator, model)
        (mask,) = loss_func.args
        return losses + torch.where(mask == 0, poison, 0.0), loss_func

    def logged(reports: Any, mode: str) -> list[Any]:
        return [[r[key].tolist() for r in reports] for key in ("lm loss", f"{mode} loss")]

    found = {}
    for (per_token, mode), poison in product(POISONED, POISON):
        clean, clean_reports = rank.step(mode, per_token=per_token)
        step = functools.partial(poisoned_step, poison)
        got, reports = rank.step(mode, per_token=per_token, forward_step_func=step)
        same = logged(reports, mode) == logged(clean_reports, mode)
        found[per_token, mode, poison] = relative_error(got, clean), same
    return found


def partly_empty(rank: Rank) -> dict[Any, Any]:
    """The gradients when these ranks alone have active tokens; and this rank's number of them."""
    found: dict[Any, Any] = {}
    for (per_token, mode), active in product(EMPTIED, ACTIVE):
        got, _ = rank.step(mode, Counted(rank.number, active=active), per_token)
        found[per_token, mode, active] = torch.cat([g.view(-1) for g in got.values()])
    data = Counted(rank.number)
    return {"tokens": sum(float(next(data)["loss_mask"].sum()) for _ in range(N_MB)), **found}


def steps_on_host() -> tuple[dict[Any, Any], ...]:
    rank = Rank()
    return unusual(rank), poisoned(rank), partly_empty(rank)


@functools.cache
def ranks() -> list[tuple[dict[Any, Any], ...]]:
    return run_host_ranks(steps_on_host, 2)


def test_own_losses_lists_of_iterators_and_other_data_are_understood() -> None:
    for found, _, _ in ranks():
        assert max(found["errors"]) <= EXACT
        assert found["report"] == ["own", "prompt_mean loss"]
        assert found["chunks"] == (True, 0, N_MB)
        assert found["other data"] == [(k + 1, True) for k in range(N_MB)]  # untouched


def test_masked_nan_and_infinity_reach_neither_gradients_nor_reports() -> None:
    for _, found, _ in ranks():
        assert len(found) == 3 * len(POISON)
        for error, same_reports in found.values():
            assert error <= EXACT
            assert same_reports


def test_a_rank_without_active_tokens_takes_part_in_the_step() -> None:
    m, n = (found["tokens"] for _, _, found in ranks())
    for (_, _, found), (per_token, mode) in product(ranks(), EMPTIED):
        both, one, other, none = (found[per_token, mode, active] for active in ACTIVE)
        # Samples count whether empty or not, so the parts add up; tokens do not.
        parts = (m * one + n * other) / (m + n) if mode == "token_mean" else one + other
        assert float((both - parts).norm() / both.norm()) <= EXACT
        assert one.norm() > 0 < other.norm()
        assert not none.any()  # nor NaN


# The loss mask may be of any dtype, and in any memory layout.
ROWS, LENGTH, STEPS = 2, 250, 3
# 475 active tokens: bf16 counts to 256 one by one, uint8 to 255.
MASK = torch.ones(ROWS, LENGTH, dtype=torch.float64)
MASK[:, :25] = torch.tensor([[0.0], [1.0]])
DTYPES = (torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64, torch.float32)
MASKS = {
    "transposed in memory": lambda: MASK.t().contiguous().t(),
    **{str(dtype): functools.partial(MASK.to, dtype) for dtype in DTYPES},
}


def errors_of_masks() -> dict[Any, float]:
    """One rank: the worst gradient error over some steps, for each mode, flag and mask."""
    from tests.host import gpt, gradients

    gpt.initialize()
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 32, (ROWS, LENGTH + 1), generator=generator)
    models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}

    def train(mode: str, per_token: bool, mask: Tensor) -> list[Any]:
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}
        forward_step = gpt.forward_step_with(lambda stock, _: functools.partial(stock, mask))
        hook = LossHook(aggregation(mode), loop=Loop(of_megatron=True))
        model, found = models[per_token], []
        for _ in range(STEPS):
            options = {"forward_step_func": forward_step}
            gpt.run_step(hook, model, iter([batch] * N_MB), N_MB, ROWS, **options)
            found.append(gradients.of(model))
        return found

    errors = {}
    for mode, per_token in product(("token_mean", "sample_mean"), (False, True)):
        exact = train(mode, per_token, MASK)
        for name, mask in MASKS.items():
            pairs = zip(train(mode, per_token, mask()), exact, strict=True)
            errors[name, mode, per_token] = max(relative_error(*pair) for pair in pairs)
    return errors


def test_the_gradient_is_that_of_a_contiguous_fp64_mask() -> None:
    (errors,) = run_host_ranks(errors_of_masks, 1)
    assert len(errors) == len(MASKS) * 2 * 2
    assert {case: error for case, error in errors.items() if not error <= EXACT} == {}


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
