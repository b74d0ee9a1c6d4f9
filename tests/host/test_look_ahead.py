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

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import Loop, LossHook
from tests.host.harness import EXACT, error_of, run_host_ranks
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
    empty: str = "count"
    flat: bool = False  # the loss function's mask is a vector
    loop: bool = True  # Megatron's own training loop


DRAWS = [
    Draw("token_mean"),
    Draw("token_mean", layout="thd", per_token=True),
    Draw("rollout_mean"),
    Draw("prompt_mean", loop=False),
    Draw("custom"),
    Draw("sum", layout="thd"),
    Draw("sum", per_token=True),
    Draw("sample_mean", flat=True),
    Draw("sample_mean", cp=2),
    Draw("sample_sum", empty="skip"),
    Draw("constant", loop=False),
    Draw("constant", cp=2, layout="thd"),
    Draw("microbatch_mean"),
]


def drawn_on_host(cp: int) -> dict[Draw, dict[str, Any]]:
    """Every rank: what each run of `STEPS` steps did with its iterator."""
    from tests.host import gpt, gradients

    gpt.initialize(cp)
    models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}

    def run(draw: Draw) -> dict[str, Any]:
        hook = LossHook(aggregation(draw.mode, empty=draw.empty), loop=Loop(of_megatron=draw.loop))
        data = Counted(gpt.data_rank(), draw.layout)
        given: list[int] = []
        order: list[int] = []

        def forward_step(iterator: Any, model: Any) -> Any:
            batch = next(iterator)
            given.append(data.given)
            order.append(batch["number"])
            losses, loss_func = gpt.forward_step(iter([batch]), model)
            (mask,) = loss_func.args
            return losses, functools.partial(loss_func.func, mask.view(-1) if draw.flat else mask)

        found = []
        for _ in range(STEPS):
            options = {"forward_step_func": forward_step}
            gpt.run_step(hook, models[draw.per_token], data, N_MB, Counted.ROWS, **options)
            found.append(gradients.of(models[draw.per_token]))
        difference = relative_error(found[1], found[0])
        at_first_forward = given[0], given[N_MB] - N_MB  # of each step
        drawn = at_first_forward, data.given
        return {"drawn": drawn, "order": order, "difference": difference}

    return {draw: run(draw) for draw in DRAWS if draw.cp == cp}


@pytest.mark.parametrize("cp", [1, 2])
def test_a_step_is_read_before_its_first_forward_pass_and_no_batch_is_lost(cp: int) -> None:
    drawn = run_host_ranks(drawn_on_host, 2, cp)[0]
    assert list(drawn) == [draw for draw in DRAWS if draw.cp == cp]
    for draw, found in drawn.items():
        assert found["drawn"] == ((N_MB, N_MB), STEPS * N_MB), draw
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
    for rank in run_host_ranks(reruns_on_host, 2):
        assert len(rank["first"]) == len(rank["usual"]) == 1
        first, again = rank["spiky"]
        assert torch.equal(first, again)
        torch.testing.assert_close(first, 1e4 * rank["usual"][0], rtol=1e-10, atol=1e-12)


# Rejected samples, also in steps that would need no look-ahead if nothing were rejected.
REJECTING_MODES = ("sample_mean", "constant", "sum", "token_mean")
REJECTING = ((0, 1), (2, 4))  # samples of each step, one microbatch
REJECTED = ([False, True], [True, False])


def wanted(choice: str | None, mode: str) -> list[Any]:
    """Each step's gradient: rejected samples count, or are left out."""
    found = []
    for places, rejected in zip(REJECTING, REJECTED, strict=True):
        kept = [i for i, r in zip(places, rejected, strict=True) if not r]
        counted = places if choice == "count" else tuple(kept)
        weights = weights_of(mode, ((counted,),))
        found.append(reference().gradient([(i, w) for i, w in weights if i in kept]))
    return found


def rejecting_steps(choice: str | None, expected: dict[str, list[Any]]) -> dict[Any, Any]:
    """One rank, for each (mode, per-token flag): every step's gradient error, or what it says."""
    from tests.host import gpt, gradients

    gpt.initialize()
    answers: dict[Any, Any] = {}
    for per_token, mode in product((False, True), REJECTING_MODES):
        model = gpt.ddp_model(per_token)
        hook = LossHook(aggregation(mode, rejected=choice), loop=Loop(of_megatron=True))
        answers[mode, per_token] = found = []
        for step, (places, rejected) in enumerate(zip(REJECTING, REJECTED, strict=True)):
            batch = batch_of([sequences()[i] for i in places], "bshd")
            if choice is not None or step == 1:
                batch["rejected"] = torch.tensor(rejected)
            error = error_of(gpt.run_step, hook, model, iter([batch]), 1, len(places))
            found.append(error or gradients.error(model, expected[mode][step]))
    return answers


def answers(choice: str | None) -> dict[Any, Any]:
    expected = {mode: wanted(choice, mode) for mode in REJECTING_MODES}
    (found,) = run_host_ranks(rejecting_steps, 1, choice, expected)
    assert len(found) == 2 * len(REJECTING_MODES)
    return found


@pytest.mark.parametrize("choice", ["count", "skip"])
def test_steps_with_rejected_samples_are_exact(choice: str) -> None:
    for case, errors in answers(choice).items():
        assert len(errors) == len(REJECTING) and max(errors) <= EXACT, case


def test_without_a_choice_rejected_samples_are_an_error_in_every_mode() -> None:
    # The first step has no rejected samples, and later ones may not be read ahead any more.
    for case, (first, later) in answers(None).items():
        assert isinstance(first, float)
        assert "expected LossAggregation(rejected='count')" in later, case


# The second and the third are one dictionary, which a reader has written to by then.
REPEATED = ((0,), (3,), (3,), (1, 2))


def masked_by_reader(batch: dict[str, Tensor]) -> Microbatch:
    """Writes the mask, and adds a key."""
    mask = batch["loss_mask"].copy_(batch["given"])
    batch["read"] = mask.clone()
    return Microbatch(mask)


def repeated_on_host(expected: Tensor) -> list[float]:
    """One rank: the error of the gradient of each of two steps."""
    from tests.host import gpt, gradients

    gpt.initialize()
    model = gpt.ddp_model()
    hook = LossHook(aggregation("sample_mean"), read_batch=masked_by_reader)
    errors = []
    for _ in range(2):
        batches = {rows: batch_of([sequences()[i] for i in rows], "bshd") for rows in REPEATED}
        for batch in batches.values():
            batch["given"] = batch["loss_mask"].clone()
            batch["loss_mask"].zero_()
        gpt.run_step(hook, model, iter([batches[rows] for rows in REPEATED]), len(REPEATED))
        errors.append(gradients.error(model, expected))
    return errors


def test_a_reader_may_write_into_a_batch_that_comes_twice_in_a_step() -> None:
    expected = reference().gradient(weights_of("sample_mean", (REPEATED,)))
    (errors,) = run_host_ranks(repeated_on_host, 1, expected)
    assert len(errors) == 2 and max(errors) <= EXACT
