"""Steps that are not as usual and mean the same: calls, numbers, empty ranks, rejected samples.

`test_gradients` has the usual ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import Audit, Loop
from tests.host import gpt
from tests.host.cases import Batch, Case, Expected, assert_exact, by_the_oracle, covering
from tests.host.harness import TOPOLOGIES, Topology
from tests.host.reference import reference
from tests.host.steps import EMPTY, MODES, N_MB, PLACES, Places, weights_of

LAYOUTS, FLAGS = ("thd", "bshd"), (False, True)
MEGATRON = {"loop": Loop(of_megatron=True)}
CALLS = (1, 2, 1)  # microbatches of each call of a step


@pytest.mark.parametrize(
    "name", ["dp2", "cp2", "tp2-sp", "pp2", "ep2", "pp2-dp2-distributed-overlap"]
)
def test_a_step_of_several_calls_is_exact(name: str) -> None:
    topology = TOPOLOGIES[name]
    places = PLACES[topology.data_parallel_size]
    assert sum(CALLS) == N_MB
    # Twice: the second step does not continue the first.
    cases = [
        Case(mode, layout=layout, places=places, per_token=per_token, calls=CALLS, times=2)
        for mode, layout, per_token in covering(2, MODES, LAYOUTS, FLAGS)
    ]
    assert_exact(topology, cases)


# One hook over a run whose number of microbatches changes, over steps and over ranks. By step:
# whether it evaluates, and the samples by data-parallel rank and microbatch.
RUN: list[tuple[bool, Places]] = [
    (False, (((0, 1),), ((2, 3),))),
    (False, (((3, 4), (5, 6), (7, 8)), ((9, 0),))),
    (True, (((6, 7), (8, 9)), ((0, 1), (2, 3)))),
    (False, (((9, 0), (1, 2)), ((3,), (5,)))),
    (True, (((2, 3),), ((4, 5),))),
    (False, (((5, 6),), ((9,), (1, 2), (3, 4)))),
]


def steps_of_run(topology: Topology, mode: str, layout: str, per_token: bool) -> Iterator[Case]:
    audit = Audit(repeat=layout == "thd")  # or else of the first step alone
    step = None
    for evaluates, places in RUN:
        step = Case(
            mode,
            layout=layout,
            places=places if topology.data_parallel_size == 2 else (sum(places, ()),),
            per_token=per_token,
            hook={**MEGATRON, "extensions": [audit]},
            call={"forward_only": evaluates},
            after=step,
        )
        yield step


@pytest.mark.parametrize("name", ["dp2", "dp2-cp2", "tp2", "pp2"])
def test_every_step_is_exact_whatever_the_number_of_microbatches(name: str) -> None:
    topology, modes = TOPOLOGIES[name], [*MODES, "microbatch_mean"]
    runs = (steps_of_run(topology, *way) for way in covering(2, modes, LAYOUTS, FLAGS))
    assert_exact(topology, [step for steps in runs for step in steps])


NO_TOKENS, TOKENS = ((EMPTY,), (EMPTY,)), ((0, 1), (2, 3))


def test_a_rank_without_active_tokens_takes_part_in_the_step() -> None:
    ranks = product((NO_TOKENS, TOKENS), (NO_TOKENS, ((4, 6), (7,))))
    ways = [("sample_sum", False), ("sample_sum", True), ("token_mean", True)]
    cases = [
        Case(mode, places=places, per_token=per_token)
        for places, (mode, per_token) in product(ranks, ways)
    ]
    # Of a step without tokens there is no mean.
    assert_exact(TOPOLOGIES["dp2"], cases, lambda case: (by_the_oracle(case)[0], {}))


REJECTED = (1, 2)


def with_rejected(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    return {**batch, "rejected": torch.tensor([i in REJECTED for i in of_mb])}


def test_rejected_samples_are_left_out_or_count_in_the_denominators() -> None:
    expected: dict[Case, Expected] = {}
    modes = ("token_mean", "sample_mean", "prompt_mean", "constant", "sum")
    for mode, per_token, choice in product(modes, FLAGS, ("count", "skip")):
        places = (((0, 1), (2, 4)),)
        way = {"layout": "bshd", "batch": with_rejected, "per_token": per_token}
        counted = places if choice == "count" else (((0,), (4,)),)
        kept = [(i, w) for i, w in weights_of(mode, counted) if i not in REJECTED]
        case = Case(mode, {"rejected": choice}, places=places, **way)
        expected[case] = reference().gradient(kept), {}
    assert_exact(TOPOLOGIES["dp1"], [*expected], expected.__getitem__)


def twice(**arguments: Any) -> Any:
    """A schedule that drops a loss and computes it again for the backward pass."""

    def recomputed(loss_func: Callable[..., Any], output: Tensor) -> Any:
        loss_func(output)
        return loss_func(output)

    return gpt.schedule_with(recomputed)(**arguments)


@pytest.mark.parametrize("name", ["cp2", "pp2"])
def test_a_loss_that_is_computed_twice_is_exact(name: str) -> None:
    topology = TOPOLOGIES[name]
    cases = []
    for mode, layout, per_token in covering(2, [*MODES, "custom"], LAYOUTS, FLAGS):
        places = PLACES[topology.data_parallel_size]
        way = {"layout": layout, "places": places, "call": {"schedule": twice}}
        first = Case(mode, per_token=per_token, **way)  # which is checked most
        cases += [first, replace(first, after=first)]
    assert_exact(topology, cases)
