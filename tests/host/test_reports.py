"""What is logged: reduced over microbatches and ranks as Megatron's training loop does it.

``lm loss`` is the mean over the step's tokens in every mode, ``<mode> loss`` the aggregated loss;
both as the single-process losses and the oracle's weights give them.
"""

from __future__ import annotations

import functools
import math
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.host.ranks import run_host_ranks
from tests.host.steps import LENGTHS, batches, deal, sequences
from tests.host.test_gradients import CASES, Case, square_mask, weights_of

pytestmark = pytest.mark.host

D, C, N_MB = 2, 2, 3


class Run(NamedTuple):
    """How the host runs a case."""

    case: Case
    per_token: bool
    loop: str  # train, eval, or "sft eval": an evaluation under --sft

    @property
    def forward_only(self) -> bool:
        return self.loop != "train"


LOOPS = ("train", "eval", "sft eval")
# Under the flag, fractions of `token_mean` are refused: see test_hook.
RUNS = [
    run
    for run in (Run(*values) for values in product(CASES, (False, True), LOOPS))
    if not (run.per_token and run.case == Case("token_mean", fractional=True))
    or run.loop == "sft eval"
]


def step_mean(reports: list[dict[str, Tensor]], key: str) -> float:
    """Of the step, as ``train_step`` (and ``evaluate``) makes it of all microbatches' reports."""
    total = torch.vstack([report[key].view(-1) for report in reports]).sum(dim=0)
    dist.all_reduce(total)  # all ranks are data- or context-parallel ones here
    return float(total[0] / total[1])


def mean_of_means(reports: list[dict[str, Tensor]], key: str) -> float:
    """Of the step, as ``evaluate`` makes it under ``--sft``."""
    pairs = torch.vstack([report[key].view(-1) for report in reports])
    mean = (pairs[:, 0] / pairs[:, 1].clamp(min=1)).mean()
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())


def token_losses() -> dict[bool, list[list[float]]]:
    """One process: the loss of every token by sample, without and with fractional masks."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.build(torch.float64, per_token=False)
    with torch.no_grad():
        return {
            fractional: [gpt.plain_losses(model, s).tolist() for s in sequences(fractional)]
            for fractional in (False, True)
        }


class Logged(NamedTuple):
    """What one run logs."""

    lm_loss: float
    mode_loss: float
    other: list[float]  # the script's own key, as it came back
    gradient_touched: bool


def logged_by_host() -> dict[Run, Logged]:
    """Every rank: what each run logs."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg import LossAggregation
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize(C)
    rank = parallel_state.get_data_parallel_rank()

    def forward_step(data_iterator: Any, model: Any) -> Any:
        losses, loss_func = gpt.forward_step(data_iterator, model)

        def with_another_key(loss_mask: Tensor, output_tensor: Tensor) -> Any:
            loss, num_tokens, report = loss_func.func(loss_mask, output_tensor)
            return loss, num_tokens, {**report, "other": torch.tensor([3.0, 4.0])}

        return losses, functools.partial(with_another_key, *loss_func.args)

    logged = {}
    for per_token in (False, True):
        ddp = gpt.data_parallel(gpt.build(torch.float64, per_token))
        schedule = get_forward_backward_func()
        for run in (r for r in RUNS if r.per_token == per_token):
            case = run.case
            function = square_mask if case.mode == "custom" else None
            hook = LossHook(
                LossAggregation(mode=case.mode, function=function, **dict(case.options)),
                evaluates_by_microbatch=run.loop == "sft eval",
            )
            mean = mean_of_means if run.loop == "sft eval" else step_mean
            data = batches(sequences(case.fractional), deal(len(LENGTHS), D, N_MB)[rank], "thd")
            for buffer in ddp.buffers:
                buffer.grad_data.fill_(1.0)
            with torch.set_grad_enabled(not run.forward_only):
                reports = hook.wrap(schedule)(
                    forward_step_func=forward_step,
                    data_iterator=data,
                    model=[ddp],
                    num_microbatches=N_MB,
                    seq_length=1,
                    micro_batch_size=1,
                    forward_only=run.forward_only,
                )
            logged[run] = Logged(
                mean(reports, "lm loss"),
                mean(reports, f"{case.mode} loss"),
                [report["other"].tolist() for report in reports],
                any(bool((g != 1).any()) for g in gpt.gradient(ddp).values()),
            )
    return logged


@functools.cache
def expected_losses() -> dict[bool, list[list[float]]]:
    return run_host_ranks(token_losses, 1)[0]


@functools.cache
def by_rank() -> list[dict[Run, Logged]]:
    return run_host_ranks(logged_by_host, D * C)


def weighted(weights: list[Any], fractional: bool) -> float:
    """``sum w * loss`` over the step."""
    pairs = zip(weights, expected_losses()[fractional], strict=True)
    return math.fsum(w * x for ws, xs in pairs for w, x in zip(ws, xs, strict=True))


def name_of(run: Run) -> str:
    options = "-".join(str(value) for _, value in run.case.options)
    kind = "fractional" if run.case.fractional else "01"
    flag = "per_token" if run.per_token else "default"
    return f"{run.case.mode}{options}-{kind}-{flag}-{run.loop.replace(' ', '_')}"


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_reports_are_those_of_the_whole_step(run: Run) -> None:
    masks = [s.sample.mask for s in sequences(run.case.fractional)]
    token_mean = weighted(masks, run.case.fractional) / math.fsum(m for mask in masks for m in mask)
    aggregated = weighted(weights_of(run.case, D, N_MB), run.case.fractional)
    for rank in by_rank():
        logged = rank[run]
        assert logged.lm_loss == pytest.approx(token_mean, rel=1e-12)
        assert logged.mode_loss == pytest.approx(aggregated, rel=1e-12)


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_the_rest_is_left_alone(run: Run) -> None:
    for rank in by_rank():
        assert rank[run].other == [[3.0, 4.0]] * N_MB
        assert rank[run].gradient_touched is not run.forward_only
