"""Ranks with different settings: every rank raises before the first step, and soon."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from megatron_loss_agg import LossAggregation, Term
from megatron_loss_agg.mcore import (
    Agreement,
    Audit,
    DatasetReports,
    Loop,
    LossHook,
    MultiTokenPrediction,
    RouterLosses,
)
from tests.host.harness import TOPOLOGIES, build_chunks, data_for, error_of, run_host_ranks
from tests.host.steps import PLACES, aggregation

pytestmark = pytest.mark.host

SOON = 20.0  # seconds for a step that is refused, on a busy machine


def of_plan(plan: Any, i: int) -> Tensor:
    mask: Tensor = plan.microbatches[i].loss_mask
    return mask / plan.counts.tokens


def other_function(plan: Any, i: int) -> Tensor:
    return 2 * of_plan(plan, i)


def hook_with(coefficient: float) -> LossHook:
    return LossHook({"policy": Term(aggregation("token_mean"), coefficient)})


# The hook of all ranks but the last, that of the last, and a part of the error that all raise.
UNLIKE: dict[str, tuple[Callable[[], LossHook], Callable[[], LossHook], str]] = {
    "mode": (
        lambda: LossHook(aggregation("token_mean")),
        lambda: LossHook(aggregation("sample_mean")),
        "terms=sample_mean on",
    ),
    "divisor": (
        lambda: LossHook(LossAggregation(mode="sum", divisor=2.0)),
        lambda: LossHook(LossAggregation(mode="sum", divisor=3.0)),
        "sum (divisor: 3) on",
    ),
    "coefficient": (lambda: hook_with(1.0), lambda: hook_with(0.5), "0.5 * policy: token_mean"),
    "function": (
        lambda: LossHook(LossAggregation(mode="custom", function=of_plan)),
        lambda: LossHook(LossAggregation(mode="custom", function=other_function)),
        "other_function",
    ),
    "coefficient's last digit": (
        lambda: hook_with(0.1234567),
        lambda: hook_with(0.1234571),
        "0.1234571 * policy",
    ),
}
# Options of the hook of the last rank, and what the error says of them.
OPTIONS: dict[str, dict[str, Any]] = {
    "audit=True": {"extensions": [Audit(repeat=True)]},
    "unmeasured=trust": {"extensions": [Audit(trust=True)]},
    "empty_step=error": {"empty_step": "error"},
    "averages_quotients=True": {"loop": Loop(averages_quotients=True)},
    "of_megatron=True": {"loop": Loop(of_megatron=True)},
    "mtp=same": {"extensions": [MultiTokenPrediction()]},
    "report_datasets=1": {"extensions": [DatasetReports()]},
    "moe=step": {"extensions": [RouterLosses()]},
}
for said, given in OPTIONS.items():
    UNLIKE[said] = (
        lambda: LossHook(aggregation("token_mean")),
        functools.partial(LossHook, aggregation("token_mean"), **given),
        said,
    )


def errors(name: str) -> dict[str, tuple[str | None, float]]:
    """A rank: its error in each case, and after how many seconds."""
    import torch.distributed as dist

    from tests.host import gpt

    topology = TOPOLOGIES[name]
    gpt.initialize(**topology.sizes)
    chunks = build_chunks(topology, False)
    places = PLACES[topology.data_parallel_size]
    last = dist.get_rank() == dist.get_world_size() - 1

    def step(hook: LossHook) -> tuple[str | None, float]:
        begin = time.monotonic()
        data = data_for(topology, places, "thd")
        error = error_of(gpt.run_step, hook, chunks, data, len(places[0]))
        return error, time.monotonic() - begin

    found = {case: step(hooks[last]()) for case, hooks in UNLIKE.items()}
    # The same number, whatever its type.
    divisor = 2.0 if last else 2
    found["good"] = step(LossHook(LossAggregation(mode="sum", divisor=divisor)))
    hurried = LossHook(aggregation("token_mean"), extensions=[Agreement(patience=2)])
    found["absent"] = (None, 0.0) if last else step(hurried)
    return found


@functools.cache
def ranks(name: str) -> list[dict[str, tuple[str | None, float]]]:
    return run_host_ranks(errors, TOPOLOGIES[name].world_size, name)


@pytest.mark.parametrize("name", ["dp2", "cp2", "tp2", "pp2", "pp2-tp2-sp"])
def test_every_rank_names_what_differs(name: str) -> None:
    for rank in ranks(name):
        assert rank["good"][0] is None
        for case, (_, _, text) in UNLIKE.items():
            error, seconds = rank[case]
            assert error is not None and error.startswith(
                "ModeError: ranks have different settings"
            ), case
            assert text in error and f"rank(s) [{len(ranks(name)) - 1}]" in error
            assert seconds < SOON


@pytest.mark.parametrize("name", ["dp2", "cp2", "tp2", "pp2", "pp2-tp2-sp"])
def test_a_rank_without_a_hook_is_named_by_all_others(name: str) -> None:
    *others, last = ranks(name)
    assert last["absent"][0] is None
    for rank in others:
        error, seconds = rank["absent"]
        assert error is not None and error.startswith(f"PeerError: rank(s) [{len(others)}] have")
        assert seconds < 2 * SOON
