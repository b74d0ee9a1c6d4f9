"""Every kind of mistake by its named error, and a text that says what was got and expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import tensor

from megatron_loss_agg import (
    AggregationError,
    CPLayout,
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
    HostError,
    LayoutError,
    MaskError,
    ModeError,
    PolicyError,
    ReportError,
    StepError,
)
from megatron_loss_agg.mcore import Audit, LossHook, TokenLoss
from megatron_loss_agg.report import Max, Mean, reduce_reports
from tests.core.meaning import F64, aggregation

TOKEN_MEAN, PROMPT_MEAN = aggregation("token_mean"), aggregation("prompt_mean")
MEAN, SUM = aggregation("sample_mean"), LossAggregation(mode="sum")
WEIGHTED_SUM = LossAggregation(mode="sum", sample_weights="skip")
ONES, ROWS, WIDE = torch.ones(6), torch.ones(2, 3), torch.ones(2, 8)
Row = tuple[Callable[[], Any], type[AggregationError], str]


def refusal(call: Callable[[], Any], error: type[AggregationError], text: str) -> str:
    """What is said by the error that a call raises, of just this class, with this text in it."""
    assert issubclass(error, ValueError)
    with pytest.raises(error, match=text) as raised:
        call()
    assert type(raised.value) is error
    return str(raised.value)


NAMES = "expected one of token_mean, sample_mean, rollout_mean, prompt_mean, dataset_mean, nested_"
UNITS = "expected units from outside to inside, each once, of sample, rollout, prompt, dataset"
LEVELS = (None, "prompt;sample", ["sample", "prompt"], ["prompt", "prompt"], ["step"], [3])
# Fields of an aggregation, the error, and what its text says.
FIELDS: list[tuple[dict[str, Any], type[AggregationError], str]] = [
    ({"mode": "dapo"}, ModeError, f"unknown mode 'dapo'; {NAMES}"),
    ({"mode": None}, ModeError, f"unknown mode None; {NAMES}"),
    ({"mode": "token-mean"}, ModeError, r"'token-mean'; did you mean 'token_mean'\? expected"),
    ({"mode": "sample_mean", "empty": None}, ModeError, "empty=None; expected 'count' or 'skip'"),
    ({"mode": "sum", "rejected": "drop"}, ModeError, "rejected='drop'; .*'count' or 'skip'"),
    ({"mode": "sum", "sample_weights": True}, ModeError, "sample_weights=True; .*'count' or"),
    ({"mode": "prompt_mean", "count": "tokens"}, ModeError, "='tokens' with .*expected one of"),
    ({"mode": "token_mean", "count": "sample"}, ModeError, "with mode 'token_mean'; expected none"),
    *(
        ({"mode": "nested_mean", "levels": levels}, ModeError, f"^levels=.*'nested_mean'; {UNITS}")
        for levels in LEVELS
    ),
    ({"mode": "prompt_mean", "levels": ["sample"]}, ModeError, "with mode 'prompt_mean'; expected"),
    ({"mode": "constant"}, DivisorError, "needs a divisor and got none; give"),
    ({"mode": "token_mean", "divisor": 2}, DivisorError, "divisor=2 with mode 'token.*drop it"),
    *(
        ({"mode": "constant", "divisor": x}, DivisorError, "divisor=.*; expected a finite number >")
        for x in (0, math.nan, math.inf, "4")
    ),
    ({"mode": "custom", "function": "module:name"}, FunctionError, "'custom'; expected a function"),
    ({"mode": "sum", "function": print}, FunctionError, "function=.*; expected none"),
]


@pytest.mark.parametrize(("fields", "error", "text"), FIELDS, ids=lambda x: str(x)[:60])
def test_an_aggregation_refuses_what_its_mode_does_not_take(fields, error, text):
    refusal(lambda: LossAggregation(**fields), error, text)


def test_an_aggregation_is_frozen_and_its_fields_are_given_by_name():
    with pytest.raises(TypeError):
        LossAggregation("token_mean")
    with pytest.raises(AttributeError):
        MEAN.mode = "token_mean"


def a_pack(offsets: Any, padded: Any = None, mask: Any = ONES) -> Microbatch:
    offsets, padded = (tensor(x) if isinstance(x, list) else x for x in (offsets, padded))
    return Microbatch(mask, offsets, cu_seqlens_padded=padded)


RISING = "of . tokens has cu_seqlens=.*; expected offsets that start at 0 and do not decrease"
VALUES = "negative, infinite or NaN values, or some beyond fp32; expected finite"
FACTORS = "token_factors has infinite or NaN values, or some beyond fp32; expected finite"
OUTSIDE = "not 0 on tokens outside of every sample"
# Microbatches with values that cannot be, which the plan finds. Samples own 0..1 and 4..6 of a
# pack; were the offsets beyond it read, the process would die.
BAD: list[tuple[Microbatch, type[AggregationError], str]] = [
    (Microbatch(tensor([[-1e-30, 2.0]])), MaskError, VALUES),
    (Microbatch(tensor([[math.inf, 2.0]]).half()), MaskError, VALUES),
    (Microbatch(tensor([[1e39, 2.0]], dtype=F64)), MaskError, VALUES),
    (Microbatch(ROWS * 0, token_factors=ROWS * math.nan), MaskError, FACTORS),
    (a_pack([0, 2, 5], [0, 4, 7], tensor([1.0, 1, 1, 0, 1, 1, 1, 0])), MaskError, OUTSIDE),
    (a_pack([0, 2, 5], [0, 4, 7], tensor([1.0, 1, 0, 0, 1, 1, 1, 1])), MaskError, OUTSIDE),
    (a_pack([1, 3, 5], None, torch.zeros(6)), GroupError, RISING),
    (a_pack([0, 2**63 - 1, -2, 6], None, torch.zeros(6)), GroupError, RISING),
    (a_pack([0, 1, 2], [0, 2**63 - 1, -2], torch.zeros(6)), GroupError, RISING),
    (a_pack([0, 2, 4], [0, 1, 2], torch.zeros(6)), GroupError, RISING),
]
GOOD = [
    *(Microbatch(torch.ones(shape)) for shape in ((2, 3), (0, 3), (2, 0))),
    a_pack([0, 2, 4], [0, 3, 6], tensor([1.0, 1, 0, 1, 1, 0])),
    a_pack([0], mask=torch.zeros(2)),
]


@pytest.mark.parametrize(("bad", "error", "text"), BAD)
def test_the_first_bad_microbatch_is_named_by_its_place(bad, error, text):
    alone = refusal(lambda: StepPlan.build(MEAN, [bad]), error, f"^microbatch 0.*{text}")
    # Neither the neighbours nor what comes later is taken for it.
    step = [*GOOD, bad, *GOOD, BAD[0][0]]
    found = refusal(lambda: StepPlan.build(MEAN, step), error, text)
    assert found == alone.replace("microbatch 0", f"microbatch {len(GOOD)}")
    terms, of_terms = dict.fromkeys("ab", MEAN), [{"a": GOOD[0], "b": x} for x in (GOOD[0], bad)]
    found = refusal(lambda: StepPlan.build_terms(terms, of_terms), error, text)
    assert found == alone.replace("microbatch 0", "microbatch 1")


def packed(*given: Any, **options: Any) -> Callable[[], Any]:
    return lambda: a_pack(*given, **options)


def rows_with(**given: Any) -> Callable[[], Any]:
    return lambda: Microbatch(ROWS, **given)


def weighing(mask: Any, agg: Any = MEAN, **options: Any) -> Callable[[], Any]:
    return lambda: token_weights(agg, mask, **options)


def by_function(weights: Any, **given: Any) -> StepPlan:
    """The plan of one microbatch whose weights are made by a custom function."""
    agg = LossAggregation(mode="custom", function=lambda plan, i: weights, rejected="count")
    return StepPlan.build(agg, [Microbatch(ROWS, **given)])


def of_sums(sums: Any, agg: LossAggregation = TOKEN_MEAN, **options: Any) -> Callable[[], Any]:
    return lambda: StepPlan.from_mask_sums(agg, sums, **options)


DENSE = "expected a real, dense tensor"
OF_MASKS: list[Row] = [
    (weighing(ONES), MaskError, r"\(6,\) without cu_seqlens; expected \[samples, seq\] without"),
    (packed([0, 6], mask=ROWS), MaskError, r"\(2, 3\) beside cu_seqlens; .*, or \[tokens\] or"),
    (weighing([1.0, 1.0]), MaskError, f"a list; {DENSE}"),
    (packed([0.0, 6.0]), GroupError, "cu_seqlens .*expected int32 or int64"),
    (packed([0, 2, 3], [0, 6]), GroupError, r"cu_seqlens_padded is .*\(2,\); .*as many"),
    (packed(None, [0, 6]), GroupError, "cu_seqlens_padded without cu_seqlens"),
    (weighing(ROWS, token_factors=ROWS.T), MaskError, r"token_factors has shape \(3, 2\) and loss"),
    (rows_with(token_ids=tensor([1, 2])), MaskError, "token_ids .* of 6 elements; expected an int"),
    # One of 2**25 tokens weighs 3e-8, which fp16 rounds to 0.
    (weighing(ROWS, dtype=torch.float16), MaskError, "expected a floating dtype with the range of"),
    (
        lambda: by_function(ONES).weights(0),
        FunctionError,
        r"of shape \(6,\); .*mask's shape \(2, 3",
    ),
    (lambda: by_function(ROWS * math.nan).weights(0), FunctionError, "not finite"),
    (
        lambda: by_function(ROWS, rejected=tensor([False, True])).weights(0),
        FunctionError,
        "not 0 where the mask is 0 or the sample rejected; expected finite",
    ),
    (lambda: by_function(-ROWS).scaled_advantages(0, ROWS), FunctionError, "negative weights"),
    (weighing(ROWS, "sum"), ModeError, "a str for the aggregation of a term; expected a LossAggr"),
    (lambda: StepPlan.build(MEAN, [ROWS]), MaskError, "list of Microbatch"),
    (lambda: StepPlan.build(MEAN, None), MaskError, "a NoneType; expected a list of Microbatch"),
    (lambda: StepPlan.build(MEAN, [], sharded_over=object()), GroupError, "over without group"),
    (lambda: weighted_sum(ROWS, ROWS[0]), MaskError, r"\(3,\) .* \(2, 3\); .* \(nothing is br"),
    (lambda: predicting_mask(torch.ones(4), tensor([0, 6])), GroupError, "beyond the mask"),
]

A_STRING = "a sequence of strings"
TURNS = LossAggregation(mode="nested_mean", levels=("turn", "sample"))
TWO_PARENTS = {"prompt_ids": tensor([7, 7, 9]), "ids": {"session": tensor([4, 5, 5])}}
IN_PROMPTS = LossAggregation(mode="nested_mean", levels=("prompt", "session"))
OF_SAMPLES: list[Row] = [
    (weighing(ROWS, PROMPT_MEAN), GroupError, "by prompt and a microbatch has no prompt_ids; give"),
    (
        rows_with(prompt_ids=tensor([1])),
        GroupError,
        r"prompt_ids .*expected torch.int64 \[2\], one",
    ),
    (
        rows_with(dataset_ids=ONES[:2]),
        GroupError,
        "dataset_ids is a torch.float32 tensor.*expected",
    ),
    (rows_with(rejected=ONES[:2]), GroupError, "rejected .*torch.bool"),
    (rows_with(ids={"prompt": ["a", "b"]}), GroupError, "ids=.*'prompt'.*prompt_ids="),
    (rows_with(ids={"turn": [0, 1]}), GroupError, f"turn_ids is a .*{A_STRING}"),
    (weighing(ROWS, TURNS), GroupError, r"no turn_ids; give ids=\{'turn': ...\}, one for each"),
    (
        of_sums([2.0, 1.0, 2.0], IN_PROMPTS, **TWO_PARENTS),
        GroupError,
        r"session 5 is in the prompts [79] and [79]; expected each session in one prompt",
    ),
    (
        weighing(ROWS, sample_weights=ONES[:2]),
        GroupError,
        r"LossAggregation\(sample_weights='count'\)",
    ),
    (rows_with(sample_weights=tensor([1, 2])), GroupError, r"expected floating-point \[2\]"),
    (
        weighing(ROWS, WEIGHTED_SUM, sample_weights=tensor([1.0, -1])),
        MaskError,
        "has the value -1; expected finite",
    ),
    (of_sums([1.0, -1.0]), MaskError, "finite numbers >= 0"),
    (of_sums(ROWS), MaskError, "expected a vector"),
    (
        of_sums([1.0], aggregation("token_mean", sample_weights="count")),
        GroupError,
        "'count', and no weights; give sample_weights=",
    ),
    (of_sums([1.0] * 2, TURNS, ids=tensor([0, 1])), GroupError, "expected a mapping by names"),
    (of_sums([[1.0]] * 2, PROMPT_MEAN, prompt_ids=[["a"] * 2]), GroupError, "for 1 microbatches"),
    (of_sums([1.0], LossAggregation(mode="custom", function=max)), FunctionError, "StepPlan.build"),
    (lambda: of_sums([1.0])().weights(0), MaskError, "has no masks; expected StepPlan.build"),
]


def of_terms(terms: Any, step: Any = GOOD[:1], **options: Any) -> Callable[[], Any]:
    return lambda: StepPlan.build_terms(terms, step, **options)


TERMS = {"a": TOKEN_MEAN, "b": TOKEN_MEAN}
OF_TERMS: list[Row] = [
    (of_terms({}), ModeError, "expected a mapping of names to Term or LossAggregation"),
    (lambda: Term(TOKEN_MEAN, math.nan), ModeError, "coefficient=nan; expected a finite number"),
    (lambda: Term(TOKEN_MEAN, "1"), ModeError, "coefficient='1'; expected a finite number"),
    (lambda: of_terms(TERMS)().weighted_sum(0, {}), MaskError, r"\[\] for the terms \['a', 'b'\]"),
    (of_terms(TERMS, [{"a": GOOD[0]}]), MaskError, "none for the term 'b'"),
    (lambda: of_terms(TERMS)()["a"].groups("x"), GroupError, "by 'x'.*or that group_by names"),
    (of_terms(TERMS, group_by=["sample"]), GroupError, "=.'sample'.; expected some of prompt,"),
    (of_terms(TERMS, group_by=["dataset"]), GroupError, "groups by dataset and .* no dataset_ids"),
]

X = torch.zeros(2, 3)
ppo, cispo = policy.clipped_policy_loss, policy.cispo_loss
A_NUMBER = "expected a number >= 0 that fp32 holds, or inf"
OF_LOSSES: list[Row] = [
    (call, PolicyError, f"^{text}")
    for call, text in (
        (lambda: ppo(X, X[0], X), r"old_log_probs has shape \(3,\) and log_probs \(2, 3\); exp"),
        (lambda: policy.kl_penalty(X, X.long(), "k1"), "ref_log_probs is a torch.int64 tensor of"),
        (lambda: policy.kl_penalty(X, X, ["k1"]), r"estimator=\['k1'\]; expected 'k1', 'k2' or"),
        (lambda: ppo(X, X, X, clip_low=-0.1), f"clip_low=-0.1; {A_NUMBER}"),
        (lambda: cispo(X, X, X, clip_low=10**400, clip_high=1), f"clip_low=10*; {A_NUMBER}"),
        (lambda: policy.clipped_value_loss(X, X, X, clip=None), f"clip=None; {A_NUMBER}"),
        (lambda: ppo(X, X, X, dual_clip=1.0), "dual_clip=1.0; expected a number > 1 that fp32"),
    )
]

HALF = CPLayout.bshd(8, 2, 0)


def pack(*offsets: float) -> Callable[[], Any]:
    return lambda: CPLayout.thd(tensor(offsets), 2, 0)


def mean(mask: Any, layout: CPLayout | None = None) -> Callable[..., Any]:
    return lambda *values: SequenceMean(Microbatch(mask), layout)(*values)


OF_LAYOUTS: list[Row] = [
    (lambda: CPLayout.contiguous(8, 2, 2), LayoutError, "cp_rank=2 of cp_size=2; expected 0"),
    (lambda: CPLayout.bshd(8, -1, 0), LayoutError, "cp_size"),
    (lambda: CPLayout.contiguous(7, 2, 0), LayoutError, "length 7 .* = 2: pad"),
    # Lengths 4, 6, 6: the second is not a multiple of 2 * cp = 4, though the total is.
    (pack(0, 4, 10, 16), LayoutError, "sequence 1 has .* length 6; expected a multiple .*4: pad"),
    (pack(4, 8), LayoutError, "cu_seqlens.* start at 0"),
    (pack(0, 8, 4), LayoutError, "cu_seqlens.* not decrease"),
    (pack(0.0, 4.0), LayoutError, "cu_seqlens"),
    (lambda: HALF.shard(torch.zeros(2, 4)), LayoutError, "layout's 8"),
    (lambda: HALF.unshard([ONES[:4], ONES[:3]]), LayoutError, "length 7; expected the layout's 8"),
    (lambda: HALF.unshard(torch.zeros(2, 4)), LayoutError, "a Tensor without a group"),
    (lambda: HALF.unshard([ONES], group=object()), LayoutError, "a list with a group"),
    (lambda: SequenceMean(ONES), MaskError, "a Tensor; expected a Microbatch"),
    (mean(-ROWS), MaskError, VALUES),
    (mean(WIDE, HALF), LayoutError, r"layout of 2 .* a group of 1; .* both, or neither"),
    (mean(WIDE, CPLayout.bshd(16, 1, 0)), LayoutError, "length 8; expected the layout's 16"),
]

ONE, GREATEST = Mean.of(torch.ones(1), torch.ones(1)), Max.of(torch.ones(1), torch.ones(1))
NO_METRIC = "expected a Mean, Sum, Max or Min"


def reduced(*reports: Any) -> Callable[[], Any]:
    return lambda: reduce_reports([*reports], None)


OF_REPORTS: list[Row] = [
    (reduced({"a": ONE}, {"b": ONE}), ReportError, "'a' is a Mean in 1 of 2 microbatches"),
    (reduced({"a": ONE}, {"a": GREATEST}), ReportError, "'a' is a Max or Mean in 2 of 2"),
    (reduced({"a": Mean(ROWS, ROWS)}), ReportError, f"{NO_METRIC} of scalars"),
    (reduced({"a": tensor(1.0)}), ReportError, rf"'a' is tensor\(1.\); {NO_METRIC}"),
    (reduced({"a": Mean(1.0, 2.0)}), ReportError, NO_METRIC),
    (lambda: Mean.of(ONES, ROWS), ReportError, r"\(2, 3\) and values \(6,\); expected"),
]


def loss_of_rows(losses: torch.Tensor, **options: Any) -> Callable[[], Any]:
    """A `TokenLoss` that is called without a hook."""
    return lambda: TokenLoss(lambda x: (x, {}), ROWS, **options)(losses)


def hook(*given: Any, **options: Any) -> Callable[[], Any]:
    return lambda: LossHook(*given, **options)


AUDITS = [Audit(), type("OwnAudit", (Audit,), {})()]
TWO = {"kl": SUM, "policy": SUM}
OF_HOOKS: list[Row] = [
    (hook(SUM, empty_step="ignore"), ModeError, "^empty_step='ignore'; expected one of st"),
    (hook({"lm": SUM}), ModeError, "expected different names .* no term 'lm'"),
    (hook(TWO, total=None), ModeError, "^reports named .*; expected different names"),
    (hook(SUM, extensions=[Audit]), ModeError, "^<class .* among extensions; expected obj"),
    (hook(SUM, extensions=AUDITS), ModeError, "^the settings .* of OwnAudit are taken"),
    (loss_of_rows(ROWS, whole="yes"), ModeError, "^whole='yes'; .* or 'reduced_grad'$"),
    (loss_of_rows(ROWS, whole="local_grad"), HostError, "was called without a hook"),
    (loss_of_rows(ROWS, takes_weights=True), HostError, "was called without a hook"),
    (loss_of_rows(ROWS.T), MaskError, "expected one loss per token"),
]
CALLS = [*OF_MASKS, *OF_SAMPLES, *OF_TERMS, *OF_LOSSES, *OF_LAYOUTS, *OF_REPORTS, *OF_HOOKS]


@pytest.mark.parametrize(("call", "error", "text"), CALLS, ids=[text for *_, text in CALLS])
def test_a_wrong_call_is_named(call, error, text):
    refusal(call, error, text)


OUT_OF_FP32 = [  # arguments of an aggregation, mask, sample weights, and what coefficients are
    ({"mode": "sample_mean"}, [[1.0, 1.0], [1e-42, 0]], [1.0, 1], r"0.25 to 5e\+41"),
    ({"mode": "token_mean"}, [[1e-310, 0]], [1.0], "inf to inf"),
    ({"mode": "constant", "divisor": 1e37}, [[1.0]] * 9, [1.0] * 9, "1.11e-38 to 1.11e-38"),
    ({"mode": "sum"}, [[1.0], [1.0]], [1e-50, 1], "2.5e-51 to 0.25"),
]


@pytest.mark.parametrize(("options", "mask", "weights", "size"), OUT_OF_FP32)
def test_coefficients_that_fp32_does_not_hold_are_refused(options, mask, weights, size):
    agg = aggregation(**options, sample_weights="skip")
    call = weighing(tensor(mask, dtype=F64), agg, sample_weights=tensor(weights, dtype=F64))
    refusal(call, MaskError, f"{size}, and fp32 holds 1.18e-38 to 3.4e\\+38; expected a loss_mask")


def test_coefficients_of_samples_that_weigh_nothing_do_not_matter():
    mask = tensor([[1.0, 1.0], [1e-42, 0], [0, 0]], dtype=F64)
    step = Microbatch(mask, rejected=tensor([False, True, False]))
    for rejected in ("count", "skip"):
        agg = aggregation("sample_mean", rejected=rejected)
        assert bool(StepPlan.build(agg, [step]).weights(0)[0].all())


@pytest.mark.parametrize("i", [2, -3, "0", slice(1)])
def test_a_plan_has_no_more_microbatches_than_it_was_given(i):
    plan = StepPlan.build(MEAN, [Microbatch(torch.ones(1, n)) for n in (1, 2)])
    assert torch.equal(plan.weights(-1), plan.weights(1))
    for call in (plan.weights, plan.coefficients, lambda i: plan.group_sums("step", i)):
        text = "microbatch .* of a plan of 2 microbatches; expected"
        refusal(lambda call=call: call(i), StepError, text)
