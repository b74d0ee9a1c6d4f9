"""Every mode by numbers derived by hand, and what is counted; `test_plans` draws steps of all."""

from __future__ import annotations

import functools
import hashlib
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, Term, token_weights
from megatron_loss_agg.errors import GroupError
from megatron_loss_agg.mcore import read_batch
from megatron_loss_agg.mcore.reading.ahead import copied
from megatron_loss_agg.mcore.reading.keys import reading  # for terms that use some keys alone
from tests.core.meaning import F64, MODES, Read, aggregation, assert_same, expected_weights, lay
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
}


def divided(divisors: list[float]) -> list[float]:
    """The weight of every token."""
    pairs = zip(SAMPLES, divisors, strict=True)
    return [s.weight * m / divisor for s, divisor in pairs for m in s.mask]


@pytest.mark.parametrize("counting", [False, True], ids=["skipped", "counted"])
@pytest.mark.parametrize("mode", [*MODES, *NESTED])
def test_weights_are_those_derived_by_hand_and_so_are_the_oracles(mode, counting):
    given = lay(SAMPLES, "thd")
    of_mode = {"mode": mode} if mode in MODES else {"mode": "nested_mean", "levels": mode}
    agg = aggregation(**of_mode, sample_weights="count" if counting else "skip")
    w = token_weights(agg, **given, dtype=F64)
    expected = divided((BY_HAND | NESTED)[mode][counting])
    assert_same([(w, expected), (expected_weights(agg, [[Read.of(given)]]), expected)], 1e-15)
    del given["sample_weights"]
    plain = token_weights(aggregation(**of_mode), **given)
    assert plain.dtype == torch.float32
    if "mean" in agg.mode:
        assert (w if counting else plain).sum().item() == pytest.approx(1, rel=1e-6)


def test_a_group_with_two_parents_is_refused_and_all_are_named():
    agg = LossAggregation(mode="nested_mean", levels=("prompt", "rollout"))
    ids = {"prompt_ids": torch.tensor([7, 7, 9]), "rollout_ids": torch.tensor([4, 5, 5])}
    with pytest.raises(GroupError, match=r"rollout 5 is in the prompts [79] and [79]; expected"):
        StepPlan.from_mask_sums(agg, [2.0, 1.0, 2.0], **ids)
    agg = LossAggregation(mode="nested_mean", levels=("task", "session"))
    own = {"task": torch.tensor([7, 7, 9]), "session": torch.tensor([4, 5, 5])}
    with pytest.raises(GroupError, match=r"session 5 is in the tasks [79] and [79]; expected"):
        StepPlan.from_mask_sums(agg, [2.0, 1.0, 2.0], ids=own)


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


