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

from megatron_loss_agg.mcore import Audit, Loop, LossHook
from megatron_loss_agg.mcore.extensions import audit
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.splits import Splits
from tests.host.harness import CP2, EP2, TP2, error_of, run_host_ranks
from tests.host.steps import aggregation, batches

pytestmark = pytest.mark.host

PLACES = ((0, 1), (2,), (3, 4))


def audited(model: Any) -> tuple[float | None, str | None]:
    """What the audit prints of a step's gradients, on rank 0, and how the step ends."""
    from tests.host import gpt

    data = batches(PLACES, "thd") if gpt.reads_data() else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        hook = LossHook(aggregation("sum"), extensions=[Audit(repeat=True)])
        error = error_of(gpt.run_step, hook, model, data, len(PLACES))
        if error:  # a loop that goes on all the same is stopped again
            assert error_of(gpt.run_step, hook, model, data, len(PLACES)) == error
    measured = re.search(r"gradients are ([\d.]+) times the planned ones", printed.getvalue())
    return measured and float(measured[1]), error


def checked(model: Any, num_microbatches: int = 3, **options: Any) -> tuple[float | None, Any]:
    """What a new `Audit` measures, and how it ends."""
    auditor = Audit(**options)
    error = error_of(auditor.start, call_of(model, num_microbatches))
    return auditor.measured, error


def call_of(model: Any, num_microbatches: int) -> Call:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    arguments = {"model": [model], "num_microbatches": num_microbatches}
    return Call.of(
        get_forward_backward_func(),
        {**arguments, "forward_step_func": None, "data_iterator": None},
        terms={},
        loop=Loop(),
        settings={},
        extensions=[],
        total=None,
        splits=Splits(),
    )


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


def without_experts(model: Any, num_tokens: Any = None, **options: Any) -> None:
    """Neither averages nor sums the gradients of experts: right if all ranks have the same."""
    from tests.host import gpt

    for ddp in model:
        ddp.expert_parallel_bucket_groups = []
    gpt.SETTINGS["finalize_model_grads_func"](model, num_tokens)


def measure_experts() -> list[Any]:
    """On every rank of EP 2 and TP 2: what the audit measures, and what of `FACTORS`; then a host
    that does not sum the gradients of experts.
    """
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
    model = gpt.data_parallel(gpt.build(torch.float32, **config))
    model.config.finalize_model_grads_func = without_experts
    return [*found, checked(model)]


def test_experts_are_measured_too() -> None:
    for number, (*rank, unreduced) in enumerate(run_host_ranks(measure_experts, 4)):
        assert "finalize_model_grads_func=without_experts" in unreduced[1]
        for sound, *broken in (rank[:4], rank[4:]):
            assert sound == (None if number else pytest.approx(1.0, rel=1e-6), None)
            for (_, error), expected in zip(broken, FACTORS.values(), strict=True):
                assert expected in str(error)


def no_finalization(model: Any, num_tokens: Any = None, **options: Any) -> None:
    """Leaves gradients as they are."""


