"""Every mode by numbers derived by hand, and what is counted; `test_steps` draws steps of all."""

from __future__ import annotations

import hashlib
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, Term, token_weights
from megatron_loss_agg.aggregation import MODES as ALL_MODES
from megatron_loss_agg.counting import Samples
from megatron_loss_agg.describe import counts_in_words
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
from tests.oracle import INNER, OUTER, Sample

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
    ("session",): BY_HAND["rollout_mean"],  # by another name, see `names_of`
}


GUIDE = (Path(__file__).parents[2] / "docs/modes.md").read_text(encoding="utf-8")
# The files that need a row of each mode, and the modes of which they have one. `test_gradients` of
# the host takes its steps from the oracle.
ROWS = {
    "tests/oracle.py, INNER": {*INNER, "nested_mean", "custom"},  # which have functions there
    "tests/oracle.py, OUTER": {*OUTER, "nested_mean", "custom"},
    "tests/core/test_modes.py, BY_HAND": {*BY_HAND, "nested_mean", "custom"},
    "docs/modes.md, formulas": {*re.findall(r"^\| `(\w+)` \| `m_t", GUIDE, re.M), "custom"},
}


@pytest.mark.parametrize("place", ROWS)
def test_every_mode_has_its_row_in(place):
    assert ALL_MODES.keys() - ROWS[place] == set()


# Two prompts, of which the first has two rollouts, and the first of these two samples.
TREE = {"prompt_ids": [0, 0, 0, 1], "rollout_ids": [0, 0, 1, 2]}


def test_a_mean_of_three_levels_divides_by_the_groups_of_each():
    agg = aggregation("nested_mean", levels=("prompt", "rollout", "sample"))
    plan = StepPlan.from_mask_sums(agg, [2.0, 1.0, 1.0, 3.0], **TREE)
    # 2 prompts * the prompt's rollouts * the rollout's samples * M_s
    assert_same(plan.coefficients(0), [1 / 16, 1 / 8, 1 / 4, 1 / 6], 1e-15)
    weights = torch.tensor([1.0, 3.0, 4.0, 2.0], dtype=F64)
    counted = aggregation("nested_mean", levels=agg.levels, sample_weights="count")
    plan = StepPlan.from_mask_sums(counted, [2.0, 1.0, 1.0, 3.0], **TREE, sample_weights=weights)
    # V = ((1 + 3) / 2 + 4) / 2 + 2 = 5 in place of 2 prompts
    expected = [1 / (5 * 4 * 2), 3 / (5 * 4), 4 / (5 * 2), 2 / (5 * 3)]
    assert_same(plan.coefficients(0), expected, 1e-15)


def test_weights_are_those_of_the_unit_that_is_counted():
    agg = aggregation("prompt_mean", count="sample", sample_weights="count")
    weights = torch.tensor([1.0, 3.0, 4.0, 2.0], dtype=F64)
    plan = StepPlan.from_mask_sums(agg, [2.0, 1.0, 1.0, 3.0], **TREE, sample_weights=weights)
    # M_p of 4 and 3 tokens, and V = 1 + 3 + 4 + 2 of the samples
    assert plan.counts.across == 10
    assert_same(plan.coefficients(0), [1 / 40, 3 / 40, 4 / 40, 2 / 30], 1e-15)


@pytest.mark.parametrize("unit", ["token", "nested"])
def test_ids_named_like_another_mode_group_as_ids_do(unit):
    agg = aggregation("nested_mean", levels=[unit])
    microbatch = Microbatch(torch.ones(3, 2), ids={unit: [0, 0, 1]})
    # 2 groups, of 4 and 2 tokens
    expected = [1 / 8, 1 / 8, 1 / 4]
    assert_same(StepPlan.build(agg, [microbatch]).coefficients(0), expected, 1e-15)


def test_a_group_without_tokens_weighs_as_its_samples_do():
    weights = torch.tensor([3.0, 2.0, 6.0], dtype=F64)
    prompts = aggregation("prompt_mean", sample_weights="count")
    plan = StepPlan.from_mask_sums(
        prompts, [2.0, 0.0, 0.0], prompt_ids=[0, 1, 1], sample_weights=weights
    )
    assert plan.counts.across == 3 + (2 + 6) / 2
    assert_same(plan.coefficients(0), [3 / (2 * 7), 0, 0], 1e-15)


