"""What is read of a batch for each sample: ids of blended data sets, and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_loss_agg import LossAggregation, Term
from megatron_loss_agg.errors import GroupError
from megatron_loss_agg.mcore.reading.keys import read_batch, reading

ROWS = {"loss_mask": torch.ones(3, 4), "dataset_id": torch.tensor([1, 0, 1], dtype=torch.int16)}
# Two packs of four tokens: two samples each, and fill in the first.
PACKS = {
    "loss_mask": torch.ones(2, 4),
    "cu_seqlens": torch.tensor([[0, 3, 4, 4], [0, 1, 4, 4]]),
    "dataset_id": torch.tensor([5, 6]),
}
# The last sample is empty and starts where the pack ends.
ENDING = {
    "loss_mask": torch.ones(1, 4),
    "cu_seqlens": torch.tensor([0, 2, 4, 4]),
    "prompt_ids": torch.tensor([0, 0, 1]),
    "dataset_id": torch.tensor([8]),
}
# Padded inside the first pack, so that the second one starts at 4 and not at 2.
PADDED = {
    "loss_mask": torch.tensor([[1.0, 0, 1, 0], [1, 1, 1, 1]]),
    "cu_seqlens": torch.tensor([0, 1, 2, 5, 6]),
    "cu_seqlens_padded": torch.tensor([0, 2, 4, 7, 8]),
    "dataset_id": torch.tensor([[9], [1]]),
}


@pytest.mark.parametrize(
    ("batch", "ids"),
    [(ROWS, [1, 0, 1]), (PACKS, [5, 5, 6, 6]), (ENDING, [8, 8, 8]), (PADDED, [9, 9, 1, 1])],
)
def test_the_key_of_blended_data_sets_is_one_id_for_each_row_or_pack(batch, ids):
    read = read_batch(batch, dataset_id=True)
    assert read.dataset_ids.tolist() == ids
    assert read.dataset_ids.dtype == torch.int64
    assert read_batch(batch).dataset_ids is None
    own = torch.arange(len(ids))
    both = read_batch({**batch, "dataset_ids": own}, dataset_id=True)
    assert torch.equal(both.dataset_ids, own)


def test_the_key_is_read_only_where_data_sets_matter():
    bad = {"loss_mask": torch.ones(3, 4), "dataset_id": "wikipedia"}

    def terms(**options: Any) -> dict[str, Term]:
        return {"loss": Term(LossAggregation(**options))}

    for options in ({"mode": "token_mean"}, {"mode": "sample_mean", "count": "prompt"}):
        assert reading(read_batch, terms(**options)) is read_batch
        assert read_batch(bad).dataset_ids is None
    for options in ({"mode": "dataset_mean"}, {"mode": "sample_mean", "count": "dataset"}):
        read = reading(read_batch, terms(**options))
        assert read(ROWS).dataset_ids.tolist() == [1, 0, 1]
        with pytest.raises(GroupError, match="'dataset_id' is a str beside a loss_mask of 3 rows"):
            read(bad)
        with pytest.raises(GroupError, match="expected an integer for each row"):
            read({**ROWS, "dataset_id": torch.tensor([1, 2])})
    assert reading(read_batch, terms(mode="sum"), dataset_id=True)(ROWS).dataset_ids is not None
    assert reading(len, terms(mode="dataset_mean")) is len  # a function of the user's


def test_weights_are_read_from_rows_and_packs():
    batch = {"loss_mask": torch.ones(2, 3), "sample_weights": torch.tensor([[0.5], [2.0]])}
    assert read_batch(batch).sample_weights.tolist() == [0.5, 2.0]
    # The last of three offsets is fill, unless there are weights for as many samples.
    packed = {"loss_mask": torch.ones(1, 6), "cu_seqlens": torch.tensor([[0, 2, 6, 6]])}
    read = read_batch({**packed, "sample_weights": torch.tensor([[0.5, 2.0, 1.0]])})
    assert read.num_samples == 3 and read_batch(packed).num_samples == 2
    with pytest.raises(GroupError, match="is a float"):
        read_batch({"loss_mask": torch.ones(2, 3), "sample_weights": 1.0})
