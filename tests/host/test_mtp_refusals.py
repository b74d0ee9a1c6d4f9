"""What of multi-token prediction cannot be aggregated exactly, and is refused by name."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from typing import Any

import pytest
import torch

from megatron_loss_agg import CPLayout, Microbatch, Term
from megatron_loss_agg.mcore import LossHook, MultiTokenPrediction, TokenLoss, read_batch
from tests.host import whole
from tests.host.harness import TOPOLOGIES, build_chunks, error_of, run_host_ranks
from tests.host.scripts import with_labels as forward_step
from tests.host.steps import VOCAB, aggregation, batches
from tests.host.test_mtp import METHOD, with_mtp

pytestmark = pytest.mark.host


def without_mask(data_iterator: Any, model: Any) -> Any:
    from tests.host import gpt

    tokens, labels, mask, _ = gpt.local_batch(data_iterator)
    losses = model(tokens, gpt.positions_like(tokens), None, labels=labels)
    return losses, partial(gpt.stock_loss_func, mask)


def without_labels(data_iterator: Any, model: Any) -> Any:
    from tests.host import gpt

    tokens, _, mask, _ = gpt.local_batch(data_iterator)
    logits = model(tokens, gpt.positions_like(tokens), None, loss_mask=mask)
    return logits.sum(dim=-1), partial(gpt.stock_loss_func, mask)


def and_again(data_iterator: Any, model: Any) -> Any:
    """As loops that take log-probabilities in the forward step, too."""
    losses, loss_func = forward_step(data_iterator, model)
    tokens = torch.zeros_like(loss_func.args[0], dtype=torch.int64)
    with torch.no_grad():
        model(tokens, tokens, None)
    return losses, loss_func


def twice(data_iterator: Any, model: Any) -> Any:
    losses, loss_func = forward_step(data_iterator, model)
    tokens = torch.zeros_like(loss_func.args[0], dtype=torch.int64)
    model(tokens, tokens, None, labels=tokens)
    return losses, loss_func


def shorter(data_iterator: Any, model: Any) -> Any:
    """As reinforcement learning's scripts: no loss of the last position."""
    losses, loss_func = forward_step(data_iterator, model)
    return losses, TokenLoss(lambda x: (x[:, :-1], {}), loss_func.args[0][:, :-1])


def shorter_mask(batch: Any) -> Microbatch:
    return Microbatch(batch["loss_mask"][:, :-1])


def gathered(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    losses, loss_func = forward_step(iter([batch]), model)
    losses, mask = whole.of_all(batch, losses, *loss_func.args)
    return losses, TokenLoss(lambda x: (x, {}), mask, whole="local_grad")


def contiguous(data_iterator: Any, model: Any) -> Any:
    """Splits rows over context-parallel ranks in another way than the host moves labels."""
    from tests.host import gpt

    _, size, rank = whole.context_parallel()
    batch = next(data_iterator)
    layout = CPLayout.contiguous(batch["tokens"].shape[1], size, rank)
    tokens, labels, mask = (layout.shard(batch[k]) for k in ("tokens", "labels", "loss_mask"))
    losses = model(tokens, gpt.positions_like(tokens), None, labels=labels, loss_mask=mask)
    return losses, partial(gpt.stock_loss_func, mask)


def third_loss(data_iterator: Any, model: Any) -> Any:
    """The model computes a loss of its own, besides those of MTP and the main one."""
    module = model.module
    compute = getattr(module, METHOD)
    logits = torch.zeros(1, 1, VOCAB, requires_grad=True)
    handle = module.register_forward_pre_hook(
        lambda *_: compute(torch.zeros(1, 1, dtype=torch.int64), logits) and None
    )
    try:
        return forward_step(data_iterator, model)
    finally:
        handle.remove()


def with_depths(terms: Any = None, **options: Any) -> LossHook:
    terms = aggregation("token_mean") if terms is None else terms
    return LossHook(terms, extensions=[MultiTokenPrediction()], **options)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "no layers": ("dp1", {"mtp_num_layers": None}, "a model with mtp_num_layers=None"),
    "no factor": (
        "dp1",
        {"mtp_loss_scaling_factor": None},
        "and a model with mtp_num_layers=2, mtp_loss_scaling_factor=None",
    ),
    "no mask": ("dp1", without_mask, "are not the loss mask moved by the depth"),
    "no labels": ("dp1", without_labels, "are not the loss mask moved by the depth"),
    "two calls": ("dp1", twice, "losses of [24, 24, 24, 24, 24, 24] tokens by compute_language"),
    "shorter": ("dp1", shorter, "with a loss mask of 23; expected 2 of MTP and the main one"),
    "gathered": ("cp2", gathered, "losses of [72, 72, 72] tokens by compute_language_model_loss"),
    "contiguous": ("cp2", contiguous, "are not the loss mask moved by the depth"),
    # The same weights under two splits, at depth 0 alone.
    "ambiguous": ("cp2", forward_step, "this rank's mask and tokens fit the splits"),
    "third loss": (
        "dp1",
        third_loss,
        "losses of [1, 24, 24, 24] tokens by compute_language_model_l",
    ),
}


