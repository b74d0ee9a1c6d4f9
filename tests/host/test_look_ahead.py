"""The hook reads a step's batches before its first forward pass, and none is lost.

Megatron's check for spiky losses stays in force: its rerun sees the same step again.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import Loop, LossHook
from tests.host.harness import EXACT, run_host_ranks
from tests.host.reference import reference, relative_error
from tests.host.steps import Counted, aggregation, batch_of, sequences, weights_of

pytestmark = pytest.mark.host

STEPS, N_MB = 2, Counted.N_MB


class Draw(NamedTuple):
    """An aggregation on a host."""

    mode: str
    layout: str = "bshd"
    per_token: bool = False
    cp: int = 1
    flat: bool = False  # the loss function's mask is a vector
    loop: bool = True  # Megatron's own training loop


DRAWS = [
    Draw("token_mean"),
    Draw("token_mean", layout="thd", per_token=True),
    Draw("prompt_mean", loop=False),
    Draw("custom"),
    Draw("sum", layout="thd", loop=False),
    Draw("sample_mean", flat=True),
    Draw("constant", cp=2, layout="thd"),
]


def drawn_on_host(cp: int) -> dict[Draw, dict[str, Any]]:
    """Every rank: what each run of `STEPS` steps did with its iterator."""
    from tests.host import gpt, gradients

    gpt.initialize(cp)
    models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}

    def run(draw: Draw) -> dict[str, Any]:
        hook = LossHook(aggregation(draw.mode), loop=Loop(of_megatron=draw.loop))
        data, model = Counted(gpt.data_rank(), draw.layout), models[draw.per_token]
        drawn, order, found = [], [], []

        def forward_step(iterator: Any, model: Any) -> Any:
            batch = next(iterator)
            drawn.append(data.given)
            order.append(batch["number"])
            losses, loss_func = gpt.forward_step(iter([batch]), model)
            (mask,) = loss_func.args
            return losses, functools.partial(loss_func.func, mask.view(-1) if draw.flat else mask)

        for _ in range(STEPS):
            options = {"forward_step_func": forward_step}
            gpt.run_step(hook, model, data, N_MB, Counted.ROWS, **options)
            found.append(gradients.of(model))
        return {"drawn": drawn, "order": order, "difference": relative_error(*found)}

    return {draw: run(draw) for draw in DRAWS if draw.cp == cp}


@pytest.mark.parametrize("cp", [1, 2])
def test_a_step_is_read_before_its_first_forward_pass_and_no_batch_is_lost(cp: int) -> None:
    drawn = run_host_ranks(drawn_on_host, 2, cp)[0]
    assert list(drawn) == [draw for draw in DRAWS if draw.cp == cp]
    for draw, found in drawn.items():
        assert found["drawn"] == [2, 2, 4, 4], draw
        assert found["order"] == list(range(STEPS * N_MB)), draw
        assert found["difference"] <= EXACT, draw


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


def reruns_on_host() -> dict[str, list[Tensor]]:
    """Every rank, DP 2: the gradients of each run of two usual steps and of a spiky one."""
    from megatron.core import rerun_state_machine

    from tests.host import gpt, gradients

    gpt.initialize()
    ddp = gpt.ddp_model()
    validates = rerun_state_machine.RerunMode.VALIDATE_RESULTS
    rerun_state_machine.initialize_rerun_state_machine(mode=validates)
    machine = rerun_state_machine.get_rerun_state_machine()
    data = rerun_state_machine.RerunDataIterator(Counted(gpt.data_rank()))
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
    for rank in run_host_ranks(reruns_on_host, 2):
        assert len(rank["first"]) == len(rank["usual"]) == 1
        first, again = rank["spiky"]
        assert torch.equal(first, again)
        torch.testing.assert_close(first, 1e4 * rank["usual"][0], rtol=1e-10, atol=1e-12)


# Of two steps of one microbatch: samples, and which are rejected; also where nothing else would
# need a look ahead.
REJECTING = (((0, 1), [False, True]), ((2, 4), [True, False]))
MODES = ("sample_mean", "constant", "sum", "token_mean")


def without_rejected(mode: str, choice: str) -> list[Any]:
    """Each step's gradient: rejected samples count, or are left out."""
    found = []
    for places, rejected in REJECTING:
        kept = tuple(i for i, r in zip(places, rejected, strict=True) if not r)
        weights = weights_of(mode, ((places if choice == "count" else kept,),))
        found.append(reference().gradient([(i, w) for i, w in weights if i in kept]))
    return found


def rejecting_on_host(wanted: dict[tuple[str, str], list[Any]]) -> dict[Any, list[float]]:
    """One rank, by mode, choice and per-token flag: every step's gradient error."""
    from tests.host import gpt, gradients

    gpt.initialize()
    found: dict[Any, list[float]] = {}
    for per_token, (mode, choice) in product((False, True), wanted):
        model = gpt.ddp_model(per_token)
        hook = LossHook(aggregation(mode, rejected=choice), loop=Loop(of_megatron=True))
        found[mode, choice, per_token] = errors = []
        for (places, rejected), gradient in zip(REJECTING, wanted[mode, choice], strict=True):
            batch = batch_of([sequences()[i] for i in places], "bshd")
            batch["rejected"] = torch.tensor(rejected)
            gpt.run_step(hook, model, iter([batch]), 1, len(places))
            errors.append(gradients.error(model, gradient))
    return found


def test_rejected_samples_count_or_are_left_out_as_chosen() -> None:
    wanted = {case: without_rejected(*case) for case in product(MODES, ("count", "skip"))}
    (found,) = run_host_ranks(rejecting_on_host, 1, wanted)
    assert len(found) == 2 * len(wanted)
    for case, errors in found.items():
        assert max(errors) <= EXACT, case
