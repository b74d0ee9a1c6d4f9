"""The headline: every parameter's gradient through the real host, against one process in fp64.

Megatron's own schedules, DDP and gradient finalization run on gloo ranks. The reference runs every
sample alone through the same model and takes its weights from the oracle's loops; a rank that holds
a part of the model is compared with that part of it. Each step also passes the plugin's audit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests import oracle
from tests.host import gpt
from tests.host.cases import Batch, Case, assert_exact, covering, run, usual
from tests.host.harness import EXACT, TOPOLOGIES, Topology, run_host_ranks
from tests.host.reference import gradient_of, reference, relative_error
from tests.host.steps import Weights, deal, sequences


def with_sessions(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    """Rollouts under a name of their own."""
    return {"session_ids" if key == "rollout_ids" else key: x for key, x in batch.items()}


SESSIONS = Case(
    "nested_mean",
    {"levels": ("prompt", "session", "sample"), "empty": "skip"},
    batch=with_sessions,
)
# Every mode with a row in the oracle; `test_by_sample` has batches with ids of data sets.
MODES = [mode for mode in oracle.INNER if mode != "dataset_mean"]
LOSSES = [
    *(Case(mode, {"divisor": 7.0} if mode == "constant" else {}) for mode in MODES),
    Case("sample_mean", {"empty": "skip"}),
    Case("prompt_mean", {"count": "sample"}),
    Case("nested_mean", {"levels": ("prompt", "sample")}),
    Case("nested_mean", {"levels": ("prompt", "rollout", "sample"), "empty": "skip"}),
    SESSIONS,
    Case("sum", {"divisor": 7.0}),
    Case("custom"),
    Case("token_mean", masks="fractional"),
    Case("prompt_mean", masks="fractional"),
    Case("sample_mean", masks="fractional"),  # of which one sums to a quarter of a token
]
# Data parallel, context parallel; loss; dtype; layout; microbatches; the per-token flag.
AXES: list[Sequence[Any]] = [
    *([(1, 1), (2, 1), (1, 2), (2, 2)], LOSSES, (torch.float64, torch.float32)),
    *(("thd", "bshd"), (1, 3), (False, True)),
]
CASES: dict[tuple[int, int], dict[str, Case]] = {}
# Combinations in which every three values have all of theirs.
for (dp, cp), loss, dtype, layout, number, per_token in covering(3, *AXES):
    way = {"dtype": dtype, "layout": layout, "per_token": per_token}
    case = dataclasses.replace(loss, places=deal(dp, number), **way)
    CASES.setdefault((dp, cp), {})[case.name] = case
ROWS = [(*ranks, name) for ranks, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> dict[tuple[int, int], tuple[str, ...]]:
    """The names of the cases whose tests run, by data- and context-parallel ranks."""
    tests = {test.nodeid.rpartition("::")[2] for test in request.session.items}
    title = "test_gradient_is_that_of_the_whole_step[{}-{}-{}]"
    return {
        ranks: tuple(name for name in of if title.format(*ranks, name) in tests)
        for ranks, of in CASES.items()
    }


@functools.cache
def errors(dp: int, cp: int, names: tuple[str, ...]) -> dict[str, float]:
    cases = CASES[dp, cp]
    found = run(Topology(dp * cp, {"cp": cp}), [cases[name] for name in names])
    return {case.name: max(rank.error for rank in ranks) for case, ranks in found.items()}


def unsplit_gradients(wanted: list[tuple[str, Weights]]) -> list[Any]:
    """One fp32 process: the gradients of whole steps, each of (masks, weights)."""
    gpt.initialize()
    model = gpt.build(torch.float32)
    found = []
    for masks, weights in wanted:
        total = sum(
            (torch.tensor(w) * gpt.plain_losses(model, sequences(masks)[i])).sum()
            for i, w in weights
        )
        found.append(gradient_of(total, model))
    return found


@functools.cache
def unsplit_fp32_errors() -> dict[tuple[Any, ...], float]:
    """The error of one fp32 process that holds the whole step."""
    steps = {case.loss: case for of in CASES.values() for case in of.values()}
    wanted = [(case.masks, case.weights) for case in steps.values()]
    (found,) = run_host_ranks(unsplit_gradients, 1, wanted)
    return {
        loss: relative_error(got, reference().gradient(case.weights))
        for (loss, case), got in zip(steps.items(), found, strict=True)
    }


@pytest.mark.parametrize("dp, cp, name", ROWS)
def test_gradient_is_that_of_the_whole_step(
    dp: int,
    cp: int,
    name: str,
    selected: dict[tuple[int, int], tuple[str, ...]],
    record_property: Callable[[str, object], None],
) -> None:
    case = CASES[dp, cp][name]
    error = errors(dp, cp, selected[dp, cp])[name]
    record_property("dtype", str(case.dtype).removeprefix("torch."))
    record_property("layout", case.layout)
    record_property("ranks", f"DP {dp}, CP {cp}")
    record_property("error", float(error))
    assert error <= (EXACT if case.dtype == torch.float64 else 2 * unsplit_fp32_errors()[case.loss])


# Those of data- and context-parallel ranks alone have more cases above.
MORE = TOPOLOGIES.keys() - {"dp1", "dp2", "cp2", "dp2-cp2", "pp2-dp2-distributed-overlap"}


@pytest.mark.parametrize("name", sorted(MORE))
def test_every_parallelism_of_the_host_is_exact(name: str) -> None:
    assert_exact(TOPOLOGIES[name], usual(TOPOLOGIES[name]))
