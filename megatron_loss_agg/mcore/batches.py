"""From the batches of a data iterator to the microbatches of a step."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, Term, Unit, units_by_id
from megatron_loss_agg.errors import DataError, HostError, OptionError
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.microbatch import BY_SAMPLE, Microbatch, MicrobatchOfTerms, holds_integers
from megatron_loss_agg.tensors import described

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
"""Batch keys of integers by token, with which the model is called. Positions tell no tokens apart."""

_IDS_OF_TOKENS = ("input_ids", "position_ids")
"""Batch keys with an element for each token, in spite of their name."""

_FORMS_OF_OFFSETS = (
    {"cu_seqlens"},
    {"cu_seqlens_padded"},
    {"cu_seqlens", "cu_seqlens_padded"},
    {"cu_seqlens_q"},
    {"cu_seqlens_q", "cu_seqlens_q_padded"},
)
_KEYS_OF_OFFSETS = (
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
            raise DataError(
                f"the forward steps must take one batch for each of the {self._number} microbatches, "
                "got a request for more. Call next(data_iterator) once each, or give "
                "LossHook(read_step=...)."
            )
        return self._batches.popleft()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a data iterator that the hook draws ahead has no {name}. Call next(data_iterator) alone, "
            "or give LossHook(read_step=...)."
        )

    def check_taken(self) -> None:
        """Raise DataError unless the forward steps have taken all batches."""
        if self._batches:
            raise DataError(
                f"the forward steps must take one batch for each of the {self._number} microbatches, "
                f"got {len(self._batches)} left. Call next(data_iterator) once each, or give "
                "LossHook(read_step=...)."
            )


def batches_of(call: Call, item: Any) -> Sequence[Any]:
    """The batches of this rank in an item of the data iterator, one for each loss."""
    if not call.draws_samples:
        return [item]
    assert call.groups.dp_cp is not None
    return dealt_batches(item, dist.get_rank(call.groups.dp_cp))


def with_holders(call: Call, microbatch: MicrobatchOfTerms, batch: Any) -> MicrobatchOfTerms:
    """``microbatch``; under dynamic context parallelism with the ranks that hold the batch.

    Raises:
        DataError: the batch does not say how many.
    """
    if call.groups.dp_cp is None:
        return microbatch
    if isinstance(microbatch, Mapping):
        of_terms = {name: with_holders(call, x, batch) for name, x in microbatch.items()}
        return cast(MicrobatchOfTerms, of_terms)
    of_batch = batch if isinstance(batch, Mapping) else {}
    size, gid = of_batch.get("local_cp_size"), of_batch.get("gid")
    if microbatch.local_cp_size is not None:  # the reader says it
        size, gid = microbatch.local_cp_size, microbatch.gid
    if size is None:
        raise DataError(
            "a batch under dynamic context parallelism must have the key 'local_cp_size', as those of "
            f"Megatron's schedulers have, got {_keys(batch)}. Add it, or let the reader of batches give "
            "Microbatch(local_cp_size=)."
        )
    fields: dict[str, Any] = {"local_cp_size": int(size), "gid": None if gid is None else int(gid)}
    if microbatch.sequences is not None:
        fields["sequences"] = replace(microbatch.sequences, local_cp_size=int(size))
    return replace(microbatch, **fields)


def dealt_batches(item: Any, rank: int) -> list[dict[str, Any]]:
    """The samples that Megatron's hybrid schedule deals to ``rank``, in its order: a batch each.

    Args:
        item: of Megatron's ``HybridCPDataLoaderWrapper``: (sample by gid; by group of samples and
            rank, its gids).
    """
    samples, groups = item
    ranks_of_all = len(groups[0])
    # Megatron has groups of these sizes.
    sizes = {1, ranks_of_all, *(2**i for i in range(1, int(math.log2(ranks_of_all))))}
    batches = []
    for ranks in groups:
        holders: dict[int, list[int]] = {}
        for holder, gids in enumerate(ranks):
            for gid in gids:
                holders.setdefault(gid, []).append(holder)
        for of_sample in holders.values():
            size, first = len(of_sample), of_sample[0]
            are_neighbours = of_sample == [*range(first, first + size)]
            if not are_neighbours or first % size or size not in sizes:
                raise HostError(
                    "a sample must be held by all ranks of a group that Megatron has, got ranks "
                    f"{of_sample} for one, on which its hybrid schedule would hang. Change "
                    "--max-seqlen-per-dp-cp-rank, or the batch."
                )
        for gid in ranks[rank]:
            batch = {key: _of_sample(key, x) for key, x in samples[gid].items()}
            batches.append({**batch, "local_cp_size": len(holders[gid]), "gid": int(gid)})
    return batches


def is_by_sample(key: str) -> bool:
    """Whether a batch key may have a value for each sample."""
    return key in BY_SAMPLE or (key.endswith("_ids") and key not in _IDS_OF_TOKENS)


def _of_sample(key: str, value: Any) -> Any:
    """A field of a batch of one sample: [1, tokens], or the one value [1] that all its tokens have.

    In Megatron's samples every field has an element for each token: ids, weights and rejections, too.
    """
    if not isinstance(value, Tensor) or not value.dim():
        return value
    must_be_by_sample = key in (*BY_SAMPLE, "dataset_id")
    values = value.unique() if must_be_by_sample or is_by_sample(key) else None
    if values is None or (len(values) != 1 and not must_be_by_sample):
        return value.reshape(1, -1)
    if len(values) != 1:
        raise DataError(
            f"the batch key {key!r} under hybrid context parallelism must have one value for all tokens "
            f"of a sample, got {values.tolist()[:4]}. Give each of its tokens the sample's value."
        )
    return values


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
            f"a batch must be a mapping with the tensor 'loss_mask', got {_keys(batch)}. Add that key "
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
            f"{_keys(batch)}. Add that key (for Megatron's --sft: --loss-aggregation-sft-prompt-field "
            "FIELD gives prompt_ids), or choose another mode or levels (--loss-aggregation, "
            "--loss-aggregation-levels)."
        )
    return microbatch


def _keys(batch: Any) -> str:
    return str(sorted(map(str, batch))) if isinstance(batch, Mapping) else type(batch).__name__


def reader_for(read: ReadBatch, terms: Mapping[str, Term]) -> ReadBatch:
    """``read``; if it is `read_batch`, with the ``units`` that ``terms`` need ids of.

    But without data sets, of which batches of evaluations may lack ids: see `with_dataset_ids`.

    Raises:
        OptionError: a unit whose key has ids of tokens.
    """
    if getattr(read, "func", read) is not read_batch:
        return read
    units_of_reader = getattr(read, "keywords", {}).get("units", ())  # for a custom function
    units = {*units_of_reader, *units_by_id(terms)} - {"dataset"}
    if of_tokens := sorted(units & {"input", "position"}):
        raise OptionError(
            f"levels must have ids of samples, got {of_tokens}, whose batch keys are of tokens. Choose "
            "other names (--loss-aggregation-levels), or give a reader of your own "
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
    each = [x for m in microbatches for x in (m.values() if isinstance(m, Mapping) else [m])]
    if any(x.dataset_ids is not None for x in each):
        return list(microbatches)
    return [
        {name: _with_one_dataset(x) for name, x in m.items()}
        if isinstance(m, Mapping)
        else _with_one_dataset(m)
        for m in microbatches
    ]


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
        sample_counts: how many samples the batch has ids for.
    """
    offsets = {key: batch[key] for key in _KEYS_OF_OFFSETS if batch.get(key) is not None}
    if not offsets:
        return {}
    if set(offsets) not in _FORMS_OF_OFFSETS:
        forms = " or ".join(" with ".join(sorted(form)) for form in _FORMS_OF_OFFSETS)
        raise DataError(
            f"the offsets of a batch must be exactly one of {forms}, got {' and '.join(offsets)}, of "
            "which real and padded ones cannot be told apart. Rename or drop a key."
        )
    rows = [_rows_of_offsets(key, x, mask) for key, x in offsets.items()]
    real, padded = rows[0], rows[-1]
    is_dummy = "cu_seqlens" in offsets and not any(sample_counts) and not real.any()
    if is_dummy:
        return {"cu_seqlens": real[0, :1]}  # its padding is no sample
    if len(padded) == 1 and padded.shape[1] - 1 in sample_counts:
        fillers = [0]
    else:
        # A repeated last real offset is an empty sample or filler. Only filler repeats the last
        # padded offset, too.
        fillers = [_repetitions_of_last(row) for row in padded]
        counts = batch.get("token_count")
        if counts is not None and "cu_seqlens_q" in offsets and offsets["cu_seqlens_q"].dim() == 2:
            # Packs of Megatron-Bridge's data sets: a sample that begins where the tokens end is
            # padding.
            beyond = [int((row > n).sum()) for row, n in zip(padded, counts, strict=True)]
            fillers = [max(pair) for pair in zip(fillers, beyond, strict=True)]
    joined = [_joined_packs(k, x, fillers, mask) for k, x in zip(offsets, rows, strict=True)]
    return dict(zip(("cu_seqlens", "cu_seqlens_padded"), joined, strict=False))


def _with_one_dataset(microbatch: Microbatch) -> Microbatch:
    return replace(microbatch, dataset_ids=torch.full((microbatch.num_samples,), NO_DATASET))


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


def _rows_of_offsets(key: str, offsets: Any, mask: Tensor) -> Tensor:
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


def _repetitions_of_last(offsets: Tensor) -> int:
    """The number of offsets at the end of a row that repeat the one before them."""
    _, run_lengths = offsets.unique_consecutive(return_counts=True)
    return int(run_lengths[-1:].sum()) - 1


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