@pytest.mark.parametrize("choice", ["count", "skip"])
def test_a_step_of_rejected_samples_alone_is_empty(choice):
    agg, rejected = aggregation("sample_mean", rejected=choice), torch.tensor([True])
    assert StepPlan.from_mask_sums(agg, [2.0], rejected=rejected).is_empty


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_tokens_has_no_weights(mode):
    agg = aggregation(mode, sample_weights="count")
    ids = {f"{unit}_ids": [0, 1] for unit in ("prompt", "rollout", "dataset")}
    plan = StepPlan.from_mask_sums(agg, [0.0, 0.0], **ids, sample_weights=torch.tensor([1.0, 2.0]))
    assert plan.is_empty and plan.coefficients(0).tolist() == [0, 0]


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


@pytest.mark.parametrize("empty", ["count", "skip"])
@pytest.mark.parametrize("mode", MODES)
def test_a_group_without_tokens_counts_or_is_left_out(mode, empty):
    given = lay([*SAMPLES, Sample((0.0, 0.0), 1, 2, 4, 1.5)], "thd_padded")
    agg = aggregation(mode, empty=empty, sample_weights="count")
    w = token_weights(agg, **given, ids=names_of(given), dtype=F64)
    assert_same(w, expected_weights(agg, [[Read.of(given)]]), 1e-15)


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


# Three samples: turns of 2 and 1 tokens after a prompt; one of 3 tokens, which touches the turn before,
# and padding; and none.
TURNS = [[0.0, 1, 1, 0, 1], [1.0, 1, 1, 0], [0.0, 0]]


