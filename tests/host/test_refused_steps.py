"""Data, calls, schedules and settings that would not be exact are refused by name, on every rank.

No rank waits for one that failed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
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
from tests.host.cases import EVALUATION, Batch, Call, Case, take
from tests.host.harness import TOPOLOGIES
from tests.host.refusals import Refusal, assert_told, two_rows
from tests.host.steps import NO_TOKENS, aggregation

N_MB = 2  # of `two_rows`
EMPTY_STEP = two_rows(places=NO_TOKENS)


def without(batch: Batch, _: tuple[int, ...], key: str) -> Batch:
    return {name: x for name, x in batch.items() if name != key}


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


NO_OFFSETS = "DataError: has no 'cu_seqlens' ... add it"
BATCHES = {
    "no prompts": Refusal(
        "DataError: groups by prompt ... the batch key 'prompt_ids'",
        two_rows(batch=partial(without, key="prompt_ids")),
    ),
    "no weights of samples": Refusal(
        "DataError: sample_weights='count' ... the batch key 'sample_weights'",
        two_rows("token_mean", {"sample_weights": "count"}),
    ),
    "no mask": Refusal(
        "DataError: expected a mapping with the tensor 'loss_mask'",
        two_rows(batch=partial(without, key="loss_mask")),
    ),
    "two batches a microbatch": Refusal(
        "DataError: drew 4 batches for 2 microbatches ... once each",
        two_rows("sum", step=draws_twice, iterator=itertools.cycle),
    ),
    "another number of microbatches": Refusal(
        "OptionError: 3 microbatches for a call of the schedule with num_microbatches=2",
        two_rows("sum", hook={"read_step": read_too_many}),
    ),
    # The batch says nothing of the packs that the model is called with.
    "packs without offsets": Refusal(NO_OFFSETS, two_rows("sample_mean", step=packed_call)),
    "packs without offsets, by position, read as columns": Refusal(
        NO_OFFSETS,
        two_rows(
            "sample_mean",
            step=partial(packed_call, by_position=True),
            hook={"read_batch": a_column},
        ),
    ),
    "packs without offsets, of no sample": Refusal(case=two_rows("sum", step=packed_call)),
    "no mapping": Refusal(
        "DataError: the data iterator gave Tensor",
        two_rows(iterator=lambda _: itertools.repeat(torch.ones(3))),
    ),
}


# One rank fails, and all others are told.
def failing_with(error: BaseException, good: Iterator[Any]) -> Iterator[Any]:
    yield next(good)
    raise error


DISK, INTERRUPT = (partial(failing_with, error) for error in (OSError("disk"), KeyboardInterrupt()))


def on_rank(says: str, iterator: Any, rank: int = 1, topology: str = "dp2") -> Refusal:
    """The data iterator of one rank is a bad one."""
    good = two_rows("token_mean")
    return Refusal(
        "PeerError", good, topology, {rank: says}, unlike={rank: replace(good, iterator=iterator)}
    )


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
    "a function that fails on a rank": Refusal(
        "PeerError: see ",
        two_rows("custom", {"function": mean_or_nan}),
        on_rank={1: "OptionError: the aggregation function returned weights that"},
    ),
    "data that ends in a step": on_rank(
        "DataError: the data iterator ended after 1 of the 2 batches",
        lambda good: iter([next(good)]),
    ),
    "data that ended": on_rank("StopIteration", lambda good: iter([])),
    "an interrupted reader": on_rank("KeyboardInterrupt", INTERRUPT),
    "no iterator": on_rank(
        "HostError: data_iterator is a NoneType on a rank that reads data", lambda good: None
    ),
    # Every stage hears of the first step in any case.
    "an empty step": Refusal(
        "PeerError: a rank of the last pipeline stage",
        replace(EMPTY_STEP, after=two_rows(hook={"empty_step": "error"})),
        "pp2",
        {1: "DataError: every token of the step is masked or rejected"},
    ),
}


# Steps of several calls.
FOUR = Case(places=(((0, 1), (2,), (3,), (4, 6)),))


def of_calls(*numbers: int, says: str = "") -> Refusal:
    return Refusal(says, replace(FOUR, calls=numbers), "dp1")


def evaluating_between(hook: LossHook, model: Any, call: Call) -> None:
    read = [read_batch(batch) for batch in FOUR.data(0)]
    with hook.step(read[:2] + read[3:]):
        call(2)
        call(1, zero_grad=False, **EVALUATION)
        call(1, zero_grad=False)


def nested(hook: LossHook, model: Any, call: Call) -> None:
    with hook.step([]), hook.step([]):
        pass


def failing_loop(hook: LossHook, model: Any, call: Call) -> None:
    with hook.step([]):
        raise RuntimeError("of the loop")


def after_another_hook(hook: LossHook, model: Any, call: Call) -> None:
    """A call on the gradients that another hook's call left."""
    take(two_rows("sum"), TOPOLOGIES["dp2"], [model])
    call(N_MB, zero_grad=False)


