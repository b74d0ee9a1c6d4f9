"""Megatron's check for spiky losses stays in force, and its rerun sees the same step again."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import LossHook
from tests.host.harness import run_host_ranks
from tests.host.steps import Counted, aggregation

pytestmark = pytest.mark.host


def judged_loss(loss_mask: Tensor, output: Tensor) -> Any:
    """As in pretrain_gpt.py under ``--check-for-spiky-loss``."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    from tests.host import gpt

    machine = get_rerun_state_machine()
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


def gradients_on_host() -> dict[str, list[Tensor]]:
    """Every rank, DP 2: the gradients of each run of two usual steps and of a spiky one."""
    from megatron.core import rerun_state_machine

    from tests.host import gpt, gradients

    gpt.initialize()
    ddp = gpt.ddp_model()
    validates = rerun_state_machine.RerunMode.VALIDATE_RESULTS
    rerun_state_machine.initialize_rerun_state_machine(mode=validates)
    machine = rerun_state_machine.get_rerun_state_machine()
    source = Counted(gpt.data_rank())
    data = rerun_state_machine.RerunDataIterator(source)
    hook = LossHook(aggregation("prompt_mean"))

    def step(scale: float) -> list[Tensor]:
        def forward_step(iterator: Any, model: Any) -> Any:
            losses, stock = gpt.forward_step(iterator, model)
            return losses * scale, functools.partial(judged_loss, *stock.args)

        found = []
        while machine.should_run_forward_backward(data):
            options = {"forward_step_func": forward_step}
            gpt.run_step(hook, ddp, data, Counted.N_MB, Counted.ROWS, **options)
            found.append(gradients.flat(ddp))
        machine.should_checkpoint_and_exit()
        return found

    # Megatron does not judge the first step, and the second tells what is usual.
    return {name: step(scale) for name, scale in (("first", 1), ("usual", 1), ("spiky", 1e4))}


def test_a_spiky_step_and_only_that_runs_again_on_the_same_batches() -> None:
    for rank in run_host_ranks(gradients_on_host, 2):
        assert len(rank["first"]) == len(rank["usual"]) == 1
        first, again = rank["spiky"]
        assert torch.equal(first, again)
        torch.testing.assert_close(first, 1e4 * rank["usual"][0], rtol=1e-10, atol=1e-12)
