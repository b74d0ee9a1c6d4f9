"""CPLayout and predicting_mask: small maps by hand, inverses, gradients, errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_loss_agg import AggregationError, CPLayout
from megatron_loss_agg.errors import GroupError, LayoutError
from megatron_loss_agg import predicting_mask

F64 = torch.float64


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# 2 * cp chunks, rank r holds chunk r and chunk 2 cp - 1 - r.
BSHD = [
    (4, 1, [[0, 1, 2, 3]]),
    (4, 2, [[0, 3], [1, 2]]),
    (8, 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
    (12, 3, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
    (8, 4, [[0, 7], [1, 6], [2, 5], [3, 4]]),
]
# The same inside every sequence; lengths 4 and 8, then an empty one between.
THD = [
    (offsets(0, 4, 12), 2, [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]),
    (offsets(0, 4, 4, 8), 2, [[0, 3, 4, 7], [1, 2, 5, 6]]),
    (offsets(0, 3, 5), 1, [[0, 1, 2, 3, 4]]),
    (offsets(0, 6), 3, [[0, 5], [1, 4], [2, 3]]),
    (offsets(0), 2, [[], []]),
    # TransformerEngine's own test of thd_get_partitioned_indices has these.
    (offsets(0, 8, 16), 2, [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]),
]
CONTIGUOUS = [(6, 3, [[0, 1], [2, 3], [4, 5]]), (5, 1, [[0, 1, 2, 3, 4]]), (0, 2, [[], []])]


@pytest.mark.parametrize(("seq_len", "cp", "maps"), BSHD)
def test_bshd_map(seq_len, cp, maps):
    for rank, expected in enumerate(maps):
        index = CPLayout.bshd(seq_len, cp, rank).index
        assert index.dtype == torch.int64 and index.tolist() == expected


@pytest.mark.parametrize(("cu_seqlens", "cp", "maps"), THD)
def test_thd_map(cu_seqlens, cp, maps):
    for rank, expected in enumerate(maps):
        index = CPLayout.thd(cu_seqlens, cp, rank).index
        assert index.dtype == torch.int64 and index.tolist() == expected


@pytest.mark.parametrize(("total", "cp", "maps"), CONTIGUOUS)
def test_contiguous_map(total, cp, maps):
    for rank, expected in enumerate(maps):
        index = CPLayout.contiguous(total, cp, rank).index
        assert index.dtype == torch.int64 and index.tolist() == expected


def partitioned_indices(cu_seqlens: list[int], cp: int, rank: int) -> list[int]:
    """TransformerEngine's order, token by token of the rank.

    After thd_partition_src_index in its fused_attn/context_parallel.cu: a local token in the
    first half of its local sequence lies `rank` half-lengths further in the whole sequence, one in
    the second half 2 * (cp - 1) - rank half-lengths.
    """
    local = [offset // cp for offset in cu_seqlens]
    out = []
    for sequence, start in enumerate(local[:-1]):
        length = local[sequence + 1] - start
        for position in range(length):
            half = length // 2
            halves = rank if position < half else 2 * (cp - 1) - rank
            out.append(start * cp + position + half * halves)
    return out


layouts = st.sampled_from(["bshd", "thd", "contiguous"])
chunks = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def all_ranks(kind: str, cp: int, sizes: list[int]) -> tuple[int, list[CPLayout]]:
    """Every rank's layout of a sequence axis made of ``sizes`` (in units of 2 * cp)."""
    lengths = [2 * cp * size for size in sizes]
    if kind == "thd":
        cu_seqlens = offsets(*(sum(lengths[:s]) for s in range(len(lengths) + 1)))
        return sum(lengths), [CPLayout.thd(cu_seqlens, cp, rank) for rank in range(cp)]
    make = CPLayout.bshd if kind == "bshd" else CPLayout.contiguous
    return sum(lengths), [make(sum(lengths), cp, rank) for rank in range(cp)]


