"""Masks that the model makes: a step is exact, or refused on every rank.

So are those of a rejection by this step's own log-probabilities, by token or by sample: which are
rejected is known after the forward pass of their microbatch, and not before.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import Microbatch, SequenceMean, Term
from megatron_loss_agg.mcore import (
    DatasetReports,
    Extension,
    LateMicrobatch,
    Loop,
    TokenLoss,
    read_batch,
    read_samples,
)
from tests.host import gpt, parallel_state, scripts
from tests.host.cases import Case, Expected, assert_exact, by_the_oracle
from tests.host.harness import MOE, TOPOLOGIES
from tests.host.reference import gradient_of_sum, reference
from tests.host.refusals import Refusal, assert_told, two_rows
from tests.host.steps import (
    PLACES,
    PROMPTS,
    Weights,
    aggregation,
    sequences,
    weights_of,
    weights_with,
)
from tests.host.test_whole_losses import whole
from tests.oracle import Sample

OPTIONS: dict[str, dict[str, Any]] = {"sum": {"divisor": 3.0}, "constant": {"divisor": 7.0}}
MODES = {
    "bshd": ("sum", "constant", "sample_sum", "sample_mean", "microbatch_mean"),
    "thd": ("sum", "constant", "sample_sum", "microbatch_mean"),  # whose samples are not told apart
}


ROWS_AND_PACKS = [(layout, mode) for layout, modes in MODES.items() for mode in modes]


def late(mode: str, layout: str, per_token: bool, **more: Any) -> Case:
    hook = {"read_batch": scripts.samples_alone if layout == "thd" else read_samples}
    options = OPTIONS.get(mode, {})
    return Case(mode, options, layout=layout, per_token=per_token, hook=hook, **more)


HALF = {"a": aggregation("sample_mean"), "b": Term(aggregation("sum"), coefficient=0.5)}
TWO_TERMS = {"terms": HALF, "step": partial(scripts.of_terms, names=HALF)}
WITH_FLAG, WITHOUT = (
    [late(mode, layout, flag, masks="fractional") for layout, mode in ROWS_AND_PACKS]
    for flag in (True, False)
)
# A sum of masks is then the host's own.
WITH_FLAG += [late("token_mean", layout, True) for layout in MODES]
# How ranks gather the losses of all tokens; and a step of two calls.
WAYS: list[dict[str, Any]] = [
    {"step": whole("local_grad")},
    {"step": whole("reduced_grad")},
    {"calls": (1, 3)},
]
KINDS = [("token_mean", True), *product(("sample_mean", "microbatch_mean"), (False, True))]
CASES = {
    "dp2-cp2": WITHOUT + WITH_FLAG,
    "cp2": [
        *(late(mode, "bshd", flag, **way) for (mode, flag), way in product(KINDS, WAYS)),
        *(late("sample_mean", "bshd", flag, **TWO_TERMS) for flag in (False, True)),
    ],
    "tp2-sp": WITHOUT[::2] + WITH_FLAG[1::2],
    "pp2": WITHOUT[1::2] + WITH_FLAG[::2],
}


def expected(case: Case, model: str) -> Expected:
    gradient, reports = by_the_oracle(case, model)
    if case.terms:
        of_both = (1.0, case.weights), (0.5, weights_of("sum", case.places))
        gradient = gradient_of_sum(*((factor, reference(model), w) for factor, w in of_both))
        return gradient, {"a loss": reports["sample_mean loss"]}
    if case.step:  # a `TokenLoss` reports nothing by itself
        del reports["lm loss"]
    return gradient, reports


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_and_the_reports_are_those_of_the_whole_step(name: str) -> None:
    topology = TOPOLOGIES[name]
    places = PLACES[topology.data_parallel_size]
    cases = [dataclasses.replace(case, places=places) for case in CASES[name]]
    assert_exact(topology, cases, partial(expected, model=topology.model))


OLD, LIMITS = 4.0, {"token": 0.5, "sample": 0.15}
"""The losses of the rollout; how far one, or a sample's mean, may have moved: half of them do."""


def rejecting(iterator: Any, model: Any, by: str, when: str) -> Any:
    """Denominators are those of "before" the rejection, or of "after" it."""
    batch = gpt.received(iterator)
    losses, loss_func = gpt.forward_step(iter([batch]), model)
    (mask,), moved = loss_func.args, losses.detach() - OLD
    if by == "sample":
        group = parallel_state.get_context_parallel_group()
        moved = SequenceMean(read_batch(batch), gpt.layout_of(batch), group)(moved)
    kept = moved.abs() <= LIMITS[by]
    if when == "before":
        return losses, TokenLoss(lambda x: (x.where(kept, 0), {}), mask)
    return losses, TokenLoss(lambda x: (x, {}), mask * kept)


def kept(by: str, i: int) -> list[float]:
    """1 or 0 for each token of the sample."""
    mask = torch.tensor(sequences()[i].sample.mask)
    moved = reference().losses[i] - OLD
    if by == "sample":
        moved = ((mask * moved).sum() / mask.sum().clamp(min=1)).expand_as(moved)
    return (moved.abs() <= LIMITS[by]).double().tolist()


