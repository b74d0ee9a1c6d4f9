"""Lines of the log that are the plugin's own, or that it changes."""

from __future__ import annotations

import pytest

from megatron_loss_agg import LossAggregation, Term
from megatron_loss_agg.mcore import LossHook
from megatron_loss_agg.mcore.extensions.first_line import without_perplexities

ONE = LossHook(LossAggregation.preset("trl/dapo"))
TERMS = {"policy": LossAggregation(mode="sum"), "kl": Term(LossAggregation(mode="token_mean"), 0.1)}
SEVERAL = LossHook(TERMS)


@pytest.mark.parametrize(
    "hook, kept, dropped",
    [
        (ONE, ["lm loss", "lm loss of dataset 3", "loss", "policy loss"], ["trl/dapo loss"]),
        (ONE, ["lm loss"], ["trl/dapo loss of dataset 3", "mtp_1 trl/dapo loss"]),
        (
            SEVERAL,
            ["lm loss", "value loss"],
            ["policy loss", "kl loss", "loss", "mtp_2 policy loss"],
        ),
    ],
)
def test_aggregated_losses_lose_their_perplexity(
    hook: LossHook, kept: list[str], dropped: list[str]
) -> None:
    def line(printed: list[str]) -> str:
        keys = [f"{key} value: 1E+00 | " for key in (*kept, *dropped)]
        return " validation loss | " + "".join(
            [*keys, *(f"{key} PPL: 2E+00 | " for key in printed)]
        )

    assert without_perplexities(line([*kept, *dropped]), hook.reported) == line(kept)
