"""Every kind of mistake by its named error, and a text that says what was got and expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
    predicting_mask,
    token_weights,
    weighted_sum,
)
from megatron_loss_agg.errors import DataError, HostError, OptionError
from megatron_loss_agg.mcore import Audit, LossHook, TokenLoss
from megatron_loss_agg.report import Max, Mean, reduce_reports
from tests.core.meaning import F64, aggregation

TOKEN_MEAN, PROMPT_MEAN = aggregation("token_mean"), aggregation("prompt_mean")
MEAN, SUM = aggregation("sample_mean"), LossAggregation(mode="sum")
WEIGHTED_SUM = LossAggregation(mode="sum", sample_weights="skip")
ONES, ROWS, WIDE = torch.ones(6), torch.ones(2, 3), torch.ones(2, 8)


def refusal(call: Callable[[], Any], error: type[AggregationError], text: str) -> str:
    """What is said by the error that a call raises, of just this class, with this text in it."""
    assert issubclass(error, ValueError)
    with pytest.raises(error, match=text) as raised:
        call()
    assert type(raised.value) is error
    return str(raised.value)


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
    (Microbatch(tensor([[-1e-30, 2.0]])), DataError, VALUES),
    (Microbatch(tensor([[math.inf, 2.0]]).half()), DataError, VALUES),
    (Microbatch(tensor([[1e39, 2.0]], dtype=F64)), DataError, VALUES),
    (Microbatch(ROWS * 0, token_factors=ROWS * math.nan), DataError, FACTORS),
    (a_pack([0, 2, 5], [0, 4, 7], tensor([1.0, 1, 1, 0, 1, 1, 1, 0])), DataError, OUTSIDE),
    (a_pack([0, 2, 5], [0, 4, 7], tensor([1.0, 1, 0, 0, 1, 1, 1, 1])), DataError, OUTSIDE),
    (a_pack([1, 3, 5], None, torch.zeros(6)), DataError, RISING),
    (a_pack([0, 2**63 - 1, -2, 6], None, torch.zeros(6)), DataError, RISING),
    (a_pack([0, 1, 2], [0, 2**63 - 1, -2], torch.zeros(6)), DataError, RISING),
    (a_pack([0, 2, 4], [0, 1, 2], torch.zeros(6)), DataError, RISING),
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


def rows(**given: Any) -> Callable[[], Any]:
    return partial(Microbatch, ROWS, **given)


def aggregating(mode: Any, **fields: Any) -> Callable[[], Any]:
    return partial(LossAggregation, mode=mode, **fields)


def weighing(mask: Any = ROWS, agg: Any = MEAN, **options: Any) -> Callable[[], Any]:
    return partial(token_weights, agg, mask, **options)


def by_function(weights: Any, **given: Any) -> StepPlan:
    """The plan of one microbatch whose weights are made by a custom function."""
    agg = LossAggregation(mode="custom", function=lambda plan, i: weights, rejected="count")
    return StepPlan.build(agg, [Microbatch(ROWS, **given)])


def of_sums(sums: Any, agg: LossAggregation = TOKEN_MEAN, **options: Any) -> Callable[[], Any]:
    return partial(StepPlan.from_mask_sums, agg, sums, **options)


def of_terms(terms: Any, step: Any = GOOD[:1], **options: Any) -> Callable[[], Any]:
    return partial(StepPlan.build_terms, terms, step, **options)


def halves_of(*offsets: float) -> Callable[[], Any]:
    """This rank's, of two, of a pack."""
    return partial(CPLayout.thd, tensor(offsets), 2, 0)


def mean_of(mask: Any, layout: CPLayout | None = None) -> Callable[[], Any]:
    return lambda: SequenceMean(Microbatch(mask), layout)


def reduced(*reports: Any) -> Callable[[], Any]:
    return partial(reduce_reports, reports, None)


def loss_of_rows(losses: torch.Tensor, **options: Any) -> Callable[[], Any]:
    """A `TokenLoss` that is called without a hook."""
    return lambda: TokenLoss(lambda x: (x, {}), ROWS, **options)(losses)


