"""Data, calls, schedules and settings that would not be exact are refused by name, on every rank.

No rank waits for one that failed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
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
from megatron_loss_agg.mcore.extensions import with_checks  # each alone
from megatron_loss_agg.mcore.hook import Hook  # has no checks by itself
from tests.host import gpt, pipeline_parallel, scripts
from tests.host.harness import TOPOLOGIES
from tests.host.refusals import EVALUATION, Row, assert_told, hook_of, in_turn, thd
from tests.host.steps import Counted, aggregation

PACKS = {"topology": "cp2", "data": partial(Counted, layout="thd")}
EMPTY = partial(Counted, active=())


def read_too_many(iterator: Any, number: int) -> list[Any]:
    return [next(iterator)] * (number + 1)


def a_column(batch: dict[str, Tensor]) -> Microbatch:
    """Each token as if it were a sample."""
    return Microbatch(batch["loss_mask"].reshape(-1, 1))


def packed(says: str = "", mode: str = "sample_mean", **options: Any) -> Row:
    """The model is called with packs, of which the batch says nothing."""
    return Row(says, **{"step": scripts.packed_call, "hook": hook_of(mode), **options})


NO_OFFSETS = "GroupError: has no 'cu_seqlens' ... add it"
BATCHES = {
    "no prompts": Row(
        "GroupError: have no 'prompt_ids' ... add that key",
        data=partial(Counted, without=("prompt_ids",)),
    ),
    "no mask": Row(
        "MaskError: expected a mapping with the tensor 'loss_mask'",
        data=partial(Counted, without=("loss_mask",)),
    ),
    "no mapping": Row(
        "MaskError: the data iterator gave Tensor",
        data=lambda rank: itertools.repeat(torch.ones(3)),
    ),
    "two batches a microbatch": Row(
        "StepError: drew 4 batches for 2 microbatches ... once each",
        step=scripts.draws_twice,
        hook=hook_of("sum"),
        data=lambda rank: itertools.repeat(next(Counted(rank))),
    ),
    "another number of microbatches": Row(
        "FunctionError: 3 microbatches for a call of the schedule with num_microbatches=2",
        hook=hook_of("sum", read_step=read_too_many),
    ),
    "packs without offsets": packed(NO_OFFSETS),
    "packs without offsets, by position": packed(
        NO_OFFSETS, step=partial(scripts.packed_call, by_position=True)
    ),
    "packs without offsets on tensor-parallel ranks": packed(NO_OFFSETS, topology="tp2"),
    "packs without offsets, read as columns": packed(
        NO_OFFSETS, hook=hook_of("sample_mean", read_batch=a_column)
    ),
    "packs without offsets, of no sample": packed(mode="sum"),
}


def mean(plan: Any, i: int) -> Tensor:
    mask: Tensor = plan.microbatches[i].loss_mask
    return mask / plan.counts.tokens


def twice_the_mean(plan: Any, i: int) -> Tensor:
    return 2 * mean(plan, i)


def mean_or_nan(plan: Any, i: int) -> Tensor:
    return mean(plan, i) * (math.nan if dist.get_rank() == 1 else 1)


# One rank fails, and all others are told.
def failing_with(error: BaseException, good: Iterator[Any]) -> Iterator[Any]:
    yield next(good)
    raise error


def on_rank(failing: int, change: Any, says: str, topology: str = "dp2") -> Row:
    """The data iterator of one rank is a bad one, made by ``change``."""

    def data(rank: int) -> Any:
        good = Counted(rank)
        return change(good) if dist.get_rank() == failing else good

    return Row("PeerError", {failing: says}, topology, hook_of("token_mean"), data)


DISK = partial(failing_with, OSError("disk"))
FAILED = {
    **{
        f"a reader that fails on rank {rank}, {name}": on_rank(rank, DISK, "OSError: disk", name)
        for name, rank in (("dp2", 1), ("cp2", 1), ("pp2", 1), ("tp2", 0))
    },
    "a function that fails on a rank": Row(
        "PeerError: see ",
        {1: "FunctionError: the aggregation function returned weights that"},
        hook=hook_of(aggregation("custom", function=mean_or_nan)),
    ),
    "data that ends in a step": on_rank(
        *(1, lambda good: iter([next(good)])),
        "StepError: the data iterator ended after 1 of the 2 batches",
    ),
    "data that ended": on_rank(1, lambda good: iter([]), "StopIteration"),
    "an interrupted reader": on_rank(
        1, partial(failing_with, KeyboardInterrupt()), "KeyboardInterrupt"
    ),
    "no iterator": on_rank(
        1, lambda good: None, "HostError: data_iterator is a NoneType on a rank that reads data"
    ),
    # Every stage hears of the first step in any case.
    "an empty step": Row(
        "PeerError: a rank of the last pipeline stage",
        {1: "MaskError: every token of the step is masked or rejected"},
        "pp2",
        hook_of("token_mean", empty_step="error"),
        in_turn(Counted, EMPTY),
        before=[{}],
    ),
}


# Steps of several calls.
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


def of_another_hook(hook: LossHook) -> None:
    """A call on the gradients that another hook's call left."""
    model = gpt.ddp_model()
    for one in (hook_of("sum")(0), hook):
        gpt.run_step(one, model, Counted(0), Counted.N_MB, zero_grad=False)


