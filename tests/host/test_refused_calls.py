"""Calls, schedules and settings that would not be exact are refused by name, on every rank."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import Microbatch, Term
from megatron_loss_agg.mcore import (
    Agreement,
    Audit,
    DatasetReports,
    Loop,
    LossHook,
    MultiTokenPrediction,
    RouterLosses,
    read_batch,
    read_samples,
)
from tests.host import scripts
from tests.host.harness import TOPOLOGIES, error_of, run_host_ranks
from tests.host.refusals import Row, assert_told, hook_of, thd
from tests.host.steps import Counted, aggregation

pytestmark = pytest.mark.host

FOUR = thd(((0, 1), (2,), (3,), (4, 6)))


def step_of_four(rank: int = 0) -> list[Microbatch]:
    return [read_batch(batch) for batch in FOUR(0)]


def in_calls(calls: tuple[int, ...], says: str = "") -> Row:
    """``hook.step`` with four microbatches, which ``calls`` take."""
    return Row(says, topology="dp1", data=FOUR, planned=step_of_four, calls=calls)


def nested(hook: LossHook) -> None:
    with hook.step(step_of_four()), hook.step(step_of_four()):
        pass


def failing_loop(hook: LossHook) -> None:
    with hook.step(step_of_four()):
        raise RuntimeError("of the loop")


STEPS = {
    "calls that leave microbatches": in_calls(
        (1, 2), "StepError: ends with 1 of 4 microbatches left ... calls that take all of them"
    ),
    "no call": in_calls((), "StepError: ends with 4 of 4 microbatches left"),
    "calls that take too many": in_calls(
        (3, 2), "StepError: num_microbatches=2 in a hook.step with 1 of 4 microbatches left"
    ),
    "calls that take all": in_calls((1, 2, 1)),
    "a step in a step": Row("StepError: expected one step at a time", run=nested),
    "an error of the loop's own": Row("RuntimeError: of the loop", run=failing_loop),
}


def over(number: int, **arguments: Any) -> Any:
    """Megatron's schedule, for more microbatches than it is told, or fewer."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    arguments["num_microbatches"] += number
    return get_forward_backward_func()(**arguments)


def without_a_number(hook: LossHook) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.host import gpt

    hook.wrap(get_forward_backward_func())(
        forward_step_func=gpt.forward_step, data_iterator=Counted(0), model=[gpt.ddp_model()]
    )


SCHEDULES = {
    "fewer losses than microbatches": Row(
        "HostError: computed 1 losses for 2 microbatches", call={"schedule": partial(over, -1)}
    ),
    "no number of microbatches": Row(
        "HostError: called without num_microbatches=; expected", run=without_a_number
    ),
    "a model that is not called": Row(
        "HostError: a loss without a call of the model ... --overlap-moe",
        step=scripts.past_the_model,
        hook=hook_of("sample_mean"),
    ),
    "a model that is not called, of no sample": Row(
        step=scripts.past_the_model, hook=hook_of("sum")
    ),
}


def in_group(size: int, iterator: Any, model: Any) -> Any:
    """Packs whose context-parallel group is one of their own, of ``size`` ranks."""
    from tests.host import gpt

    def set_size(module: Any, args: Any, kwargs: Any) -> Any:
        packed = dataclasses.replace(kwargs["packed_seq_params"], local_cp_size=size)
        return args, {**kwargs, "packed_seq_params": packed}

    handle = model.register_forward_pre_hook(set_size, prepend=True, with_kwargs=True)
    try:
        return gpt.forward_step(iterator, model)
    finally:
        handle.remove()


def with_config(says: str = "", **config: Any) -> Row:
    return Row(says, topology="cp2", config=config)


ON_CP2 = {"topology": "cp2", "data": partial(Counted, layout="thd")}
OWN_GROUPS = "HostError: groups of their own"
GRAPHS = "HostError: it replays one step's weights for all ... graphs of layers"
ITERATION, INFERENCE = ["full_iteration"], ["full_iteration_inference"]
SETTINGS = {
    "context groups of all ranks": Row(**ON_CP2, step=partial(in_group, 2)),
    "context groups of a sample's own": Row(
        "HostError: local_cp_size=1 ... one group of 2 ... --hybrid-context-parallel",
        **ON_CP2,
        step=partial(in_group, 1),
    ),
    "hybrid context groups": with_config(f"{OWN_GROUPS} ... hybrid", hybrid_context_parallel=True),
    "dynamic context groups": with_config(
        f"{OWN_GROUPS} ... dynamic", dynamic_context_parallel=True
    ),
    "a graph of an iteration": with_config(GRAPHS, cuda_graph_impl="full_iteration"),
    "a graph of an iteration, by its scope": with_config(
        GRAPHS, cuda_graph_impl="local", cuda_graph_scope=ITERATION
    ),
    "graphs of layers": with_config(cuda_graph_impl="local", cuda_graph_scope=INFERENCE),
    "overlap of experts": with_config(
        "HostError: overlap ... cannot be checked",
        overlap_moe_expert_parallel_comm=True,
    ),
    # Megatron itself then scales wrongly.
    "optimizer instances": Row(
        "HostError: instances > 1 ... pipeline stages",
        topology="pp2",
        per_token=True,
        ddp_config={"num_distributed_optimizer_instances": 2},
    ),
}


