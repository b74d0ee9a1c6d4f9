"""Turns the batches of a data iterator into the microbatches of a step."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, Term, Unit, units_by_id
from megatron_loss_agg.errors import DataError, HostError, OptionError
from megatron_loss_agg.ids import ids_key
from megatron_loss_agg.mcore.packs import OFFSET_KEYS, pack_offsets
from megatron_loss_agg.microbatch import (
    BY_SAMPLE,
    Microbatch,
    TermMicrobatches,
    holds_integers,
)
from megatron_loss_agg.tensors import described

ReadBatch = Callable[[Any], TermMicrobatches]
"""Maps a batch to its microbatch."""
ReadStep = Callable[[Any, int], Sequence[TermMicrobatches]]
"""Maps the schedule's data iterator and number of microbatches to all microbatches of the call."""

HOW_TO_READ = (
    "give a function batch -> Microbatch (--loss-aggregation-batch module:name, or in a loop of "
    "your own LossHook(read_batch=...))"
)

MODEL_INPUTS = ("labels", "tokens", "input_ids")
"""Keys of integers by token that the model is called with, without positions (all share them)."""

_TOKEN_IDS = ("input_ids", "position_ids")
"""Batch keys that end in "_ids" but have an element for each token, not for each sample."""


class DrawnBatches:
    """The batches of one call, drawn from ``source`` before the forward steps take them.

    They wait for their forward passes while later batches are drawn, so ``source`` must not reuse
    the same memory for each batch.
    """

    def __init__(self, source: Any, number: int) -> None:
        check_iterator(source)
        self._source = source
        self._number = number
        self._batches: deque[Any] = deque()

    def draw(self) -> Any:
        """Draw the call's next batch and keep it for a forward step."""
        try:
            batch = next(self._source)
        except StopIteration:
            if not self._batches:
                raise  # the end of the data, as in a loop without the hook
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
            f"a data iterator from which the hook draws ahead has no {name}. Call "
            "next(data_iterator) alone, or give LossHook(read_step=...)."
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


def check_iterator(source: Any) -> None:
    """Raise HostError unless ``source`` is an iterator, on a rank that reads data."""
    if not hasattr(source, "__next__"):
        raise HostError(
            "data_iterator must be an iterator on tensor-parallel rank 0 of the last pipeline "
            f"stage (in a list, one for each model chunk), got a {type(source).__name__}. Give "
            "iter(loader), LossHook(read_step=...) or hook.step(...); in an evaluation of a stock "
            "script, give data to evaluate on, or --eval-iters 0."
        )


def is_by_sample(key: str) -> bool:
    """True if a batch key may have a value for each sample."""
    return key in BY_SAMPLE or (key.endswith("_ids") and key not in _TOKEN_IDS)


def read_batch(batch: Any, *, units: Sequence[Unit] = ()) -> Microbatch:
    """The microbatch for a batch of a Megatron data loader.

    Reads the key ``loss_mask`` (whole, before context parallelism) and, if present, ``prompt_ids``,
    ``rollout_ids``, ``dataset_ids``, ``rejected`` and ``sample_weights``; all may have a leading
    axis from the data loader's collation. If ``dataset_ids`` is missing, reads ``dataset_id``, the
    key of Megatron's blended data sets: integers [batch], one for each row, or one for all samples
    of each pack. ``labels``, ``tokens`` and ``input_ids`` become the ``model_inputs``. Offsets of
    packed samples, real and padded, are read from these keys:

    - ``cu_seqlens`` and ``cu_seqlens_padded``, or one of them: Megatron-LM;
    - ``cu_seqlens_q`` and, if padded, ``cu_seqlens_q_padded``: Megatron-Bridge 0.6.

    Several packs in one batch are joined into one long pack, as Megatron does before it calls the
    model. Trailing offsets that repeat the last one (the last padded one, if any) are filler,
    unless the batch has ids for that many samples. Megatron-Bridge adds a sample for the padding at
    the end of a pack; it begins at ``token_count`` or later and is left out. A dummy microbatch has
    a ``cu_seqlens`` of just 0 and no samples, whatever its ``cu_seqlens_padded``.

    Args:
        units: a batch with samples must have the key ``<unit>_ids`` for each of these. Units
            without a field in `Microbatch` are read into its ``ids``.

    Raises:
        DataError: a key is missing or has a wrong type or shape.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("loss_mask"), Tensor):
        raise DataError(
            f"a batch must be a mapping with the tensor 'loss_mask', got {batch_keys(batch)}. Add "
            "that key (a mask that the model makes in its forward pass, as in LLaVA, is not "
            f"supported), or {HOW_TO_READ}."
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
    offsets: dict[str, Any] = {}
    if any(batch.get(key) is not None for key in OFFSET_KEYS):
        offsets = pack_offsets(batch, whole_mask, sample_counts)
    if "dataset_ids" not in by_sample and holds_integers(batch.get("dataset_id")):
        by_sample["dataset_ids"] = _dataset_ids(batch["dataset_id"], whole_mask, offsets)
    mask = whole_mask
    if offsets and mask.dim() == 2:
        mask = mask.reshape(1, -1)
    inputs = model_inputs_in(batch, mask)
    microbatch = Microbatch(mask, ids=ids, model_inputs=inputs, **offsets, **by_sample)
    missing = [unit for unit in units if microbatch.ids_of(unit) is None]
    if missing and microbatch.num_samples:
        keys = " and ".join(f"'{unit}_ids'" for unit in missing)
        raise DataError(
            f"a batch must have {keys}, an id for each sample, got the keys {batch_keys(batch)}. Add "
            f"{' and '.join(map(ids_key, missing))}, or choose another mode or levels "
            "(--loss-aggregation, --loss-aggregation-levels)."
        )
    return microbatch


def batch_keys(batch: Any) -> str:
    """The keys of a batch in words; its type if it is not a mapping."""
    return str(sorted(map(str, batch))) if isinstance(batch, Mapping) else type(batch).__name__


def reader_for(read: ReadBatch, terms: Mapping[str, Term]) -> ReadBatch:
    """``read``; if it is `read_batch`, with the units that ``terms`` group by.

    Data sets are left out, since evaluation batches may lack their ids: see `with_dataset_ids`.

    Raises:
        OptionError: a unit's key has an id for each token.
    """
    if getattr(read, "func", read) is not read_batch:
        return read
    reader_units = getattr(read, "keywords", {}).get("units", ())  # for a custom function
    units = {*reader_units, *units_by_id(terms)} - {"dataset"}
    if token_units := sorted(units & {"input", "position"}):
        raise OptionError(
            f"levels must have ids of samples, got {token_units}, whose batch keys have one per "
            "token. Choose other names (--loss-aggregation-levels), or give a reader of your own "
            "(--loss-aggregation-batch)."
        )
    return functools.partial(read_batch, units=sorted(units)) if units else read


def changed_terms(
    change: Callable[[Microbatch], Microbatch], microbatch: TermMicrobatches
) -> TermMicrobatches:
    """``change`` applied to the microbatch, or to each term's microbatch."""
    if isinstance(microbatch, Mapping):
        return {name: change(x) for name, x in microbatch.items()}
    return change(microbatch)


def model_inputs_in(batch: Any, mask: Tensor) -> list[Tensor]:
    """The integer tensors of the batch with an element for each token."""
    if not isinstance(batch, Mapping):
        return []
    tensors = [batch.get(name) for name in MODEL_INPUTS]
    return [x for x in tensors if holds_integers(x) and x.numel() == mask.numel()]


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
