"""Masks that the model makes: gradients and reports are those of the whole step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest

from megatron_loss_agg import Term
from megatron_loss_agg.mcore import read_samples
from tests.host import gpt, scripts, whole
from tests.host.cases import Batch, Case, Expected, assert_exact, by_the_oracle
from tests.host.harness import TOPOLOGIES
from tests.host.reference import reference
from tests.host.steps import PLACES, aggregation, weights_of

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
