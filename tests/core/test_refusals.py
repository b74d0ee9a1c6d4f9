"""Every kind of mistake by its named error, in two sentences: what was got, and what to change."""

from __future__ import annotations

import math
import re
import warnings
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
from megatron_loss_agg.mcore import Extension, LossHook, SampleLoss, TokenLoss
from megatron_loss_agg.mcore.checks.ids import warn_of_restarting_ids
from megatron_loss_agg.report import Max, Mean, reduce_reports
from tests.core.meaning import F64, aggregation

TOKEN_MEAN, PROMPT_MEAN = aggregation("token_mean"), aggregation("prompt_mean")
MEAN, SUM = aggregation("sample_mean"), LossAggregation(mode="sum")
WEIGHTED_SUM = LossAggregation(mode="sum", sample_weights="skip")
ONES, ROWS, WIDE = torch.ones(6), torch.ones(2, 3), torch.ones(2, 8)


def refusal(call: Callable[[], Any], error: type[AggregationError], text: str) -> str:
    """The text of the error that a call raises, of just this class: two sentences."""
    assert issubclass(error, ValueError)
    with pytest.raises(error, match=text) as raised:
        call()
    assert type(raised.value) is error
    said = str(raised.value)
    assert said.endswith(".") and ". " in said and "; " not in said
    return said


def test_an_aggregation_is_frozen_and_its_fields_are_given_by_name():
    with pytest.raises(TypeError):
        LossAggregation("token_mean")
    with pytest.raises(AttributeError):
        MEAN.mode = "token_mean"


def a_pack(offsets: Any, padded: Any = None, mask: Any = ONES) -> Microbatch:
    offsets, padded = (tensor(x) if isinstance(x, list) else x for x in (offsets, padded))
    return Microbatch(mask, offsets, cu_seqlens_padded=padded)


RISING = r"^offsets must start at 0, never decrease, .* microbatch 0\. Correct them, or"
VALUES = r"^loss_mask must be finite, >= 0 and in the range of fp32 .*got values from {}\. Correct"
OUTSIDE = r"^loss_mask must be 0 outside of all samples, got other values in microbatch 0\. Mask"
# Microbatches with values that cannot be, which the plan finds. Samples own 0..1 and 4..6 of a
# pack; were the offsets beyond it read, the process would die.
BAD: list[tuple[Microbatch, str]] = [
    (Microbatch(tensor([[-1e-30, 2.0]])), VALUES.format("-1e-30 to 2 in microbatch 0")),
    (Microbatch(tensor([[math.inf, 2.0]]).half()), VALUES.format("2 to inf in microbatch 0")),
    (Microbatch(tensor([[math.nan, 2.0]])), VALUES.format("nan to nan in microbatch 0")),
    (Microbatch(tensor([[1e39, 2.0]], dtype=F64)), VALUES.format(r"2 to 1e\+39 in microbatch 0")),
    (a_pack([0, 2, 5], [0, 4, 7], tensor([1.0, 1, 1, 0, 1, 1, 1, 0])), OUTSIDE),
    (a_pack([0, 2, 5], [0, 4, 7], tensor([1.0, 1, 0, 0, 1, 1, 1, 1])), OUTSIDE),
    (a_pack([1, 3, 5], None, torch.zeros(6)), RISING),
    (a_pack([1, 3], [0, 4], torch.zeros(6)), RISING),
    (a_pack([0, 2**63 - 1, -2, 6], None, torch.zeros(6)), RISING),
    (a_pack([0, 1, 2], [0, 2**63 - 1, -2], torch.zeros(6)), RISING),
    (a_pack([0, 2, 4], [0, 1, 2], torch.zeros(6)), RISING),
]
GOOD = [
    *(Microbatch(torch.ones(shape)) for shape in ((2, 3), (0, 3), (2, 0))),
    a_pack([0, 2, 4], [0, 3, 6], tensor([1.0, 1, 0, 1, 1, 0])),
    a_pack([0], mask=torch.zeros(2)),
]


