"""Options of a hook that are wrong before any step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_loss_agg import AggregationError, LossAggregation
from megatron_loss_agg.mcore import LossHook, TokenLoss

SUM = LossAggregation(mode="sum")


def test_an_unknown_choice_and_a_term_with_the_name_of_the_token_mean_are_refused() -> None:
    text = "^empty_step='ignore'; expected one of step, error, skip$"
    with pytest.raises(AggregationError, match=text):
        LossHook(SUM, empty_step="ignore")
    with pytest.raises(AggregationError, match=r"expected different names .* no term 'lm'"):
        LossHook({"lm": SUM})


def test_a_loss_is_named_by_its_preset() -> None:
    assert [*LossHook(LossAggregation.preset("verl/token-mean")).terms] == ["verl/token-mean"]
    assert [*LossHook(LossAggregation(mode="token_mean")).terms] == ["token_mean"]


@pytest.mark.parametrize("total", ["lm loss", "kl loss", None])
def test_the_name_of_the_total_may_be_no_other_reports(total: Any) -> None:
    with pytest.raises(AggregationError, match=r"^reports named .*; expected different names"):
        LossHook({"kl": SUM, "policy": SUM}, total=total)


def test_an_unknown_gather_and_options_that_need_a_hook_are_refused() -> None:
    def compute(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, int]]:
        return x, {}

    with pytest.raises(AggregationError, match=r"^whole='yes'; .* 'local_grad' or 'reduced_grad'$"):
        TokenLoss(compute, torch.ones(1), whole="yes")
    needing: list[dict[str, Any]] = [{"whole": "local_grad"}, {"takes_weights": True}]
    for options in needing:
        loss = TokenLoss(compute, torch.ones(1), **options)
        with pytest.raises(AggregationError, match=r"or takes_weights=, was called without a hook"):
            loss(torch.ones(1))
