"""Plans from mask sums alone have the coefficients of plans from masks; ids may be strings."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, token_weights
from megatron_loss_agg.errors import (
    AggregationError,
    FunctionError,
    GroupError,
    MaskError,
    PeerError,
)
from tests.distributed import run_ranks

MODES: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sample_mean": {},
    "rollout_mean": {},
    "prompt_mean": {},
    "sample_sum": {},
    "constant": {"divisor": 3.0},
    "sum": {},
    "microbatch_mean": {},
}
PROMPTS = [["a", "b", "a"], ["b"], ["c", "a"]]
ROLLOUTS = [["0", "1", "0"], ["1"], ["2", "3"]]
MASKS = [
    torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]),
    torch.tensor([[0.0, 0.25, 1.0]]),
    torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
]
REJECTED = [torch.tensor([False, False, True]), torch.tensor([False]), torch.tensor([True, False])]
SUMS = [mask.sum(dim=1) for mask in MASKS]


def from_masks(agg: LossAggregation, group: Any = None, places: Any = range(3)) -> StepPlan:
    microbatches = [
        Microbatch(MASKS[i], None, PROMPTS[i], ROLLOUTS[i], rejected=REJECTED[i]) for i in places
    ]
    return StepPlan.build(agg, microbatches, group)


@pytest.mark.parametrize("empty", ["count", "skip"])
@pytest.mark.parametrize("rejected", ["count", "skip"])
@pytest.mark.parametrize("mode", MODES)
def test_coefficients_are_those_of_the_masks(mode: str, rejected: str, empty: str) -> None:
    agg = LossAggregation(mode=mode, rejected=rejected, empty=empty, **MODES[mode])
    plan = StepPlan.from_mask_sums(
        agg, SUMS, prompt_ids=PROMPTS, rollout_ids=ROLLOUTS, rejected=REJECTED
    )
    whole = from_masks(agg)
    for i, mask in enumerate(MASKS):
        coefficients = plan.coefficients(i)
        assert coefficients.dtype == torch.float64
        assert torch.equal(coefficients, whole.coefficients(i))
        expected = whole.weights(i, torch.float64)
        assert torch.equal(mask.double() * coefficients.unsqueeze(1), expected)
        assert not coefficients[REJECTED[i] | (SUMS[i] == 0)].any()


def test_one_vector_is_one_microbatch_of_any_numbers() -> None:
    agg = LossAggregation(mode="prompt_mean")
    forms = [[2, 3, 1.5], (2.0, 3.0, 1.5), torch.tensor([2.0, 3.0, 1.5])]
    forms += [torch.tensor(forms[0]).numpy(), [torch.tensor(x) for x in forms[0]]]
    for sums in forms:
        plan = StepPlan.from_mask_sums(agg, sums, prompt_ids=["p", "q", "p"])
        # Prompts p (3.5 tokens) and q (3 tokens): 1 / (2 * 3.5) and 1 / (2 * 3).
        assert plan.coefficients(0).tolist() == [0.5 / 3.5, 0.5 / 3, 0.5 / 3.5]
    assert plan.counts.prompts == 2 and plan.counts.active_tokens is None


def test_ids_of_all_samples_go_with_sums_by_microbatch() -> None:
    agg = LossAggregation(mode="prompt_mean")
    flat = [x for ids in PROMPTS for x in ids]
    by_microbatch = StepPlan.from_mask_sums(agg, SUMS, prompt_ids=PROMPTS)
    numbers = torch.tensor([ord(x) for x in flat])
    for ids in (flat, numbers):
        plan = StepPlan.from_mask_sums(agg, SUMS, prompt_ids=ids)
        for i in range(3):
            assert torch.equal(plan.coefficients(i), by_microbatch.coefficients(i))


def test_strings_are_hashed_alike_everywhere() -> None:
    microbatch = Microbatch(torch.ones(2, 3), prompt_ids=["uid-1", "übung"])
    digests = [hashlib.blake2b(x.encode(), digest_size=8).digest() for x in ("uid-1", "übung")]
    expected = [int.from_bytes(x, "little", signed=True) for x in digests]
    assert microbatch.prompt_ids.tolist() == expected
    strings = token_weights(LossAggregation(mode="prompt_mean"), torch.ones(2, 3), None, ["a", "a"])
    numbers = token_weights(
        LossAggregation(mode="prompt_mean"), torch.ones(2, 3), None, torch.tensor([5, 5])
    )
    assert torch.equal(strings, numbers)


def test_weights_need_masks() -> None:
    plan = StepPlan.from_mask_sums(LossAggregation(mode="token_mean"), [1.0, 2.0])
    with pytest.raises(MaskError, match=r"has no masks; expected StepPlan\.build"):
        plan.weights(0)


BAD: dict[str, tuple[type[AggregationError], str, dict[str, Any]]] = {
    "negative": (MaskError, "finite numbers >= 0", {"mask_sums": [1.0, -1.0]}),
    "nan": (MaskError, "finite numbers >= 0", {"mask_sums": [float("nan")]}),
    "matrix": (MaskError, "expected a vector", {"mask_sums": torch.ones(2, 2)}),
    "text": (MaskError, "expected a vector of numbers", {"mask_sums": "ab"}),
    "ids missing": (GroupError, "no prompt_ids", {"mode": "prompt_mean", "mask_sums": [1.0]}),
    "too few ids": (
        GroupError,
        "one for each of the 2 samples",
        {"mode": "prompt_mean", "mask_sums": [1.0, 1.0], "prompt_ids": ["a"]},
    ),
    "ids of other microbatches": (
        GroupError,
        "for 1 microbatches and mask_sums for 2",
        {"mode": "prompt_mean", "mask_sums": [[1.0], [1.0]], "prompt_ids": [["a", "b"]]},
    ),
    "ids of one microbatch missing": (
        GroupError,
        "prompt_ids for 1 microbatches and mask_sums for 2",
        {"mode": "prompt_mean", "mask_sums": [[1.0], [1.0]], "prompt_ids": [["a"], None]},
    ),
    "ids of no kind": (
        GroupError,
        "a sequence of strings",
        {"mode": "prompt_mean", "mask_sums": [1.0], "prompt_ids": 3},
    ),
    "undecided": (
        GroupError,
        "rejected='count'",
        {"mask_sums": [1.0], "rejected": torch.tensor([True])},
    ),
    "custom": (FunctionError, "use StepPlan.build", {"mode": "custom", "mask_sums": [1.0]}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_named_error(name: str) -> None:
    kind, text, given = BAD[name]
    mode = given.get("mode", "token_mean")
    function = (lambda plan, i: None) if mode == "custom" else None
    agg = LossAggregation(mode=mode, function=function)
    options = {key: value for key, value in given.items() if key not in ("mode", "mask_sums")}
    with pytest.raises(kind, match=text):
        StepPlan.from_mask_sums(agg, given["mask_sums"], **options)


def coefficients_on_ranks() -> list[list[float]]:
    """Rank 0 has the first microbatch, rank 1 the others."""
    import torch.distributed as dist

    mine = [0] if dist.get_rank() == 0 else [1, 2]
    agg = LossAggregation(mode="prompt_mean", rejected="skip")
    plan = StepPlan.from_mask_sums(
        agg,
        [SUMS[i] for i in mine],
        prompt_ids=[PROMPTS[i] for i in mine],
        rejected=[REJECTED[i] for i in mine],
        group=dist.group.WORLD,
    )
    assert torch.equal(
        plan.coefficients(0), from_masks(agg, dist.group.WORLD, mine).coefficients(0)
    )
    return [plan.coefficients(i).tolist() for i in range(len(mine))]


def test_ranks_get_what_a_controller_would_hand_them() -> None:
    first, second = run_ranks(coefficients_on_ranks, 2)
    plan = StepPlan.from_mask_sums(
        LossAggregation(mode="prompt_mean", rejected="skip"),
        SUMS,
        prompt_ids=PROMPTS,
        rejected=REJECTED,
    )
    assert first + second == [plan.coefficients(i).tolist() for i in range(3)]


def fail_on_one_rank() -> str:
    import torch.distributed as dist

    sums = [1.0, -1.0] if dist.get_rank() == 0 else [1.0]
    try:
        StepPlan.from_mask_sums(LossAggregation(mode="token_mean"), sums, group=dist.group.WORLD)
    except AggregationError as error:
        return type(error).__name__
    return "no error"


def test_bad_sums_on_one_rank_stop_all() -> None:
    assert run_ranks(fail_on_one_rank, 2) == [MaskError.__name__, PeerError.__name__]
