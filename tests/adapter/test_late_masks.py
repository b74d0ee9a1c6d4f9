"""Hooks and batches for masks that the model makes: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_loss_agg import AggregationError, LossAggregation
from megatron_loss_agg.mcore import LateMicrobatch, LossHook
from megatron_loss_agg.mcore.late_batches import read_samples

POSSIBLE = ("sum", "sample_sum", "sample_mean", "microbatch_mean", "token_mean")


@pytest.mark.parametrize("mode", POSSIBLE)
def test_modes_that_count_samples_and_microbatches_are_possible(mode: str) -> None:
    assert LossHook(LossAggregation(mode=mode), mask="model").read_batch is read_samples


def own(batch: Any) -> LateMicrobatch:
    return LateMicrobatch(3)


def test_a_reader_of_ones_own_is_kept() -> None:
    assert LossHook(LossAggregation(mode="sum"), own, mask="model").read_batch is own


SUM = LossAggregation(mode="sum")
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    r"'prompt_mean' with a mask that the model makes .*; expected mode sum, ": (
        LossAggregation(mode="prompt_mean"),
        {},
    ),
    r"'rollout_mean' with": (LossAggregation(mode="rollout_mean"), {}),
    r"'slime/constant' with": (LossAggregation.preset("slime/constant", divisor=3.0), {}),
    r"'custom' with": (LossAggregation(mode="custom", function=own), {}),
    r"'token_mean' with": ({"a": LossAggregation(mode="token_mean"), "b": SUM}, {}),
    r"empty='skip' .*; expected empty='count'": (
        LossAggregation(mode="sample_sum", empty="skip"),
        {},
    ),
    r"empty_step='skip' with .*; expected 'step'": (SUM, {"empty_step": "skip"}),
    r"empty_step='error' with": (SUM, {"empty_step": "error"}),
    r"evaluates_by_microbatch \(Megatron's --sft\) with": (SUM, {"evaluates_by_microbatch": True}),
}


def test_options_of_samples_and_tokens_are_refused() -> None:
    for option in ("sample_weights", "rejected"):
        agg = LossAggregation(mode="sum", **{option: "skip"})
        with pytest.raises(AggregationError, match=f"^{option}='skip' with a mask that the model"):
            LossHook(agg, mask="model")
    for option, value in (("mtp", "same"), ("moe", "step"), ("report_datasets", True)):
        with pytest.raises(AggregationError, match=f"^{option}.* with a mask that the model makes"):
            LossHook(SUM, mask="model", **{option: value})


@pytest.mark.parametrize("text", REFUSED)
def test_what_needs_the_masks_of_the_whole_step_is_refused(text: str) -> None:
    aggregation, options = REFUSED[text]
    LossHook(aggregation, **options)
    with pytest.raises(AggregationError, match=f"^{text}"):
        LossHook(aggregation, mask="model", **options)


@pytest.mark.parametrize("key", ["tokens", "input_ids", "text", "labels"])
def test_rows_are_samples(key: str) -> None:
    assert read_samples({"image": torch.ones(4, 3), key: torch.ones(5, 7)}) == LateMicrobatch(5)


TOKENS = torch.ones(2, 8)
UNREADABLE: dict[str, Any] = {
    r"the data iterator gave Tensor; expected a mapping": TOKENS,
    r"the data iterator gave \['image'\]; .* LateMicrobatch \(--loss-agg": {"image": TOKENS},
    r"the data iterator gave \['tokens'\]": {"tokens": TOKENS[0]},
    r"the batch has the keys \['cu_seqlens'\] beside": {"tokens": TOKENS, "cu_seqlens": TOKENS[0]},
    r"the batch has the keys \['rejected'\] beside": {"tokens": TOKENS, "rejected": TOKENS[0]},
    r"the batch has the keys \['sample_weights'\] beside": {
        "tokens": TOKENS,
        "sample_weights": TOKENS[0],
    },
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_other_batches_need_a_reader(text: str) -> None:
    with pytest.raises(AggregationError, match=f"^{text}"):
        read_samples(UNREADABLE[text])


@pytest.mark.parametrize("samples", [0, -1, 2.0, True, None])
def test_a_number_of_samples_is_an_int_above_0(samples: Any) -> None:
    with pytest.raises(AggregationError, match=r"^samples=.*; expected an int > 0$"):
        LateMicrobatch(samples)
