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
    Term,
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

F64 = torch.float64
AGG = LossAggregation(mode="sample_mean")
TOKEN_MEAN, PROMPT_MEAN = aggregation("token_mean"), aggregation("prompt_mean")
SUM = LossAggregation(mode="sum", sample_weights="skip")
MEAN = LossAggregation(mode="sample_mean", sample_weights="skip")
ONES, ROWS, TWO = torch.ones(6), torch.ones(2, 3), torch.ones(2, 8)
Row = tuple[Callable[[], Any], type[AggregationError], str]

NAMES = "expected one of token_mean, sample_mean, rollout_mean, prompt_mean, dataset_mean, sample_s"
A_FUNCTION = "with mode 'custom'; expected a function"
# Fields of an aggregation, values that they do not take, the error, and what its text says.
FIELDS: list[tuple[dict[str, Any], str, list[Any], type[AggregationError], str]] = [
    ({}, "mode", ["dapo", "", "TOKEN_MEAN", None, 3], ModeError, f"unknown mode {{}}; {NAMES}"),
    ({"mode": "sample_mean"}, "empty", ["drop", "", None, True], ModeError, "count.*skip"),
    ({"mode": "sample_mean"}, "rejected", ["drop"], ModeError, "rejected={}; .*count.*skip"),
    ({"mode": "sum"}, "sample_weights", ["both"], ModeError, "={}; expected 'count' or 'skip'"),
    ({"mode": "prompt_mean"}, "count", ["tokens", "", 2], ModeError, "={} with .*expected one of"),
    (
        {"count": "sample"},
        "mode",
        ["token_mean", "sum", "microbatch_mean"],
        ModeError,
        "with mode {}; expected none",
    ),
    ({"mode": "constant"}, "divisor", [None], DivisorError, "needs a divisor and got none; give"),
    (
        {"divisor": 2.0},
        "mode",
        ["token_mean", "sample_mean", "rollout_mean", "prompt_mean"],
        DivisorError,
        "divisor=2.0 with mode {}.*drop it",
    ),
    *(
        (
            {"mode": mode},
            "divisor",
            [0, 0.0, -1.0, math.nan, math.inf, -math.inf, False, "4"],
            DivisorError,
            "divisor={}; expected a finite number > 0",
        )
        for mode in ("constant", "sum")
    ),
    (
        {"mode": "custom"},
        "function",
        [None, "module:name", 3],
        FunctionError,
        f"={{}} {A_FUNCTION}",
    ),
    ({"mode": "sum"}, "function", [print], FunctionError, "function=.*; expected none"),
]


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({**fields, name: value}, error, text.replace("{}", re.escape(repr(value))))
        for fields, name, values, error, text in FIELDS
        for value in values
    ],
    ids=lambda x: str(x)[:60],
)
def test_an_aggregation_refuses_what_its_mode_does_not_take(fields, error, text):
    with pytest.raises(error, match=text):
        LossAggregation(**fields)


@pytest.mark.parametrize("divisor", [1, 4096, 0.5, 1e30, Fraction(1, 4)])
def test_any_positive_real_number_is_a_divisor(divisor):
    assert aggregation("constant", divisor=divisor).divisor == divisor
    w = token_weights(aggregation("sum", divisor=divisor), torch.ones(1, 1), dtype=F64)
    assert w.item() == 1 / divisor


def test_an_aggregation_is_frozen_and_its_fields_are_given_by_name():
    with pytest.raises(TypeError):
        LossAggregation("token_mean")
    with pytest.raises(AttributeError):
        AGG.mode = "token_mean"


def packed(offsets: Any, padded: Any = None, mask: Any = ONES) -> Callable[[], Any]:
    """Weights of a pack of 6 tokens with these offsets."""
    offsets, padded = (tensor(x) if isinstance(x, list) else x for x in (offsets, padded))
    return lambda: token_weights(AGG, mask, cu_seqlens=offsets, cu_seqlens_padded=padded)


def weighing(mask: Any, agg: Any = AGG, **options: Any) -> Callable[[], Any]:
    return lambda: token_weights(agg, mask, **options)


