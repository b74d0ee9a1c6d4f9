"""Megatron's scaling is measured before the first step: a moved factor or reduction is refused."""

from __future__ import annotations

import contextlib
import functools
import io
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_loss_agg.mcore import LossHook
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.checks.scaling import measured_factor, model_wrapper
from megatron_loss_agg.mcore.scale import MegatronScale
from tests.host import gpt, parallel_state
from tests.host.harness import MODELS, TOPOLOGIES, error_of, on_ranks_of
from tests.host.refusals import assert_says
from tests.host.steps import aggregation, batches

STEP = ((0, 1), (2,), (3, 4))
AUDIT = """\
loss aggregation audit: gradients are 1.000000 times the planned ones
  of:       {} on this rank of 2 data-parallel ranks
  Megatron: {}
"""
# By whether --calculate-per-token-loss is on.
OF_MEGATRON = (
    "averages over microbatches and data-parallel ranks",
    "divides by the tokens of the step (--calculate-per-token-loss)",
)
ONE = pytest.approx(1.0, rel=1e-6)
Found = tuple[float | None, str | None]


def hook_with(**options: Any) -> LossHook:
    return LossHook(aggregation("sum"), **options)


def step_of(hook: LossHook, model: Any, places: Any = STEP) -> Found:
    """The measurement before a step of ``model``, and the end of the step."""
    hook.verified.factor = None
    data, wrapped = batches(places, "thd"), hasattr(model, "zero_grad_buffer")
    given = data if gpt.reads_data() else None
    error = error_of(gpt.run_step, hook, model, given, len(places), zero_grad=wrapped)
    return hook.verified.factor, error


def first_step_of(model: Any, **options: Any) -> Found:
    hook = hook_with(**options)
    measured, error = step_of(hook, model)
    if error is not None:
        assert step_of(hook, model) == (measured, error)  # a loop that goes on is stopped again
    return measured, error


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


def doubling_on_one_rank(model: Any, num_tokens: Any = None, **options: Any) -> None:
    gpt.finalize_model_grads(model, num_tokens)
    if torch.distributed.get_rank() == 1:
        for ddp in model:
            ddp.scale_gradients(2.0)


def finalized(finalize: Any) -> Any:
    return mock.patch.dict(gpt.SETTINGS, finalize_model_grads_func=finalize)


PLANNED = "gradients must be the planned ones"


def called(name: str) -> str:
    return f"HostError: {PLANNED} ... config.finalize_model_grads_func={name} ("


def times(factor: str) -> str:
    return f"HostError: {PLANNED}, got {factor} times those in megatron-core"


# By topology: a changed host, and what is said of it without and with the per-token flag.
Host = tuple[str, str, Callable[[], Any]]


def broken(says: str, patch: Callable[..., Any], *args: Any) -> Host:
    return says, says, functools.partial(patch, *args)


NO_CP = f"HostError: {PLANNED} ... with DistributedDataParallel and"
HOSTS: dict[str, dict[str, Host]] = {
    "dp1": {},
    "cp2": {
        # 0.11 lacks the factor of the context-parallel size for a pair that later releases have;
        # 0.12 has it for a triple, too.
        "0.11": (times("0.5"), "", functools.partial(moved_factor, 2, 0.5)),
        "0.12": ("", times("2"), functools.partial(moved_factor, 3, 2)),
    },
    "dp2-cp2": {
        "no sum": broken(called("scaling_alone"), finalized, scaling_alone),
        "none": broken(called("None"), finalized, None),
        "one rank": broken(called("doubling_on_one_rank"), finalized, doubling_on_one_rank),
        "no CP": broken(NO_CP, scaled_gradients, 2.0, 1.0, True),
    },
    # Factors of dense and of experts' gradients: NaN is farther off than any number.
    "ep2-tp2-sp": {
        "other experts": broken(times("2"), scaled_gradients, 1.0, 2.0),
        "NaN": broken(times("nan"), scaled_gradients, math.nan, 3.0),
        # Which ranks hear of from their tensor-parallel neighbours alone.
        "one rank": broken(called("doubling_on_one_rank"), finalized, doubling_on_one_rank),
        "unsummed experts": broken(called("without_experts"), finalized, without_experts),
    },
}
SOUND: dict[str, Host] = {"sound": ("", "", contextlib.nullcontext)}


@on_ranks_of(*HOSTS)
def test_a_host_is_as_planned_or_stops_every_rank(name: str) -> None:
    """The sound one with shards of gradients, too."""
    config = {**MODELS[TOPOLOGIES[name].model], **TOPOLOGIES[name].config}
    for case, (*of_flags, patch) in (SOUND | HOSTS[name]).items():
        for per_token, says in enumerate(of_flags):
            for sharded in (False, True) if case in SOUND else (False,):
                with patch():
                    ddp = built(bool(per_token), config, use_distributed_optimizer=sharded)
                    # Trust is for what cannot be measured.
                    trust = {"trust_unmeasured": case != "none"}
                    measured, error = first_step_of(ddp, **trust)
                assert measured == (None if says else ONE), case
                assert_says(error, says)


