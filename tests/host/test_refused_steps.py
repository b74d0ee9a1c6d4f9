"""Data, calls, schedules and settings that would not be exact are refused by name, on every rank.

No rank waits for one that failed.
"""

from __future__ import annotations

import contextlib
import functools
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
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_loss_agg import AggregationError, Term
from megatron_loss_agg.mcore import Extension, LossHook, read_batch
from tests.host import gpt, pipeline_parallel
from tests.host.cases import EVALUATION, Batch, Call, Case, assert_exact
from tests.host.harness import AUX, TOPOLOGIES
from tests.host.refusals import Refusal, assert_told, two_rows
from tests.host.scripts import with_labels
from tests.host.steps import NO_TOKENS, PLACES, aggregation

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


def real_offsets_alone(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    """Without the padded offsets, by which the model is called."""
    real, mask = batch["cu_seqlens"], batch["loss_mask"].clone()
    mask[:, int(real[-1]) :] = 0
    of_tokens = {name: batch[name] for name in ("tokens", "labels", "prompt_ids")}
    return {
        **of_tokens,
        "loss_mask": mask,
        "cu_seqlens": real,
        "of_model": batch["cu_seqlens_padded"],
    }


def by_padded_offsets(iterator: Any, model: Any) -> Any:
    batch = gpt.received(iterator)
    return gpt.forward_step(iter([{**batch, "cu_seqlens_padded": batch["of_model"]}]), model)


NO_OFFSETS = "DataError: a batch of packed sequences must have 'cu_seqlens' ... Add that key"
REAL_OFFSETS = Case(
    places=(((6, 1), (9, 1)),), layout="thd", batch=real_offsets_alone, step=by_padded_offsets
)
OTHER_STARTS = (
    "DataError: the samples of a pack must begin where the model's sequences do, [0, 8], got [0, 5]. "
    "Give the batch key 'cu_seqlens_padded' too"
)
BATCHES = {
    "real offsets of a padded pack": Refusal(OTHER_STARTS, REAL_OFFSETS, "dp1"),
    "real offsets of a padded pack, under a custom function": Refusal(
        OTHER_STARTS, replace(REAL_OFFSETS, mode="custom"), "tp2"
    ),
    "no prompts": Refusal(
        "DataError: a batch must have 'prompt_ids', an id for each sample, got the keys ['labels', 'lo",
        two_rows(batch=partial(without, key="prompt_ids")),
    ),
    "no weights of samples": Refusal(
        "DataError: sample_weights='count' needs a weight ... the batch key 'sample_weights'",
        two_rows("token_mean", {"sample_weights": "count"}),
    ),
    "no mask": Refusal(
        "DataError: a batch must be a mapping with the tensor 'loss_mask', got ['labels'",
        two_rows(batch=partial(without, key="loss_mask")),
    ),
    "two batches a microbatch": Refusal(
        "DataError: the forward steps must take one batch for ... got a request for more ... once each",
        two_rows("sum", step=draws_twice, iterator=itertools.cycle),
    ),
    "another number of microbatches": Refusal(
        "DataError: the function that reads a step must return 2 microbatches ... got 3",
        two_rows("sum", hook={"read_step": read_too_many}),
    ),
    # The batch says nothing of the packs that the model is called with.
    "packs without offsets": Refusal(NO_OFFSETS, two_rows("sample_mean", step=packed_call)),
    "packs without offsets, by position": Refusal(
        NO_OFFSETS, two_rows("sample_sum", step=partial(packed_call, by_position=True))
    ),
    "packs without offsets, of no sample": Refusal(case=two_rows("sum", step=packed_call)),
    "no mapping": Refusal(
        "DataError: a batch must be a mapping with the tensor 'loss_mask', got Tensor",
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


def mean(samples: Any) -> Tensor:
    return torch.ones_like(samples.mask_sum) / samples.mask_sum.sum()


def twice_the_mean(samples: Any) -> Tensor:
    return 2 * mean(samples)


def nan(samples: Any) -> Tensor:
    return mean(samples) * math.nan


def by_token(samples: Any) -> Tensor:
    return torch.ones(2, 72)


FAILED = {
    **{
        f"a reader that fails on rank {rank}, {name}": on_rank("OSError: disk", DISK, rank, name)
        for name, rank in (("dp2", 1), ("cp2", 1), ("pp2", 1), ("tp2", 0))
    },
    "a function that fails": Refusal(
        "OptionError: the aggregation function must return finite coefficients",
        two_rows("custom", {"function": nan}),
    ),
    "a function of tokens": Refusal(
        "OptionError: the aggregation function must return a real coefficient for each of the 8 ... "
        "shape (2, 72)",
        two_rows("custom", {"function": by_token}),
    ),
    "data that ends in a step": on_rank(
        "DataError: the data iterator must give 2 batches for a call, got 1",
        lambda good: iter([next(good)]),
    ),
    "data that ended": on_rank("StopIteration", lambda good: iter([])),
    "an interrupted reader": on_rank("KeyboardInterrupt", INTERRUPT),
    "no iterator": on_rank(
        "HostError: data_iterator must be an iterator on ... got a NoneType", lambda good: None
    ),
    # Every stage hears of the first step in any case.
    "an empty step": Refusal(
        "PeerError: another rank of the last pipeline stage failed",
        replace(EMPTY_STEP, after=two_rows(hook={"empty_step": "error"})),
        "pp2",
        {1: "DataError: a step must have an active token, and every token is masked"},
    ),
}


# Steps of several calls.
FOUR = Case(places=(((0, 1), (2,), (3,), (4, 6)),))


ON_TWO = replace(FOUR, places=PLACES[2])


def of_calls(*numbers: int, says: str = "") -> Refusal:
    return Refusal(says, replace(FOUR, calls=numbers), "dp1")


def evaluating_between(hook: LossHook, model: Any, call: Call) -> None:
    read = [read_batch(batch) for batch in FOUR.data(0)]
    with hook.step(read[:2] + read[3:]):
        call(2)
        call(1, zero_grad=False, **EVALUATION)
        call(1, zero_grad=False)


def other_calls_on_each_rank(hook: LossHook, model: Any, call: Call) -> None:
    rank = gpt.data_rank()
    read = [read_batch(batch) for batch in ON_TWO.data(rank)]
    with hook.step(read):
        for i, number in enumerate([(2, 2), (4,)][rank]):
            call(number, zero_grad=i == 0)


def going_on_after_a_failed_plan(hook: LossHook, model: Any, call: Call) -> None:
    read = [read_batch(batch) for batch in FOUR.data(0)]
    without_ids = [replace(x, prompt_ids=None) for x in read]
    with hook.step(without_ids):
        with contextlib.suppress(AggregationError):
            call(2)
        call(2, zero_grad=False)


def nested(hook: LossHook, model: Any, call: Call) -> None:
    read = [read_batch(batch) for batch in FOUR.data(0)]
    with hook.step(read), hook.step(read):
        pass


def failing_loop(hook: LossHook, model: Any, call: Call) -> None:
    with hook.step([read_batch(batch) for batch in FOUR.data(0)]):
        raise RuntimeError("of the loop")


def of_no_microbatch(hook: LossHook, model: Any, call: Call) -> None:
    with hook.step([]):
        pass


CALLS = {
    "calls that leave microbatches": of_calls(
        *(1, 2), says="DataError: the calls inside hook.step must take all of its 4 ... got 3"
    ),
    "a call after a first one that failed": Refusal(
        "DataError: a step must be planned by its first call, but that call failed",
        replace(FOUR, mode="prompt_mean", run=going_on_after_a_failed_plan),
        "dp1",
    ),
    "calls that take too many": of_calls(
        *(3, 2),
        says="DataError: a call in a hook.step must take at most the 1 of 4 ... microbatches=2",
    ),
    "calls that take all": of_calls(1, 2, 1),
    "an evaluation between the calls": Refusal(
        case=replace(FOUR, run=evaluating_between), topology="dp1"
    ),
    "other numbers of calls on data-parallel ranks": Refusal(
        case=replace(ON_TWO, run=other_calls_on_each_rank), topology="dp2"
    ),
    "a step in a step": Refusal(
        "DataError: hook.step must not be opened inside another step", two_rows(run=nested)
    ),
    **{
        f"losses of routers in a step of several calls, {name}": replace(
            of_calls(2, 2, says=says),
            case=replace(FOUR, calls=calls, config=AUX, per_token=per_token),
        )
        for name, calls, per_token, says in (
            (
                *("averaged by microbatches", (2, 2), False),
                "HostError: a step of several calls must have no losses that Megatron averages over "
                "each call, got losses of routers (--moe-aux-loss-coeff, ... Set calculate_per_token",
            ),
            ("averaged by tokens", (2, 2), True, ""),
            ("in one call", (4,), False, ""),
        )
    },
    "losses of routers in a step of several calls, the second one": Refusal(
        "HostError: a step of several calls must have no losses that Megatron averages over each call",
        replace(FOUR, calls=(2, 2), config=AUX, after=replace(FOUR, calls=(4,), config=AUX)),
        topology="pp2",
    ),
    **{
        f"{name}, in a step of several calls": Refusal(
            case=replace(FOUR, calls=(2, 2), config=config), topology="dp1"
        )
        for name, config in (
            ("a coefficient of no loss", {**AUX, "moe_router_load_balancing_type": "none"}),
            ("MTP that does not train", {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0}),
        )
    },
    "a step without a microbatch": Refusal(
        "DataError: hook.step must get a microbatch on every rank ... or use hook.stream",
        two_rows(run=of_no_microbatch),
    ),
    "an error of the loop's own": Refusal("RuntimeError: of the loop", two_rows(run=failing_loop)),
}


def one_less(**arguments: Any) -> Any:
    """Megatron's schedule, for fewer microbatches than it is told."""
    arguments["num_microbatches"] -= 1
    return pipeline_parallel.get_forward_backward_func()(**arguments)


def rehearsed(**arguments: Any) -> Any:
    """Megatron's schedule, with a forward step that runs twice for each microbatch."""
    forward_step = arguments.pop("forward_step_func")

    def twice(*args: Any) -> Any:
        forward_step(*args)
        return forward_step(*args)

    return pipeline_parallel.get_forward_backward_func()(**arguments, forward_step_func=twice)


def read_at_hand(_: Any, number: int) -> list[Any]:
    return [*map(read_batch, two_rows().data(gpt.data_rank()))]


def of_whole_logits(iterator: Any, model: Any) -> Any:
    """The script's own loss of logits that the model gathers over tensor-parallel ranks."""
    logits, labels, mask = gpt.outputs(gpt.received(iterator), model)
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(labels), partial(gpt.stock_loss_func, mask)


GATHERED = {"config": {"parallel_output": False}, "places": PLACES[1]}


def test_a_loss_of_gathered_logits_is_exact() -> None:
    assert_exact(TOPOLOGIES["tp2"], [Case(step=of_whole_logits, **GATHERED)])


def without_a_number(hook: LossHook, model: Any, call: Call, **bound: int) -> None:
    """A call without ``num_microbatches``, which a schedule may have already."""

    def schedule(num_microbatches: int, **arguments: Any) -> Any:
        own = partial(pipeline_parallel.get_forward_backward_func(), **bound)
        return hook.wrap(own)(**arguments)

    gpt.run_step(None, model, two_rows().data(gpt.data_rank()), N_MB, schedule=schedule)


def wrapped_twice(
    hook: LossHook, model: Any, call: Call, by: Any = lambda schedule: schedule
) -> None:
    LossHook(aggregation("sum")).wrap(by(hook.wrap(pipeline_parallel.get_forward_backward_func())))


def decorated(schedule: Any) -> Any:
    """A schedule that a loop of its own has around Megatron's."""
    return functools.wraps(schedule)(lambda **arguments: schedule(**arguments))


def wrapped_getter(hook: LossHook, model: Any, call: Call) -> None:
    hook.wrap(pipeline_parallel.get_forward_backward_func)


def with_config(hook: LossHook, model: Any, call: Call, **config: Any) -> None:
    """A call of a model whose configuration has changed."""
    with mock.patch.dict(vars(model.config), config):
        call(N_MB)


def with_instances(hook: LossHook, model: Any, call: Call) -> None:
    with mock.patch.object(model.ddp_config, "num_distributed_optimizer_instances", 2):
        call(N_MB)


def configured(says: str = "", **config: Any) -> Refusal:
    return Refusal(says, two_rows(run=partial(with_config, **config)))


OFF = {
    f"{name}_context_parallel": f"HostError: --{name}-context-parallel needs --calculate-per-token"
    for name in ("hybrid", "dynamic")
}
ALREADY_HOOKED = (
    "HostError: a schedule must have one hook, got one that is already hooked. Wrap what"
)
SETTINGS = {
    "fewer losses than microbatches": Refusal(
        "HostError: the schedule must compute one loss for each of the 2 microbatches, got 1",
        two_rows(call={"schedule": one_less}),
    ),
    "more forward steps than microbatches": Refusal(
        "HostError: a forward step must run once for each of the 2 microbatches, got one more. Call it",
        two_rows(
            iterator=itertools.cycle,
            hook={"read_step": read_at_hand},
            call={"schedule": rehearsed},
        ),
    ),
    "no number of microbatches": Refusal(
        "HostError: the schedule needs Megatron's arguments by keyword, got none for num_microbatches",
        two_rows(run=without_a_number),
    ),
    "a schedule with a hook": Refusal(ALREADY_HOOKED, two_rows(run=wrapped_twice)),
    "a decorated schedule with a hook": Refusal(
        ALREADY_HOOKED, two_rows(run=partial(wrapped_twice, by=decorated))
    ),
    "what makes the schedule": Refusal(
        "HostError: hook.wrap must get a schedule ... got get_forward_backward_func. Call it: hook.wr",
        two_rows(run=wrapped_getter),
    ),
    "groups of no module": Refusal(
        "HostError: pg_collection must have the groups ... got a SimpleNamespace without dp, cp, tp",
        two_rows(call={"pg_collection": SimpleNamespace(dp=None, pp=1)}),
    ),
    "a number that the schedule has": Refusal(
        case=two_rows(run=partial(without_a_number, num_microbatches=N_MB))
    ),
    "a context group of all ranks": Refusal(
        case=two_rows("sum", step=partial(packed_call, local_cp_size=1))
    ),
    "a context group of a sample's own": Refusal(
        "DataError: microbatch 0 must have the 1 context-parallel ranks that were planned, got "
        "local_cp_size=2 in the model's call. Set hybrid_context_parallel",
        two_rows(step=partial(packed_call, local_cp_size=2)),
    ),
    "Megatron's loss of gathered logits": Refusal(
        "HostError: a model that is called with labels must have split logits ... 2 times ... got "
        "parallel_output=False. Build",
        Case(step=with_labels, **GATHERED),
        "tp2",
    ),
    "gathered logits of one rank": Refusal(case=Case(step=with_labels, **GATHERED), topology="dp1"),
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
    says = f"OptionError: all ranks must have the same settings ... {said} ... rank(s) [{rank}]"
    return Refusal(says, others, topology, unlike={rank: last})


class Idle(Extension): ...


MEAN = two_rows("token_mean")
OPTIONS: dict[str, dict[str, Any]] = {
    "split=contiguous": {"split": "contiguous"},
    "empty_step=error": {"empty_step": "error"},
    "aggregate_evaluation=True": {"aggregate_evaluation": True},
    "audit=True": {"audit": True},
    "trust_unmeasured=True": {"trust_unmeasured": True},
    "extensions=['Idle']": {"extensions": [Idle()]},
    "mtp=same": {"settings": {"mtp": "same"}},
}
DIFFERENT = {
    "sum (divisor: 3) on": [two_rows("sum", {"divisor": x}) for x in (3.0, 2.0)],
    "twice_the_mean": [two_rows("custom", {"function": x}) for x in (twice_the_mean, mean)],
    "0.1234571 * kl: token_mean": [
        two_rows(terms={"kl": Term(aggregation("token_mean"), x)}) for x in (0.1234571, 0.1234567)
    ],
    **{said: [replace(MEAN, hook=options), MEAN] for said, options in OPTIONS.items()},
}
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
}
ROWS = {**BATCHES, **FAILED, **CALLS, **SETTINGS, **RANKS}


@pytest.mark.parametrize("name", ROWS)
def test_what_would_not_be_exact_is_refused_by_name_on_every_rank(name: str) -> None:
    assert_told(__name__, name)