@pytest.mark.parametrize(("bad", "text"), BAD)
def test_the_first_bad_microbatch_is_named_by_its_place(bad, text):
    alone = refusal(lambda: StepPlan.build(MEAN, [bad]), DataError, text)
    # Neither the neighbours nor what comes later is taken for it.
    step = [*GOOD, bad, *GOOD, BAD[0][0]]
    later = text.replace("microbatch 0", f"microbatch {len(GOOD)}")
    error = refusal(lambda: StepPlan.build(MEAN, step), DataError, later)
    assert error == alone.replace("microbatch 0", f"microbatch {len(GOOD)}")
    terms, of_terms = dict.fromkeys("ab", MEAN), [{"a": GOOD[0], "b": x} for x in (GOOD[0], bad)]
    second = text.replace("microbatch 0", "microbatch 1")
    error = refusal(lambda: StepPlan.build_terms(terms, of_terms), DataError, second)
    assert error == alone.replace("microbatch 0", "microbatch 1")


def rows(**given: Any) -> Callable[[], Any]:
    return partial(Microbatch, ROWS, **given)


def aggregating(mode: Any, **fields: Any) -> Callable[[], Any]:
    return partial(LossAggregation, mode=mode, **fields)


def weighing(mask: Any = ROWS, agg: Any = MEAN, **options: Any) -> Callable[[], Any]:
    return partial(token_weights, agg, mask, **options)


def by_function(coefficients: Any) -> Callable[[], StepPlan]:
    """The plan of one microbatch of two samples, whose coefficients a custom function makes."""
    agg = LossAggregation(mode="custom", function=lambda samples: coefficients)
    return partial(StepPlan.build, agg, [Microbatch(ROWS)])


def of_sums(sums: Any, agg: LossAggregation = TOKEN_MEAN, **options: Any) -> Callable[[], Any]:
    return partial(StepPlan.from_mask_sums, agg, sums, **options)


def of_terms(terms: Any, step: Any = GOOD[:1], **options: Any) -> Callable[[], Any]:
    return partial(StepPlan.build_terms, terms, step, **options)


def halves_of(*offsets: float) -> Callable[[], Any]:
    """This rank's, of two, of a pack."""
    return partial(CPLayout.thd, tensor(offsets), 2, 0)


def mean_of(mask: Any, layout: CPLayout | None = None) -> Callable[[], Any]:
    return lambda: SequenceMean(Microbatch(mask), layout)


def of_0_2_0() -> Any:
    def f(plan: Any, i: int) -> Any: ...

    return f


def reduced(*reports: Any) -> Callable[[], Any]:
    return partial(reduce_reports, reports, None)


def loss_of_rows(losses: torch.Tensor, **options: Any) -> Callable[[], Any]:
    """A `TokenLoss` that is called without a hook."""
    return lambda: TokenLoss(lambda x: x, ROWS, **options)(losses)