def active_padding(position: int) -> Callable[[], Any]:
    """Samples own 0..1 and 4..6; ``position`` is none of theirs."""
    return packed([0, 2, 5], [0, 4, 7], torch.zeros(8).index_fill_(0, tensor([position]), 1.0))


def returned(weights: Any) -> Callable[[], Any]:
    """Weights by a custom function, for a mask of shape [1, 3]."""
    return weighing(torch.ones(1, 3), LossAggregation(mode="custom", function=lambda p, i: weights))


DENSE = "expected a real, dense tensor"
# Bad offsets and values of a mask are in test_counting.
OF_MASKS: list[Row] = [
    (weighing(tensor([[1e308] * 4], dtype=F64)), MaskError, "infinite"),
    (weighing(tensor([[1e-310, 0.0]], dtype=F64)), MaskError, "from inf to inf, and fp32 holds"),
    *((weighing(torch.ones(s)), MaskError, "cu_seqlens") for s in ((), (6,), (1, 2, 3))),
    *(
        (packed([0, 6], mask=torch.ones(s)), MaskError, r"mask has shape \(.*, or \[tokens\]")
        for s in ((), (2, 3), (1, 1, 6))
    ),
    (weighing([1.0, 1.0]), MaskError, f"a list; {DENSE}"),
    (weighing(None), MaskError, f"a NoneType; {DENSE}"),
    (packed(torch.empty(0, dtype=torch.int32)), GroupError, r"cu_seqlens .*\[samples \+ 1\]"),
    (packed(tensor([0.0, 6.0])), GroupError, "cu_seqlens .*expected int32 or int64"),
    (packed([[0, 6]]), GroupError, "cu_seqlens .*expected int32 or int64"),
    (packed((0, 6)), GroupError, "cu_seqlens is a tuple; expected int32 or int64"),
    # Two samples of 2 and 1 tokens.
    (packed([0, 2, 3], [0, 6]), GroupError, r"cu_seqlens_padded is .*\(2,\); .*as many"),
    (packed(None, [0, 6]), GroupError, "cu_seqlens_padded without cu_seqlens"),
    *((active_padding(t), MaskError, "not 0 on tokens outside") for t in (2, 3, 7)),
    (returned(ROWS), FunctionError, r"of shape \(2, 3\); .*mask's shape \(1, 3\)"),
    (returned(tensor([[1.0, math.nan, 0.0]])), FunctionError, "not finite"),
    (returned(tensor([[1.0, math.inf, 0.0]])), FunctionError, "not finite"),
    (returned([1.0, 1.0, 1.0]), FunctionError, "returned a list"),
    (returned(None), FunctionError, "returned a NoneType"),
    *(
        (weighing(ROWS, dtype=dtype), MaskError, "expected a floating dtype with the range of fp32")
        # One of 2**25 tokens weighs 3e-8, which fp16 rounds to 0.
        for dtype in (torch.float16, torch.float8_e5m2, torch.int64, "float32")
    ),
    (weighing(ROWS, "sum"), ModeError, "a str for the aggregation"),
    (lambda: StepPlan.build(AGG, [ROWS]), MaskError, "list of Microbatch"),
    (lambda: StepPlan.build(AGG, None), MaskError, "a NoneType; expected a list of Microbatch"),
    (lambda: StepPlan.build(AGG, [], sharded_over=object()), GroupError, "over without group"),
    (lambda: weighted_sum([1.0], [1.0]), MaskError, "w is a list; expected a real"),
    (
        lambda: weighted_sum(ROWS, ROWS[0]),
        MaskError,
        r"\(3,\) .* \(2, 3\); expected the same shape",
    ),
    (lambda: weighted_sum(torch.ones(()), torch.ones(1)), MaskError, "nothing is broadcast"),
    (lambda: predicting_mask(torch.ones(4), tensor([0, 6])), GroupError, "beyond the mask"),
    (lambda: predicting_mask(torch.ones(4)), MaskError, r"expected \[samples, seq\]"),
]


def by_sample(**options: Any) -> Callable[[], Any]:
    return lambda: Microbatch(ROWS, **options)


