"""Masks that the model makes: gradients and reports are those of the whole step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest

from megatron_loss_agg import Term
from megatron_loss_agg.mcore import LateMicrobatch, read_samples
from tests.host import whole
from tests.host.cases import Batch, Case, run
from tests.host.harness import EXACT, TOPOLOGIES
from tests.host.reference import Gradient, reference
from tests.host.scripts import of_terms
from tests.host.steps import PLACES, aggregation, weights_of

pytestmark = pytest.mark.host

OPTIONS: dict[str, dict[str, Any]] = {"sum": {"divisor": 3.0}, "constant": {"divisor": 7.0}}
SUMMED = ("sample_mean", "microbatch_mean")  # need sums of masks
MODES = ("sum", "constant", "sample_sum", *SUMMED)
OF_PACKS = ("sum", "constant", "sample_sum", "microbatch_mean")  # whose samples are not told apart
PLANNED = {
    ("dp2", "bshd"): MODES,
    ("dp2", "thd"): OF_PACKS,
    ("cp2", "bshd"): MODES,
    ("cp2", "thd"): OF_PACKS,
    ("tp2-sp", "bshd"): SUMMED,
    ("pp2", "bshd"): SUMMED,
}


def hidden(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    """Its mask is not for the hook to read."""
    return {**batch, "made": batch["loss_mask"], "loss_mask": None}


def forward_step(data_iterator: Any, model: Any, script: Any = None) -> Any:
    """`gpt.forward_step` or ``script``; shows the mask to the loss function alone."""
    from tests.host import gpt

    batch = data_iterator and next(data_iterator)
    shown = batch and iter([{**batch, "loss_mask": batch["made"]}])
    return (script or gpt.forward_step)(shown, model)


def count(batch: Any) -> LateMicrobatch:
    offsets = batch.get("cu_seqlens")
    return LateMicrobatch(len(batch["tokens"]) if offsets is None else len(offsets) - 1)


def late(topology: str, mode: str, layout: str, per_token: bool, **more: Any) -> Case:
    return Case(
        mode,
        OPTIONS.get(mode, {}),
        layout=layout,
        places=PLACES[TOPOLOGIES[topology].data_parallel_size],
        per_token=per_token,
        batch=hidden,
        hook={"read_batch": count if layout == "thd" else read_samples},
        **{"step": forward_step, **more},
    )


HALF = {"a": aggregation("sample_mean"), "b": Term(aggregation("sum"), coefficient=0.5)}
# How ranks gather the losses of all tokens; a step of two calls; and of two terms.
WAYS_ON_CP2: list[dict[str, Any]] = [
    {"step": partial(forward_step, script=whole.script("local_grad"))},
    {"step": partial(forward_step, script=whole.script("reduced_grad"))},
    {"calls": (1, 3)},
]
TWO_TERMS = {"terms": HALF, "step": partial(forward_step, script=partial(of_terms, names=HALF))}


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


def expected(case: Case) -> Gradient:
    if not case.terms:
        return reference().gradient(case.weights)
    half = [(k, [0.5 * x for x in w]) for k, w in weights_of("sum", case.places)]
    return reference().gradient(case.weights + half)


@pytest.mark.parametrize("topology", ["dp2", "cp2", "tp2-sp", "pp2"])
def test_the_gradient_and_the_reports_are_those_of_the_whole_step(topology: str) -> None:
    cases = [*cases_of(topology)]
    found = run(TOPOLOGIES[topology], cases, [expected(case) for case in cases])
    for case, ranks in found.items():
        label = "a" if case.terms else case.mode
        loss = reference().loss(case.weights)
        tokens = reference().loss(dataclasses.replace(case, mode="token_mean", options={}).weights)
        for error, reports in ranks:
            assert error <= EXACT, case
            if reports:
                assert reports[f"{label} loss"] == pytest.approx(loss, rel=1e-13), case
                assert reports.get("lm loss", tokens) == pytest.approx(tokens, rel=1e-13), case
        assert reports  # of the last rank, which is on the last stage
