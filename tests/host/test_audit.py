"""The audit measures the installed host, and catches one that has moved a factor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from megatron_loss_agg.mcore.audit import farthest_from_one
from tests.host.ranks import run_host_ranks

pytestmark = pytest.mark.host


def measure(cp: int, microbatches: int, options: dict[str, Any], break_host: str | None) -> Any:
    """On every rank: what the audit measures; or, with a broken host, the texts of two checks."""
    import torch
    from megatron.core.pipeline_parallel import schedules

    from megatron_loss_agg import AggregationError
    from megatron_loss_agg.mcore.audit import Auditor, measured_scale
    from megatron_loss_agg.mcore.hook import _scale_of
    from megatron_loss_agg.mcore.ranks import Ranks
    from tests.host import gpt

    gpt.initialize(cp)
    results = []
    for per_token in (False, True):
        ddp = gpt.data_parallel(gpt.build(torch.float32, per_token), **options)
        kwargs = {"model": [ddp], "num_microbatches": microbatches}
        scale = _scale_of(Ranks.of(), kwargs)
        if break_host is None:
            results.append(measured_scale(ddp, scale))
            continue
        stock = schedules.forward_step_calc_loss
        schedules.forward_step_calc_loss = BROKEN[break_host](stock)
        auditor = Auditor(repeat=False)
        try:
            for _ in range(2):
                try:
                    auditor.check(scale, kwargs)
                    results.append("passed")
                except AggregationError as error:
                    results.append(str(error))
        finally:
            schedules.forward_step_calc_loss = stock
    return results


def moved_factor(length: int, power: int) -> Callable[..., Any]:
    """A schedule that multiplies a loss returned in a tuple of ``length`` by ``c ** power``."""

    def broken(stock: Callable[..., Any]) -> Callable[..., Any]:
        def calc_loss(
            model: Any, output: Any, loss_func: Any, config: Any, *args: Any, **kwargs: Any
        ) -> Any:
            names = ("vp_stage", "collect", "number", "store", "cp_group_size", "last")
            given = {**dict(zip(names, args, strict=False)), **kwargs}

            def scaled(output: Any) -> Any:
                loss, *rest = loss_func(output)
                factor = given["cp_group_size"] ** power if len(rest) == length - 1 else 1
                return (loss * factor, *rest)

            return stock(model, output, scaled, config, *args, **kwargs)

        return calc_loss

    return broken


# Megatron-Core 0.11 lacks the factor of the context-parallel size for a pair that later releases
# have; 0.12 has it for a triple, too.
BROKEN = {"0.11": moved_factor(2, -1), "0.12": moved_factor(3, 1)}


@pytest.mark.parametrize("dp, cp", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("use_distributed_optimizer", [False, True])
def test_this_host_does_what_the_plan_says(
    dp: int, cp: int, use_distributed_optimizer: bool
) -> None:
    options = {"use_distributed_optimizer": use_distributed_optimizer}
    for rank in run_host_ranks(measure, dp * cp, cp, 3, options, None):
        assert rank == pytest.approx([1.0, 1.0], rel=1e-6)


@pytest.mark.parametrize("host, per_token, factor", [("0.11", False, "0.5"), ("0.12", True, "2")])
def test_a_moved_factor_stops_every_rank(host: str, per_token: bool, factor: str) -> None:
    for rank in run_host_ranks(measure, 2, 2, 3, {}, host):
        stopped, passed = (rank[2 * flag : 2 * flag + 2] for flag in (per_token, not per_token))
        assert f"gradients would be {factor} times" in stopped[0]
        assert stopped[1] == stopped[0]  # a loop that goes on all the same is stopped again
        assert passed == ["passed"] * 2


def measure_experts(options: dict[str, Any]) -> list[Any]:
    """On every rank of EP 2 and TP 2: what the audit measures, and what of a host that averages
    experts over the ranks that share them alone.
    """
    import torch
    from megatron.core.distributed import distributed_data_parallel

    from megatron_loss_agg.mcore.audit import measured_scale
    from megatron_loss_agg.mcore.hook import _scale_of
    from megatron_loss_agg.mcore.ranks import Ranks
    from tests.host import gpt

    sizes = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    gpt.initialize(tensor_model_parallel_size=2, **sizes)
    config = {"num_moe_experts": 2, "sequence_parallel": True, "add_bias_linear": False}
    ddp = gpt.data_parallel(gpt.build(torch.float32, False, **config), **options)
    scale = _scale_of(Ranks.of(), {"model": [ddp], "num_microbatches": 3})
    sound = measured_scale(ddp, scale)
    buffer = distributed_data_parallel._ParamAndGradBuffer
    stock = buffer.__init__

    def moved(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if not getattr(self.params[0], "allreduce", True):
            for bucket in self.buckets:
                bucket.gradient_scaling_factor *= 2

    buffer.__init__ = moved
    return [sound, measured_scale(ddp, scale)]


@pytest.mark.parametrize("use_distributed_optimizer", [False, True])
def test_experts_are_measured_too(use_distributed_optimizer: bool) -> None:
    options = {"use_distributed_optimizer": use_distributed_optimizer}
    for rank in run_host_ranks(measure_experts, 4, options):
        assert rank == pytest.approx([1.0, 2.0], rel=1e-6)


@pytest.mark.parametrize("factors", [[1.0, math.nan], [math.nan, 3.0]])
def test_no_number_hides_a_factor_that_is_none(factors: list[float]) -> None:
    assert math.isnan(farthest_from_one(factors))
