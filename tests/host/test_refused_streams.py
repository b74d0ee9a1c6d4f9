"""Steps counted as they train that must be refused: a table of `Refusal`."""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Any

import pytest

from tests.host import gpt
from tests.host.cases import Case
from tests.host.harness import MOE, error_of, run_host_ranks
from tests.host.refusals import Refusal, assert_told, two_rows
from tests.host.steps import NO_TOKENS, aggregation
from tests.host.test_stream import deciding_step, with_decided_mask


def two_calls(hook: Any, model: Any, step: Any) -> list[Any]:
    with hook.stream():
        return step(1) + step(1, zero_grad=False)


def one_call(hook: Any, model: Any, step: Any) -> list[Any]:
    with hook.stream():
        return step(2)


def nested(hook: Any, model: Any, step: Any) -> list[Any]:
    with hook.stream(), hook.step([]):
        return []


def stream_in_step(hook: Any, model: Any, step: Any) -> list[Any]:
    with hook.step([]), hook.stream():
        return []


def goes_on_after_an_error(hook: Any, model: Any, step: Any) -> list[Any]:
    with hook.stream():
        error = error_of(step, 3)  # more batches than there are
        assert error is not None and error.startswith("DataError: the data iterator must give 3")
    return []


def no_call(hook: Any, model: Any, step: Any) -> list[Any]:
    with hook.stream():
        return []


def draws_two_batches(data_iterator: Any, model: Any) -> Any:
    output = gpt.forward_step(data_iterator, model)
    next(data_iterator)
    return output


def decides_once(data_iterator: Any, model: Any) -> Any:
    """A forward step whose loss decides the mask of the first microbatch of a call alone."""
    output, loss = deciding_step(data_iterator, model)
    compute, decided = loss.compute, []

    def compute_once(logits: Any) -> Any:
        result = compute(logits)
        decided.append(result)
        return result if data_iterator.is_first else result.losses

    data_iterator.is_first = not getattr(data_iterator, "has_drawn", False)
    data_iterator.has_drawn = True
    loss.compute = compute_once
    return output, loss


def enlarges(data_iterator: Any, model: Any) -> Any:
    """A forward step whose loss decides a mask that is larger than that of the batch."""
    output, loss = deciding_step(data_iterator, model)
    compute = loss.compute

    def enlarged(logits: Any) -> Any:
        result = compute(logits)
        return type(result)(result.losses, loss.loss_mask + 1)

    loss.compute = enlarged
    return output, loss


