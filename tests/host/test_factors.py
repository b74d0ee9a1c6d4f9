"""Factors of tokens through the real host: in every weight, and in no denominator or count."""

from __future__ import annotations

import dataclasses
import functools
from itertools import product
from typing import Any

import pytest

from megatron_loss_agg import Microbatch, Term
from megatron_loss_agg.mcore import TokenLoss, read_batch
from tests.host import whole
from tests.host.cases import Batch, Case, run
from tests.host.harness import EXACT, TOPOLOGIES
from tests.host.reference import reference
from tests.host.refusals import Row, assert_told, hook_of
from tests.host.steps import (
    N_MB,
    PLACES,
    aggregation,
    factored,
    weights_of,
    with_factors,
)

pytestmark = pytest.mark.host

READ = functools.partial(read_batch, factors="factors")


def case(mode: str, layout: str = "thd", per_token: bool = False, **more: Any) -> Case:
    way = {"hook": {"read_batch": READ}, "batch": with_factors, **more}
    return Case(mode, layout=layout, per_token=per_token, **way)


MODES = ("token_mean", "sample_mean", "prompt_mean", "sample_sum", "custom")
CASES = [
    *(case(*way) for way in product(MODES, ("thd", "bshd"), (False, True))),
    case("sample_mean", masks="fractional"),
    case("custom", "bshd", masks="fractional"),
    case("prompt_mean", calls=(1, N_MB - 1), times=2),
    # Of the second step of a pack the sums of all weights are compared, of rows those by sample.
    case("token_mean", times=2),
    case("prompt_mean", times=2),
    case("prompt_mean", "bshd", times=2),
    case("prompt_mean", call={"forward_only": True}),
]


def wanted_of(case: Case) -> dict[str, float]:
    """`lm loss` is the mean over tokens, without factors."""
    tokens = weights_of("token_mean", case.places, case.masks)
    losses = {"lm": tokens, case.mode: factored(case.weights)}
    return {f"{name} loss": reference().loss(weights) for name, weights in losses.items()}


@pytest.mark.parametrize("name", ["dp2", "cp2", "dp2-cp2", "tp2", "pp2"])
def test_weights_have_factors_and_counts_have_not(name: str) -> None:
    topology = TOPOLOGIES[name]
    places = PLACES[topology.data_parallel_size]
    cases = [dataclasses.replace(of, places=places) for of in CASES]
    if name == "cp2":  # losses of all tokens on every rank, and metrics by the loss's own weights
        of_all = functools.partial(whole.script, metric=True)
        for kind, layout in product(("local_grad", "reduced_grad"), ("thd", "bshd")):
            cases.append(case("prompt_mean", layout, places=places, step=of_all(kind)))
    gradients = [reference().gradient(factored(of.weights)) for of in cases]
    for of, ranks in run(topology, cases, gradients).items():
        wanted = wanted_of(of)
        if of.step is not None:
            wanted = {"again": wanted["prompt_mean loss"], **wanted}
            del wanted["lm loss"]
        assert any(found.reports for found in ranks), of.name
        for found in ranks:
            assert of.call or found.error <= EXACT, of.name
            assert found.reports in ({}, pytest.approx(wanted, rel=1e-13)), of.name


COEFFICIENTS = {"plain": 0.5, "factored": 1.0}
TERMS = {name: Term(aggregation("prompt_mean"), x) for name, x in COEFFICIENTS.items()}


def read_terms(batch: Batch) -> dict[str, Microbatch]:
    microbatch = READ(batch)
    plain = dataclasses.replace(microbatch, token_factors=None)
    return {"plain": plain, "factored": microbatch}


def step_of_terms(data_iterator: Any, model: Any) -> Any:
    from tests.host import gpt

    losses, stock = gpt.forward_step(data_iterator, model)
    return losses, TokenLoss(lambda x: (dict.fromkeys(TERMS, x), {}), stock.args[0])


@pytest.mark.parametrize("name", ["dp2", "cp2"])
def test_one_of_two_terms_may_have_factors(name: str) -> None:
    topology = TOPOLOGIES[name]
    of = case("prompt_mean", terms=TERMS, step=step_of_terms, hook={"read_batch": read_terms})
    of = dataclasses.replace(of, places=PLACES[topology.data_parallel_size])
    half = [(i, [0.5 * w for w in of_sample]) for i, of_sample in of.weights]
    gradient = reference().gradient(half + factored(of.weights))
    for found in run(topology, [of], [gradient])[of]:
        assert found.error <= EXACT
    whole_loss = reference().loss(factored(of.weights))
    assert found.reports["factored loss"] == pytest.approx(whole_loss, rel=1e-13)


ROWS = {
    "no key": Row(
        "MaskError: batch key 'factors' is a NoneType beside a loss_mask of shape (2, 72) ... "
        "read_batch(factors=)",
        hook=hook_of("sum", read_batch=READ),
    ),
    "another shape": Row(
        "MaskError: batch key 'prompt_ids' is a torch.int64 tensor of shape (2,) beside a",
        hook=hook_of("sum", read_batch=functools.partial(read_batch, factors="prompt_ids")),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_batches_without_a_factor_for_each_token_are_refused(name: str) -> None:
    assert_told(__name__, name)
