"""Masks that the model makes and losses of all tokens: what would not be exact is refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import (
    DatasetReports,
    Extension,
    LateMicrobatch,
    Loop,
    TokenLoss,
    read_batch,
    read_samples,
)
from tests.host import scripts, whole
from tests.host.refusals import EVALUATION, Row, assert_told, hook_of, thd
from tests.host.steps import Counted, batches


# Masks that the model makes.
def mask_of(value: float, ranks: tuple[int, ...] = (0, 1)) -> Any:
    """The mask, on some ranks with one other element."""

    def change(mask: Tensor) -> Tensor:
        mask = mask.clone()
        if dist.get_rank() in ranks:
            mask.view(-1)[0] = value
        return mask

    return scripts.with_mask(change)


def one_more(batch: Any) -> LateMicrobatch:
    return LateMicrobatch(len(batch["tokens"]) + 1)


def by_turns(batch: Any) -> Microbatch | LateMicrobatch:
    return Microbatch(torch.ones(2, 3)) if batch["number"] % 2 else scripts.samples_alone(batch)


class Needing(Extension):
    def __init__(self, need: str) -> None:
        self.needs = frozenset({need})


def late(mode: str, says: str = "", reads: Any = read_samples, **options: Any) -> Row:
    """``hooked``: other options of the hook."""
    hook = hook_of(mode, read_batch=reads, **options.pop("hooked", {}))
    return Row(says, hook=hook, **options)


FLAT = partial(Counted, layout="thd")
OTHER_VALUES = "MaskError: the model's mask of microbatch 0 has other values"
NO_TOTAL = "ModeError: calculate_per_token_loss=False and 'token_mean' with a mask that the model"
REFUSED_OPTIONS: dict[str, dict[str, Any]] = {
    "an extension that needs 'masks' with": {"extensions": [Needing("masks")]},
    "an extension that needs 'stages' with": {"extensions": [Needing("stages")]},
    "an extension that needs 'dataset' with": {"extensions": [DatasetReports()]},
    "empty_step='skip' with": {"empty_step": "skip"},
    "(Megatron's --sft) with": {"loop": Loop(averages_quotients=True)},
}
OF_LATE_MASKS = {
    "late masks, a mean of the step": late("token_mean", NO_TOTAL),
    "late masks, a mean of prompts": late("prompt_mean", "ModeError: 'prompt_mean' with a mask"),
    "late fractions that the host divides by": late(
        "token_mean", OTHER_VALUES, per_token=True, loss=mask_of(0.5)
    ),
    **{
        f"a late mask of {value}": late("sum", OTHER_VALUES, loss=mask_of(value))
        for value in (-1.0, torch.nan)
    },
    "a late mask of another context-parallel rank": late(
        "sample_mean", OTHER_VALUES, topology="cp2", loss=mask_of(-1.0, (1,))
    ),
    "a late mask that is flat": late(
        "sum",
        "MaskError: shape (144,) with None rows, for 2 samples",
        loss=scripts.with_mask(Tensor.flatten),
    ),
    "a late mask of other samples": late(
        "sample_sum", "MaskError: shape (2, 72) with 2 rows, for 3 samples", reads=one_more
    ),
    "a late mask of packs by sample": late(
        "sample_mean",
        "MaskError: shape (1, 28) with 2 packed seq",
        reads=scripts.samples_alone,
        data=FLAT,
    ),
    "late masks of some batches": late(
        "sum", "FunctionError: LateMicrobatch ... expected", reads=by_turns
    ),
    "late masks with experts": late(
        "sum",
        "ModeError: calculate_per_token_loss and the model's num_moe_experts with",
        per_token=True,
        config={"num_moe_experts": 2},
    ),
    **{
        f"late masks with {text}": late("sum", f"ModeError: {text}", hooked=options)
        for text, options in REFUSED_OPTIONS.items()
    },
}


# Whole losses, and how they say that they were gathered.
def all_but_the_last(iterator: Any, model: Any) -> Any:
    """As in reinforcement learning: a number of losses that the ranks cannot share evenly."""
    output, loss_func = LOCAL(iterator, model)
    mask = loss_func.loss_mask[:, :-1]
    return output, TokenLoss(lambda x: (loss_func.compute(x)[0][:, :-1], {}), mask, "local_grad")


def apart(losses: Tensor) -> Tensor:
    """Losses that are not of the model's output."""
    return torch.zeros_like(losses, requires_grad=True)


