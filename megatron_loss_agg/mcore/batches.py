"""Batches of a data iterator -> microbatches, read ahead of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import FunctionError, GroupError, MaskError
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.tally import UNDECIDED
from megatron_loss_agg.terms import Term, of_term

ReadBatch = Callable[[Any], Microbatch | Mapping[str, Microbatch]]

HOW_TO_READ = (
    "give a function batch -> Microbatch (--loss-aggregation-batch module:name, or in a loop of "
    "your own LossHook(read_batch=...))"
)

_OFFSETS = ("cu_seqlens", "cu_seqlens_padded")
_BY_SAMPLE = ("prompt_ids", "rollout_ids", "rejected")


def read_batch(batch: Any) -> Microbatch:
    """The microbatch that a batch of a Megatron data loader describes.

    Reads the keys ``loss_mask`` (whole, before context parallelism) and, where present,
    ``cu_seqlens``, ``cu_seqlens_padded``, ``prompt_ids``, ``rollout_ids`` and ``rejected``. A data
    loader's collation adds an axis in front of these. Several packs in one batch are one long pack,
    as Megatron calls its model with them; and offsets that repeat the last one (of the padded ones
    where they are there), with which packs of different numbers of samples are stacked, are no
    samples. A microbatch that only pads a rank has ``cu_seqlens`` [0] and no sample, whatever its
    ``cu_seqlens_padded`` tell the model.

    Raises:
        MaskError, GroupError: a key is missing or misshapen, and what to provide instead.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("loss_mask"), Tensor):
        keys = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise MaskError(
            f"the data iterator gave {keys}; expected a mapping with the tensor 'loss_mask': add "
            f"that key to the batch, or {HOW_TO_READ}"
        )
    given = {name: batch[name] for name in (*_OFFSETS, *_BY_SAMPLE) if batch.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise GroupError(f"batch key {name!r} is a {type(value).__name__}; expected a tensor")
    ids = {name: given[name].reshape(-1) for name in _BY_SAMPLE if name in given}
    numbers = {value.numel() for value in ids.values()}
    mask = batch["loss_mask"]
    # The padded ones first: if they are misshapen, they cannot say how many the others are.
    offsets = {
        name: _one_pack(name, given, mask, numbers) for name in reversed(_OFFSETS) if name in given
    }
    if offsets and mask.dim() == 2:
        mask = mask.reshape(1, -1)
    real = offsets.get("cu_seqlens")
    if real is not None and real.numel() == 1:
        offsets.pop("cu_seqlens_padded", None)
    if "cu_seqlens" not in offsets and "cu_seqlens_padded" in offsets:
        offsets["cu_seqlens"] = offsets.pop("cu_seqlens_padded")
    return Microbatch(mask, **offsets, **ids)


def _one_pack(name: str, given: Mapping[str, Tensor], mask: Tensor, numbers: set[int]) -> Tensor:
    """Offsets [samples + 1] of one pack, out of [samples + 1] or [packs, samples + 1]."""
    offsets = given[name]
    if offsets.dim() == 1:
        return offsets
    packs = mask.shape[0] if mask.dim() == 2 else 1
    if offsets.dim() != 2 or offsets.shape[0] != packs or offsets.shape[1] == 0:
        raise GroupError(
            f"batch key {name!r} has shape {tuple(offsets.shape)} beside a loss_mask of shape "
            f"{tuple(mask.shape)}; expected [samples + 1], or one such row for each row of the mask"
        )
    if packs == 1 and offsets.shape[1] - 1 in numbers:
        return offsets[0]
    padded = given.get("cu_seqlens_padded", offsets)
    places = padded if padded.dim() == 2 else offsets
    rows = [row[: _number(row, place)] for row, place in zip(offsets, places, strict=True)]
    if packs > 1 and any(int(row[-1]) != mask.shape[1] for row in rows):
        raise GroupError(
            f"batch key {name!r} does not end at the length {mask.shape[1]} of every pack, and "
            "several packs are one here; expected the last sample to reach to the pack's end"
        )
    shifted = [row[1:] + i * mask.shape[-1] for i, row in enumerate(rows)]
    return torch.cat([rows[0][:1], *shifted])


def _number(row: Tensor, place: Tensor) -> int:
    """How many offsets of ``row`` are no fill; ``place`` are those in the padded pack, if any.

    An empty sample that has a place repeats the last offset of ``row``, but not of ``place``.
    """
    return int((place < place[-1]).sum()) + 1 if int(row[-1]) > 0 else 1


def read_ahead(
    data_iterator: Iterator[Any], number: int, read: ReadBatch, terms: Mapping[str, Term]
) -> tuple[list[Microbatch | Mapping[str, Microbatch]], Iterator[Any]]:
    """Draw a step's ``number`` batches, and hand back an iterator that yields them again.

    Raises:
        FunctionError: ``read`` returned something else than a `Microbatch`, or several by term.
        GroupError: a mode groups by ids that a microbatch has not.
    """
    drawn = [next(data_iterator) for _ in range(number)]
    microbatches = [read(batch) for batch in drawn]
    for name, term in terms.items():
        for microbatch in microbatches:
            _check_readable(of_term(name, microbatch), term.aggregation)
    return microbatches, Replay(drawn, data_iterator)


def _check_readable(microbatch: object, aggregation: LossAggregation) -> None:
    if not isinstance(microbatch, Microbatch):
        raise FunctionError(
            f"the function that reads batches returned a {type(microbatch).__name__}; expected "
            "a megatron_loss_agg.Microbatch"
        )
    for unit in (aggregation.within, aggregation.across):
        if unit in ("prompt", "rollout") and getattr(microbatch, f"{unit}_ids") is None:
            raise GroupError(
                f"mode {aggregation.mode!r} groups by {unit} and the batches have no "
                f"'{unit}_ids'; expected one id for each sample: add that key (int64 [samples]) to "
                f"the batch, {HOW_TO_READ}, or choose another --loss-aggregation"
            )


class Unread:
    """What ``source`` yields, where nobody looks at rejected samples and offsets.

    Args:
        rows: whether each sample must be a row.

    Raises:
        GroupError: a batch has what would have to be looked at.
    """

    def __init__(self, rows: bool, source: Iterator[Any]) -> None:
        self._rows = rows
        self._source = source

    def __iter__(self) -> Unread:
        return self

    def __next__(self) -> Any:
        batch = next(self._source)
        if isinstance(batch, Mapping):
            if batch.get("rejected") is not None:
                raise GroupError(UNDECIDED)
            if self._rows and any(batch.get(name) is not None for name in _OFFSETS):
                raise GroupError(
                    "a batch with sequence offsets after a first step of rows; expected the same "
                    "layout in every step: build a LossHook for each"
                )
        return batch


class Replay:
    """Yields ``drawn``, and then what ``rest`` yields.

    Megatron's own data iterators have ``__next__`` alone.
    """

    def __init__(self, drawn: Iterable[Any], rest: Iterator[Any]) -> None:
        self._drawn = iter(drawn)
        self._rest = rest

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        for batch in self._drawn:
            return batch
        return next(self._rest)
