"""The hook reads a step's batches before its first forward pass, and none is lost."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest

from megatron_loss_agg.mcore import LossHook
from tests.host.harness import EXACT, run_host_ranks
from tests.host.reference import relative_error
from tests.host.steps import Counted, aggregation

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
        hook = LossHook(aggregation(draw.mode, empty=draw.empty), in_training_loop=draw.loop)
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
        return {
            "drawn": (at_first_forward, data.given),
            "order": order,
            "difference": difference,
        }

    return {draw: run(draw) for draw in DRAWS if draw.cp == cp}


@pytest.mark.parametrize("cp", [1, 2])
def test_a_step_is_read_before_its_first_forward_pass_and_no_batch_is_lost(cp: int) -> None:
    drawn = run_host_ranks(drawn_on_host, 2, cp)[0]
    assert list(drawn) == [draw for draw in DRAWS if draw.cp == cp]
    for draw, found in drawn.items():
        assert found["drawn"] == ((N_MB, N_MB), STEPS * N_MB), draw
        assert found["order"] == list(range(STEPS * N_MB)), draw
        assert found["difference"] <= EXACT, draw