def weighted(v: Any, agg: LossAggregation = SUM, mask: Any = ROWS) -> Callable[[], Any]:
    return weighing(mask, agg, sample_weights=v)


def of_sums(sums: Any, agg: LossAggregation = TOKEN_MEAN, **options: Any) -> Callable[[], Any]:
    return lambda: StepPlan.from_mask_sums(agg, sums, **options)


CUSTOM = LossAggregation(mode="custom", function=lambda plan, i: None)
A_STRING = "a sequence of strings"
OF_SAMPLES: list[Row] = [
    (by_sample(rejected=ONES[:2]), GroupError, "rejected .*torch.bool"),
    (weighted(tensor([1, 2])), GroupError, r"expected floating-point \[2\]"),
    (weighted([1.0, 2.0]), GroupError, "sample_weights is a list"),
    (weighted(torch.ones(3)), GroupError, r"\(3,\); expected floating-point \[2\]"),
    (weighted(tensor([1.0, -1.0])), MaskError, "has the value -1; expected fini"),
    (weighted(tensor([1.0, torch.nan])), MaskError, "has the value nan"),
    (weighted(tensor([torch.inf, 1])), MaskError, "has the value inf"),
    # 1e30 / 3e-20 / 2 is beyond fp32; 1e-50 and 1e-38 / 3 / 2 are below its normal numbers.
    (weighted(tensor([1e-50, 1], dtype=F64)), MaskError, "from 1e-50 to 1, and"),
    (weighted(tensor([1e30, 1]), MEAN, 1e-20 * ROWS), MaskError, r"to 1.67e\+49, and fp32"),
    (weighted(tensor([1e-38, 1]), MEAN), MaskError, "from 1.67e-39 to 0.167, and"),
    (of_sums([1.0], SUM, sample_weights=[1.0]), GroupError, r"expected floating-point \[1\]"),
    (of_sums([1.0], SUM, sample_weights=-torch.ones(1)), MaskError, "has the value -1"),
    (of_sums([1.0, -1.0]), MaskError, "finite numbers >= 0"),
    (of_sums([math.nan]), MaskError, "finite numbers >= 0"),
    (of_sums(ROWS), MaskError, "expected a vector"),
    (of_sums([1.0], rejected=tensor([True])), GroupError, "rejected='count'"),
    (of_sums([1.0], rejected=[True]), GroupError, "a list; expected torch.bool"),
    (of_sums([1.0], PROMPT_MEAN), GroupError, "no prompt_ids"),
    (of_sums([1.0], PROMPT_MEAN, prompt_ids="a"), GroupError, A_STRING),
    (of_sums([1.0] * 2, PROMPT_MEAN, prompt_ids=[0, 1]), GroupError, A_STRING),
    (of_sums([1.0] * 2, PROMPT_MEAN, prompt_ids=["a"]), GroupError, r"expected torch.int64 \[2\]"),
    (of_sums([[1.0]] * 2, PROMPT_MEAN, prompt_ids=[["a"] * 2]), GroupError, "for 1 microbatches"),
    (of_sums([1.0], CUSTOM), FunctionError, "use StepPlan.build"),
]


def of_terms(terms: Any, **options: Any) -> Callable[[], Any]:
    return lambda: StepPlan.build_terms(terms, [Microbatch(ROWS)], **options)


def groups(unit: str) -> Callable[[], Any]:
    step = [Microbatch(ROWS, dataset_ids=["x", "y"])]
    return lambda: StepPlan.build(TOKEN_MEAN, step).groups(unit)