@given(sizes=chunks, cp=st.integers(1, 5))
@settings(deadline=None)
def test_thd_map_is_transformer_engines(sizes, cp):
    _, ranks = all_ranks("thd", cp, sizes)
    cu_seqlens = [2 * cp * sum(sizes[:s]) for s in range(len(sizes) + 1)]
    for rank, layout in enumerate(ranks):
        assert layout.index.tolist() == partitioned_indices(cu_seqlens, cp, rank)


@given(kind=layouts, sizes=chunks, cp=st.integers(1, 4))
@settings(deadline=None)
def test_the_ranks_share_out_every_position_once(kind, sizes, cp):
    total, ranks = all_ranks(kind, cp, sizes)
    held = torch.cat([layout.index for layout in ranks])
    assert sorted(held.tolist()) == list(range(total))


@given(kind=layouts, sizes=chunks, cp=st.integers(1, 4), dim=st.sampled_from([0, 1, 2, -1, -2]))
@settings(deadline=None)
def test_unshard_is_the_inverse_of_shard(kind, sizes, cp, dim):
    total, ranks = all_ranks(kind, cp, sizes)
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


def test_the_last_dimension_is_the_default():
    layout = CPLayout.bshd(4, 2, 0)
    x = torch.arange(8).reshape(2, 4)
    assert layout.shard(x).tolist() == [[0, 3], [4, 7]]
    assert layout.unshard([x[:, [0, 3]], x[:, [1, 2]]]).tolist() == x.tolist()


def test_shard_is_differentiable():
    x = torch.zeros(4, dtype=F64, requires_grad=True)
    (CPLayout.bshd(4, 2, 1).shard(x) * torch.tensor([10.0, 20.0])).sum().backward()
    assert x.grad.tolist() == [0, 10, 20, 0]  # rank 1 holds positions 1 and 2


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_must_be_in_the_group(rank):
    for make in (
        lambda: CPLayout.bshd(8, 2, rank),
        lambda: CPLayout.thd(offsets(0, 8), 2, rank),
        lambda: CPLayout.contiguous(8, 2, rank),
    ):
        with pytest.raises(LayoutError, match="cp_rank"):
            make()


@pytest.mark.parametrize("size", [0, -1])
def test_size_must_be_positive(size):
    with pytest.raises(LayoutError, match="cp_size"):
        CPLayout.bshd(8, size, 0)


@pytest.mark.parametrize("seq_len", [6, 7, 2, 9])
def test_bshd_needs_a_multiple_of_twice_the_size(seq_len):
    with pytest.raises(LayoutError, match=rf"{seq_len}.*4|4.*{seq_len}"):
        CPLayout.bshd(seq_len, 2, 0)


def test_contiguous_needs_a_multiple_of_the_size():
    with pytest.raises(LayoutError, match="7"):
        CPLayout.contiguous(7, 2, 0)
    assert CPLayout.contiguous(6, 2, 1).index.tolist() == [3, 4, 5]  # not of twice the size


def test_thd_names_the_sequence_that_cannot_be_split():
    # Lengths 4, 6, 4: the second is not a multiple of 2 * cp = 4, though the total may be.
    with pytest.raises(LayoutError, match="6") as error:
        CPLayout.thd(offsets(0, 4, 10, 16), 2, 0)
    assert "4" in str(error.value) and "pad" in str(error.value)


@pytest.mark.parametrize("bad", [offsets(4, 8), offsets(0, 8, 4), torch.tensor([0.0, 4.0])])
def test_thd_checks_the_offsets(bad):
    with pytest.raises((LayoutError, GroupError), match="cu_seqlens"):
        CPLayout.thd(bad, 2, 0)


