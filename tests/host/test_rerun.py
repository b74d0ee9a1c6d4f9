"""Megatron's check for spiky losses stays in force, and its rerun sees the same step again."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host.iterators import N_MB, ROWS, Counted, aggregation
from tests.host.ranks import run_host_ranks

pytestmark = pytest.mark.host


def facts_on_host() -> dict[str, Any]:
    """Every rank, DP 2: a usual step and a spiky one."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import (
        RerunDataIterator,
        RerunMode,
        get_rerun_state_machine,
        initialize_rerun_state_machine,
    )

    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize()
    ddp = gpt.data_parallel(gpt.build(torch.float64, per_token=False))
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    machine = get_rerun_state_machine()
    data = RerunDataIterator(Counted(parallel_state.get_data_parallel_rank()))
    run = LossHook(aggregation("prompt_mean")).wrap(get_forward_backward_func())

    def loss_func(loss_mask: Tensor, output: Tensor) -> Any:
        """As in pretrain_gpt.py under ``--check-for-spiky-loss``."""
        loss, *others = gpt.stock_loss_func(loss_mask, output)
        machine.validate_result(
            result=loss,
            rejection_func=functools.partial(
                machine.is_unexpectedly_large, threshold=100, context="loss", num_samples=1
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
        return loss, *others

    def forward_step(scale: float, iterator: Any, model: Any) -> Any:
        losses, stock = gpt.forward_step(iterator, model)
        return losses * scale, functools.partial(loss_func, *stock.args)

    def step(scale: float) -> list[Tensor]:
        gradients = []
        while machine.should_run_forward_backward(data):
            step_func = functools.partial(forward_step, scale)
            gpt.run_step(run, ddp, data, N_MB, ROWS, forward_step_func=step_func)
            gradients.append(torch.cat([g.view(-1) for g in gpt.gradient(ddp).values()]))
        machine.should_checkpoint_and_exit()
        return gradients

    # Megatron does not judge the first step, and the second tells what is usual.
    return {name: step(scale) for name, scale in (("first", 1), ("usual", 1), ("spiky", 1e4))}


@functools.cache
def facts() -> list[dict[str, Any]]:
    return run_host_ranks(facts_on_host, 2)


def test_a_usual_step_runs_once() -> None:
    for rank in facts():
        assert len(rank["first"]) == len(rank["usual"]) == 1


def test_a_spiky_step_runs_again_on_the_same_batches() -> None:
    for rank in facts():
        first, again = rank["spiky"]
        assert torch.equal(first, again)
        torch.testing.assert_close(first, 1e4 * rank["usual"][0], rtol=1e-10, atol=1e-12)
