"""Each bad input: its error, and a text that says what was got and what to change."""

from __future__ import annotations

import math
import re

import pytest
import torch

from megatron_loss_agg import AggregationError, LossAggregation, Microbatch, StepPlan, token_weights
from megatron_loss_agg.errors import DivisorError, FunctionError, GroupError, MaskError, ModeError

AGG = LossAggregation(mode="sample_mean")
ONES = torch.ones(6)


def test_every_error_is_a_value_error():
    for error in (ModeError, DivisorError, MaskError, GroupError, FunctionError):
        assert issubclass(error, AggregationError)
    assert issubclass(AggregationError, ValueError)


@pytest.mark.parametrize("mode", ["dapo", "", "TOKEN_MEAN", "token-mean", None, 3])
def test_unknown_mode(mode):
    with pytest.raises(ModeError) as error:
        LossAggregation(mode=mode)
    text = str(error.value)
    assert repr(mode) in text
    for known in ("token_mean", "sample_mean", "rollout_mean", "prompt_mean", "constant"):
        assert known in text


def test_options_are_given_by_name():
    with pytest.raises(TypeError):
        LossAggregation("token_mean")


def test_the_config_is_frozen():
    with pytest.raises(AttributeError):
        AGG.mode = "token_mean"


@pytest.mark.parametrize("empty", ["drop", "", None, True])
def test_unknown_empty(empty):
    with pytest.raises(ModeError, match="empty") as error:
        LossAggregation(mode="sample_mean", empty=empty)
    assert repr(empty) in str(error.value)
    assert "count" in str(error.value) and "skip" in str(error.value)


@pytest.mark.parametrize("count", ["tokens", "", 2])
def test_unknown_count(count):
    with pytest.raises(ModeError, match="count") as error:
        LossAggregation(mode="prompt_mean", count=count)
    assert repr(count) in str(error.value)


@pytest.mark.parametrize("mode", ["token_mean", "sum", "sample_sum", "microbatch_mean"])
def test_count_is_for_means_over_groups(mode):
    with pytest.raises(ModeError, match=rf"count.*{mode}"):
        LossAggregation(mode=mode, count="sample")


def test_constant_needs_a_divisor():
    with pytest.raises(DivisorError, match=r"constant.*divisor|divisor.*constant"):
        LossAggregation(mode="constant")


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "rollout_mean", "prompt_mean"])
def test_means_refuse_a_divisor(mode):
    with pytest.raises(DivisorError, match=mode) as error:
        LossAggregation(mode=mode, divisor=2.0)
    assert "divisor" in str(error.value)


@pytest.mark.parametrize("mode", ["constant", "sum"])
@pytest.mark.parametrize("divisor", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, True, False, "4"])
def test_divisor_must_be_a_finite_positive_number(mode, divisor):
    with pytest.raises(DivisorError, match="divisor") as error:
        LossAggregation(mode=mode, divisor=divisor)
    assert repr(divisor) in str(error.value)
    assert re.search("finite|positive|> 0", str(error.value))


@pytest.mark.parametrize("divisor", [1e-40, 1e46])
def test_a_divisor_has_an_inverse_in_fp32(divisor):
    with pytest.raises(DivisorError, match=r"from 1e-37 to 1e\+37: weights are fp32"):
        LossAggregation(mode="sum", divisor=divisor)


def test_a_mask_times_its_coefficient_fits_fp32():
    agg = LossAggregation(mode="sum", divisor=1e-35)
    assert token_weights(agg, torch.ones(1, 2)).tolist() == [[pytest.approx(1e35)] * 2]
    text = r"microbatch 0: loss_mask over the divisor 1e-35 sums to 2e\+45, beyond fp32"
    with pytest.raises(MaskError, match=text):
        token_weights(agg, torch.full((1, 2), 1e10))


def test_a_mask_sum_has_an_inverse_in_fp32():
    mask = torch.tensor([[1.0, 1.0], [1e-42, 0]], dtype=torch.float64)
    with pytest.raises(MaskError, match="sample sums to 1e-42, whose inverse overflows fp32"):
        token_weights(AGG, mask)
    assert torch.equal(token_weights(LossAggregation(mode="sum"), mask), mask.float())


@pytest.mark.parametrize("divisor", [1, 4096, 0.5, 1e30])
def test_good_divisors(divisor):
    assert LossAggregation(mode="constant", divisor=divisor).divisor == divisor


@pytest.mark.parametrize("function", [None, "module:name", 3])
def test_custom_needs_a_callable(function):
    with pytest.raises(FunctionError, match="function"):
        LossAggregation(mode="custom", function=function)


def test_other_modes_refuse_a_function():
    with pytest.raises(AggregationError, match="function"):
        LossAggregation(mode="sum", function=lambda plan, i: None)


@pytest.mark.parametrize(
    "returned",
    [
        torch.ones(2, 3),  # the mask is [1, 3]
        torch.tensor([[1.0, math.nan, 0.0]]),
        torch.tensor([[1.0, math.inf, 0.0]]),
        [1.0, 1.0, 1.0],
        None,
    ],
    ids=["shape", "nan", "inf", "list", "none"],
)
def test_custom_weights_are_checked(returned):
    agg = LossAggregation(mode="custom", function=lambda plan, i: returned)
    with pytest.raises(FunctionError):
        StepPlan.build(agg, [Microbatch(torch.ones(1, 3))]).weights(0)


