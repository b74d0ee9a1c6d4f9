"""Counting: nothing is lost to a narrow type or to padding, and no bad mask goes unnamed."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

from megatron_loss_agg import Microbatch, StepPlan, token_weights
from megatron_loss_agg.errors import AggregationError, GroupError, MaskError
from tests.core.steps import aggregation, assert_counts, lay
from tests.oracle import Sample

F64 = torch.float64


def test_microbatches_of_any_size_are_counted_whole():
    # From a row to more tokens than any cache, whole or cut where they are read.
    for layout in ("bshd", "thd_padded"):
        step = [[Sample((1.0, 0.5) * n)] * k for n, k in ((35_000, 1), (9_000, 7), (1, 3), (0, 2))]
        plan = StepPlan.build(
            aggregation("sample_mean"), [Microbatch(**lay(mb, layout).inputs) for mb in step]
        )
        assert_counts(plan.counts, [step], "sample_mean")
        sums = [plan.group_sums("sample", i).tolist() for i in range(len(step))]
        assert sums == [[52_500], [13_500] * 7, [1.5] * 3, [0, 0]]


@pytest.mark.parametrize("unit", ["prompt", "rollout"])
@pytest.mark.parametrize(
    "ids",
    [(2**24, 2**24 + 1), (2**53, 2**53 + 1), (0, 2**32), (-1, 2**32 - 1), (-(2**63), 2**63 - 1)],
)
def test_ids_that_a_narrower_type_confuses_stay_apart(unit, ids):
    # Two groups of 1 and 2 tokens: 1/(2*1) and 1/(2*2); taken for one group, 1/3 each.
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    named = {f"{unit}_ids": torch.tensor(ids)}
    w = token_weights(aggregation(f"{unit}_mean"), mask, **named, dtype=F64)
    assert w.tolist() == [[1 / 2, 0], [1 / 4, 1 / 4]]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int32", "int64", "float16", "float64"])
def test_counts_do_not_overflow_or_round_in_the_masks_dtype(dtype):
    # 4099 is above what uint8, int8, fp16 (2048) and bf16 (256) count one by one.
    masks = [torch.ones(1, 4099).to(getattr(torch, dtype)), torch.ones(1, 4099).bfloat16()]
    masks.append(torch.ones(1, 4099))
    plan = StepPlan.build(aggregation("sample_mean"), [Microbatch(mask) for mask in masks])
    assert float(plan.counts.tokens) == int(plan.counts.active_tokens) == 3 * 4099
    assert plan.weights(0, dtype=F64)[0, 0].item() == 1 / 4099 / 3


def test_a_bool_of_any_byte_counts_once():
    mask = torch.tensor([[255, 0, 1]], dtype=torch.uint8).view(torch.bool)
    for step in (Microbatch(mask), Microbatch(mask, torch.tensor([0, 3]))):
        plan = StepPlan.build(aggregation("token_mean"), [step])
        assert (plan.mask_sums(0).tolist(), plan.counts.active_tokens) == ([2], 2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "pack"])
def test_more_active_tokens_than_fp32_can_count(packed, dtype):
    number = 2**24 + 3
    mask = torch.ones(1, 1, dtype=dtype).expand(1, number)
    step = [Microbatch(mask, torch.tensor([0, number]) if packed else None)]
    counts = StepPlan.build(aggregation("token_mean"), step).counts
    assert float(counts.tokens) == int(counts.active_tokens) == number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_are_the_fp64_ones_but_for_rounding_each_factor(dtype):
    step = {"loss_mask": torch.tensor([[0.1, 0.7], [1.0, 0.3], [3.0, 0.0]])}
    step["prompt_ids"] = torch.tensor([7, 7, 9])
    exact = token_weights(aggregation("prompt_mean"), **step, dtype=F64)
    w = token_weights(aggregation("prompt_mean"), **step, dtype=dtype)
    assert w.dtype == dtype
    # Mask, coefficient and their product are rounded: at most half a unit each.
    torch.testing.assert_close(w.double(), exact, rtol=1.5 * torch.finfo(dtype).eps, atol=0)
    default = token_weights(aggregation("prompt_mean"), **step)
    of_plan = StepPlan.build(aggregation("prompt_mean"), [Microbatch(**step)]).weights(0)
    assert default.dtype == of_plan.dtype == torch.float32
    if dtype == torch.bfloat16:  # rounded once
        assert torch.equal(w, default.bfloat16())


def test_weights_carry_no_gradient_and_leave_the_mask_alone():
    mask = torch.ones(1, 3, requires_grad=True)
    assert not token_weights(aggregation("token_mean"), mask).requires_grad
    assert mask.tolist() == [[1.0, 1.0, 1.0]]


def test_a_group_that_is_none_of_the_step_sums_to_nothing():
    # Prompts 0, 2 and 5 have rejected samples alone, and are skipped.
    step = Microbatch(
        torch.tensor([[3.0], [2.0], [3.0], [4.0], [3.0]]),
        prompt_ids=torch.tensor([0, 1, 2, 3, 5]),
        rejected=torch.tensor([True, False, True, False, True]),
    )
    plan = StepPlan.build(aggregation("prompt_mean", rejected="skip"), [step])
    assert plan.group_sums("prompt", 0).tolist() == [0, 2, 0, 4, 0]
    assert plan.weights(0).tolist() == [[0], [0.5], [0], [0.5], [0]]


def test_a_plan_can_be_pickled_and_its_coefficients_are_sent_without_the_rest():
    step = [Microbatch(torch.ones(2, 3), prompt_ids=torch.arange(2))]
    plan = StepPlan.build(aggregation("prompt_mean"), step)
    assert torch.equal(pickle.loads(pickle.dumps(plan)).weights(0), plan.weights(0))
    of_many = StepPlan.from_mask_sums(aggregation("token_mean"), [[1.0]] * 10_000)
    assert len(pickle.dumps(of_many.coefficients(0))) < 1000


def test_counts_are_beyond_int32():
    mask = torch.full((1, 3), 2**30, dtype=torch.int32)
    assert mask.sum(dtype=torch.int32).item() < 0
    plan = StepPlan.build(aggregation("token_mean"), [Microbatch(mask)])
    assert float(plan.counts.tokens) == 3 * 2**30


ONE = torch.tensor([0, 2, 4])


def pack(tokens: torch.Tensor, offsets: object, padded: object = None) -> Microbatch:
    offsets, padded = (None if x is None else torch.as_tensor(x) for x in (offsets, padded))
    return Microbatch(tokens, offsets, cu_seqlens_padded=padded)


GOOD = {
    "rows": Microbatch(torch.ones(2, 3)),
    "wide rows": Microbatch(torch.ones(2, 4)),
    "pack": pack(torch.ones(4), ONE),
    "padded pack": pack(torch.tensor([1.0, 1, 0, 1, 1, 0]), ONE, 3 * ONE // 2),
    "no rows": Microbatch(torch.ones(0, 3)),
    "no samples": pack(torch.zeros(2), [0]),
    "no tokens": Microbatch(torch.ones(2, 0)),
}
LONG = Microbatch(torch.ones(3, 30_000))  # more tokens than are read at once
# A bad microbatch, and what is said of it.
BAD_MASKS = {
    "negative": (Microbatch(torch.tensor([[-1.0, 2.0]])), "finite"),
    "barely negative": (Microbatch(torch.tensor([[-1e-30, 2.0]])), "finite"),
    "NaN": (pack(torch.tensor([torch.nan, 1, 1, 1]), ONE), "finite"),
    "infinite": (Microbatch(torch.full((2, 3), torch.inf)), "finite"),
    "infinite in fp16": (Microbatch(torch.full((2, 3), torch.inf).half()), "finite"),
    "infinite in bf16": (Microbatch(torch.full((2, 3), torch.inf).bfloat16()), "finite"),
    "minus infinite": (Microbatch(torch.full((2, 3), -torch.inf)), "finite"),
    "beyond fp32": (Microbatch(torch.full((1, 2), 1e39, dtype=F64)), "beyond fp32"),
    "outside": (pack(torch.ones(5), ONE), "not 0 on tokens outside"),
    "padding": (pack(torch.ones(8), ONE, 2 * ONE), "not 0 on tokens outside"),
}
FAR = [0, 2**63 - 1, -2]  # were these read, the process would die
EXPECTED = "expected offsets that start at 0 and do not decrease"
BAD_OFFSETS = {
    "first offset": (pack(torch.zeros(6), ONE + 1), EXPECTED),
    "first offset before padding": (pack(torch.zeros(9), ONE + 1, 2 * ONE), EXPECTED),
    "padded first offset": (pack(torch.zeros(9), ONE, ONE + 1), EXPECTED),
    "decreasing": (pack(torch.zeros(4), [0, 3, 1]), EXPECTED),
    "padded decreasing": (pack(torch.zeros(9), 0 * ONE, [0, 3, 1]), EXPECTED),
    "wrapping": (pack(torch.ones(8), [*FAR, 8]), EXPECTED),
    "padded wrapping": (pack(torch.zeros(9), ONE, FAR), EXPECTED),
    "beyond the mask": (pack(torch.zeros(3), ONE), rf"of 3 tokens .*\[0, 2, 4\].*; {EXPECTED}"),
    "padding beyond the mask": (pack(torch.zeros(5), ONE, 2 * ONE), EXPECTED),
    "far beyond the mask": (pack(torch.ones(4), [0, 2, 2**40]), EXPECTED),
    "padded place": (pack(torch.zeros(9), ONE, ONE // 2), EXPECTED),
}
BAD = BAD_MASKS | BAD_OFFSETS


def error_of(step: list[Microbatch]) -> AggregationError:
    with pytest.raises(AggregationError) as error:
        StepPlan.build(aggregation("sample_mean"), step)
    return error.value


@pytest.mark.parametrize("bad", BAD)
def test_the_first_bad_microbatch_is_named(bad):
    microbatch, text = BAD[bad]
    alone = error_of([microbatch])
    assert re.match(f"microbatch 0.* .*{text}", str(alone))
    assert type(alone) is (MaskError if bad in BAD_MASKS else GroupError)
    alike = GOOD["padded pack" if microbatch.cu_seqlens_padded is not None else "pack"]
    if microbatch.cu_seqlens is None:
        alike = Microbatch(torch.ones_like(microbatch.loss_mask))
    steps = {
        0: [*GOOD.values()],
        2: [*GOOD.values()],
        3: [LONG, *[GOOD["rows"]] * 4, LONG],
        4: [*[GOOD["no tokens"]] * 2, *[alike] * 3],
        5: [*GOOD.values()],
    }
    for place, step in steps.items():
        step[place:place] = [microbatch]
        # Neither the neighbours nor what comes later is taken for it.
        error = error_of([*step, BAD["negative"][0]])
        assert type(error) is type(alone)
        assert str(error) == str(alone).replace("microbatch 0", f"microbatch {place}")


def test_masks_may_be_large_as_long_as_coefficients_are_normal_numbers():
    large, larger = (Microbatch(torch.full((1, 2), size)) for size in (1e35, 1e38))
    plan = StepPlan.build(aggregation("sample_mean"), [large] * 8)
    assert float(plan.weights(7).sum()) == pytest.approx(1 / 8)
    with pytest.raises(MaskError, match=r"from 6.25e-40 to 6.25e-40, and fp32 hol"):
        StepPlan.build(aggregation("sample_mean"), [larger] * 8)
