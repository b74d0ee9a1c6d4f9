"""Batches as Megatron's data loaders collate them, read as its scripts use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_loss_agg import LossAggregation, StepPlan
from megatron_loss_agg.errors import GroupError
from megatron_loss_agg.mcore.batches import read_batch

# Batches, and the coefficients of their samples under ``sample_mean``.
BATCHES: dict[str, tuple[dict[str, Any], list[float]]] = {
    # 0.19's SFT data stacks packs of 3 and 1 tokens, padded to the length of the longest: two
    # samples, 1/2 * 1/3 and 1/2 * 1/1 and not phantom ones of length 0.
    "offsets that repeat the end are no samples": (
        {"loss_mask": [[1, 1, 1, 1]], "cu_seqlens": [[0, 3, 4, 4, 4]]},
        [1 / 6, 1 / 2],
    ),
    "several packs are one": (
        {"loss_mask": [[1] * 4] * 2, "cu_seqlens": [[0, 3, 4, 4, 4], [0, 4, 4, 4, 4]]},
        [1 / 9, 1 / 3, 1 / 12],
    ),
    "an empty sample that has an id counts": (
        {"loss_mask": [[1, 1, 1, 1]], "cu_seqlens": [[0, 4, 4]], "prompt_ids": [[1, 2]]},
        [1 / 8, 0],
    ),
    "an empty sample that has a place counts": (
        {
            "loss_mask": [[1, 1, 1, 1, 0, 0, 0, 0]],
            "cu_seqlens": [[0, 4, 4]],
            "cu_seqlens_padded": [[0, 4, 8]],
        },
        [1 / 8, 0],
    ),
    # The real ones are filled with their own end, or like the padded ones with the pack's length.
    **{
        f"both offsets end where the padded ones repeat, filled with {filled}": (
            {
                "loss_mask": [[1, 1, 1, 0, 1, 1, 1, 0, 0, 0]],
                "cu_seqlens": [[0, 3, 6, filled, filled]],
                "cu_seqlens_padded": [[0, 4, 10, 10, 10]],
            },
            [1 / 6, 1 / 6],
        )
        for filled in (6, 10)
    },
    "padded offsets alone are the offsets": (
        {"loss_mask": [[1, 1, 1, 1]], "cu_seqlens_padded": [[0, 3, 4]]},
        [1 / 6, 1 / 2],
    ),
    # The padded offsets tell the model that there is one.
    **{
        f"a microbatch that only pads a rank has no sample, {offsets}": (
            {"loss_mask": [[0] * 8], "cu_seqlens": [offsets], "cu_seqlens_padded": [[0, 8]]},
            [],
        )
        for offsets in ([0], [0, 0])
    },
}


@pytest.mark.parametrize("name", BATCHES)
def test_samples_are_those_that_the_script_means(name: str) -> None:
    lists, expected = BATCHES[name]
    batch = {key: torch.tensor(values) for key, values in lists.items()}
    microbatch = read_batch({**batch, "loss_mask": batch["loss_mask"].float()})
    plan = StepPlan.build(LossAggregation(mode="sample_mean"), [microbatch])
    assert microbatch.loss_mask.shape == (1, batch["loss_mask"].numel())
    assert microbatch.num_samples == len(expected)
    assert plan.coefficients(0).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "offsets, error",
    [
        ({"": [[0, 3], [0, 4]]}, "does not end at the length 4 of every pack"),
        (
            {"": [[0, 4], [0, 4]], "_padded": [[0, 4]]},
            r"key 'cu_seqlens_padded'.*row for each row of the mask",
        ),
        ({"": [[0, 3]]}, "one such row for each row of the mask"),
    ],
)
def test_packs_that_end_early_are_refused(offsets: dict[str, Any], error: str) -> None:
    batch = {f"cu_seqlens{name}": torch.tensor(values) for name, values in offsets.items()}
    with pytest.raises(GroupError, match=error):
        read_batch({"loss_mask": torch.ones(2, 4), **batch})
