"""From the batches of a data iterator to the microbatches of a step."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, Term, Unit, units_by_id
from megatron_loss_agg.errors import AggregationError, DataError, HostError, OptionError
from megatron_loss_agg.microbatch import (
    BY_SAMPLE,
    Microbatch,
    MicrobatchOfTerms,
    holds_integers,
    term_microbatches,
)
from megatron_loss_agg.tensors import described

_T = TypeVar("_T")
ReadBatch = Callable[[Any], MicrobatchOfTerms]
"""One batch -> its microbatch."""
ReadStep = Callable[[Any, int], Sequence[MicrobatchOfTerms]]
"""The schedule's data iterator and number of microbatches -> all microbatches of the call."""

HOW_TO_READ = (
    "give a function batch -> Microbatch (--loss-aggregation-batch module:name, or in a loop of "
    "your own LossHook(read_batch=...))"
)

NO_DATASET = -1
"""The id of samples of an evaluation that reads one data set, without ids."""

MODEL_INPUTS = ("labels", "tokens", "input_ids")
"""Batch keys of integers by token that the model is called with. Positions tell no tokens apart."""

_TOKEN_IDS = ("input_ids", "position_ids")
"""Batch keys with an element for each token, despite their names."""

_OFFSET_FORMS = (
    {"cu_seqlens"},
    {"cu_seqlens_padded"},
    {"cu_seqlens", "cu_seqlens_padded"},
    {"cu_seqlens_q"},
    {"cu_seqlens_q", "cu_seqlens_q_padded"},
)
_OFFSET_KEYS = (
    *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_padded", "cu_seqlens_q_padded"),
    *("cu_seqlens_unpadded", "cu_seqlens_argmin"),
)
"""Real ones first. The last two are of Megatron-Bridge before 0.6, with another meaning."""


class DrawnBatches:
    """The batches of one call, drawn from ``source`` before the forward steps ask for them.

    They wait for their forward passes while later ones are drawn, so ``source`` must not fill the
    same memory for each.
    """

    def __init__(self, source: Any, number: int) -> None:
        if not hasattr(source, "__next__"):
            raise HostError(
                "data_iterator must be an iterator on tensor-parallel rank 0 of the last pipeline "
                f"stage (in a list, one for each model chunk), got a {type(source).__name__}. Give "
                "iter(loader), LossHook(read_step=...) or hook.step(...); in an evaluation of a stock "
                "script, give data to evaluate on, or --eval-iters 0."
            )
        self._source = source
        self._number = number
        self._batches: deque[Any] = deque()

    def draw(self) -> Any:
        """Draw the next of the call's batches, which a forward step will take."""
        try:
            batch = next(self._source)
        except StopIteration:
            if not self._batches:
                raise  # the end of the data, which a loop may wait for
            raise DataError(
                f"the data iterator must give {self._number} batches for a call, got "
                f"{len(self._batches)}. Leave out the last step, or lower its num_microbatches."
            ) from None
        self._batches.append(batch)
        return batch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._batches:
            raise self._wrong_number("a request for more")
        return self._batches.popleft()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a data iterator that the hook draws ahead has no {name}. Call next(data_iterator) alone, "
            "or give LossHook(read_step=...)."
        )

    def check_taken(self) -> None:
        """Raise DataError unless the forward steps have taken all batches."""
        if self._batches:
            raise self._wrong_number(f"{len(self._batches)} left")

    def _wrong_number(self, got: str) -> DataError:
        return DataError(
            f"the forward steps must take one batch for each of the {self._number} microbatches, got "
            f"{got}. Call next(data_iterator) once each, or give LossHook(read_step=...)."
        )