def mean(plan: Any, i: int) -> Tensor:
    mask: Tensor = plan.microbatches[i].loss_mask
    return mask / plan.counts.tokens


def twice_the_mean(plan: Any, i: int) -> Tensor:
    return 2 * mean(plan, i)


def unlike(said: str, last: Any, others: Any, topology: str = "dp2", **options: Any) -> Row:
    """The last rank's hook has the terms ``last`` and these options, all others' have not."""
    rank = TOPOLOGIES[topology].world_size - 1
    says = f"ModeError: ranks have different settings ... {said} ... rank(s) [{rank}]"
    hooks = {True: partial(LossHook, last, **options), False: partial(LossHook, others)}
    return Row(says, topology=topology, hook=lambda r: hooks[r == rank]())


def absent(topology: str) -> Row:
    """The last rank has no hook."""
    last = TOPOLOGIES[topology].world_size - 1

    def run(hook: LossHook) -> None:
        from tests.host import gpt

        if dist.get_rank() != last:
            gpt.run_step(hook, gpt.ddp_model(), Counted(0), Counted.N_MB)

    hook = hook_of("token_mean", extensions=[Agreement(patience=2)])
    return Row(f"PeerError: rank(s) [{last}] have not called", {last: ""}, topology, hook, run=run)


MEAN, CUSTOM = aggregation("token_mean"), partial(aggregation, "custom")
OPTIONS: dict[str, dict[str, Any]] = {
    "mask=model": {"read_batch": read_samples},
    "audit=True": {"extensions": [Audit(repeat=True)]},
    "unmeasured=trust": {"extensions": [Audit(trust=True)]},
    "empty_step=error": {"empty_step": "error"},
    "averages_quotients=True": {"loop": Loop(averages_quotients=True)},
    "of_megatron=True": {"loop": Loop(of_megatron=True)},
    "mtp=same": {"extensions": [MultiTokenPrediction()]},
    "report_datasets=1": {"extensions": [DatasetReports()]},
    "moe=step": {"extensions": [RouterLosses()]},
}
TERMS = {
    "terms=sample_mean on": (aggregation("sample_mean"), MEAN),
    "sum (divisor: 3) on": (aggregation("sum", divisor=3.0), aggregation("sum", divisor=2.0)),
    "twice_the_mean": (CUSTOM(function=twice_the_mean), CUSTOM(function=mean)),
    "0.1234571 * kl: token_mean": ({"kl": Term(MEAN, 0.1234571)}, {"kl": Term(MEAN, 0.1234567)}),
}
RANKS = {
    **{f"ranks with other terms: {said}": unlike(said, *terms) for said, terms in TERMS.items()},
    **{
        f"ranks with other terms, {name}": unlike("sum on", aggregation("sum"), MEAN, name)
        for name in ("cp2", "tp2", "pp2", "pp2-tp2-sp")
    },
    **{
        f"ranks with another option: {said}": unlike(said, MEAN, MEAN, **options)
        for said, options in OPTIONS.items()
    },
    "ranks with another type of the divisor": Row(
        hook=lambda rank: LossHook(aggregation("sum", divisor=2.0 if rank else 2))
    ),
}
# Last, since the ranks are no more in step then.
ABSENT = {f"ranks without a hook, {name}": absent(name) for name in ("dp2", "pp2-tp2-sp")}
ROWS = {**STEPS, **SCHEDULES, **SETTINGS, **RANKS, "a good step": Row(), **ABSENT}


@pytest.mark.parametrize("name", ROWS)
def test_calls_that_would_not_be_exact_are_refused_on_every_rank(name: str) -> None:
    assert_told(__name__, name)


def told_of_gradients() -> list[str | None]:
    """One rank: calls of two hooks that train one model, by what is done to the gradients."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.ddp_model()
    first, second = (LossHook(aggregation(mode)) for mode in ("token_mean", "sample_mean"))

    def call(hook: LossHook, active: tuple[int, ...] = (0,), **options: Any) -> str | None:
        return error_of(gpt.run_step, hook, model, Counted(0, active=active), 2, **options)

    found = [call(first), call(first, zero_grad=False), call(second, zero_grad=False)]
    model.zero_grad_buffer()
    found += [call(second, zero_grad=False)]
    found += [call(second, zero_grad=False, forward_only=True), call(first)]
    # The gradients of a step without tokens are zero.
    return [*found, call(first, active=()), call(first, zero_grad=False)]


def test_a_call_on_the_gradients_that_any_hook_left_is_refused() -> None:
    ((first, *left, zeroed, evaluated, again, empty, after),) = run_host_ranks(told_of_gradients, 1)
    assert first is zeroed is evaluated is again is empty is after is None
    assert len(left) == 2
    for told in left:
        assert told.startswith("StepError: a forward-backward call on the gradients that the last")
