"""Weights of samples: multiplied into those of tokens, and in the denominators or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, token_weights
from megatron_loss_agg.errors import AggregationError, GroupError, MaskError, ModeError
from megatron_loss_agg.mcore.reading.keys import read_batch
from tests.core.operations import Operations
from tests.core.steps import (
    CONFIGS,
    HOLES,
    LAYOUTS,
    MODES,
    aggregation,
    assert_weights,
    expected_weights,
    lay,
    random_step,
    steps,
    weighted,
)
from tests.core.test_distributed import groups_of_rank, laid_out
from tests.distributed import run_ranks
from tests.oracle import Sample, Step

F64 = torch.float64
CHOICES = ("count", "skip")

# As in test_modes, with weights: samples of 2, 1 and 2 tokens; 0 and 1 of prompt 7, 1 and 2 of
# rollout 5, 0 and 2 of data set 3.
V = (0.5, 2.0, 1.0)
SAMPLES = [
    Sample((1.0, 0.0, 1.0), 7, 4, 3, V[0]),
    Sample((1.0,), 7, 5, 8, V[1]),
    Sample((1.0, 1.0), 9, 5, 3, V[2]),
]
# The divisor of every mode: that of the unweighted loss, with the mean weight of each group's
# tokens in place of 1 per group.
BY_HAND = {
    "token_mean": [5.0] * 3,  # sum v m = 1 + 2 + 2
    "sample_mean": [7.0, 3.5, 7.0],  # V = 0.5 + 2 + 1, times 2, 1 and 2
    # V_4 = 0.5, V_5 = (2 + 2) / 3
    "rollout_mean": [2 * (0.5 + 4 / 3), 3 * (0.5 + 4 / 3), 3 * (0.5 + 4 / 3)],
    "prompt_mean": [6.0, 6.0, 4.0],  # V_7 = (1 + 2) / 3, V_9 = 1; V = 2
    "dataset_mean": [11.0, 2.75, 11.0],  # V_3 = (1 + 2) / 4, V_8 = 2; V = 2.75
    "sample_sum": [3.5] * 3,
    "constant": [14.0] * 3,  # D = 4
    "sum": [4.0] * 3,
    "microbatch_mean": [5.0] * 3,  # 5 tokens, mean weight 1
}


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_count_are_those_derived_by_hand_and_so_are_the_oracles(mode):
    agg = aggregation(mode, sample_weights="count")
    w = token_weights(agg, **lay(SAMPLES, "thd").inputs, dtype=F64)
    expected = [
        m * s.weight / divisor
        for s, divisor in zip(SAMPLES, BY_HAND[mode], strict=True)
        for m in s.mask
    ]
    torch.testing.assert_close(w, torch.tensor(expected, dtype=F64), rtol=1e-15, atol=0)
    assert_weights(expected_weights(mode, [[SAMPLES]], sample_weights="count"), expected)
    if "mean" in mode:
        assert w.sum().item() == pytest.approx(1, rel=1e-15)


@st.composite
def weighted_steps(draw: st.DrawFn) -> Step:
    of_sample = st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.5])
    step = draw(steps(max_ranks=1))
    return [[[replace(s, weight=draw(of_sample)) for s in mb] for mb in rank] for rank in step]


@pytest.mark.parametrize(("mode", "empty"), CONFIGS)
@settings(deadline=None, max_examples=15)
@given(step=weighted_steps(), layout=st.sampled_from(LAYOUTS), drawn=st.integers(0, 2**30 - 1))
def test_every_mode_is_that_of_the_oracle_also_with_rejected_samples(
    mode, empty, step, layout, drawn
):
    dropped = [
        [bool(drawn >> (5 * k + s) & 1) for s in range(len(mb))] for k, mb in enumerate(step[0])
    ]
    laid = [lay(mb, layout) for mb in step[0]]
    kept = [
        [s for s, gone in zip(mb, of_mb, strict=True) if not gone]
        for mb, of_mb in zip(step[0], dropped, strict=True)
    ]
    for choice in CHOICES:
        options = {"empty": empty, "sample_weights": choice}
        agg = aggregation(mode, **options)
        plan = StepPlan.build(agg, [Microbatch(**x.inputs) for x in laid])
        got = [x.samples(plan.weights(k, F64)) for k, x in enumerate(laid)]
        assert_weights([got], expected_weights(mode, step, **options))
        sums = [torch.tensor([float(sum(s.mask)) for s in mb], dtype=F64) for mb in step[0]]
        ids = {name: [x.inputs[name] for x in laid] for name in laid[0].inputs if "_ids" in name}
        v = [torch.tensor([s.weight for s in mb]) for mb in step[0]]
        alone = StepPlan.from_mask_sums(agg, sums, **ids, sample_weights=v)
        for k in range(len(laid)):
            torch.testing.assert_close(
                alone.coefficients(k), plan.coefficients(k), rtol=1e-13, atol=0
            )
        # Survivors: as if the rejected samples did not exist.
        skipping = [
            Microbatch(**x.inputs, rejected=torch.tensor(of_mb, dtype=torch.bool))
            for x, of_mb in zip(laid, dropped, strict=True)
        ]
        plan = StepPlan.build(aggregation(mode, rejected="skip", **options), skipping)
        got = [
            [w for w, gone in zip(x.samples(plan.weights(k, F64)), of_mb, strict=True) if not gone]
            for k, (x, of_mb) in enumerate(zip(laid, dropped, strict=True))
        ]
        assert_weights([got], expected_weights(mode, [kept], **options))


@pytest.mark.parametrize("count", ["sample", "rollout", "prompt", "dataset"])
def test_another_outer_unit_is_weighed_by_its_own_groups(count):
    step = weighted(random_step(11, 1), 3)
    laid = [lay(mb, "thd") for mb in step[0]]
    for mode, empty in CONFIGS:
        if mode in ("token_mean", "sum", "microbatch_mean"):
            continue
        options = {"empty": empty, "count": count, "sample_weights": "count"}
        plan = StepPlan.build(aggregation(mode, **options), [Microbatch(**x.inputs) for x in laid])
        got = [x.samples(plan.weights(k, F64)) for k, x in enumerate(laid)]
        assert_weights([got], expected_weights(mode, step, **options))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("mode", "empty"), CONFIGS)
def test_without_weights_nothing_changes_to_the_bit(mode, empty, choice):
    step = random_step(5, 1)[0] + [[Sample((0.1, 0.7), 3, 3, 3)], []]
    given = [Microbatch(**lay(mb, "thd").inputs) for mb in step]
    plain = StepPlan.build(aggregation(mode, empty=empty), given)
    chosen = StepPlan.build(aggregation(mode, empty=empty, sample_weights=choice), given)
    assert plain.counts == chosen.counts
    for k in range(len(step)):
        assert torch.equal(plain.weights(k), chosen.weights(k))


def plan_on_ranks(plan_steps: list[Step], cp: int) -> list[Any]:
    """For every step, config and choice: weights by sample, of the shards, and the collectives."""
    dp_group, cp_group, dp_rank, cp_rank = groups_of_rank(cp)
    answers = []
    for n, step in enumerate(plan_steps):
        laid, maps, wholes, parts = laid_out(step[dp_rank], ("thd", "bshd")[n % 2], cp, cp_rank)
        terms = {
            f"{mode} {empty} {choice}": aggregation(mode, empty=empty, sample_weights=choice)
            for k, (mode, empty) in enumerate(CONFIGS)
            for choice in CHOICES
            if k % 3 == n % 3 or mode == "microbatch_mean"
        }
        few = dict([*terms.items()][:8])
        with Operations() as made:
            StepPlan.build_terms(few, wholes, dp_group)
        whole = StepPlan.build_terms(terms, wholes, dp_group)
        part = StepPlan.build_terms(terms, parts, dist.group.WORLD, sharded_over=cp_group)
        for name in terms:
            weights = [whole[name].weights(k, dtype=F64) for k in range(len(laid))]
            by_sample = [x.samples(w) for x, w in zip(laid, weights, strict=True)]
            shards = [m.shard(w).tolist() for m, w in zip(maps, weights, strict=True)]
            of_parts = [part[name].weights(k, dtype=F64).tolist() for k in range(len(laid))]
            answers.append((n, name, by_sample, shards, of_parts, len(made.collectives)))
    return answers


def test_ranks_and_sharded_masks_give_the_same_weights_in_at_most_two_collectives():
    cp, dp = 2, 2
    plan_steps = [
        weighted(x, n)
        for n, x in enumerate([*HOLES, *(random_step(s, dp) for s in range(300, 307))])
    ]
    for rank, answers in enumerate(run_ranks(plan_on_ranks, dp * cp, plan_steps, cp)):
        for n, name, by_sample, shards, of_parts, collectives in answers:
            mode, empty, choice = name.split()
            expected = expected_weights(mode, plan_steps[n], empty=empty, sample_weights=choice)
            assert_weights(by_sample, expected[rank // cp])
            assert_weights(of_parts, shards)
            assert collectives <= 2


def test_whether_weights_count_is_a_choice_that_must_be_made():
    microbatch = Microbatch(torch.ones(2, 4), sample_weights=torch.tensor([1.0, 0.5]))
    for agg in (aggregation("sample_mean"), LossAggregation.preset("verl/token-mean")):
        with pytest.raises(GroupError, match=r"expected LossAggregation\(sample_weights='count'\)"):
            StepPlan.build(agg, [microbatch])
    agg = LossAggregation.preset("verl/token-mean", sample_weights="count")
    w = StepPlan.build(agg, [microbatch]).weights(0, F64)
    assert w.sum(dim=1).tolist() == pytest.approx([2 / 3, 1 / 3])  # 4 and 2 of 6
    with pytest.raises(ModeError, match="sample_weights='both'; expected 'count' or 'skip'"):
        LossAggregation(mode="sum", sample_weights="both")


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_whose_samples_all_weigh_nothing_has_weights_0_and_is_not_empty(mode, choice):
    laid = lay([replace(s, weight=0.0) for s in SAMPLES], "bshd")
    plan = StepPlan.build(aggregation(mode, sample_weights=choice), [Microbatch(**laid.inputs)])
    assert not plan.weights(0).any() and not plan.is_empty


def test_a_custom_function_applies_the_weights_itself():
    def by_weight(plan: StepPlan, i: int) -> torch.Tensor:
        microbatch = plan.microbatches[i]
        assert microbatch.sample_weights is not None
        return microbatch.loss_mask * microbatch.sample_weights.unsqueeze(1)

    v = torch.tensor([3.0, 0.25])
    for choice in CHOICES:
        agg = LossAggregation(mode="custom", function=by_weight, sample_weights=choice)
        w = token_weights(agg, torch.ones(2, 3), sample_weights=v)
        assert w.tolist() == [[3.0] * 3, [0.25] * 3]


ONES = torch.ones(2, 3)
SUM = LossAggregation(mode="sum", sample_weights="skip")
MEAN = LossAggregation(mode="sample_mean", sample_weights="skip")


def weighing(agg: LossAggregation, mask: torch.Tensor, v: Any) -> Callable[[], Any]:
    return lambda: token_weights(agg, mask, sample_weights=v)


# What is done, the error and what it says.
BAD: list[tuple[Callable[[], Any], type[AggregationError], str]] = [
    (weighing(SUM, ONES, torch.tensor([1, 2])), GroupError, r"expected floating-point \[2\]"),
    (weighing(SUM, ONES, [1.0, 2.0]), GroupError, "sample_weights is a list"),
    (weighing(SUM, ONES, torch.ones(3)), GroupError, r"\(3,\); expected floating-point \[2\]"),
    (weighing(SUM, ONES, torch.tensor([1.0, -1.0])), MaskError, "has the value -1; expected fini"),
    (weighing(SUM, ONES, torch.tensor([1.0, torch.nan])), MaskError, "has the value nan"),
    (weighing(SUM, ONES, torch.tensor([torch.inf, 1])), MaskError, "has the value inf"),
    # 1e30 / 3e-20 / 2 is beyond fp32; 1e-50 and 1e-38 / 3 / 2 are below its normal numbers.
    (weighing(SUM, ONES, torch.tensor([1e-50, 1], dtype=F64)), MaskError, "from 1e-50 to 1, and"),
    (weighing(MEAN, 1e-20 * ONES, torch.tensor([1e30, 1])), MaskError, r"to 1.67e\+49, and fp32"),
    (weighing(MEAN, ONES, torch.tensor([1e-38, 1])), MaskError, "from 1.67e-39 to 0.167, and"),
    (
        lambda: StepPlan.from_mask_sums(SUM, [1.0], sample_weights=[1.0]),
        GroupError,
        r"expected floating-point \[1\]",
    ),
    (
        lambda: StepPlan.from_mask_sums(SUM, [1.0], sample_weights=-torch.ones(1)),
        MaskError,
        "has the value -1",
    ),
    (lambda: read_batch({"loss_mask": ONES, "sample_weights": 1.0}), GroupError, "is a float"),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD, ids=[text for *_, text in BAD])
def test_bad_weights_are_a_named_error(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_weights_are_read_from_rows_and_packs():
    batch = {"loss_mask": ONES, "sample_weights": torch.tensor([[0.5], [2.0]])}
    assert read_batch(batch).sample_weights.tolist() == [0.5, 2.0]
    # The last of three offsets is fill, unless there are weights for as many samples.
    packed = {"loss_mask": torch.ones(1, 6), "cu_seqlens": torch.tensor([[0, 2, 6, 6]])}
    read = read_batch({**packed, "sample_weights": torch.tensor([[0.5, 2.0, 1.0]])})
    assert read.num_samples == 3 and read_batch(packed).num_samples == 2


def refusals_on_ranks() -> list[str]:
    """What this rank hears where rank 0 alone has weights, bad ones, or another choice."""
    world, first = dist.group.WORLD, dist.get_rank() == 0
    bad = torch.tensor([1.0, -1.0]) if first else None
    good = torch.tensor([1.0, 2.0]) if first else None
    heard = []
    for agg, v in (
        (LossAggregation(mode="token_mean"), good),
        (SUM, bad),
        (LossAggregation(mode="sum", sample_weights=CHOICES[first]), None),
    ):
        try:
            StepPlan.build(agg, [Microbatch(ONES, sample_weights=v)], world)
            heard.append("nothing")
        except AggregationError as error:
            heard.append(type(error).__name__)
    agg = LossAggregation(mode="token_mean", sample_weights="count")
    plan = StepPlan.build(agg, [Microbatch(ONES, sample_weights=good)], world)
    heard.append(str(plan.counts.across))  # (1 + 2 + 1 + 1) / 4
    return heard


def test_ranks_refuse_together_and_samples_of_others_weigh_1():
    first, second = run_ranks(refusals_on_ranks, 2)
    assert first == ["GroupError", "MaskError", "ModeError", "1.25"]
    assert second == ["PeerError", "PeerError", "ModeError", "1.25"]
