"""Every mode: numbers derived by hand, then the fp64 loops of the oracle over arbitrary steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, token_weights
from tests.core.steps import (
    CONFIGS,
    LAYOUTS,
    MODES,
    aggregation,
    assert_weights,
    divisor_of,
    expected_weights,
    lay,
    steps,
)
from tests.oracle import Sample, Step

F64 = torch.float64

# Three samples of 3, 1 and 2 tokens. Samples 0 and 1 come from prompt 7; samples 1 and 2 were cut
# from rollout 5, and 0 and 2 are of data set 3. Sample 0 has one masked token.
#   M = 2 + 1 + 2 = 5;  N = 3;  prompts: M_7 = 3, M_9 = 2, P = 2;  rollouts: M_4 = 2, M_5 = 3, R = 2
#   data sets: M_3 = 4, M_8 = 1, 2 of them
SAMPLES = [
    Sample((1.0, 0.0, 1.0), 7, 4, 3),
    Sample((1.0,), 7, 5, 8),
    Sample((1.0, 1.0), 9, 5, 3),
]
BY_HAND = {
    "token_mean": [1 / 5, 0, 1 / 5, 1 / 5, 1 / 5, 1 / 5],  # 1/M
    # 1/(N M_s) = 1/(3*2), 1/(3*1), 1/(3*2)
    "sample_mean": [1 / 6, 0, 1 / 6, 1 / 3, 1 / 6, 1 / 6],
    # 1/(R M_r) = 1/(2*2) for sample 0, 1/(2*3) for samples 1 and 2
    "rollout_mean": [1 / 4, 0, 1 / 4, 1 / 6, 1 / 6, 1 / 6],
    # 1/(P M_p) = 1/(2*3) for samples 0 and 1, 1/(2*2) for sample 2
    "prompt_mean": [1 / 6, 0, 1 / 6, 1 / 6, 1 / 4, 1 / 4],
    # 1/(2 M_d) = 1/(2*4) for samples 0 and 2, 1/(2*1) for sample 1
    "dataset_mean": [1 / 8, 0, 1 / 8, 1 / 2, 1 / 8, 1 / 8],
    "sample_sum": [1 / 3, 0, 1 / 3, 1 / 3, 1 / 3, 1 / 3],  # 1/N
    "constant": [1 / 12, 0, 1 / 12, 1 / 12, 1 / 12, 1 / 12],  # 1/(N D) = 1/(3*4)
    "sum": [1 / 4, 0, 1 / 4, 1 / 4, 1 / 4, 1 / 4],  # 1/D
    "microbatch_mean": [1 / 5, 0, 1 / 5, 1 / 5, 1 / 5, 1 / 5],  # one microbatch: 1/(1 * 5)
}


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_those_derived_by_hand_and_so_are_the_oracles(mode):
    w = token_weights(aggregation(mode), **lay(SAMPLES, "thd").inputs, dtype=F64)
    torch.testing.assert_close(w, torch.tensor(BY_HAND[mode], dtype=F64), rtol=1e-15, atol=0)
    assert_weights(expected_weights(mode, [[SAMPLES]]), BY_HAND[mode])
    if "mean" in mode:
        assert w.sum().item() == pytest.approx(1, rel=1e-15)


def assert_step_matches(step: Step, layouts: list[str], mode: str, **options) -> None:
    """The plan of all microbatches in one process against the oracle, token by token."""
    microbatches = [microbatch for rank in step for microbatch in rank]
    laid = [lay(mb, layouts[k % len(layouts)]) for k, mb in enumerate(microbatches)]
    plan = StepPlan.build(aggregation(mode, **options), [Microbatch(**x.inputs) for x in laid])
    got = [laid[k].samples(plan.weights(k, dtype=F64)) for k in range(len(laid))]
    assert_weights(got, expected_weights(mode, step, **options))


EMPTY = st.sampled_from(["count", "skip"])


@pytest.mark.parametrize("mode", MODES)
@given(
    step=steps(),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3),
    empty=EMPTY,
    divisor=st.floats(1e-3, 1e6),
)
@settings(max_examples=80, deadline=None)
def test_every_mode_is_the_oracles(mode, step, layouts, empty, divisor):
    assert_step_matches(step, layouts, mode, empty=empty, divisor=divisor_of(mode, divisor))


# (mode, the unit whose number replaces the mode's own)
COUNTS = [("prompt_mean", "sample"), ("rollout_mean", "sample"), ("sample_mean", "prompt")]


@pytest.mark.parametrize(("mode", "count"), COUNTS)
@given(step=steps(), empty=EMPTY)
@settings(max_examples=30, deadline=None)
def test_count_replaces_the_unit_of_the_outer_mean(mode, count, step, empty):
    assert_step_matches(step, ["thd"], mode, count=count, empty=empty)


@pytest.mark.parametrize(("mode", "empty"), CONFIGS)
def test_a_step_without_tokens_or_microbatches_can_be_planned(mode, empty):
    agg, ids = aggregation(mode, empty=empty), torch.tensor([1, 2])
    w = token_weights(agg, torch.zeros(2, 3), prompt_ids=ids, rollout_ids=ids, dataset_ids=ids)
    assert torch.equal(w, torch.zeros(2, 3))  # and not NaN
    counts = StepPlan.build(agg, []).counts
    assert float(counts.tokens) == int(counts.active_tokens) == int(counts.microbatches) == 0


def test_sum_without_a_divisor_weighs_by_the_mask():
    mask = torch.tensor([[1.0, 0.25, 0.0]])
    assert torch.equal(token_weights(LossAggregation(mode="sum"), mask), mask)


def custom(function) -> LossAggregation:
    return LossAggregation(mode="custom", function=function)


def test_a_custom_function_makes_the_weights_from_the_plan():
    def twice_the_token_mean(plan, i):
        return 2 * masks[i].double() / float(plan.counts.tokens)

    masks = [torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])]
    plan = StepPlan.build(custom(twice_the_token_mean), [Microbatch(mask) for mask in masks])
    for i, mask in enumerate(masks):
        assert torch.equal(plan.weights(i), mask / 2)
        assert torch.equal(plan.weights(i, dtype=F64), mask.double() / 2)


def test_the_weights_of_a_custom_function_are_no_tensor_of_the_batch():
    mask = torch.ones(1, 2)
    token_weights(custom(lambda plan, i: plan.microbatches[i].loss_mask), mask).mul_(2)
    assert mask.tolist() == [[1.0, 1.0]]


def test_a_custom_function_can_read_group_sums():
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


def test_the_custom_function_of_the_guide():
    guide = (Path(__file__).parents[2] / "docs/modes.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    scope = {}
    exec(code, scope)
    # N = 3, and M = 0.5, 4 and 0: a fraction below 1 is not clamped.
    mask = torch.tensor([[0.25, 0.25, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=F64)
    w = token_weights(custom(scope["square_root_of_length"]), mask, dtype=F64)
    expected = mask / torch.tensor([[0.5**0.5], [2.0], [1.0]], dtype=F64) / 3
    torch.testing.assert_close(w, expected, rtol=1e-15, atol=0)
