"""Steps that are not as usual and mean the same; and what a step is not, in other systems.

`test_gradients` has the usual ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.host import gpt
from tests.host.cases import Case, Expected, assert_exact, by_the_oracle, usual
from tests.host.harness import TOPOLOGIES, Topology
from tests.host.reference import reference
from tests.host.steps import LENGTHS, MODES, N_MB, NO_TOKENS, PLACES, SHORT, Places, sequences

CALLS = (1, 2, 1)  # microbatches of each call of a step


@pytest.mark.parametrize(
    "name", ["dp2", "cp2", "tp2-sp", "pp2", "ep2", "pp2-dp2-distributed-overlap"]
)
def test_a_step_of_several_calls_is_exact(name: str) -> None:
    assert sum(CALLS) == N_MB
    # Twice: the second step does not continue the first.
    assert_exact(TOPOLOGIES[name], usual(TOPOLOGIES[name], calls=CALLS, times=2))


@pytest.mark.parametrize("count", ["before", "end"])
def test_a_step_over_empty_stages_is_exact(count: str) -> None:
    case = Case("sample_mean", places=PLACES[1], hook={"count": count}, times=2)
    assert_exact(TOPOLOGIES["vpp2-empty"], [case])


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


def steps_of_run(case: Case, ranks: int) -> list[Case]:
    # The audit measures more than the first step.
    step = replace(case, hook={"aggregate_evaluation": True, "audit": case.layout == "thd"})
    last = None
    for evaluates, places in RUN:
        of_ranks = places if ranks == 2 else (sum(places, ()),)
        call = {"forward_only": evaluates}
        last = replace(step, places=of_ranks, call=call, after=last)
    return last.steps


@pytest.mark.parametrize("name", ["dp2-cp2", "tp2", "pp2"])
def test_every_step_is_exact_whatever_the_number_of_microbatches(name: str) -> None:
    topology = TOPOLOGIES[name]
    cases = usual(topology, (*MODES, "microbatch_mean"))
    runs = [steps_of_run(case, topology.data_parallel_size) for case in cases]
    assert_exact(topology, [step for steps in runs for step in steps])


def test_a_rank_without_active_tokens_takes_part_in_the_step() -> None:
    ranks = product(*zip(NO_TOKENS, SHORT, strict=True))
    ways = [("sample_sum", False), ("sample_sum", True), ("token_mean", True)]
    cases = [
        Case(mode, places=places, per_token=per_token)
        for places, (mode, per_token) in product(ranks, ways)
    ]
    # Of a step without tokens there is no mean.
    assert_exact(TOPOLOGIES["dp2"], cases, lambda case: (by_the_oracle(case)[0], {}))


def twice(**arguments: Any) -> Any:
    """A schedule that drops a loss and computes it again for the backward pass."""

    def recomputed(loss_func: Callable[..., Any], output: Tensor) -> Any:
        loss_func(output)
        return loss_func(output)

    return gpt.schedule_with(recomputed)(**arguments)


@pytest.mark.parametrize("name", ["cp2", "pp2"])
def test_a_loss_that_is_computed_twice_is_exact(name: str) -> None:
    first = usual(TOPOLOGIES[name], (*MODES, "custom"), call={"schedule": twice})
    # The first step of a hook is checked most.
    assert_exact(TOPOLOGIES[name], [*first, *(replace(case, after=case) for case in first)])


# Known defects of public systems that live between a loss function and the host's own scaling: the
# gradient of a small loss function that has the defect is off by the factor that is derived beside
# it; the hook's, on the same data, is that of one process.
def tokens(masks: str, places: tuple[int, ...] = tuple(range(len(LENGTHS)))) -> float:
    return math.fsum(m for i in places for m in sequences(masks)[i].sample.mask)


N, T = len(LENGTHS), tokens("01")
FRACTIONS = tokens("fractional")
# Tokens of every microbatch, each number rounded down.
WHOLE = sum(int(tokens("fractional", place)) for rank in PLACES[2] for place in rank)
ONE = torch.ones(())


class Trap(NamedTuple):
    """A defective loss function: (masked sum of losses, its tokens) -> Megatron's tuple, without
    the report; what it means to compute; and the factor by which its gradient is off.
    """

    defective: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    right: Case
    factor: float


def count(x: Tensor) -> Tensor:
    return x.to(torch.int)


PER_TOKEN = Case("token_mean", per_token=True)
# S is the sum of the masked losses of the step, T its tokens, N its samples. Where the per-token
# flag is off, the host turns a 2-tuple (l, report) into sum(l) c / (n_mb d c), summed over
# microbatches and ranks, and a 3-tuple (l, n, report) into sum(l / max(n, 1)) / (n_mb d c). Where
# the flag is on, it turns a 3-tuple into sum(l) / sum(n).
ON_TWO_DATA_PARALLEL_RANKS = {  # d = 2, c = 1
    # Right: S / T. The empty microbatch counts as a token: S / (T + 1).
    "phantom tokens": Trap(lambda s, t: (s, count(t.clamp(min=1))), PER_TOKEN, T / (T + 1)),
    # Right: S / N, so S d / N before the average over d. Got: S / (N d) / d.
    "dp squared": Trap(lambda s, t: (s / (N * 2) * N_MB,), Case("sample_sum"), 1 / 2**2),
    # Right: S / T. The count of every microbatch is cut to an integer: S / sum(int).
    "fraction lost": Trap(
        lambda s, t: (s, count(t)),
        Case("token_mean", masks="fractional", per_token=True),
        FRACTIONS / WHOLE,
    ),
}
ON_TWO_CONTEXT_PARALLEL_RANKS = {  # d = 1, c = 2
    # Right: S / T. A 3-tuple gets no c from the host: (S / T) n_mb d / (n_mb d c).
    "missing cp factor": Trap(lambda s, t: (s / T * N_MB, count(ONE)), Case("token_mean"), 1 / 2),
    # Right: S / T. A 2-tuple gets c from the host: (S / T) n_mb d c * c / (n_mb d c).
    "cp factor twice": Trap(lambda s, t: (s / T * N_MB * 2,), Case("token_mean"), 2),
    # Right: the mean over microbatches of one token's loss l. The rank that holds the token
    # returns (l, 1), the other one (0, 0): l / (n_mb d c) a microbatch.
    "local count": Trap(lambda s, t: (s, count(t)), Case("microbatch_mean", masks="single"), 1 / 2),
}
TRAPS = {1: ON_TWO_DATA_PARALLEL_RANKS, 2: ON_TWO_CONTEXT_PARALLEL_RANKS}


def defective_step(data_iterator: Any, model: Any, cp: int, name: str) -> Any:
    """The forward step whose loss function has the defect."""
    losses, loss_func = gpt.forward_step(data_iterator, model)
    (mask,) = loss_func.args
    defective = TRAPS[cp][name].defective
    return losses, lambda output: (*defective((output * mask).sum(), mask.sum()), {})


@pytest.mark.parametrize("cp", TRAPS)
def test_the_defect_is_off_by_its_factor_and_the_hook_is_exact(cp: int) -> None:
    expected: dict[Case, Expected] = {}
    for name, trap in TRAPS[cp].items():
        assert abs(trap.factor - 1) > 1e-3, name
        right = replace(trap.right, places=PLACES[2 // cp])
        step = partial(defective_step, cp=cp, name=name)
        gradient = reference().gradient(right.weights)
        off = {key: g * trap.factor for key, g in gradient.items()}
        expected[replace(right, step=step, hooked=False)] = off, {}
        expected[right] = gradient, {}
    assert_exact(Topology(2, {"cp": cp}), [*expected], expected.__getitem__)
