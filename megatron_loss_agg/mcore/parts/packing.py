"""Ids of samples through Megatron's packing schedulers, which drop what they do not know.

A scheduler (``--sequence-packing-scheduler``) draws the samples of a step, numbers them over all
data-parallel ranks, deals the numbers to microbatches, and joins the samples of each to a pack of
tokens, labels and mask. Here its samples' ids are exchanged when it has drawn them, and put beside
the packs under the same numbers.
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
_DEALT = "sample_id_groups"
"""The parameter of `_PACK` with the numbers of each microbatch's samples, by rank."""


def with_ids(wrap_data_iterator: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``wrap_data_iterator``, whose packs keep the ids of their samples.

        iterator, number, *_ = with_ids(wrap_data_iterator)(iterator, config, number)

    The data set's items have, beside Megatron's keys, ``prompt_ids``, ``rollout_ids``,
    ``rejected``, ``sample_weights`` or ids of other units: one value for each sample of the item,
    alike in all items. The packs then have those of their samples.

    Raises:
        HostError: when called: this Megatron packs in another way.
        DataError: when called: not one value for each sample, or items with different keys.
    """

    @functools.wraps(wrap_data_iterator)
    def wrapped(data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.datasets import data_schedule

        draw, pack = (getattr(data_schedule, name, None) for name in (_DRAW, _PACK))
        if draw is None or pack is None or _DEALT not in inspect.signature(pack).parameters:
            raise HostError(
                f"Megatron's data_schedule must have {_DRAW} and {_PACK}(samples, {_DEALT}, ...) for "
                "ids in packs, got others. Drop with_ids, and choose a mode without ids."
            )
        ids: dict[str, Tensor] = {}  # by key: of all ranks' samples, by the scheduler's numbers

        def draw_with_ids(iterator: Iterator[Any], number: int, dp_group: Any) -> Any:
            items = [next(iterator) for _ in range(number)]
            read = functools.partial(_ids_of, items)
            of_ranks = gather_objects(read, dp_group, "reading ids of samples")
            ids.update(_joined(of_ranks))
            return draw(iter(items), number, dp_group)

        def pack_with_ids(
            samples: Any, dealt: Sequence[Any], rank: int, *args: Any, **kwargs: Any
        ) -> Any:
            packs = pack(samples, dealt, rank, *args, **kwargs)
            for of_pack, numbers_by_rank in zip(packs, dealt, strict=True):
                numbers = numbers_by_rank[rank]
                of_pack.update({key: x[numbers] for key, x in ids.items()})
            return packs

        with (
            replaced(data_schedule, _DRAW, draw_with_ids),
            replaced(data_schedule, _PACK, pack_with_ids),
        ):
            return wrap_data_iterator(data_iterator, *args, **kwargs)

    return wrapped


def _ids_of(items: Sequence[Any]) -> dict[str, Tensor]:
    """By key, the values of all samples of a rank's items, in their order, on the CPU."""
    parts = []
    for item in items:
        for sample in item if isinstance(item, list) else [item]:
            parts.append(_ids_of_sample(sample))
    return _joined(parts)


def _ids_of_sample(sample: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By key, the values of a sample, or of those of a pack that have tokens."""
    has_tokens = torch.tensor([True])
    if "padded_seq_len" not in sample:
        has_tokens = sample["cu_seqlens"].reshape(-1).diff().cpu() > 0
    ids = {key: x.reshape(-1).cpu() for key, x in sample.items() if is_by_sample(key)}
    for key, x in ids.items():
        if len(x) != len(has_tokens):
            raise DataError(
                f"the key {key!r} of a data set's item must have a value for each of its "
                f"{len(has_tokens)} samples, got {len(x)}. Correct it."
            )
    return {key: x[has_tokens] for key, x in ids.items()}


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """By key, the values of all parts in their order."""
    keys = sorted({key for part in parts for key in part})
    if any(part.keys() != {*keys} for part in parts):
        raise DataError(
            f"all samples of a step must have ids under the same keys, got {keys} in some alone. Give "
            "each sample all of them."
        )
    return {key: torch.cat([part[key] for part in parts]) for key in keys}