@pytest.mark.parametrize("bad", [-1.0, -1e-30, math.nan, math.inf, -math.inf])
def test_mask_values_must_be_finite_and_not_negative(bad):
    mask = torch.ones(2, 3)
    mask[1, 2] = bad
    with pytest.raises(MaskError, match="mask"):
        token_weights(AGG, mask)
    with pytest.raises(MaskError, match="mask"):
        StepPlan.build(AGG, [Microbatch(torch.ones(1, 2)), Microbatch(mask)])


@pytest.mark.parametrize("shape", [(), (6,), (1, 2, 3)])
def test_without_offsets_the_mask_is_batch_by_sequence(shape):
    with pytest.raises(MaskError, match=r"shape|cu_seqlens"):
        token_weights(AGG, torch.ones(shape))


@pytest.mark.parametrize("shape", [(), (2, 3), (1, 1, 6)])
def test_with_offsets_the_mask_is_flat(shape):
    with pytest.raises(MaskError, match=r"mask.*shape|shape.*mask|flat|\[tokens\]"):
        token_weights(AGG, torch.ones(shape), cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.parametrize(
    "mask",
    [
        [1.0, 1.0],
        None,
        torch.ones(1, 3, dtype=torch.complex64),
        torch.ones(2, 3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["list", "none", "complex", "sparse", "nested"],
)
def test_the_mask_is_a_real_tensor(mask):
    with pytest.raises(MaskError, match="expected a real, dense tensor"):
        token_weights(AGG, mask)


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        ([1, 3, 6], "start|0"),
        ([0, 4, 3, 6], "decreas|order|sorted"),
        ([0, 3, 7], "7|6"),
        ([], "offset|empty|cu_seqlens"),
    ],
    ids=["start", "decreasing", "beyond", "empty"],
)
def test_bad_offsets(offsets, says):
    with pytest.raises(GroupError, match="cu_seqlens") as error:
        token_weights(AGG, ONES, cu_seqlens=torch.tensor(offsets, dtype=torch.int32))
    assert re.search(says, str(error.value))


@pytest.mark.parametrize(
    "offsets",
    [torch.tensor([0.0, 6.0]), torch.tensor([[0, 6]]), [0, 6]],
    ids=["float", "2d", "list"],
)
def test_offsets_are_a_vector_of_integers(offsets):
    with pytest.raises(GroupError, match="cu_seqlens"):
        token_weights(AGG, ONES, cu_seqlens=offsets)


@pytest.mark.parametrize(
    "padded",
    [[0, 6], [0, 1, 6], [0, 4, 7], [1, 4, 6], [0, 4, 3]],
    ids=["other length", "sample does not fit", "beyond the mask", "start", "decreasing"],
)
def test_bad_padded_offsets(padded):
    # Two samples of 2 and 1 real tokens.
    with pytest.raises(GroupError, match="cu_seqlens_padded"):
        token_weights(
            AGG,
            torch.zeros(6),
            cu_seqlens=torch.tensor([0, 2, 3]),
            cu_seqlens_padded=torch.tensor(padded),
        )


def test_padded_offsets_need_the_real_ones():
    with pytest.raises(GroupError, match="cu_seqlens"):
        token_weights(AGG, ONES, cu_seqlens_padded=torch.tensor([0, 6]))


@pytest.mark.parametrize("position", [2, 3, 7], ids=["between", "between", "tail"])
def test_active_padding(position):
    # Samples own 0..1 and 4..6; 2, 3 and 7 are padding.
    mask = torch.zeros(8)
    mask[position] = 1.0
    with pytest.raises(MaskError, match=r"padding|outside"):
        token_weights(
            AGG,
            mask,
            cu_seqlens=torch.tensor([0, 2, 5]),
            cu_seqlens_padded=torch.tensor([0, 4, 7]),
        )


def test_active_tokens_after_the_last_sequence():
    with pytest.raises(MaskError, match=r"\(of 6 tokens; \{'cu_seqlens': \[0, 3, 5\]\}\)"):
        token_weights(AGG, ONES, cu_seqlens=torch.tensor([0, 3, 5]))


@pytest.mark.parametrize(
    ("mode", "name"), [("prompt_mean", "prompt_ids"), ("rollout_mean", "rollout_ids")]
)
class TestIds:
    def weights(self, mode, name, ids):
        return token_weights(LossAggregation(mode=mode), torch.ones(2, 3), **{name: ids})

    def test_missing(self, mode, name):
        with pytest.raises(GroupError, match=name) as error:
            self.weights(mode, name, None)
        assert mode in str(error.value)

    def test_missing_in_one_microbatch_only(self, mode, name):
        good = Microbatch(torch.ones(2, 3), **{name: torch.tensor([1, 2])})
        with pytest.raises(GroupError, match=name):
            StepPlan.build(LossAggregation(mode=mode), [good, Microbatch(torch.ones(2, 3))])

    @pytest.mark.parametrize("ids", [[1], [1, 2, 3], [[1, 2]], []], ids=str)
    def test_not_one_for_each_sample(self, mode, name, ids):
        with pytest.raises(GroupError, match=name) as error:
            self.weights(mode, name, torch.tensor(ids, dtype=torch.int64))
        assert "2" in str(error.value)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
    def test_not_integers(self, mode, name, dtype):
        with pytest.raises(GroupError, match=name) as error:
            self.weights(mode, name, torch.ones(2, dtype=dtype))
        assert str(dtype) in str(error.value)


def test_the_plan_knows_its_microbatches():
    plan = StepPlan.build(AGG, [Microbatch(torch.ones(1, 2))])
    with pytest.raises((IndexError, AggregationError)):
        plan.weights(1)
