"""The audit measures the installed host, and catches one that has moved a factor."""

from __future__ import annotations

import contextlib
import io
import math
import re
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_loss_agg.mcore import LossHook
from tests.host.harness import EP2, TP2, error_of, run_host_ranks
from tests.host.steps import aggregation, batches

pytestmark = pytest.mark.host

PLACES = ((0, 1), (2,), (3, 4))


def audited(model: Any) -> tuple[float | None, str | None]:
    """What the audit prints of a step's gradients, on rank 0, and how the step ends."""
    from tests.host import gpt

    data = batches(PLACES, "thd") if gpt.reads_data() else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        hook = LossHook(aggregation("sum"), audit=True)
        error = error_of(gpt.run_step, hook, model, data, len(PLACES))
        if error:  # a loop that goes on all the same is stopped again
            assert error_of(gpt.run_step, hook, model, data, len(PLACES)) == error
    measured = re.search(r"gradients are ([\d.]+) of the planned ones", printed.getvalue())
    return measured and float(measured[1]), error


def measure(cp: int) -> list[tuple[float | None, str | None]]:
    """On every rank, with and without the distributed optimizer and the per-token flag."""
    from tests.host import gpt

    gpt.initialize(cp)
    return [
        audited(
            gpt.data_parallel(gpt.build(torch.float32, per_token), use_distributed_optimizer=shards)
        )
        for shards in (False, True)
        for per_token in (False, True)
    ]


@pytest.mark.parametrize("dp, cp", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_this_host_does_what_the_plan_says(dp: int, cp: int) -> None:
    first, *others = run_host_ranks(measure, dp * cp, cp)
    assert first == [(pytest.approx(1.0, rel=1e-6), None)] * 4
    for rank in others:  # these measure without a word
        assert rank == [(None, None)] * 4


def moved_factor(length: int, power: int) -> Any:
    """A schedule that multiplies a loss returned in a tuple of ``length`` by ``c ** power``."""
    from megatron.core.pipeline_parallel import schedules

    stock = schedules.forward_step_calc_loss

    def broken(model: Any, output: Any, loss_func: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("config", "vp_stage", "collect", "number", "store", "cp_group_size", "last")
        given = {**dict(zip(names, args, strict=False)), **kwargs}

        def scaled(output: Any) -> Any:
            loss, *rest = loss_func(output)
            factor = given["cp_group_size"] ** power if len(rest) == length - 1 else 1
            return (loss * factor, *rest)

        return stock(model, output, scaled, *args, **kwargs)

    return mock.patch.object(schedules, "forward_step_calc_loss", broken)


# Megatron-Core 0.11 lacks the factor of the context-parallel size for a pair that later releases
# have; 0.12 has it for a triple, too: the length of the tuple, the power, and which flag is hit.
BROKEN = {"0.11": (2, -1, False, "0.5"), "0.12": (3, 1, True, "2")}


def measure_broken() -> dict[str, list[str | None]]:
    """On every rank of CP 2: how steps end on each host, without and with the per-token flag."""
    from tests.host import gpt

    gpt.initialize(2)
    found = {}
    for host, (length, power, *_) in BROKEN.items():
        with moved_factor(length, power):
            found[host] = [
                audited(gpt.ddp_model(per_token, torch.float32))[1] for per_token in (False, True)
            ]
    return found


def test_a_moved_factor_stops_every_rank() -> None:
    for rank in run_host_ranks(measure_broken, 2):
        for host, (_, _, per_token, factor) in BROKEN.items():
            assert f"gradients would be {factor} times" in str(rank[host][per_token])
            assert rank[host][not per_token] is None


def scaled_gradients(dense: float, experts: float) -> Any:
    """A host whose DDP averages over other groups than it should."""
    from megatron.core.distributed import distributed_data_parallel

    buffer = distributed_data_parallel._ParamAndGradBuffer
    stock = buffer.__init__

    def moved(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        is_dense = getattr(self.params[0], "allreduce", True)
        for bucket in self.buckets:
            bucket.gradient_scaling_factor *= dense if is_dense else experts

    return mock.patch.object(buffer, "__init__", moved)


# Factors of dense and of experts' gradients, and what is said: NaN is farther off than any number.
FACTORS = {
    (1.0, 2.0): "gradients would be 2 times",
    (1.0, math.nan): "gradients would be nan times",
    (math.nan, 3.0): "gradients would be nan times",
}


def measure_experts() -> list[Any]:
    """On every rank of EP 2 and TP 2: what the audit measures, and what of `FACTORS`."""
    from tests.host import gpt

    gpt.initialize(**TP2, **EP2, expert_tensor_parallel_size=1)
    config = {"num_moe_experts": 2, "sequence_parallel": True, "add_bias_linear": False}
    found = []
    for shards in (False, True):
        options = {"use_distributed_optimizer": shards}
        model = gpt.data_parallel(gpt.build(torch.float32, **config), **options)
        found.append(audited(model))
        for factors in FACTORS:
            with scaled_gradients(*factors):
                found.append(audited(model))
    return found


def test_experts_are_measured_too() -> None:
    for number, rank in enumerate(run_host_ranks(measure_experts, 4)):
        for sound, *broken in (rank[:4], rank[4:]):
            assert sound == (None if number else pytest.approx(1.0, rel=1e-6), None)
            for (_, error), expected in zip(broken, FACTORS.values(), strict=True):
                assert expected in str(error)