def refusals(name: str) -> dict[str, str | None]:
    """Every rank: what became of each case of this topology."""
    from tests.host import gpt

    topology = with_mtp(name)
    gpt.initialize(**topology.sizes)
    found = {}
    for case, (of, change, _) in REFUSED.items():
        if of != name:
            continue
        config = change if isinstance(change, dict) else {}
        model = build_chunks(topology, False)
        vars(model[0].config).update(config)
        (batch,) = batches((((0,),) if name == "dp1" else ((0, 2),)), "bshd")
        if case == "ambiguous":
            batch = {name: torch.ones_like(x) for name, x in batch.items()}
        reads = shorter_mask if change is shorter else read_batch
        hook = with_depths(read_batch=reads)
        step = forward_step if config else change
        found[case] = error_of(gpt.run_step, hook, model, iter([batch]), 1, forward_step_func=step)
    return found


def later_steps() -> tuple[list[str | None], str]:
    """What becomes of a good step, of one more forward pass, and of a mask not moved at last; and
    what is printed.
    """
    from tests.host import gpt

    topology = with_mtp("dp1")
    gpt.initialize(**topology.sizes)
    model, hook = build_chunks(topology, False), with_depths()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        errors = [
            error_of(gpt.run_step, hook, model, batches(((0,),), "bshd"), 1, forward_step_func=step)
            for step in (forward_step, and_again, without_mask)
        ]
    return errors, output.getvalue()


def test_every_step_is_compared() -> None:
    (((good, again, bad), printed),) = run_host_ranks(later_steps, 1)
    assert "; mtp: same" in printed
    assert (good, again) == (None, None)
    assert bad is not None and "are not the loss mask moved by the depth" in bad


@pytest.mark.parametrize("name", ["dp1", "cp2"])
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    for rank in run_host_ranks(refusals, TOPOLOGIES[name].world_size, name):
        assert len(rank) == sum(of == name for of, _, _ in REFUSED.values())
        for case, error in rank.items():
            assert error is not None and REFUSED[case][2] in error, (case, error)
            if case != "ambiguous":
                assert error.startswith("HostError: ")
                assert "--loss-aggregation-mtp same (MultiTokenPrediction())" in error


TERMS = {
    "the first weighs nothing": (
        {"a": Term(aggregation("sum"), 0.0), "b": Term(aggregation("sum"))},
        "ModeError: --loss-aggregation-mtp same (MultiTokenPrediction()) with the coefficient 0 of "
        "'a', by which MTP's losses are",
    ),
    "named as a depth": (
        {"a": Term(aggregation("sum")), "mtp_1 a": Term(aggregation("sum"))},
        "ReportError: the loss function reports 'mtp_1 a loss'",
    ),
}


def of_terms(names: list[str], data_iterator: Any, model: Any) -> Any:
    losses, loss_func = forward_step(data_iterator, model)
    return losses, TokenLoss(lambda x: (dict.fromkeys(names, x), {}), *loss_func.args)


def errors_of_terms() -> dict[str, str | None]:
    from tests.host import gpt

    topology = with_mtp("dp1")
    gpt.initialize(**topology.sizes)
    found = {}
    for case, (terms, _) in TERMS.items():
        model, data = build_chunks(topology, False), batches(((0,),), "bshd")
        step = partial(of_terms, [*terms])
        found[case] = error_of(
            gpt.run_step, with_depths(terms), model, data, 1, forward_step_func=step
        )
    return found


def test_terms_that_do_not_go_with_depths_are_refused() -> None:
    (found,) = run_host_ranks(errors_of_terms, 1)
    for case, (_, text) in TERMS.items():
        error = found[case]
        assert error is not None and error.startswith(text), (case, error)
