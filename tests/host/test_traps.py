"""Known defects of public systems that live between a loss function and the host's own scaling.

Each has a small loss function that has the defect. It runs on Megatron's own schedule, DDP and
gradient finalization, and its gradient is off by the factor that is derived beside it; the hook's,
on the same data, is that of one process. Numbers are those of the trap list in docs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.host.ranks import run_host_ranks
from tests.host.steps import Sequence, batches, sequences

pytestmark = pytest.mark.host

EXACT = 1e-12
N_MB = 3
DIVISOR = 7.0
# Samples by rank and microbatch. Sample 5, which has no loss token, is a microbatch of its own.
PLACES = {
    2: [[[5], [0, 1], [2]], [[3], [4, 6], [7, 8, 9]]],
    1: [[[5], [0, 1, 2, 3], [4, 6, 7, 8, 9]]],
}
SAMPLES = 10


class Local(NamedTuple):
    """What a loss function knows of one microbatch on one rank, and of the whole step."""

    sum: Tensor  # of the masked losses
    tokens: Tensor  # sum of the mask
    step_tokens: float  # T
    d: int
    c: int


Returned = tuple[Tensor, ...]


class Trap(NamedTuple):
    """A defective loss function, and the factor by which its gradient is off."""

    mode: str  # what it means to compute
    defective: Callable[[Local], Returned]  # Megatron's tuple, without the report
    factor: Callable[[], float]
    d: int = 2
    c: int = 1
    per_token: bool = False
    kind: str = "01"  # of mask: 01, fractional, or one token a microbatch


def count(x: Tensor) -> Tensor:
    return x.to(torch.int)


# S is the sum of the masked losses of the step, T its tokens, N its samples. Where the per-token
# flag is off, the host turns a 2-tuple (l, report) into sum(l) c / (n_mb d c), summed over
# microbatches and ranks, and a 3-tuple (l, n, report) into sum(l / max(n, 1)) / (n_mb d c). Where
# the flag is on, it turns a 3-tuple into sum(l) / sum(n).


def phantom_tokens(x: Local) -> Returned:
    """Trap 1. Right: S / T. The empty microbatch counts as a token: S / (T + 1)."""
    return x.sum, count(x.tokens.clamp(min=1))


def dp_squared(x: Local) -> Returned:
    """Trap 2. Right: S / N, so S d / N before the average over d. Got: S / (N d) / d."""
    return (x.sum / (SAMPLES * x.d) * N_MB,)


def averaged_over_dp(x: Local) -> Returned:
    """Trap 3. Right: S / (N D). The average over d ranks is not undone: S / (N D) / d."""
    return (x.sum / (SAMPLES * DIVISOR) * N_MB,)


def scaled_for_another_route(x: Local) -> Returned:
    """Trap 7. Right: S / T. The factor n_mb d / N of the other route stays: S / T * n_mb d / N."""
    return x.sum * (N_MB * x.d / SAMPLES), count(x.tokens)


def missing_cp_factor(x: Local) -> Returned:
    """Trap 7. Right: S / T. A 3-tuple gets no c from the host: (S / T) n_mb d / (n_mb d c)."""
    return x.sum / x.step_tokens * N_MB * x.d, count(torch.ones(()))


def cp_factor_twice(x: Local) -> Returned:
    """Trap 8. Right: S / T. A 2-tuple gets c from the host: (S / T) n_mb d c * c / (n_mb d c)."""
    return (x.sum / x.step_tokens * N_MB * x.d * x.c,)


def local_count(x: Local) -> Returned:
    """Trap 12. Right: the mean over microbatches of one token's loss l.

    The rank that holds the token returns (l, 1), the other one (0, 0): l / (n_mb d c) a microbatch.
    """
    return x.sum, count(x.tokens)


def sum_of_means(x: Local) -> Returned:
    """Trap 13. Right: the mean over n_mb d microbatches. Their sum, averaged over d: n_mb of it."""
    return (x.sum / x.tokens.clamp(min=1) * N_MB,)


def divided_by_steps(x: Local) -> Returned:
    """Trap 16. Right: S / T, which the host divides by alone. Divided once more: S / T / n_mb."""
    return x.sum / N_MB, count(x.tokens)


def not_times_microbatches(x: Local) -> Returned:
    """Trap 17. Right: S / T. The host divides it by n_mb, and by d, which alone is undone."""
    return (x.sum / x.step_tokens * x.d,)


def fraction_lost(x: Local) -> Returned:
    """Trap 26. Right: S / T. The count of every microbatch is cut to an integer: S / sum(int)."""
    return x.sum, count(x.tokens)


def tokens(kind: str) -> float:
    return math.fsum(m for s in samples_of_kind(kind) for m in s.sample.mask)


def whole_tokens(d: int) -> int:
    """Sum of the tokens of every microbatch, each rounded down."""
    chosen = samples_of_kind("fractional")
    parts = [[chosen[i].sample.mask for i in place] for rank in PLACES[d] for place in rank]
    return sum(int(math.fsum(m for mask in part for m in mask)) for part in parts)


TRAPS = {
    "1": Trap(
        "token_mean", phantom_tokens, lambda: tokens("01") / (tokens("01") + 1), per_token=True
    ),
    "2": Trap("sample_sum", dp_squared, lambda: 1 / 2**2),
    "3": Trap("constant", averaged_over_dp, lambda: 1 / 2),
    "7": Trap("token_mean", scaled_for_another_route, lambda: N_MB * 2 / SAMPLES, per_token=True),
    "7-cp": Trap("token_mean", missing_cp_factor, lambda: 1 / 2, d=1, c=2),
    "8": Trap("token_mean", cp_factor_twice, lambda: 2, d=1, c=2),
    "12": Trap("microbatch_mean", local_count, lambda: 1 / 2, d=1, c=2, kind="one"),
    "13": Trap("microbatch_mean", sum_of_means, lambda: N_MB),
    "16": Trap("token_mean", divided_by_steps, lambda: 1 / N_MB, per_token=True),
    "17": Trap("token_mean", not_times_microbatches, lambda: 1 / N_MB),
    # `custom` here is m / T: under the flag, `token_mean` refuses fractions, see test_hook.
    "26": Trap(
        "custom",
        fraction_lost,
        lambda: tokens("fractional") / whole_tokens(2),
        per_token=True,
        kind="fractional",
    ),
}


def samples_of_kind(kind: str) -> list[Sequence]:
    if kind != "one":
        return sequences(fractional=kind == "fractional")
    # The last token of the first sample of every microbatch, and no other.
    active = {place[0] for rank in PLACES[1] for place in rank}
    return [
        dataclasses.replace(
            s,
            sample=oracle.Sample((*[0.0] * (len(s.tokens) - 1), float(i in active))),
        )
        for i, s in enumerate(sequences(fractional=False))
    ]


def weights_of(trap: Trap) -> list[list[float]]:
    """The oracle's weights, in the order of the samples."""
    chosen = samples_of_kind(trap.kind)
    step = [[[chosen[i].sample for i in place] for place in rank] for rank in PLACES[trap.d]]
    mode = "token_mean" if trap.mode == "custom" else trap.mode
    divisor = DIVISOR if trap.mode == "constant" else None
    nested = oracle.step_weights(mode, step, divisor=divisor)
    in_order: list[list[float]] = [[]] * SAMPLES
    for r, rank in enumerate(PLACES[trap.d]):
        for k, place in enumerate(rank):
            for s, i in enumerate(place):
                in_order[i] = nested[r][k][s]
    return in_order