def without_zero_grad(hook: LossHook, model: Any, call: Call, zeroed: bool = False) -> None:
    """A loop that zeroes Megatron's buffer, and its optimizer's gradients only if ``zeroed``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    try:
        for _ in range(2):
            call(N_MB)
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad
            optimizer.step()
            if zeroed:
                optimizer.zero_grad()
    finally:
        optimizer.zero_grad()


LEFT = "DataError: a forward-backward call on the gradients that the last"
ON_LEFT = {"zero_grad": False}
EVALUATED = two_rows(call={**ON_LEFT, **EVALUATION}, after=two_rows())
CALLS = {
    "calls that leave microbatches": of_calls(
        *(1, 2), says="DataError: ends with 1 of 4 microbatches left ... calls that take all of"
    ),
    "calls that take too many": of_calls(
        *(3, 2), says="DataError: num_microbatches=2 in a hook.step with 1 of 4 microbatches left"
    ),
    "calls that take all": of_calls(1, 2, 1),
    "an evaluation between the calls": Refusal(
        case=replace(FOUR, run=evaluating_between), topology="dp1"
    ),
    "a step in a step": Refusal("DataError: expected one step at a time", two_rows(run=nested)),
    "an error of the loop's own": Refusal("RuntimeError: of the loop", two_rows(run=failing_loop)),
    "a call on the gradients of another hook": Refusal(LEFT, two_rows(run=after_another_hook)),
    "a call without the optimizer's zero_grad": Refusal(
        "DataError: first microbatch twice ... optimizer.zero_grad()",
        two_rows(run=without_zero_grad, iterator=itertools.cycle),
    ),
    "a call with it": Refusal(
        case=two_rows(run=partial(without_zero_grad, zeroed=True), iterator=itertools.cycle)
    ),
    "an evaluation on gradients": Refusal(case=EVALUATED),
    "a call after an evaluation": Refusal(case=two_rows(after=EVALUATED)),
    # Its gradients are zero.
    "a call after a step without tokens": Refusal(
        case=replace(EMPTY_STEP, call=ON_LEFT, after=EMPTY_STEP)
    ),
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

    def schedule(num_microbatches: int, **arguments: Any) -> Any:
        own = partial(pipeline_parallel.get_forward_backward_func(), **bound)
        return hook.wrap(own)(**arguments)

    gpt.run_step(None, model, two_rows().data(gpt.data_rank()), N_MB, schedule=schedule)


def with_config(hook: LossHook, model: Any, call: Call, **config: Any) -> None:
    """A call of a model whose configuration has changed."""
    with mock.patch.dict(vars(model.config), config):
        call(N_MB)


def with_instances(hook: LossHook, model: Any, call: Call) -> None:
    with mock.patch.object(model.ddp_config, "num_distributed_optimizer_instances", 2):
        call(N_MB)


def configured(says: str = "", **config: Any) -> Refusal:
    return Refusal(says, two_rows(run=partial(with_config, **config)))


OWN_GROUPS = "HostError: groups of their own ... "
OFF = {
    "hybrid_context_parallel": f"{OWN_GROUPS}hybrid",
    "dynamic_context_parallel": f"{OWN_GROUPS}dynamic",
    "overlap_moe_expert_parallel_comm": "HostError: overlap ... cannot be checked",
}
SETTINGS = {
    "fewer losses than microbatches": Refusal(
        "HostError: computed 1 losses for 2 microbatches", two_rows(call={"schedule": one_less})
    ),
    "no number of microbatches": Refusal(
        "HostError: called without num_microbatches=; expected", two_rows(run=without_a_number)
    ),
    "groups of no module": Refusal(
        "HostError: a SimpleNamespace, has no dp, cp, tp ... expected the groups",
        two_rows(call={"pg_collection": SimpleNamespace(dp=None, pp=1)}),
    ),
    "a number that the schedule has": Refusal(
        case=two_rows(run=partial(without_a_number, num_microbatches=N_MB))
    ),
    "a model that is not called": Refusal(
        "HostError: a loss without a call of the model ... --overlap-moe",
        two_rows("sample_mean", step=past_the_model),
    ),
    "a model that is not called, of no sample": Refusal(case=two_rows("sum", step=past_the_model)),
    "a context group of all ranks": Refusal(
        case=two_rows("sum", step=partial(packed_call, local_cp_size=1))
    ),
    "a context group of a sample's own": Refusal(
        "HostError: local_cp_size=2 ... one group of 1 ... --hybrid-context-parallel",
        two_rows(step=partial(packed_call, local_cp_size=2)),
    ),
    **{f"the flag {name}": configured(says, **{name: True}) for name, says in OFF.items()},
    "a graph of an iteration": configured(
        "HostError: it replays one step's weights for all ... graphs of layers",
        cuda_graph_impl="full_iteration",
    ),
    "graphs of layers": configured(
        cuda_graph_impl="local", cuda_graph_scope=["full_iteration_inference"]
    ),
    # Megatron itself then scales wrongly.
    "optimizer instances": Refusal(
        "HostError: instances > 1 ... pipeline stages",
        two_rows(per_token=True, run=with_instances),
        "pp2",
    ),
}


# Ranks that were told different things.
def unlike(said: str, last: Case, others: Case, topology: str = "dp2") -> Refusal:
    """The last rank takes another step than all others."""
    rank = TOPOLOGIES[topology].world_size - 1
    says = f"OptionError: ranks have different settings ... {said} ... rank(s) [{rank}]"
    return Refusal(says, others, topology, unlike={rank: last})


def nothing(hook: LossHook, model: Any, call: Call) -> None: ...


MEAN = two_rows("token_mean")
OPTIONS: dict[str, dict[str, Any]] = {
    "empty_step=error": {"empty_step": "error"},
    "mask=model": {"read_batch": read_samples},
    "factors=w": {"read_batch": partial(read_batch, factors="w")},
    "audit=True": {"extensions": [Audit(repeat=True)]},
    "unmeasured=trust": {"extensions": [Audit(trust=True)]},
    "averages_quotients=True": {"loop": Loop(averages_quotients=True)},
    "of_megatron=True": {"loop": Loop(of_megatron=True)},
    "mtp=same": {"extensions": [MultiTokenPrediction()]},
    "report_datasets=1": {"extensions": [DatasetReports()]},
    "moe=step": {"extensions": [RouterLosses()]},
}
DIFFERENT = {
    "sum (divisor: 3) on": [two_rows("sum", {"divisor": x}) for x in (3.0, 2.0)],
    "twice_the_mean": [two_rows("custom", {"function": x}) for x in (twice_the_mean, mean)],
    "0.1234571 * kl: token_mean": [
        two_rows(terms={"kl": Term(aggregation("token_mean"), x)}) for x in (0.1234571, 0.1234567)
    ],
    **{said: [replace(MEAN, hook=options), MEAN] for said, options in OPTIONS.items()},
}
PATIENT = two_rows("token_mean", hook={"extensions": [Agreement(patience=2)]})
RANKS = {
    **{f"ranks unlike in {said}": unlike(said, *cases) for said, cases in DIFFERENT.items()},
    **{
        f"ranks unlike in the mode, {name}": unlike("sum on", two_rows("sum"), MEAN, name)
        for name in ("dp2", "cp2", "pp2-tp2-sp")
    },
    "ranks with another type of the divisor": Refusal(
        case=two_rows("sum", {"divisor": 2}), unlike={1: two_rows("sum", {"divisor": 2.0})}
    ),
    "good steps": Refusal(),
    # Last, since the ranks are no more in step then.
    "a rank without a hook": Refusal(
        "PeerError: rank(s) [3] have not called",
        PATIENT,
        "pp2-tp2-sp",
        {3: ""},
        {3: replace(PATIENT, run=nothing)},
    ),
}
ROWS = {**BATCHES, **FAILED, **CALLS, **SETTINGS, **RANKS}


@pytest.mark.parametrize("name", ROWS)
def test_what_would_not_be_exact_is_refused_by_name_on_every_rank(name: str) -> None:
    assert_told(__name__, name)
