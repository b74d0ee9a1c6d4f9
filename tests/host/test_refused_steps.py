"""Data, calls, schedules and settings that would not be exact are refused by name, on every rank.

No rank waits for one that failed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

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
from tests.host import gpt, pipeline_parallel
from tests.host.harness import TOPOLOGIES
from tests.host.refusals import EVALUATION, Row, assert_told, hook_of, in_calls, in_turn, thd
from tests.host.steps import Counted, aggregation

EMPTY = partial(Counted, active=())
Call = Callable[..., None]  # see `Row.run`


def read_too_many(iterator: Any, number: int) -> list[Any]:
    return [next(iterator)] * (number + 1)


def draws_twice(iterator: Any, model: Any) -> Any:
    """Takes two batches for a microbatch, and uses the second."""
    next(iterator)
    return gpt.forward_step(iterator, model)


def packed_call(iterator: Any, model: Any, by_position: bool = False, **more: Any) -> Any:
    """Calls the model with packed sequences, whatever the batch says; and ``more`` of them."""
    from megatron.core.packed_seq_params import PackedSeqParams

    batch = gpt.received(iterator)
    tokens, mask = batch["tokens"].view(1, -1), batch["loss_mask"]
    length = tokens.shape[1]
    starts = torch.tensor([0, length], dtype=torch.int32)
    packed = PackedSeqParams("thd", starts, starts, starts, starts, length, length, **more)
    given = [tokens, gpt.positions_like(tokens), None]
    if by_position:
        logits = model(*given, None, None, None, packed)
    else:
        logits = model(*given, packed_seq_params=packed)
    losses = logits.logsumexp(-1).view_as(mask)  # of the right shape, and no more is needed
    return losses, partial(gpt.stock_loss_func, mask)


def a_column(batch: dict[str, Tensor]) -> Microbatch:
    """Each token as if it were a sample."""
    return Microbatch(batch["loss_mask"].reshape(-1, 1))


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
    "two batches a microbatch": Row(
        "StepError: drew 4 batches for 2 microbatches ... once each",
        step=draws_twice,
        hook=hook_of("sum"),
        data=lambda rank: itertools.repeat(next(Counted(rank))),
    ),
    "another number of microbatches": Row(
        "FunctionError: 3 microbatches for a call of the schedule with num_microbatches=2",
        hook=hook_of("sum", read_step=read_too_many),
    ),
    # The batch says nothing of the packs that the model is called with.
    "packs without offsets": Row(NO_OFFSETS, step=packed_call, hook=hook_of("sample_mean")),
    "packs without offsets, by position, read as columns": Row(
        NO_OFFSETS,
        step=partial(packed_call, by_position=True),
        hook=hook_of("sample_mean", read_batch=a_column),
    ),
    "packs without offsets, of no sample": Row(step=packed_call, hook=hook_of("sum")),
    "no mapping": Row(
        "MaskError: the data iterator gave Tensor",
        data=lambda rank: itertools.repeat(torch.ones(3)),
    ),
}


# One rank fails, and all others are told.
def failing_with(error: BaseException, good: Iterator[Any]) -> Iterator[Any]:
    yield next(good)
    raise error


DISK, INTERRUPT = (partial(failing_with, error) for error in (OSError("disk"), KeyboardInterrupt()))


def on_rank(says: str, change: Any, failing: int = 1, topology: str = "dp2") -> Row:
    """The data iterator of one rank is a bad one, made by ``change``."""

    def data(rank: int) -> Any:
        good = Counted(rank)
        return change(good) if dist.get_rank() == failing else good

    return Row("PeerError", {failing: says}, topology, hook_of("token_mean"), data)


def mean(plan: Any, i: int) -> Tensor:
    mask: Tensor = plan.microbatches[i].loss_mask
    return mask / plan.counts.tokens


def twice_the_mean(plan: Any, i: int) -> Tensor:
    return 2 * mean(plan, i)


def mean_or_nan(plan: Any, i: int) -> Tensor:
    return mean(plan, i) * (math.nan if dist.get_rank() == 1 else 1)


FAILED = {
    **{
        f"a reader that fails on rank {rank}, {name}": on_rank("OSError: disk", DISK, rank, name)
        for name, rank in (("dp2", 1), ("cp2", 1), ("pp2", 1), ("tp2", 0))
    },
    "a function that fails on a rank": Row(
        "PeerError: see ",
        {1: "FunctionError: the aggregation function returned weights that"},
        hook=hook_of(aggregation("custom", function=mean_or_nan)),
    ),
    "data that ends in a step": on_rank(
        "StepError: the data iterator ended after 1 of the 2 batches",
        lambda good: iter([next(good)]),
    ),
    "data that ended": on_rank("StopIteration", lambda good: iter([])),
    "an interrupted reader": on_rank("KeyboardInterrupt", INTERRUPT),
    "no iterator": on_rank(
        "HostError: data_iterator is a NoneType on a rank that reads data", lambda good: None
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


def step_of_four() -> list[Microbatch]:
    return [read_batch(batch) for batch in FOUR(0)]


def of_calls(*numbers: int, says: str = "") -> Row:
    return Row(says, topology="dp1", data=FOUR, run=in_calls(step_of_four, *numbers))


def evaluating_between(hook: LossHook, model: Any, call: Call) -> None:
    with hook.step(step_of_four()):
        call(2)
        call(1, zero_grad=False, **EVALUATION)
        call(2, zero_grad=False)


def nested(hook: LossHook, model: Any, call: Call) -> None:
    with hook.step(step_of_four()), hook.step(step_of_four()):
        pass


def failing_loop(hook: LossHook, model: Any, call: Call) -> None:
    with hook.step(step_of_four()):
        raise RuntimeError("of the loop")


def after_another_hook(hook: LossHook, model: Any, call: Call) -> None:
    """A call on the gradients that another hook's call left."""
    gpt.run_step(hook_of("sum")(0), model, Counted(gpt.data_rank()), Counted.N_MB)
    call(Counted.N_MB, zero_grad=False)


