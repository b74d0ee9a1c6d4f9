"""Batches as Megatron's data loaders collate them, read as its scripts use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_loss_agg import LossAggregation, StepPlan
from megatron_loss_agg.errors import GroupError
from megatron_loss_agg.mcore.batches import read_batch


def coefficients(batch: dict[str, Any]) -> list[float]:
    """Of ``sample_mean``, one a sample."""
    plan = StepPlan.build(LossAggregation(mode="sample_mean"), [read_batch(batch)])
    return plan.coefficients(0).tolist()


def test_offsets_that_repeat_the_end_are_no_samples() -> None:
    # 0.19's SFT data stacks packs of 3 and 1 tokens, padded to the length of the longest: two
    # samples, 1/2 * 1/3 and 1/2 * 1/1 and not phantom ones of length 0.
    batch = {"loss_mask": torch.ones(1, 4), "cu_seqlens": torch.tensor([[0, 3, 4, 4, 4]])}
    assert coefficients(batch) == pytest.approx([1 / 6, 1 / 2])


def test_several_packs_are_one() -> None:
    batch = {
        "loss_mask": torch.ones(2, 4),
        "cu_seqlens": torch.tensor([[0, 3, 4, 4, 4], [0, 4, 4, 4, 4]]),
    }
    microbatch = read_batch(batch)
    assert microbatch.loss_mask.shape == (1, 8)
    assert coefficients(batch) == pytest.approx([1 / 9, 1 / 3, 1 / 12])


def test_an_empty_sample_that_has_an_id_counts() -> None:
    batch = {
        "loss_mask": torch.ones(1, 4),
        "cu_seqlens": torch.tensor([[0, 4, 4]]),
        "prompt_ids": torch.tensor([[1, 2]]),
    }
    assert coefficients(batch) == pytest.approx([1 / 8, 0])


def test_an_empty_sample_that_has_a_place_counts() -> None:
    batch = {
        "loss_mask": torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 0]]),
        "cu_seqlens": torch.tensor([[0, 4, 4]]),
        "cu_seqlens_padded": torch.tensor([[0, 4, 8]]),
    }
    assert coefficients(batch) == pytest.approx([1 / 8, 0])


@pytest.mark.parametrize("filled", [[0, 3, 6, 6, 6], [0, 3, 6, 10, 10]])
def test_both_offsets_end_where_the_padded_ones_repeat(filled: list[int]) -> None:
    # The real ones are filled with their own end, or like the padded ones with the pack's length.
    batch = {
        "loss_mask": torch.tensor([[1.0, 1, 1, 0, 1, 1, 1, 0, 0, 0]]),
        "cu_seqlens": torch.tensor([filled]),
        "cu_seqlens_padded": torch.tensor([[0, 4, 10, 10, 10]]),
    }
    microbatch = read_batch(batch)
    assert microbatch.cu_seqlens is not None and microbatch.cu_seqlens.tolist() == [0, 3, 6]
    assert coefficients(batch) == pytest.approx([1 / 6, 1 / 6])


def test_padded_offsets_alone_are_the_offsets() -> None:
    batch = {"loss_mask": torch.ones(1, 4), "cu_seqlens_padded": torch.tensor([[0, 3, 4]])}
    assert coefficients(batch) == pytest.approx([1 / 6, 1 / 2])


@pytest.mark.parametrize("offsets", [[0], [0, 0]])
def test_a_microbatch_that_only_pads_a_rank_has_no_sample(offsets: list[int]) -> None:
    # The padded offsets tell the model that there is one.
    batch = {
        "loss_mask": torch.zeros(1, 8),
        "cu_seqlens": torch.tensor([offsets]),
        "cu_seqlens_padded": torch.tensor([[0, 8]]),
    }
    assert read_batch(batch).num_samples == 0
    assert coefficients(batch) == []


def test_packs_that_end_early_are_refused() -> None:
    batch = {"loss_mask": torch.ones(2, 4), "cu_seqlens": torch.tensor([[0, 3], [0, 4]])}
    with pytest.raises(GroupError, match="does not end at the length 4 of every pack"):
        read_batch(batch)
    batch["cu_seqlens"] = torch.tensor([[0, 4], [0, 4]])
    batch["cu_seqlens_padded"] = torch.tensor([[0, 4]])
    with pytest.raises(GroupError, match=r"key 'cu_seqlens_padded'.*row for each row of the mask"):
        read_batch(batch)
    del batch["cu_seqlens_padded"]
    batch["cu_seqlens"] = torch.tensor([[0, 3]])
    with pytest.raises(GroupError, match="one such row for each row of the mask"):
        read_batch(batch)
