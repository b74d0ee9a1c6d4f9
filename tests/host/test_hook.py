"""What the hook makes of loss functions, iterators and losses, and what it leaves alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.host.iterators import N_MB, ROWS, Counted, aggregation
from tests.host.ranks import run_host_ranks

pytestmark = pytest.mark.host

EXACT = 1e-12
POISON = (float("nan"), float("inf"))


def facts_on_host() -> dict[str, Any]:
    """Every rank, DP 2: facts by the names that the tests below ask for."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg.mcore import LossHook, TokenLoss
    from tests.host import gpt

    gpt.initialize()
    rank = parallel_state.get_data_parallel_rank()
    schedule = get_forward_backward_func()
    facts: dict[str, Any] = {}

    def run(mode: str, ddp: Any, step: Any = gpt.forward_step, **options: Any) -> Any:
        wrapped = LossHook(aggregation(mode)).wrap(options.pop("schedule", schedule))
        data = options.pop("data_iterator", None) or Counted(rank)
        reports = gpt.run_step(wrapped, ddp, data, N_MB, ROWS, forward_step_func=step, **options)
        return gpt.gradient(ddp), reports

    models = {flag: gpt.data_parallel(gpt.build(torch.float64, flag)) for flag in (False, True)}
    ddp = models[False]
    expected, _ = run("prompt_mean", ddp)

    # A script of one's own: losses in another shape than the mask, and no reduction at all.
    def own_step(iterator: Any, model: Any) -> Any:
        losses, loss_func = gpt.forward_step(iterator, model)
        (mask,) = loss_func.args
        report = {"own": torch.tensor([1.0, 2.0])}
        return losses, TokenLoss(lambda output: (output.flatten(), report), mask)

    got, reports = run("prompt_mean", ddp, own_step)
    facts["token_loss"] = gpt.relative_error(got, expected)
    facts["token_loss_report"] = sorted(reports[0])
    flat_loss = TokenLoss(lambda x: (x, {"own": 1}), torch.tensor([1.0, 0, 1]))
    total, number, report = flat_loss(torch.tensor([2.0, float("nan"), 3]))
    facts["token_loss_alone"] = (total.item(), number.dtype, number.item(), report)

    # A virtual pipeline has an iterator for each model chunk; the last chunk computes the loss.
    chunks = [Counted(rank), Counted(rank)]
    passed: list[Any] = []

    def last_chunk(**kwargs: Any) -> Any:
        passed.extend(kwargs["data_iterator"])
        return schedule(**{**kwargs, "data_iterator": kwargs["data_iterator"][-1]})

    got, _ = run("prompt_mean", ddp, schedule=last_chunk, data_iterator=chunks)
    facts["chunks"] = gpt.relative_error(got, expected)
    facts["first_chunk"] = (passed[0] is chunks[0], chunks[0].given, chunks[1].given)

    # Other data than losses.
    def other_data(iterator: Any, model: Any) -> Any:
        output, _ = gpt.forward_step(iterator, model)
        return output, lambda output, non_loss_data: (data.given, non_loss_data)

    data = Counted(rank)
    _, facts["non_loss"] = run(
        "prompt_mean",
        ddp,
        other_data,
        data_iterator=data,
        forward_only=True,
        collect_non_loss_data=True,
    )

    # NaN and infinity where the mask is 0.
    def poisoned_step(poison: float, iterator: Any, model: Any) -> Any:
        losses, loss_func = gpt.forward_step(iterator, model)
        (mask,) = loss_func.args
        return losses + torch.where(mask == 0, poison, 0.0), loss_func

    facts["poison"] = {}
    for per_token, mode in ((False, "prompt_mean"), (True, "prompt_mean"), (True, "token_mean")):
        clean, clean_reports = run(mode, models[per_token])
        for poison in POISON:
            step = functools.partial(poisoned_step, poison)
            got, reports = run(mode, models[per_token], step)
            pairs = [[r[key].tolist() for r in reports] for key in ("lm loss", f"{mode} loss")]
            clean_pairs = [
                [r[key].tolist() for r in clean_reports] for key in ("lm loss", f"{mode} loss")
            ]
            facts["poison"][per_token, mode, poison] = (
                gpt.relative_error(got, clean),
                pairs == clean_pairs,
            )

    # Only one rank has active tokens; then none has.
    facts["empty"] = {}
    for per_token, mode in ((False, "sample_sum"), (True, "sample_sum"), (True, "token_mean")):
        for active in ((0, 1), (0,), (1,), ()):
            data = Counted(rank, active=active)
            got, _ = run(mode, models[per_token], data_iterator=data)
            facts["empty"][per_token, mode, active] = torch.cat([g.view(-1) for g in got.values()])
    facts["tokens"] = sum(float(next(data)["loss_mask"].sum()) for data in [Counted(rank)] * N_MB)
    return facts


@functools.cache
def facts() -> list[dict[str, Any]]:
    return run_host_ranks(facts_on_host, 2)


def test_a_token_loss_is_aggregated_like_a_stock_loss_function() -> None:
    for rank in facts():
        assert rank["token_loss"] <= EXACT
        assert rank["token_loss_report"] == ["own", "prompt_mean loss"]


def test_a_token_loss_alone_is_a_stock_loss_function() -> None:
    # 2 + 3 over the mask, whose 2 tokens Megatron counts in int32.
    assert facts()[0]["token_loss_alone"] == (5.0, torch.int32, 2, {"own": 1})


def test_of_a_list_of_iterators_the_last_is_read() -> None:
    for rank in facts():
        assert rank["chunks"] <= EXACT
        assert rank["first_chunk"] == (True, 0, N_MB)


def test_other_data_than_losses_passes_untouched() -> None:
    for rank in facts():
        assert rank["non_loss"] == [(k + 1, True) for k in range(N_MB)]


def test_masked_nan_and_infinity_reach_neither_gradients_nor_reports() -> None:
    for rank in facts():
        assert len(rank["poison"]) == 3 * len(POISON)
        for error, same_reports in rank["poison"].values():
            assert error <= EXACT
            assert same_reports


def test_a_rank_without_active_tokens_takes_part_in_the_step() -> None:
    first, second = facts()
    m, n = first["tokens"], second["tokens"]
    for rank in (first, second):
        for per_token, mode in ((False, "sample_sum"), (True, "sample_sum"), (True, "token_mean")):
            both, one, other = (
                rank["empty"][per_token, mode, active] for active in ((0, 1), (0,), (1,))
            )
            # Samples count whether empty or not, so the parts add up; tokens do not.
            parts = (m * one + n * other) / (m + n) if mode == "token_mean" else one + other
            assert float((both - parts).norm() / both.norm()) <= EXACT
            assert one.norm() > 0 < other.norm()


def test_a_step_without_active_tokens_has_a_gradient_of_zero() -> None:
    for rank in facts():
        for (_, _, active), gradient in rank["empty"].items():
            assert bool(gradient.any()) == bool(active)
            assert bool(gradient.isfinite().all())
