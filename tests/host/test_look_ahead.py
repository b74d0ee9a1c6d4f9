"""When the hook reads a step's batches ahead: only where the mode needs it, and none is lost."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest

from tests.host.harness import EXACT, run_host_ranks
from tests.host.steps import Counted, aggregation

pytestmark = pytest.mark.host

STEPS, N_MB = 2, Counted.N_MB


class Draw(NamedTuple):
    """An aggregation on a host: how many batches are drawn before the first forward step is done.

    All of a step's where the plan is built from the data; else one, by the forward step itself.
    """

    mode: str
    first: int
    later: int
    layout: str = "bshd"
    per_token: bool = False
    cp: int = 1
    empty: str = "count"
    flat: bool = False  # the loss function's mask is a vector
    loop: bool = True  # Megatron's own training loop, whose microbatches have a fixed size


DRAWS = [
    Draw("token_mean", N_MB, N_MB),
    Draw("rollout_mean", N_MB, N_MB),
    Draw("prompt_mean", N_MB, N_MB),
    Draw("custom", N_MB, N_MB),
    Draw("sum", 1, 1),
    Draw("sum", 1, 1, layout="thd"),
    # The number of samples is known once the first step has shown that each row is one.
    Draw("sample_mean", N_MB, 1),
    Draw("sample_sum", N_MB, 1),
    Draw("constant", N_MB, 1),
    Draw("microbatch_mean", N_MB, 1),
    Draw("sample_mean", N_MB, N_MB, layout="thd"),
    Draw("sample_sum", N_MB, N_MB, layout="thd"),
    Draw("sample_sum", N_MB, N_MB, empty="skip"),
    Draw("microbatch_mean", N_MB, N_MB, empty="skip"),
    Draw("sample_mean", N_MB, 1, flat=True),
    Draw("sample_mean", N_MB, N_MB, loop=False),
    Draw("microbatch_mean", N_MB, N_MB, layout="thd"),
    Draw("constant", N_MB, N_MB, loop=False),
    Draw("sample_sum", N_MB, 1, cp=2),
    Draw("constant", N_MB, 1, cp=2),
    # A part of a row does not know the tokens of the row.
    Draw("sample_mean", N_MB, N_MB, cp=2),
    Draw("microbatch_mean", N_MB, N_MB, cp=2),
    # Under the flag the host divides by the step's tokens: by these alone, or to be undone.
    Draw("token_mean", 1, 1, per_token=True),
    Draw("token_mean", 1, 1, per_token=True, layout="thd"),
    Draw("sample_sum", N_MB, N_MB, per_token=True),
    Draw("sum", N_MB, N_MB, per_token=True),
]


class Drawn(NamedTuple):
    """What one run of `STEPS` steps did with its iterator."""

    first: int
    later: int
    position: int  # of the iterator after the steps
    order: list[int]  # of the batches that the forward steps saw
    difference: float  # of the later step's gradient from the first one's


def drawn_on_host(cp: int) -> dict[Draw, Drawn]:
    from megatron.core import parallel_state

    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt, gradients
    from tests.host.reference import relative_error

    gpt.initialize(cp)
    models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}

    def run(draw: Draw) -> Drawn:
        hook = LossHook(aggregation(draw.mode, empty=draw.empty), in_training_loop=draw.loop)
        data = Counted(parallel_state.get_data_parallel_rank(), draw.layout)
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
        return Drawn(given[0], given[N_MB] - N_MB, data.given, order, difference)

    return {draw: run(draw) for draw in DRAWS if draw.cp == cp}


@functools.cache
def drawn(cp: int) -> dict[Draw, Drawn]:
    return run_host_ranks(drawn_on_host, 2, cp)[0]


def name_of(draw: Draw) -> str:
    flag = "per_token" if draw.per_token else "default"
    mask = "flat" if draw.flat else draw.layout
    return f"{draw.mode}-{draw.empty}-{mask}-cp{draw.cp}-{flag}"


@pytest.mark.parametrize("draw", DRAWS, ids=name_of)
def test_batches_are_read_ahead_only_where_the_mode_needs_them(draw: Draw) -> None:
    found = drawn(draw.cp)[draw]
    assert (found.first, found.later) == (draw.first, draw.later)


@pytest.mark.parametrize("draw", DRAWS, ids=name_of)
def test_no_batch_is_lost_or_given_twice_and_steps_weigh_the_same(draw: Draw) -> None:
    found = drawn(draw.cp)[draw]
    assert found.order == list(range(STEPS * N_MB))
    assert found.position == STEPS * N_MB
    assert found.difference <= EXACT
