"""Masks that the model makes: a step is exact, or refused on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import Microbatch, Term
from megatron_loss_agg.mcore import DatasetReports, Extension, LateMicrobatch, Loop, read_samples
from tests.host import gpt, scripts, whole
from tests.host.cases import Batch, Case, Expected, assert_exact, by_the_oracle
from tests.host.harness import TOPOLOGIES
from tests.host.reference import reference
from tests.host.refusals import Row, assert_told, hook_of
from tests.host.steps import PLACES, Counted, aggregation, weights_of

OPTIONS: dict[str, dict[str, Any]] = {"sum": {"divisor": 3.0}, "constant": {"divisor": 7.0}}
SUMMED = ("sample_mean", "microbatch_mean")  # need sums of masks
MODES = ("sum", "constant", "sample_sum", *SUMMED)
OF_PACKS = ("sum", "constant", "sample_sum", "microbatch_mean")  # whose samples are not told apart
PLANNED = {
    ("dp2", "bshd"): MODES,
    ("dp2", "thd"): OF_PACKS,
    ("cp2", "bshd"): MODES,
    ("cp2", "thd"): OF_PACKS,
    ("dp2-cp2", "bshd"): SUMMED,
    ("dp2-cp2", "thd"): OF_PACKS,
    ("tp2-sp", "bshd"): SUMMED,
    ("pp2", "bshd"): SUMMED,
}


def hidden(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    """Its mask is not for the hook to read."""
    return {**batch, "made": batch["loss_mask"], "loss_mask": None}


def forward_step(data_iterator: Any, model: Any, script: Any = None) -> Any:
    """`gpt.forward_step` or ``script``; shows the mask to the loss function alone."""
    batch = data_iterator and next(data_iterator)
    shown = batch and iter([{**batch, "loss_mask": batch["made"]}])
    return (script or gpt.forward_step)(shown, model)


def late(topology: str, mode: str, layout: str, per_token: bool, **more: Any) -> Case:
    return Case(
        mode,
        OPTIONS.get(mode, {}),
        layout=layout,
        places=PLACES[TOPOLOGIES[topology].data_parallel_size],
        per_token=per_token,
        batch=hidden,
        hook={"read_batch": scripts.samples_alone if layout == "thd" else read_samples},
        **{"step": forward_step, **more},
    )


HALF = {"a": aggregation("sample_mean"), "b": Term(aggregation("sum"), coefficient=0.5)}
# How ranks gather the losses of all tokens; a step of two calls; and of two terms.
WAYS_ON_CP2: list[dict[str, Any]] = [
    {"step": partial(forward_step, script=whole.script("local_grad"))},
    {"step": partial(forward_step, script=whole.script("reduced_grad"))},
    {"calls": (1, 3)},
]
TWO_TERMS = {
    "terms": HALF,
    "step": partial(forward_step, script=partial(scripts.of_terms, names=HALF)),
}


def cases_of(topology: str) -> Iterator[Case]:
    for per_token in (False, True):
        more = ["token_mean"] * per_token  # a sum of masks is then the host's own
        for (name, layout), modes in PLANNED.items():
            if name == topology:
                for mode in modes:
                    yield late(topology, mode, layout, per_token, masks="fractional")
                for mode in more:
                    yield late(topology, mode, layout, per_token)
        if topology == "cp2":
            for mode, way in product((*SUMMED, *more), WAYS_ON_CP2):
                yield late(topology, mode, "bshd", per_token, **way)
            yield late(topology, "sample_mean", "bshd", per_token, **TWO_TERMS)


def expected(case: Case) -> Expected:
    if not case.terms:
        gradient, reports = by_the_oracle(case)
        if case.step is not forward_step:  # a `TokenLoss` reports nothing by itself
            del reports["lm loss"]
        return gradient, reports
    half = [(k, [0.5 * x for x in w]) for k, w in weights_of("sum", case.places)]
    reports = {"a loss": reference().loss(case.weights)}
    return reference().gradient(case.weights + half), reports


@pytest.mark.parametrize("topology", sorted({name for name, _ in PLANNED}))
def test_the_gradient_and_the_reports_are_those_of_the_whole_step(topology: str) -> None:
    assert_exact(TOPOLOGIES[topology], [*cases_of(topology)], expected)


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


def refused(mode: str, says: str = "", reads: Any = read_samples, **options: Any) -> Row:
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
ROWS = {
    "a mean of the step": refused("token_mean", NO_TOTAL),
    "a mean of prompts": refused("prompt_mean", "ModeError: 'prompt_mean' with a mask"),
    "fractions that the host divides by": refused(
        "token_mean", OTHER_VALUES, per_token=True, loss=mask_of(0.5)
    ),
    **{
        f"a mask of {value}": refused("sum", OTHER_VALUES, loss=mask_of(value))
        for value in (-1.0, torch.nan)
    },
    "a mask of another context-parallel rank": refused(
        "sample_mean", OTHER_VALUES, topology="cp2", loss=mask_of(-1.0, (1,))
    ),
    "a mask that is flat": refused(
        "sum",
        "MaskError: shape (144,) with None rows, for 2 samples",
        loss=scripts.with_mask(Tensor.flatten),
    ),
    "a mask of other samples": refused(
        "sample_sum", "MaskError: shape (2, 72) with 2 rows, for 3 samples", reads=one_more
    ),
    "a mask of packs by sample": refused(
        "sample_mean",
        "MaskError: shape (1, 28) with 2 packed seq",
        reads=scripts.samples_alone,
        data=FLAT,
    ),
    "some batches": refused("sum", "FunctionError: LateMicrobatch ... expected", reads=by_turns),
    "masks with experts": refused(
        "sum",
        "ModeError: calculate_per_token_loss and the model's num_moe_experts with",
        per_token=True,
        config={"num_moe_experts": 2},
    ),
    **{
        f"masks with {text}": refused("sum", f"ModeError: {text}", hooked=options)
        for text, options in REFUSED_OPTIONS.items()
    },
    "a good step": Row(),
}


@pytest.mark.parametrize("name", ROWS)
def test_late_masks_that_would_not_be_exact_are_refused(name: str) -> None:
    assert_told(__name__, name)
