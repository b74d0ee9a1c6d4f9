"""Masks that the model makes: gradients and reports are those of the whole step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from megatron_loss_agg import Term
from megatron_loss_agg.mcore import LateMicrobatch, read_samples
from tests.host import whole
from tests.host.cases import Batch, Case, Found, expected_gradients, run
from tests.host.harness import EXACT, TOPOLOGIES
from tests.host.reference import reference
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


def on_cp2(mode: str, per_token: bool) -> dict[str, Case]:
    """How ranks gather the losses of all tokens; and a step of two calls."""
    of = functools.partial(late, "cp2", mode, "bshd", per_token)
    gathers = {
        kind: of(step=functools.partial(forward_step, script=whole.script(kind)))
        for kind in ("local_grad", "reduced_grad")
    }
    return {**gathers, "two calls": of(calls=(1, 3))}


HALF = {"a": aggregation("sample_mean"), "b": Term(aggregation("sum"), coefficient=0.5)}
BOTH = functools.partial(forward_step, script=functools.partial(of_terms, names=HALF))
CASES: dict[str, dict[str, Case]] = {}
for per_token in (False, True):
    for (topology, layout), modes in PLANNED.items():
        of_topology = CASES.setdefault(topology, {})
        for mode in modes:
            case = late(topology, mode, layout, per_token, masks="fractional")
            of_topology[case.name] = case
        if per_token:  # a sum of masks is then the host's own
            case = late(topology, "token_mean", layout, True)
            of_topology[case.name] = case
    for mode in (*SUMMED, *["token_mean"] * per_token):
        for way, case in on_cp2(mode, per_token).items():
            CASES["cp2"][f"{way}-{case.name}"] = case
    terms = late("cp2", "sample_mean", "bshd", per_token, step=BOTH, terms=HALF)
    CASES["cp2"][f"two terms-{terms.name}"] = terms


@functools.cache
def facts(topology: str) -> dict[Case, list[Found]]:
    cases = [*CASES[topology].values()]
    expected = expected_gradients(cases)
    for i, case in enumerate(cases):
        if case.terms:
            half = [(k, [0.5 * x for x in w]) for k, w in weights_of("sum", case.places)]
            expected[i] = reference().gradient(case.weights + half)
    return run(TOPOLOGIES[topology], cases, expected)


@pytest.mark.parametrize(
    "topology, name", [(t, name) for t, cases in CASES.items() for name in cases]
)
def test_the_gradient_and_the_reports_are_those_of_the_whole_step(topology: str, name: str) -> None:
    case = CASES[topology][name]
    label = "a" if case.terms else case.mode
    loss = reference().loss(case.weights)
    tokens = reference().loss(dataclasses.replace(case, mode="token_mean", options={}).weights)
    for error, reports in facts(topology)[case]:
        assert error <= EXACT
        if reports:
            assert reports[f"{label} loss"] == pytest.approx(loss, rel=1e-13)
            assert reports.get("lm loss", tokens) == pytest.approx(tokens, rel=1e-13)
    assert reports  # of the last rank, which is on the last stage