MODES = "expected one of token_mean, sample_mean, rollout_mean, prompt_mean, dataset_mean, nested_"
UNITS = "expected units from outside to inside, each once, of sample, rollout, prompt, dataset"
LEVELS = (None, "prompt;sample", ["sample", "prompt"], ["prompt", "prompt"], ["step"], [3])
DENSE, A_STRING = "expected a real, dense tensor", "a sequence of strings"
NO_METRIC = "expected a Mean, Sum, Max or Min"
TURNS = LossAggregation(mode="nested_mean", levels=("turn", "sample"))
IN_PROMPTS = LossAggregation(mode="nested_mean", levels=("prompt", "session"))
TWO_PARENTS = {"prompt_ids": tensor([7, 7, 9]), "ids": {"session": tensor([4, 5, 5])}}
COUNTED = aggregation("token_mean", sample_weights="count")
TERMS = {"a": TOKEN_MEAN, "b": TOKEN_MEAN}
PLAN = StepPlan.build_terms(TERMS, GOOD[:1])
HALF = CPLayout.bshd(8, 2, 0)
ONE, GREATEST = Mean.of(torch.ones(1), torch.ones(1)), Max.of(torch.ones(1), torch.ones(1))
AUDITS = [Audit(), type("OwnAudit", (Audit,), {})()]
# What is raised by which call, and what it says.
CALLS: list[tuple[type[AggregationError], list[tuple[str, Callable[[], Any]]]]] = [
    (
        OptionError,
        [
            (f"unknown mode 'dapo'; {MODES}", aggregating("dapo")),
            (f"unknown mode None; {MODES}", aggregating(None)),
            (r"'token-mean'; did you mean 'token_mean'\? expected", aggregating("token-mean")),
            ("empty=None; expected 'count' or 'skip'", aggregating("sample_mean", empty=None)),
            ("rejected='drop'; .*'count' or 'skip'", aggregating("sum", rejected="drop")),
            ("sample_weights=True; .*'count' or", aggregating("sum", sample_weights=True)),
            ("='tokens' with .*expected one of", aggregating("prompt_mean", count="tokens")),
            ("with mode 'token_mean'; expected none", aggregating("token_mean", count="sample")),
            *(
                (f"^levels=.*'nested_mean'; {UNITS}", aggregating("nested_mean", levels=x))
                for x in LEVELS
            ),
            ("with mode 'prompt_mean'; expected", aggregating("prompt_mean", levels=["sample"])),
            ("a str for the aggregation of a term; expected a LossAggr", weighing(agg="sum")),
            ("expected a mapping of names to Term or LossAggregation", of_terms({})),
            ("coefficient=nan; expected a finite number", partial(Term, TOKEN_MEAN, math.nan)),
            ("coefficient='1'; expected a finite number", partial(Term, TOKEN_MEAN, "1")),
            (
                "^empty_step='ignore'; expected one of st",
                partial(LossHook, SUM, empty_step="ignore"),
            ),
            ("expected different names .* no term 'lm'", partial(LossHook, {"lm": SUM})),
            (
                "^reports named .*; expected different",
                partial(LossHook, {"kl": SUM, "p": SUM}, total=None),
            ),
            (
                "^<class .* among extensions; expected obj",
                partial(LossHook, SUM, extensions=[Audit]),
            ),
            ("^the settings .* of OwnAudit are taken", partial(LossHook, SUM, extensions=AUDITS)),
            ("^whole='yes'; .* or 'reduced_grad'$", loss_of_rows(ROWS, whole="yes")),
        ],
    ),
    (
        OptionError,
        [
            ("needs a divisor and got none; give", aggregating("constant")),
            ("divisor=2 with mode 'token.*drop it", aggregating("token_mean", divisor=2)),
            *(
                ("divisor=.*; expected a finite number >", aggregating("constant", divisor=x))
                for x in (0, math.nan, math.inf, "4")
            ),
        ],
    ),
    (
        OptionError,
        [
            ("'custom'; expected a function", aggregating("custom", function="module:name")),
            ("function=.*; expected none", aggregating("sum", function=print)),
            (r"of shape \(6,\); .*mask's shape \(2, 3", lambda: by_function(ONES).weights(0)),
            ("not finite", lambda: by_function(ROWS * math.nan).weights(0)),
            (
                "not 0 where the mask is 0 or the sample rejected; expected finite",
                lambda: by_function(ROWS, rejected=tensor([False, True])).weights(0),
            ),
            ("negative weights", lambda: by_function(-ROWS).scaled_advantages(0, ROWS)),
            ("StepPlan.build", of_sums([1.0], LossAggregation(mode="custom", function=max))),
        ],
    ),
    (
        DataError,
        [
            (r"\(6,\) without cu_seqlens; expected \[samples, seq\] without", weighing(ONES)),
            (
                r"\(2, 3\) beside cu_seqlens; .*, or \[tokens\] or",
                partial(a_pack, [0, 6], mask=ROWS),
            ),
            (f"a list; {DENSE}", weighing([1.0, 1.0])),
            (r"token_factors has shape \(3, 2\) and loss", weighing(token_factors=ROWS.T)),
            ("token_ids .* of 6 elements; expected an int", rows(token_ids=tensor([1, 2]))),
            # One of 2**25 tokens weighs 3e-8, which fp16 rounds to 0.
            ("expected a floating dtype with the range of", weighing(dtype=torch.float16)),
            ("list of Microbatch", partial(StepPlan.build, MEAN, [ROWS])),
            ("a NoneType; expected a list of Microbatch", partial(StepPlan.build, MEAN, None)),
            (r"\(3,\) .* \(2, 3\); .* \(nothing is br", partial(weighted_sum, ROWS, ROWS[0])),
            (
                "has the value -1; expected finite",
                weighing(agg=WEIGHTED_SUM, sample_weights=tensor([1.0, -1])),
            ),
            ("finite numbers >= 0", of_sums([1.0, -1.0])),
            ("expected a vector", of_sums(ROWS)),
            ("has no masks; expected StepPlan.build", lambda: of_sums([1.0])().weights(0)),
            (r"\[\] for the terms \['a', 'b'\]", partial(PLAN.weighted_sum, 0, {})),
            ("none for the term 'b'", of_terms(TERMS, [{"a": GOOD[0]}])),
            ("must be a Microbatch, got a Tensor", partial(SequenceMean, ONES)),
            (VALUES, mean_of(-ROWS)),
            ("expected one loss per token", loss_of_rows(ROWS.T)),
        ],
    ),
    (
        DataError,
        [
            ("cu_seqlens .*expected int32 or int64", partial(a_pack, [0.0, 6.0])),
            (r"cu_seqlens_padded is .*\(2,\); .*as many", partial(a_pack, [0, 2, 3], [0, 6])),
            ("cu_seqlens_padded without cu_seqlens", partial(a_pack, None, [0, 6])),
            ("over without group", partial(StepPlan.build, MEAN, [], sharded_over=object())),
            ("beyond the mask", partial(predicting_mask, torch.ones(4), tensor([0, 6]))),
            (
                "by prompt and a microbatch has no prompt_ids; .* give prompt_ids= ",
                weighing(agg=PROMPT_MEAN),
            ),
            (r"prompt_ids .*expected torch.int64 \[2\], one", rows(prompt_ids=tensor([1]))),
            ("dataset_ids is a torch.float32 tensor.*expected", rows(dataset_ids=ONES[:2])),
            ("rejected .*torch.bool", rows(rejected=ONES[:2])),
            ("ids=.*'prompt'.*prompt_ids=", rows(ids={"prompt": ["a", "b"]})),
            (f"turn_ids is a .*{A_STRING}", rows(ids={"turn": [0, 1]})),
            (
                r"no turn_ids; expected one id for each sample: give ids=\{'turn': ...\} ",
                weighing(agg=TURNS),
            ),
            (
                r"session 5 is in the prompts [79] and [79]; expected each session in one prompt",
                of_sums([2.0, 1.0, 2.0], IN_PROMPTS, **TWO_PARENTS),
            ),
            (r"LossAggregation\(sample_weights='count'\)", weighing(sample_weights=ONES[:2])),
            (r"expected floating-point \[2\]", rows(sample_weights=tensor([1, 2]))),
            ("'count' and a microbatch has no sample_weights; .* give", of_sums([1.0], COUNTED)),
            (
                "'count' and a microbatch has no sample_weights",
                partial(
                    StepPlan.build, COUNTED, [replace(GOOD[0], sample_weights=ONES[:2]), GOOD[0]]
                ),
            ),
            ("expected a mapping by names", of_sums([1.0] * 2, TURNS, ids=tensor([0, 1]))),
            ("for 1 microbatches", of_sums([[1.0]] * 2, PROMPT_MEAN, prompt_ids=[["a"] * 2])),
            ("by 'x'.*or that group_by names", partial(PLAN["a"].groups, "x")),
            ("=.'sample'.; expected some of prompt,", of_terms(TERMS, group_by=["sample"])),
            ("groups by dataset and .* no dataset_ids", of_terms(TERMS, group_by=["dataset"])),
        ],
    ),
    (
        DataError,
        [
            ("from 0 to cp_size - 1 = 1, got 2.", partial(CPLayout.contiguous, 8, 2, 2)),
            ("cp_size - 1 = -2, got 0.", partial(CPLayout.bshd, 8, -1, 0)),
            ("multiple of cp_size = 2, got 7. Pad", partial(CPLayout.contiguous, 7, 2, 0)),
            # Lengths 4, 6, 6: the second is not a multiple of 2 * cp = 4, though the total is.
            (r"cp_size = 4, got 6 for sequence 1\. Pad", halves_of(0, 4, 10, 16)),
            ("cu_seqlens_padded must .* start.* at 0", halves_of(4, 8)),
            ("cu_seqlens_padded must .*not decrease", halves_of(0, 8, 4)),
            ("cu_seqlens_padded must be int32 or int64", halves_of(0.0, 4.0)),
            ("layout's length 8, got 4.", partial(HALF.shard, torch.zeros(2, 4))),
            ("layout's length 8, got 7.", partial(HALF.unshard, [ONES[:4], ONES[:3]])),
            ("a Tensor without a group. Give", partial(HALF.unshard, torch.zeros(2, 4))),
            ("a list with a group. Drop", partial(HALF.unshard, [ONES], group=object())),
            ("layout's 2 .* ranks, got 1. Give both", mean_of(WIDE, HALF)),
            ("layout's length 16, got 8.", mean_of(WIDE, CPLayout.bshd(16, 1, 0))),
        ],
    ),
    (
        DataError,
        [
            ("'a' is a Mean in 1 of 2 microbatches", reduced({"a": ONE}, {"b": ONE})),
            ("'a' is a Max or Mean in 2 of 2", reduced({"a": ONE}, {"a": GREATEST})),
            (f"{NO_METRIC} of scalars", reduced({"a": Mean(ROWS, ROWS)})),
            (rf"'a' is tensor\(1.\); {NO_METRIC}", reduced({"a": tensor(1.0)})),
            (NO_METRIC, reduced({"a": Mean(1.0, 2.0)})),
            (r"\(2, 3\) and values \(6,\); expected", partial(Mean.of, ONES, ROWS)),
        ],
    ),
    (
        HostError,
        [
            ("was called without a hook", loss_of_rows(ROWS, whole="local_grad")),
            ("was called without a hook", loss_of_rows(ROWS, takes_weights=True)),
        ],
    ),
]
FLAT = [(error, *row) for error, of_error in CALLS for row in of_error]


@pytest.mark.parametrize(("error", "text", "call"), FLAT, ids=[text for _, text, _ in FLAT])
def test_a_wrong_call_is_named(error, text, call):
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
    refusal(call, DataError, f"{size}, and fp32 holds 1.18e-38 to 3.4e\\+38; expected a loss_mask")


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
        refusal(lambda call=call: call(i), DataError, text)
