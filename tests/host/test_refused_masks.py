"""Masks, losses and tokens that are not those that were counted are refused, and no others.

Where tokens are compared masks are uniform, so that they tell nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import Loop, read_batch
from tests.host import scripts
from tests.host.refusals import EVALUATION, Row, assert_told, hook_of, in_turn
from tests.host.steps import Counted, batches

Batch = dict[str, Any]
STEP: tuple[dict[str, Any], ...] = ({},)
CHANGED = "MaskError: the loss function's mask is not this rank's part ... read_batch"


def another_samples(mask: Tensor) -> Tensor:
    return mask.roll(1, dims=0)


def later(mask: Callable[[Tensor], Tensor], data: Any = Counted, before: Any = STEP) -> Row:
    hook = hook_of("prompt_mean", loop=Loop(of_megatron=True))
    return Row(CHANGED, data=data, loss=scripts.with_mask(mask), before=before, hook=hook)


LOSS_FUNCTIONS = {
    "no mask": Row(
        "HostError: function without_mask.<locals>.<lambda>, ... TokenLoss",
        loss=scripts.without_mask,
    ),
    "a mask of another name": Row(
        "HostError: own_loss) ... a parameter named loss_mask", loss=scripts.with_another_name
    ),
    "losses [seq, samples]": Row(
        "MaskError: a mask [samples, seq] ... not transposed", step=scripts.transposed
    ),
    "a part of the losses": Row(
        "MaskError: expected one loss per token", loss=scripts.with_losses(lambda x: x[:, 1:])
    ),
    "a part of the mask": Row(
        "MaskError: where this rank's part of the batch's is ... a batch that is whole",
        loss=scripts.with_mask(lambda x: x[..., 1:]),
    ),
    "detached losses": Row(
        "HostError: losses without a gradient ... not detached",
        loss=scripts.with_losses(Tensor.detach),
    ),
    # A step without tokens verifies nothing.
    "factors of its own after an empty step": Row(
        "HostError: the loss function returned",
        data=in_turn(partial(Counted, active=()), Counted),
        loss=scripts.divided,
        before=[{"loss": scripts.divided}],
    ),
}
MASKS = {
    "a changed mask": Row(f"{CHANGED} ... it sums to", loss=scripts.with_mask(another_samples)),
    "a mask changed after an evaluation": later(another_samples, before=[EVALUATION]),
    "a mask changed later": later(scripts.first_token(0.0)),
    "a mask of NaN later": later(scripts.first_token(torch.nan)),
    # Tokens are weighed by the loss function's own mask. It stays right while each sample's sum is
    # the planned one, as of rows here, and not of packs.
    **{
        f"a mask edited in place, {layout}": Row(
            CHANGED if layout == "thd" else "",
            step=scripts.edits_its_mask,
            data=partial(Counted, layout=layout),
        )
        for layout in ("bshd", "thd")
    },
}


def between_samples(mask: Tensor) -> Tensor:
    """Moves a token's mask from the first sample to padding of the second; the sum stays."""
    mask = mask.clone()
    mask[0, 0], mask[0, 27] = mask[0, 27].item(), mask[0, 0].item()
    return mask


def within_a_sample(mask: Tensor) -> Tensor:
    mask = mask.clone()
    first, place = (int(x.nonzero()[0]) for x in (mask[0] != 0, mask[0] == 0))
    mask[0, place], mask[0, first] = 1.0, 0.0
    return mask


def moved(mode: str, change: Any, before: Any, says: str) -> Row:
    """A pack of two samples, in whose mask a token moves."""
    return Row(
        says,
        topology="dp1",
        data=lambda rank: itertools.cycle(batches(((0, 1),), "thd")),
        number=1,
        loss=scripts.with_mask(change),
        before=STEP if before else (),
        hook=hook_of(mode),
    )


MOVED = {
    # Whether the first step refuses it, and whether later ones do.
    f"a mask that moved {what}, {'later' if later else 'at first'}": moved(
        mode, change, later, CHANGED if refused else ""
    )
    for what, mode, change, *answers in (
        ("between samples", "sample_mean", between_samples, True, True),
        ("between samples that do not matter", "token_mean", between_samples, True, False),
        ("within a sample", "sample_mean", within_a_sample, False, False),
        ("within a sample that is weighed by token", "custom", within_a_sample, True, True),
    )
    for later, refused in enumerate(answers)
}


