"""Batches as Megatron's data loaders collate them, read as its scripts use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_loss_agg import LossAggregation, StepPlan
from megatron_loss_agg.errors import GroupError
from megatron_loss_agg.mcore.reading.ahead import LookAhead
from megatron_loss_agg.mcore.reading.keys import read_batch

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
    # Megatron-Bridge 0.6.2: two samples of 3 and 2 tokens, and one more for the pack's padding.
    **{
        f"the padding of a pack is no sample: {name}": (
            {"loss_mask": [[1, 1, 1, 1, 1, 0, 0, 0]], **offsets},
            [1 / 6, 1 / 4],
        )
        for name, offsets in {
            "cu_seqlens_q": {"cu_seqlens_q": [[0, 3, 5, 8]], "token_count": [5]},
            "repeated ends": {"cu_seqlens_q": [[0, 3, 5, 8, 8, 8]], "token_count": [5]},
            "collated before": {"cu_seqlens_q": [0, 3, 5]},
            "packed in a batch": {"cu_seqlens_q": [0, 3, 5], "token_count": [3, 2]},
        }.items()
    },
    **{
        f"samples lie at their padded places: {name}": (
            {"loss_mask": [[1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]], **offsets},
            [1 / 6, 1 / 4],
        )
        for name, offsets in {
            "cu_seqlens_q": {
                "cu_seqlens_q": [[0, 3, 5, 5, 5]],
                "cu_seqlens_q_padded": [[0, 4, 8, 12, 12]],
                "token_count": [8],
            },
            "packed in a batch": {
                "cu_seqlens_q": [0, 3, 5],
                "cu_seqlens_q_padded": [0, 4, 8],
                "token_count": [3, 2],
            },
        }.items()
    },
    "an empty sample before the padding of a pack counts": (
        {"loss_mask": [[1, 1, 1, 0]], "cu_seqlens_q": [[0, 3, 3, 4]], "token_count": [3]},
        [1 / 6, 0],
    ),
    "an empty sample with a place before the padding of a pack counts": (
        {
            "loss_mask": [[1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]],
            "cu_seqlens_q": [[0, 3, 3, 3]],
            "cu_seqlens_q_padded": [[0, 4, 8, 12]],
            "token_count": [8],
        },
        [1 / 6, 0],
    ),
    "places without real tokens are empty samples": (
        {
            "loss_mask": [[0] * 8],
            "cu_seqlens_q": [[0, 0, 0]],
            "cu_seqlens_q_padded": [[0, 4, 8]],
            "token_count": [8],
        },
        [0, 0],
    ),
    "a full pack ends in a sample": (
        {"loss_mask": [[1, 1, 1, 0]], "cu_seqlens_q": [[0, 3, 4]], "token_count": [4]},
        [1 / 6, 0],
    ),
    "a sample of the padding that has an id counts": (
        {
            "loss_mask": [[1, 1, 1, 0]],
            "cu_seqlens_q": [[0, 3, 4]],
            "token_count": [3],
            "prompt_ids": [[1, 2]],
        },
        [1 / 6, 0],
    ),
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


@pytest.mark.parametrize(
    "offsets, error",
    [
        (
            {"cu_seqlens": [0, 4], "cu_seqlens_q": [0, 4]},
            "the batch has the offsets cu_seqlens and cu_seqlens_q, and which are real .* unknown; "
            "expected exactly one of these: .*cu_seqlens_q with cu_seqlens_q_padded",
        ),
        ({"cu_seqlens_q_padded": [0, 4]}, "has the offsets cu_seqlens_q_padded, and"),
        # Of Megatron-Bridge 0.3: padded places, real lengths, and how many are no fill.
        ({"cu_seqlens_unpadded": [0, 4]}, "has the offsets cu_seqlens_unpadded, and"),
        (
            {"cu_seqlens_unpadded": [0, 3], "cu_seqlens": [0, 4]},
            "has the offsets cu_seqlens and cu_seqlens_unpadded, and which .*expected exactly one "
            "of these: cu_seqlens or cu_seqlens_padded or cu_seqlens with cu_seqlens_padded or "
            "cu_seqlens_q or cu_seqlens_q with cu_seqlens_q_padded$",
        ),
        (
            {"cu_seqlens": [[0, 2, 4, -1]], "cu_seqlens_argmin": [[3]]},
            "has the offsets cu_seqlens and cu_seqlens_argmin, and",
        ),
        (
            {"cu_seqlens": [[0, 2, 4, -1, -1]]},
            r"\[0, 2, 4, -1\].* start at 0 and do not decrease",
        ),
        (
            {"cu_seqlens_q": [0, 3, 2]},
            r"\[0, 3, 2\].* start at 0 and do not decrease",
        ),
        ({"cu_seqlens_q": [1, 4]}, r"\[1, 4\].* start at 0 and do not decrease"),
        ({"cu_seqlens_q": [0.0, 4.0]}, "cu_seqlens is .*float32.*int32 or int64"),
        (
            {"cu_seqlens_q": [[0, 4], [0, 4]]},
            r"'cu_seqlens_q' is .* of shape \(2, 2\) beside a loss_mask of shape \(1, 4\)",
        ),
        (
            {"cu_seqlens_q": [0, 1, 3], "cu_seqlens_q_padded": [0, 4]},
            r"cu_seqlens_padded is .* of shape \(2,\); .* as many as in cu_seqlens",
        ),
    ],
)
def test_offsets_in_no_known_form_are_refused(offsets: dict[str, Any], error: str) -> None:
    def plan() -> None:
        batch = {name: torch.tensor(values) for name, values in offsets.items()}
        microbatch = read_batch({"loss_mask": torch.ones(1, 4), **batch})
        StepPlan.build(LossAggregation(mode="sample_mean"), [microbatch])

    with pytest.raises(GroupError, match=error):
        plan()


def test_offsets_must_be_tensors() -> None:
    with pytest.raises(GroupError, match="'cu_seqlens_q' is a list beside a loss_mask"):
        read_batch({"loss_mask": torch.ones(1, 4), "cu_seqlens_q": [0, 4]})


def test_the_padding_of_several_packs_is_refused() -> None:
    packs = torch.tensor([[0, 3, 4], [0, 3, 4]])
    batch = {"loss_mask": torch.ones(2, 4), "cu_seqlens_q": packs, "token_count": [3, 3]}
    with pytest.raises(GroupError, match="'cu_seqlens_q' does not end at the length 4 of every"):
        read_batch(batch)


@pytest.mark.parametrize("key", ["cu_seqlens", "cu_seqlens_q"])
def test_a_repeated_end_is_fill_in_one_axis_as_in_two(key: str) -> None:
    mask = torch.ones(1, 12)
    offsets = torch.tensor([0, 5, 12, 12, 12])
    for given in (offsets, offsets.view(1, -1)):
        read = read_batch({"loss_mask": mask, key: given})
        assert read.cu_seqlens.tolist() == [0, 5, 12]
    # Ids say that there are empty samples.
    ids = torch.arange(4)
    read = read_batch({"loss_mask": mask, key: offsets, "prompt_ids": ids})
    assert read.cu_seqlens.tolist() == offsets.tolist()


@pytest.mark.parametrize("copies", [False, True])
def test_copies_of_masks_and_tokens_are_out_of_reach_of_later_draws(copies: bool) -> None:
    kept = {"loss_mask": torch.zeros(1, 4), "labels": torch.zeros(1, 4, dtype=torch.int64)}

    def refilled() -> Iterator[dict[str, torch.Tensor]]:
        for i in (1, 2):
            yield {key: x.fill_(i) for key, x in kept.items()}

    ahead = LookAhead(refilled(), 2, read_batch, lazily=False, copies=copies)
    first, second = ahead.microbatches()
    found = [[int(x.max()) for x in (m.loss_mask, *m.token_ids)] for m in (first, second)]
    assert found == ([[1, 1], [2, 2]] if copies else [[2, 2], [2, 2]])
    assert [int(batch["labels"].max()) for batch in (next(ahead), next(ahead))] == [2, 2]
