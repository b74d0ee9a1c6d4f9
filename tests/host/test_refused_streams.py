"""Steps counted as they train that must be refused: a table of `Refusal`."""

from __future__ import annotations

import contextlib
import functools
import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import TokenLoss, read_batch
from megatron_loss_agg.mcore.call import replaced
from megatron_loss_agg.report import Sum
from tests.host import gpt, scripts
from tests.host.cases import Case
from tests.host.harness import AUX, error_of, run_host_ranks
from tests.host.refusals import Refusal, assert_told, two_rows
from tests.host.steps import NO_TOKENS, SHORT, aggregation
from tests.host.test_stream import deciding_step, with_decided_mask


def two_calls(hook: Any, model: Any, step: Any) -> list[Any]:
    with hook.stream():
        return step(1) + step(1, zero_grad=False)


def one_call(hook: Any, model: Any, step: Any) -> list[Any]:
    with hook.stream():
        return step(2)


def nested(hook: Any, model: Any, step: Any) -> list[Any]:
    with hook.stream(), hook.step([Microbatch(torch.ones(1, 1))]):
        return []


def stream_in_step(hook: Any, model: Any, step: Any) -> list[Any]:
    with hook.step([Microbatch(torch.ones(1, 1))]), hook.stream():
        return []


def goes_on_after_an_error(hook: Any, model: Any, step: Any) -> list[Any]:
    with hook.stream():
        assert error_of(step, 1, forward_step_func=fails) == "ValueError: by chance"
        return step(1, zero_grad=False)


def fails(data_iterator: Any, model: Any) -> Any:
    gpt.forward_step(data_iterator, model)
    raise ValueError("by chance")


def no_call(hook: Any, model: Any, step: Any) -> list[Any]:
    with hook.stream():
        return []


def no_call_on_one_rank(hook: Any, model: Any, step: Any) -> list[Any]:
    """The second rank makes no call, and has no model to end the step with."""
    with hook.stream():
        return step(2) if gpt.data_rank() == 0 else []


def bare_model(hook: Any, model: Any, step: Any) -> list[Any]:
    """A model without a wrapper, and without a function that divides its gradients."""
    batches = Case(layout="bshd", places=SHORT).data(gpt.data_rank())
    with hook.stream():
        return gpt.run_step(hook, gpt.build(), batches, 1, zero_grad=False)


def alone(hook: Any, model: Any, step: Any) -> list[Any]:
    """The second rank makes no call."""
    with hook.stream(model=model):
        return step(2) if gpt.data_rank() == 0 else []


def gathers_parameters_late(hook: Any, model: Any, step: Any) -> list[Any]:
    with replaced(model.ddp_config, "overlap_param_gather", True):
        return alone(hook, model, step)


def two_models(hook: Any, model: Any, step: Any) -> list[Any]:
    other, batches = gpt.ddp_model(), Case(layout="bshd", places=SHORT).data(gpt.data_rank())
    with hook.stream():
        return step(1) + gpt.run_step(hook, other, batches, 1)


def rejects_late(data_iterator: Any, model: Any) -> Any:
    """A forward step whose loss rejects samples."""
    output, loss = deciding_step(data_iterator, model)
    compute = loss.compute

    def rejecting(logits: Any) -> Any:
        result, number = compute(logits), loss.loss_mask.shape[0]
        return replace(result, rejected=torch.ones(number, dtype=torch.bool))

    loss.compute = rejecting
    return output, loss


def rejects_by_rank(data_iterator: Any, model: Any, rejects: Any) -> Any:
    """A forward step whose loss decides from the tokens of one context-parallel rank."""
    output, loss = rejects_late(data_iterator, model)
    compute = loss.compute

    def rejecting(logits: Any) -> Any:
        result = compute(logits)
        return replace(result, rejected=rejects(result.rejected))

    loss.compute = rejecting
    return output, loss


