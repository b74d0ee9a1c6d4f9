"""Batches as data loaders collate them, read as the scripts of Megatron and its Bridge use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_loss_agg import AggregationError, LossAggregation, StepPlan
from megatron_loss_agg.errors import GroupError
from megatron_loss_agg.mcore import LateMicrobatch, read_batch, read_samples


def offsets(*names: str) -> Callable[..., dict[str, Any]]:
    """Makes batches of masks, as in "1110 1100" of two rows, and of offsets under these names."""

    def batch(mask: str, *values: Any, **others: Any) -> dict[str, Any]:
        rows = [[int(m) for m in row] for row in mask.split()]
        given = {name: x for name, x in zip(names, values, strict=False) if x is not None}
        return {"loss_mask": rows, **given, **others}

    return batch


packs = offsets("cu_seqlens", "cu_seqlens_padded")  # of Megatron-LM
bridge = offsets("cu_seqlens_q", "cu_seqlens_q_padded", "token_count")  # of Megatron-Bridge 0.6
FILLED, PADDED = "11111000", "111011000000"  # samples of 3 and 2 tokens, in two ways

# Batches, and the coefficients of their samples under ``sample_mean``.
BATCHES: dict[str, tuple[dict[str, Any], list[float]]] = {
    # 0.19's SFT data stacks packs of 3 and 1 tokens, padded to the length of the longest: two
    # samples, 1/2 * 1/3 and 1/2 * 1/1 and not phantom ones of length 0.
    "offsets that repeat the end are no samples": (
        packs("1111", [[0, 3, 4, 4, 4]]),
        [1 / 6, 1 / 2],
    ),
    "several packs are one": (
        packs("1111 1111", [[0, 3, 4, 4, 4], [0, 4, 4, 4, 4]]),
        [1 / 9, 1 / 3, 1 / 12],
    ),
    "an empty sample that has an id counts": (
        packs("1111", [[0, 4, 4]], prompt_ids=[[1, 2]]),
        [1 / 8, 0],
    ),
    "an empty sample that has a place counts": (
        packs("11110000", [[0, 4, 4]], [[0, 4, 8]]),
        [1 / 8, 0],
    ),
    # The real ones are filled with their own end, or like the padded ones with the pack's length.
    **{
        f"both offsets end where the padded ones repeat, filled with {filled}": (
            packs("1110111000", [[0, 3, 6, filled, filled]], [[0, 4, 10, 10, 10]]),
            [1 / 6, 1 / 6],
        )
        for filled in (6, 10)
    },
    "padded offsets alone are the offsets": (packs("1111", None, [[0, 3, 4]]), [1 / 6, 1 / 2]),
    # The padded offsets tell the model that there is one.
    **{
        f"a microbatch that only pads a rank has no sample, {of_none}": (
            packs("00000000", [of_none], [[0, 8]]),
            [],
        )
        for of_none in ([0], [0, 0])
    },
    # Two samples of 3 and 2 tokens, and one more for the pack's padding.
    **{
        f"the padding of a pack is no sample: {name}": (batch, [1 / 6, 1 / 4])
        for name, batch in {
            "one axis more": bridge(FILLED, [[0, 3, 5, 8]], None, [5]),
            "repeated ends": bridge(FILLED, [[0, 3, 5, 8, 8, 8]], None, [5]),
            "collated before": bridge(FILLED, [0, 3, 5]),
            "packed in a batch": bridge(FILLED, [0, 3, 5], None, [3, 2]),
            "places": bridge(PADDED, [[0, 3, 5, 5, 5]], [[0, 4, 8, 12, 12]], [8]),
            "places, packed in a batch": bridge(PADDED, [0, 3, 5], [0, 4, 8], [3, 2]),
        }.items()
    },
    "an empty sample before the padding of a pack counts": (
        bridge("1110", [[0, 3, 3, 4]], None, [3]),
        [1 / 6, 0],
    ),
    "an empty sample with a place before the padding of a pack counts": (
        bridge("111000000000", [[0, 3, 3, 3]], [[0, 4, 8, 12]], [8]),
        [1 / 6, 0],
    ),
    "places without real tokens are empty samples": (
        bridge("00000000", [[0, 0, 0]], [[0, 4, 8]], [8]),
        [0, 0],
    ),
    "a full pack ends in a sample": (bridge("1110", [[0, 3, 4]], None, [4]), [1 / 6, 0]),
    "a sample of the padding that has an id counts": (
        bridge("1110", [[0, 3, 4]], None, [3], prompt_ids=[[1, 2]]),
        [1 / 6, 0],
    ),
    # In one axis as in two.
    **{
        f"a repeated end is fill, and ids say that it is none: {kind}, {len(ids)} ids": (
            made("1" * 12, [0, 5, 12, 12, 12], prompt_ids=ids),
            found,
        )
        for kind, made in (("Megatron-LM", packs), ("Bridge", bridge))
        for ids, found in (([1, 2], [1 / 10, 1 / 14]), ([1, 2, 3, 4], [1 / 20, 1 / 28, 0, 0]))
    },
}


def read(lists: dict[str, Any]) -> Any:
    batch = {key: torch.tensor(x) if isinstance(x, list) else x for key, x in lists.items()}
    batch["loss_mask"] = batch["loss_mask"].float()
    return read_batch(batch)


def plan(lists: dict[str, Any]) -> StepPlan:
    return StepPlan.build(LossAggregation(mode="sample_mean"), [read(lists)])


@pytest.mark.parametrize("name", BATCHES)
def test_samples_are_those_that_the_script_means(name: str) -> None:
    lists, expected = BATCHES[name]
    assert plan(lists).coefficients(0).tolist() == pytest.approx(expected)
    mask = read(lists).loss_mask
    assert mask.shape == (1, torch.tensor(lists["loss_mask"]).numel())


ALL_FORMS = (
    "expected exactly one of these: cu_seqlens or cu_seqlens_padded or cu_seqlens with "
    "cu_seqlens_padded or cu_seqlens_q or cu_seqlens_q with cu_seqlens_q_padded$"
)
UNKNOWN = "the batch has the offsets {}, and which"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "packs that end early": (
        packs("1111 1111", [[0, 3], [0, 4]]),
        "does not end at the length 4 of every pack",
    ),
    "one pack of places for two rows": (
        packs("1111 1111", [[0, 4], [0, 4]], [[0, 4]]),
        "key 'cu_seqlens_padded'.*row for each row of the mask",
    ),
    "two packs for one row": (
        bridge("1111", [[0, 4], [0, 4]]),
        r"'cu_seqlens_q' is .* of shape \(2, 2\) beside a loss_mask of shape \(1, 4\)",
    ),
    "names of both": (
        packs("1111", [0, 4]) | bridge("1111", [0, 4]),
        UNKNOWN.format("cu_seqlens and cu_seqlens_q"),
    ),
    "places without samples": (
        bridge("1111", None, [0, 4]),
        UNKNOWN.format("cu_seqlens_q_padded"),
    ),
    # Of Megatron-Bridge 0.3: padded places, real lengths, and how many are no fill.
    "real lengths beside places": (
        packs("1111", [0, 4], cu_seqlens_unpadded=[0, 3]),
        UNKNOWN.format("cu_seqlens and cu_seqlens_unpadded") + ".*" + ALL_FORMS,
    ),
    "how many are no fill": (
        packs("1111", [[0, 2, 4, -1]], cu_seqlens_argmin=[[3]]),
        UNKNOWN.format("cu_seqlens and cu_seqlens_argmin"),
    ),
    "fill of -1": (
        packs("1111", [[0, 2, 4, -1, -1]]),
        r"\[0, 2, 4, -1\].* start at 0 and do not decrease",
    ),
    "no tensors": (bridge("1111", (0, 4)), "'cu_seqlens_q' is a tuple beside a loss_mask"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_offsets_in_no_known_form_are_refused(name: str) -> None:
    batch, error = REFUSED[name]
    with pytest.raises(GroupError, match=error):
        plan(batch)


TOKENS = torch.ones(2, 8)


@pytest.mark.parametrize("key", ["tokens", "input_ids", "text", "labels"])
def test_rows_are_samples_where_the_model_makes_the_mask(key: str) -> None:
    assert read_samples({"image": torch.ones(4, 3), key: torch.ones(5, 7)}) == LateMicrobatch(5)


@pytest.mark.parametrize(
    "batch, error",
    [
        (TOKENS, r"the data iterator gave Tensor; expected a mapping"),
        ({"image": TOKENS}, r"the data iterator gave \['image'\]; .* LateMicrobatch \(--loss-agg"),
        ({"tokens": TOKENS[0]}, r"the data iterator gave \['tokens'\]"),
        *(
            ({"tokens": TOKENS, key: TOKENS[0]}, rf"the batch has the key '{key}' beside")
            for key in ("rejected", "sample_weights")
        ),
    ],
)
def test_where_the_model_makes_the_mask_other_batches_need_a_reader(batch: Any, error: str) -> None:
    with pytest.raises(AggregationError, match=f"^{error}"):
        read_samples(batch)
