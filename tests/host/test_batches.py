"""Batches as data loaders collate them, read as the scripts of Megatron and its Bridge use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_loss_agg import AggregationError, LossAggregation, StepPlan
from megatron_loss_agg.errors import GroupError
from megatron_loss_agg.mcore import LateMicrobatch, read_batch, read_samples

FULL = [[1, 1, 1, 1]]
PADDED = [[1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]]
BRIDGE = {"loss_mask": [[1, 1, 1, 1, 1, 0, 0, 0]]}  # samples of 3 and 2 tokens
PART = {"loss_mask": [[1, 1, 1, 0]]}


def packs(real: Any, padded: Any = None, **others: Any) -> dict[str, Any]:
    """Offsets under Megatron-LM's names."""
    named = {"cu_seqlens": real, "cu_seqlens_padded": padded}
    return {**{name: x for name, x in named.items() if x is not None}, **others}


def bridge(real: Any, padded: Any = None, tokens: Any = None, **others: Any) -> dict[str, Any]:
    """Offsets under the names of Megatron-Bridge 0.6."""
    named = {"cu_seqlens_q": real, "cu_seqlens_q_padded": padded, "token_count": tokens}
    return {**{name: x for name, x in named.items() if x is not None}, **others}


# Batches, and the coefficients of their samples under ``sample_mean``.
BATCHES: dict[str, tuple[dict[str, Any], list[float]]] = {
    # 0.19's SFT data stacks packs of 3 and 1 tokens, padded to the length of the longest: two
    # samples, 1/2 * 1/3 and 1/2 * 1/1 and not phantom ones of length 0.
    "offsets that repeat the end are no samples": (
        packs([[0, 3, 4, 4, 4]], loss_mask=FULL),
        [1 / 6, 1 / 2],
    ),
    "several packs are one": (
        packs([[0, 3, 4, 4, 4], [0, 4, 4, 4, 4]], loss_mask=FULL * 2),
        [1 / 9, 1 / 3, 1 / 12],
    ),
    "an empty sample that has an id counts": (
        packs([[0, 4, 4]], loss_mask=FULL, prompt_ids=[[1, 2]]),
        [1 / 8, 0],
    ),
    "an empty sample that has a place counts": (
        packs([[0, 4, 4]], [[0, 4, 8]], loss_mask=[[1, 1, 1, 1, 0, 0, 0, 0]]),
        [1 / 8, 0],
    ),
    # The real ones are filled with their own end, or like the padded ones with the pack's length.
    **{
        f"both offsets end where the padded ones repeat, filled with {filled}": (
            packs(
                [[0, 3, 6, filled, filled]],
                [[0, 4, 10, 10, 10]],
                loss_mask=[[1, 1, 1, 0, 1, 1, 1, 0, 0, 0]],
            ),
            [1 / 6, 1 / 6],
        )
        for filled in (6, 10)
    },
    "padded offsets alone are the offsets": (
        packs(None, [[0, 3, 4]], loss_mask=FULL),
        [1 / 6, 1 / 2],
    ),
    # The padded offsets tell the model that there is one.
    **{
        f"a microbatch that only pads a rank has no sample, {offsets}": (
            packs([offsets], [[0, 8]], loss_mask=[[0] * 8]),
            [],
        )
        for offsets in ([0], [0, 0])
    },
    # Two samples of 3 and 2 tokens, and one more for the pack's padding.
    **{
        f"the padding of a pack is no sample: {name}": (BRIDGE | offsets, [1 / 6, 1 / 4])
        for name, offsets in {
            "one axis more": bridge([[0, 3, 5, 8]], tokens=[5]),
            "repeated ends": bridge([[0, 3, 5, 8, 8, 8]], tokens=[5]),
            "collated before": bridge([0, 3, 5]),
            "packed in a batch": bridge([0, 3, 5], tokens=[3, 2]),
        }.items()
    },
    **{
        f"samples lie at their padded places: {name}": (
            {"loss_mask": PADDED, **offsets},
            [1 / 6, 1 / 4],
        )
        for name, offsets in {
            "one axis more": bridge([[0, 3, 5, 5, 5]], [[0, 4, 8, 12, 12]], [8]),
            "packed in a batch": bridge([0, 3, 5], [0, 4, 8], [3, 2]),
        }.items()
    },
    "an empty sample before the padding of a pack counts": (
        PART | bridge([[0, 3, 3, 4]], tokens=[3]),
        [1 / 6, 0],
    ),
    "an empty sample with a place before the padding of a pack counts": (
        bridge([[0, 3, 3, 3]], [[0, 4, 8, 12]], [8], loss_mask=[[1, 1, 1] + [0] * 9]),
        [1 / 6, 0],
    ),
    "places without real tokens are empty samples": (
        bridge([[0, 0, 0]], [[0, 4, 8]], [8], loss_mask=[[0] * 8]),
        [0, 0],
    ),
    "a full pack ends in a sample": (PART | bridge([[0, 3, 4]], tokens=[4]), [1 / 6, 0]),
    "a sample of the padding that has an id counts": (
        PART | bridge([[0, 3, 4]], tokens=[3], prompt_ids=[[1, 2]]),
        [1 / 6, 0],
    ),
    # In one axis as in two.
    **{
        f"a repeated end is fill, and ids say that it is none: {key}, {len(ids)} ids": (
            {"loss_mask": [[1] * 12], key: [0, 5, 12, 12, 12], "prompt_ids": ids},
            found,
        )
        for key in ("cu_seqlens", "cu_seqlens_q")
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
UNKNOWN, ORDER = "the batch has the offsets {}, and which", "{}.* start at 0 and do not decrease"
TWO = {"loss_mask": [[1] * 4] * 2}
ONE = {"loss_mask": [[1] * 4]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "packs that end early": (
        TWO | packs([[0, 3], [0, 4]]),
        "does not end at the length 4 of every pack",
    ),
    "padding of several packs": (
        TWO | bridge([[0, 3, 4], [0, 3, 4]], tokens=[3, 3]),
        "'cu_seqlens_q' does not end at the length 4 of every",
    ),
    "one pack of places for two rows": (
        TWO | packs([[0, 4], [0, 4]], [[0, 4]]),
        "key 'cu_seqlens_padded'.*row for each row of the mask",
    ),
    "one pack for two rows": (TWO | packs([[0, 3]]), "one such row for each row of the mask"),
    "two packs for one row": (
        ONE | bridge([[0, 4], [0, 4]]),
        r"'cu_seqlens_q' is .* of shape \(2, 2\) beside a loss_mask of shape \(1, 4\)",
    ),
    "names of both": (
        ONE | packs([0, 4]) | bridge([0, 4]),
        UNKNOWN.format("cu_seqlens and cu_seqlens_q"),
    ),
    "places without samples": (
        ONE | bridge(None, [0, 4]),
        UNKNOWN.format("cu_seqlens_q_padded"),
    ),
    # Of Megatron-Bridge 0.3: padded places, real lengths, and how many are no fill.
    "real lengths alone": (
        ONE | {"cu_seqlens_unpadded": [0, 4]},
        UNKNOWN.format("cu_seqlens_unpadded"),
    ),
    "real lengths beside places": (
        ONE | packs([0, 4], cu_seqlens_unpadded=[0, 3]),
        UNKNOWN.format("cu_seqlens and cu_seqlens_unpadded") + ".*" + ALL_FORMS,
    ),
    "how many are no fill": (
        ONE | packs([[0, 2, 4, -1]], cu_seqlens_argmin=[[3]]),
        UNKNOWN.format("cu_seqlens and cu_seqlens_argmin"),
    ),
    "fill of -1": (ONE | packs([[0, 2, 4, -1, -1]]), ORDER.format(r"\[0, 2, 4, -1\]")),
    "decreasing": (ONE | bridge([0, 3, 2]), ORDER.format(r"\[0, 3, 2\]")),
    "not from 0": (ONE | bridge([1, 4]), ORDER.format(r"\[1, 4\]")),
    "fractions": (ONE | bridge([0.0, 4.0]), "cu_seqlens is .*float32.*int32 or int64"),
    "fewer places": (
        ONE | bridge([0, 1, 3], [0, 4]),
        r"cu_seqlens_padded is .* of shape \(2,\); .* as many as in cu_seqlens",
    ),
    "no tensors": (ONE | bridge((0, 4)), "'cu_seqlens_q' is a tuple beside a loss_mask"),
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