# A mask, the sum of it, and how many positions are active. 4099 is above what uint8, int8, fp16
# (2048) and bf16 (256) count one by one, and 2**24 + 3 what fp32 does.
MANY = 2**24 + 3
COUNTED = {
    **{
        dtype: (torch.ones(1, 4099).to(getattr(torch, dtype)), 4099, 4099)
        for dtype in ("uint8", "int8", "int32", "float16", "bfloat16", "float64")
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


@pytest.mark.parametrize("layout", ["bshd", "thd_padded"])
def test_later_edits_of_what_was_planned_change_nothing(layout):
    given = lay(SAMPLES, layout, multiple=2)
    for mode in MODES:
        plan = StepPlan.build(aggregation(mode, sample_weights="count"), [Microbatch(**given)])
        before, edited = plan.weights(0), {name: x.clone() for name, x in given.items()}
        for tensor in given.values():
            tensor.data.copy_(tensor.flip(0) * 5)  # which no version counter sees
        assert torch.equal(plan.weights(0), before), mode
        given = edited


def test_ids_of_any_name_are_copied_too():
    ids = torch.tensor([7, 9])
    microbatch = Microbatch(torch.ones(2, 1), ids={"session": ids})
    plan, copy = StepPlan.build(aggregation("sample_mean"), [microbatch]), copied(microbatch)
    ids.zero_()
    for x in (*plan.microbatches, copy):
        assert x.ids["session"].tolist() == [7, 9]


def test_samples_are_of_the_right_microbatch_beside_some_without_samples():
    agg = aggregation("microbatch_mean", empty="skip")
    plan = StepPlan.from_mask_sums(agg, [[], [1.0, 3.0], [], [2.0]])
    # Two microbatches, of 4 and of 2 tokens: 1 / (2 * 4) and 1 / (2 * 2).
    assert [plan.coefficients(i).tolist() for i in range(4)] == [[], [1 / 8] * 2, [], [1 / 4]]


def test_coefficients_are_sent_without_the_rest_of_the_plan():
    plan = StepPlan.from_mask_sums(aggregation("token_mean"), [[1.0]] * 10_000)
    assert len(pickle.dumps(plan.coefficients(0))) < 1000


def test_terms_may_have_masks_of_their_own():
    answer, whole = (Microbatch(torch.tensor([[1.0, 1, x]])) for x in (0, 1))
    terms = dict.fromkeys(("policy", "value"), aggregation("token_mean"))
    plans = StepPlan.build_terms(terms, [{"policy": answer, "value": whole}])
    assert plans["policy"].weights(0).tolist() == [[0.5, 0.5, 0]]
    assert plans["value"].weights(0)[0].tolist() == pytest.approx([1 / 3] * 3)


def custom(function: Callable[..., Any], **options: Any) -> LossAggregation:
    return LossAggregation(mode="custom", function=function, **options)


def test_a_custom_function_makes_the_weights_from_what_the_plan_counted():
    def prompt_mean(plan, i):
        microbatch = plan.microbatches[i]  # whose own weights the function applies itself
        mask = microbatch.loss_mask.double() * microbatch.sample_weights.unsqueeze(1)
        return mask / plan.group_sums("prompt", i).unsqueeze(-1) / plan.counts.prompts

    weights = {"sample_weights": torch.tensor([3.0, 0.25])}
    step = [
        Microbatch(torch.ones(2, 3), prompt_ids=torch.tensor([5, 6]), **weights),
        Microbatch(torch.ones(2, 2), prompt_ids=torch.tensor([6, 6]), **weights),
    ]
    skip = {"sample_weights": "skip"}
    aggregations = custom(prompt_mean, **skip), aggregation("prompt_mean", **skip)
    ours, ready = (StepPlan.build(agg, step) for agg in aggregations)
    for i in range(2):
        assert_same([(ours.weights(i, F64), ready.weights(i, F64).tolist())], 1e-15)
        assert torch.equal(ours.weights(i), ours.weights(i, F64).float())


def test_factors_of_tokens_multiply_weights_and_are_in_no_denominator():
    mask = torch.tensor([[1.0, 1, 0], [1, 0.5, 0]], dtype=F64)
    factors = torch.tensor([[2, -1, 7], [0, 3, 7]])
    # token_mean: M = 3.5, and not that of mask * factors, 2.5; sample_mean: N M_s = 2 * 2, 2 * 1.5.
    divisors = {"token_mean": (3.5, 3.5), "sample_mean": (4, 3)}
    for mode, (first, second) in divisors.items():
        w = token_weights(aggregation(mode), mask, token_factors=factors, dtype=F64)
        expected = [2 / first, -1 / first, 0, 0, 1.5 / second, 0]
        assert_same([(w, expected)], 1e-15)
    own = custom(lambda plan, i: plan.microbatches[i].loss_mask / 4)
    w = token_weights(own, mask, token_factors=factors, dtype=F64)
    assert w.tolist() == [[0.5, -0.25, 0], [0, 0.375, 0]]
    given = [Microbatch(mask, token_factors=x) for x in (factors, None)]
    plans = [StepPlan.build(aggregation("token_mean", empty="skip"), [x]) for x in given]
    assert plans[0].counts == plans[1].counts
    factors.zero_()  # of which the plan has a copy
    assert plans[0].weights(0).any()


def test_neither_a_custom_function_nor_its_caller_edits_the_plan_or_the_batch():
    def in_place(plan, i):
        return plan.microbatches[i].loss_mask.div_(plan.counts.tokens)

    mask = torch.ones(2, 4)
    plan = StepPlan.build(custom(in_place), [Microbatch(mask)])
    for _ in range(2):
        assert torch.equal(plan.weights(0), torch.full((2, 4), 1 / 8))
    assert torch.equal(plan.microbatches[0].loss_mask, torch.ones(2, 4))
    token_weights(custom(lambda plan, i: plan.microbatches[i].loss_mask), mask).mul_(2)
    assert torch.equal(mask, torch.ones(2, 4))


def test_the_custom_function_of_the_guide():
    guide = (Path(__file__).parents[2] / "docs/modes.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    # N = 3, and M = 0.5, 4 and 0: a fraction below 1 is not clamped.
    mask = torch.tensor([[0.25, 0.25, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=F64)
    w = token_weights(custom(scope["square_root_of_length"]), mask, dtype=F64)
    expected = mask / torch.tensor([[0.5**0.5], [2.0], [1.0]], dtype=F64) / 3
    torch.testing.assert_close(w, expected, rtol=1e-15, atol=0)


def test_mask_sums_alone_in_any_form_give_the_coefficients():
    forms: list[Any] = [[2, 3, 1.5], (2.0, 3.0, 1.5), torch.tensor([2.0, 3.0, 1.5])]
    forms += [torch.tensor(forms[0]).numpy(), [torch.tensor(x) for x in forms[0]]]
    for sums in forms:
        plan = StepPlan.from_mask_sums(aggregation("prompt_mean"), sums, prompt_ids=["p", "q", "p"])
        # Prompts p (3.5 tokens) and q (3 tokens): 1 / (2 * 3.5) and 1 / (2 * 3).
        assert plan.coefficients(0).tolist() == [0.5 / 3.5, 0.5 / 3, 0.5 / 3.5]
        assert plan.counts.prompts == 2 and plan.counts.active_tokens is None
    wide = StepPlan.from_mask_sums(aggregation("token_mean"), [2.0**24 + 1, 1.0])
    assert wide.counts.tokens == 2**24 + 2  # summed in fp64


def test_ids_are_given_by_microbatch_or_for_all_samples_and_a_rank_may_have_none():
    sums, ids = [torch.tensor([1.5, 0.0, 3.0]), torch.tensor([1.25])], [["a", "b", "a"], ["b"]]
    agg = aggregation("prompt_mean")
    for given in (ids, ["a", "b", "a", "b"], torch.tensor([0, 1, 0, 1])):
        plan = StepPlan.from_mask_sums(agg, sums, prompt_ids=given)
        # Prompts a (4.5 tokens) and b (1.25 tokens): 1 / (2 * 4.5) and 1 / (2 * 1.25).
        assert plan.coefficients(0).tolist() == [0.5 / 4.5, 0, 0.5 / 4.5]
        assert plan.coefficients(1).tolist() == [0.5 / 1.25]
    names = ("prompt_ids", "rollout_ids", "dataset_ids", "rejected", "sample_weights")
    nothing: dict[str, list[Any]] = {name: [] for name in names}
    everything = aggregation("prompt_mean", rejected="skip", sample_weights="skip")
    assert StepPlan.from_mask_sums(everything, [], **nothing).counts.microbatches == 0
    assert StepPlan.from_mask_sums(agg, [[]], prompt_ids=[]).coefficients(0).numel() == 0


def test_strings_are_hashed_alike_everywhere():
    microbatch = Microbatch(torch.ones(2, 3), prompt_ids=["uid-1", "übung"])
    digests = [hashlib.blake2b(x.encode(), digest_size=8).digest() for x in ("uid-1", "übung")]
    expected = [int.from_bytes(x, "little", signed=True) for x in digests]
    assert microbatch.prompt_ids.tolist() == expected


TWO_PACKS = {"loss_mask": torch.ones(2, 4), "dataset_id": torch.tensor([[5], [6]])}
# A batch of a blended data set, and the data set of each of its samples.
BLENDED = [
    ({"loss_mask": torch.ones(3, 4), "dataset_id": torch.tensor([1, 0, 1]).short()}, [1, 0, 1]),
    # Two samples each, and fill in the first.
    (TWO_PACKS | {"cu_seqlens": torch.tensor([[0, 3, 4, 4], [0, 1, 4, 4]])}, [5, 5, 6, 6]),
    # The last sample is empty and starts where the last pack ends.
    (
        TWO_PACKS
        | {"cu_seqlens": torch.tensor([0, 4, 8, 8]), "prompt_ids": torch.tensor([0, 0, 1])},
        [5, 6, 6],
    ),
    # Padded inside the first pack, so that the second one starts at 4 and not at 2.
    (
        TWO_PACKS
        | {
            "cu_seqlens": torch.tensor([0, 1, 2, 5, 6]),
            "cu_seqlens_padded": torch.tensor([0, 2, 4, 7, 8]),
        },
        [5, 5, 6, 6],
    ),
]


@pytest.mark.parametrize(("batch", "ids"), BLENDED)
def test_a_blended_data_set_has_one_id_for_each_row_or_pack(batch, ids):
    terms = {"loss": Term(aggregation("sample_mean", count="dataset"))}
    read = reading(read_batch, terms)
    assert read(batch).dataset_ids.tolist() == ids
    own = torch.arange(len(ids))
    assert torch.equal(read({**batch, "dataset_ids": own}).dataset_ids, own)
    # Where data sets do not matter, the key may be anything.
    other = reading(read_batch, {"loss": Term(aggregation("sample_mean", count="prompt"))})
    assert other({**batch, "dataset_id": "wikipedia"}).dataset_ids is None
    for bad in ("wikipedia", torch.arange(len(batch["loss_mask"]) + 1)):
        with pytest.raises(GroupError, match=r"'dataset_id' is .*expected an integer for each"):
            read({**batch, "dataset_id": bad})


def test_a_level_without_ids_in_the_batch_is_refused_with_those_that_it_has():
    levels = aggregation("nested_mean", levels=("prompt", "sesion", "sample"))
    batch = {"loss_mask": torch.ones(2, 1), "session_ids": torch.arange(2)}
    batch["position_ids"] = torch.zeros(2, 1).long()  # no level
    with pytest.raises(GroupError, match=r"\['sesion_ids'\].*it has: \['session_ids'\]"):
        reading(read_batch, {"loss": Term(levels)})(batch)


def test_own_keys_are_those_of_the_levels_and_what_the_reader_itself_asks_for():
    levels = {"loss": Term(aggregation("nested_mean", levels=("task", "session", "sample")))}
    named = {f"{unit}_ids": torch.tensor([[i, i]]) for i, unit in enumerate(("task", "session"))}
    batch = {"loss_mask": torch.ones(2, 1), "dataset_id": torch.tensor([5, 6]), **named}
    batch["turn_ids"] = torch.tensor([2, 2])
    read = reading(functools.partial(read_batch, dataset_id=True, units=["turn"]), levels)(batch)
    ids = {unit: x.tolist() for unit, x in read.ids.items()}
    assert ids == {"task": [0, 0], "session": [1, 1], "turn": [2, 2]}
    assert read.dataset_ids.tolist() == [5, 6]
    assert reading(read_batch, levels)(batch).ids.keys() == {"task", "session"}