def by_turn(mask: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Each run of the mask inside a sample, divided by its sum: a turn weighs 1.

    Args:
        starts: where the samples begin in the flattened mask.
    """
    flat = mask.reshape(-1)
    begins = (flat != 0) & (flat.roll(1) == 0)
    begins[starts] = True
    turn = begins.cumsum(0)
    sums = flat.new_zeros(len(flat) + 1).index_add(0, turn, flat)
    return torch.where(flat == 0, 0, flat / sums[turn]).view_as(mask)


def test_turns_of_samples_are_a_mask_by_turn_or_samples_of_a_finer_cut():
    mask = torch.tensor([x for sample in TURNS for x in sample], dtype=F64)
    # The mean over 3 samples of the mean over their turns of that over the turn's tokens:
    # 1 / (3 * 2 * 2) and 1 / (3 * 2 * 1); 1 / (3 * 1 * 3); nothing.
    expected = [0, 1 / 12, 1 / 12, 0, 1 / 6, 1 / 9, 1 / 9, 1 / 9, 0, 0, 0]
    offsets = torch.tensor([0, 5, 9, 11])
    masked = by_turn(mask, offsets[:-1])
    assert_same(
        token_weights(aggregation("sample_mean"), masked, offsets, dtype=F64), expected, 1e-15
    )
    # Turns end where the next one of their sample begins; a sample is a rollout of turns.
    turns, rollouts = torch.tensor([0, 4, 5, 9, 11]), torch.tensor([0, 0, 1, 2])
    nested = aggregation("nested_mean", levels=("rollout", "sample"))
    assert_same(token_weights(nested, mask, turns, None, rollouts, F64), expected, 1e-15)
    rows = torch.tensor([[0.0, 1, 1, 0, 1], [1, 1, 1, 0, 0], [0] * 5], dtype=F64)
    of_rows = token_weights(
        aggregation("sample_mean"), by_turn(rows, torch.arange(0, 15, 5)), dtype=F64
    )
    assert_same(of_rows, [*expected[:9], 0, *[0] * 5], 1e-15)


def test_a_custom_function_makes_coefficients_from_what_was_counted():
    """Weights of samples are in them if the function says so; what it edits is undone."""

    def mean_over_prompts(samples: Samples) -> torch.Tensor:
        prompts = samples.groups("prompt")
        divisor_S = prompts.sums(samples.mask_sum)[prompts.group_S] * len(prompts.ids_G)
        samples.mask_sum.zero_()
        return samples.weight / divisor_S

    of_both = {"sample_weights": torch.tensor([3.0, 0.25]), "rejected": torch.tensor([False, True])}
    mask = torch.tensor([[1.0, 1, 0], [0.5, 1, 1]], dtype=F64)
    step = [
        Microbatch(mask, prompt_ids=torch.tensor([5, 6]), **of_both),
        Microbatch(mask, prompt_ids=torch.tensor([6, 6]), **of_both),
    ]
    options = {"sample_weights": "skip", "rejected": "count"}
    modes = {"custom": {"function": mean_over_prompts}, "prompt_mean": {}}
    ours, ready = (
        StepPlan.build(aggregation(mode, **more, **options), step) for mode, more in modes.items()
    )
    for i in (0, 1, 0):
        assert_same(ours.weights(i, F64), ready.weights(i, F64), 1e-15)
        assert torch.equal(ours.mask_sums(i), ready.mask_sums(i))
        assert not ours.weights(i)[1].any()  # rejected


def test_masks_may_differ_between_terms_and_so_do_denominators():
    policy = Microbatch(torch.tensor([[1.0, 1, 0], [1, 0, 0]]))
    kl = Microbatch(torch.tensor([[1.0, 1, 1], [1, 1, 0]]))
    step = [{"policy": policy, "kl": kl}, {"policy": kl, "kl": kl}]
    terms = {"policy": aggregation("token_mean"), "kl": Term(aggregation("token_mean"), 0.5)}
    plans = StepPlan.build_terms(terms, step)
    # 3 tokens, and 5 in the other microbatch; and 5 in both. The multiplier is in no weight.
    assert [plans[name].counts.tokens for name in terms] == [8, 10]
    assert_same(plans["policy"].weights(0), policy.loss_mask / 8, 1e-7)
    assert_same(plans["kl"].weights(0), kl.loss_mask / 10, 1e-7)


def test_losses_by_sample_are_samples_of_one_token():
    # Three pairs, of prompts a and b, of which one is rejected and counts; and one pair of c.
    sequences = Microbatch(torch.ones(6, 4), prompt_ids=[0] * 6)
    pairs = Microbatch.of_samples(
        3,
        sequences=sequences,
        prompt_ids=["a", "b", "a"],
        rejected=torch.tensor([False, False, True]),
    )
    assert (pairs.num_samples, pairs.routed_tokens) == (3, 24)
    one = Microbatch.of_samples(1, prompt_ids=["c"], routed_tokens=7)
    agg = aggregation("prompt_mean", rejected="count")
    plan = StepPlan.build(agg, [pairs, one])
    assert_same(plan.coefficients(0), [1 / 6, 1 / 3, 0], 1e-15)
    assert_same(plan.weights(1), [1 / 3], 1e-7)
    assert [*plan.model_tokens] == [24, 7]
    mean = StepPlan.build(aggregation("sample_mean", rejected="skip"), [pairs, one])
    assert_same(mean.coefficients(0), [1 / 3, 1 / 3, 0], 1e-15)
    # What the losses are computed from, copied.
    of_pairs, of_one = plan.sequences
    assert of_one is None and of_pairs.shape == ((6, 4), None, None)
    assert of_pairs.mask_sum.tolist() == [4.0] * 6
    sequences.loss_mask.zero_()
    assert bool(plan.microbatches[0].sequences.loss_mask.all())


def test_fill_rows_beside_rows_that_are_empty_are_left_out_as_rejected_ones():
    # An answer of two tokens, one without any, which counts; and two rows that even out ranks.
    mask = torch.tensor([[1.0, 1], [0, 0], [0, 0], [0, 0]])
    fill = torch.tensor([False, False, True, True])

    def weight(**options: str) -> float:
        step = Microbatch(mask, rejected=fill if "rejected" in options else None)
        plan = StepPlan.build(aggregation("sample_mean", **options), [step])
        return float(plan.weights(0, F64)[0, 0])

    # Of two samples, the one of two tokens: 1 / (2 * 2).
    assert weight(rejected="skip") == 1 / 4
    # Counted as samples, fill halves the loss; without all that is empty it is twice as large.
    assert weight() == weight(rejected="count") == 1 / 8
    assert weight(empty="skip") == 1 / 2


SUMS = [2.0, 3.0, 1.5]
FORMS: list[Any] = [SUMS, (*SUMS,), torch.tensor(SUMS), torch.tensor(SUMS).numpy()]
FORMS += [[torch.tensor(x) for x in SUMS]]


# Two samples of 3 and 2 tokens, the second of which may be rejected; by mask and by `rejected=`.
COUNTS_IN_WORDS = {
    (1.0, None): "2 samples, 5 tokens",
    (0.5, None): "2 samples, 5 tokens whose masks sum to 2.5",
    (1.0, "count"): "2 samples, 5 tokens, 1 rejected sample included",
    (0.5, "count"): "2 samples, 5 tokens whose masks sum to 2.5, 1 rejected sample included",
    (1.0, "skip"): "1 sample, 3 tokens, 1 rejected sample left out",
    (0.5, "skip"): "1 sample, tokens whose masks sum to 1.5, 1 rejected sample left out",
}


@pytest.mark.parametrize(("active", "rejected"), COUNTS_IN_WORDS)
def test_the_log_says_what_was_counted(active, rejected):
    agg = aggregation("sample_mean", rejected=rejected)
    marked = None if rejected is None else torch.tensor([False, True])
    mask = active * torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    plan = StepPlan.build(agg, [Microbatch(mask, rejected=marked)])
    assert counts_in_words(plan.counts) == COUNTS_IN_WORDS[active, rejected]


@pytest.mark.parametrize("ids", [["p", "q", "p"], torch.tensor([0, 1, 0]), [-7, 2**62, -7]])
def test_mask_sums_and_their_ids_may_have_any_form(ids):
    agg = aggregation("prompt_mean")
    # Prompts p (3.5 tokens) and q (3 tokens): 1 / (2 * 3.5) and 1 / (2 * 3).
    expected = [0.5 / 3.5, 0.5 / 3, 0.5 / 3.5]
    for sums in FORMS:
        plan = StepPlan.from_mask_sums(agg, sums, prompt_ids=ids)
        assert plan.coefficients(0).tolist() == expected
    plan = StepPlan.from_mask_sums(agg, [SUMS[:1], SUMS[1:]], prompt_ids=[ids[:1], ids[1:]])
    assert [*plan.coefficients(0).tolist(), *plan.coefficients(1).tolist()] == expected
    wide = StepPlan.from_mask_sums(aggregation("token_mean"), [2.0**24 + 1, 1.0])
    assert wide.counts.tokens == 2**24 + 2  # summed in fp64


def test_a_preset_differs_from_its_mode():
    # The terms are the key under which the words that ranks compare are cached.
    assert LossAggregation.preset("verl/token-mean") != LossAggregation(mode="token_mean")


def test_strings_are_hashed_alike_everywhere():
    microbatch = Microbatch(torch.ones(2, 3), prompt_ids=["uid-1", "übung"])
    digests = [hashlib.blake2b(x.encode(), digest_size=8).digest() for x in ("uid-1", "übung")]
    expected = [int.from_bytes(x, "little", signed=True) for x in digests]
    assert microbatch.prompt_ids.tolist() == expected


def test_lone_surrogates_are_characters_as_others_are():
    names = ["answer-\udc80", "answer-\udc81", "answer-\udc80"]  # from bytes that are no UTF-8
    ids = Microbatch(torch.ones(3, 1), prompt_ids=names).prompt_ids
    assert ids[0] == ids[2] != ids[1]


@pytest.mark.parametrize("ids", [[3, -1, 3], (3, -1, 3), np.array([3, -1, 3]), range(3, 6)])
def test_ids_may_be_ints_in_any_sequence(ids):
    microbatch = Microbatch(torch.ones(3, 2), prompt_ids=ids, ids={"turn": ids})
    assert microbatch.prompt_ids.dtype == torch.int64
    assert microbatch.prompt_ids.tolist() == microbatch.ids["turn"].tolist() == [*ids]
    extremes = [-(2**63), 2**63 - 1, 2**53 + 1]
    assert Microbatch(torch.ones(3, 2), rollout_ids=extremes).rollout_ids.tolist() == extremes
