"""Options of a hook that are wrong before any step."""

from __future__ import annotations

import pytest

from megatron_loss_agg import AggregationError, LossAggregation
from megatron_loss_agg.mcore import LossHook


def test_an_unknown_policy_and_a_term_with_the_name_of_the_token_mean_are_refused() -> None:
    text = "^empty_step='ignore'; expected one of error, skip, step$"
    with pytest.raises(AggregationError, match=text):
        LossHook(LossAggregation(mode="sum"), empty_step="ignore")
    with pytest.raises(AggregationError, match="a term named 'lm'; expected another name"):
        LossHook({"lm": LossAggregation(mode="sum")})