def token_share(plan: Any, i: int) -> Tensor:
    """A custom aggregation: ``m / T``."""
    return plan.microbatches[i].loss_mask / plan.counts.tokens


def reference_gradients() -> dict[str, Any]:
    """One process: what each trap's loss means."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.build(torch.float64, per_token=False)
    return {
        name: gpt.plain_gradient(model, samples_of_kind(trap.kind), weights_of(trap))
        for name, trap in TRAPS.items()
    }


def host_gradients(d: int, c: int, references: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Every rank, for each trap: the defective gradient's error against the factor times the
    reference, and the hook's error against the reference.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg import LossAggregation
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize(c)
    rank = parallel_state.get_data_parallel_rank()

    def forward_step(
        trap: Trap, data_iterator: Iterator[Any], model: Any
    ) -> tuple[Tensor, Callable[..., Any]]:
        losses, loss_func = gpt.forward_step(data_iterator, model)
        (mask,) = loss_func.args

        def defective(output: Tensor) -> tuple[Any, ...]:
            total = (output * mask).sum()
            local = Local(total, mask.sum(), tokens(trap.kind), trap.d, trap.c)
            return *trap.defective(local), {}

        return losses, defective

    errors = {}
    for name, trap in TRAPS.items():
        if (trap.d, trap.c) != (d, c):
            continue
        ddp = gpt.data_parallel(gpt.build(torch.float64, trap.per_token))
        hook = LossHook(
            LossAggregation(
                mode=trap.mode,
                divisor=DIVISOR if trap.mode == "constant" else None,
                function=token_share if trap.mode == "custom" else None,
            )
        )
        schedule = get_forward_backward_func()
        wrong = functools.partial(forward_step, trap)
        found = []
        for run, step in ((schedule, wrong), (hook.wrap(schedule), gpt.forward_step)):
            data = batches(samples_of_kind(trap.kind), PLACES[d][rank], "thd")
            gpt.run_step(run, ddp, data, N_MB, forward_step_func=step)
            found.append(gpt.gradient(ddp))
        scaled = {key: g * trap.factor() for key, g in references[name].items()}
        errors[name] = (
            gpt.relative_error(found[0], scaled),
            gpt.relative_error(found[1], references[name]),
        )
    return errors


@functools.cache
def errors() -> dict[str, tuple[float, float]]:
    (references,) = run_host_ranks(reference_gradients, 1)
    return {
        name: error
        for d, c in ((2, 1), (1, 2))
        for name, error in run_host_ranks(host_gradients, 2, d, c, references)[0].items()
    }


@pytest.mark.parametrize("name", TRAPS)
def test_the_defect_is_off_by_its_factor_and_the_hook_is_exact(name: str) -> None:
    defective, hooked = errors()[name]
    assert abs(TRAPS[name].factor() - 1) > 1e-3
    assert defective <= EXACT
    assert hooked <= EXACT
