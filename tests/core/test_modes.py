"""Every mode: numbers derived by hand, then the fp64 loops of the oracle over arbitrary steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, token_weights
from tests import oracle
from tests.core.steps import LAYOUTS, flatten, lay, steps
from tests.oracle import Sample, Step

MODES = sorted(oracle.INNER)
F64 = torch.float64

# Three samples of 3, 1 and 2 tokens. Samples 0 and 1 come from prompt 7; samples 1 and 2 were cut
# from rollout 5. Sample 0 has one masked token.
#   M = 2 + 1 + 2 = 5;  N = 3;  prompts: M_7 = 3, M_9 = 2, P = 2;  rollouts: M_4 = 2, M_5 = 3, R = 2
MASK = [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
CUTS = [0, 3, 4, 6]
PROMPTS = [7, 7, 9]
ROLLOUTS = [4, 5, 5]

BY_HAND = {
    "token_mean": [1 / 5, 0, 1 / 5, 1 / 5, 1 / 5, 1 / 5],  # 1/M
    # 1/(N M_s) = 1/(3*2), 1/(3*1), 1/(3*2)
    "sample_mean": [1 / 6, 0, 1 / 6, 1 / 3, 1 / 6, 1 / 6],
    # 1/(R M_r) = 1/(2*2) for sample 0, 1/(2*3) for samples 1 and 2
    "rollout_mean": [1 / 4, 0, 1 / 4, 1 / 6, 1 / 6, 1 / 6],
    # 1/(P M_p) = 1/(2*3) for samples 0 and 1, 1/(2*2) for sample 2
    "prompt_mean": [1 / 6, 0, 1 / 6, 1 / 6, 1 / 4, 1 / 4],
    "sample_sum": [1 / 3, 0, 1 / 3, 1 / 3, 1 / 3, 1 / 3],  # 1/N
    "constant": [1 / 12, 0, 1 / 12, 1 / 12, 1 / 12, 1 / 12],  # 1/(N D) = 1/(3*4)
    "sum": [1 / 4, 0, 1 / 4, 1 / 4, 1 / 4, 1 / 4],  # 1/D
    "microbatch_mean": [1 / 5, 0, 1 / 5, 1 / 5, 1 / 5, 1 / 5],  # one microbatch: 1/(1 * 5)
}


def divisor_of(mode: str, divisor: float = 4.0) -> float | None:
    return divisor if mode in ("constant", "sum") else None


def by_hand_inputs() -> dict[str, torch.Tensor]:
    return {
        "loss_mask": torch.tensor(MASK),
        "cu_seqlens": torch.tensor(CUTS, dtype=torch.int32),
        "prompt_ids": torch.tensor(PROMPTS),
        "rollout_ids": torch.tensor(ROLLOUTS),
    }


def assert_step_matches(step: Step, layouts: list[str], agg: LossAggregation, **kwargs) -> None:
    """The plan of all microbatches in one process against the oracle, token by token."""
    microbatches = [microbatch for rank in step for microbatch in rank]
    laid = [lay(mb, layouts[k % len(layouts)]) for k, mb in enumerate(microbatches)]
    plan = StepPlan.build(agg, [Microbatch(**x.inputs) for x in laid])
    got = [laid[k].samples(plan.weights(k, dtype=F64)) for k in range(len(laid))]
    expected = [mb for rank in oracle.step_weights(agg.mode, step, **kwargs) for mb in rank]
    torch.testing.assert_close(
        torch.tensor(flatten(got), dtype=F64),
        torch.tensor(flatten(expected), dtype=F64),
        rtol=1e-13,
        atol=0,
    )


@pytest.mark.parametrize("mode", MODES)
def test_weights_derived_by_hand(mode):
    agg = LossAggregation(mode=mode, divisor=divisor_of(mode))
    w = token_weights(agg, **by_hand_inputs(), dtype=F64)
    torch.testing.assert_close(w, torch.tensor(BY_HAND[mode], dtype=F64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_the_oracle_agrees_with_the_same_numbers(mode):
    step = [
        [
            [
                Sample(tuple(MASK[a:b]), prompt, rollout)
                for a, b, prompt, rollout in zip(CUTS, CUTS[1:], PROMPTS, ROLLOUTS, strict=False)
            ]
        ]
    ]
    got = flatten(oracle.step_weights(mode, step, divisor=divisor_of(mode)))
    assert got == pytest.approx(BY_HAND[mode], rel=1e-15)


def test_microbatch_mean_divides_by_each_microbatch_and_by_their_number():
    # K = 2, M_0 = 1, M_1 = 3: 1/(2*1) = 1/2, then 1/(2*3) = 1/6
    agg = LossAggregation(mode="microbatch_mean")
    plan = StepPlan.build(
        agg, [Microbatch(torch.tensor([[1, 0]])), Microbatch(torch.tensor([[1, 1], [0, 1]]))]
    )
    assert plan.weights(0, dtype=F64).tolist() == [[1 / 2, 0]]
    torch.testing.assert_close(
        plan.weights(1, dtype=F64), torch.tensor([[1, 1], [0, 1]], dtype=F64) / 6
    )


def test_sum_without_divisor_is_the_mask():
    mask = torch.tensor([[1.0, 0.25, 0.0]])
    w = token_weights(LossAggregation(mode="sum"), mask)
    assert w.tolist() == mask.tolist()


@pytest.mark.parametrize("mode", MODES)
@given(
    step=steps(),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3),
    empty=st.sampled_from(["count", "skip"]),
    divisor=st.floats(1e-3, 1e6),
)
@settings(max_examples=80, deadline=None)
def test_every_mode_against_the_oracle(mode, step, layouts, empty, divisor):
    divisor = divisor_of(mode, divisor)
    agg = LossAggregation(mode=mode, divisor=divisor, empty=empty)
    assert_step_matches(step, layouts, agg, divisor=divisor, empty=empty)


# (mode, the unit whose number replaces the mode's own)
COUNTS = [("prompt_mean", "sample"), ("rollout_mean", "sample"), ("sample_mean", "prompt")]


@pytest.mark.parametrize(("mode", "count"), COUNTS)
@given(step=steps(), empty=st.sampled_from(["count", "skip"]))
@settings(max_examples=30, deadline=None)
def test_count_replaces_the_unit_of_the_outer_mean(mode, count, step, empty):
    agg = LossAggregation(mode=mode, count=count, empty=empty)
    assert_step_matches(step, ["thd"], agg, count=count, empty=empty)


@pytest.mark.parametrize("mode", [m for m in MODES if m not in ("constant", "sum", "sample_sum")])
def test_weights_of_a_mean_sum_to_one(mode):
    w = token_weights(LossAggregation(mode=mode), **by_hand_inputs(), dtype=F64)
    assert w.sum().item() == pytest.approx(1, rel=1e-15)


@pytest.mark.parametrize("empty", ["count", "skip"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_active_tokens_has_weight_zero(mode, empty):
    agg = LossAggregation(mode=mode, divisor=divisor_of(mode), empty=empty)
    ids = torch.tensor([1, 2])
    w = token_weights(agg, torch.zeros(2, 3), prompt_ids=ids, rollout_ids=ids)
    assert w.shape == (2, 3)
    assert not w.any()  # a NaN counts as true


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_microbatches_can_be_planned(mode):
    agg = LossAggregation(mode=mode, divisor=divisor_of(mode))
    counts = StepPlan.build(agg, []).counts
    assert float(counts.tokens) == 0 and int(counts.microbatches) == 0


def test_empty_samples_count_unless_told_otherwise():
    # Of three samples one has no active token: 1/N = 1/3 counted, 1/2 skipped.
    mask = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    counted = token_weights(LossAggregation(mode="sample_sum"), mask, dtype=F64)
    skipped = token_weights(LossAggregation(mode="sample_sum", empty="skip"), mask, dtype=F64)
    assert counted.tolist() == [[1 / 3, 0], [0, 0], [0, 1 / 3]]
    assert skipped.tolist() == [[1 / 2, 0], [0, 0], [0, 1 / 2]]


def test_a_fractional_mask_below_one_token_is_not_clamped():
    # M_s = 0.25, N = 1: the two weights are 0.125 / 0.25 = 0.5 each.
    w = token_weights(
        LossAggregation(mode="sample_mean"), torch.tensor([[0.125, 0.125]]), dtype=F64
    )
    assert w.tolist() == [[0.5, 0.5]]


def test_a_custom_function_makes_the_weights_from_the_plan():
    def twice_the_token_mean(plan, i):
        return 2 * masks[i].double() / float(plan.counts.tokens)

    masks = [torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])]
    agg = LossAggregation(mode="custom", function=twice_the_token_mean)
    plan = StepPlan.build(agg, [Microbatch(mask) for mask in masks])
    assert plan.weights(0, dtype=F64).tolist() == [[0.5, 0.0]]
    assert plan.weights(1).tolist() == [[0.5, 0.5], [0.0, 0.5]]
    assert plan.weights(1).dtype == torch.float32


def test_the_weights_of_a_custom_function_are_no_tensor_of_the_batch():
    agg = LossAggregation(mode="custom", function=lambda plan, i: plan.microbatches[i].loss_mask)
    mask = torch.ones(1, 2)
    token_weights(agg, mask).mul_(2)
    assert mask.tolist() == [[1.0, 1.0]]


def test_a_custom_function_can_read_group_sums():
    def prompt_mean(plan, i):
        mask = plan.microbatches[i].loss_mask.double()
        return mask / plan.group_sums("prompt", i).unsqueeze(-1) / plan.counts.prompts

    microbatches = [
        Microbatch(torch.ones(2, 3), prompt_ids=torch.tensor([5, 6])),
        Microbatch(torch.ones(1, 2), prompt_ids=torch.tensor([6])),
    ]
    custom = StepPlan.build(LossAggregation(mode="custom", function=prompt_mean), microbatches)
    ready = StepPlan.build(LossAggregation(mode="prompt_mean"), microbatches)
    for i in range(2):
        torch.testing.assert_close(
            custom.weights(i, F64), ready.weights(i, F64), rtol=1e-15, atol=0
        )


def test_the_custom_function_of_the_guide():
    guide = (Path(__file__).parents[2] / "docs/modes.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    scope = {}
    exec(code, scope)
    agg = LossAggregation(mode="custom", function=scope["square_root_of_length"])
    # N = 3, and M = 0.5, 4 and 0: a fraction below 1 is not clamped.
    mask = torch.tensor([[0.25, 0.25, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=F64)
    w = token_weights(agg, mask, dtype=F64)
    expected = mask / torch.tensor([[0.5**0.5], [2.0], [1.0]], dtype=F64) / 3
    torch.testing.assert_close(w, expected, rtol=1e-15, atol=0)
