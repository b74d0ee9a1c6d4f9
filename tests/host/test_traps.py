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

from tests.host.cases import Case, run
from tests.host.harness import EXACT, Topology
from tests.host.reference import reference
from tests.host.steps import LENGTHS, Places, sequences, weights_of

pytestmark = pytest.mark.host

N_MB = 3
DIVISOR = 7.0
# Sample 5, which has no loss token, is a microbatch of its own.
PLACES: dict[int, Places] = {
    2: (((5,), (0, 1), (2,)), ((3,), (4, 6), (7, 8, 9))),
    1: (((5,), (0, 1, 2, 3), (4, 6, 7, 8, 9)),),
}
SAMPLES = len(LENGTHS)


class Local(NamedTuple):
    """What a loss function knows of one microbatch on one rank, and of the whole step."""

    sum: Tensor  # of the masked losses
    tokens: Tensor  # sum of the mask
    step_tokens: float  # T
    d: int
    c: int


class Trap(NamedTuple):
    """A defective loss function, and the factor by which its gradient is off."""

    defective: Callable[[Local], tuple[Tensor, ...]]  # Megatron's tuple, without the report
    mode: str  # what it means to compute
    factor: float
    d: int = 2
    c: int = 1
    per_token: bool = False
    masks: str = "01"


def count(x: Tensor) -> Tensor:
    return x.to(torch.int)


def tokens(masks: str, places: tuple[int, ...] = tuple(range(SAMPLES))) -> float:
    return math.fsum(m for i in places for m in sequences(masks)[i].sample.mask)


T = tokens("01")
# Tokens of every microbatch, each number rounded down.
WHOLE = sum(int(tokens("fractional", place)) for rank in PLACES[2] for place in rank)
ONE = torch.ones(())

# S is the sum of the masked losses of the step, T its tokens, N its samples. Where the per-token
# flag is off, the host turns a 2-tuple (l, report) into sum(l) c / (n_mb d c), summed over
# microbatches and ranks, and a 3-tuple (l, n, report) into sum(l / max(n, 1)) / (n_mb d c). Where
# the flag is on, it turns a 3-tuple into sum(l) / sum(n).
TRAPS = {
    # Right: S / T. The empty microbatch counts as a token: S / (T + 1).
    "phantom_tokens": Trap(
        lambda x: (x.sum, count(x.tokens.clamp(min=1))), "token_mean", T / (T + 1), per_token=True
    ),
    # Right: S / N, so S d / N before the average over d. Got: S / (N d) / d.
    "dp_squared": Trap(lambda x: (x.sum / (SAMPLES * x.d) * N_MB,), "sample_sum", 1 / 2**2),
    # Right: S / (N D). The average over d ranks is not undone: S / (N D) / d.
    "averaged_over_dp": Trap(lambda x: (x.sum / (SAMPLES * DIVISOR) * N_MB,), "constant", 1 / 2),
    # Right: S / T. The factor n_mb d / N of the other route stays: S / T * n_mb d / N.
    "scaled_for_another_route": Trap(
        lambda x: (x.sum * (N_MB * x.d / SAMPLES), count(x.tokens)),
        "token_mean",
        N_MB * 2 / SAMPLES,
        per_token=True,
    ),
    # Right: S / T. A 3-tuple gets no c from the host: (S / T) n_mb d / (n_mb d c).
    "missing_cp_factor": Trap(
        lambda x: (x.sum / x.step_tokens * N_MB * x.d, count(ONE)), "token_mean", 1 / 2, d=1, c=2
    ),
    # Right: S / T. A 2-tuple gets c from the host: (S / T) n_mb d c * c / (n_mb d c).
    "cp_factor_twice": Trap(
        lambda x: (x.sum / x.step_tokens * N_MB * x.d * x.c,), "token_mean", 2, d=1, c=2
    ),
    # Right: the mean over microbatches of one token's loss l. The rank that holds the token
    # returns (l, 1), the other one (0, 0): l / (n_mb d c) a microbatch.
    "local_count": Trap(
        lambda x: (x.sum, count(x.tokens)), "microbatch_mean", 1 / 2, d=1, c=2, masks="single"
    ),
    # Right: the mean over n_mb d microbatches. Their sum, averaged over d: n_mb of it.
    "sum_of_means": Trap(
        lambda x: (x.sum / x.tokens.clamp(min=1) * N_MB,), "microbatch_mean", N_MB
    ),
    # Right: S / T, which the host divides by alone. Divided once more: S / T / n_mb.
    "divided_by_steps": Trap(
        lambda x: (x.sum / N_MB, count(x.tokens)), "token_mean", 1 / N_MB, per_token=True
    ),
    # Right: S / T. The host divides it by n_mb, and by d, which alone is undone.
    "not_times_microbatches": Trap(
        lambda x: (x.sum / x.step_tokens * x.d,), "token_mean", 1 / N_MB
    ),
    # Right: S / T. The count of every microbatch is cut to an integer: S / sum(int). `custom` here
    # is m / T: under the flag, `token_mean` refuses fractions.
    "fraction_lost": Trap(
        lambda x: (x.sum, count(x.tokens)),
        "custom",
        tokens("fractional") / WHOLE,
        per_token=True,
        masks="fractional",
    ),
}


def token_share(plan: Any, i: int) -> Tensor:
    """A custom aggregation: ``m / T``."""
    return plan.microbatches[i].loss_mask / plan.counts.tokens


def defective_step(data_iterator: Any, model: Any, name: str) -> Any:
    """The forward step whose loss function has the defect."""
    from tests.host import gpt

    trap = TRAPS[name]

    def defective(_: Any, mask: Tensor) -> Callable[..., Any]:
        def loss_func(output: Tensor) -> tuple[Any, ...]:
            known = mask.sum(), tokens(trap.masks), trap.d, trap.c
            return *trap.defective(Local((output * mask).sum(), *known)), {}

        return loss_func

    return gpt.forward_step_with(defective)(data_iterator, model)


@pytest.mark.parametrize("d, c", [(2, 1), (1, 2)])
def test_the_defect_is_off_by_its_factor_and_the_hook_is_exact(d: int, c: int) -> None:
    names = [name for name, trap in TRAPS.items() if (trap.d, trap.c) == (d, c)]
    cases, expected = [], []
    for name, trap in ((name, TRAPS[name]) for name in names):
        options = {"function": token_share} if trap.mode == "custom" else {}
        right = Case(
            trap.mode, options, trap.masks, "thd", places=PLACES[d], per_token=trap.per_token
        )
        step = functools.partial(defective_step, name=name)
        cases += [dataclasses.replace(right, step=step, hooked=False), right]
        means = "token_mean" if trap.mode == "custom" else trap.mode
        gradient = reference().gradient(weights_of(means, PLACES[d], trap.masks))
        expected += [{key: g * trap.factor for key, g in gradient.items()}, gradient]
        assert abs(trap.factor - 1) > 1e-3, name
    found = run(Topology(2, {"cp": c}), cases, expected)
    for case in cases:
        assert max(rank.error for rank in found[case]) <= EXACT, case