def without_zero_grad(hook: LossHook, zeroed: bool = False) -> None:
    """A loop that zeroes Megatron's buffer, and its optimizer's gradients only if ``zeroed``."""
    from tests.host import gpt

    model = gpt.ddp_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        gpt.run_step(hook, model, Counted(0), Counted.N_MB)
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        if zeroed:
            optimizer.zero_grad()


LEFT = "StepError: a forward-backward call on the gradients that the last"
ON_LEFT = {"zero_grad": False}
CALLS = {
    "calls that leave microbatches": in_calls(
        (1, 2), "StepError: ends with 1 of 4 microbatches left ... calls that take all of them"
    ),
    "calls that take too many": in_calls(
        (3, 2), "StepError: num_microbatches=2 in a hook.step with 1 of 4 microbatches left"
    ),
    "calls that take all": in_calls((1, 2, 1)),
    "a step in a step": Row("StepError: expected one step at a time", run=nested),
    "an error of the loop's own": Row("RuntimeError: of the loop", run=failing_loop),
    "a call on the gradients of another hook": Row(LEFT, run=of_another_hook),
    "a call without the optimizer's zero_grad": Row(
        "StepError: first microbatch twice ... optimizer.zero_grad()", run=without_zero_grad
    ),
    "a call with it": Row(run=partial(without_zero_grad, zeroed=True)),
    "an evaluation on gradients": Row(before=[{}], call={**ON_LEFT, **EVALUATION}),
    "a call after an evaluation": Row(before=[{}, {**ON_LEFT, **EVALUATION}]),
    # Its gradients are zero.
    "a call after a step without tokens": Row(data=EMPTY, before=[{}], call=ON_LEFT),
}


def one_less(**arguments: Any) -> Any:
    """Megatron's schedule, for fewer microbatches than it is told."""
    arguments["num_microbatches"] -= 1
    return pipeline_parallel.get_forward_backward_func()(**arguments)


def without_a_number(hook: LossHook, **bound: int) -> None:
    """A call without ``num_microbatches``, which a schedule may have already."""
    hook.wrap(partial(pipeline_parallel.get_forward_backward_func(), **bound))(
        forward_step_func=gpt.forward_step,
        data_iterator=Counted(0),
        model=[gpt.ddp_model()],
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )


def in_group(size: int, iterator: Any, model: Any) -> Any:
    """Packs whose context-parallel group is one of their own, of ``size`` ranks."""

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


OWN_GROUPS = "HostError: groups of their own"
GRAPHS = "HostError: it replays one step's weights for all ... graphs of layers"
ITERATION, INFERENCE = ["full_iteration"], ["full_iteration_inference"]
SETTINGS = {
    "fewer losses than microbatches": Row(
        "HostError: computed 1 losses for 2 microbatches", call={"schedule": one_less}
    ),
    "no number of microbatches": Row(
        "HostError: called without num_microbatches=; expected", run=without_a_number
    ),
    "a number that the schedule has": Row(run=partial(without_a_number, num_microbatches=2)),
    "a model that is not called": Row(
        "HostError: a loss without a call of the model ... --overlap-moe",
        step=scripts.past_the_model,
        hook=hook_of("sample_mean"),
    ),
    "a model that is not called, of no sample": Row(
        step=scripts.past_the_model, hook=hook_of("sum")
    ),
    "context groups of all ranks": Row(**PACKS, step=partial(in_group, 2)),
    "context groups of a sample's own": Row(
        "HostError: local_cp_size=1 ... one group of 2 ... --hybrid-context-parallel",
        **PACKS,
        step=partial(in_group, 1),
    ),
    "hybrid context groups": with_config(f"{OWN_GROUPS} ... hybrid", hybrid_context_parallel=True),
    "dynamic context groups": with_config(
        f"{OWN_GROUPS} ... dynamic", dynamic_context_parallel=True
    ),
    "a graph of an iteration": with_config(GRAPHS, cuda_graph_impl="full_iteration"),
    "graphs of layers": with_config(cuda_graph_impl="local", cuda_graph_scope=INFERENCE),
    "overlap of experts": with_config(
        "HostError: overlap ... cannot be checked", overlap_moe_expert_parallel_comm=True
    ),
    # Megatron itself then scales wrongly.
    "optimizer instances": Row(
        "HostError: instances > 1 ... pipeline stages",
        topology="pp2",
        per_token=True,
        ddp_config={"num_distributed_optimizer_instances": 2},
    ),
}


