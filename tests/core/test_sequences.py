"""Sums and means over tokens, and which tokens a context-parallel rank holds."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_loss_agg import (
    CPLayout,
    Microbatch,
    SequenceMean,
    SequenceSum,
    predicting_mask,
    weighted_sum,
)
from megatron_loss_agg.masks import shifted
from tests.core.meaning import F64, Read, cp_layout, lay, listed
from tests.core.operations import Operations
from tests.core.strategies import ANYTHING, EXTREMES, FLOATS, INTEGERS, microbatches
from tests.distributed import run_ranks
from tests.oracle import Sample


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_a_weighted_sum_and_its_gradient_are_those_of_a_loop(dtype):
    """Whatever lies where nothing counts."""
    unseen = [(x, 0.0) for x in EXTREMES]
    pairs = [(2.0, 0.5), (-3.0, 0.3), (1.0, 2.0), (0.0, 1.0), (7.0, -0.5), (9.0, -0.0), *unseen]
    for other in (*FLOATS, *INTEGERS):
        w = torch.tensor([v for _, v in pairs], dtype=F64).to(other)
        x = torch.tensor([v for v, _ in pairs], dtype=F64)
        losses = (x if dtype.is_floating_point else x.nan_to_num(0, 0, 0).clamp(0, 9)).to(dtype)
        losses.requires_grad_(dtype.is_floating_point)
        total = weighted_sum(w.view(2, -1), losses.view(2, -1))
        floats = [d for d in (dtype, other) if d.is_floating_point] or [torch.float32]
        assert total.dtype == torch.promote_types(floats[0], floats[-1]) and total.dim() == 0
        terms = [v * f for v, f in zip(listed(losses), listed(w), strict=True) if f]
        assert total.item() == pytest.approx(
            math.fsum(terms), rel=16 * torch.finfo(total.dtype).eps
        )
        if losses.requires_grad:
            total.backward()
            assert listed(losses.grad) == listed(w.to(dtype))
    assert weighted_sum(torch.ones(2, 0), torch.ones(2, 0, requires_grad=True)).requires_grad


def test_a_loss_that_counts_stays_what_it_is_and_weights_get_no_gradient():
    w, loss = torch.tensor([0.5, -2.0, 0.0], requires_grad=True), torch.tensor([1.0, 3.0, math.nan])
    weighted_sum(w, loss.requires_grad_()).backward()
    assert w.grad is None and loss.grad.tolist() == [0.5, -2, 0]
    for bad in (math.nan, math.inf):
        total = weighted_sum(w, torch.tensor([1.0, bad, math.nan])).item()
        assert total == pytest.approx(-bad, nan_ok=True)


def test_many_tokens_add_up_in_the_wider_dtype():
    # (1 + 2**-7)**2 - (1 + 2**-6) = 2**-14, whose terms are equal in bf16.
    a, b = (torch.tensor(x).bfloat16() for x in ([1 + 2**-7, -1], [1 + 2**-7, 1 + 2**-6]))
    assert weighted_sum(a, b).item() == 2**-14
    # 200 * 2 + 100 * 3 = 700, which uint8 cannot hold.
    total = weighted_sum(*(torch.tensor(x, dtype=torch.uint8) for x in ([2, 3], [200, 100])))
    assert total.item() == 700
    loss = torch.rand(2**22, generator=torch.Generator().manual_seed(0)) + 1
    found = weighted_sum(torch.full_like(loss, 2.0**-22), loss).item()
    # Threads decide in which order they add up. In bf16, losses alone are off by 4e-5.
    assert found == pytest.approx(loss.double().mean().item(), rel=1e-5)


def test_a_weighted_sum_compiles_as_one_graph_and_needs_no_values():
    w, loss = torch.tensor([0.0, 0.5, 2.0]), torch.tensor([math.nan, 2, 3], requires_grad=True)
    total = torch.compile(weighted_sum, fullgraph=True, backend="aot_eager")(w, loss)
    total.backward()
    assert total.item() == 7.0 and torch.equal(loss.grad, w)
    with FakeTensorMode():
        assert weighted_sum(torch.ones(3), torch.ones(3, requires_grad=True)).requires_grad


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# The positions of each rank. Of 2 * cp chunks, rank r holds chunk r and chunk 2 cp - 1 - r; in a
# pack (thd), the same inside every sequence.
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
        layout = make(axis, len(maps), rank)
        assert layout.index.dtype == torch.int64 and layout.index.tolist() == expected
        assert layout.total_len == sum(map(len, maps))
        assert (layout.rank_of_position[layout.index] == rank).all()


@given(
    kind=st.sampled_from(["bshd", "thd", "contiguous"]),
    cp=st.integers(1, 4),
    chunks=st.lists(st.integers(0, 4), max_size=4),
    shape=st.sampled_from([(-1,), (2, -1), (-1, 3), (2, -1, 1, 2)]),
)
@settings(max_examples=150, deadline=None)
def test_every_position_is_held_once_and_joining_is_the_inverse(kind, cp, chunks, shape):
    ends = [0, *accumulate(2 * cp * n for n in chunks)]
    whole: Any = torch.tensor(ends) if kind == "thd" else ends[-1]
    ranks = [getattr(CPLayout, kind)(whole, cp, rank) for rank in range(cp)]
    dim = shape.index(-1)
    x, pull = (torch.randn([ends[-1] if n == -1 else n for n in shape]) for _ in range(2))
    parts = [layout.shard(x, dim).requires_grad_() for layout in ranks]
    joined = ranks[0].unshard(parts, dim=dim)
    assert torch.equal(joined, x)
    (joined * pull).sum().backward()
    for part, layout in zip(parts, ranks, strict=True):
        assert torch.equal(part, x.index_select(dim, layout.index))
        assert torch.equal(part.grad, layout.shard(pull, dim))


def gathered_over_groups(groups: list[list[int]]) -> tuple[Any, ...]:
    """This rank's layout and part, the whole, what the loss multiplies it by, and the gradient.

    Each group has other values, and each rank another loss of the whole.
    """
    rank = dist.get_rank()
    for ranks in groups:
        new_group = dist.new_group(ranks)
        if rank in ranks:
            group, cp_rank, number = new_group, ranks.index(rank), ranks[0]
    layout = CPLayout.thd(torch.tensor([0, 4, 16]), 2, cp_rank)
    generator = torch.Generator().manual_seed(number)
    whole = torch.randn(3, 16, 2, generator=generator, dtype=F64)
    factor = torch.randn(3, 16, 2, generator=torch.Generator().manual_seed(9 + rank), dtype=F64)
    part = layout.shard(whole, dim=1).requires_grad_()
    found = layout.unshard(part, group, dim=1)
    (found.square() * factor).sum().backward()
    return layout.index, part.detach(), found.detach(), whole, factor, part.grad


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]], ids=str)
def test_a_part_gets_the_gradient_of_all_ranks_of_its_group_whichever_they_are(groups):
    of_rank = run_ranks(gathered_over_groups, 4, groups)
    for ranks in groups:
        factor = sum(of_rank[rank][4] for rank in ranks)
        for rank in ranks:
            index, part, found, whole, _, gradient = of_rank[rank]
            assert torch.equal(found, whole) and part.shape == (3, 8, 2)
            expected = (2 * whole * factor).index_select(1, index)
            torch.testing.assert_close(gradient, expected, rtol=1e-15, atol=1e-15)


def test_offsets_may_be_overwritten_once_the_layout_is_made():
    starts, whole = torch.tensor([0, 8, 16]), torch.arange(16)
    layouts = [CPLayout.thd(starts, 2, rank) for rank in range(2)]
    starts.copy_(torch.tensor([0, 4, 16]))
    assert torch.equal(layouts[0].unshard([x.shard(whole) for x in layouts]), whole)


@given(microbatches())
@settings(max_examples=150, deadline=None)
def test_a_mask_is_moved_to_the_positions_that_predict_its_tokens(given):
    """The last position of a sequence, and padding, predict nothing."""
    mask, *of_pack = (given.get(x) for x in ("loss_mask", "cu_seqlens", "cu_seqlens_padded"))
    moved, read = predicting_mask(mask, *of_pack), Read.of(given)
    wanted = [0.0] * len(read.values)
    for places in read.places:
        for t, following in pairwise(places):
            wanted[t] = read.values[following]
    assert (moved.dtype, moved.shape, listed(moved)) == (mask.dtype, mask.shape, wanted)


def test_a_shift_beyond_a_row_leaves_nothing():
    assert shifted(torch.ones(2, 3), None, 5).tolist() == [[0, 0, 0]] * 2


def mean_by_loop(read: Read, x: Tensor, pull: Tensor) -> tuple[list[float], list[float]]:
    """The mean of its sequence at every token, and the gradient of ``sum(pull * mean)``."""
    values, pulls = listed(x), listed(pull)
    means, slopes = [0.0] * len(values), [0.0] * len(values)
    for places in read.places:
        if total := math.fsum(read.values[t] for t in places):
            parts = (read.values[t] * values[t] for t in places if read.values[t])
            mean, back = math.fsum(parts) / total, math.fsum(pulls[t] for t in places)
            for t in places:
                means[t], slopes[t] = mean, read.values[t] * back / total
    return means, slopes


@given(microbatches(), st.sampled_from([F64, torch.float32]), st.data())
@settings(max_examples=200, deadline=None)
def test_sums_and_means_of_sequences_and_their_gradient_are_those_of_a_loop(given, dtype, data):
    read, room = Read.of(given), 1e-12 if dtype == F64 else 2e-5
    numbers = [data.draw(st.floats(-3, 3) if m else ANYTHING) for m in read.values]
    x = torch.tensor(numbers, dtype=dtype).view(read.shape).requires_grad_()
    microbatch, pull = Microbatch(**given), torch.linspace(-1, 2, x.numel(), dtype=dtype)
    out = SequenceMean(microbatch)(x)
    (out * pull.view(x.shape)).sum().backward()
    for got, wanted in zip((out, x.grad), mean_by_loop(read, x, pull), strict=True):
        assert listed(got) == pytest.approx(wanted, rel=0, abs=room)
    values = listed(x)
    sums = [math.fsum(read.values[t] * values[t] for t in p if read.values[t]) for p in read.places]
    assert listed(SequenceSum(microbatch)(x)) == pytest.approx(sums, rel=0, abs=100 * room)


# Of 2 * 4 chunks: samples cut over all ranks, fractional and empty masks, and a sample whose
# tokens lie on the first rank alone; in the second microbatch no other rank has any token.
SAMPLES = [
    Sample((1.0,) * 13),
    Sample((0.0, 1.0, 0.0, 0.5, 1.0, 1.0, 0.0)),
    Sample((0.0,) * 5),
    Sample((1.0,)),
]
SHARDED = [
    lay(samples, layout, multiple=8)
    for samples in (SAMPLES, [Sample((1.0,)), Sample((0.0, 0.0, 0.0))])
    for layout in ("thd", "thd_row", "bshd")
]


def values_of(mask: Tensor) -> Tensor:
    """NaN where nothing counts."""
    return torch.arange(mask.numel()).double().sin().view_as(mask).masked_fill(mask == 0, math.nan)


def pulled(means: Tensor, pull: int) -> None:
    """Backward of a loss of the means, whose gradient is other at every position."""
    (means * pull * torch.arange(means.shape[-1])).sum().backward()


def on_ranks() -> list[tuple[Any, ...]]:
    """Sums of sequences, their joined means, this rank's part of the gradient; and collectives."""
    found, world, rank = [], dist.group.WORLD, dist.get_rank()
    for inputs in SHARDED:
        cut = cp_layout(inputs, dist.get_world_size(), rank)
        x = cut.shard(values_of(inputs["loss_mask"])).requires_grad_()
        with Operations() as forward:
            out = SequenceMean(Microbatch(**inputs), cut, world)(x)
        part = out.detach().requires_grad_()
        means = cut.unshard(part, group=world)
        pulled(means, rank + 1)
        with Operations() as backward:
            out.backward(part.grad)
        sums = SequenceSum(Microbatch(**inputs), cut, world)(x.detach().bfloat16())
        collectives = len(forward.collectives), len(backward.collectives)
        found.append((sums, means.detach(), x.grad, collectives))
    return found