def scaling_alone(model: Any, num_tokens: Any = None, **options: Any) -> None:
    """Averages gradients, without a sum: right on the mean only if all ranks have the same."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True).size()
    for ddp in model:
        ddp.scale_gradients(1 / ranks if num_tokens is None else 1 / (ranks * num_tokens))


def reduced_without_cp() -> Any:
    """A host whose DDP sums over data-parallel ranks alone, and averages over these."""
    from megatron.core import parallel_state
    from megatron.core.distributed import distributed_data_parallel

    buffer = distributed_data_parallel._ParamAndGradBuffer
    stock = buffer.__init__

    def moved(
        self: Any,
        config: Any,
        param_dtype: Any,
        grad_dtype: Any,
        params: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        stock(
            self,
            config,
            param_dtype,
            grad_dtype,
            params,
            parallel_state.get_data_parallel_group(),
            *args[1:],
            **kwargs,
        )
        for bucket in self.buckets:
            bucket.gradient_scaling_factor *= parallel_state.get_context_parallel_world_size()

    return mock.patch.object(buffer, "__init__", moved)


def measure_reductions() -> dict[str, Any]:
    """On every rank of DP 2 and CP 2, without and with the per-token flag: how checks end."""
    from tests.host import gpt

    gpt.initialize(**CP2)
    hosts: dict[str, tuple[Any, Any]] = {
        "no-op": (no_finalization, contextlib.nullcontext()),
        "no sum": (scaling_alone, contextlib.nullcontext()),
        "no CP": (gpt.SETTINGS["finalize_model_grads_func"], reduced_without_cp()),
        "twice": (gpt.SETTINGS["finalize_model_grads_func"], scaled_gradients(0.25, 1.0)),
        "none": (None, contextlib.nullcontext()),
    }
    found: dict[str, Any] = {}
    for name, (finalize, host) in hosts.items():
        with host:
            found[name] = []
            for per_token in (False, True):
                ddp = gpt.data_parallel(gpt.build(torch.float32, per_token))
                ddp.config.finalize_model_grads_func = finalize
                found[name].append(checked(ddp))
            if finalize is None:
                found["trusted"] = checked(ddp, trust=True)
    return found


def test_a_missing_reduction_is_found_and_its_cause_named() -> None:
    for rank in run_host_ranks(measure_reductions, 4):
        assert rank.pop("trusted") == (None, None)
        for name, said in {
            "no-op": "config.finalize_model_grads_func=no_finalization (",
            "no sum": "config.finalize_model_grads_func=scaling_alone (",
            "no CP": "with DistributedDataParallel and",
            "twice": "gradients would be 0.25 times the planned ones in megatron-core",
            "none": "config.finalize_model_grads_func=None",
        }.items():
            for measured, error in rank.pop(name):
                assert measured is None
                assert said in error
        assert not rank


def measure_unequal_numbers() -> tuple[list[Any], list[bool], list[Any]]:
    """On every rank of DP 2: checks with other numbers of microbatches on each rank; which of
    several calls are measured; and whether training goes the same way.
    """
    from tests.host import gpt

    gpt.initialize()
    rank, ddps = gpt.data_rank(), [gpt.ddp_model(flag, torch.float32) for flag in (False, True)]
    found = [checked(ddp, numbers[rank]) for ddp in ddps for numbers in ((1, 3), (2, 1), (4, 4))]
    auditor, calls = Audit(repeat=True), []
    with mock.patch.object(audit, "measured_factor", wraps=audit.measured_factor) as measure:
        for number in ((2, 2, 2, 3, 2), (2, 5, 5, 5, 2))[rank]:
            measure.reset_mock()
            auditor.start(call_of(ddps[0], number))
            calls.append(measure.called)
    return found, calls, [auditor.measured]


def test_ranks_may_have_different_numbers_of_microbatches() -> None:
    for found, calls, last in run_host_ranks(measure_unequal_numbers, 2):
        assert found == [(pytest.approx(1.0, rel=1e-6), None)] * 6
        assert calls == [True, True, False, True, False]
        assert last == [pytest.approx(1.0, rel=1e-6)]


def measure_unknown_wrappers() -> dict[str, Any]:
    """On every rank: checks of models in no wrapper that can be measured, and with other
    arguments.
    """
    from megatron.core.distributed import DistributedDataParallel
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    from tests.host import gpt

    gpt.initialize()

    class Own(DistributedDataParallel):
        def __init__(self, model: Any) -> None:
            super().__init__(model.config, gpt.data_parallel(model).ddp_config, model)

    models = {"plain": gpt.build(torch.float32), "own": Own(gpt.build(torch.float32))}
    models["torch"] = TorchDDP(gpt.build(torch.float32))
    for model in models.values():
        model.config = gpt.build(torch.float32).config
    models["plain"].config.finalize_model_grads_func = None
    trusted = checked(models["torch"], trust=True)
    return {**{name: checked(model) for name, model in models.items()}, "trusted": trusted}


def test_a_model_that_cannot_be_measured_is_refused_unless_trusted() -> None:
    for rank in run_host_ranks(measure_unknown_wrappers, 2):
        names = {"plain": "GPTModel", "own": "Own", "torch": "DistributedDataParallel"}
        for name, shown in names.items():
            measured, error = rank[name]
            assert measured is None
            assert f"averaging of a {shown} cannot be measured; expected" in error
            assert "--loss-aggregation-unmeasured trust" in error
        assert rank["trusted"] == (None, None)


def measure_alone() -> list[Any]:
    from tests.host import gpt

    gpt.initialize()
    found = []
    for per_token in (False, True):
        model = gpt.build(torch.float32, per_token)
        model.config.finalize_model_grads_func = None
        found.append(checked(model))
    return found


def test_a_lone_rank_needs_no_wrapper() -> None:
    ((plain, (measured, error)),) = run_host_ranks(measure_alone, 1)
    assert plain == (1.0, None)
    assert measured is None  # nobody divides by the number of tokens
    assert "config.finalize_model_grads_func=None" in error