# Ranks that were told different things.
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
        if dist.get_rank() != last:
            gpt.run_step(hook, gpt.ddp_model(), Counted(0), Counted.N_MB)

    hook = hook_of("token_mean", extensions=[Agreement(patience=2)])
    return Row(f"PeerError: rank(s) [{last}] have not called", {last: ""}, topology, hook, run=run)


MEAN, CUSTOM = aggregation("token_mean"), partial(aggregation, "custom")
OPTIONS: dict[str, dict[str, Any]] = {
    "mask=model": {"read_batch": read_samples},
    "audit=True": {"extensions": [Audit(repeat=True)]},
    "unmeasured=trust": {"extensions": [Audit(trust=True)]},
    "averages_quotients=True": {"loop": Loop(averages_quotients=True)},
    "of_megatron=True": {"loop": Loop(of_megatron=True)},
    "mtp=same": {"extensions": [MultiTokenPrediction()]},
    "report_datasets=1": {"extensions": [DatasetReports()]},
    "moe=step": {"extensions": [RouterLosses()]},
}
TERMS = {
    "sum (divisor: 3) on": (aggregation("sum", divisor=3.0), aggregation("sum", divisor=2.0)),
    "twice_the_mean": (CUSTOM(function=twice_the_mean), CUSTOM(function=mean)),
    "0.1234571 * kl: token_mean": ({"kl": Term(MEAN, 0.1234571)}, {"kl": Term(MEAN, 0.1234567)}),
}
RANKS = {
    **{f"ranks with other terms: {said}": unlike(said, *terms) for said, terms in TERMS.items()},
    **{
        f"ranks with other terms, {name}": unlike("sum on", aggregation("sum"), MEAN, name)
        for name in ("dp2", "cp2", "pp2-tp2-sp")
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


# What finds a mistake, and the row of the mistake.
MISTAKES = {
    "Agreement": Row("ModeError: ranks have different settings ... empty_step=error"),
    "InexactSettings": Row(
        GRAPHS, config={"cuda_graph_impl": "local", "cuda_graph_scope": ITERATION}
    ),
    "LeftGradients": Row(LEFT, before=[{}], call=ON_LEFT),
    "Audit": Row(
        "HostError: gradients would be 0. ... times the planned ones",
        config={"finalize_model_grads_func": None},
    ),
    "MaskCheck": Row(
        "MaskError: the loss function's mask is not this rank's",
        loss=scripts.with_mask(lambda mask: mask / 2),
    ),
    "MaskedSum": Row("HostError: the loss function returned", loss=scripts.divided),
}


def hook_with(mistake: str, is_kept: Callable[[str], bool], rank: int) -> Hook:
    """With the checks that ``is_kept`` names, and no others."""
    checks = [x for x in with_checks([]) if is_kept(type(x).__name__)]
    unlike = mistake == "Agreement" and rank == 1
    empty_step = "error" if unlike else "step"
    return Hook(aggregation("token_mean"), extensions=checks, empty_step=empty_step)


OF_CHECKS = {}
for name, row in MISTAKES.items():
    alone, others = partial(hook_with, name, name.__eq__), partial(hook_with, name, name.__ne__)
    OF_CHECKS[f"{name} alone"] = dataclasses.replace(row, hook=alone)
    OF_CHECKS[f"all but {name}"] = dataclasses.replace(row, hook=others, says="")

GOOD = {f"a good step, {name}": Row(topology=name) for name in ("dp2", "cp2", "pp2", "tp2")}
ROWS = {**BATCHES, **FAILED, **CALLS, **SETTINGS, **RANKS, **OF_CHECKS, **GOOD, **ABSENT}


@pytest.mark.parametrize("name", [*BATCHES, *FAILED, *CALLS, *SETTINGS, *RANKS, *GOOD, *ABSENT])
def test_what_would_not_be_exact_is_refused_by_name_on_every_rank(name: str) -> None:
    assert_told(__name__, name)


@pytest.mark.parametrize("name", OF_CHECKS)
def test_a_check_finds_its_mistake_alone_and_no_other_does(name: str) -> None:
    assert_told(__name__, name)
