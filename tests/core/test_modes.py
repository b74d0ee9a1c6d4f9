"""Every mode by numbers derived by hand, and what is counted; `test_steps` draws steps of all."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, token_weights
from tests.core.meaning import (
    F64,
    MODES,
    Read,
    aggregation,
    assert_same,
    expected_weights,
    lay,
    names_of,
)
from tests.oracle import Sample

# Three samples of 3, 1 and 2 tokens, of weights 0.5, 2 and 1. Samples 0 and 1 come from prompt 7;
# samples 1 and 2 were cut from rollout 5, and 0 and 2 are of data set 3. Sample 0 has one masked
# token.
#   M = 2 + 1 + 2 = 5;  N = 3;  prompts: M_7 = 3, M_9 = 2, P = 2;  rollouts: M_4 = 2, M_5 = 3, R = 2
#   data sets: M_3 = 4, M_8 = 1, 2 of them
SAMPLES = [
    Sample((1.0, 0.0, 1.0), 7, 4, 3, 0.5),
    Sample((1.0,), 7, 5, 8, 2.0),
    Sample((1.0, 1.0), 9, 5, 3, 1.0),
]
# What divides the tokens of each sample; and where sample weights count, with the mean weight V_g
# of each group's tokens in place of 1 per group.
BY_HAND: dict[str, tuple[list[float], list[float]]] = {
    "token_mean": ([5.0] * 3, [5.0] * 3),  # M; sum v m = 1 + 2 + 2
    "sample_mean": ([3 * 2.0, 3 * 1, 3 * 2], [3.5 * 2, 3.5, 3.5 * 2]),  # N M_s; V = 0.5 + 2 + 1
    # R M_r; V_4 = 0.5, V_5 = (2 + 2) / 3
    "rollout_mean": ([4.0, 6, 6], [2 * (0.5 + 4 / 3), 3 * (0.5 + 4 / 3), 3 * (0.5 + 4 / 3)]),
    "prompt_mean": ([6.0, 6, 4], [6.0, 6, 4]),  # P M_p; V_7 = (1 + 2) / 3, V_9 = 1
    "dataset_mean": ([8.0, 2, 8], [11.0, 2.75, 11]),  # 2 M_d; V_3 = (1 + 2) / 4, V_8 = 2
    "sample_sum": ([3.0] * 3, [3.5] * 3),  # N
    "constant": ([12.0] * 3, [14.0] * 3),  # N D = 3 * 4
    "sum": ([4.0] * 3, [4.0] * 3),  # D
    "microbatch_mean": ([5.0] * 3, [5.0] * 3),  # one microbatch of 5 tokens and mean weight 1
}
# Means of means. Of prompt 7 there are two samples, of prompt 9 one.
NESTED = {
    # 2 * 2 * M_s in prompt 7, 2 * M_s in prompt 9; V = (0.5 + 2) / 2 + 1
    ("prompt", "sample"): ([8.0, 4, 4], [2.25 * 4, 2.25 * 2, 2.25 * 2]),
    # The data sets 3 and 8; V = (0.5 + 1) / 2 + 2
    ("dataset", "sample"): ([8.0, 2, 8], [2.75 * 4, 2.75, 2.75 * 4]),
    ("prompt",): BY_HAND["prompt_mean"],
    ("session",): BY_HAND["rollout_mean"],  # by another name, see `names_of`
}


def divided(divisors: list[float]) -> list[float]:
    """Weights of a pack: a position of padding follows every sample, and another one them all."""
    pairs = zip(SAMPLES, divisors, strict=True)
    return [*(s.weight * m / n for s, n in pairs for m in (*s.mask, 0)), 0]


@pytest.mark.parametrize("counting", [False, True], ids=["skipped", "counted"])
@pytest.mark.parametrize("mode", [*MODES, *NESTED])
def test_weights_are_those_derived_by_hand_and_so_are_the_oracles(mode, counting):
    given = lay(SAMPLES, "thd_padded")
    of_mode = {"mode": mode} if mode in MODES else {"mode": "nested_mean", "levels": mode}
    agg = aggregation(**of_mode, sample_weights="count" if counting else "skip")
    w = token_weights(agg, **given, ids=names_of(given), dtype=F64)
    expected = divided((BY_HAND | NESTED)[mode][counting])
    assert_same(w, expected, 1e-15)
    assert_same(expected_weights(agg, [[Read.of(given)]]), expected, 1e-15)
    del given["sample_weights"]
    plain = token_weights(aggregation(**of_mode), **given, ids=names_of(given))
    assert plain.dtype == torch.float32
    if "mean" in agg.mode:
        assert (w if counting else plain).sum().item() == pytest.approx(1, rel=1e-6)


# A mask, the sum of it, and how many positions are active. 4099 is above what uint8, int8, fp16
# (2048) and bf16 (256) count one by one, and 2**24 + 3 what fp32 does.
MANY = 2**24 + 3
COUNTED = {
    **{
        dtype: (torch.ones(1, 4099).to(getattr(torch, dtype)), 4099, 4099)
        for dtype in ("uint8", "float16", "bfloat16")
    },
    "beyond int32": (torch.full((1, 3), 2**30, dtype=torch.int32), 3 * 2**30, 3),
    "a bool of any byte": (torch.tensor([[255, 0, 1]], dtype=torch.uint8).view(torch.bool), 2, 2),
    "many": (torch.ones(1, 1).expand(1, MANY), MANY, MANY),
    "many flags": (torch.ones(1, 1, dtype=torch.bool).expand(1, MANY), MANY, MANY),
}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "pack"])
@pytest.mark.parametrize("name", COUNTED)
def test_counts_do_not_overflow_or_round_in_the_masks_dtype(name, packed):
    mask, *expected = COUNTED[name]
    given = Microbatch(mask, torch.tensor([0, mask.numel()]) if packed else None)
    counts = StepPlan.build(aggregation("token_mean"), [given] * 2).counts
    assert [counts.tokens, counts.active_tokens] == [2 * x for x in expected]


def test_coefficients_are_sent_without_the_rest_of_the_plan():
    plan = StepPlan.from_mask_sums(aggregation("token_mean"), [[1.0]] * 10_000)
    assert len(pickle.dumps(plan.coefficients(0))) < 1000


def custom(function: Callable[..., Any], **options: Any) -> LossAggregation:
    return LossAggregation(mode="custom", function=function, **options)


def test_a_custom_function_makes_the_weights_from_what_the_plan_counted():
    """Factors multiply them, and its edits of the mask are undone."""

    def prompt_mean(plan, i):
        microbatch = plan.microbatches[i]  # whose own weights the function applies itself
        divisor_S = plan.group_sums("prompt", i) * plan.counts.prompts / microbatch.sample_weights
        return microbatch.loss_mask.div_(divisor_S.unsqueeze(1))

    factors = torch.tensor([[2.0, -1, 0], [0.5, 4, 1]])
    of_both = {"sample_weights": torch.tensor([3.0, 0.25]), "token_factors": factors}
    mask = torch.ones(2, 3, dtype=F64)
    step = [
        Microbatch(mask, prompt_ids=torch.tensor([5, 6]), **of_both),
        Microbatch(mask, prompt_ids=torch.tensor([6, 6]), **of_both),
    ]
    skip = {"sample_weights": "skip"}
    aggregations = custom(prompt_mean, **skip), aggregation("prompt_mean", **skip)
    ours, ready = (StepPlan.build(agg, step) for agg in aggregations)
    for i in (0, 1, 0):
        assert_same(ours.weights(i, F64), ready.weights(i, F64), 1e-15)
        assert torch.equal(ours.weights(i), ours.weights(i, F64).float())


def test_factors_of_tokens_multiply_weights_and_are_in_no_denominator():
    mask = torch.tensor([[1.0, 1, 0], [1, 0.5, 0]], dtype=F64)
    factors = torch.tensor([[2, -1, 7], [0, 3, 7]])
    # M = 3.5, and not that of mask * factors, 2.5.
    w = token_weights(aggregation("token_mean"), mask, token_factors=factors, dtype=F64)
    assert_same(w, [2 / 3.5, -1 / 3.5, 0, 0, 1.5 / 3.5, 0], 1e-15)


SUMS = [2.0, 3.0, 1.5]
FORMS: list[Any] = [SUMS, (*SUMS,), torch.tensor(SUMS), torch.tensor(SUMS).numpy()]
FORMS += [[torch.tensor(x) for x in SUMS]]


@pytest.mark.parametrize("ids", [["p", "q", "p"], torch.tensor([0, 1, 0])])
def test_mask_sums_and_their_ids_may_have_any_form(ids):
    agg = aggregation("prompt_mean")
    # Prompts p (3.5 tokens) and q (3 tokens): 1 / (2 * 3.5) and 1 / (2 * 3).
    expected = [0.5 / 3.5, 0.5 / 3, 0.5 / 3.5]
    for sums in FORMS:
        plan = StepPlan.from_mask_sums(agg, sums, prompt_ids=ids)
        assert plan.coefficients(0).tolist() == expected
    for of_all in (ids, [ids[:1], ids[1:]]):
        plan = StepPlan.from_mask_sums(agg, [SUMS[:1], SUMS[1:]], prompt_ids=of_all)
        assert [*plan.coefficients(0).tolist(), *plan.coefficients(1).tolist()] == expected
    wide = StepPlan.from_mask_sums(aggregation("token_mean"), [2.0**24 + 1, 1.0])
    assert wide.counts.tokens == 2**24 + 2  # summed in fp64


def test_strings_are_hashed_alike_everywhere():
    microbatch = Microbatch(torch.ones(2, 3), prompt_ids=["uid-1", "übung"])
    digests = [hashlib.blake2b(x.encode(), digest_size=8).digest() for x in ("uid-1", "übung")]
    expected = [int.from_bytes(x, "little", signed=True) for x in digests]
    assert microbatch.prompt_ids.tolist() == expected
