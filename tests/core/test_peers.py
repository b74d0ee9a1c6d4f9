"""What one rank does wrong, or otherwise than its peers: every rank hears of it, and none hangs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import AggregationError, LossAggregation, Microbatch, StepPlan
from tests.core.steps import aggregation
from tests.distributed import run_ranks

F64 = torch.float64
IDS = {"prompt_ids": torch.tensor([1, 2])}
ONES = torch.ones(2, 3)
GOOD = Microbatch(ONES, **IDS)
AGG, TOKEN_MEAN = aggregation("prompt_mean"), aggregation("token_mean")
Call = Callable[[Any, Any], Any]  # of all ranks, and of this rank alone


def build(*microbatches: Any, agg: Any = AGG) -> Call:
    return lambda world, alone: StepPlan.build(agg, [GOOD, *microbatches], group=world)


def build_terms(terms: Any, *step: Any, **options: Any) -> Call:
    return lambda world, alone: StepPlan.build_terms(terms, step or [GOOD], world, **options)


PEER = r"PeerError: .*rank\(s\) \[1\]"
# What one rank does; the error that it sees. The others are named the rank to look at.
DEFECTS: dict[str, tuple[Call, str]] = {
    "negative": (build(Microbatch(-ONES, **IDS)), "MaskError"),
    "nan": (build(Microbatch(torch.full((2, 3), torch.nan), **IDS)), "MaskError"),
    "padding": (build(Microbatch(torch.ones(6), torch.tensor([0, 2, 5]), **IDS)), "MaskError"),
    "no ids": (build(Microbatch(ONES)), "GroupError"),
    "offsets": (build(Microbatch(torch.ones(6), torch.tensor([0, 7, 6]), **IDS)), "GroupError"),
    "no microbatch": (build(ONES), "MaskError"),
    "no list": (lambda world, _: StepPlan.build(AGG, GOOD, group=world), "MaskError"),
    "no mode": (build(agg="prompt_mean"), "ModeError"),
    "no term": (build_terms({"a": "sum"}), "ModeError"),
    "no terms": (build_terms({}), "ModeError"),
    "term without a mask": (build_terms({"a": AGG, "b": AGG}, {"a": GOOD}), "MaskError"),
    "bad sums": (
        lambda world, _: StepPlan.from_mask_sums(TOKEN_MEAN, [-1.0], group=world),
        "MaskError",
    ),
    "weights without a choice": (
        build(Microbatch(ONES, **IDS, sample_weights=torch.ones(2))),
        "GroupError",
    ),
    "bad weights": (
        build(
            Microbatch(ONES, **IDS, sample_weights=-torch.ones(2)),
            agg=aggregation("prompt_mean", sample_weights="skip"),
        ),
        "MaskError",
    ),
    "abandoned": (lambda world, _: StepPlan.abandon(world), "nothing"),
}


def extreme(mode: str, mask: float, weight: float, is_sharded: bool) -> tuple[Call, Call, str]:
    """A coefficient on one rank that fp32 does not hold beside one of ones."""

    def one_sample(mask: float, weight: float) -> Call:
        def call(world: Any, alone: Any) -> StepPlan:
            mine = Microbatch(
                torch.tensor([[mask]], dtype=F64),
                prompt_ids=torch.tensor([dist.get_rank()]),
                sample_weights=torch.tensor([weight], dtype=F64),
            )
            over = alone if is_sharded else None
            agg = aggregation(mode, sample_weights="skip")
            return StepPlan.build(agg, [mine], world, sharded_over=over)

        return call

    said = "MaskError: the coefficients of samples"
    return one_sample(mask, weight), one_sample(1.0, 1.0), said


EXTREME = {
    "token_mean": (3e38, 1.0),
    "sample_mean": (1e-40, 1.0),
    "microbatch_mean": (1e-40, 1.0),
    "prompt_mean": (1e-40, 1.0),
    "sample_sum": (1.0, 1e-40),
}
OTHERS = "ModeError: ranks have different aggregations, or other terms"
# What one rank does, what all others do, and what every rank hears.
DIFFERENT: dict[str, tuple[Call, Call, str]] = {
    "nothing else": (build(), build(), "nothing"),
    "other choice of weights": (
        build(agg=aggregation("prompt_mean", sample_weights="count")),
        build(agg=aggregation("prompt_mean", sample_weights="skip")),
        OTHERS,
    ),
    "other groups": (
        build_terms({"a": AGG}, group_by=("prompt",)),
        build_terms({"a": AGG}),
        OTHERS,
    ),
    "sharded alone": (
        lambda world, alone: StepPlan.build(AGG, [GOOD], world, sharded_over=alone),
        build(),
        "or sharded masks on some of them alone; expected the same",
    ),
    "other samples": (
        lambda world, _: StepPlan.build(AGG, [GOOD] * 2, world, sharded_over=world),
        lambda world, _: StepPlan.build(AGG, [GOOD], world, sharded_over=world),
        "GroupError: ranks that share samples have 2 and 4 of them",
    ),
    **{
        f"extreme {mode}{' sharded' * is_sharded}": extreme(mode, *values, is_sharded)
        for mode, values in EXTREME.items()
        for is_sharded in (False, True)
    },
}
TERMS: dict[str, dict[str, Any]] = {
    "one": {"policy": TOKEN_MEAN},
    "in another mode": {"policy": aggregation("sample_mean")},
    "with a divisor": {"policy": aggregation("sum")},
    "with another divisor": {"policy": aggregation("sum", divisor=2)},
    "two": {"policy": TOKEN_MEAN, "kl": TOKEN_MEAN},
    "in another order": {"kl": TOKEN_MEAN, "policy": TOKEN_MEAN},
    "under another name": {"policy": TOKEN_MEAN, "entropy": TOKEN_MEAN},
    "nine": dict.fromkeys("abcdefghi", TOKEN_MEAN),
    "ten": dict.fromkeys("abcdefghij", TOKEN_MEAN),
}
CASES: dict[str, tuple[Call, Call, str, str]] = {
    name: (bad, good, said, said) for name, (bad, good, said) in DIFFERENT.items()
}
for _name, (_bad, _own) in DEFECTS.items():
    CASES[_name] = (_bad, build(), _own, PEER)
    CASES[f"{_name} among terms"] = (_bad, build_terms({"a": AGG, "b": TOKEN_MEAN}), _own, PEER)
for _one, _other in itertools.permutations(TERMS, 2):
    _calls = build_terms(TERMS[_one]), build_terms(TERMS[_other])
    CASES[f"{_one} and {_other}"] = (*_calls, OTHERS, OTHERS)


def heard_on_ranks(where: int) -> dict[str, str]:
    """What this rank hears in each case, where rank ``where`` does what is wrong."""
    rank, world, heard = dist.get_rank(), dist.group.WORLD, {}
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    for name, (bad, good, *_) in CASES.items():
        try:
            (bad if rank == where else good)(world, alone)
            heard[name] = "nothing"
        except AggregationError as error:
            heard[name] = f"{type(error).__name__}: {error}"
    return heard


@pytest.fixture(scope="module")
def heard() -> list[dict[str, str]]:
    return run_ranks(heard_on_ranks, 3, 1, timeout=60.0)


@pytest.mark.parametrize("name", CASES)
def test_what_one_rank_does_wrong_stops_every_rank_by_name(heard, name):
    *_, own, of_others = CASES[name]
    for rank, said in enumerate(heard):
        assert re.search(own if rank == 1 else of_others, said[name]), (rank, said[name])


def test_an_error_names_the_place_of_the_microbatch_in_its_step():
    good, bad = Microbatch(torch.ones(1, 2)), Microbatch(-torch.ones(1, 2))
    for lists in ([good, good, good, bad], [{"a": good, "b": good}] * 3 + [{"a": good, "b": bad}]):
        with pytest.raises(AggregationError, match="microbatch 3: loss_mask has negative"):
            StepPlan.build_terms({"a": LossAggregation(mode="sum"), "b": TOKEN_MEAN}, lists)
