"""Reading the masks of many microbatches at once: sums, counts, and which of them is bad."""

from __future__ import annotations

import pickle
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, masks
from megatron_loss_agg.errors import GroupError, MaskError
from megatron_loss_agg.masks import MaskSums, sample_sums
from tests.core.steps import LAYOUTS, lay, samples

ONE = torch.tensor([0, 2, 4])
GOOD = {
    "rows": Microbatch(torch.ones(2, 3)),
    "wide rows": Microbatch(torch.ones(2, 4)),
    "pack": Microbatch(torch.ones(4), ONE),
    "padded pack": Microbatch(
        torch.tensor([1.0, 1, 0, 1, 1, 0]), ONE, cu_seqlens_padded=3 * ONE // 2
    ),
    "no rows": Microbatch(torch.ones(0, 3)),
    "no samples": Microbatch(torch.zeros(2), torch.tensor([0])),
    "no tokens": Microbatch(torch.ones(2, 0)),
}
BAD = {
    "negative": (Microbatch(torch.tensor([[-1.0, 2.0]])), MaskError),
    "NaN": (Microbatch(torch.tensor([torch.nan, 1, 1, 1]), ONE), MaskError),
    "infinite": (Microbatch(torch.full((2, 3), torch.inf)), MaskError),
    "beyond fp32": (Microbatch(torch.full((1, 2), 1e39, dtype=torch.float64)), MaskError),
    "first offset": (Microbatch(torch.zeros(6), ONE + 1), GroupError),
    "padded first offset": (
        Microbatch(torch.zeros(9), ONE, cu_seqlens_padded=ONE + 1),
        GroupError,
    ),
    "padded decreasing": (
        Microbatch(torch.zeros(9), 0 * ONE, cu_seqlens_padded=torch.tensor([0, 3, 1])),
        GroupError,
    ),
    "decreasing": (Microbatch(torch.zeros(4), torch.tensor([0, 3, 1])), GroupError),
    "wrapping": (Microbatch(torch.ones(8), torch.tensor([0, 2**63 - 1, -2, 8])), GroupError),
    "padded wrapping": (
        Microbatch(torch.zeros(9), ONE, cu_seqlens_padded=torch.tensor([0, 2**63 - 1, -2])),
        GroupError,
    ),
    "beyond the mask": (Microbatch(torch.zeros(3), ONE), GroupError),
    "outside of samples": (Microbatch(torch.ones(5), ONE), MaskError),
    "padding": (Microbatch(torch.ones(8), ONE, cu_seqlens_padded=2 * ONE), MaskError),
    "padded place": (Microbatch(torch.zeros(9), ONE, cu_seqlens_padded=ONE // 2), GroupError),
}


def chunks_of(tokens: int):
    return mock.patch.object(masks, "_CHUNK", tokens)


@given(
    step=st.lists(st.tuples(samples(max_size=4), st.sampled_from(LAYOUTS)), max_size=6),
    chunk=st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
def test_sums_and_counts_of_any_mixture_are_those_of_the_samples(step, chunk):
    microbatches = [Microbatch(**lay(of_one, layout).inputs) for of_one, layout in step]
    expected = [sum(sample.mask) for of_one, _ in step for sample in of_one]
    with chunks_of(chunk):
        found = MaskSums.read(microbatches)
    assert found.error is None
    assert found.by_sample.tolist() == pytest.approx(expected, rel=1e-14)
    assert found.active_tokens == sum(
        m != 0 for of_one, _ in step for sample in of_one for m in sample.mask
    )
    alone = [x for microbatch in microbatches for x in sample_sums(microbatch).tolist()]
    assert alone == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64])
def test_masks_of_any_dtype_are_counted(dtype):
    step = [Microbatch(torch.ones(2, 300).to(dtype)), Microbatch(torch.ones(1, 300))]
    found = MaskSums.read(step)
    assert found.by_sample.tolist() == [300, 300, 300]
    assert found.active_tokens == 900


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", [0, 2, 5])
def test_the_error_names_the_first_bad_microbatch(bad, place, chunk):
    microbatch, kind = BAD[bad]
    step = [*GOOD.values()]
    step[place:place] = [microbatch]
    with chunks_of(chunk):
        error = MaskSums.read([*step, BAD["negative"][0]]).error
    assert isinstance(error, kind)
    assert str(error).startswith(f"microbatch {place}: ")


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_microbatch_is_found_among_its_like(bad):
    microbatch, kind = BAD[bad]
    good = GOOD["padded pack" if microbatch.cu_seqlens_padded is not None else "pack"]
    if microbatch.cu_seqlens is None:
        good = Microbatch(torch.ones_like(microbatch.loss_mask))
    others = [GOOD["no tokens"]] * 2
    error = MaskSums.read([*others, good, good, microbatch, good]).error
    assert isinstance(error, kind)
    alone = MaskSums.read([microbatch]).error
    assert str(error) == str(alone).replace("microbatch 0", "microbatch 4")


@pytest.mark.parametrize("bad", [name for name, (m, _) in BAD.items() if m.cu_seqlens is not None])
def test_nothing_is_read_outside_of_the_masks(bad):
    microbatch, _ = BAD[bad]
    good = GOOD["padded pack" if microbatch.cu_seqlens_padded is not None else "pack"]
    packs = [good, microbatch, good]
    segments = masks._Segments.of(packs)
    for i, pack in enumerate(packs):
        bounds = segments.of_packs(range(i, i + 1))
        assert bool((bounds.diff() >= 0).all())
        assert 0 <= int(bounds[0]) <= int(bounds[-1]) <= pack.loss_mask.numel()


def test_padded_offsets_that_decrease_are_named():
    microbatch, _ = BAD["padded decreasing"]
    assert "cu_seqlens_padded must start at 0 and not decrease" in str(
        MaskSums.read([microbatch]).error
    )


def test_masks_that_are_large_together_are_good():
    large = Microbatch(torch.full((1, 2), 1e38))
    assert MaskSums.read([large] * 8).error is None


def test_a_microbatch_whose_sum_is_beyond_fp32_is_named():
    step = [GOOD["rows"], Microbatch(torch.full((2, 64), 4e36))]
    with pytest.raises(MaskError, match=r"microbatch 1: loss_mask sums to 5.12e\+38, beyond fp32"):
        StepPlan.build(LossAggregation(mode="sample_mean"), step)


def test_a_plan_can_be_pickled():
    step = [Microbatch(torch.ones(2, 3), prompt_ids=torch.arange(2))]
    plan = StepPlan.build(LossAggregation(mode="prompt_mean"), step)
    assert pickle.loads(pickle.dumps(plan)).weights(0).tolist() == plan.weights(0).tolist()