def _measured(model: Any) -> Any:
    arguments = {"model": model, "num_microbatches": 1}
    arguments |= dict.fromkeys(("forward_step_func", "data_iterator"))
    call = Call.of(arguments, {}, "zigzag")
    wrap = model_wrapper(call)
    assert wrap is not None
    return measured_factor(call, wrap)


@on_ranks_of("ep2-tp2-sp")
def test_experts_of_any_model_chunk_are_measured(name: str) -> None:
    config = {**MODELS["moe"], **TOPOLOGIES[name].config}
    with finalized(without_experts):
        chunks = [built(config=config), built(config=config)]
    for parameter in chunks[-1].parameters():
        parameter.allreduce = True  # as Megatron marks those of layers without experts
    assert _measured(chunks) != ONE


@on_ranks_of("dp1")
def test_measuring_is_no_iteration_for_the_stash_of_experts(name: str) -> None:
    model = built()
    if not hasattr(model.config, "moe_paged_stash"):
        return  # newer than this Megatron
    from megatron.core.transformer.moe.paged_stash import PagedStashManager

    model.config.moe_paged_stash = True
    before = PagedStashManager.get_instance().iteration
    assert _measured(model) == ONE
    assert PagedStashManager.get_instance().iteration == before


def test_a_patched_megatron_that_only_adds_up_needs_no_factor() -> None:
    for per_token, factor in ((False, 1.0), (True, 100.0)):  # the flag divides in any case
        assert MegatronScale(3, 2, per_token, normalized=True).inverse(100) == factor


# By step, microbatches on two ranks; and whether some rank has not had this number.
NUMBERS = [((1, 3), True), ((2, 5), True), ((2, 5), False), ((3, 5), True), ((1, 3), False)]


@on_ranks_of("dp2")
def test_ranks_may_have_different_numbers_of_microbatches(name: str) -> None:
    for per_token in (False, True):
        hook, model = hook_with(audit=True), built(per_token)
        for numbers, is_new in NUMBERS:
            places = ((0,),) * numbers[gpt.data_rank()]
            with contextlib.redirect_stdout(io.StringIO()) as output:
                assert step_of(hook, model, places) == (ONE if is_new else None, None)
            number = f"{numbers[0]} microbatch{'es' if numbers[0] > 1 else ''}"
            said = AUDIT.format(number, OF_MEGATRON[per_token])
            assert output.getvalue().startswith(said) == (is_new and gpt.data_rank() == 0)
            assert output.getvalue().count("audit") == (is_new and gpt.data_rank() == 0)


@on_ranks_of("dp2")
def test_without_the_audit_the_first_step_of_each_model_is_measured_alone(name: str) -> None:
    hook = hook_with()
    for model in (built(), built(True)):
        measured = [step_of(hook, model, STEP[:n]) for n in (2, 3, 2)]
        assert measured == [(ONE, None), (None, None), (None, None)]


@on_ranks_of("dp1")
def test_a_division_by_tokens_that_lacks_shows_in_a_lone_microbatch(name: str) -> None:
    model = gpt.build(torch.float32, per_token=True)
    model.config.finalize_model_grads_func = None
    measured, error = step_of(hook_with(), model, STEP[:1])
    assert measured is None
    assert_says(error, called("None"))


def own_ddp(model: Any) -> Any:
    """In a subclass that has other arguments."""
    from megatron.core.distributed import DistributedDataParallel

    class Own(DistributedDataParallel):
        def __init__(self) -> None:
            super().__init__(model.config, gpt.data_parallel(model).ddp_config, model)

    return Own()


def torch_ddp(model: Any) -> Any:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped.config = model.config
    return wrapped


def bare(model: Any) -> Any:
    return model


def cannot(name: str) -> str:
    return (
        f"HostError: must be measured before the first step, but for a {name} it cannot be ... "
        "choose LossHook(trust_unmeasured=True) (--loss-aggregation-unmeasured trust)"
    )


# Of models without Megatron's function, or in no wrapper of its own: wrapper, per-token flag, and
# whether they are trusted; what is measured, and what is said.
UNKNOWN: dict[str, list[tuple[Callable[[Any], Any], bool, bool, float | None, str]]] = {
    "dp2": [
        (bare, False, False, None, cannot("GPTModel")),
        (own_ddp, False, False, None, cannot("Own")),
        (torch_ddp, False, False, None, cannot("DistributedDataParallel")),
        (torch_ddp, False, True, None, ""),
        (lambda model: gpt.data_parallel(model), False, True, None, ""),
    ],
    # Alone, a rank needs no wrapper; but with the flag somebody must divide by the tokens.
    "dp1": [
        (bare, False, False, 1.0, ""),
        (bare, True, False, None, called("None")),
    ],
}


@on_ranks_of(*UNKNOWN)
def test_a_model_that_cannot_be_measured_is_refused_unless_trusted(name: str) -> None:
    for wrap, per_token, trust, wanted, says in UNKNOWN[name]:
        model = gpt.build(torch.float32, per_token)
        model.config.finalize_model_grads_func = None
        measured, error = first_step_of(wrap(model), trust_unmeasured=trust)
        assert measured == wanted
        assert_says(error, says)