MODES = "Choose one of token_mean, sample_mean, rollout_mean, prompt_mean, dataset_mean, nested_"
UNITS = (
    "levels of nested_mean must be units from outside to inside, each once, with sample only last,"
)
LEVELS = (None, "prompt;sample", ["sample", "prompt"], ["prompt", "prompt"], ["all"], [3])
NO_METRIC = "metric 'a' must be a Mean, Sum, Max or Min of scalars, or a tensor .sum, count., got"
TURNS = LossAggregation(mode="nested_mean", levels=("turn", "sample"))
IN_PROMPTS = LossAggregation(mode="nested_mean", levels=("prompt", "session"))
STRAY = (
    "each session must be in one prompt for the levels prompt > session, got the session 5 in the "
    "prompts [79] and [79]. Give ids that are unique over the whole step"
)
TWO_PARENTS = [
    {"prompt_ids": tensor(prompts), "ids": {"session": tensor([4, 5, 5])}}
    for prompts in ([7, 7, 9], [9, 9, 7])
]
COUNTED = aggregation("token_mean", sample_weights="count")
OF_DATASETS = aggregation("token_mean", sample_weights="count", dataset_weights={0: 0.5})
TERMS = {"a": TOKEN_MEAN, "b": TOKEN_MEAN}
PLAN = StepPlan.build(TOKEN_MEAN, GOOD[:1])
HALF = CPLayout.bshd(8, 2, 0)
ONE, GREATEST = Mean.of(torch.ones(1), torch.ones(1)), Max.of(torch.ones(1), torch.ones(1))
IDS_OF = (
    "prompt_ids must be an int64 tensor .samples., or a sequence of only ints or only strings, got"
)
OF_FUNCTION = (
    "^the aggregation function must return a real coefficient for each of the 2 samples, got "
)
# The class of an error; how its text begins, or what is in it; and the call that raises it.
CALLS: list[tuple[type[AggregationError], str, Callable[[], Any]]] = [
    (OptionError, f"^unknown mode 'mean'. {MODES}", aggregating("mean")),
    (
        OptionError,
        r"^unknown mode 'bnpo'. Choose the preset of your system, ms-swift/bnpo \(token_mean\), "
        r"trl/bnpo \(microbatch_mean\) \(",
        aggregating("bnpo"),
    ),
    (
        OptionError,
        r"^unknown mode 'seq-mean-token-mean'. Choose the preset of your system, verl/seq-",
        aggregating("seq-mean-token-mean"),
    ),
    (
        OptionError,
        r"^unknown mode 'SAMPLE-MEAN'. Choose sample_mean, or the preset of a system: "
        r"slime/sample_mean \(rollout_mean\), ",
        aggregating("SAMPLE-MEAN"),
    ),
    *(
        (OptionError, rf"^unknown mode '{name}'. Choose .*{preset} \({mode}\)", aggregating(name))
        for name, preset, mode in (
            ("TOKEN_MEAN", "verl/token-mean", "token_mean"),
            ("sequence_mean", "skyrl/sequence_mean", "sample_mean"),
            ("grpo", "trl/grpo", "sample_mean"),
            ("dapo", "ms-swift/dapo", "token_mean"),
            ("dr_grpo", "trl/dr_grpo", "constant"),
            ("seq_mean_token_sum_norm", "roll/seq-mean-token-sum-norm", "sum"),
        )
    ),
    (OptionError, f"^unknown mode None. {MODES}", aggregating(None)),
    (OptionError, r"'token-mean'. Choose", aggregating("token-mean")),
    (
        OptionError,
        "^unknown mode 'trl/grpo'. It is a preset: write LossAggregation.preset",
        aggregating("trl/grpo"),
    ),
    (
        OptionError,
        r"^mode 'custom' needs a function \(samples\) .*, got f\(plan, i\)\. Give function= .*-function",
        aggregating("custom", function=of_0_2_0()),
    ),
    (OptionError, "^empty must be 'count' or 'skip', got None. ", aggregating("sum", empty=None)),
    (OptionError, "^rejected must be .*, got 'drop'. ", aggregating("sum", rejected="drop")),
    (OptionError, "^sample_weights must be .*, got True", aggregating("sum", sample_weights=True)),
    *(
        (
            OptionError,
            "^dataset_weights must be one finite number >= 0 for each id of a data set, got .* Give .*"
            "--loss-aggregation-dataset-weights",
            aggregating("sum", dataset_weights=x, sample_weights="count"),
        )
        for x in ("0.5,2", "0:1,0:2", "a:1", "0:-1", "0:nan", "", {}, {0.5: 1.0}, {0: None}, 3)
    ),
    (
        OptionError,
        "^dataset_weights need sample_weights 'count', .* or 'skip', .*, got none. Choose one .*"
        "--loss-aggregation-sample-weights",
        aggregating("token_mean", dataset_weights={0: 0.5}),
    ),
    (
        OptionError,
        "^mode 'custom' takes no dataset_weights, .*, got {0: 0.5}. Use samples.ids",
        aggregating("custom", function=len, dataset_weights={0: 0.5}, sample_weights="skip"),
    ),
    (
        DataError,
        "^dataset_weights must have a weight for each data set of the step, got none for -1, 2. Add",
        of_sums([1.0] * 3, OF_DATASETS, dataset_ids=[2, 0, -1]),
    ),
    (
        DataError,
        "^dataset_weights are by data set, and a microbatch has no dataset_ids. Give .*, or drop .*"
        "--loss-aggregation-dataset-weights",
        of_sums([1.0], OF_DATASETS),
    ),
    (
        DataError,
        "^sample_weights='count' needs a weight for each sample, and a microbatch has none. Give",
        partial(
            StepPlan.build,
            OF_DATASETS,
            [
                Microbatch(ROWS, dataset_ids=[0, 0], sample_weights=ONES[:2]),
                Microbatch(ROWS, dataset_ids=[0, 0]),
            ],
        ),
    ),
    (
        OptionError,
        "^count must be one of sample, rollout, prompt, dataset, got 'tokens'. ",
        aggregating("prompt_mean", count="tokens"),
    ),
    (
        OptionError,
        "^mode 'token_mean' takes no count, got 'sample'. Drop",
        aggregating("token_mean", count="sample"),
    ),
    *((OptionError, f"^{UNITS}", aggregating("nested_mean", levels=x)) for x in LEVELS),
    *(
        (
            OptionError,
            f"^nested_mean must have levels besides '{x}', got only that one, which is {x}_mean. "
            "Choose .*--loss-aggregation-levels",
            aggregating("nested_mean", levels=[x]),
        )
        for x in ("prompt", "rollout", "dataset", "sample")
    ),
    (
        OptionError,
        "^mode 'prompt_mean' takes no levels, got .*. Drop them, .*--loss-aggregation-levels",
        aggregating("prompt_mean", levels=["sample"]),
    ),
    (
        OptionError,
        "^mode 'constant' needs a divisor, got none. Give .*--loss-aggregation-divisor",
        aggregating("constant"),
    ),
    (
        OptionError,
        "^mode 'token_mean' takes no divisor, got 2. Drop it, or choose mode constant or sum ",
        aggregating("token_mean", divisor=2),
    ),
    *(
        (
            OptionError,
            f"^divisor must be a finite number > 0, got {x!r}. Change .*--loss-aggregation-divisor",
            aggregating("constant", divisor=x),
        )
        for x in (0, math.nan, math.inf, "4")
    ),
    (
        OptionError,
        "^mode 'custom' needs a function .samples. -> .*, got 'module:name'. Give function=",
        aggregating("custom", function="module:name"),
    ),
    (
        OptionError,
        "^mode 'sum' takes no function, got <built-in function print>. Drop it, or choose mode cust",
        aggregating("sum", function=print),
    ),
    (
        OptionError,
        "^a term's aggregation must be a LossAggregation, got a str",
        weighing(agg="sum"),
    ),
    (OptionError, "^terms must be a mapping of names to .*, got {}. Give one", of_terms({})),
    (
        OptionError,
        "^a term's multiplier must be a finite number, got nan",
        partial(Term, SUM, math.nan),
    ),
    (OptionError, "^a term's multiplier must be a finite number, got '1'", partial(Term, SUM, "1")),
    (OptionError, rf"{OF_FUNCTION}a torch.float32 tensor of shape \(6,\). ", by_function(ONES)),
    (OptionError, f"{OF_FUNCTION}a list. Change the function", by_function([1.0, 1.0])),
    (
        OptionError,
        "^the aggregation function must return finite coefficients, got infinite or NaN ones for",
        by_function(tensor([1.0, math.inf])),
    ),
    (
        OptionError,
        "^coefficients that scale advantages must be >= 0, got negative ones, .*. Change the aggre",
        lambda: by_function(-ONES[:2])().scaled_advantages(0, ROWS),
    ),
    (
        DataError,
        r"^advantages must have the shape \(2, 3\) of loss_mask, got \(6,\)\. Reshape",
        partial(PLAN.scaled_advantages, 0, ONES),
    ),
    (
        DataError,
        "^coefficients of samples must be in the range of fp32, got 1e-40 to 1e-40. ",
        by_function(-ONES[:2].double() * 1e-40),
    ),
    (
        DataError,
        r"^loss_mask must be \[samples, seq\], got \(6,\). Add the leading axis, or pass cu_seqlens",
        weighing(ONES),
    ),
    (
        DataError,
        r"^loss_mask of a pack must be \[tokens\] or \[1, tokens\], got \(2, 3\). Flatten it",
        partial(a_pack, [0, 6], mask=ROWS),
    ),
    (DataError, "^loss_mask must be a real, dense tensor, got a list", weighing([1.0, 1.0])),
    *(
        (
            DataError,
            f"^loss_mask must be bool, uint8, a signed integer, .*, got a {dtype} tensor of shape "
            r"\(2, 3\). Convert it",
            weighing(ROWS.to(dtype)),
        )
        for dtype in (
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.uint16,
            torch.uint32,
            torch.uint64,
        )
    ),
    (
        DataError,
        "^model_inputs must have an integer for each of the 6 elements of loss_mask, got a torch.in",
        rows(model_inputs=tensor([1, 2])),
    ),
    (
        DataError,
        "^routed_tokens must be an int >= 0, got -1. Give a Python int",
        rows(routed_tokens=-1),
    ),
    # One of 2**25 tokens weighs 3e-8, which fp16 rounds to 0.
    (
        DataError,
        "^weights must have the range of fp32, got dtype torch.float16. Choose torch.float32",
        weighing(dtype=torch.float16),
    ),
    (
        DataError,
        "^microbatches must be of class Microbatch, or mappings .*, got a Tensor. Give read_batch",
        partial(StepPlan.build, MEAN, [ROWS]),
    ),
    (
        DataError,
        "^microbatches must be a list of Microbatch, got a NoneType. Give",
        partial(StepPlan.build, MEAN, None),
    ),
    (
        DataError,
        r"^token_loss must have the shape \(2, 3\) of w, got \(3,\). Reshape it: nothing is broadcas",
        partial(weighted_sum, ROWS, ROWS[0]),
    ),
    *(
        (
            DataError,
            f"^sample_weights must be finite and >= 0, got {bad}. Correct",
            weighing(agg=WEIGHTED_SUM, sample_weights=tensor([bad, -7.0])),
        )
        for bad in (-1, math.nan, math.inf)
    ),
    (
        DataError,
        r"^loss_mask must be .* \(mask_sums too\), got values from -1 ",
        of_sums([1.0, -1.0]),
    ),
    (
        DataError,
        "^mask_sums must be a vector of numbers, .*, got a torch.float64 ten",
        of_sums(ROWS),
    ),
    (
        DataError,
        "^weights need masks, and this plan has none. Call StepPlan.build, or multiply your mask by",
        lambda: of_sums([1.0])().weights(0),
    ),
    (
        DataError,
        r"^a microbatch must have a mask for each term, got \['a'\] without 'b'. Add",
        of_terms(TERMS, [{"a": GOOD[0]}]),
    ),
    (DataError, "must be a Microbatch, got a Tensor", partial(SequenceMean, ONES)),
    (DataError, VALUES.format("-1 to -1 in microbatch 0"), mean_of(-ROWS)),
    (
        DataError,
        r"^cu_seqlens must be int32 or int64 \[samples \+ 1\], .*, got a torch.float32 tensor",
        partial(a_pack, [0.0, 6.0]),
    ),
    (DataError, r"^cu_seqlens must be .*, got .* \(0,\). Convert", partial(a_pack, ONES[:0].int())),
    (
        DataError,
        r"^cu_seqlens_padded must be .* as long as cu_seqlens, got .* \(2,\). Convert",
        partial(a_pack, [0, 2, 3], [0, 6]),
    ),
    (
        DataError,
        "^cu_seqlens_padded needs cu_seqlens. Give the real offsets",
        partial(a_pack, None, [0, 6]),
    ),
    (DataError, RISING, partial(predicting_mask, torch.ones(4), tensor([0, 6]))),
    (
        DataError,
        "^mode 'prompt_mean' groups by prompt, and a microbatch has no prompt_ids. Give prompt_ids=, "
        r"or the batch key 'prompt_ids' \(int64 \[samples\], or Megatron's --sft with "
        r"--loss-aggregation-sft-prompt-field FIELD\) \(with_ids keeps it where Megatron packs "
        r"samples\), or choose a mode without prompts \(--loss-aggregation\).$",
        weighing(agg=PROMPT_MEAN),
    ),
    (
        DataError,
        r"^mode 'nested_mean' groups by turn, .* no turn_ids. Give ids=\{'turn': ...\}, or the batch",
        weighing(agg=TURNS),
    ),
    (
        DataError,
        r"^prompt_ids must be torch.int64 \[2\], one for each sample, got .* \(1,\). Give",
        rows(prompt_ids=tensor([1])),
    ),
    (
        DataError,
        r"^prompt_ids must be torch.int64 \[2\], one for each sample, got .* \(3,\). Give",
        rows(prompt_ids=[1, 2, 3]),
    ),
    (DataError, "^dataset_ids must be torch.int64 .*, got a torch.f", rows(dataset_ids=ONES[:2])),
    (DataError, "^rejected must be torch.bool .*, got a torch.float", rows(rejected=ONES[:2])),
    (DataError, "^turn_ids must be an int64 tensor", rows(ids={"turn": [0, 1.5]})),
    *(
        (DataError, f"^{IDS_OF} {got}", rows(prompt_ids=x))
        for x, got in (
            ("ab", "a str"),
            (7, "a int"),
            ([0.5, 1], "0.5 among others"),
            ([True, False], "True among others"),
            (["a", 1], "'a' among others"),
            ([None, None], "None among others"),
        )
    ),
    (
        DataError,
        "^prompt_ids must fit into int64, got 9223372036854775808. Give strings",
        rows(prompt_ids=[0, 2**63]),
    ),
    (
        DataError,
        "^ids must be a mapping with names of your own, got .*'prompt'.*. Give prompt_ids=",
        rows(ids={"prompt": ["a", "b"]}),
    ),
    *(
        (
            DataError,
            f"^{STRAY}",
            of_sums([2.0, 1.0, 2.0], IN_PROMPTS, **parents),
        )
        for parents in TWO_PARENTS
    ),
    (
        DataError,
        r"^a microbatch has sample_weights, .*. Set LossAggregation\(sample_weights='count'\) or 'skip' "
        r"\(--loss-aggregation-sample-weights\)",
        weighing(sample_weights=ONES[:2]),
    ),
    (
        DataError,
        "^a microbatch has rejected, .*--loss-aggregation-rejected",
        partial(StepPlan.build, MEAN, [Microbatch(ROWS, rejected=tensor([True, False]))]),
    ),
    (
        DataError,
        r"^sample_weights must be floating-point \[samples\], got a torch.int64",
        rows(sample_weights=tensor([1, 2])),
    ),
    (
        DataError,
        "^sample_weights='count' needs a weight for each sample, and a microbatch has none. Give",
        of_sums([1.0], COUNTED),
    ),
    (
        DataError,
        "^sample_weights='count' needs a weight for each sample, and a microbatch has none. Give",
        partial(StepPlan.build, COUNTED, [replace(GOOD[0], sample_weights=ONES[:2]), GOOD[0]]),
    ),
    (
        DataError,
        "^ids must map units to ids, got a Tensor. Give",
        of_sums([1.0] * 2, TURNS, ids=tensor([0, 1])),
    ),
    (
        DataError,
        "^prompt_ids must have one entry for each of the 2 microbatches of mask_sums, got 1 entr",
        of_sums([[1.0]] * 2, PROMPT_MEAN, prompt_ids=[["a"] * 2]),
    ),
    (
        DataError,
        r"^the unit of ids must be one of \[\] in this plan, got 'prompt'. Give 'prompt_ids' in",
        partial(PLAN.ids, "prompt", 0),
    ),
    (
        DataError,
        r"^samples grouped by 'prompt' need its ids, got ids of \[\]. Give 'prompt_ids' in",
        partial(PLAN.samples.groups, "prompt"),
    ),
    (
        DataError,
        "^all or none of a step's microbatches must have routed_tokens, got 1 of 2. Give each",
        partial(StepPlan.build, MEAN, [GOOD[0], replace(GOOD[0], routed_tokens=6)]),
    ),
    *(
        (
            DataError,
            f"^the number of samples must be an int >= 0, got {n}. Change it",
            partial(Microbatch.of_samples, n),
        )
        for n in (-1, 1.0)
    ),
    (
        DataError,
        "^sequences must be a Microbatch, got a Tensor. Give Microbatch",
        partial(Microbatch.of_samples, 1, sequences=ROWS),
    ),
    (
        DataError,
        VALUES.format("-1 to -1 in microbatch 0"),
        partial(StepPlan.build, MEAN, [Microbatch.of_samples(1, sequences=Microbatch(-ROWS))]),
    ),
    (DataError, "from 0 to cp_size - 1 = 1, got 2.", partial(CPLayout.contiguous, 8, 2, 2)),
    (DataError, "cp_size - 1 = -2, got 0.", partial(CPLayout.bshd, 8, -1, 0)),
    (DataError, "multiple of cp_size = 2, got 7. Pad", partial(CPLayout.contiguous, 7, 2, 0)),
    # Lengths 4, 6, 6: the second is not a multiple of 2 * cp = 4, though the total is.
    (DataError, r"cp_size = 4, got 6 for sequence 1\. Pad", halves_of(0, 4, 10, 16)),
    (DataError, "cu_seqlens_padded must .* start.* at 0", halves_of(4, 8)),
    (DataError, "cu_seqlens_padded must .*never decrease", halves_of(0, 8, 4)),
    (DataError, "cu_seqlens_padded must be int32 or int64", halves_of(0.0, 4.0)),
    (DataError, "layout's length 8, got 4.", partial(HALF.shard, torch.zeros(2, 4))),
    (DataError, "layout's length 8, got 7.", partial(HALF.unshard, [ONES[:4], ONES[:3]])),
    (DataError, "a Tensor without a group. Give", partial(HALF.unshard, torch.zeros(2, 4))),
    (DataError, "a list with a group. Drop", partial(HALF.unshard, [ONES], group=object())),
    (DataError, "layout's 2 .* ranks, got 1. Give both", mean_of(WIDE, HALF)),
    (DataError, "layout's length 16, got 8.", mean_of(WIDE, CPLayout.bshd(16, 1, 0))),
    (
        DataError,
        "^metric 'a' must be of one kind and in every microbatch, got a Mean in 1 of 2 microb",
        reduced({"a": ONE}, {"b": ONE}),
    ),
    (
        DataError,
        "^metric 'a' must be of one kind and in every microbatch, got a Max or Mean in 2 of 2",
        reduced({"a": ONE}, {"a": GREATEST}),
    ),
    (DataError, f"^{NO_METRIC}", reduced({"a": Mean(ROWS, ROWS)})),
    (DataError, rf"^{NO_METRIC} tensor\(1.\). Make it with", reduced({"a": tensor(1.0)})),
    (DataError, f"^{NO_METRIC}", reduced({"a": Mean(1.0, 2.0)})),
    (
        DataError,
        r"^weights must have the shape \(6,\) of values, got \(2, 3\). Reshape it",
        partial(Mean.of, ONES, ROWS),
    ),
    (
        OptionError,
        "^empty_step must be .*, got 'ignore'.",
        partial(LossHook, SUM, empty_step="ignore"),
    ),
    (OptionError, "^split must be .*, got 'zigzags'.", partial(LossHook, SUM, split="zigzags")),
    (OptionError, "^a term must have a name other than 'lm'", partial(LossHook, {"lm": SUM})),
    (
        OptionError,
        "^extensions must be objects of class Extension, got <class",
        partial(LossHook, SUM, extensions=[Extension]),
    ),
    (
        DataError,
        r"^losses of a TokenLoss must have one value for each .* mask \(2, 3\), .*\(3, 2\)",
        loss_of_rows(ROWS.T),
    ),
    (HostError, "needs a hook, but was called without one", loss_of_rows(ROWS, gather=torch.abs)),
    (HostError, "needs a hook, but was called without one", loss_of_rows(ROWS, report=max)),
    (HostError, "needs a hook, but was called without one", partial(SampleLoss(torch.abs), ONES)),
    (DataError, "go together, got only one of them. Give", partial(SampleLoss, max, torch.abs)),
]


