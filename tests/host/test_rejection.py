"""Rejection by this step's own log-probabilities: denominators of before it, and of after it.

A token, or a whole sample, is rejected where the log-probabilities have moved too far from those
of the rollout. Which ones is known after the forward pass of their microbatch, and not before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from itertools import cycle, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import LateMicrobatch
from tests.host.cases import Case, run
from tests.host.harness import EXACT, TOPOLOGIES, run_host_ranks
from tests.host.reference import Reference
from tests.host.rl import data_of
from tests.host.steps import PLACES, Weights, sequences, weights_of, weights_with
from tests.oracle import Sample

pytestmark = pytest.mark.host

LIMITS = {"token": 0.5, "sample": 0.45}
"""How far a log-probability, or the mean of a sample's, may move."""


def count(batch: Any) -> LateMicrobatch:
    offsets = batch.get("cu_seqlens")
    return LateMicrobatch(len(batch["tokens"]) if offsets is None else len(offsets) - 1)


def forward_step(data_iterator: Any, model: Any, by: str, when: str) -> Any:
    """The model's output is log-probabilities, of which the mask of the loss is made."""
    from megatron.core import parallel_state

    from megatron_loss_agg import CPLayout, SequenceMean
    from megatron_loss_agg.mcore import TokenLoss, read_batch
    from tests.host import gpt

    batch = next(data_iterator)
    tokens, labels, mask, packed = gpt.local_batch(iter([batch]))
    logits = model(tokens, gpt.positions_like(tokens), None, packed_seq_params=packed)
    log_probs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    data = data_of(tokens, labels)
    moved = (log_probs - data.old).detach()
    if by == "sample":
        group = parallel_state.get_context_parallel_group()
        place = group.size(), group.rank()
        layout = CPLayout.bshd(batch["tokens"].shape[1], *place)
        if packed is not None:
            layout = CPLayout.thd(batch["cu_seqlens_padded"], *place)
        moved = SequenceMean(read_batch(batch), layout, group)(moved)
    kept = moved.abs() <= LIMITS[by]

    def compute(log_probs: Tensor) -> tuple[Tensor, dict[str, Any]]:
        losses = -data.advantages * (log_probs - data.old).exp()
        return losses.where(kept, 0) if when == "before" else losses, {}

    return log_probs, TokenLoss(compute, mask if when == "before" else mask * kept)


class Tokens(NamedTuple):
    """Of every sample in one fp64 process: losses of its tokens, and how far they have moved."""

    reference: Reference
    moved: list[Tensor]


def on_one_rank() -> Tokens:
    from tests.host import gpt

    gpt.initialize()
    model = gpt.build()
    names, parameters = zip(*model.named_parameters(), strict=True)
    losses, gradients, moved = [], [], []
    for sequence in sequences():
        data = data_of(sequence.tokens, sequence.labels)
        new = -gpt.plain_losses(model, sequence)
        of_tokens = -data.advantages * (new - data.old).exp()
        rows = [
            torch.autograd.grad(x, parameters, retain_graph=True, materialize_grads=True)
            for x in of_tokens
        ]
        columns = zip(*rows, strict=True)
        gradients.append({n: torch.stack(c) for n, c in zip(names, columns, strict=True)})
        losses.append(of_tokens.detach())
        moved.append((new - data.old).detach())
    return Tokens(Reference(losses, gradients), moved)


@functools.cache
def one_process() -> Tokens:
    return Tokens(*run_host_ranks(on_one_rank, 1)[0])


@functools.cache
def kept(by: str) -> list[list[float]]:
    """1 or 0 for each token of each sample."""
    distances = []
    for moved, sequence in zip(one_process().moved, sequences(), strict=True):
        m = torch.tensor(sequence.sample.mask)
        mean = (m * moved).sum() / m.sum().clamp(min=1)
        distances.append((mean.expand_as(moved) if by == "sample" else moved).abs())
    active = torch.cat([torch.tensor(x.sample.mask) for x in sequences()]) > 0
    distance = torch.cat(distances)[active]
    assert 0.2 < (distance <= LIMITS[by]).double().mean() < 0.8  # some of each
    assert (distance - LIMITS[by]).abs().min() > 1e-9  # whatever the rounding
    return [(x <= LIMITS[by]).double().tolist() for x in distances]


def weights_before(mode: str, by: str) -> Weights:
    """Those of a step without rejection, times 0 where it is rejected."""
    planned = weights_of(mode, PLACES[2])
    return [(i, [w * k for w, k in zip(of, kept(by)[i], strict=True)]) for i, of in planned]


def weights_after(mode: str, by: str, **options: Any) -> Weights:
    """Those of a step in whose masks rejected tokens are 0."""

    def sample(i: int, _: tuple[int, ...]) -> Sample:
        given = sequences()[i].sample
        left = [m * k for m, k in zip(given.mask, kept(by)[i], strict=True)]
        return Sample(tuple(left), given.prompt, given.rollout)

    return weights_with(mode, PLACES[2], sample, **options)


OPTIONS: dict[str, dict[str, Any]] = {"constant": {"divisor": 7.0}}
LATE = [
    ("sample_mean", "bshd", False, "token"),
    ("sample_mean", "bshd", True, "sample"),
    ("microbatch_mean", "thd", False, "token"),
    ("constant", "thd", True, "sample"),
    ("token_mean", "bshd", True, "sample"),
    ("token_mean", "thd", True, "token"),
]


def cases() -> Iterator[tuple[Case, Weights]]:
    ways = cycle([("thd", False), ("bshd", True), ("bshd", False), ("thd", True)])
    before = product(("token_mean", "sample_mean", "prompt_mean"), LIMITS)
    for (mode, by), (layout, per_token) in zip(before, ways, strict=False):
        step = partial(forward_step, by=by, when="before")
        yield Case(mode, layout=layout, per_token=per_token, step=step), weights_before(mode, by)
    for mode, layout, per_token, by in LATE:
        options = OPTIONS.get(mode, {})
        late = {"step": partial(forward_step, by=by, when="after"), "hook": {"read_batch": count}}
        case = Case(mode, options, layout=layout, per_token=per_token, **late)
        yield case, weights_after(mode, by, **options)


def test_gradients_and_reports_are_those_of_denominators_before_and_after_it() -> None:
    of_tokens = one_process().reference
    chosen, weights = zip(*cases(), strict=True)
    gradients = [of_tokens.gradient(x) for x in weights]
    found = run(TOPOLOGIES["dp2-cp2"], chosen, gradients)
    for (case, ranks), of in zip(found.items(), weights, strict=True):
        for error, reports in ranks:
            assert error <= EXACT, case
            assert reports[f"{case.mode} loss"] == pytest.approx(of_tokens.loss(of), rel=1e-13)


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean"])
def test_it_makes_a_difference_which(mode: str) -> None:
    assert weights_before(mode, "token") != weights_after(mode, "token")
