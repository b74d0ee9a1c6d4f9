"""What is logged: reduced over microbatches and ranks as Megatron's training loop does it.

``lm loss`` is the mean over the step's tokens in every mode, ``<mode> loss`` the aggregated loss;
both as the losses of the fp64 reference and the oracle's weights give them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.mcore import Loop, LossHook
from tests.host.cases import Case, grid
from tests.host.harness import EXACT, Topology, data_for, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import deal, weights_of
from tests.host.test_gradients import LOSSES

pytestmark = pytest.mark.host

TOPOLOGY = Topology(4, {"cp": 2})
N_MB = 3


class Run(NamedTuple):
    """How the host runs a case."""

    case: Case
    loop: str  # train, eval, or "sft_eval": an evaluation under --sft

    @property
    def forward_only(self) -> bool:
        return self.loop != "train"


PLACES = deal(TOPOLOGY.data_parallel_size, N_MB)
RUNS = [
    Run(dataclasses.replace(loss, places=PLACES, per_token=per_token), loop)
    for loss, per_token, loop in grid(2, LOSSES, (False, True), ("train", "eval", "sft_eval"))
    # Under the flag, fractions of `token_mean` are refused: see test_refusals.
    if (loss.mode, loss.masks, per_token) != ("token_mean", "fractional", True)
    or loop == "sft_eval"
]


def mean_of_means(reports: list[dict[str, Tensor]], key: str) -> float:
    """Of the step, as ``evaluate`` makes it under ``--sft``."""
    pairs = torch.vstack([report[key].view(-1) for report in reports])
    mean = (pairs[:, 0] / pairs[:, 1].clamp(min=1)).mean()
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())


def with_another_key(stock: Any, mask: Tensor) -> Any:
    def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> Any:
        loss, num_tokens, report = stock(loss_mask, output_tensor)
        return loss, num_tokens, {**report, "other": torch.tensor([3.0, 4.0])}

    return functools.partial(loss_func, mask)


def copied_at_once(loss_func: Any, output: Tensor) -> Any:
    """As in a host that reads a report before the step ends."""
    *loss, report = loss_func(output)
    return (*loss, {key: pair.clone() for key, pair in report.items()})


def logged_by_host() -> dict[Run, dict[str, Any]]:
    """Every rank: what each run logs."""
    from tests.host import gpt, gradients

    gpt.initialize(**TOPOLOGY.sizes)
    models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}
    logged = {}
    for run in RUNS:
        case, ddp = run.case, models[run.case.per_token]
        by_microbatch = run.loop == "sft_eval"
        for buffer in ddp.buffers:
            buffer.grad_data.fill_(1.0)
        with torch.set_grad_enabled(not run.forward_only):
            reports = gpt.run_step(
                LossHook(case.aggregation, loop=Loop(averages_quotients=by_microbatch)),
                ddp,
                data_for(TOPOLOGY, PLACES, case.layout, case.masks),
                N_MB,
                forward_step_func=gpt.forward_step_with(with_another_key),
                forward_only=run.forward_only,
                zero_grad=False,
                schedule=gpt.schedule_with(copied_at_once),
            )
        mean = mean_of_means if by_microbatch else gpt.reported
        logged[run] = {
            "lm loss": mean(reports, "lm loss"),
            "mode loss": mean(reports, f"{case.mode} loss"),
            "other": [report["other"].tolist() for report in reports],
            "gradient touched": bool((gradients.flat(ddp) != 1).any()),
        }
    return logged


@functools.cache
def by_rank() -> list[dict[Run, dict[str, Any]]]:
    return run_host_ranks(logged_by_host, TOPOLOGY.world_size)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.case.name}-{run.loop}")
def test_reports_are_those_of_the_whole_step_and_the_rest_is_left_alone(run: Run) -> None:
    token_mean = reference().loss(weights_of("token_mean", PLACES, run.case.masks))
    aggregated = reference().loss(run.case.weights)
    for rank in by_rank():
        logged = rank[run]
        assert logged["lm loss"] == pytest.approx(token_mean, rel=EXACT, abs=0)
        assert logged["mode loss"] == pytest.approx(aggregated, rel=EXACT, abs=0)
        assert logged["other"] == [[3.0, 4.0]] * N_MB  # the script's own key
        assert logged["gradient touched"] is not run.forward_only
