"""From the batches of a data iterator to microbatches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, Term, Unit, units_by_id
from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.mcore.reading.late import LateMicrobatch
from megatron_loss_agg.mcore.reading.offsets import pack_offsets
from megatron_loss_agg.microbatch import (
    BY_SAMPLE,
    Microbatch,
    MicrobatchOfTerms,
    for_each_term,
    holds_integers,
    listed,
    of_term,
)
from megatron_loss_agg.tensors import described

ReadBatch = Callable[[Any], MicrobatchOfTerms | LateMicrobatch]
"""One batch -> its microbatch."""
ReadStep = Callable[[Any, int], Sequence[MicrobatchOfTerms]]
"""The schedule's data iterator and number of microbatches -> all microbatches of the call."""

HOW_TO_READ = (
    "give a function batch -> Microbatch (--loss-aggregation-batch module:name, or in a loop of "
    "your own LossHook(read_batch=...))"
)

_TOKEN_IDS = ("labels", "tokens", "input_ids", "position_ids")  # the most telling first


def read_batch(
    batch: Any,
    *,
    dataset_id: bool = False,
    factors: str | None = None,
    units: Sequence[Unit] = (),
) -> Microbatch:
    """The microbatch that a batch of a Megatron data loader describes.

    Reads the keys ``loss_mask`` (whole, before context parallelism) and, where present,
    ``prompt_ids``, ``rollout_ids``, ``dataset_ids``, ``rejected`` and ``sample_weights``; all may
    have a leading axis from the data loader's collation. ``labels``, ``tokens``, ``input_ids`` and
    ``position_ids`` become the ``token_ids``. Offsets of packed samples, real and padded, are read
    from these keys:

    - ``cu_seqlens`` and ``cu_seqlens_padded``, or one of them: Megatron-LM;
    - ``cu_seqlens_q`` and, if padded, ``cu_seqlens_q_padded``: Megatron-Bridge 0.6.

    Several packs in one batch are joined into one long pack, as Megatron joins them before it calls
    the model. Trailing offsets that repeat the last one (the last padded one, if given) are fill,
    unless the batch has ids for that many samples. Megatron-Bridge adds a sample for the padding at
    the end of a pack; ``token_count`` tells it from a real one, and it is left out. A dummy
    microbatch has ``cu_seqlens`` of 0 alone and no samples, whatever its ``cu_seqlens_padded``.

    Args:
        dataset_id: without ``dataset_ids``, read the key ``dataset_id`` of Megatron's blended data
            sets: integers [batch], one for each row, or for all samples of each pack.
        factors: the key of the ``token_factors``, in the shape of the ``loss_mask``.
        units: whose keys ``<unit>_ids`` are read for ``ids``.

    Raises:
        DataError: a key is missing, or has a wrong type or shape.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("loss_mask"), Tensor):
        keys = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise DataError(
            f"the data iterator gave {keys}; expected a mapping with the tensor 'loss_mask': add "
            f"that key to the batch, or {HOW_TO_READ}"
        )
    own, by_sample = {f"{unit}_ids": unit for unit in units}, dict[str, Any]()
    for name in (*BY_SAMPLE, *own):
        if (x := batch.get(name)) is not None:
            by_sample[name] = x.reshape(-1) if isinstance(x, Tensor) else x
    if missing := sorted(own.keys() - by_sample.keys()):
        present = sorted(x for x in {*map(str, batch)} - {*_TOKEN_IDS} if x.endswith("_ids"))
        raise DataError(
            f"the batch has no {missing}; expected one id for each sample under each, since "
            "--loss-aggregation-levels names them: add them to the batch, or choose levels of "
            f"those that it has: {present}"
        )
    numbers = {len(x) for x in by_sample.values() if isinstance(x, Sized)}
    ids = {own[name]: by_sample.pop(name) for name in own.keys() & by_sample.keys()}
    mask, token_factors = batch["loss_mask"], None
    if factors is not None:
        token_factors = _like_mask(batch, factors)
    offsets = pack_offsets(batch, mask, numbers)
    if offsets and mask.dim() == 2:
        mask = mask.reshape(1, -1)
        if token_factors is not None:
            token_factors = token_factors.reshape(1, -1)
    if dataset_id and "dataset_ids" not in by_sample and batch.get("dataset_id") is not None:
        by_sample["dataset_ids"] = _of_rows(batch["dataset_id"], batch["loss_mask"], offsets)
    token_ids = _token_ids(batch, mask)
    return Microbatch(
        mask, ids=ids, token_factors=token_factors, token_ids=token_ids, **offsets, **by_sample
    )


def reading(read: ReadBatch, terms: Mapping[str, Term], dataset_id: bool = False) -> ReadBatch:
    """``read``; if it is `read_batch`, with the keys of ids that ``terms`` need.

    Where a term groups by data set, or with ``dataset_id``, Megatron's own key is read, too. Raises
    OptionError for a unit whose key has ids of tokens.
    """
    units = units_by_id(terms)
    if getattr(read, "func", read) is not read_batch:
        return read
    if of_tokens := sorted(unit for unit in units if f"{unit}_ids" in _TOKEN_IDS):
        raise OptionError(
            f"levels {of_tokens}, whose batch keys are of tokens; expected other names, or a "
            "reader of your own (--loss-aggregation-batch)"
        )
    more: dict[str, Any] = {"dataset_id": True} if dataset_id or "dataset" in units else {}
    units |= {*getattr(read, "keywords", {}).get("units", ())}  # a custom function may need others
    reads_keys: Callable[..., Any] = read
    return functools.partial(reads_keys, **more, units=sorted(units - {*BY_ID}))


def with_factors(read: ReadBatch, key: str) -> ReadBatch:
    """`read_batch` with ``factors=key``; raises OptionError if ``read`` is another function."""
    if read is not read_batch:
        raise OptionError(
            f"--loss-aggregation-factors {key} and a function of its own that reads batches "
            "(--loss-aggregation-batch, or -mask model, where factors have no place); expected one "
            "of them: that function can give Microbatch(token_factors=...)"
        )
    return functools.partial(read_batch, factors=key)


def factors_of(read: ReadBatch) -> str | None:
    """The ``factors`` of `read_batch`; None for a reader of the user's own."""
    given: Any = read
    return given.keywords.get("factors") if getattr(read, "func", None) is read_batch else None