def on_the_first_rank(rejected: Any) -> Any:
    return rejected & (gpt.parallel_state.get_context_parallel_rank() == 0)


def of_too_many(rejected: Any) -> Any:
    return rejected.repeat(2)


def masks_of_one_term(data_iterator: Any, model: Any) -> Any:
    """A forward step whose loss decides the mask of one term of two."""
    output, loss = deciding_step(data_iterator, model)
    compute = loss.compute

    def decided_for_one(logits: Any) -> Any:
        result = compute(logits)
        losses = {"one": result.losses, "two": result.losses}
        return replace(result, losses=losses, mask={"one": result.mask})

    loss.compute = decided_for_one
    return output, loss


def with_sums(data_iterator: Any, model: Any) -> Any:
    """A forward step that reports a sum by the weights of the loss."""
    losses, loss_func = gpt.forward_step(data_iterator, model)

    def report(losses: Any, weights: Any) -> Any:
        return {"weighed": Sum.of(losses, weights)}

    return losses, TokenLoss(lambda x: x, *loss_func.args, report=report)


def other_masks(batch: Any) -> Any:
    """A reader of two terms with other masks."""
    one = read_batch(batch)
    return {"one": one, "two": replace(one, loss_mask=one.loss_mask / 2)}


def other_prompts(batch: Any) -> Any:
    """A reader of two terms, the second of which has one prompt."""
    one = replace(read_batch(batch), prompt_ids=batch["tokens"][:, :4].sum(dim=1))
    return {"one": one, "two": replace(one, prompt_ids=torch.zeros_like(one.prompt_ids))}


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
WHOLE = (((0, 1), (2, 3)),)  # on one data-parallel rank
INDEXER = {
    **{"experimental_attention_variant": "dsa", "dsa_indexer_loss_coeff": 0.1},
    "add_bias_linear": False,
}
ROWS = {
    "a prompt on two ranks": Refusal(
        "DataError: each prompt of a step that is counted at its end must be whole in one of its parts, "
        "got the prompt -3 in part 1 of data-parallel rank 0 and in part 0 of data-parallel rank 1",
        row("prompt_mean"),
    ),
    "a prompt in the same part of two ranks": Refusal(
        "DataError: each prompt ... 7 in part 0 of data-parallel rank 0 and in part 0 of data-parallel "
        "rank 1",
        row("prompt_mean", places=(((0,), (2,)), ((1,), (3,)))),
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
    "a call after one that failed, on one rank": Refusal(
        "PeerError: another rank failed while counting the step",
        row("sample_mean"),
        on_rank={0: "DataError: a step must not be finished after one of its calls failed"},
        unlike={0: row("sample_mean", run=goes_on_after_an_error)},
    ),
    "no call and no model": Refusal(
        "DataError: a rank that makes no call in a stream must give its model", row(run=no_call)
    ),
    "no call and no model, on one rank": Refusal(
        "PeerError: another rank failed while counting the step",
        row(run=no_call_on_one_rank),
        on_rank={1: "DataError: a rank that makes no call in a stream must give its model"},
    ),
    "a model without a wrapper": Refusal(
        "HostError: this model cannot train ... Megatron's finalize_model_grads needs its Distributed",
        row("sample_mean", run=bare_model),
        topology="dp1",
    ),
    "a list of batches in place of an iterator": Refusal(
        "PeerError: another rank failed while counting the step",
        two_rows("sample_mean", hook={"count": "end"}, iterator=list, places=WHOLE),
        topology="tp2",
        on_rank={0: "HostError: data_iterator must be an iterator on ... got a dict"},
    ),
    "no iterator": Refusal(
        "HostError: data_iterator must be an iterator on ... got a NoneType",
        two_rows("sample_mean", hook={"count": "end"}, iterator=lambda _: None),
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
        "DataError: microbatches of a call, or of none, must decide their masks, got 1",
        decided(run=one_call, step=decides_once),
    ),
    "a decided mask that is too large": Refusal(
        "DataError: a mask that the loss decides must be from 0 to the loss_mask",
        decided(step=enlarges),
    ),
    "a decided mask in one microbatch of a call, where mismatches are warnings": Refusal(
        "DataError: the losses of all microbatches of a call, or of none, must decide their masks",
        decided(run=one_call, step=decides_once, after=decided(hook={"mismatch": "warn"})),
    ),
    "decided masks that lack a term": Refusal(
        "DataError: MaskedLosses must have a mask for each term of ['one', 'two'], got ['one']",
        decided(terms=dict.fromkeys(("one", "two"), aggregation("sum")), step=masks_of_one_term),
    ),
    "late rejection without a rule": Refusal(
        "DataError: a microbatch has rejected, and the aggregation does not say",
        decided(step=rejects_late, places=WHOLE),
        topology="tp2",
        on_rank={1: "PeerError: rank 0 of the group failed while planning"},
    ),
    "late rejection of too many samples": Refusal(
        "DataError: rejected of MaskedLosses must be bool [samples], one for each of the 2 samples",
        decided(step=functools.partial(rejects_by_rank, rejects=of_too_many)),
    ),
    "late rejection by one context-parallel rank": Refusal(
        "DataError: all context-parallel ranks must decide the same rejected samples",
        decided(
            options={"rejected": "skip"},
            step=functools.partial(rejects_by_rank, rejects=on_the_first_rank),
            places=WHOLE,
        ),
        topology="cp2",
    ),
    "terms with other masks": Refusal(
        "PeerError: another rank failed while counting the step",
        row(
            terms=dict.fromkeys(("one", "two"), aggregation("token_mean")),
            hook={"read_batch": other_masks},
            places=WHOLE,
        ),
        topology="pp2",
        on_rank={1: "DataError: the terms of a loss ... must have one denominator"},
    ),
    "a prompt of the second term in two calls": Refusal(
        "DataError: each prompt ... got the prompt 0 in part 0",
        row(
            terms=dict.fromkeys(("one", "two"), aggregation("constant", count="prompt")),
            places=(((0,), (1,)), ((2,), (3,))),
            hook={"read_batch": other_prompts},
            step=functools.partial(scripts.of_terms, names=("one", "two")),
        ),
    ),
    "no call where parameters are gathered in forward passes": Refusal(
        "HostError: a rank that makes no call in a stream ... got overlap_param_gather",
        row("token_mean", run=gathers_parameters_late),
    ),
    "two models": Refusal(
        "DataError: all calls of a stream must train one model", row(run=two_models)
    ),
    "a sum by weights": Refusal(
        "DataError: report= of a loss that is counted at its end must return means",
        row("sample_mean", step=with_sums),
    ),
    "no finalization": Refusal(
        "HostError: this model cannot train ... config.finalize_model_grads_func is None",
        two_rows("sample_mean", hook={"count": "end"}, config={"finalize_model_grads_func": None}),
    ),
    "losses of routers, and a rank without a call": Refusal(
        "HostError: this model cannot train ... losses of routers",
        row("token_mean", config=AUX, run=alone),
    ),
    "two batches in a forward step": Refusal(
        "DataError: a forward step must draw one batch, got 2",
        two_rows("sample_mean", hook={"count": "end"}, step=draws_two_batches),
    ),
    "read_step": Refusal(
        "OptionError: count 'end' draws no batch ahead",
        two_rows("sample_mean", hook={"count": "end", "read_step": next}),
    ),
    "nothing that divides gradients": Refusal(
        "HostError: this model cannot train ... config.finalize_model_grads_func is None",
        two_rows("token_mean", hook={"count": "end"}, config={"finalize_model_grads_func": None}),
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


def test_an_exception_inside_says_that_gradients_cannot_be_used() -> None:
    for error, printed, after in run_host_ranks(left_by_an_error, 2):
        assert error == "KeyError: 'a lost group'"
        assert "its gradients cannot be used" in printed
        assert after is None