class DrawnTensors:
    """The masks, offsets and ids of drawn batches, with copies from before the next one was drawn."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def note(self, microbatch: MicrobatchOfTerms) -> None:
        tensors = [x for term in term_microbatches(microbatch) for x in term.tensors()]
        self._pairs += [(x, _bytes(x)) for x in tensors]

    def check_unchanged(self) -> None:
        """Raise DataError if a later batch was written into the memory of an earlier one.

        No other check sees it: the loss function gets the mask that is counted, the last one.
        """
        if not all(torch.equal(_bytes(x), copy) for x, copy in self._pairs):
            raise DataError(
                "a batch must stay as it was drawn until its forward pass, got masks, offsets or ids "
                "that changed while later batches were drawn. Give new tensors in each batch, or clone "
                "them in the data iterator."
            )


def _bytes(x: Tensor) -> Tensor:
    """A copy of ``x`` as integers, in which NaN equals itself."""
    return x.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def read_now(read: Callable[[], _T]) -> Callable[[], _T]:
    """Call ``read`` at once; return a function with its result.

    For loaders that communicate in ``next``, as under dynamic context parallelism. If one of them
    raises, the other ranks wait inside theirs: the exception must end this process before it enters
    a collective of ours. Errors of our own are raised by the returned function, for all ranks to
    learn of them.
    """
    refusal: AggregationError
    try:
        result = read()
    except AggregationError as error:
        refusal = error
    else:
        return lambda: result

    def refuse() -> _T:
        raise refusal

    return refuse


def is_by_sample(key: str) -> bool:
    """Whether a batch key may have a value for each sample."""
    return key in BY_SAMPLE or (key.endswith("_ids") and key not in _TOKEN_IDS)


def read_batch(batch: Any, *, units: Sequence[Unit] = ()) -> Microbatch:
    """The microbatch that a batch of a Megatron data loader describes.

    Reads the keys ``loss_mask`` (whole, before context parallelism) and, where present,
    ``prompt_ids``, ``rollout_ids``, ``dataset_ids``, ``rejected`` and ``sample_weights``; all may
    have a leading axis from the data loader's collation. Without ``dataset_ids``, the key
    ``dataset_id`` of Megatron's blended data sets: integers [batch], one for each row, or for all
    samples of each pack. ``labels``, ``tokens`` and ``input_ids`` become the ``model_inputs``.
    Offsets of packed samples, real and padded, are read from these keys:

    - ``cu_seqlens`` and ``cu_seqlens_padded``, or one of them: Megatron-LM;
    - ``cu_seqlens_q`` and, if padded, ``cu_seqlens_q_padded``: Megatron-Bridge 0.6.

    Several packs in one batch are joined into one long pack, as Megatron joins them before it calls
    the model. Trailing offsets that repeat the last one (the last padded one, if given) are filler,
    unless the batch has ids for that many samples. Megatron-Bridge adds a sample for the padding at
    the end of a pack; ``token_count`` tells it from a real one, and it is left out. A dummy
    microbatch has ``cu_seqlens`` of 0 alone and no samples, whatever its ``cu_seqlens_padded``.

    Args:
        units: whose keys ``<unit>_ids`` a batch with samples must have; of other names than the
            fields of `Microbatch` they are read for ``ids``.

    Raises:
        DataError: a key is missing, or has a wrong type or shape.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("loss_mask"), Tensor):
        raise DataError(
            f"a batch must be a mapping with the tensor 'loss_mask', got {keys_of(batch)}. Add that key "
            "(a mask that the model makes in its forward pass, as LLaVA's, is not supported), or "
            f"{HOW_TO_READ}."
        )
    whole_mask = batch["loss_mask"]
    by_sample: dict[str, Any] = {
        name: _vector(batch[name]) for name in BY_SAMPLE if batch.get(name) is not None
    }
    ids = {
        unit: _vector(batch[f"{unit}_ids"])
        for unit in units
        if unit not in BY_ID and batch.get(f"{unit}_ids") is not None
    }
    sample_counts = {len(x) for x in (*by_sample.values(), *ids.values()) if isinstance(x, Sized)}
    offsets: dict[str, Any] = pack_offsets(batch, whole_mask, sample_counts)
    if "dataset_ids" not in by_sample and holds_integers(batch.get("dataset_id")):
        by_sample["dataset_ids"] = _dataset_ids(batch["dataset_id"], whole_mask, offsets)
    mask = whole_mask
    if offsets and mask.dim() == 2:
        mask = mask.reshape(1, -1)
    inputs = model_inputs_of(batch, mask)
    microbatch = Microbatch(mask, ids=ids, model_inputs=inputs, **offsets, **by_sample)
    missing = [f"{unit}_ids" for unit in units if microbatch.ids_of(unit) is None]
    if missing and microbatch.num_samples:
        raise DataError(
            f"a batch must have {' and '.join(map(repr, missing))}, an id for each sample, got the keys "
            f"{keys_of(batch)}. Add that key (for Megatron's --sft: --loss-aggregation-sft-prompt-field "
            "FIELD gives prompt_ids), or choose another mode or levels (--loss-aggregation, "
            "--loss-aggregation-levels)."
        )
    return microbatch


