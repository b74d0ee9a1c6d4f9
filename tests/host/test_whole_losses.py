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

from megatron_loss_agg.mcore import LossHook, TokenLoss
from megatron_loss_agg.mcore.host import GATHERS
from megatron_loss_agg.report import Sum, reduce_reports
from tests.host.harness import CP2, EXACT, TOPOLOGIES, TP2, Topology, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import PLACES, aggregation, batches, weights_of
from tests.host.test_terms import PLACES as PLACES_OF_TERMS
from tests.host.test_terms import expected as expected_of_terms
from tests.host.whole import layout_of, parts, script

pytestmark = pytest.mark.host


TOPOLOGIES_OF_WHOLE = {
    **{name: TOPOLOGIES[name] for name in ("cp2", "dp2-cp2", "dp2")},
    "tp2-cp2": Topology(4, {**TP2, **CP2}),
}


def exact_cases(name: str) -> list[tuple[str, bool, str, str, str, bool]]:
    """(kind, per-token flag, layout, mode, masks, gathered in the forward step)."""
    if name == "tp2-cp2":
        return [(kind, True, "thd", "sample_mean", "01", False) for kind in GATHERS]
    several = name == "dp2-cp2"
    modes = ("prompt_mean", "token_mean", "constant") if several else ("prompt_mean",)
    cases = [
        (kind, per_token, layout, mode, "01", mode == "token_mean")
        for kind, per_token, layout, mode in product(GATHERS, (False, True), ("thd", "bshd"), modes)
    ]
    # The last tokens of sequences are on the first context-parallel rank.
    return cases + [
        (kind, per_token, "thd", "sample_mean", "single", False)
        for kind, per_token in product(GATHERS, (False, True))
    ]


def whole_on_host(
    name: str, expected: dict[tuple[str, str], Any]
) -> dict[Any, tuple[float, dict[str, float]]]:
    """Every rank: the error of each case's gradient, and what is reported."""
    from megatron.core import parallel_state

    from tests.host import gpt, gradients

    topology = TOPOLOGIES_OF_WHOLE[name]
    gpt.initialize(**topology.sizes)
    models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    answers = {}
    for case in exact_cases(name):
        kind, per_token, layout, mode, masks, early = case
        ddp, hook = models[per_token], LossHook(aggregation(mode))
        place = PLACES[topology.data_parallel_size][gpt.data_rank()]
        errors = []
        for _ in range(2):  # the first step measures
            step = script(kind, early=early, metric=True)
            data = batches(place, layout, masks)
            reports = gpt.run_step(hook, ddp, data, len(place), forward_step_func=step)
            errors.append(gradients.error(ddp, expected[mode, masks]))
        answers[case] = max(errors), reduce_reports(reports, group)
    return answers


@pytest.mark.parametrize("name", TOPOLOGIES_OF_WHOLE)
def test_gradients_and_reports_of_whole_losses_are_exact(name: str) -> None:
    topology = TOPOLOGIES_OF_WHOLE[name]
    places = PLACES[topology.data_parallel_size]
    steps = {
        (mode, masks): weights_of(mode, places, masks) for *_, mode, masks, _ in exact_cases(name)
    }
    expected = {step: reference().gradient(w) for step, w in steps.items()}
    for rank in run_host_ranks(whole_on_host, topology.world_size, name, expected, timeout=300):
        assert rank
        for case, (error, metrics) in rank.items():
            *_, mode, masks, _ = case
            assert error <= EXACT, case
            loss = reference().loss(steps[mode, masks])
            wanted = pytest.approx({f"{mode} loss": loss, "again": loss}, rel=EXACT, abs=0)
            assert metrics == wanted, case


def terms_on_host(name: str, gradient: Any) -> list[tuple[float, dict[str, float]]]:
    """Every rank, of the policy step of four terms: gradient error, and what is reported."""
    from megatron.core import parallel_state

    from tests.host import gpt, gradients, rl

    topology = TOPOLOGIES[name]
    gpt.initialize(**topology.sizes)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    places = PLACES_OF_TERMS[topology.data_parallel_size][1]

    def forward_step(kind: Any, data_iterator: Iterator[Any], model: Any) -> tuple[Any, TokenLoss]:
        batch = next(data_iterator)
        layout = layout_of(batch)
        output, local = rl.forward_step(iter([batch]), model)

        def compute(output: Any, weights: Any) -> Any:
            losses, report = local.compute(output)
            if kind is not None:
                losses = {n: layout.unshard(parts(x, kind)) for n, x in losses.items()}
            again = {f"{n} again": Sum.of(losses[n], w) for n, w in weights.items()}
            return losses, {**report, **again}

        mask = local.loss_mask if kind is None else batch["loss_mask"]
        return output, TokenLoss(compute, mask, kind, takes_weights=True)

    answers = []
    for kind, per_token in product((None, *GATHERS), (False, True)):
        ddp = gpt.ddp_model(per_token)
        data = rl.packs(*places[gpt.data_rank()])
        step = functools.partial(forward_step, kind)
        hook = LossHook(rl.TERMS, total="total loss")
        number = len(places[gpt.data_rank()])
        reports = gpt.run_step(hook, ddp, data, number, forward_step_func=step)
        answers.append((gradients.error(ddp, gradient), reduce_reports(reports, group)))
    return answers


@pytest.mark.parametrize("name", ["cp2", "dp2-cp2"])
def test_every_term_and_metric_is_exact(name: str) -> None:
    gradient, numbers = expected_of_terms()
    wanted = {"total loss" if n == "loss" else n: x for n, x in numbers.items()}
    wanted |= {n.replace(" loss", " again"): x for n, x in numbers.items() if n.endswith(" loss")}
    for rank in run_host_ranks(
        terms_on_host, TOPOLOGIES[name].world_size, name, gradient, timeout=300
    ):
        assert len(rank) == 6
        for error, metrics in rank:
            assert error <= EXACT
            assert metrics == pytest.approx(wanted, rel=EXACT, abs=1e-15)
