"""Batches as data loaders collate them and scripts use them; and drawn ahead: none is lost."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_loss_agg import AggregationError, LossAggregation, Microbatch, StepPlan, Term
from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.mcore import Prefetch, read_batch
from megatron_loss_agg.mcore.batches import reader_for  # for levels of names of one's own
from tests.core.meaning import aggregation


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
    "repeated ends": (packs("1111", [[0, 3, 4, 4, 4]]), [1 / 6, 1 / 2]),
    "several packs": (packs("1111 1111", [[0, 3, 4, 4], [0, 4, 4, 4]]), [1 / 9, 1 / 3, 1 / 12]),
    # The real ones are filled with their own end, or like the padded ones with the pack's length.
    "own ends": (packs("1110111000", [[0, 3, 6, 6]], [[0, 4, 10, 10]]), [1 / 6, 1 / 6]),
    "ends of places": (packs("1110111000", [[0, 3, 6, 10]], [[0, 4, 10, 10]]), [1 / 6, 1 / 6]),
    "padded offsets alone": (packs("1111", None, [[0, 3, 4]]), [1 / 6, 1 / 2]),
    # A microbatch that only pads a rank, whose padded offsets tell the model that there is one.
    "no sample": (packs("00000000", [[0]], [[0, 8]]), []),
    "no sample twice": (packs("00000000", [[0, 0]], [[0, 8]]), []),
    # An empty sample counts if it has an id or a place, also where it repeats the end.
    "an id": (packs("1111", [[0, 4, 4]], prompt_ids=[[1, 2]]), [1 / 8, 0]),
    "a place": (packs("11110000", [[0, 4, 4]], [[0, 4, 8]]), [1 / 8, 0]),
    "ids of all": (packs("1" * 12, [0, 5, 12, 12], prompt_ids=[1, 2]), [1 / 10, 1 / 14]),
    # Bridge adds one sample for the pack's padding, which is none.
    "padding": (bridge(FILLED, [[0, 3, 5, 8]], None, [5]), [1 / 6, 1 / 4]),
    "repeated padding": (bridge(FILLED, [[0, 3, 5, 8, 8, 8]], None, [5]), [1 / 6, 1 / 4]),
    "packed in a batch": (bridge(FILLED, [0, 3, 5], None, [3, 2]), [1 / 6, 1 / 4]),
    "places": (bridge(PADDED, [[0, 3, 5, 5, 5]], [[0, 4, 8, 12, 12]], [8]), [1 / 6, 1 / 4]),
    "empty, then padding": (bridge("1110", [[0, 3, 3, 4]], None, [3]), [1 / 6, 0]),
    "an empty place": (bridge("111" + "0" * 9, [[0, 3, 3, 3]], [[0, 4, 8, 12]], [8]), [1 / 6, 0]),
    "empty places": (bridge("00000000", [[0, 0, 0]], [[0, 4, 8]], [8]), [0, 0]),
    "a full pack": (bridge("1110", [[0, 3, 4]], None, [4]), [1 / 6, 0]),
    "padding with an id": (bridge("1110", [[0, 3, 4]], None, [3], prompt_ids=[[1, 2]]), [1 / 6, 0]),
    "ends with ids": (bridge("11111", [0, 5, 5, 5], prompt_ids=[1, 2, 3]), [1 / 15, 0, 0]),
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


def test_a_flat_pack_may_have_its_offsets_in_a_row() -> None:
    batch = {"loss_mask": torch.ones(4), "cu_seqlens": torch.tensor([[0, 3, 4]])}
    assert read_batch(batch).cu_seqlens.tolist() == [0, 3, 4]


ALL_FORMS = (
    "^the offsets of a batch must be exactly one of cu_seqlens or cu_seqlens_padded or cu_seqlens with "
    "cu_seqlens_padded or cu_seqlens_q or cu_seqlens_q with cu_seqlens_q_padded, got {}, where"
)
OFFSETS: list[tuple[dict[str, Any], str]] = [
    (
        packs("1111 1111", [[0, 3], [0, 4]]),
        "^the batch key 'cu_seqlens' must end at the length 4 of",
    ),
    (
        packs("11 11", [[0, 2], [0, 2]], [[0, 2]]),
        "^the batch key 'cu_seqlens_padded' must be .*, or one such row for each row of the mask",
    ),
    (
        bridge("1111", [[0, 4], [0, 4]]),
        r"^the batch key .* the mask of shape \(1, 4\), got .* of shape \(2, 2\). Correct it",
    ),
    (packs("1", [0, 1]) | bridge("1", [0, 1]), ALL_FORMS.format("cu_seqlens and cu_seqlens_q")),
    (bridge("1111", None, [0, 4]), ALL_FORMS.format("cu_seqlens_q_padded")),
    # Of Megatron-Bridge 0.3: padded places, real lengths, and how many are no fill.
    (
        packs("1111", [0, 4], cu_seqlens_unpadded=[0, 3]),
        ALL_FORMS.format("cu_seqlens and cu_seqlens_unpadded"),
    ),
    (
        packs("1111", [[0, 2, 4, -1, -1]]),
        r"^offsets must start at 0, never decrease, .*got cu_seqlens=\[0, 2, 4, -1\]",
    ),
    (bridge("1111", (0, 4)), "^the batch key 'cu_seqlens_q' must be .*, got a tuple. Correct it"),
]
TOKENS, IDS = torch.ones(2, 8), torch.arange(2)
WITHOUT_MASK: list[tuple[Any, str]] = [
    (TOKENS, "^a batch must be a mapping with the tensor 'loss_mask', got Tensor. Add that key"),
    (
        {"image": TOKENS},
        r"^a batch must be .* 'loss_mask', got \['image'\]. .*--loss-aggregation-batch",
    ),
    (
        {"loss_mask": [1, 1]},
        r"^a batch must be .* the tensor 'loss_mask', got \['loss_mask'\]. Add",
    ),
]
MISSPELT = {"": Term(aggregation("nested_mean", levels=("prompt", "sesion", "sample")))}
OF_SESSIONS = {"loss_mask": TOKENS, "session_ids": IDS, "position_ids": IDS.repeat(8, 1).T}
OF_SESSIONS["prompt_id"] = IDS
REFUSED: list[tuple[Callable[[Any], Any], Any, str]] = [
    *((plan, *row) for row in OFFSETS),
    *((read_batch, *row) for row in WITHOUT_MASK),
    # A misspelt key is among those that there are.
    (
        reader_for(read_batch, MISSPELT),
        OF_SESSIONS,
        r"^a batch must have 'prompt_ids' and 'sesion_ids', .*, got the keys \['loss_mask', "
        r"'position_ids', 'prompt_id', 'session_ids'\]. Add the batch key 'prompt_ids' \(int64 "
        r"\[samples\], or Megatron's --sft with --loss-aggregation-sft-prompt-field FIELD\) and the "
        r"batch key 'sesion_ids' \(int64 \[samples\]\), or choose .*--loss-aggregation-levels",
    ),
]


@pytest.mark.parametrize("read, batch, error", REFUSED)
def test_a_batch_that_cannot_be_read_is_refused(read: Any, batch: Any, error: str) -> None:
    with pytest.raises(AggregationError, match=error):
        read(batch)


def test_ids_of_tokens_are_no_levels() -> None:
    terms = {"": Term(aggregation("nested_mean", levels=("prompt", "position", "sample")))}
    with pytest.raises(OptionError, match=r"^levels must have ids of samples, got \['position'\]"):
        reader_for(read_batch, terms)


TWO_PACKS = {"loss_mask": torch.ones(2, 4), "dataset_id": torch.tensor([[5], [6]])}
# A batch of a blended data set, and the data set of each of its samples.
BLENDED = [
    ({"loss_mask": torch.ones(3, 4), "dataset_id": torch.tensor([1, 0, 1]).short()}, [1, 0, 1]),
    # Two samples each, and fill in the first.
    (TWO_PACKS | {"cu_seqlens": torch.tensor([[0, 3, 4, 4], [0, 1, 4, 4]])}, [5, 5, 6, 6]),
    # The last sample is empty and starts where the last pack ends.
    (
        TWO_PACKS
        | {"cu_seqlens": torch.tensor([0, 4, 8, 8]), "prompt_ids": torch.tensor([0, 0, 1])},
        [5, 6, 6],
    ),
    # Padded inside the first pack, so that the second one starts at 4 and not at 2.
    (
        TWO_PACKS
        | {
            "cu_seqlens": torch.tensor([0, 1, 2, 5, 6]),
            "cu_seqlens_padded": torch.tensor([0, 2, 4, 7, 8]),
        },
        [5, 5, 6, 6],
    ),
]


@pytest.mark.parametrize(("batch", "ids"), BLENDED)
def test_a_blended_data_set_has_one_id_for_each_row_or_pack(batch: Any, ids: list[int]) -> None:
    assert read_batch(batch).dataset_ids.tolist() == ids
    of_samples = torch.arange(len(ids))
    assert torch.equal(read_batch({**batch, "dataset_ids": of_samples}).dataset_ids, of_samples)
    text = "^the batch key 'dataset_id' must have an integer for each of the . rows .*, got a"
    with pytest.raises(DataError, match=text):
        read_batch({**batch, "dataset_id": torch.arange(len(batch["loss_mask"]) + 1)})
    # A name is no id. Modes by data set then ask for one.
    named = read_batch({**batch, "dataset_id": "wikipedia"})
    assert named.dataset_ids is None
    with pytest.raises(DataError, match="dataset_ids"):
        StepPlan.build(aggregation("dataset_mean"), [named])


def test_keys_of_ids_are_those_of_the_levels() -> None:
    levels = {"loss": Term(aggregation("nested_mean", levels=("task", "session", "sample")))}
    named = {f"{unit}_ids": torch.tensor([[i, i]]) for i, unit in enumerate(("task", "session"))}
    batch = {"loss_mask": torch.ones(2, 1), "dataset_id": torch.tensor([5, 6]), **named}
    batch["turn_ids"] = torch.tensor([2, 2])
    microbatch = reader_for(read_batch, levels)(batch)
    ids = {unit: x.tolist() for unit, x in microbatch.ids.items()}
    assert ids == {"task": [0, 0], "session": [1, 1]}
    assert microbatch.dataset_ids.tolist() == [5, 6]
    assert read_batch(batch).ids == {}
    assert read_batch(batch, units=["turn"]).ids.keys() == {"turn"}
    # For a custom function, which may need others.
    asked = functools.partial(read_batch, units=["turn"])
    assert reader_for(asked, levels)(batch).ids.keys() == {"task", "session", "turn"}
    # A dummy microbatch has no samples; and evaluations may lack data sets.
    dummy = {"loss_mask": torch.zeros(1, 4), "cu_seqlens": torch.zeros(1, 2, dtype=torch.int64)}
    assert reader_for(read_batch, levels)(dummy).num_samples == 0
    by_dataset = {"loss": Term(aggregation("dataset_mean"))}
    assert reader_for(read_batch, by_dataset)({"loss_mask": TOKENS}).dataset_ids is None
    # A reader of one's own reads what it wants.
    assert reader_for(len, levels) is len


def test_a_copy_has_tensors_of_its_own() -> None:
    mask, ids, starts = torch.ones(2, 1), torch.tensor([7, 9]), torch.tensor([0, 3])
    pack = Microbatch(torch.ones(3), starts)
    copy = Microbatch(mask, ids={"session": ids}, sequences=pack).copied()
    for x in (mask, ids, starts, pack.loss_mask):
        x.zero_()  # by a loader that fills the same batch again
    assert copy.ids["session"].tolist() == [7, 9] and copy.loss_mask.all()
    assert copy.sequences.cu_seqlens.tolist() == [0, 3] and copy.sequences.loss_mask.all()


PATIENCE = 30.0  # seconds until a test that would hang fails


def test_an_exception_surfaces_at_its_batch() -> None:
    def source() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("disk")

    prefetch = Prefetch(source())
    for _ in range(3):
        prefetch.fetch(4)
    assert [next(prefetch), next(prefetch)] == [1, 2]
    with pytest.raises(OSError, match="disk"):
        next(prefetch)
    with pytest.raises(StopIteration):  # what the source itself says from then on
        next(prefetch)


def test_fetching_does_not_wait_for_the_source() -> None:
    may_draw = threading.Event()

    def source() -> Iterator[int]:
        assert may_draw.wait(PATIENCE)
        yield 1

    prefetch = Prefetch(source())
    prefetch.fetch(1)
    may_draw.set()  # reached, though the source has not drawn
    assert next(prefetch) == 1


class Saving:
    """A loader of epochs that can be resumed: its state is live, as some loaders return theirs."""

    def __init__(self, position: int = 0) -> None:
        self.state = {"position": position}

    def __next__(self) -> int:
        if self.state["position"] == 9:
            self.state["position"] = 0
            raise StopIteration
        self.state["position"] += 1
        return self.state["position"]

    def state_dict(self) -> dict[str, int]:
        return self.state


class Unsaved(Saving):
    def state_dict(self) -> dict[str, int]:
        raise NotImplementedError


@pytest.mark.parametrize("fetched", [0, 1, 3, 5])
def test_a_run_resumed_at_the_saved_position_reads_on_where_the_reader_was(fetched: int) -> None:
    prefetch = Prefetch(Saving())
    got = []
    for taken in (2, 0, 4, 2):
        prefetch.fetch(fetched)
        got += [next(prefetch) for _ in range(taken)]
        assert next(Saving(**prefetch.state_dict())) == len(got) + 1
    prefetch.fetch(fetched)
    assert [*got, next(prefetch)] == list(range(1, 10))
    prefetch.fetch(0)
    assert prefetch.state_dict() == {"position": 9}  # before the end of data, which is unread
    with pytest.raises(StopIteration):
        next(prefetch)


def test_a_position_has_the_name_of_the_source_and_matters_only_if_it_is_asked_for() -> None:
    names = ("state_dict", "save_state", "load_state_dict")  # the last would drop what was drawn
    assert [hasattr(Prefetch(Saving()), name) for name in names] == [True, False, False]
    assert not hasattr(Prefetch(iter([])), "state_dict")
    prefetch = Prefetch(Unsaved())
    prefetch.fetch(2)
    with pytest.raises(NotImplementedError):
        prefetch.state_dict()
    assert next(prefetch) == 1