def _like_mask(batch: Mapping[str, Any], key: str) -> Tensor:
    """The tensor under ``key``; DataError unless it has the shape of the loss mask."""
    x, shape = batch.get(key), batch["loss_mask"].shape
    if not isinstance(x, Tensor) or x.shape != shape:
        raise DataError(
            f"batch key {key!r} is {described(x)} beside a loss_mask of shape {tuple(shape)}; "
            "expected a factor for each token, since --loss-aggregation-factors (in a loop of "
            "your own read_batch(factors=)) names that key"
        )
    return x


def _of_rows(dataset_id: Any, mask: Tensor, offsets: Mapping[str, Tensor]) -> Tensor:
    """int64 [samples]: the data set of each sample's row, or of each sample's pack."""
    rows, length = mask.shape if mask.dim() == 2 else (1, mask.numel())
    if not holds_integers(dataset_id) or dataset_id.numel() != rows:
        raise DataError(
            f"batch key 'dataset_id' is {described(dataset_id)} beside a loss_mask of {rows} rows; "
            "expected an integer for each row"
        )
    row_S = dataset_id.reshape(-1).long()
    if not offsets:
        return row_S
    starts = offsets.get("cu_seqlens_padded", offsets["cu_seqlens"])[:-1].to(row_S)
    # A sample without tokens may start where the last pack ends.
    return row_S[(starts // length).clamp(max=rows - 1)]


def identified(microbatch: Any, batch: Any) -> Any:
    """``microbatch`` with the token ids of ``batch``, if it has none of its own."""
    if not isinstance(microbatch, Microbatch) or microbatch.token_ids:
        return microbatch
    token_ids = _token_ids(batch, microbatch.loss_mask)
    return dataclasses.replace(microbatch, token_ids=token_ids) if token_ids else microbatch


def _token_ids(batch: Any, mask: Tensor) -> list[Tensor]:
    given = [batch.get(name) for name in _TOKEN_IDS] if isinstance(batch, Mapping) else []
    return [x for x in given if holds_integers(x) and x.numel() == mask.numel()]


def listed_in_full(microbatches: Any, number: int) -> list[Any]:
    """``microbatches`` as a list; raises OptionError unless there are ``number``."""
    found = listed(microbatches)
    if len(found) != number:
        raise OptionError(
            f"{len(found)} microbatches for a call of the schedule with num_microbatches={number}; "
            "expected as many: see the function that reads the step"
        )
    return found


def checked_microbatches(
    found: list[Any], terms: Mapping[str, Term], trains: bool
) -> list[MicrobatchOfTerms]:
    """``found``, without what is of no term; OptionError unless they are microbatches.

    In an evaluation, samples without ids of data sets are one data set.
    """
    for microbatch in (of_term(name, m) for name in terms for m in found):
        if not isinstance(microbatch, Microbatch):
            raise OptionError(
                f"the function that reads batches returned a {type(microbatch).__name__}; expected "
                "a megatron_loss_agg.Microbatch, or for every batch a LateMicrobatch"
            )
    ours: list[MicrobatchOfTerms] = [
        m if isinstance(m, Microbatch) else {name: m[name] for name in terms} for m in found
    ]
    if trains or "dataset" not in units_by_id(terms):
        return ours
    return [for_each_term(_of_one_dataset, m) for m in ours]


def _of_one_dataset(microbatch: Microbatch) -> Microbatch:
    """With ids of data sets: its own, or -1, which no blend gives."""
    if microbatch.dataset_ids is not None:
        return microbatch
    ids = torch.full((microbatch.num_samples,), -1)
    return dataclasses.replace(microbatch, dataset_ids=ids)
