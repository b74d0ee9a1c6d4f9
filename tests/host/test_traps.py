"""Known defects of public systems that live between a loss function and the host's own scaling.

Each has a small loss function that has the defect. It runs on Megatron's own schedule, DDP and
gradient finalization, and its gradient is off by the factor that is derived beside it; the hook's,
on the same data, is that of one process.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.host import gpt
from tests.host.cases import Case, Expected, assert_exact
from tests.host.harness import Topology
from tests.host.reference import reference
from tests.host.steps import LENGTHS, N_MB, PLACES, sequences


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
    # Right: S / (N D). The average over d ranks is not undone: S / (N D) / d.
    "averaged over dp": Trap(lambda s, t: (s / (N * 7.0) * N_MB,), Case("constant"), 1 / 2),
    # Right: S / T. The factor n_mb d / N of the other route stays: S / T * n_mb d / N.
    "scaled for another route": Trap(
        lambda s, t: (s * (N_MB * 2 / N), count(t)), PER_TOKEN, N_MB * 2 / N
    ),
    # Right: the mean over n_mb d microbatches. Their sum, averaged over d: n_mb of it.
    "sum of means": Trap(lambda s, t: (s / t.clamp(min=1) * N_MB,), Case("microbatch_mean"), N_MB),
    # Right: S / T, which the host divides by alone. Divided once more: S / T / n_mb.
    "divided by steps": Trap(lambda s, t: (s / N_MB, count(t)), PER_TOKEN, 1 / N_MB),
    # Right: S / T. The host divides it by n_mb, and by d, which alone is undone.
    "not times microbatches": Trap(lambda s, t: (s / T * 2,), Case("token_mean"), 1 / N_MB),
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

    def defective(_: Any, mask: Tensor) -> Callable[..., Any]:
        return lambda output: (*TRAPS[cp][name].defective((output * mask).sum(), mask.sum()), {})

    return gpt.forward_step_with(defective)(data_iterator, model)


@pytest.mark.parametrize("cp", TRAPS)
def test_the_defect_is_off_by_its_factor_and_the_hook_is_exact(cp: int) -> None:
    expected: dict[Case, Expected] = {}
    for name, trap in TRAPS[cp].items():
        assert abs(trap.factor - 1) > 1e-3, name
        right = dataclasses.replace(trap.right, places=PLACES[2 // cp])
        step = functools.partial(defective_step, cp=cp, name=name)
        gradient = reference().gradient(right.weights)
        off = {key: g * trap.factor for key, g in gradient.items()}
        expected[dataclasses.replace(right, step=step, hooked=False)] = off, {}
        expected[right] = gradient, {}
    assert_exact(Topology(2, {"cp": cp}), [*expected], expected.__getitem__)