def by_sample(batch: dict[str, Tensor]) -> Microbatch:
    return Microbatch(torch.ones(len(batch["prompt_ids"]), 1))


def of_own_tokens(iterator: Any, model: Any) -> Any:
    """Losses by sample from this rank's tokens alone."""
    output, loss_func = whole.script("local_grad", gathers=False)(iterator, model)

    def compute(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return (loss_func.compute(x)[0] * loss_func.loss_mask).sum().expand(2), {}

    return output, TokenLoss(compute, torch.ones(2), "local_grad")


def a_row(rank: int) -> Iterator[Any]:
    return batches(((0,),), "bshd")


def of_whole(step: Any, says: str = "", reads: Any = read_batch, **options: Any) -> Row:
    hook = hook_of("sample_mean", read_batch=reads)
    one = {"topology": "cp2", "data": thd(((0, 1),) * 2), "number": 1}
    return Row(says, **{**one, "hook": hook, "step": step, **options})


MEASURED = "LayoutError: TokenLoss(whole= ... for the losses of 'sample_mean', whose gather"
REDUCED, LOCAL = whole.script("reduced_grad"), whole.script("local_grad")
REDUCED_SAID_LOCAL = whole.script("reduced_grad", whole="local_grad")
OF_WHOLE_LOSSES = {
    "reduced gradients, said local": of_whole(
        REDUCED_SAID_LOCAL, f"{MEASURED} ... expected whole='reduced_grad'"
    ),
    "local gradients, said reduced": of_whole(
        whole.script("local_grad", whole="reduced_grad"),
        f"{MEASURED} ... expected whole='local_grad'",
    ),
    "reduced gradients, said local, after an evaluation": of_whole(
        REDUCED_SAID_LOCAL, MEASURED, before=[{"forward_step_func": REDUCED, **EVALUATION}]
    ),
    # What is measured is a copy.
    "whole losses that overwrite their input": of_whole(
        whole.script("local_grad", function=whole.Consumed.apply)
    ),
    "whole losses apart from the model": of_whole(whole.script("local_grad", function=apart)),
    "whole losses that say nothing": of_whole(
        whole.script("local_grad", whole=None),
        "LayoutError: a loss mask of all ... TokenLoss(whole='local_grad') or 'reduced_grad'",
    ),
    "parts said to be whole": of_whole(
        whole.script("local_grad", gathers=False),
        "LayoutError: a loss mask of a part ... sharded as the model's inputs are",
    ),
    "losses by sample of each rank's own tokens": of_whole(
        of_own_tokens,
        "LayoutError: the losses of 'sample_mean' differ between ... SequenceSum(",
        reads=by_sample,
    ),
    "whole losses of an odd length": of_whole(
        all_but_the_last, reads=scripts.without_the_last, data=a_row
    ),
    "parts of an odd length": of_whole(
        whole.script("local_grad", whole=None, gathers=False),
        "MaskError: a loss mask of shape (1, 12), where",
        reads=scripts.without_the_last,
        data=a_row,
    ),
}
ROWS = {**OF_LATE_MASKS, **OF_WHOLE_LOSSES, "a good step": Row()}


@pytest.mark.parametrize("name", ROWS)
def test_late_masks_and_whole_losses_that_would_not_be_exact_are_refused(name: str) -> None:
    assert_told(__name__, name)
