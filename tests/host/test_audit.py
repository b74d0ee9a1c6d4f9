"""The audit measures the installed host, and catches one that has moved a factor or a reduction."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg.mcore import Audit, LossHook
from tests.host.harness import CP2, EP2, MODELS, TP2, error_of, run_host_ranks
from tests.host.steps import aggregation, batches

pytestmark = pytest.mark.host

PLACES = ((0, 1), (2,), (3, 4))
ONE = pytest.approx(1.0, rel=1e-6)
Found = tuple[float | None, str | None]


def audited(model: Any, auditor: Audit | None = None, places: Any = PLACES) -> Found:
    """What the audit measures before a step of ``model``, and how the step ends."""
    from tests.host import gpt

    auditor = auditor or Audit()
    hook = LossHook(aggregation("sum"), extensions=[auditor])

    def step() -> str | None:
        data, wrapped = batches(places, "thd"), hasattr(model, "zero_grad_buffer")
        given = data if gpt.reads_data() else None
        return error_of(gpt.run_step, hook, model, given, len(places), zero_grad=wrapped)

    error = step()
    assert error is None or step() == error  # a loop that goes on all the same is stopped again
    return auditor.measured, error


def built(per_token: bool = False, config: dict[str, Any] | None = None, **ddp: Any) -> Any:
    from tests.host import gpt

    return gpt.data_parallel(gpt.build(torch.float32, per_token, **config or {}), **ddp)


def measure(cp: int) -> tuple[list[Found], str]:
    """On every rank, with and without the distributed optimizer and the per-token flag."""
    from tests.host import gpt

    gpt.initialize(cp)
    flags = [(shards, per_token) for shards in (False, True) for per_token in (False, True)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = [
            audited(built(per_token, use_distributed_optimizer=shards), Audit(repeat=True))
            for shards, per_token in flags
        ]
    return found, printed.getvalue()


@pytest.mark.parametrize("dp, cp", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_this_host_does_what_the_plan_says(dp: int, cp: int) -> None:
    for rank, (found, printed) in enumerate(run_host_ranks(measure, dp * cp, cp)):
        assert found == [(ONE, None)] * 4
        said = re.findall(r"audit: gradients are ([\d.]+) times the planned ones", printed)
        assert said == ([] if rank else ["1.000000"] * 4)


# Hosts that reduce or scale gradients in another way. Each is a patch of the installed host.


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


def changed_buffers(change: Callable[[Any, list[Any]], None], over_dp: bool = False) -> Any:
    """A DDP whose buckets are changed; ``over_dp``: which sums over data-parallel ranks alone."""
    from megatron.core import parallel_state
    from megatron.core.distributed import distributed_data_parallel

    buffer = distributed_data_parallel._ParamAndGradBuffer
    stock = buffer.__init__

    def moved(self: Any, *args: Any, **kwargs: Any) -> None:
        if over_dp:
            args = (*args[:4], parallel_state.get_data_parallel_group(), *args[5:])
        stock(self, *args, **kwargs)
        for bucket in self.buckets:
            change(bucket, self.params)

    return mock.patch.object(buffer, "__init__", moved)


def scaled_gradients(dense: float, experts: float) -> Any:
    """As if DDP averaged over other groups than it should."""

    def change(bucket: Any, params: list[Any]) -> None:
        of_experts = not getattr(params[0], "allreduce", True)
        bucket.gradient_scaling_factor *= experts if of_experts else dense

    return changed_buffers(change)


def reduced_without_cp() -> Any:
    def change(bucket: Any, params: list[Any]) -> None:
        bucket.gradient_scaling_factor *= 2

    return changed_buffers(change, over_dp=True)


def no_finalization(model: Any, num_tokens: Any = None, **options: Any) -> None:
    """Leaves gradients as they are."""


def scaling_alone(model: Any, num_tokens: Any = None, **options: Any) -> None:
    """Averages gradients, without a sum: right on the mean only if all ranks have the same."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True).size()
    for ddp in model:
        ddp.scale_gradients(1 / ranks if num_tokens is None else 1 / (ranks * num_tokens))


def without_experts(model: Any, num_tokens: Any = None, **options: Any) -> None:
    """Neither averages nor sums the gradients of experts: right if all ranks have the same."""
    from tests.host import gpt

    for ddp in model:
        ddp.expert_parallel_bucket_groups = []
    gpt.SETTINGS["finalize_model_grads_func"](model, num_tokens)


STOCK = object()
Host = tuple[Callable[[], Any], Any, dict[bool, str | None]]


def host(patch: Any, finalize: Any, *said: str | None) -> Host:
    """A host, and what is said of it without and with the per-token flag."""
    return patch, finalize, dict(zip((False, True), said * (3 - len(said)), strict=True))


def called(name: str) -> str:
    return f"config.finalize_model_grads_func={name}"


as_it_is = contextlib.nullcontext
HOSTS: dict[str, tuple[int, dict[str, int], dict[str, Host]]] = {
    "cp2": (
        2,
        CP2,
        {
            # 0.11 lacks the factor of the context-parallel size for a pair that later releases
            # have; 0.12 has it for a triple, too.
            "0.11": host(functools.partial(moved_factor, 2, -1), STOCK, "would be 0.5 times", None),
            "0.12": host(functools.partial(moved_factor, 3, 1), STOCK, None, "would be 2 times"),
        },
    ),
    "dp2-cp2": (
        4,
        CP2,
        {
            "no-op": host(as_it_is, no_finalization, called("no_finalization (")),
            "no sum": host(as_it_is, scaling_alone, called("scaling_alone (")),
            "no CP": host(reduced_without_cp, STOCK, "with DistributedDataParallel and"),
            "twice": host(
                functools.partial(scaled_gradients, 0.25, 1.0),
                STOCK,
                "gradients would be 0.25 times the planned ones, at least on some rank",
            ),
            "none": host(as_it_is, None, called("None")),
        },
    ),
    # Factors of dense and of experts' gradients: NaN is farther off than any number.
    "ep2-tp2-sp": (
        4,
        {**TP2, **EP2, "expert_tensor_parallel_size": 1},
        {
            "sound": host(as_it_is, STOCK, None),
            **{
                f"{dense}, {experts}": host(
                    functools.partial(scaled_gradients, dense, experts), STOCK, f"be {said} times"
                )
                for dense, experts, said in ((1, 2, 2), (1, math.nan, "nan"), (math.nan, 3, "nan"))
            },
            "unsummed experts": host(as_it_is, without_experts, called("without_experts")),
        },
    ),
}


