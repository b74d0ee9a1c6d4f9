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
    LossAggregation,
    Microbatch,
    SequenceMean,
    StepPlan,
    policy,
    predicting_mask,
    token_weights,
    weighted_sum,
)
from megatron_loss_agg.errors import (
    DivisorError,
    FunctionError,
    GroupError,
    MaskError,
    ModeError,
    PolicyError,
    ReportError,
    StepError,
)
from megatron_loss_agg.report import Max, reduce_reports
from tests.core.steps import aggregation

AGG = LossAggregation(mode="sample_mean")
SUM = LossAggregation(mode="sum")
ONES = torch.ones(6)
F64 = torch.float64

NAMES = "expected one of token_mean, sample_mean, rollout_mean, prompt_mean, dataset_mean, sample_s"
FINITE = "expected a finite number > 0"
OUT_OF_RANGE = [0, 0.0, -1.0, math.nan, math.inf, -math.inf, False, "4"]

# Fields of an aggregation; the error, and what its text says.
FIELDS: list[tuple[dict[str, Any], type[AggregationError], str]] = [
    *(
        ({"mode": mode}, ModeError, f"unknown mode {re.escape(repr(mode))}; {NAMES}")
        for mode in ("dapo", "", "TOKEN_MEAN", None, 3)
    ),
    *(
        ({"mode": "sample_mean", "empty": empty}, ModeError, f"empty={empty!r}; .*count.*skip")
        for empty in ("drop", "", None, True)
    ),
    ({"mode": "sample_mean", "rejected": "drop"}, ModeError, "rejected='drop'; .*count.*skip"),
    *(
        (
            {"mode": "prompt_mean", "count": count},
            ModeError,
            f"count={count!r} with .*expected one of",
        )
        for count in ("tokens", "", 2)
    ),
    *(
        ({"mode": mode, "count": "sample"}, ModeError, f"count.*'{mode}'; expected none")
        for mode in ("token_mean", "sum", "microbatch_mean")
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
        (
            {"mode": "custom", "function": function},
            FunctionError,
            f"function={function!r} with mode 'custom'; expected a function",
        )
        for function in (None, "module:name", 3)
    ),
    (
        {"mode": "sum", "function": print},
        FunctionError,
        "function=.* with mode 'sum'; expected none",
    ),
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


def in_every_place(x: torch.Tensor) -> list[tuple[Callable[[], Any], type[AggregationError], str]]:
    """Calls with a tensor that is not dense or real, where masks, losses or metrics enter."""
    ones = torch.ones(2, 3)
    mean = SequenceMean(Microbatch(ones))
    return [
        (of_mask(x), MaskError, f"loss_mask is .*{DENSE}"),
        (lambda: predicting_mask(x), MaskError, f"loss_mask is .*{DENSE}"),
        (lambda: weighted_sum(x, ones), MaskError, f"w is .*{DENSE}"),
        (lambda: weighted_sum(ones, x), MaskError, f"token_loss is .*{DENSE}"),
        (lambda: mean(x), MaskError, "values is "),
        (lambda: policy.token_entropy(x), PolicyError, "logits is "),
        (lambda: Max.of(x, ones), ReportError, f"values is .*{DENSE}"),
        (
            lambda: reduce_reports([{"a": Max(x)}], None),
            ReportError,
            "'a' is [^;]*; expected a Mean",
        ),
        (returned(x), FunctionError, "returned .*expected real weights"),
    ]


NOT_PLAIN: dict[str, Callable[[torch.Tensor], Any]] = {
    "complex": lambda x: x.to(torch.complex64),
    "sparse": torch.Tensor.to_sparse,
}
# Bad offsets and values of a mask are in test_counting.
CALLS: list[tuple[Callable[[], Any], type[AggregationError], str]] = [
    (of_mask(tensor([[1e308] * 4], dtype=F64)), MaskError, "infinite"),
    (of_mask(tensor([[1e-310, 0.0]], dtype=F64)), MaskError, "from inf to inf, and fp32 holds"),
    *((of_mask(torch.ones(s)), MaskError, "cu_seqlens") for s in ((), (6,), (1, 2, 3))),
    *(
        (packed([0, 6], mask=torch.ones(s)), MaskError, r"mask has shape \(.*, or \[tokens\]")
        for s in ((), (2, 3), (1, 1, 6))
    ),
    (of_mask([1.0, 1.0]), MaskError, f"a list; {DENSE}"),
    (of_mask(None), MaskError, f"a NoneType; {DENSE}"),
    (packed(torch.empty(0, dtype=torch.int32)), GroupError, r"cu_seqlens .*\[samples \+ 1\]"),
    (packed(tensor([0.0, 6.0])), GroupError, "cu_seqlens .*expected int32 or int64"),
    (packed([[0, 6]]), GroupError, "cu_seqlens .*expected int32 or int64"),
    (packed((0, 6)), GroupError, "cu_seqlens is a tuple; expected int32 or int64"),
    # Two samples of 2 and 1 tokens.
    (packed([0, 2, 3], [0, 6]), GroupError, r"cu_seqlens_padded is .*\(2,\); .*as many"),
    (packed(None, [0, 6]), GroupError, "cu_seqlens_padded without cu_seqlens"),
    *((active_padding(t), MaskError, "not 0 on tokens outside") for t in (2, 3, 7)),
    (returned(torch.ones(2, 3)), FunctionError, r"of shape \(2, 3\); .*mask's shape \(1, 3\)"),
    (returned(tensor([[1.0, math.nan, 0.0]])), FunctionError, "not finite"),
    (returned(tensor([[1.0, math.inf, 0.0]])), FunctionError, "not finite"),
    (returned([1.0, 1.0, 1.0]), FunctionError, "returned a list"),
    (returned(None), FunctionError, "returned a NoneType"),
    (lambda: token_weights("sum", torch.ones(1, 2)), ModeError, "a str for the aggregation"),
    (lambda: StepPlan.build(AGG, [torch.ones(1, 2)]), MaskError, "list of Microbatch"),
    (lambda: StepPlan.build(AGG, None), MaskError, "a NoneType; expected a list of Microbatch"),
    (lambda: Microbatch(ONES.view(1, 6), rejected=ONES[:1]), GroupError, "rejected .*torch.bool"),
    (lambda: StepPlan.build(AGG, [], sharded_over=object()), GroupError, "over without group"),
    (lambda: weighted_sum([1.0], [1.0]), MaskError, "w is a list; expected a real"),
    (lambda: SequenceMean(ONES), MaskError, "a Tensor; expected a Microbatch"),
    (lambda: predicting_mask(torch.ones(4), tensor([0, 6])), GroupError, "beyond the mask"),
    (lambda: predicting_mask(torch.ones(4)), MaskError, r"expected \[samples, seq\]"),
]


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_tensor_that_is_not_dense_and_real_is_named(kind) -> None:
    for call, error, text in in_every_place(NOT_PLAIN[kind](torch.ones(2, 3))):
        with pytest.raises(error, match=text):
            call()


@pytest.mark.parametrize("call, error, text", CALLS, ids=[text for *_, text in CALLS])
def test_a_wrong_call_is_named(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


def test_every_error_is_a_value_error_of_the_package() -> None:
    raised = {error for _, error, _ in [*FIELDS, *CALLS]}
    assert all(issubclass(x, AggregationError) and issubclass(x, ValueError) for x in raised)


@pytest.mark.parametrize("unit", ["prompt", "rollout", "dataset"])
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
        refused(rf"{name} is .* of shape .*expected torch.int64 \[2\], one for each", ids)
    for dtype in (torch.float32, torch.float64, torch.bool):
        refused(f"{name} is a {dtype} tensor.*expected torch.int64", torch.ones(2).to(dtype))


HELD = (
    "the coefficients of samples.* are from {} to {}, and fp32 holds 1.18e-38 to 3.4e\\+38; expect"
)
OUT_OF_FP32 = [  # mode, divisor, mask, and what its least and largest coefficients are
    ("sample_mean", None, [[1.0, 1.0], [1e-42, 0]], "0.25", r"5e\+41"),
    ("prompt_mean", None, [[1.0, 1.0], [1e-42, 0]], "0.25", r"5e\+41"),
    ("microbatch_mean", None, [[1e-42, 0.0]], r"1e\+42", r"1e\+42"),
    ("token_mean", None, [[1e38], [1e38]], "5e-39", "5e-39"),
    ("token_mean", None, [[1e-42]], r"1e\+42", r"1e\+42"),
    ("constant", 1e37, [[1.0]] * 9, "1.11e-38", "1.11e-38"),
]


@pytest.mark.parametrize(("mode", "divisor", "mask", "least", "largest"), OUT_OF_FP32)
def test_coefficients_that_fp32_does_not_hold_are_refused(mode, divisor, mask, least, largest):
    ids = torch.arange(len(mask))
    with pytest.raises(MaskError, match=HELD.format(least, largest)):
        token_weights(aggregation(mode, divisor=divisor), tensor(mask, dtype=F64), prompt_ids=ids)


def test_coefficients_at_the_ends_of_fp32_are_accepted() -> None:
    for divisor in (1e-37, 1e37):
        agg = LossAggregation(mode="sum", divisor=divisor)
        assert token_weights(agg, torch.ones(1, 1), dtype=F64).item() == 1 / divisor
    # Those of samples that weigh nothing do not matter.
    mask = tensor([[1.0, 1.0], [1e-42, 0], [0, 0]], dtype=F64)
    step = Microbatch(mask, rejected=tensor([False, True, False]))
    for rejected in ("count", "skip"):
        agg = aggregation("sample_mean", rejected=rejected)
        assert bool(StepPlan.build(agg, [step]).weights(0)[0].all())


@pytest.mark.parametrize("i", [2, -3, 2**70, 0.0, "0", None, slice(1)])
def test_a_plan_has_no_more_microbatches_than_it_was_given(i) -> None:
    step = [Microbatch(torch.ones(1, n)) for n in (1, 2)]
    plan = StepPlan.build(AGG, step)
    alone = StepPlan.from_mask_sums(AGG, [[1.0], [2.0]])
    calls: list[Callable[[Any], Any]] = [plan.weights, plan.coefficients, plan.mask_sums]
    calls += [alone.coefficients, lambda i: plan.group_sums("step", i)]
    calls += [lambda i: plan.scaled_advantages(i, torch.ones(1, 2))]
    for call in calls:
        with pytest.raises(StepError, match=r"microbatch .* of a plan of 2 microbatches; expected"):
            call(i)
    assert plan.weights(-1).shape == (1, 2)