def keys_of(batch: Any) -> str:
    return str(sorted(map(str, batch))) if isinstance(batch, Mapping) else type(batch).__name__


def reader_for(read: ReadBatch, terms: Mapping[str, Term]) -> ReadBatch:
    """``read``; if it is `read_batch`, with the ``units`` whose ids ``terms`` need.

    Data sets are left out, since batches of evaluations may lack their ids: see `with_dataset_ids`.

    Raises:
        OptionError: a unit whose key has an id for each token.
    """
    if getattr(read, "func", read) is not read_batch:
        return read
    reader_units = getattr(read, "keywords", {}).get("units", ())  # for a custom function
    units = {*reader_units, *units_by_id(terms)} - {"dataset"}
    if token_units := sorted(units & {"input", "position"}):
        raise OptionError(
            f"levels must have ids of samples, got {token_units}, whose batch keys are of tokens. "
            "Choose other names (--loss-aggregation-levels), or give a reader of your own "
            "(--loss-aggregation-batch)."
        )
    return functools.partial(read_batch, units=sorted(units)) if units else read


def with_dataset_ids(
    terms: Mapping[str, Term], microbatches: list[MicrobatchOfTerms]
) -> list[MicrobatchOfTerms]:
    """The microbatches of an evaluation, with ids of data sets if ``terms`` group by them.

    Theirs, or `NO_DATASET` for all samples if none has any: validation sets are often read one by
    one, and then lack ids.
    """
    if "dataset" not in units_by_id(terms):
        return microbatches
    if any(x.dataset_ids is not None for m in microbatches for x in term_microbatches(m)):
        return microbatches

    def changed(x: Microbatch) -> Microbatch:
        return replace(x, dataset_ids=torch.full((x.num_samples,), NO_DATASET))

    return [changed_terms(changed, m) for m in microbatches]


def changed_terms(
    change: Callable[[Microbatch], Microbatch], microbatch: MicrobatchOfTerms
) -> MicrobatchOfTerms:
    if isinstance(microbatch, Mapping):
        return {name: change(x) for name, x in microbatch.items()}
    return change(microbatch)


def model_inputs_of(batch: Any, mask: Tensor) -> list[Tensor]:
    """The integer tensors of the batch with an element for each token."""
    if not isinstance(batch, Mapping):
        return []
    tensors = [batch.get(name) for name in MODEL_INPUTS]
    return [x for x in tensors if holds_integers(x) and x.numel() == mask.numel()]


def pack_offsets(
    batch: Mapping[str, Any], mask: Tensor, sample_counts: Collection[int]
) -> dict[str, Tensor]:
    """``cu_seqlens`` and ``cu_seqlens_padded`` of `Microbatch`; empty for rows.

    Args:
        sample_counts: the numbers of samples that the batch has ids for.
    """
    offsets = {key: batch[key] for key in _OFFSET_KEYS if batch.get(key) is not None}
    if not offsets:
        return {}
    if set(offsets) not in _OFFSET_FORMS:
        forms = " or ".join(" with ".join(sorted(form)) for form in _OFFSET_FORMS)
        raise DataError(
            f"the offsets of a batch must be exactly one of {forms}, got {' and '.join(offsets)}, of "
            "which real and padded ones cannot be told apart. Rename or drop a key."
        )
    rows = [_offset_rows(key, x, mask) for key, x in offsets.items()]
    real, padded = rows[0], rows[-1]
    is_dummy = "cu_seqlens" in offsets and not any(sample_counts) and not real.any()
    if is_dummy:
        return {"cu_seqlens": real[0, :1]}  # its padding is no sample
    num_fillers = _numbers_of_fillers(batch, padded, sample_counts)
    joined = [_joined_packs(k, x, num_fillers, mask) for k, x in zip(offsets, rows, strict=True)]
    return dict(zip(("cu_seqlens", "cu_seqlens_padded"), joined, strict=False))


