"""The headline: every parameter's gradient through the real host, against one process in fp64.

Megatron's own schedule, DDP and gradient finalization run on ``dp * cp`` gloo ranks. The reference
runs every sample alone through the same model and takes its weights from the oracle's loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from tests import oracle
from tests.host.ranks import run_host_ranks
from tests.host.steps import LENGTHS, batches, deal, sequences

pytestmark = pytest.mark.host

EXACT = 1e-12
TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (2, 2)]  # (data parallel, context parallel)
MICROBATCHES = (1, 3)


class Case(NamedTuple):
    """One aggregation of one kind of mask."""

    mode: str
    options: tuple[tuple[str, Any], ...] = ()
    fractional: bool = False


CASES = [
    Case("token_mean"),
    Case("sample_mean"),
    Case("sample_mean", (("empty", "skip"),)),
    Case("rollout_mean"),
    Case("prompt_mean"),
    Case("prompt_mean", (("count", "sample"),)),
    Case("sample_sum"),
    Case("constant", (("divisor", 7.0),)),
    Case("sum"),
    Case("sum", (("divisor", 7.0),)),
    Case("microbatch_mean"),
    Case("custom"),
    Case("token_mean", fractional=True),
    Case("prompt_mean", fractional=True),
]


class Run(NamedTuple):
    """How the host runs a case."""

    case: Case
    dtype: torch.dtype
    layout: str
    num_microbatches: int
    per_token: bool

    @property
    def refused(self) -> bool:
        """Megatron counts tokens as integers here, and the plugin leaves the count to it."""
        return self.per_token and self.case == Case("token_mean", fractional=True)


RUNS = [
    run
    for run in (
        Run(*values)
        for values in product(
            CASES, (torch.float64, torch.float32), ("thd", "bshd"), MICROBATCHES, (False, True)
        )
    )
    if not run.refused
]


def square_mask(plan: Any, i: int) -> torch.Tensor:
    """A custom aggregation: ``m^2 / samples``, which no other mode computes for fractions."""
    return plan.microbatches[i].loss_mask ** 2 / plan.counts.samples


def weights_of(case: Case, dp: int, num_microbatches: int) -> list[list[float]]:
    """The oracle's weights, in the order of the samples."""
    chosen = sequences(case.fractional)
    if case.mode == "custom":
        return [[m * m / len(chosen) for m in s.sample.mask] for s in chosen]
    places = deal(len(chosen), dp, num_microbatches)
    step = [[[chosen[i].sample for i in mb] for mb in rank] for rank in places]
    nested = oracle.step_weights(case.mode, step, **dict(case.options))
    return [sample for rank in nested for microbatch in rank for sample in microbatch]


def reference_gradients(wanted: list[tuple[Case, int, int]], dtype: torch.dtype) -> list[Any]:
    """One process: the gradient of each (case, dp, microbatches)."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.build(dtype, per_token=False)
    return [
        gpt.plain_gradient(model, sequences(case.fractional), weights_of(case, dp, number))
        for case, dp, number in wanted
    ]


def host_gradients(dp: int, cp: int, references: dict[Any, Any]) -> dict[Run, float]:
    """Every rank: each run's error against its reference."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg import LossAggregation
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize(cp)
    errors = {}
    for dtype, per_token in product((torch.float64, torch.float32), (False, True)):
        ddp = gpt.data_parallel(gpt.build(dtype, per_token))
        for run in (r for r in RUNS if (r.dtype, r.per_token) == (dtype, per_token)):
            function = square_mask if run.case.mode == "custom" else None
            aggregation = LossAggregation(
                mode=run.case.mode, function=function, **dict(run.case.options)
            )
            hook = LossHook(aggregation)
            places = deal(len(LENGTHS), dp, run.num_microbatches)
            data = batches(
                sequences(run.case.fractional),
                places[parallel_state.get_data_parallel_rank()],
                run.layout,
            )
            forward_backward = hook.wrap(get_forward_backward_func())
            gpt.run_step(forward_backward, ddp, data, run.num_microbatches)
            expected = references[run.case, dp, run.num_microbatches]
            errors[run] = gpt.relative_error(gpt.gradient(ddp), expected)
    return errors


@functools.cache
def references(dtype: torch.dtype) -> dict[Any, Any]:
    wanted = list(product(CASES, (1, 2), MICROBATCHES))
    (gradients,) = run_host_ranks(reference_gradients, 1, wanted, dtype)
    return dict(zip(wanted, gradients, strict=True))


@functools.cache
def errors(dp: int, cp: int) -> dict[Run, float]:
    exact = references(torch.float64)
    return run_host_ranks(host_gradients, dp * cp, dp, cp, exact, timeout=600)[0]


@functools.cache
def unsplit_fp32_error(case: Case, dp: int, num_microbatches: int) -> float:
    """What one fp32 process that holds the whole step cannot avoid."""
    key = (case, dp, num_microbatches)
    got, expected = references(torch.float32)[key], references(torch.float64)[key]
    difference = sum((got[n].double() - g).square().sum() for n, g in expected.items())
    return float((difference / sum(g.square().sum() for g in expected.values())).sqrt())


def name_of(run: Run) -> str:
    options = "-".join(str(value) for _, value in run.case.options)
    kind = "fractional" if run.case.fractional else "01"
    flag = "per_token" if run.per_token else "default"
    dtype = str(run.dtype).removeprefix("torch.")
    return f"{run.case.mode}{options}-{kind}-{dtype}-{run.layout}-{run.num_microbatches}mb-{flag}"


@pytest.mark.parametrize("dp, cp", TOPOLOGIES)
@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_gradient_is_that_of_the_whole_step(
    run: Run, dp: int, cp: int, record_property: Callable[[str, object], None]
) -> None:
    error = errors(dp, cp)[run]
    record_property("dtype", run.dtype)
    record_property("layout", run.layout)
    record_property("ranks", f"DP {dp}, CP {cp}")
    record_property("error", error)
    if run.dtype == torch.float64:
        assert error <= EXACT
    else:
        assert error <= 2 * unsplit_fp32_error(run.case, dp, run.num_microbatches)
