"""Sample ids in the packs of Megatron's packing schedulers.

A scheduler (``--sequence-packing-scheduler``) draws the samples of a step, numbers them over all
data-parallel ranks, deals the numbers to microbatches, and joins each microbatch's samples into a
pack. It packs tokens, labels and masks, and drops all other keys. Here the ids of all samples are
gathered when it draws them, and added to the packs by the same numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.collectives import gather_objects
from megatron_loss_agg.errors import DataError, HostError
from megatron_loss_agg.mcore.batches import is_by_sample
from megatron_loss_agg.mcore.call import replaced

_DRAW, _PACK = "get_batch_and_global_seqlens", "build_packed_microbatches"
"""Megatron's functions in `megatron.core.datasets.data_schedule`."""
_NUMBERS = "sample_id_groups"
"""The parameter of `_PACK` that holds the numbers of each microbatch's samples, by rank."""


def with_ids(wrap_data_iterator: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``wrap_data_iterator`` with sample ids in its packs.

        iterator, number, *_ = with_ids(wrap_data_iterator)(iterator, config, number)

    In addition to Megatron's keys, the data set's items have ``prompt_ids``, ``rollout_ids``,
    ``rejected``, ``sample_weights`` or ids of other units, with one value for each sample of the
    item, and the same keys in all items. Packs then have the values of their samples. Megatron's
    blends add ``dataset_id`` to an item, which gives packs their ``dataset_ids``.

    Raises:
        HostError: when called, this Megatron packs differently.
        DataError: when called, there is not one value per sample, or items have different keys.
    """

    @functools.wraps(wrap_data_iterator)
    def wrapped(data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.datasets import data_schedule

        draw, pack = (getattr(data_schedule, name, None) for name in (_DRAW, _PACK))
        if draw is None or pack is None or _NUMBERS not in inspect.signature(pack).parameters:
            raise HostError(
                f"Megatron's data_schedule must have {_DRAW} and {_PACK}(samples, {_NUMBERS}, ...) for "
                "ids in packs, got others. Drop with_ids, and choose a mode without ids."
            )
        # By key: values for the samples of all ranks, in the scheduler's order.
        ids: dict[str, Tensor] = {}

        def draw_with_ids(iterator: Iterator[Any], number: int, dp_group: Any) -> Any:
            items = [next(iterator) for _ in range(number)]
            read = functools.partial(_sample_ids, items)
            ids.update(_joined(gather_objects(read, dp_group, "reading ids of samples")))
            return draw(iter(items), number, dp_group)

        def pack_with_ids(
            samples: Any, numbers: Sequence[Any], rank: int, *args: Any, **kwargs: Any
        ) -> Any:
            packs = pack(samples, numbers, rank, *args, **kwargs)
            for batch, numbers_by_rank in zip(packs, numbers, strict=True):
                batch.update({key: x[numbers_by_rank[rank]] for key, x in ids.items()})
            return packs

        with (
            replaced(data_schedule, _DRAW, draw_with_ids),
            replaced(data_schedule, _PACK, pack_with_ids),
        ):
            return wrap_data_iterator(data_iterator, *args, **kwargs)

    return wrapped


def _sample_ids(items: Sequence[Any]) -> dict[str, Tensor]:
    """By key, the values of all samples in a rank's items, in order, on the CPU."""
    fields = [x for item in items for x in (item if isinstance(item, list) else [item])]
    return _joined([_ids_in(x) for x in fields])


def _ids_in(fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """By key, the values of one sample, or of a pack's samples except those without tokens."""
    has_tokens = torch.tensor([True])
    if "padded_seq_len" not in fields:
        has_tokens = fields["cu_seqlens"].reshape(-1).diff().cpu() > 0
    ids = {key: x.reshape(-1).cpu() for key, x in fields.items() if is_by_sample(key)}
    if "dataset_id" in fields:
        ids.setdefault("dataset_ids", torch.full(has_tokens.shape, int(fields["dataset_id"])))
    for key, x in ids.items():
        if len(x) != len(has_tokens):
            raise DataError(
                f"the key {key!r} of a data set's item must have a value for each of its "
                f"{len(has_tokens)} samples, got {len(x)}. Correct it."
            )
    return {key: x[has_tokens] for key, x in ids.items()}


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """By key, the values of all parts, in order."""
    keys = sorted({key for part in parts for key in part})
    if any(part.keys() != {*keys} for part in parts):
        raise DataError(
            f"all samples of a step must have ids under the same keys, got {keys} in only some. "
            "Give each sample all of them."
        )
    return {key: torch.cat([part[key] for part in parts]) for key in keys}