def measure_hosts(name: str) -> dict[tuple[str, bool, bool], Found]:
    """On every rank: by host, per-token flag, and whether the optimizer is distributed."""
    from tests.host import gpt

    _, sizes, hosts = HOSTS[name]
    gpt.initialize(**sizes)
    moe = "num_moe_experts" if "ep2" in name else None
    config = {**MODELS["moe"], "sequence_parallel": True} if moe else {}
    found = {}
    for case, (patch, finalize, said) in hosts.items():
        for per_token in said:
            for shards in (False, True) if finalize is STOCK and case != "no CP" else (False,):
                with patch():
                    ddp = built(per_token, config, use_distributed_optimizer=shards)
                    if finalize is not STOCK:
                        ddp.config.finalize_model_grads_func = finalize
                    found[case, per_token, shards] = audited(ddp)
    return found


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_that_scales_or_reduces_otherwise_stops_every_rank(name: str) -> None:
    world_size, _, hosts = HOSTS[name]
    for rank in run_host_ranks(measure_hosts, world_size, name):
        for (case, per_token, _), (measured, error) in rank.items():
            said = hosts[case][2][per_token]
            assert measured == (ONE if said is None else None), case
            assert error is None if said is None else said in str(error), (case, error)


def measure_unequal_numbers() -> tuple[list[Found], list[bool]]:
    """On every rank of DP 2: with other numbers of microbatches on each; and which calls of one
    audit are measured.
    """
    from tests.host import gpt

    gpt.initialize()
    rank = gpt.data_rank()

    def step(number: int, per_token: bool = False, auditor: Audit | None = None) -> Found:
        return audited(built(per_token), auditor, ((0,),) * number)

    found = [
        step(numbers[rank], per_token)
        for per_token in (False, True)
        for numbers in ((1, 3), (2, 1), (4, 4))
    ]
    auditor, measured = Audit(repeat=True), []
    for number in ((2, 2, 2, 3, 2), (2, 5, 5, 5, 2))[rank]:
        auditor.measured = None
        measured.append(step(number, auditor=auditor)[0] is not None)
    return found, measured


def test_ranks_may_have_different_numbers_of_microbatches() -> None:
    for found, measured in run_host_ranks(measure_unequal_numbers, 2):
        assert found == [(ONE, None)] * 6
        assert measured == [True, True, False, True, False]


def measure_wrappers() -> dict[str, Found]:
    """On every rank: of models in no wrapper that can be measured, and with other arguments."""
    from megatron.core.distributed import DistributedDataParallel
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    from tests.host import gpt

    gpt.initialize()
    trust = functools.partial(Audit, trust=True)

    class Own(DistributedDataParallel):
        def __init__(self, model: Any) -> None:
            super().__init__(model.config, gpt.data_parallel(model).ddp_config, model)

    def wrapped(wrapper: Callable[[Any], Any], auditor: Any = Audit, finalize: Any = None) -> Found:
        model = gpt.build(torch.float32)
        model.config.finalize_model_grads_func = finalize
        config, model = model.config, wrapper(model)
        model.config = config
        return audited(model, auditor())

    if dist.get_world_size() == 1:
        plain = gpt.build(torch.float32, per_token=True)
        plain.config.finalize_model_grads_func = None
        return {"plain": wrapped(lambda x: x), "per token": audited(plain)}
    return {
        "GPTModel": wrapped(lambda x: x),
        "Own": wrapped(Own),
        "DistributedDataParallel": wrapped(TorchDDP),
        "trusted": wrapped(TorchDDP, trust),
        "trusted, no function": wrapped(gpt.data_parallel, trust),
    }


def test_a_model_that_cannot_be_measured_is_refused_unless_trusted() -> None:
    for rank in run_host_ranks(measure_wrappers, 2):
        assert rank.pop("trusted") == rank.pop("trusted, no function") == (None, None)
        for shown, (measured, error) in rank.items():
            assert measured is None
            assert f"ranks of a {shown} cannot be measured; expected" in str(error)
            assert "--loss-aggregation-unmeasured trust" in str(error)


def test_a_lone_rank_needs_no_wrapper() -> None:
    (found,) = run_host_ranks(measure_wrappers, 1)
    assert found["plain"] == (1.0, None)
    measured, error = found["per token"]
    assert measured is None  # nobody divides by the number of tokens
    assert called("None") in str(error)


def log_of_a_step() -> tuple[list[str], list[str]]:
    """Who logs while the probe runs, and when a wrapper is made afterwards."""
    from tests.host import gpt

    gpt.initialize()
    model, records = gpt.ddp_model(), []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.name)  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    assert audited(model) == (1.0, None)
    during = list(records)
    gpt.ddp_model()
    return during, records


def test_the_probe_logs_nothing() -> None:
    ((during, afterwards),) = run_host_ranks(log_of_a_step, 1)
    assert during == []
    assert any(name.startswith("megatron.core.distributed") for name in afterwards)