@pytest.mark.parametrize(("error", "text", "call"), CALLS, ids=[text for _, text, _ in CALLS])
def test_a_wrong_call_is_named(error, text, call):
    refusal(call, error, text)


# Prompt ids of microbatches, and whether they seem to begin anew in each.
IDS = [
    ([[0, 0, 1], [0, 1], [1, 0]], True),
    ([[0], [], [0]], True),
    ([[1, 0, 1], [0], [0, 2, 1]], True),
    ([[0, 1], [0, 2]], False),
    ([[0, 1], [2]], False),
    ([[1, 2], [1, 2]], False),  # of a step that began before
    ([[0, 1]], False),
]


@pytest.mark.parametrize(("ids", "restarts"), IDS)
def test_ids_that_restart_in_every_microbatch_warn(ids, restarts):
    step = [Microbatch(torch.ones(len(x), 2), prompt_ids=tensor(x, dtype=torch.int64)) for x in ids]
    plans = StepPlan.build_terms({"a": MEAN, "b": PROMPT_MEAN}, step)
    others = StepPlan.build_terms({"a": MEAN}, step)  # do not look at ids
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for x in (plans, others):
            warn_of_restarting_ids(x)
    assert len(found) == restarts
    for warning in found:
        text = r"^the prompt_ids start at 0 in each of the [23] microbatches with samples, and equal ids"
        assert re.match(text, str(warning.message))


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
    text = f"^coefficients of samples must be in the range of fp32, got {size}. Give a loss_mask"
    refusal(call, DataError, text)


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
    text = "^a microbatch of this plan must be an int from 0 to 1, got .*. Count the microbatches"
    for call in (plan.weights, plan.coefficients, plan.mask_sums):
        refusal(partial(call, i), DataError, text)