def windows(rows: int = 2) -> list[Batch]:
    """Consecutive windows of one text: the labels of a batch are the tokens of the next one."""
    text = torch.randint(0, 32, (5, rows, 16), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(rows, 16, dtype=torch.float64)
    return [{"tokens": text[i], "labels": text[i + 1], "loss_mask": mask} for i in range(4)]


def stream(rank: int, rows: int = 2) -> Iterator[Batch]:
    return itertools.cycle(windows(rows))


def by(*keys: str) -> Callable[[Batch], Microbatch]:
    """Reads the mask, and the tokens of some keys."""
    return lambda batch: Microbatch(batch["loss_mask"], token_ids=[batch[key] for key in keys])


def pack_of_rank(batch: Batch) -> Microbatch:
    """A row as a pack, of two samples on the second rank."""
    starts = torch.tensor([0, 8, 16] if dist.get_rank() else [0, 16])
    return Microbatch(batch["loss_mask"], starts, token_ids=batch["tokens"])


def positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def without_a_token(mask: Tensor, rank: int) -> Tensor:
    return scripts.first_token(0.0)(mask) if rank == 1 else mask


def split(says: str = "", rows: int = 2, before: Any = (), hook: Any = None, **change: Any) -> Row:
    """Of `scripts.of_parts` on two context-parallel ranks."""
    return Row(
        says,
        topology="cp2",
        data=partial(stream, rows=rows),
        number=4,
        step=scripts.of_parts(**change),
        before=before,
        hook=hook_of("token_mean", **hook or {}),
    )


ORDER = "StepError: the model is called with the tokens of microbatch"
TOKENS = {
    "parts of every rank": split(),
    "the same part on two ranks": split(
        "LayoutError: the model is called with the same tokens", part=lambda rank: 0
    ),
    "tokens that the script changes": split(tokens=lambda x: 31 - x),
    # As where the model gets embeddings: they tell nothing.
    "positions alone": split(own_tokens=positions),
    "a token less on one rank": split(CHANGED, mask=without_a_token),
    "other samples on each rank": split(
        "LayoutError: the context-parallel ranks have read different numbers",
        rows=1,
        hook={"read_batch": pack_of_rank},
    ),
    "one microbatch's tokens for all": split(ORDER, tokens=lambda tokens: windows()[0]["tokens"]),
}


def ordered(read: Any, order: tuple[int, ...], calls: tuple[int, ...], says: str = "") -> Row:
    """A step at hand, whose microbatches are in an ``order``."""
    return Row(
        says,
        topology="dp1",
        data=stream,
        step=scripts.of_parts(),
        planned=lambda rank: [read(windows()[i]) for i in order],
        calls=calls,
        hook=hook_of("token_mean"),
    )


def alike(batch: Batch) -> Microbatch:
    """A dummy, whose tokens are of one number."""
    return dataclasses.replace(read_batch(batch), token_ids=torch.zeros_like(batch["tokens"]))


ORDERS = {
    "in order": ordered(read_batch, (0, 1, 2, 3), (4,)),
    "by labels": ordered(by("labels"), (0, 1, 2, 3), (4,)),
    "by labels, in calls": ordered(by("labels"), (0, 1, 2, 3), (2, 2)),
    "two swapped": ordered(by("tokens"), (0, 2, 1, 3), (4,), ORDER),
    "calls swapped": ordered(by("tokens"), (2, 3, 0, 1), (2, 2), ORDER),
    "one in place of another": ordered(by("tokens"), (0, 1, 2, 2), (4,)),
    "turned, told nothing": ordered(by(), (3, 0, 1, 2), (4,)),
    "turned dummies": ordered(alike, (3, 0, 1, 2), (4,)),
}


def in_one_memory(rank: int) -> Iterator[Batch]:
    kept = {name: x.clone() for name, x in windows()[0].items()}
    for batch in windows():
        for name, x in batch.items():
            kept[name].copy_(x)
        yield kept


def one_for_all(rank: int) -> Iterator[Batch]:
    """One mapping in every microbatch, whose mask the reader is to write."""
    batch = windows()[0]
    return itertools.repeat({**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])})


def writes_the_mask(batch: Batch) -> Microbatch:
    batch["loss_mask"].fill_(1)
    batch["read"] = batch["labels"].clamp_(min=0)
    return Microbatch(batch["loss_mask"])


FOUR = {"topology": "dp1", "number": 4, "hook": hook_of("token_mean")}
WRITES = hook_of("token_mean", read_batch=writes_the_mask)
# Stock Megatron draws each batch before its own forward pass; the hook draws all before the first.
MEMORY = {
    "batches in one memory": Row(ORDER, data=in_one_memory, **FOUR),
    "an evaluation in one memory": Row(ORDER, data=in_one_memory, call=EVALUATION, **FOUR),
    "one batch for all, whose mask the reader writes": Row(
        data=one_for_all, **{**FOUR, "hook": WRITES}
    ),
}
ROWS = {**LOSS_FUNCTIONS, **MASKS, **MOVED, **TOKENS, **ORDERS, **MEMORY, "a good step": Row()}


@pytest.mark.parametrize("name", ROWS)
def test_every_rank_refuses_what_was_not_counted_and_nothing_else(name: str) -> None:
    assert_told(__name__, name)
