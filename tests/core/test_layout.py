"""CPLayout and predicting_mask: maps by hand and by the host, inverses, gradients, errors."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_loss_agg import CPLayout, LossAggregation, predicting_mask, token_weights
from megatron_loss_agg.errors import GroupError, LayoutError
from tests.core.steps import flatten
from tests.host.harness import run_host_ranks

F64 = torch.float64
HALF = CPLayout.bshd(8, 2, 0)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


MAKERS = (CPLayout.bshd, CPLayout.thd, CPLayout.contiguous)
# What each rank holds. Of 2 * cp chunks, rank r holds chunk r and chunk 2 cp - 1 - r; in a pack
# (thd), the same inside every sequence.
MAPS = [
    (CPLayout.bshd, 4, [[0, 1, 2, 3]]),
    (CPLayout.bshd, 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
    (CPLayout.bshd, 12, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
    (CPLayout.bshd, 8, [[0, 7], [1, 6], [2, 5], [3, 4]]),
    (CPLayout.thd, offsets(0, 4, 12), [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]),
    (CPLayout.thd, offsets(0, 4, 4, 8), [[0, 3, 4, 7], [1, 2, 5, 6]]),  # an empty sequence
    (CPLayout.thd, offsets(0, 3, 5), [[0, 1, 2, 3, 4]]),
    (CPLayout.thd, offsets(0), [[], []]),
    # TransformerEngine's own test of thd_get_partitioned_indices has these.
    (CPLayout.thd, offsets(0, 8, 16), [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]),
    (CPLayout.contiguous, 6, [[0, 1], [2, 3], [4, 5]]),
    (CPLayout.contiguous, 6, [[0, 1, 2], [3, 4, 5]]),  # a multiple of 2, and not of twice that
    (CPLayout.contiguous, 5, [[0, 1, 2, 3, 4]]),
    (CPLayout.contiguous, 0, [[], []]),
]


@pytest.mark.parametrize(("make", "axis", "maps"), MAPS)
def test_maps_are_those_written_by_hand(make, axis, maps):
    for rank, expected in enumerate(maps):
        index = make(axis, len(maps), rank).index
        assert index.dtype == torch.int64 and index.tolist() == expected


def partitioned_indices(lengths: list[int], cp: int, rank: int) -> list[int]:
    """TransformerEngine's order, token by token of the rank.

    After thd_partition_src_index in its fused_attn/context_parallel.cu: a local token in the
    first half of its local sequence lies `rank` half-lengths further in the whole sequence, one in
    the second half 2 * (cp - 1) - rank half-lengths.
    """
    out, start = [], 0
    for length in lengths:
        half = length // cp // 2
        out += [start + t + half * rank for t in range(half)]
        out += [start + t + half * (2 * (cp - 1) - rank) for t in range(half, 2 * half)]
        start += length
    return out


chunks = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@given(sizes=chunks, cp=st.integers(1, 5), dim=st.sampled_from([0, 1, 2, -1, -2]))
@pytest.mark.parametrize("make", MAKERS)
@settings(deadline=None)
def test_every_position_is_held_once_and_unshard_is_the_inverse_of_shard(make, sizes, cp, dim):
    lengths = [2 * cp * size for size in sizes]
    axis = total = sum(lengths)
    if make == CPLayout.thd:
        axis = offsets(*(sum(lengths[:s]) for s in range(len(lengths) + 1)))
    ranks = [make(axis, cp, rank) for rank in range(cp)]
    held = [layout.index.tolist() for layout in ranks]
    assert sorted(flatten(held)) == [*range(total)]
    if make == CPLayout.thd:
        assert held == [partitioned_indices(lengths, cp, rank) for rank in range(cp)]
    shape = [2, 3, 4]
    shape[dim] = total
    x = torch.arange(torch.Size(shape).numel(), dtype=F64).reshape(shape).requires_grad_()
    shards = [layout.shard(x, dim=dim) for layout in ranks]
    for layout, shard in zip(ranks, shards, strict=True):
        assert torch.equal(shard, x.index_select(dim, layout.index))
    whole = ranks[0].unshard(shards, dim=dim)
    assert torch.equal(whole, x)
    upstream = torch.randn(shape, dtype=F64)
    whole.backward(upstream)
    assert torch.equal(x.grad, upstream)


REFUSED = [
    *(
        (lambda make=make, x=x, rank=rank: make(x, 2, rank), "cp_rank")
        for make, x in zip(MAKERS, (8, offsets(0, 8), 8), strict=True)
        for rank in (-1, 2)
    ),
    (lambda: CPLayout.bshd(8, -1, 0), "cp_size"),
    *((lambda n=n: CPLayout.bshd(n, 2, 0), rf"{n}.*4|4.*{n}") for n in (6, 7, 2, 9)),
    (lambda: CPLayout.contiguous(7, 2, 0), "7"),
    # Lengths 4, 6, 6: the second is not a multiple of 2 * cp = 4, though the total is.
    (lambda: CPLayout.thd(offsets(0, 4, 10, 16), 2, 0), "6.*4.*pad|4.*6.*pad|pad.*4.*6|pad.*6.*4"),
    (lambda: CPLayout.thd(offsets(4, 8), 2, 0), r"cu_seqlens.* start at 0"),
    (lambda: CPLayout.thd(offsets(0, 8, 4), 2, 0), r"cu_seqlens.* not decrease"),
    (lambda: CPLayout.thd(torch.tensor([0.0, 4.0]), 2, 0), "cu_seqlens"),
    (lambda: HALF.shard(torch.zeros(2, 4)), "8"),
    (lambda: HALF.shard(torch.zeros(2, 16)), "8"),
    (lambda: HALF.unshard([torch.zeros(4)]), "length 4; expected the layout's 8"),
    (lambda: HALF.unshard([torch.zeros(4)] * 3), "length 12; expected the layout's 8"),
    (lambda: HALF.unshard([torch.zeros(4), torch.zeros(3)]), "length 7; expected the layout's 8"),
    (lambda: HALF.unshard(torch.zeros(2, 4)), "a Tensor without a group"),
    (lambda: HALF.unshard([torch.zeros(4)] * 2, group=object()), "a list with a group"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_cannot_be_split_or_joined_is_named(call, text):
    with pytest.raises((LayoutError, GroupError), match=text):
        call()


def test_offsets_may_be_overwritten_once_the_layout_is_made():
    starts, whole = torch.tensor([0, 8, 16]), torch.arange(16)
    layouts = [CPLayout.thd(starts, 2, rank) for rank in range(2)]
    starts.copy_(torch.tensor([0, 4, 16]))
    assert torch.equal(layouts[0].unshard([x.shard(whole) for x in layouts]), whole)


PREDICTED = {
    # The token at t + 1 is predicted at t; the last position predicts nothing.
    "rows": ([[0, 0, 1, 1], [1, 0, 1, 0]], None, None, [[0, 1, 1, 0], [0, 1, 0, 0]]),
    # Sequences 0..2 and 3..5: position 2 must not predict the first token of the second one.
    "a pack": ([0.0, 1, 1, 1, 0.5, 1], [0, 3, 6], None, [1.0, 1, 0, 0.5, 1, 0]),
    # Sequence 0 owns 0..1 of 0..3, sequence 1 owns 4..6 of 4..7.
    "padding": ([1, 1, 0, 0, 0, 1, 1, 0], [0, 2, 5], [0, 4, 8], [1, 0, 0, 0, 1, 1, 0, 0]),
    # Position 3 is padding, and predicts nothing.
    "a first token": ([1, 1, 1, 0, 1, 1, 0, 0], [0, 3, 5], [0, 4, 8], [1, 1, 0, 0, 1, 0, 0, 0]),
    "empty sequences and a tail": ([1, 1, 1, 0, 0], [0, 0, 2, 2, 3], None, [1, 0, 0, 0, 0]),
    "a pack of one row": ([[1, 1, 1, 1]], [0, 2, 4], None, [[1, 0, 1, 0]]),
}


@pytest.mark.parametrize("name", PREDICTED)
def test_a_mask_is_moved_to_the_position_that_predicts_the_token(name):
    mask, *offsets, expected = PREDICTED[name]
    real, padded = (None if x is None else torch.tensor(x) for x in offsets)
    moved = predicting_mask(torch.tensor(mask), real, padded)
    assert torch.equal(moved, torch.tensor(expected))
    if padded is not None:  # and so fits the same offsets
        token_weights(LossAggregation(mode="sample_mean"), moved, real, cu_seqlens_padded=padded)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(2, 4), (1, 1), (2, 0)])
def test_a_moved_mask_keeps_its_shape_and_dtype(dtype, shape):
    moved = predicting_mask(torch.ones(shape).to(dtype))
    assert moved.shape == shape and moved.dtype == dtype


def batch_of(seq_len: int) -> dict[str, torch.Tensor]:
    rows = torch.arange(3 * seq_len).reshape(3, seq_len)
    return {"tokens": rows, "loss_mask": rows % 5 / 4, "labels": rows + 1}


def host_shards(seq_lens: list[int]) -> list[dict[str, Any]]:
    """What Megatron gives this rank of each whole batch, with a CP group of all ranks."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    options: dict[str, Any] = {"is_hybrid_cp": False, "cp_group": dist.group.WORLD}
    known = inspect.signature(get_batch_on_this_cp_rank).parameters
    if "cp_group" not in known:
        parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    options = {name: x for name, x in options.items() if name in known}
    batches = [get_batch_on_this_cp_rank(batch_of(n), **options) for n in seq_lens]
    return [{name: batch[name].tolist() for name in batch_of(4)} for batch in batches]


@pytest.mark.host
# Looked up and not imported: the import takes seconds, and only the ranks need it.
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")
@pytest.mark.parametrize(("cp", "seq_lens"), [(2, [8, 20]), (4, [16])])
def test_bshd_is_megatrons_split(cp, seq_lens):
    for rank, batches in enumerate(run_host_ranks(host_shards, cp, seq_lens)):
        for seq_len, theirs in zip(seq_lens, batches, strict=True):
            layout = CPLayout.bshd(seq_len, cp, rank)
            ours = {name: layout.shard(x).tolist() for name, x in batch_of(seq_len).items()}
            assert ours == theirs
