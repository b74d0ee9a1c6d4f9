"""Every mode and choice by numbers derived by hand; `tests.fuzz` draws steps of all of them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, Term, token_weights
from megatron_loss_agg.errors import FunctionError, GroupError, MaskError
from tests.core.steps import (
    CONFIGS,
    MODES,
    aggregation,
    assert_weights,
    expected_weights,
    lay,
    random_step,
)
from tests.oracle import Sample

F64 = torch.float64

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


@pytest.mark.parametrize("counting", [False, True], ids=["skipped", "counted"])
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_those_derived_by_hand_and_so_are_the_oracles(mode, counting):
    given = lay(SAMPLES, "thd").inputs
    options = {"sample_weights": "count" if counting else "skip"}
    w = token_weights(aggregation(mode, **options), **given, dtype=F64)
    expected = [
        s.weight * m / divisor
        for s, divisor in zip(SAMPLES, BY_HAND[mode][counting], strict=True)
        for m in s.mask
    ]
    torch.testing.assert_close(w, torch.tensor(expected, dtype=F64), rtol=1e-15, atol=0)
    assert_weights(expected_weights(mode, [[SAMPLES]], **options), expected)
    del given["sample_weights"]
    plain = token_weights(aggregation(mode), **given, dtype=F64)
    if "mean" in mode:
        assert (w if counting else plain).sum().item() == pytest.approx(1, rel=1e-15)
    assert plain[3].item() == pytest.approx(1 / BY_HAND[mode][0][1], rel=1e-15)


@pytest.mark.parametrize(("mode", "empty"), CONFIGS)
def test_a_step_without_tokens_or_microbatches_can_be_planned(mode, empty):
    agg, ids = aggregation(mode, empty=empty), torch.tensor([1, 2])
    w = token_weights(agg, torch.zeros(2, 3), prompt_ids=ids, rollout_ids=ids, dataset_ids=ids)
    assert torch.equal(w, torch.zeros(2, 3))  # and not NaN
    counts = StepPlan.build(agg, []).counts
    assert float(counts.tokens) == int(counts.active_tokens) == int(counts.microbatches) == 0


def test_a_step_without_tokens_says_so():
    terms = {"a": aggregation("token_mean", rejected="count")}
    terms["metric"] = Term(aggregation("sum", rejected="count"), 0)
    for microbatch, is_empty in (
        (Microbatch(torch.zeros(2, 3)), True),
        (Microbatch(torch.ones(1, 3), rejected=torch.tensor([True])), True),
        (Microbatch(torch.ones(1, 1)), False),
    ):
        assert StepPlan.build_terms(terms, [microbatch]).is_empty is is_empty


def test_sum_without_a_divisor_weighs_by_the_mask():
    mask = torch.tensor([[1.0, 0.25, 0.0]])
    assert torch.equal(token_weights(LossAggregation(mode="sum"), mask), mask)


def test_counting_rejected_samples_or_survivors_is_a_choice_that_must_be_made():
    step = [Microbatch(torch.ones(2, 4), rejected=torch.tensor([False, True]))]
    for choice, samples in (("count", 2), ("skip", 1)):
        plan = StepPlan.build(aggregation("sample_mean", rejected=choice), step)
        assert plan.counts.samples == samples
        assert plan.weights(0, F64).sum(dim=1).tolist() == [1 / samples, 0]
    with pytest.raises(GroupError, match=r"expected LossAggregation\(rejected='count'\)"):
        StepPlan.build(aggregation("sample_mean"), step)


def test_whether_sample_weights_count_is_a_choice_that_must_be_made():
    microbatch = Microbatch(torch.ones(2, 4), sample_weights=torch.tensor([1.0, 0.5]))
    for agg in (aggregation("sample_mean"), LossAggregation.preset("verl/token-mean")):
        with pytest.raises(GroupError, match=r"expected LossAggregation\(sample_weights='count'\)"):
            StepPlan.build(agg, [microbatch])
    agg = LossAggregation.preset("verl/token-mean", sample_weights="count")
    w = StepPlan.build(agg, [microbatch]).weights(0, F64)
    assert w.sum(dim=1).tolist() == pytest.approx([2 / 3, 1 / 3])  # 4 and 2 of 6


@pytest.mark.parametrize("choice", ["count", "skip"])
@pytest.mark.parametrize("mode", MODES)
def test_weights_that_are_missing_or_0_change_nothing_or_everything(mode, choice):
    step = random_step(5, 1)[0] + [[Sample((0.1, 0.7), 3, 3, 3)], []]
    given = [Microbatch(**lay(mb, "thd").inputs) for mb in step]
    plain, chosen = (
        StepPlan.build(aggregation(mode, sample_weights=x), given) for x in (None, choice)
    )
    assert plain.counts == chosen.counts
    for k in range(len(step)):
        assert torch.equal(plain.weights(k), chosen.weights(k))
    inputs = lay(SAMPLES, "bshd").inputs | {"sample_weights": torch.zeros(3)}
    plan = StepPlan.build(aggregation(mode, sample_weights=choice), [Microbatch(**inputs)])
    assert not plan.weights(0).any() and not plan.is_empty


def custom(function: Callable[..., Any], **options: Any) -> LossAggregation:
    return LossAggregation(mode="custom", function=function, **options)


def test_a_custom_function_makes_the_weights_from_what_the_plan_counted():
    def prompt_mean(plan, i):
        mask = plan.microbatches[i].loss_mask.double()
        return mask / plan.group_sums("prompt", i).unsqueeze(-1) / plan.counts.prompts

    step = [
        Microbatch(torch.ones(2, 3), prompt_ids=torch.tensor([5, 6])),
        Microbatch(torch.ones(1, 2), prompt_ids=torch.tensor([6])),
    ]
    plans = [StepPlan.build(agg, step) for agg in (custom(prompt_mean), aggregation("prompt_mean"))]
    for i in range(2):
        ours, ready = (plan.weights(i, F64) for plan in plans)
        torch.testing.assert_close(ours, ready, rtol=1e-15, atol=0)
        assert torch.equal(plans[0].weights(i), ours.float())


def test_a_custom_function_applies_sample_weights_itself():
    def by_weight(plan, i):
        return plan.microbatches[i].loss_mask * plan.microbatches[i].sample_weights.unsqueeze(1)

    for choice in ("count", "skip"):
        agg = custom(by_weight, sample_weights=choice)
        w = token_weights(agg, torch.ones(2, 3), sample_weights=torch.tensor([3.0, 0.25]))
        assert w.tolist() == [[3.0] * 3, [0.25] * 3]


def test_custom_weights_of_rejected_samples_are_refused():
    step = [Microbatch(torch.ones(2, 2), rejected=torch.tensor([True, False]))]
    kept = custom(
        lambda p, i: (~p.microbatches[i].rejected).float()[:, None] + torch.zeros(2, 2),
        rejected="count",
    )
    assert StepPlan.build(kept, step).weights(0).tolist() == [[0, 0], [1, 1]]
    with pytest.raises(FunctionError, match="or the sample rejected; expected finite"):
        StepPlan.build(
            custom(lambda p, i: p.microbatches[i].loss_mask, rejected="count"), step
        ).weights(0)


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


def test_scaled_advantages_give_a_trainer_that_sums_the_same_gradient():
    microbatch = Microbatch(torch.tensor([[0.0, 1, 1], [1, 0, 0]]), prompt_ids=torch.tensor([3, 4]))
    plan = StepPlan.build(aggregation("prompt_mean"), [microbatch])
    advantages = torch.tensor([[math.nan, 2.0, 2.0], [-1.0, math.inf, 0.0]], dtype=F64)
    old = torch.tensor([[0.0, -1.0, -2.0], [-0.5, 0.0, 0.0]], dtype=F64)

    def gradient(loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        log_p = torch.tensor([[0.0, -1.5, -1.0], [-0.6, 0.0, 0.0]], dtype=F64, requires_grad=True)
        loss(torch.exp(log_p - old)).backward()
        return log_p.grad

    def clipped(ratio: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)

    sane = torch.tensor([[0.0, 2.0, 2.0], [-1.0, 0.0, 0.0]], dtype=F64)
    w = plan.weights(0, F64)
    wanted = gradient(lambda ratio: (w * clipped(ratio, sane)).sum())
    scaled = plan.scaled_advantages(0, advantages)
    assert torch.allclose(gradient(lambda r: clipped(r, scaled).sum()), wanted, rtol=1e-15, atol=0)
    assert not torch.allclose(gradient(lambda r: clipped(r, sane).sum()), wanted)
    with pytest.raises(MaskError, match=r"advantages has shape .* and loss_mask"):
        plan.scaled_advantages(0, torch.ones(3))
    negative = StepPlan.build(custom(lambda p, i: -p.microbatches[i].loss_mask), [microbatch])
    with pytest.raises(FunctionError, match="negative weights"):
        negative.scaled_advantages(0, advantages)


def test_mask_sums_alone_in_any_form_give_the_coefficients():
    forms: list[Any] = [[2, 3, 1.5], (2.0, 3.0, 1.5), torch.tensor([2.0, 3.0, 1.5])]
    forms += [torch.tensor(forms[0]).numpy(), [torch.tensor(x) for x in forms[0]]]
    for sums in forms:
        plan = StepPlan.from_mask_sums(aggregation("prompt_mean"), sums, prompt_ids=["p", "q", "p"])
        # Prompts p (3.5 tokens) and q (3 tokens): 1 / (2 * 3.5) and 1 / (2 * 3).
        assert plan.coefficients(0).tolist() == [0.5 / 3.5, 0.5 / 3, 0.5 / 3.5]
        assert plan.counts.prompts == 2 and plan.counts.active_tokens is None
        with pytest.raises(MaskError, match=r"has no masks; expected StepPlan\.build"):
            plan.weights(0)
    wide = StepPlan.from_mask_sums(aggregation("token_mean"), [2.0**24 + 1, 1.0])
    assert wide.counts.tokens == 2**24 + 2  # summed in fp64


def test_ids_are_given_by_microbatch_or_for_all_samples_and_a_rank_may_have_none():
    sums = [torch.tensor([1.5, 0.0, 3.0]), torch.tensor([1.25]), torch.tensor([2.0, 1.0])]
    ids = [["a", "b", "a"], ["b"], ["c", "a"]]
    flat = [x for of_microbatch in ids for x in of_microbatch]
    agg = aggregation("prompt_mean", rejected="skip", sample_weights="skip")
    by_microbatch = StepPlan.from_mask_sums(agg, sums, prompt_ids=ids)
    for given in (flat, torch.tensor([ord(x) for x in flat])):
        plan = StepPlan.from_mask_sums(agg, sums, prompt_ids=given)
        for i in range(3):
            assert torch.equal(plan.coefficients(i), by_microbatch.coefficients(i))
    names = ("prompt_ids", "rollout_ids", "dataset_ids", "rejected", "sample_weights")
    nothing: dict[str, list[Any]] = {name: [] for name in names}
    assert StepPlan.from_mask_sums(agg, [], **nothing).counts.microbatches == 0
    assert StepPlan.from_mask_sums(agg, [[]], prompt_ids=[]).coefficients(0).numel() == 0


def test_strings_are_hashed_alike_everywhere():
    microbatch = Microbatch(torch.ones(2, 3), prompt_ids=["uid-1", "übung"])
    digests = [hashlib.blake2b(x.encode(), digest_size=8).digest() for x in ("uid-1", "übung")]
    expected = [int.from_bytes(x, "little", signed=True) for x in digests]
    assert microbatch.prompt_ids.tolist() == expected
