"""The audit measures the installed host, and catches one that has moved a factor or a reduction."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg.mcore import Audit, LossHook
from tests.host import gpt, parallel_state
from tests.host.harness import MODELS, TOPOLOGIES, error_of, run_host_ranks
from tests.host.steps import aggregation, batches

STEP = ((0, 1), (2,), (3, 4))
ONE = pytest.approx(1.0, rel=1e-6)
Found = tuple[float | None, str | None]


def audited(model: Any, auditor: Audit | None = None, places: Any = STEP) -> Found:
    """What the audit measures before a step of ``model``, and how the step ends."""
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
    return gpt.data_parallel(gpt.build(torch.float32, per_token, **config or {}), **ddp)


# Hosts that reduce or scale gradients in another way. Each is a patch of the installed host.
def moved_factor(length: int, factor: float) -> Any:
    """A schedule that multiplies a loss returned in a tuple of ``length``."""
    from megatron.core.pipeline_parallel import schedules

    stock = schedules.forward_step_calc_loss

    def broken(model: Any, output: Any, loss_func: Any, *args: Any, **kwargs: Any) -> Any:
        def scaled(output: Any) -> Any:
            loss, *rest = loss_func(output)
            return (loss * factor if len(rest) == length - 1 else loss, *rest)

        return stock(model, output, scaled, *args, **kwargs)

    return mock.patch.object(schedules, "forward_step_calc_loss", broken)


def scaled_gradients(dense: float, experts: float, over_dp: bool = False) -> Any:
    """A DDP that averages over other groups than it should; ``over_dp``: and sums over these."""
    from megatron.core.distributed import distributed_data_parallel

    buffer = distributed_data_parallel._ParamAndGradBuffer
    stock = buffer.__init__

    def moved(self: Any, *args: Any, **kwargs: Any) -> None:
        if over_dp:
            args = (*args[:4], parallel_state.get_data_parallel_group(), *args[5:])
        stock(self, *args, **kwargs)
        of_experts = not getattr(self.params[0], "allreduce", True)
        for bucket in self.buckets:
            bucket.gradient_scaling_factor *= experts if of_experts else dense

    return mock.patch.object(buffer, "__init__", moved)


def no_finalization(model: Any, num_tokens: Any = None, **options: Any) -> None:
    """Leaves gradients as they are."""


def scaling_alone(model: Any, num_tokens: Any = None, **options: Any) -> None:
    """Averages gradients, without a sum: right on the mean only if all ranks have the same."""
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True).size()
    for ddp in model:
        ddp.scale_gradients(1 / ranks if num_tokens is None else 1 / (ranks * num_tokens))


def without_experts(model: Any, num_tokens: Any = None, **options: Any) -> None:
    """Neither averages nor sums the gradients of experts: right if all ranks have the same."""
    for ddp in model:
        ddp.expert_parallel_bucket_groups = []
    gpt.finalize_model_grads(model, num_tokens)


def finalized(finalize: Any) -> Any:
    return mock.patch.dict(gpt.SETTINGS, finalize_model_grads_func=finalize)


def called(name: str) -> str:
    return f"config.finalize_model_grads_func={name} ("


Said = str | None
# By topology: a changed host, and what is said of it without and with the per-token flag.
Hosts = dict[str, tuple[Said, Said, Callable[[], Any]]]
SOUND: Hosts = {"sound": (None, None, contextlib.nullcontext)}


def broken(says: str, patch: Callable[..., Any], *args: Any) -> tuple[Said, Said, Any]:
    return says, says, functools.partial(patch, *args)


HOSTS: dict[str, Hosts] = {
    "dp1": SOUND,
    "dp2": SOUND,
    "cp2": {
        **SOUND,
        # 0.11 lacks the factor of the context-parallel size for a pair that later releases have;
        # 0.12 has it for a triple, too.
        "0.11": ("would be 0.5 times", None, functools.partial(moved_factor, 2, 0.5)),
        "0.12": (None, "would be 2 times", functools.partial(moved_factor, 3, 2)),
    },
    "dp2-cp2": {
        **SOUND,
        "no-op": broken(called("no_finalization"), finalized, no_finalization),
        "no sum": broken(called("scaling_alone"), finalized, scaling_alone),
        "none": broken(called("None"), finalized, None),
        "no CP": broken("with DistributedDataParallel and", scaled_gradients, 2.0, 1.0, True),
        "twice": broken(
            "gradients would be 0.25 times the planned ones", scaled_gradients, 0.25, 1.0
        ),
    },
    # Factors of dense and of experts' gradients: NaN is farther off than any number.
    "ep2-tp2-sp": {
        **SOUND,
        "other experts": broken("would be 2 times", scaled_gradients, 1.0, 2.0),
        "NaN": broken("would be nan times", scaled_gradients, math.nan, 3.0),
        "NaN of experts": broken("would be nan times", scaled_gradients, 1.0, math.nan),
        "unsummed experts": broken(called("without_experts"), finalized, without_experts),
    },
}
# These cannot do with shards of gradients.
UNSHARDED = ("no-op", "no sum", "none", "no CP", "unsummed experts")


def measure_hosts(name: str) -> tuple[dict[tuple[str, bool, bool], Found], str]:
    """On every rank: by host, per-token flag and whether the optimizer is distributed; and what
    is printed.
    """
    topology, found = TOPOLOGIES[name], {}
    gpt.initialize(**topology.sizes)
    config = {**MODELS[topology.model], **topology.config}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for case, per_token, shards in product(HOSTS[name], (False, True), (False, True)):
            if shards and case in UNSHARDED:
                continue
            *_, patch = HOSTS[name][case]
            with patch():
                ddp = built(per_token, config, use_distributed_optimizer=shards)
                found[case, per_token, shards] = audited(ddp, Audit(repeat=True))
    return found, printed.getvalue()


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_is_as_planned_or_stops_every_rank(name: str) -> None:
    ranks = run_host_ranks(measure_hosts, TOPOLOGIES[name].world_size, name)
    for rank, (found, printed) in enumerate(ranks):
        for (case, per_token, _), (measured, error) in found.items():
            said = HOSTS[name][case][per_token]
            assert measured == (ONE if said is None else None), case
            assert error is None if said is None else said in str(error), (case, error)
        factors = re.findall(r"audit: gradients are ([\d.]+) times the planned ones", printed)
        sound = [measured for measured, _ in found.values() if measured is not None]
        assert factors == ([] if rank else ["1.000000"] * len(sound))


def measure_unequal_numbers() -> list[Found]:
    """On every rank of DP 2: by the per-token flag, and by numbers of microbatches on the ranks."""
    gpt.initialize()
    found = []
    for per_token in (False, True):
        auditor = Audit(repeat=True)
        for numbers in NUMBERS:
            auditor.measured = None
            places = ((0,),) * numbers[gpt.data_rank()]
            found.append(audited(built(per_token), auditor, places))
    return found


NUMBERS = [(1, 3), (2, 2), (2, 5), (2, 5), (3, 5), (2, 2)]
NEW = [True, True, True, False, True, False]  # whether some rank has not had this number


def test_ranks_may_have_different_numbers_of_microbatches() -> None:
    for found in run_host_ranks(measure_unequal_numbers, 2):
        assert found == [(ONE if new else None, None) for new in NEW * 2]


def measure_wrappers() -> dict[str, Found]:
    """On every rank: of models in no wrapper that can be measured, and with other arguments."""
    from megatron.core.distributed import DistributedDataParallel
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

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
            assert f" of a {shown} cannot be measured; expected" in str(error)
            assert "--loss-aggregation-unmeasured trust" in str(error)


def test_a_lone_rank_needs_no_wrapper() -> None:
    (found,) = run_host_ranks(measure_wrappers, 1)
    assert found["plain"] == (1.0, None)
    measured, error = found["per token"]
    assert measured is None  # nobody divides by the number of tokens
    assert called("None") in str(error)
