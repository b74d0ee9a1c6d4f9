"""Batches for masks that the model makes: what is read, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_loss_agg import AggregationError, LossAggregation, Term
from megatron_loss_agg.mcore.reading.late import (
    LateMicrobatch,
    check_possible,
    read_samples,
)

POSSIBLE = ("sum", "sample_sum", "sample_mean", "microbatch_mean", "token_mean")
SETTINGS: dict[str, Any] = {"needs": (), "empty_step": "step", "averages_quotients": False}
SUM = LossAggregation(mode="sum")


def check(*aggregations: LossAggregation, **settings: Any) -> None:
    terms = {f"term {i}": Term(agg) for i, agg in enumerate(aggregations)}
    check_possible(terms, **{**SETTINGS, **settings})


@pytest.mark.parametrize("mode", POSSIBLE)
def test_modes_that_count_samples_and_microbatches_are_possible(mode: str) -> None:
    check(LossAggregation(mode=mode))


def own(batch: Any) -> LateMicrobatch:
    return LateMicrobatch(3)


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    r"'prompt_mean' with a mask that the model makes .*; expected mode sum, ": (
        LossAggregation(mode="prompt_mean"),
        {},
    ),
    r"'rollout_mean' with": (LossAggregation(mode="rollout_mean"), {}),
    r"'slime/constant' with": (LossAggregation.preset("slime/constant", divisor=3.0), {}),
    r"'custom' with": (LossAggregation(mode="custom", function=own), {}),
    r"empty='skip' with .* --loss-aggregation-empty": (
        LossAggregation(mode="sample_sum", empty="skip"),
        {},
    ),
    r"'prompt_mean' and empty_step='skip' with": (
        LossAggregation(mode="prompt_mean"),
        {"empty_step": "skip"},
    ),
    r"empty_step='error' with": (SUM, {"empty_step": "error"}),
    r"Loop\(averages_quotients=True\) \(Megatron's --sft\) with": (
        SUM,
        {"averages_quotients": True},
    ),
    **{
        rf"an extension that needs '{need}' with .* --loss-aggregation-empty, -empty-step, -mtp": (
            SUM,
            {"needs": ("prints", need)},
        )
        for need in ("masks", "stages", "dataset", "prompt")
    },
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_needs_the_masks_of_the_whole_step_is_refused(text: str) -> None:
    aggregation, settings = REFUSED[text]
    with pytest.raises(AggregationError, match=f"^{text}"):
        check(aggregation, **settings)


def test_what_the_host_divides_by_the_tokens_of_the_step_is_alone() -> None:
    with pytest.raises(AggregationError, match=r"^'token_mean' with a mask .* or token_mean alone"):
        check(LossAggregation(mode="token_mean"), SUM)


def test_fingerprints_are_no_such_need_and_presets_say_what_becomes_of_rejected_samples() -> None:
    check(LossAggregation.preset("nemo-rl/sequence_level"), needs=("prints",))


def test_the_hosts_division_by_tokens_goes_with_the_mean_over_tokens_alone() -> None:
    mean, total = LossAggregation(mode="token_mean"), SUM
    plain, experts = SimpleNamespace(num_moe_experts=None), SimpleNamespace(num_moe_experts=2)
    check(mean, per_token=True, config=experts)
    check(total, per_token=True, config=plain)
    check(total, per_token=False, config=experts)
    with pytest.raises(
        AggregationError, match=r"^calculate_per_token_loss=False and 'token_mean' with "
    ):
        check(mean, per_token=False, config=plain)
    with pytest.raises(
        AggregationError, match=r"^calculate_per_token_loss and the model's num_moe_exp"
    ):
        check(total, per_token=True, config=experts)


@pytest.mark.parametrize("key", ["tokens", "input_ids", "text", "labels"])
def test_rows_are_samples(key: str) -> None:
    assert read_samples({"image": torch.ones(4, 3), key: torch.ones(5, 7)}) == LateMicrobatch(5)


TOKENS = torch.ones(2, 8)
UNREADABLE: dict[str, Any] = {
    r"the data iterator gave Tensor; expected a mapping": TOKENS,
    r"the data iterator gave \['image'\]; .* LateMicrobatch \(--loss-agg": {"image": TOKENS},
    r"the data iterator gave \['tokens'\]": {"tokens": TOKENS[0]},
    r"the batch has the key 'rejected' beside": {"tokens": TOKENS, "rejected": TOKENS[0]},
    r"the batch has the key 'sample_weights' beside": {
        "tokens": TOKENS,
        "sample_weights": TOKENS[0],
    },
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_other_batches_need_a_reader(text: str) -> None:
    with pytest.raises(AggregationError, match=f"^{text}"):
        read_samples(UNREADABLE[text])
