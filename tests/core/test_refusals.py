"""Every bad input by its named error, and a text that says what was got and what was expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import tensor

from megatron_loss_agg import (
    AggregationError,
    CPLayout,
    LossAggregation,
    Microbatch,
    StepPlan,
    predicting_mask,
    token_weights,
    weighted_sum,
)
from megatron_loss_agg.errors import (
    DivisorError,
    FunctionError,
    GroupError,
    LayoutError,
    MaskError,
    ModeError,
)
from tests.core.steps import aggregation

AGG = LossAggregation(mode="sample_mean")
SUM = LossAggregation(mode="sum")
ONES = torch.ones(6)
F64 = torch.float64

NAMES = "expected one of token_mean, sample_mean, rollout_mean, prompt_mean, sample_sum, constant"
FINITE = r"expected a finite number > 0, from 1e-37 to 1e\+37: weights are fp32"
OUT_OF_RANGE = [0, 0.0, -1.0, math.nan, math.inf, -math.inf, True, False, "4"]
OUT_OF_RANGE += [10**400, 1e-320, 1e-40, 1e46]

# Fields of an aggregation; the error, and what its text says.
FIELDS: list[tuple[dict[str, Any], type[AggregationError], str]] = [
    *(
        ({"mode": mode}, ModeError, f"unknown mode {re.escape(repr(mode))}; {NAMES}")
        for mode in ("dapo", "", "TOKEN_MEAN", "token-mean", None, 3, [])
    ),
    *(
        ({"mode": "sample_mean", "empty": empty}, ModeError, f"empty={empty!r}; .*count.*skip")
        for empty in ("drop", "", None, True)
    ),
    ({"mode": "sample_mean", "rejected": "drop"}, ModeError, "rejected='drop'; .*count.*skip"),
    *(
        ({"mode": "prompt_mean", "count": count}, ModeError, f"count={count!r}; expected one of")
        for count in ("tokens", "", 2)
    ),
    *(
        ({"mode": mode, "count": "sample"}, ModeError, f"count.*'{mode}'.* no count")
        for mode in ("token_mean", "sum", "sample_sum", "microbatch_mean")
    ),
    ({"mode": "constant"}, DivisorError, "'constant' needs a divisor and got none; give one"),
    *(
        ({"mode": mode, "divisor": 2.0}, DivisorError, f"divisor=2.0 with mode '{mode}'.*drop it")
        for mode in ("token_mean", "sample_mean", "rollout_mean", "prompt_mean")
    ),
    *(
        ({"mode": mode, "divisor": x}, DivisorError, f"divisor={re.escape(repr(x))}; {FINITE}")
        for mode in ("constant", "sum")
        for x in OUT_OF_RANGE
    ),
    *(
        ({"mode": "custom", "function": function}, FunctionError, f"function, got {function!r}")
        for function in (None, "module:name", 3)
    ),
    ({"mode": "sum", "function": print}, FunctionError, "function given with mode 'sum'"),
]


@pytest.mark.parametrize("fields, error, text", FIELDS, ids=lambda x: str(x)[:60])
def test_an_aggregation_refuses_what_its_mode_does_not_take(fields, error, text) -> None:
    with pytest.raises(error, match=text):
        LossAggregation(**fields)


@pytest.mark.parametrize("divisor", [1, 4096, 0.5, 1e30, Fraction(1, 4)])
def test_any_positive_real_number_is_a_divisor(divisor) -> None:
    assert aggregation("constant", divisor=divisor).divisor == divisor
    assert aggregation("sum", divisor=divisor).scale == 1 / divisor


def test_an_aggregation_is_frozen_and_its_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        LossAggregation("token_mean")
    with pytest.raises(AttributeError):
        AGG.mode = "token_mean"


def packed(offsets: Any, padded: Any = None, mask: Any = ONES) -> Callable[[], Any]:
    """Weights of a pack of 6 tokens with these offsets."""
    offsets, padded = (tensor(x) if isinstance(x, list) else x for x in (offsets, padded))
    return lambda: token_weights(AGG, mask, cu_seqlens=offsets, cu_seqlens_padded=padded)


def of_mask(mask: Any, agg: Any = AGG) -> Callable[[], Any]:
    return lambda: token_weights(agg, mask)


def active_padding(position: int) -> Callable[[], Any]:
    """Samples own 0..1 and 4..6; ``position`` is none of theirs."""
    mask = torch.zeros(8).index_fill_(0, tensor([position]), 1.0)
    return packed([0, 2, 5], [0, 4, 7], mask)


def returned(weights: Any) -> Callable[[], Any]:
    """Weights by a custom function, for a mask of shape [1, 3]."""
    agg = LossAggregation(mode="custom", function=lambda plan, i: weights)
    return of_mask(torch.ones(1, 3), agg)


DENSE = "expected a real, dense tensor"
# Bad offsets and values of a mask are in test_counting.
CALLS: list[tuple[Callable[[], Any], type[AggregationError], str]] = [
    (of_mask(tensor([[1e308] * 4], dtype=F64)), MaskError, "infinite"),
    (of_mask(tensor([[1e-310, 0.0]], dtype=F64)), MaskError, "overflow"),
    *((of_mask(torch.ones(s)), MaskError, "cu_seqlens") for s in ((), (6,), (1, 2, 3))),
    *(
        (packed([0, 6], mask=torch.ones(s)), MaskError, r"mask has shape \(.*expected \[tokens\]")
        for s in ((), (2, 3), (1, 1, 6))
    ),
    (of_mask([1.0, 1.0]), MaskError, f"a list; {DENSE}"),
    (of_mask(None), MaskError, f"a NoneType; {DENSE}"),
    (of_mask(torch.ones(1, 3, dtype=torch.complex64)), MaskError, DENSE),
    (of_mask(torch.ones(2, 3).to_sparse()), MaskError, f"sparse.*{DENSE}"),
    (of_mask(torch.nested.nested_tensor([torch.ones(2)])), MaskError, f"nested.*{DENSE}"),
    (packed(torch.empty(0, dtype=torch.int32)), GroupError, r"cu_seqlens .*\[samples \+ 1\]"),
    (packed(tensor([0.0, 6.0])), GroupError, "cu_seqlens .*expected int32 or int64"),
    (packed([[0, 6]]), GroupError, "cu_seqlens .*expected int32 or int64"),
    (packed((0, 6)), GroupError, "cu_seqlens is a tuple; expected int32 or int64"),
    # Two samples of 2 and 1 tokens.
    (packed([0, 2, 3], [0, 6]), GroupError, "cu_seqlens_padded has 2 offsets and cu_seqlens has 3"),
    (packed(None, [0, 6]), GroupError, "cu_seqlens_padded without cu_seqlens"),
    *((active_padding(t), MaskError, "not 0 on tokens outside") for t in (2, 3, 7)),
    (returned(torch.ones(2, 3)), FunctionError, r"returned \(2, 3\); .*mask's shape \(1, 3\)"),
    (returned(tensor([[1.0, math.nan, 0.0]])), FunctionError, "not finite"),
    (returned(tensor([[1.0, math.inf, 0.0]])), FunctionError, "not finite"),
    (returned([1.0, 1.0, 1.0]), FunctionError, "returned list"),
    (returned(None), FunctionError, "returned NoneType"),
    (lambda: token_weights("sum", torch.ones(1, 2)), ModeError, "a str for agg"),
    (lambda: StepPlan.build(AGG, [torch.ones(1, 2)]), MaskError, "list of Microbatch"),
    (lambda: Microbatch(ONES.view(1, 6), rejected=ONES[:1]), GroupError, "rejected .* bool tensor"),
    (lambda: StepPlan.build(AGG, [], sharded_over=object()), GroupError, "over without group"),
    (lambda: weighted_sum([1.0], [1.0]), MaskError, "w is list; expected a real"),
    (lambda: CPLayout.bshd(8, 2, 0.5), LayoutError, "cp_rank=0.5"),
    (lambda: CPLayout.contiguous(-8, 2, 0), LayoutError, "length -8"),
    (lambda: CPLayout.bshd(8, 2, 0).shard(torch.ones(8), dim=3), LayoutError, "no axis 3"),
    (lambda: predicting_mask(torch.ones(4), tensor([0, 6])), GroupError, "beyond the mask"),
    (lambda: predicting_mask(torch.ones(4)), MaskError, r"expected \[samples, seq\]"),
]


@pytest.mark.parametrize("call, error, text", CALLS, ids=[text for *_, text in CALLS])
def test_a_wrong_call_is_named(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


def test_every_error_is_a_value_error_of_the_package() -> None:
    raised = {error for _, error, _ in [*FIELDS, *CALLS]}
    assert all(issubclass(x, AggregationError) and issubclass(x, ValueError) for x in raised)


@pytest.mark.parametrize("unit", ["prompt", "rollout"])
def test_ids_are_integers_one_for_each_sample(unit) -> None:
    mode, name = f"{unit}_mean", f"{unit}_ids"

    def refused(text: str, *ids: Any) -> None:
        with pytest.raises(GroupError, match=text):
            StepPlan.build(
                LossAggregation(mode=mode), [Microbatch(torch.ones(2, 3), **{name: x}) for x in ids]
            )

    refused(f"mode '{mode}' groups by {unit} and a microbatch has no {name}", None)
    refused(f"has no {name}", tensor([1, 2]), None)
    for ids in (tensor([1]), tensor([1, 2, 3]), tensor([[1, 2]]), torch.empty(0).long()):
        refused(f"{name} has shape .*each of the 2 samples", ids)
    for dtype in (torch.float32, torch.float64, torch.bool):
        refused(f"{name} is a {dtype} tensor.*expected an int64 tensor", torch.ones(2).to(dtype))


def test_weights_that_fp32_cannot_hold_are_refused() -> None:
    agg = LossAggregation(mode="sum", divisor=1e-35)
    assert token_weights(agg, torch.ones(1, 2)).tolist() == [[pytest.approx(1e35)] * 2]
    text = r"microbatch 0: loss_mask over the divisor 1e-35 sums to 2e\+45, beyond fp32"
    with pytest.raises(MaskError, match=text):
        token_weights(agg, torch.full((1, 2), 1e10))
    mask = tensor([[1.0, 1.0], [1e-42, 0]], dtype=F64)
    with pytest.raises(MaskError, match="sample sums to 1e-42, whose reciprocal overflows fp32"):
        token_weights(AGG, mask)
    assert torch.equal(token_weights(SUM, mask), mask.float())


def test_a_plan_has_no_more_microbatches_than_it_was_given() -> None:
    plan = StepPlan.build(AGG, [Microbatch(torch.ones(1, 2))])
    with pytest.raises((IndexError, AggregationError)):
        plan.weights(1)