def test_offsets_may_be_overwritten_once_the_layout_is_made():
    offsets = torch.tensor([0, 8, 16])
    layouts = [CPLayout.thd(offsets, 2, rank) for rank in range(2)]
    whole = torch.arange(16)
    parts = [layout.shard(whole) for layout in layouts]
    offsets.copy_(torch.tensor([0, 4, 16]))
    assert torch.equal(layouts[0].unshard(parts), whole)


def test_shard_needs_the_whole_axis():
    layout = CPLayout.bshd(8, 2, 0)
    with pytest.raises(LayoutError, match="8"):
        layout.shard(torch.zeros(2, 4))
    with pytest.raises(AggregationError):
        layout.shard(torch.zeros(2, 16))


def test_unshard_needs_every_shard():
    layout = CPLayout.bshd(8, 2, 0)
    with pytest.raises(LayoutError, match="2"):
        layout.unshard([torch.zeros(4)])
    with pytest.raises(LayoutError, match="length 3; expected this rank's 4"):
        layout.unshard([torch.zeros(4), torch.zeros(3)])
    with pytest.raises(LayoutError, match="one part without a group"):
        layout.unshard(torch.zeros(4))


@pytest.mark.parametrize(
    ("parts", "dim", "text"),
    [
        (None, -1, "NoneType without a group"),
        ([torch.zeros(4), None], -1, "no axis -1 in NoneType"),
        ([torch.zeros(4), torch.zeros(())], -1, r"no axis -1 in shape \(\)"),
        ([torch.zeros(4), torch.zeros(4)], 1, r"no axis 1 in shape \(4,\)"),
        ([torch.zeros(2, 4), torch.zeros(3, 4)], -1, r"shapes \[\(2, 4\), \(3, 4\)\]"),
    ],
)
def test_unshard_names_what_is_no_part(parts, dim, text):
    with pytest.raises(LayoutError, match=text):
        CPLayout.bshd(8, 2, 0).unshard(parts, dim=dim)


class TestPredictingMask:
    def test_rows(self):
        # The token at t + 1 is predicted at t; the last position predicts nothing.
        mask = torch.tensor([[0, 0, 1, 1], [1, 0, 1, 0]])
        assert predicting_mask(mask).tolist() == [[0, 1, 1, 0], [0, 1, 0, 0]]

    def test_packed_sequences_do_not_predict_each_other(self):
        # Sequences 0..2 and 3..5: position 2 must not predict the first token of the second one.
        mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5, 1.0])
        got = predicting_mask(mask, cu_seqlens=torch.tensor([0, 3, 6]))
        assert got.tolist() == [1.0, 1.0, 0.0, 0.5, 1.0, 0.0]

    def test_padding_between_sequences(self):
        # Sequence 0 owns 0..1 of 0..3, sequence 1 owns 4..6 of 4..7.
        mask = torch.tensor([1, 1, 0, 0, 0, 1, 1, 0])
        got = predicting_mask(
            mask, cu_seqlens=torch.tensor([0, 2, 5]), cu_seqlens_padded=torch.tensor([0, 4, 8])
        )
        assert got.tolist() == [1, 0, 0, 0, 1, 1, 0, 0]

    def test_empty_sequences_and_a_tail(self):
        mask = torch.tensor([1, 1, 1, 0, 0])
        got = predicting_mask(mask, cu_seqlens=torch.tensor([0, 0, 2, 2, 3]))
        assert got.tolist() == [1, 0, 0, 0, 0]

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
    @pytest.mark.parametrize("shape", [(2, 4), (1, 1), (2, 0)])
    def test_shape_and_dtype_are_kept(self, dtype, shape):
        mask = torch.ones(shape).to(dtype)
        got = predicting_mask(mask)
        assert got.shape == mask.shape and got.dtype == dtype

    def test_a_row_of_packed_tokens(self):
        got = predicting_mask(torch.tensor([[1, 1, 1, 1]]), cu_seqlens=torch.tensor([0, 2, 4]))
        assert got.tolist() == [[1, 0, 1, 0]]