@pytest.mark.parametrize("cp", [2, 4])
def test_sums_and_means_of_sequences_over_ranks_are_those_of_one_process(cp):
    for inputs, *of_ranks in zip(SHARDED, *run_ranks(on_ranks, cp), strict=True):
        sums, means, gradients, collectives = zip(*of_ranks, strict=True)
        # One forward and its adjoint backward, also on ranks without a token.
        assert collectives == ((1, 1),) * cp
        mask, cut, whole = inputs["loss_mask"], cp_layout(inputs, cp, 0), Microbatch(**inputs)
        x = values_of(mask).requires_grad_()
        expected = SequenceMean(whole)(x)
        # Every rank's loss is of all shards: a shard's gradient is the sum over ranks of theirs.
        pulled(expected, sum(range(cp + 1)))
        torch.testing.assert_close(cut.unshard(gradients), x.grad, rtol=1e-12, atol=1e-15)
        for of_rank, joined in zip(sums, means, strict=True):  # every rank has them all
            torch.testing.assert_close(joined, expected, rtol=1e-12, atol=1e-15)
            torch.testing.assert_close(of_rank, SequenceSum(whole)(x.bfloat16()), rtol=1e-6, atol=0)


def preference_sums() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and length of each whole sequence, each token's length, and its gradient; on a rank."""
    rank, world = dist.get_rank(), dist.group.WORLD
    layout = cp_layout(SHARDED[0], 2, rank)
    sums = SequenceSum(Microbatch(**SHARDED[0]), layout, world)
    x = layout.shard(values_of(SHARDED[0]["loss_mask"])).requires_grad_()
    means = sums(x) / sums.lengths
    means.nan_to_num().sum().backward()
    assert sums.lengths.dtype == F64 and sums.sample_index.dtype == torch.int64
    length_of_token = torch.cat([sums.lengths, torch.zeros(1)])[sums.sample_index]
    return means.detach(), sums.lengths, layout.unshard(length_of_token, world), x.grad