MAPPING = "expected a mapping of names to Term or LossAggregation"
OF_TERMS: list[Row] = [
    (of_terms({}), ModeError, MAPPING),
    (of_terms([SUM]), ModeError, MAPPING),
    (of_terms({"a": "token_mean"}), ModeError, "a str for the aggregation of a term; expected a L"),
    *(
        (lambda x=x: Term(SUM, x), ModeError, "coefficient=.*expected a finite number")
        for x in (math.nan, math.inf, "1", None)
    ),
    (
        lambda: of_terms({"a": SUM})().weighted_sum(0, {"b": ROWS}),
        MaskError,
        r"losses \['b'\] for the terms \['a'\]",
    ),
    (
        lambda: StepPlan.build_terms({"a": SUM, "b": SUM}, [{"a": Microbatch(ROWS)}]),
        MaskError,
        "has none for the term 'b'",
    ),
    *(
        (groups(unit), GroupError, f"no groups by '{unit}'.* or that group_by names")
        for unit in ("dataset", "sample", "x")
    ),
    (
        of_terms({"a": SUM}, group_by=["sample"]),
        GroupError,
        "=.'sample'.; expected some of prompt,",
    ),
    (of_terms({"a": SUM}, group_by=["dataset"]), GroupError, "groups by dataset and .* no datas"),
]


def in_every_place(x: torch.Tensor) -> list[Row]:
    """Calls with a tensor that is not dense or real, where masks, losses or metrics enter."""
    return [
        (weighing(x), MaskError, f"loss_mask is .*{DENSE}"),
        (lambda: predicting_mask(x), MaskError, f"loss_mask is .*{DENSE}"),
        (lambda: weighted_sum(x, ROWS), MaskError, f"w is .*{DENSE}"),
        (lambda: weighted_sum(ROWS, x), MaskError, f"token_loss is a torch.* tensor .*{DENSE}"),
        (lambda: SequenceMean(Microbatch(ROWS))(x), MaskError, "values is "),
        (lambda: policy.token_entropy(x), PolicyError, "logits is "),
        (lambda: Max.of(x, ROWS), ReportError, f"values is .*{DENSE}"),
        (lambda: reduce_reports([{"a": Max(x)}], None), ReportError, "'a' is [^;]*; expected a M"),
        (returned(x), FunctionError, "returned .*expected real weights"),
    ]


OF_KINDS = in_every_place(ROWS.to(torch.complex64)) + in_every_place(ROWS.to_sparse())
CALLS = [*OF_MASKS, *OF_SAMPLES, *OF_TERMS, *OF_KINDS]


@pytest.mark.parametrize(("call", "error", "text"), CALLS, ids=[text for *_, text in CALLS])
def test_a_wrong_call_is_named(call, error, text):
    assert issubclass(error, ValueError)
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("unit", ["prompt", "rollout", "dataset"])
def test_ids_are_integers_one_for_each_sample(unit):
    name = f"{unit}_ids"

    def refused(text: str, *ids: Any) -> None:
        agg = LossAggregation(mode=f"{unit}_mean")
        with pytest.raises(GroupError, match=text):
            StepPlan.build(agg, [Microbatch(ROWS, **{name: x}) for x in ids])

    refused(f"mode '{unit}_mean' groups by {unit} and a microbatch has no {name}", None)
    refused(f"has no {name}", tensor([1, 2]), None)
    for ids in (tensor([1]), tensor([1, 2, 3]), tensor([[1, 2]]), torch.empty(0).long()):
        refused(rf"{name} is .* of shape .*expected torch.int64 \[2\], one for each", ids)
    for dtype in (torch.float32, torch.float64, torch.bool):
        refused(f"{name} is a {dtype} tensor.*expected torch.int64", torch.ones(2).to(dtype))


HELD = "the coefficients of samples.* are from {} to {}, and fp32 holds 1.18e-38 to 3.4e\\+38; exp"
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


def test_coefficients_at_the_ends_of_fp32_are_accepted():
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
def test_a_plan_has_no_more_microbatches_than_it_was_given(i):
    plan = StepPlan.build(AGG, [Microbatch(torch.ones(1, n)) for n in (1, 2)])
    alone = StepPlan.from_mask_sums(AGG, [[1.0], [2.0]])
    calls: list[Callable[[Any], Any]] = [plan.weights, plan.coefficients, plan.mask_sums]
    calls += [alone.coefficients, lambda i: plan.group_sums("step", i)]
    calls += [lambda i: plan.scaled_advantages(i, torch.ones(1, 2))]
    for call in calls:
        with pytest.raises(StepError, match=r"microbatch .* of a plan of 2 microbatches; expected"):
            call(i)
    assert plan.weights(-1).shape == (1, 2)
