"""A data iterator that fills the same memory for every batch is refused: a step is drawn ahead.

Stock Megatron is right with one, since it draws each batch before its own forward pass. The first
step finds it, by the tokens that the model is called with, if the step has several microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import LossHook, read_batch
from tests.host.harness import EXACT, error_of, run_host_ranks
from tests.host.reference import relative_error
from tests.host.steps import aggregation, batch_of, sequences

pytestmark = pytest.mark.host

CHANGED = "StepError: the model is called with the tokens of microbatch"
Batch = dict[str, Any]


def new() -> Iterator[Batch]:
    """New tensors for every batch; as many as a test asks for, with full masks alike."""
    for sample in sequences() * 2:
        batch = batch_of([sample], "bshd")
        yield {**batch, "loss_mask": torch.ones_like(batch["loss_mask"])}


def written_by_torch(kept: Batch, batch: Batch) -> Batch:
    for name, x in batch.items():
        kept[name].copy_(x)
    return kept


def written_by_numpy(kept: Batch, batch: Batch) -> Batch:
    for name, x in batch.items():
        kept[name].numpy()[...] = x.numpy()
    return dict(kept)


def one_mapping(kept: Batch, batch: Batch) -> Batch:
    kept.update(batch)
    return kept


def refilled(write: Callable[[Batch, Batch], Batch], buffers: int = 1) -> Iterator[Batch]:
    """The batches of `new`, by turns in the memory of as many as there are ``buffers``."""
    kept: list[Batch] = []
    for i, batch in enumerate(new()):
        if len(kept) < buffers:
            kept.append(batch)
            yield batch
        else:
            yield write(kept[i % buffers], batch)


def by_turns_in_one_buffer(rows: int) -> Iterator[Batch]:
    """The batches of `new`, each in a row of one tensor."""
    buffer: Batch = {}
    for i, batch in enumerate(new()):
        row = slice(i % rows, i % rows + 1)
        for name, x in batch.items():
            buffer.setdefault(name, torch.cat([x] * rows))[row].copy_(x)
        yield {name: x[row] for name, x in buffer.items()}


def reads_and_adds(batch: Batch) -> Microbatch:
    """A reader that makes the mask, and puts it into its batch."""
    batch["loss_mask"] = (batch["labels"] >= 0).double()
    batch["labels"].clamp_(min=0)
    return Microbatch(batch["loss_mask"])


SOURCES: dict[str, Callable[[], Iterator[Batch]]] = {
    "torch": lambda: refilled(written_by_torch),
    "torch, two by turns": lambda: refilled(written_by_torch, 2),
    "numpy": lambda: refilled(written_by_numpy),
    "numpy, two by turns": lambda: refilled(written_by_numpy, 2),
    "one mapping": lambda: refilled(one_mapping),
    "rows of one buffer": lambda: by_turns_in_one_buffer(2),
}
N_MB = 4


def steps_on_host() -> dict[str, Any]:
    """One rank: by source, stock Megatron's error in its gradient, and what the hook says."""
    from tests.host import gpt, gradients

    gpt.initialize()
    model = gpt.ddp_model(per_token=True)

    def gradient(hook: LossHook | None, data: Any) -> dict[str, torch.Tensor]:
        gpt.run_step(hook, model, data, N_MB)
        return gradients.of(model)

    def edits(data: Any, chunk: Any) -> Any:
        batch = next(data)
        for x in batch.values():
            x.clamp_(min=0)  # the script's own write, to its part of the memory of all
        return gpt.forward_step(iter([batch]), chunk)

    wanted, answers = gradient(None, new()), {}
    for name, source in SOURCES.items():
        says = [
            error_of(gpt.run_step, LossHook(aggregation("token_mean")), model, source(), N_MB, **o)
            for o in ({}, {"forward_only": True})
        ]
        answers[name] = relative_error(gradient(None, source()), wanted), says

    def error(source: Any, read_batch: Any = read_batch) -> float:
        hook = LossHook(aggregation("token_mean"), read_batch=read_batch)
        return relative_error(gradient(hook, source), wanted)

    answers["new"] = error(new())
    answers["rows"] = error(by_turns_in_one_buffer(N_MB))
    answers["added"] = error(({**batch, "loss_mask": None} for batch in new()), reads_and_adds)
    whole: Batch = {name: torch.cat([batch[name] for batch in new()]) for name in next(new())}
    views = ({name: x[i : i + 1] for name, x in whole.items()} for i in itertools.count())
    hook = LossHook(aggregation("token_mean"))
    answers["views"] = error_of(gpt.run_step, hook, model, views, N_MB, forward_step_func=edits)
    alike, wanted = next(new()), gradient(None, itertools.repeat(next(new())))
    answers["repeated"] = error(itertools.repeat(alike))
    return answers


def test_a_step_in_refilled_memory_is_refused() -> None:
    (answers,) = run_host_ranks(steps_on_host, 1)
    for name in ("new", "repeated", "rows", "added"):
        assert answers.pop(name) <= EXACT, name
    assert answers.pop("views") is None
    assert answers.keys() == SOURCES.keys()
    for name, (stock, (trained, evaluated)) in answers.items():
        assert stock == 0, name
        assert trained.startswith(CHANGED), (name, trained)
        assert evaluated.startswith(CHANGED), (name, evaluated)


def one_of_two_ranks() -> str | None:
    from tests.host import gpt

    gpt.initialize()
    hook = LossHook(aggregation("token_mean"))
    data = refilled(written_by_torch) if gpt.data_rank() else new()
    return error_of(gpt.run_step, hook, gpt.ddp_model(), data, N_MB)


def test_a_rank_refuses_its_own_when_the_call_has_ended() -> None:
    peer, own = run_host_ranks(one_of_two_ranks, 2)
    assert own is not None and own.startswith(CHANGED)
    assert peer is None