def test_lengths_and_sample_index_are_those_of_whole_sequences():
    inputs, mask = SHARDED[0], SHARDED[0]["loss_mask"].double()
    starts, sizes = inputs["cu_seqlens_padded"][:-1], inputs["cu_seqlens"].diff()
    sequences = [slice(a, a + n) for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]
    values, length_of_token = values_of(mask).nan_to_num(), torch.zeros_like(mask)
    for sequence in sequences:
        length_of_token[sequence] = mask[sequence].sum()
    means = torch.stack([mask[s] @ values[s] / mask[s].sum() for s in sequences])
    found = run_ranks(preference_sums, 2)
    for found_means, found_lengths, found_length_of_token, _ in found:
        assert found_lengths.tolist() == [13.0, 3.5, 0.0, 1.0]
        torch.testing.assert_close(found_means, means, equal_nan=True)
        assert torch.equal(found_length_of_token, length_of_token)
    # Each rank's loss is the sum of all means.
    gradients = cp_layout(inputs, 2, 0).unshard([gradient for *_, gradient in found])
    expected = torch.where(mask == 0, 0, 2 * mask / length_of_token)
    torch.testing.assert_close(gradients, expected, rtol=1e-15, atol=0)


def test_nan_that_counts_stays_in_its_sequence():
    mean = SequenceMean(Microbatch(torch.ones(2, 2)))(torch.tensor([[math.nan, 1.0], [1.0, 3.0]]))
    assert mean[0].isnan().all() and mean[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_means_of_half_precision_are_taken_in_fp32_or_more(dtype):
    # 4100 ones in bf16 would stop at 256, and it rounds 1 / 4100.
    x, mask = torch.ones(1, 4100, dtype=dtype, requires_grad=True), torch.ones(1, 4100, dtype=F64)
    mean = SequenceMean(Microbatch(mask))
    mask.zero_()  # which a script may do once the mean is made
    out = mean(x)
    assert out.dtype == torch.promote_types(dtype, torch.float32) and out[0, 0] == 1
    out[0, 0].backward()
    assert x.grad.dtype == dtype
