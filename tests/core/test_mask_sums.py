"""Plans from mask sums alone have the coefficients of plans from masks; ids may be strings."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, token_weights
from megatron_loss_agg.errors import AggregationError, FunctionError, GroupError, MaskError
from tests.core.steps import CONFIGS, aggregation
from tests.distributed import run_ranks

MASKS = [
    torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]),
    torch.tensor([[0.0, 0.25, 1.0]]),
    torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
]
SUMS = [mask.sum(dim=1) for mask in MASKS]
PROMPTS = [["a", "b", "a"], ["b"], ["c", "a"]]
REJECTED = [torch.tensor([False, False, True]), torch.tensor([False]), torch.tensor([True, False])]
OF_SAMPLES: dict[str, list[Any]] = {
    "prompt_ids": PROMPTS,
    "rollout_ids": [["0", "1", "0"], ["1"], ["2", "3"]],
    "dataset_ids": [["x", "y", "y"], ["x"], ["y", "z"]],
    "rejected": REJECTED,
}
TOKEN_MEAN, PROMPT_MEAN = aggregation("token_mean"), aggregation("prompt_mean")


def from_masks(agg: LossAggregation, places: Any = range(3), group: Any = None) -> StepPlan:
    of_places = [{name: x[i] for name, x in OF_SAMPLES.items()} for i in places]
    step = [Microbatch(MASKS[i], **given) for i, given in zip(places, of_places, strict=True)]
    return StepPlan.build(agg, step, group)


def from_sums(agg: LossAggregation, places: Any = range(3), group: Any = None) -> StepPlan:
    given = {name: [x[i] for i in places] for name, x in OF_SAMPLES.items()}
    return StepPlan.from_mask_sums(agg, [SUMS[i] for i in places], **given, group=group)


@pytest.mark.parametrize("rejected", ["count", "skip"])
@pytest.mark.parametrize("mode, empty", CONFIGS)
def test_coefficients_are_those_of_the_masks(mode: str, empty: str, rejected: str) -> None:
    agg = aggregation(mode, rejected=rejected, empty=empty)
    plan, whole = from_sums(agg), from_masks(agg)
    for i, mask in enumerate(MASKS):
        coefficients = plan.coefficients(i)
        assert coefficients.dtype == torch.float64
        assert torch.equal(coefficients, whole.coefficients(i))
        expected = whole.weights(i, torch.float64)
        assert torch.equal(mask.double() * coefficients.unsqueeze(1), expected)
        assert not coefficients[REJECTED[i] | (SUMS[i] == 0)].any()


def test_one_vector_is_one_microbatch_of_any_numbers() -> None:
    forms = [[2, 3, 1.5], (2.0, 3.0, 1.5), torch.tensor([2.0, 3.0, 1.5])]
    forms += [torch.tensor(forms[0]).numpy(), [torch.tensor(x) for x in forms[0]]]
    for sums in forms:
        plan = StepPlan.from_mask_sums(PROMPT_MEAN, sums, prompt_ids=["p", "q", "p"])
        # Prompts p (3.5 tokens) and q (3 tokens): 1 / (2 * 3.5) and 1 / (2 * 3).
        assert plan.coefficients(0).tolist() == [0.5 / 3.5, 0.5 / 3, 0.5 / 3.5]
        assert plan.counts.prompts == 2 and plan.counts.active_tokens is None
        with pytest.raises(MaskError, match=r"has no masks; expected StepPlan\.build"):
            plan.weights(0)


def test_ids_of_all_samples_go_with_sums_by_microbatch() -> None:
    flat = [x for ids in PROMPTS for x in ids]
    by_microbatch = StepPlan.from_mask_sums(PROMPT_MEAN, SUMS, prompt_ids=PROMPTS)
    for ids in (flat, torch.tensor([ord(x) for x in flat])):
        plan = StepPlan.from_mask_sums(PROMPT_MEAN, SUMS, prompt_ids=ids)
        for i in range(3):
            assert torch.equal(plan.coefficients(i), by_microbatch.coefficients(i))


def test_strings_are_hashed_alike_everywhere() -> None:
    microbatch = Microbatch(torch.ones(2, 3), prompt_ids=["uid-1", "übung"])
    digests = [hashlib.blake2b(x.encode(), digest_size=8).digest() for x in ("uid-1", "übung")]
    expected = [int.from_bytes(x, "little", signed=True) for x in digests]
    assert microbatch.prompt_ids.tolist() == expected
    strings, numbers = (
        token_weights(PROMPT_MEAN, torch.ones(2, 3), prompt_ids=ids)
        for ids in (["a", "a"], torch.tensor([5, 5]))
    )
    assert torch.equal(strings, numbers)


CUSTOM = LossAggregation(mode="custom", function=lambda plan, i: None)
# An aggregation, mask sums and what else is given; the error, and what it says.
BAD: list[tuple[LossAggregation, Any, dict[str, Any], type[AggregationError], str]] = [
    (TOKEN_MEAN, [1.0, -1.0], {}, MaskError, "finite numbers >= 0"),
    (TOKEN_MEAN, [float("nan")], {}, MaskError, "finite numbers >= 0"),
    (TOKEN_MEAN, torch.ones(2, 2), {}, MaskError, "expected a vector"),
    (TOKEN_MEAN, [1.0], {"rejected": torch.tensor([True])}, GroupError, "rejected='count'"),
    (PROMPT_MEAN, [1.0], {}, GroupError, "no prompt_ids"),
    (PROMPT_MEAN, [1.0], {"prompt_ids": "a"}, GroupError, "a sequence of strings"),
    (PROMPT_MEAN, [1.0, 1.0], {"prompt_ids": ["a"]}, GroupError, r"expected torch.int64 \[2\]"),
    (
        PROMPT_MEAN,
        [[1.0], [1.0]],
        {"prompt_ids": [["a", "b"]]},
        GroupError,
        "for 1 microbatches and",
    ),
    (PROMPT_MEAN, [1.0, 1.0], {"prompt_ids": [0, 1]}, GroupError, "a sequence of strings"),
    (TOKEN_MEAN, [1.0], {"rejected": [True]}, GroupError, "a list; expected torch.bool"),
    (CUSTOM, [1.0], {}, FunctionError, "use StepPlan.build"),
]


@pytest.mark.parametrize("agg, sums, given, error, text", BAD, ids=lambda x: str(x)[:40])
def test_bad_input_is_a_named_error(agg, sums, given, error, text) -> None:
    with pytest.raises(error, match=text):
        StepPlan.from_mask_sums(agg, sums, **given)


SKIPPING = aggregation("prompt_mean", rejected="skip")


def plan_on_ranks() -> tuple[list[list[float]], str]:
    """This rank's coefficients, and the error that it sees when rank 0's sums are bad."""
    group, mine = dist.group.WORLD, [[0], [1, 2]][dist.get_rank()]
    plan, whole = from_sums(SKIPPING, mine, group), from_masks(SKIPPING, mine, group)
    assert torch.equal(plan.coefficients(0), whole.coefficients(0))
    with pytest.raises(AggregationError) as error:
        StepPlan.from_mask_sums(TOKEN_MEAN, [1.0, -1.0 if 0 in mine else 1.0], group=group)
    return [plan.coefficients(i).tolist() for i in range(len(mine))], error.typename


def test_ranks_get_what_a_controller_would_hand_them_and_hear_of_bad_sums() -> None:
    (first, own), (second, of_a_peer) = run_ranks(plan_on_ranks, 2)
    assert first + second == [from_sums(SKIPPING).coefficients(i).tolist() for i in range(3)]
    assert (own, of_a_peer) == ("MaskError", "PeerError")


def test_sums_are_read_in_fp64_and_a_rank_may_have_none() -> None:
    plan = StepPlan.from_mask_sums(TOKEN_MEAN, [2.0**24 + 1, 1.0])
    assert plan.counts.tokens == 2**24 + 2
    nothing: dict[str, list[Any]] = {name: [] for name in (*OF_SAMPLES, "sample_weights")}
    agg = aggregation("prompt_mean", rejected="skip", sample_weights="skip")
    assert StepPlan.from_mask_sums(agg, [], **nothing).counts.microbatches == 0
    assert StepPlan.from_mask_sums(PROMPT_MEAN, [[]], prompt_ids=[]).coefficients(0).numel() == 0


def test_a_slice_of_coefficients_is_sent_without_the_rest() -> None:
    plan = StepPlan.from_mask_sums(TOKEN_MEAN, [[1.0]] * 10_000)
    assert len(pickle.dumps(plan.coefficients(0))) < 1000
