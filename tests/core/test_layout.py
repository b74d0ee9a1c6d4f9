"""CPLayout and predicting_mask: maps by hand, by loops and by the host, inverses and gradients."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_loss_agg import CPLayout, predicting_mask
from tests.core.meaning import F64, Read, called, exact_or_refused, listed
from tests.core.strategies import FORMS, INPUTS, changes, microbatches, with_changes
from tests.host.harness import run_host_ranks


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# What each rank holds. Of 2 * cp chunks, rank r holds chunk r and chunk 2 cp - 1 - r; in a pack
# (thd), the same inside every sequence.
MAPS = [
    (CPLayout.bshd, 12, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
    (CPLayout.thd, offsets(0, 4, 4, 12), [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]),
    (CPLayout.thd, offsets(0, 3, 5), [[0, 1, 2, 3, 4]]),
    # TransformerEngine's own test of thd_get_partitioned_indices has these.
    (CPLayout.thd, offsets(0, 8, 16), [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]),
    (CPLayout.contiguous, 6, [[0, 1, 2], [3, 4, 5]]),  # a multiple of 2, and not of twice that
]


@pytest.mark.parametrize(("make", "axis", "maps"), MAPS)
def test_every_rank_holds_the_positions_written_by_hand(make, axis, maps):
    for rank, expected in enumerate(maps):
        index = make(axis, len(maps), rank).index
        assert index.dtype == torch.int64 and index.tolist() == expected


def held_by(kind: str, whole: Any, cp: int, rank: int) -> list[int]:
    """The positions that a rank holds, sequence by sequence."""
    if kind == "contiguous":
        return [*range(rank * whole // cp, (rank + 1) * whole // cp)]
    held: list[int] = []
    for begin, end in pairwise([0, whole] if kind == "bshd" else whole.tolist()):
        chunk = (end - begin) // (2 * cp)
        starts = [begin + c * chunk for c in (rank, 2 * cp - 1 - rank)]
        parts = [range(begin, end)] if cp == 1 else [range(a, a + chunk) for a in starts]
        held += [t for part in parts for t in part]
    return held


@given(
    kind=st.sampled_from(["bshd", "thd", "contiguous"]),
    cp=st.integers(1, 4),
    chunks=st.lists(st.integers(0, 4), max_size=4),
    shape=st.sampled_from([(-1,), (2, -1), (-1, 3), (2, -1, 1, 2)]),
    form=st.sampled_from([*FORMS]),
    changes=changes(["whole"], ["cp_size", "cp_rank"]),
)
@example(
    "bshd", 2, [1], (-1,), "as it is", {"cp_size": "Fraction(1, 3)"}
)  # it compares with integers
@settings(max_examples=150, deadline=None)
@exact_or_refused
def test_every_position_is_held_once_and_joining_is_the_inverse(
    kind, cp, chunks, shape, form, changes
):
    ends = [0, *accumulate(2 * cp * n for n in chunks)]
    whole: Any = torch.tensor(ends) if kind == "thd" else ends[-1]
    axes = with_changes({"whole": whole, "cp_size": cp, "cp_rank": cp - 1}, changes)
    made = called(getattr(CPLayout, kind), *axes.values(), changes=changes)
    if not all(isinstance(x, (int, Tensor)) for x in axes.values()):
        return  # as annotations refuse it
    assert made.index.tolist() == held_by(kind, *axes.values())
    if changes:
        return
    dim = shape.index(-1)
    x = FORMS[form](torch.randn([made.total_len if n == -1 else n for n in shape], dtype=F64))
    ranks = [getattr(CPLayout, kind)(whole, cp, rank) for rank in range(cp)]
    parts = [of_rank.shard(x, dim).detach().requires_grad_() for of_rank in ranks]
    for part, of_rank in zip(parts, ranks, strict=True):
        assert torch.equal(part, x.index_select(dim, of_rank.index))
    joined, pull = made.unshard(parts, dim=dim), torch.randn(x.shape, dtype=F64)
    (joined * pull).sum().backward()
    assert torch.equal(joined, x)
    for part, of_rank in zip(parts, ranks, strict=True):
        assert torch.equal(part.grad, of_rank.shard(pull, dim))


def test_offsets_may_be_overwritten_once_the_layout_is_made():
    starts, whole = torch.tensor([0, 8, 16]), torch.arange(16)
    layouts = [CPLayout.thd(starts, 2, rank) for rank in range(2)]
    starts.copy_(torch.tensor([0, 4, 16]))
    assert torch.equal(layouts[0].unshard([x.shard(whole) for x in layouts]), whole)


# The token at t + 1 is predicted at t; the last position of a sequence predicts nothing.
PREDICTED = {
    "rows": ([[0, 0, 1, 1], [1, 0, 1, 0]], None, None, [[0, 1, 1, 0], [0, 1, 0, 0]]),
    "a pack": ([0.0, 1, 1, 1, 0.5, 1], [0, 3, 6], None, [1.0, 1, 0, 0.5, 1, 0]),
    # Position 3 is padding, and predicts nothing.
    "padding": ([1, 1, 1, 0, 1, 1, 0, 0], [0, 3, 5], [0, 4, 8], [1, 1, 0, 0, 1, 0, 0, 0]),
    "empty sequences and a tail": ([1, 1, 1, 0, 0], [0, 0, 2, 2, 3], None, [1, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", PREDICTED)
def test_a_mask_is_moved_to_the_position_that_predicts_the_token(name):
    mask, *given_offsets, expected = PREDICTED[name]
    real, padded = (None if x is None else torch.tensor(x) for x in given_offsets)
    for dtype in (torch.bool, torch.int64, torch.float32):
        moved = predicting_mask(torch.tensor(mask).to(dtype), real, padded)
        assert torch.equal(moved, torch.tensor(expected).to(dtype))


@given(microbatches(rejected=False), changes(INPUTS[:3]))
@settings(max_examples=150, deadline=None)
@exact_or_refused
def test_a_moved_mask_is_that_of_a_loop(given, changes):
    given = with_changes({name: given.get(name) for name in INPUTS[:3]}, changes)
    moved = called(predicting_mask, *given.values(), changes=changes)
    read = Read.of(given)
    wanted = [0.0] * len(read.values)
    for places in read.places:
        for t, following in pairwise(places):
            wanted[t] = read.values[following]
    assert (moved.dtype, moved.shape) == (given["loss_mask"].dtype, given["loss_mask"].shape)
    assert listed(moved) == wanted


def batch_of(seq_len: int) -> dict[str, Tensor]:
    rows = torch.arange(3 * seq_len).reshape(3, seq_len)
    return {"tokens": rows, "loss_mask": rows % 5 / 4, "labels": rows + 1}


def host_shards(seq_lens: list[int]) -> list[dict[str, Any]]:
    """What Megatron gives this rank of each whole batch, with a CP group of all ranks."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    group = dist.group.WORLD
    batches = [get_batch_on_this_cp_rank(batch_of(n), False, cp_group=group) for n in seq_lens]
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
