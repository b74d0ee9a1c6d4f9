"""Counting: nothing is lost to a narrow type, to padding, or to ids that look alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, token_weights
from megatron_loss_agg.errors import MaskError
from megatron_loss_agg.exchange import Groups
from megatron_loss_agg.masks import active_tokens
from tests import oracle
from tests.core.steps import LAYOUTS, lay, steps
from tests.oracle import Sample

F64 = torch.float64


@given(step=steps(max_ranks=1))
@settings(max_examples=50, deadline=None)
def test_counts_describe_the_whole_step(step):
    microbatches = [Microbatch(**lay(mb, "thd_padded").inputs) for mb in step[0]]
    counts = StepPlan.build(LossAggregation(mode="prompt_mean"), microbatches).counts
    values = [m for _, sample in oracle.samples_of(step) for m in sample.mask]
    assert float(counts.tokens) == pytest.approx(sum(values), rel=1e-13)
    assert int(counts.active_tokens) == sum(1 for m in values if m)
    assert int(counts.samples) == oracle.number_of(step, "sample")
    assert int(counts.prompts) == oracle.number_of(step, "prompt")
    assert int(counts.microbatches) == len(step[0])


@given(step=steps(max_ranks=1))
@settings(max_examples=20, deadline=None)
def test_rollouts_are_counted(step):
    microbatches = [Microbatch(**lay(mb, "bshd").inputs) for mb in step[0]]
    counts = StepPlan.build(LossAggregation(mode="rollout_mean"), microbatches).counts
    assert int(counts.rollouts) == oracle.number_of(step, "rollout")


@pytest.mark.parametrize("name", ["prompt_ids", "rollout_ids"])
@pytest.mark.parametrize(
    "ids",
    [(2**24, 2**24 + 1), (2**53, 2**53 + 1), (0, 2**32), (-1, 2**32 - 1), (-(2**63), 2**63 - 1)],
)
def test_ids_that_a_narrower_type_confuses_stay_apart(name, ids):
    # Two groups of 1 and 2 tokens: 1/(2*1) and 1/(2*2); taken for one group, 1/3 each.
    agg = LossAggregation(mode=name.replace("ids", "mean"))
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    w = token_weights(agg, mask, **{name: torch.tensor(ids)}, dtype=F64)
    assert w.tolist() == [[1 / 2, 0], [1 / 4, 1 / 4]]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16],
)
def test_counts_do_not_overflow_or_round_in_the_masks_dtype(dtype):
    # 4099 is above what uint8, int8, fp16 (2048) and bf16 (256) count one by one.
    mask = torch.ones(1, 4099).to(dtype)
    plan = StepPlan.build(LossAggregation(mode="sample_mean"), [Microbatch(mask)])
    assert float(plan.counts.tokens) == 4099
    assert plan.weights(0, dtype=F64)[0, 0].item() == 1 / 4099


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_are_the_fp64_ones_but_for_rounding_each_factor(dtype):
    agg = LossAggregation(mode="prompt_mean")
    step = {"loss_mask": torch.tensor([[0.1, 0.7], [1.0, 0.3], [3.0, 0.0]])}
    step["prompt_ids"] = torch.tensor([7, 7, 9])
    exact = token_weights(agg, **step, dtype=F64)
    w = token_weights(agg, **step, dtype=dtype)
    assert w.dtype == dtype
    # Mask, coefficient and their product are rounded: at most half a unit each.
    torch.testing.assert_close(w.double(), exact, rtol=1.5 * torch.finfo(dtype).eps, atol=0)


def test_half_precision_weights_are_rounded_once():
    mask = torch.rand(4, 16, generator=torch.Generator().manual_seed(0))
    agg = LossAggregation(mode="sample_mean")
    w = token_weights(agg, mask, dtype=torch.bfloat16)
    assert torch.equal(w, token_weights(agg, mask).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, torch.int64, "float32"])
def test_weights_in_a_dtype_where_they_would_vanish_are_refused(dtype):
    # One of 2**25 tokens weighs 3e-8, which fp16 rounds to 0.
    agg = LossAggregation(mode="token_mean")
    with pytest.raises(MaskError, match="expected a floating-point one of the range of fp32"):
        token_weights(agg, torch.ones(1, 3), dtype=dtype)


def test_more_active_tokens_than_fp32_can_count():
    assert int(active_tokens(torch.ones(1).expand(2**24 + 3))) == 2**24 + 3


def test_a_group_that_is_none_of_the_step_sums_to_nothing():
    groups = Groups(torch.tensor([1, 3]), torch.tensor([2.0, 4.0], dtype=F64))
    assert groups.sums_of(torch.tensor([0, 1, 2, 3, 5])).tolist() == [0, 2, 0, 4, 0]


def test_weights_are_fp32_unless_told_otherwise():
    agg = LossAggregation(mode="token_mean")
    plan = StepPlan.build(agg, [Microbatch(torch.ones(1, 3))])
    assert plan.weights(0).dtype == torch.float32
    assert token_weights(agg, torch.ones(1, 3)).dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_have_the_shape_of_the_mask(layout):
    laid = lay([Sample((1.0, 1.0)), Sample((1.0,))], layout)
    w = token_weights(LossAggregation(mode="sample_mean"), **laid.inputs)
    assert w.shape == laid.inputs["loss_mask"].shape


def test_padded_offsets_say_where_a_sample_lies():
    # Sample 0 owns positions 0..1, sample 1 owns 4..6, the rest is padding: M_0 = 2, M_1 = 3.
    w = token_weights(
        LossAggregation(mode="sample_mean"),
        torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 0, 0]),
        cu_seqlens=torch.tensor([0, 2, 5]),
        cu_seqlens_padded=torch.tensor([0, 4, 8]),
        dtype=F64,
    )
    expected = torch.tensor([1 / 4, 1 / 4, 0, 0, 1 / 6, 1 / 6, 1 / 6, 0, 0], dtype=F64)
    torch.testing.assert_close(w, expected, rtol=1e-15, atol=0)


def test_weights_carry_no_gradient_and_leave_the_mask_alone():
    mask = torch.ones(1, 3, requires_grad=True)
    w = token_weights(LossAggregation(mode="token_mean"), mask)
    assert not w.requires_grad
    assert mask.tolist() == [[1.0, 1.0, 1.0]]