row = functools.partial(two_rows, run=two_calls)
decided = functools.partial(row, "sample_mean", step=deciding_step, batch=with_decided_mask)
INDEXER = {
    **{"experimental_attention_variant": "dsa", "dsa_indexer_loss_coeff": 0.1},
    "add_bias_linear": False,
}
AUX = {**MOE, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
ROWS = {
    "a prompt on two ranks": Refusal(
        "DataError: each prompt of a step that is counted at its end must be whole in one of its parts, "
        "got the prompt -3 in part 1 of data-parallel rank 0 and in part 0 of data-parallel rank 1",
        row("prompt_mean"),
    ),
    "a rollout in two calls": Refusal(
        "DataError: each rollout ... got the rollout 1 in part 0 of data-parallel rank 0 and in part 1",
        row("rollout_mean", places=(((2,), (5,)), ((0,), (3,)))),
    ),
    "a prompt in two microbatches whose masks the loss decides": Refusal(
        "DataError: each prompt ... the prompt -3 in microbatch 0 of part 0 of data-parallel rank 1 and "
        "in microbatch 1 of part 0",
        two_rows(
            "prompt_mean",
            places=(((0,), (1,)), ((2,), (5,))),
            run=one_call,
            step=deciding_step,
            batch=with_decided_mask,
        ),
    ),
    "a prompt in two microbatches that are counted as they train": Refusal(
        "DataError: each prompt", two_rows("prompt_mean", hook={"count": "end"})
    ),
    "a custom function": Refusal("OptionError: a custom function needs the samples", row("custom")),
    "a mean over data sets": Refusal("OptionError: a mean over data sets", row("dataset_mean")),
    "terms with two denominators": Refusal(
        "OptionError: the terms of a loss ... one denominator ... tokens ... prompts",
        row(terms={"one": aggregation("token_mean"), "two": aggregation("prompt_mean")}),
    ),
    "a mode beside the loss": Refusal(
        "OptionError: ModeReports needs the counts of the whole step",
        row("token_mean", hook={"also": ["sample_mean"]}),
    ),
    "a step in a stream": Refusal("DataError: hook.step must not be opened", row(run=nested)),
    "a stream in a step": Refusal("DataError: hook.stream must not", row(run=stream_in_step)),
    "a call after one that failed": Refusal(
        "DataError: a step must not be finished after one of its calls failed",
        row("sample_mean", run=goes_on_after_an_error),
    ),
    "no call and no model": Refusal(
        "DataError: a rank that makes no call in a stream must give its model", row(run=no_call)
    ),
    "a step without tokens": Refusal(
        "DataError: a step must have an active token",
        row("sample_mean", places=NO_TOKENS, hook={"empty_step": "error"}),
    ),
    "a call without tokens": Refusal(
        "", row("sample_mean", places=(((5,), (1,)), ((5,), (5,))), hook={"empty_step": "error"})
    ),
    "a decided mask in a step that was counted before": Refusal(
        "DataError: a mask that the loss decides needs a step that is counted at its end",
        two_rows("sample_mean", step=deciding_step, batch=with_decided_mask),
        on_rank={},
    ),
    "a decided mask in one microbatch of a call": Refusal(
        "DataError: the losses of all microbatches of a call must decide their masks, or of none, got 1",
        decided(run=one_call, step=decides_once),
    ),
    "a decided mask that is too large": Refusal(
        "DataError: a mask that the loss decides must be from 0 to the loss_mask",
        decided(step=enlarges),
    ),
    "two batches in a forward step": Refusal(
        "DataError: a forward step must draw one batch, got 2",
        two_rows("sample_mean", hook={"count": "end"}, step=draws_two_batches),
    ),
    "read_step": Refusal(
        "OptionError: count 'end' draws no batch ahead",
        two_rows("sample_mean", hook={"count": "end", "read_step": next}),
    ),
    "losses of routers": Refusal(
        "HostError: this model cannot train ... losses of routers", row("token_mean", config=AUX)
    ),
    "losses of MTP": Refusal(
        "HostError: this model cannot train ... losses of MTP",
        row("token_mean", config={"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}),
    ),
    "the loss of an indexer": Refusal(
        "HostError: this model cannot train ... loss of DSA's indexer",
        row("token_mean", config=INDEXER),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_rank_is_told(name: str) -> None:
    assert_told(__name__, name)


def left_by_an_error() -> tuple[str | None, str, str | None]:
    """The error that leaves a stream, what is printed, and the error of the next stream."""
    gpt.initialize()
    model = gpt.ddp_model()
    case = Case("sample_mean", layout="bshd", places=(((0,), (1,)), ((2,), (3,))))
    hook = case.new_hook()

    def stream(fails: bool) -> None:
        with hook.stream():
            gpt.run_step(hook, model, case.data(gpt.data_rank()), 2)
            if fails:
                raise KeyError("a lost group")

    with contextlib.redirect_stderr(io.StringIO()) as printed:
        error = error_of(stream, True)
    return error, printed.getvalue(), error_of(stream, False)


def test_an_exception_inside_says_that_gradients_are_not_divided() -> None:
    for error, printed, after in run_host_ranks(left_by_an_error, 2):
        assert error == "KeyError: 'a lost group'"
        assert "its gradients are not reduced or divided" in printed
        assert after is None
