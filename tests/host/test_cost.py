"""The operations that the hook adds to a real step, counted; and the lines of the log that say it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import LossAggregation, Term
from megatron_loss_agg.describe import print_lines, title_and_weights
from megatron_loss_agg.mcore import LossHook
from tests.core.operations import WAITS, Operations
from tests.host import gpt, pipeline_parallel
from tests.host.cases import Batch, Case, models_of, take
from tests.host.harness import TOPOLOGIES, on_ranks_of
from tests.host.refusals import two_rows
from tests.host.scripts import of_terms
from tests.host.steps import NO_TOKENS, PLACES, SHORT, aggregation, batch_of, sequences

FEW, MANY = 2, 12  # samples a microbatch
NAMES = ("policy", "kl", "entropy", "value", "distillation")


def step_of(hook_terms: tuple[str, ...], samples: int, layout: str, number: int) -> Any:
    """A step of that many microbatches, which a schedule takes on a model: a function of both."""
    hook = LossHook({name: aggregation("prompt_mean") for name in hook_terms})
    batch = batch_of(list(sequences(lengths=(36,) * samples)), layout)

    def step(ddp: Any, schedule: Any) -> None:
        data = iter([dict(batch) for _ in range(number)]) if gpt.reads_data() else None
        options = {"forward_step_func": partial(of_terms, names=hook_terms), "schedule": schedule}
        gpt.run_step(hook, ddp, data, number, samples, **options)

    return step


def operations_of(ddp: Any, terms: int, samples: int, layout: str) -> tuple[list[str], int]:
    """Of the last loss of a second step; and the all-gathers of that step."""
    step, losses = step_of(NAMES[:terms], samples, layout, 2), []

    def count(loss: Any, output: Any) -> Any:
        with Operations() as operations:
            result = loss(output)
        losses.append(operations.names)
        return result

    for _ in range(2):  # the first step also compares what it was told with what it is given
        with Operations() as operations:
            step(ddp, gpt.schedule_with(count))
    return losses[-1], sum("allgather" in name for name in operations.names)


# By layout, the most operations of one term; and of a term more, for its weights, its sum and its
# report.
MOST = {"bshd": (24, 20), "thd": (25, 21)}


@on_ranks_of("dp2")
def test_any_number_of_samples_costs_the_same_no_wait_and_two_collectives(name: str) -> None:
    ddp = gpt.ddp_model()
    for layout, (most, more) in MOST.items():
        one, five = (operations_of(ddp, terms, MANY, layout) for terms in (1, 5))
        assert one == operations_of(ddp, 1, FEW, layout)
        assert five == operations_of(ddp, 5, FEW, layout)
        assert len(one[0]) <= most
        assert len(five[0]) <= len(one[0]) + more * 4
        for operations, all_gathers in (one, five):
            assert not WAITS & set(operations)
            assert all_gathers == 2  # of the whole step


def bytes_before_the_schedule(samples: int) -> int:
    """The broadcast part of the step's plan."""
    from torch.distributed import distributed_c10d

    sent, before = [0], [0]
    stock = distributed_c10d.broadcast

    def counting(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += x.numel() * x.element_size()
        return stock(x, *args, **kwargs)

    def schedule(**arguments: Any) -> Any:
        before[0] = sent[0]
        return pipeline_parallel.get_forward_backward_func()(**arguments)

    with mock.patch.object(distributed_c10d, "broadcast", counting):
        step_of(NAMES[:2], samples, "thd", 1)(gpt.ddp_model(), schedule)
    return before[0]


@on_ranks_of("tp2")  # of which the first alone reads
def test_ranks_that_read_no_data_get_a_few_numbers_a_sample(name: str) -> None:
    few, many = (bytes_before_the_schedule(n) for n in (FEW, MANY))
    assert few > 0
    # In fp32 its weights would take 4 * 2 * 36 = 288 bytes a sample, and its mask 144 or 288.
    assert many - few <= 100 * (MANY - FEW)


TOKENS = sum(sum(s.sample.mask) for s in sequences())
PRESET = LossAggregation.preset("verl/token-mean")
TERMS = {
    "policy": LossAggregation.preset("skyrl/prompt_mean"),
    "kl": Term(LossAggregation(mode="sum", divisor=1634, rejected="skip"), 0.5),
}


# What is printed of the first training step, by case.
SAID: dict[str, tuple[Case, str]] = {
    "dp2-cp2": (
        Case("", terms=PRESET, hook={"also": ["token_mean"]}),
        f"""\
{"==== loss aggregation: token_mean (verl/token-mean) ".ljust(80, "=")}
  weight:   w_t = m_t / {TOKENS:g}
  step:     8 microbatches on 2 data-parallel ranks
  counts:   10 samples (packed sequences), 7 rollouts, 4 prompts, {TOKENS:g} tokens
  split:    zigzag, over context-parallel ranks
  also:     token_mean
  measured: gradients are 1.000000 times the planned ones
""",
    ),
    "pp2": (
        Case("", layout="bshd", places=PLACES[1], terms=TERMS, step=partial(of_terms, names=TERMS)),
        f"""\
{"==== loss aggregation: policy + 0.5 * kl ".ljust(80, "=")}
  policy:   prompt_mean (skyrl/prompt_mean); w_t = m_t / (M_prompt * 4)
  kl:       sum (divisor: 1634, rejected: skip); w_t = m_t / 1634
  step:     4 microbatches on 1 data-parallel rank
  counts:   10 samples (rows), 7 rollouts, 4 prompts, {TOKENS:g} tokens
  measured: gradients are 1.000000 times the planned ones
""",
    ),
}


@on_ranks_of(*SAID)
def test_one_rank_says_once_what_was_understood_of_the_step(name: str) -> None:
    case, lines = SAID[name]
    chunks = models_of(TOPOLOGIES[name])(case)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        take(dataclasses.replace(case, times=2), TOPOLOGIES[name], chunks)
    first = dist.get_world_size() // 2 if name == "pp2" else 0  # of the last stage
    said = output.getvalue()
    assert said == (lines if dist.get_rank() == first else ""), said
    assert all(len(line) <= 80 for line in lines.splitlines())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_first_line_is_in_colour_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    title, _ = title_and_weights({"token_mean": Term(PRESET)}, {"token_mean": ""})
    plain = "==== loss aggregation: token_mean (verl/token-mean) ".ljust(80, "=")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = f"\033[1;36m{plain}\033[0m"

    def printed(stream: io.StringIO) -> str:
        with contextlib.redirect_stdout(stream):
            print_lines(title, [])
        return stream.getvalue()

    assert printed(io.StringIO()) == f"{plain}\n"
    assert printed(Terminal()) == f"{coloured}\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(Terminal()) == f"{plain}\n"


COUNTS = f"10 samples (packed sequences), 7 rollouts, 4 prompts, {TOKENS:g} tokens"
PROMPT_MEAN = "==== loss aggregation: prompt_mean ".ljust(80, "=")
# What is printed of an evaluation, a step without tokens and a step, in this order.
IN_TURN = [
    f"""\
{PROMPT_MEAN}
  weight:     w_t = m_t / (M_prompt * 4)
  evaluation: 8 microbatches on 2 data-parallel ranks
  counts:     {COUNTS}
""",
    f"""\
{PROMPT_MEAN}
  weight:   w_t = m_t / (M_prompt * N_prompt)
  step:     4 microbatches on 2 data-parallel ranks
  counts:   4 samples (packed sequences), 1 rollout, 1 prompt, 0 tokens
  empty:    every token is masked or rejected; such lines are also printed for
            the first step with tokens
  also:     sample_mean
  measured: gradients are 1.000000 times the planned ones
""",
    f"""\
{PROMPT_MEAN}
  weight:   w_t = m_t / (M_prompt * 4)
  step:     8 microbatches on 2 data-parallel ranks
  counts:   {COUNTS}
  also:     sample_mean
  measured: gradients are 1.000000 times the planned ones
""",
]
IN_TURN[0] += "  also:       sample_mean\n"


@on_ranks_of("dp2")
def test_an_evaluation_and_a_step_without_tokens_are_said_before_the_first_step(name: str) -> None:
    step = Case(hook={"aggregate_evaluation": True, "also": ["sample_mean"]})
    evaluation = dataclasses.replace(step, call={"forward_only": True})
    empty = dataclasses.replace(step, places=NO_TOKENS)
    chunks, hook = models_of(TOPOLOGIES[name])(step), step.new_hook()
    for case, lines in zip([evaluation, empty, step], IN_TURN, strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            take(dataclasses.replace(case, times=2), TOPOLOGIES[name], chunks, hook)
        said = output.getvalue()
        assert said == (lines if dist.get_rank() == 0 else ""), said
    hook = step.new_hook()
    for case, is_said in ((step, True), (evaluation, False), (empty, False)):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            take(case, TOPOLOGIES[name], chunks, hook)
        assert bool(output.getvalue()) == (is_said and dist.get_rank() == 0)


def from_zero(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    return {**batch, "prompt_ids": torch.arange(len(of_mb))}


@on_ranks_of("dp2", "pp2")
def test_one_rank_warns_once_of_ids_that_restart(name: str) -> None:
    case = two_rows(batch=from_zero, places=SHORT[: 1 + (name == "dp2")], times=2)
    chunks = models_of(TOPOLOGIES[name])(case)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        take(case, TOPOLOGIES[name], chunks)
    is_told = dist.get_rank() == (1 if name == "pp2" else 0)
    assert sum("the prompt_ids start at 0" in str(x.message) for x in found) == is_told