def _numbers_of_fillers(
    batch: Mapping[str, Any], padded: Tensor, sample_counts: Collection[int]
) -> list[int]:
    """By pack, how many offsets at its end are of no sample.

    A repeated last real offset is an empty sample or filler. Only filler repeats the last padded
    offset, too.
    """
    if len(padded) == 1 and padded.shape[1] - 1 in sample_counts:
        return [0]
    fillers = []
    for offsets in padded:
        _, run_lengths = offsets.unique_consecutive(return_counts=True)
        fillers.append(int(run_lengths[-1:].sum()) - 1)
    counts, bridge_offsets = batch.get("token_count"), batch.get("cu_seqlens_q")
    if counts is not None and bridge_offsets is not None and bridge_offsets.dim() == 2:
        # A sample of Megatron-Bridge's packs that begins where the tokens end is padding.
        beyond = [int((row > n).sum()) for row, n in zip(padded, counts, strict=True)]
        fillers = [max(pair) for pair in zip(fillers, beyond, strict=True)]
    return fillers


def _vector(x: Any) -> Any:
    return x.reshape(-1) if isinstance(x, Tensor) else x


def _dataset_ids(dataset_id: Tensor, mask: Tensor, offsets: Mapping[str, Tensor]) -> Tensor:
    """int64 [samples]: the data set of each sample's row, or of each sample's pack."""
    rows, length = mask.shape if mask.dim() == 2 else (1, mask.numel())
    if dataset_id.numel() != rows:
        raise DataError(
            f"the batch key 'dataset_id' must have an integer for each of the {rows} rows of "
            f"loss_mask, got {described(dataset_id)}. Correct it."
        )
    dataset_of_row = dataset_id.reshape(-1).long()
    if not offsets:
        return dataset_of_row
    starts = offsets.get("cu_seqlens_padded", offsets["cu_seqlens"])[:-1].to(dataset_of_row)
    # A sample without tokens may start where the last pack ends.
    return dataset_of_row[(starts // length).clamp(max=rows - 1)]


def _offset_rows(key: str, offsets: Any, mask: Tensor) -> Tensor:
    """[packs, samples + 1]; a vector is one pack, or several that are joined already."""
    packs = mask.shape[0] if mask.dim() == 2 else 1
    if isinstance(offsets, Tensor) and offsets.dim() == 1:
        return offsets.unsqueeze(0)
    if isinstance(offsets, Tensor) and offsets.dim() == 2 and offsets.shape[0] == packs:
        return offsets
    raise DataError(
        f"the batch key {key!r} must be [samples + 1], or one such row for each row of the mask of "
        f"shape {tuple(mask.shape)}, got {described(offsets)}. Correct it."
    )


def _joined_packs(key: str, rows: Tensor, fillers: Sequence[int], mask: Tensor) -> Tensor:
    """Offsets [samples + 1] of one pack, from rows without the ``fillers`` at their ends."""
    packs = [row[: row.numel() - n] for row, n in zip(rows, fillers, strict=True)]
    if len(packs) == 1:
        return packs[0]
    length = mask.shape[1]
    if any(int(pack[-1]) != length for pack in packs):
        raise DataError(
            f"the batch key {key!r} must end at the length {length} of every pack where several packs "
            "are joined to one, got other ends. Let the last sample reach to the pack's end."
        )
    return torch.cat([packs[0][:1], *(pack[1:] + i * length for i, pack in enumerate(packs))])