def without_zero_grad(hook: LossHook, model: Any, call: Call, zeroed: bool = False) -> None:
    """A loop that zeroes Megatron's buffer, and its optimizer's gradients only if ``zeroed``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    try:
        for _ in range(2):
            call(Counted.N_MB)
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad
            optimizer.step()
            if zeroed:
                optimizer.zero_grad()
    finally:
        optimizer.zero_grad()


LEFT = "StepError: a forward-backward call on the gradients that the last"
ON_LEFT = {"zero_grad": False}
CALLS = {
    "calls that leave microbatches": of_calls(
        *(1, 2), says="StepError: ends with 1 of 4 microbatches left ... calls that take all of"
    ),
    "calls that take too many": of_calls(
        *(3, 2), says="StepError: num_microbatches=2 in a hook.step with 1 of 4 microbatches left"
    ),
    "calls that take all": of_calls(1, 2, 1),
    "an evaluation between the calls": Row(
        topology="dp1",
        data=thd(((0, 1), (2,), (7,), (3,), (4, 6))),
        run=evaluating_between,
    ),
    "a step in a step": Row("StepError: expected one step at a time", run=nested),
    "an error of the loop's own": Row("RuntimeError: of the loop", run=failing_loop),
    "a call on the gradients of another hook": Row(LEFT, run=after_another_hook),
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


def past_the_model(iterator: Any, model: Any) -> Any:
    """Computes losses with the model's layers, and without the model's own call."""
    mask = next(iterator)["loss_mask"]
    weight = next(model.parameters())
    return weight.sum() + torch.zeros_like(mask), partial(gpt.stock_loss_func, mask)


def without_a_number(hook: LossHook, model: Any, call: Call, **bound: int) -> None:
    """A call without ``num_microbatches``, which a schedule may have already."""
    model.zero_grad_buffer()
    hook.wrap(partial(pipeline_parallel.get_forward_backward_func(), **bound))(
        forward_step_func=gpt.forward_step,
        data_iterator=Counted(gpt.data_rank()),
        model=[model],
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )


def with_instances(hook: LossHook, model: Any, call: Call) -> None:
    with mock.patch.object(model.ddp_config, "num_distributed_optimizer_instances", 2):
        call(Counted.N_MB)


OWN_GROUPS = "HostError: groups of their own ... "
OFF = {
    "hybrid_context_parallel": f"{OWN_GROUPS}hybrid",
    "dynamic_context_parallel": f"{OWN_GROUPS}dynamic",
    "overlap_moe_expert_parallel_comm": "HostError: overlap ... cannot be checked",
}
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
        step=past_the_model,
        hook=hook_of("sample_mean"),
    ),
    "a model that is not called, of no sample": Row(step=past_the_model, hook=hook_of("sum")),
    "a context group of all ranks": Row(
        step=partial(packed_call, local_cp_size=1), hook=hook_of("sum")
    ),
    "a context group of a sample's own": Row(
        "HostError: local_cp_size=2 ... one group of 1 ... --hybrid-context-parallel",
        step=partial(packed_call, local_cp_size=2),
    ),
    **{f"the flag {name}": Row(says, config={name: True}) for name, says in OFF.items()},
    "a graph of an iteration": Row(
        "HostError: it replays one step's weights for all ... graphs of layers",
        config={"cuda_graph_impl": "full_iteration"},
    ),
    "graphs of layers": Row(
        config={"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration_inference"]}
    ),
    # Megatron itself then scales wrongly.
    "optimizer instances": Row(
        "HostError: instances > 1 ... pipeline stages",
        topology="pp2",
        per_token=True,
        run=with_instances,
    ),
}


# Ranks that were told different things.
def unlike(said: str, last: Any, others: Any, topology: str = "dp2", **options: Any) -> Row:
    """The last rank's hook has the terms ``last`` and these options, all others' have not."""
    rank = TOPOLOGIES[topology].world_size - 1
    says = f"ModeError: ranks have different settings ... {said} ... rank(s) [{rank}]"
    hooks = {True: partial(LossHook, last, **options), False: partial(LossHook, others)}
    return Row(says, topology=topology, hook=lambda r: hooks[r == rank]())


def but_on_the_last_rank(hook: LossHook, model: Any, call: Call) -> None:
    if dist.get_rank() != dist.get_world_size() - 1:
        call(Counted.N_MB)


MEAN, CUSTOM = aggregation("token_mean"), partial(aggregation, "custom")
OPTIONS: dict[str, dict[str, Any]] = {
    "empty_step=error": {"empty_step": "error"},
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
    "good steps": Row(),
    # Last, since the ranks are no more in step then.
    "a rank without a hook": Row(
        "PeerError: rank(s) [3] have not called",
        {3: ""},
        "pp2-tp2-sp",
        hook_of("token_mean", extensions=[Agreement(patience=2)]),
        run=but_on_the_last_rank,
    ),
}
ROWS = {**BATCHES, **FAILED, **CALLS, **SETTINGS, **RANKS}


@pytest.mark.parametrize("name", ROWS)
def test_what_would_not_be_exact_is_refused_by_name_on_every_rank(name: str) -> None:
    assert_told(__name__, name)