def weights_before(mode: str, by: str) -> Weights:
    """Those of a step without rejection, times 0 where it is rejected."""
    planned = weights_of(mode, PLACES[2])
    return [(i, [w * k for w, k in zip(of, kept(by, i), strict=True)]) for i, of in planned]


def weights_after(mode: str, by: str) -> Weights:
    """Those of a step in whose masks rejected tokens are 0."""

    def sample(i: int, _: tuple[int, ...]) -> Sample:
        given = sequences()[i].sample
        left = [m * k for m, k in zip(given.mask, kept(by, i), strict=True)]
        return dataclasses.replace(given, mask=tuple(left))

    return weights_with(mode, PLACES[2], sample, **OPTIONS.get(mode, {}))


def test_denominators_are_those_of_before_a_rejection_or_of_after_it() -> None:
    before = [("token_mean", "thd", False, "token"), ("prompt_mean", "bshd", True, "sample")]
    after = [
        ("sample_mean", "bshd", False, "token"),
        ("microbatch_mean", "thd", False, "token"),
        ("constant", "thd", True, "sample"),
        ("token_mean", "bshd", True, "sample"),
    ]
    weights: dict[Case, Weights] = {}
    for mode, layout, flag, by in before:
        step = partial(rejecting, by=by, when="before")
        case = Case(mode, layout=layout, per_token=flag, step=step)
        weights[case] = weights_before(mode, by)
    for mode, layout, flag, by in after:
        step = partial(rejecting, by=by, when="after")
        weights[late(mode, layout, flag, step=step)] = weights_after(mode, by)

    def expected(case: Case) -> Expected:
        loss = reference().loss(weights[case])
        return reference().gradient(weights[case]), {f"{case.mode} loss": loss}

    assert_exact(TOPOLOGIES["dp2-cp2"], [*weights], expected)


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
    first = batch["prompt_ids"][0] == PROMPTS[0]
    return scripts.samples_alone(batch) if first else Microbatch(torch.ones(2, 3))


class Needing(Extension):
    def __init__(self, need: str) -> None:
        self.needs = frozenset({need})


def refused(
    mode: str,
    says: str = "",
    reads: Any = read_samples,
    form: scripts.Form | None = None,
    topology: str = "dp2",
    **options: Any,
) -> Refusal:
    hook = {"read_batch": reads, **options.pop("hook", {})}
    step = partial(scripts.returning, form) if form else None
    return Refusal(says, two_rows(mode, hook=hook, step=step, **options), topology)


OTHER_VALUES = "DataError: the model's mask of microbatch 0 has ... values"
NO_TOTAL = "OptionError: calculate_per_token_loss=False and 'token_mean' with a mask that the model"
REFUSED_OPTIONS: dict[str, dict[str, Any]] = {
    "an extension that needs 'masks' with": {"extensions": [Needing("masks")]},
    "an extension that needs 'stages' with": {"extensions": [Needing("stages")]},
    "an extension that needs 'dataset' with": {"extensions": [DatasetReports()]},
    "empty_step='skip' with": {"empty_step": "skip"},
    "(Megatron's --sft) with": {"loop": Loop(averages_quotients=True)},
}
ROWS = {
    "a mean of the step": refused("token_mean", NO_TOTAL),
    "a mean of prompts": refused("prompt_mean", "OptionError: 'prompt_mean' with a mask"),
    "fractions that the host divides by": refused(
        "token_mean", OTHER_VALUES, per_token=True, form=mask_of(0.5)
    ),
    **{
        f"a mask of {value}": refused("sum", OTHER_VALUES, form=mask_of(value))
        for value in (-1.0, torch.nan)
    },
    "a mask of another context-parallel rank": refused(
        "sample_mean", OTHER_VALUES, topology="cp2", form=mask_of(-1.0, (1,))
    ),
    "a mask that is flat": refused(
        "sum",
        "DataError: shape (144,) with None rows, for 2 samples",
        form=scripts.with_mask(Tensor.flatten),
    ),
    "a mask of other samples": refused(
        "sample_sum", "DataError: shape (2, 72) with 2 rows, for 3 samples", reads=one_more
    ),
    "a mask of packs by sample": refused(
        "sample_mean",
        "DataError: shape (1, 28) with 2 packed seq",
        reads=scripts.samples_alone,
        layout="thd",
    ),
    "some batches": refused("sum", "OptionError: LateMicrobatch ... expected", reads=by_turns),
    "masks with experts": refused(
        "sum",
        "OptionError: calculate_per_token_loss and the model's num_moe_experts with",
        per_token=True,
        config=MOE,
    ),
    **{
        f"masks with {text}": refused("sum", f"OptionError: {text}", hook=options)
        for text, options in REFUSED_OPTIONS.items()
    },
    "a good step": Refusal(),
}


@pytest.mark.parametrize("name", ROWS)
def test_late_masks_that_would_not_be_exact_are_refused(name: str) -> None:
    assert_told(__name__, name)
