"""Dynamic context parallelism: each microbatch has its own context-parallel ranks.

Megatron has two kinds. In the hybrid kind, its schedule draws a whole step as one item and deals
the samples to ranks. In the dynamic kind, the data iterator gives each rank its packs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.errors import AggregationError, DataError, HostError
from megatron_loss_agg.mcore.batches import batch_keys, changed_terms, is_by_sample
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.microbatch import BY_SAMPLE, Microbatch, TermMicrobatches

_T = TypeVar("_T")


def batches_on_rank(call: Call, item: Any) -> Sequence[Any]:
    """This rank's batches from the item that hybrid context parallelism draws for a step."""
    assert call.groups.dp_cp is not None
    return dealt_batches(item, dist.get_rank(call.groups.dp_cp))


def with_cp_size(microbatch: TermMicrobatches, batch: Any) -> TermMicrobatches:
    """``microbatch`` with the number of ranks that share it.

    Raises:
        DataError: neither the batch nor the microbatch has such a number.
    """
    keys = batch if isinstance(batch, Mapping) else {}

    def changed(term: Microbatch) -> Microbatch:
        size, gid = keys.get("local_cp_size"), keys.get("gid")
        if term.local_cp_size is not None:  # the user's reader of batches has set it
            size, gid = term.local_cp_size, term.gid
        if size is None:
            raise DataError(
                "a batch under dynamic context parallelism must have the key 'local_cp_size', as "
                f"batches of Megatron's schedulers do, got {batch_keys(batch)}. Add it, or let the "
                "reader of batches give Microbatch(local_cp_size=)."
            )
        fields: dict[str, Any] = {"local_cp_size": int(size)}
        if term.sequences is not None:
            fields["sequences"] = replace(term.sequences, **fields)
        return replace(term, gid=None if gid is None else int(gid), **fields)

    return changed_terms(changed, microbatch)


def dealt_batches(item: Any, rank: int) -> list[dict[str, Any]]:
    """The samples that Megatron's hybrid schedule deals to ``rank``, in its order, each as a batch.

    Args:
        item: from Megatron's ``HybridCPDataLoaderWrapper``: the samples by gid (their number in the
            step), and for each group of samples and each rank, the gids that the rank computes.
    """
    is_pair = isinstance(item, (tuple, list)) and len(item) == 2
    if not is_pair or not isinstance(item[0], Mapping) or not isinstance(item[1], list):
        got = [type(x).__name__ for x in item] if is_pair else type(item).__name__
        raise HostError(
            "the data iterator under hybrid context parallelism must give (samples by number, groups), "
            "as HybridCPDataLoaderWrapper of Megatron-Core 0.16 to 0.19 does and its schedule "
            f"needs, got {got}. Wrap it; a stock script, which does not wrap its evaluation data, "
            "needs --eval-iters 0."
        )
    samples, groups = item
    batches = []
    for ranks in groups:
        ranks_by_gid: dict[int, list[int]] = {}
        for k, gids in enumerate(ranks):
            for gid in gids:
                ranks_by_gid.setdefault(gid, []).append(k)
        for sharing in ranks_by_gid.values():
            # Megatron has process groups of 1, 2, 4, ... neighbouring ranks, and one of all ranks.
            size, first = len(sharing), sharing[0]
            are_neighbours = sharing == [*range(first, first + size)]
            has_group = size == len(ranks) or (size.bit_count() == 1 and 2 * size <= len(ranks))
            if not are_neighbours or first % size or not has_group:
                raise HostError(
                    "a sample must be held by all ranks of one of Megatron's groups, got one on "
                    f"ranks {sharing}, where its hybrid schedule would hang. Change "
                    "--max-seqlen-per-dp-cp-rank, or the batch."
                )
        for gid in ranks[rank]:
            batch = {key: _sample_value(key, x) for key, x in samples[gid].items()}
            batches.append({**batch, "local_cp_size": len(ranks_by_gid[gid]), "gid": int(gid)})
    return batches


def _sample_value(key: str, value: Any) -> Any:
    """A field for a batch of one sample: [1, tokens], or [1] with the value its tokens share.

    In Megatron's samples every field has an element for each token, even ids, weights and rejections.
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


def read_now(read: Callable[[], _T]) -> Callable[[], _T]:
    """Call ``read`` at once; return a function with its result.

    For loaders that communicate in ``next``, as in dynamic context parallelism. If the loader
    raises on one rank, the other ranks wait inside theirs: the exception must end this process
    before it enters one of our collectives. Our own errors are raised by the returned function
    instead, inside the contexts that raise them on all ranks.
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
