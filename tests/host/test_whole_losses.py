"""Losses that every context-parallel rank holds whole, gathered from the ranks.

Ranks gather log-probabilities, or losses, in both ways that loops have. The gradient is that of the
fp64 reference.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from megatron_loss_agg.mcore import TokenLoss
from megatron_loss_agg.report import Sum
from tests.host import rl, whole
from tests.host.cases import Case, run
from tests.host.harness import CP2, EXACT, TOPOLOGIES, TP2, Topology
from tests.host.reference import reference
from tests.host.steps import PLACES
from tests.host.test_terms import STEPS, expected_of_terms

pytestmark = pytest.mark.host

KINDS = ("local_grad", "reduced_grad")
FLAGS = (False, True)
# Modes by topology. The losses of "token_mean" are gathered in the forward step.
MODES = {
    "cp2": ("prompt_mean",),
    "dp2": ("prompt_mean",),
    "dp2-cp2": ("prompt_mean", "token_mean", "constant"),
}


def case_of(mode: str, kind: str, layout: str, flag: bool, ranks: int, masks: str = "01") -> Case:
    return Case(
        mode,
        masks=masks,
        layout=layout,
        places=PLACES[ranks],
        per_token=flag,
        step=whole.script(kind, early=mode == "token_mean", metric=True),
        times=2,  # the first step measures
    )


def cases_of(name: str) -> list[Case]:
    ranks = TOPOLOGIES[name].data_parallel_size
    rows = product(MODES[name], KINDS, ("thd", "bshd"), FLAGS)
    # The last tokens of sequences are on the first context-parallel rank.
    singles = product(["sample_mean"], KINDS, ["thd"], FLAGS, [ranks], ["single"])
    return [*(case_of(*row, ranks) for row in rows), *(case_of(*row) for row in singles)]


CASES = {name: (TOPOLOGIES[name], cases_of(name)) for name in MODES}
CASES["tp2-cp2"] = (
    Topology(4, {**TP2, **CP2}),
    [case_of("sample_mean", kind, "thd", True, 1) for kind in KINDS],
)


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_reports_of_whole_losses_are_exact(name: str) -> None:
    for case, ranks in run(*CASES[name]).items():
        loss = reference().loss(case.weights)
        for error, reports in ranks:
            assert error <= EXACT, case
            wanted = {f"{case.mode} loss": loss, "again": loss}
            assert reports == pytest.approx(wanted, rel=EXACT, abs=0), case


def terms_step(data_iterator: Iterator[Any], model: Any, kind: str | None) -> tuple[Any, TokenLoss]:
    """The policy step of four terms, their losses whole or this rank's; reported again."""
    batch = next(data_iterator)
    layout = whole.layout_of(batch)
    output, local = rl.forward_step(iter([batch]), model)

    def compute(output: Any, weights: Any) -> Any:
        losses, report = local.compute(output)
        if kind is not None:
            losses = {n: layout.unshard(whole.parts(x, kind)) for n, x in losses.items()}
        again = {f"{n} again": Sum.of(losses[n], w) for n, w in weights.items()}
        return losses, {**report, **again}

    mask = local.loss_mask if kind is None else batch["loss_mask"]
    return output, TokenLoss(compute, mask, kind, takes_weights=True)


@pytest.mark.parametrize("name", ["cp2", "dp2-cp2"])
def test_every_term_and_metric_is_exact(name: str) -> None:
    gradient, numbers = expected_of_terms()
    topology = TOPOLOGIES[name]
    cases = [
        Case(
            "",
            terms=rl.TERMS,
            places=STEPS[topology.data_parallel_size][1],
            per_token=flag,
            hook={"total": "total loss"},
            step=functools.partial(terms_step, kind=kind),
        )
        for kind, flag in product((None, *KINDS), FLAGS)
    ]
    wanted = {"total loss" if n == "loss" else n: x for n, x in numbers.items()}
    wanted |= {n.replace(" loss", " again"): x for n, x in numbers.items() if n.endswith(" loss")}
    for case, ranks in run(topology, cases, [gradient] * len(cases)).items():
        for error, reports in ranks:
            assert error <= EXACT, case
            assert reports == pytest.approx(wanted, rel=EXACT, abs=1e-15), case
