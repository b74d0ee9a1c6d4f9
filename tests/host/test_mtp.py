"""Losses of multi-token prediction, aggregated as the main loss is, against one fp64 process."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_loss_agg import Term
from megatron_loss_agg.mcore import LossHook, MultiTokenPrediction
from tests.host.harness import (
    EXACT,
    TOPOLOGIES,
    Topology,
    build_chunks,
    data_for,
    run_host_ranks,
)
from tests.host.reference import Gradient
from tests.host.steps import (
    N_MB,
    PLACES,
    Weights,
    aggregation,
    sequences,
    weights_of,
)
from tests.host.test_auxiliary_losses import forward_step
from tests.host.test_calls import microbatches

pytestmark = pytest.mark.host

DEPTHS, FACTOR = 2, 0.5
CONFIG = {"mtp_num_layers": DEPTHS, "mtp_loss_scaling_factor": FACTOR}
METHOD = "compute_language_model_loss"


class Case(NamedTuple):
    layout: str
    per_token: bool
    mode: str
    masks: str = "01"
    kind: str = ""  # what is not as in one step of a loss of one term


CASES = {
    # With "single" masks most context-parallel ranks have no token of most depths.
    "cp2": [
        Case("thd", False, "token_mean"),
        Case("thd", True, "prompt_mean", "single"),
        Case("bshd", True, "token_mean", "fractional"),
        Case("bshd", False, "prompt_mean", "single"),
        Case("thd", False, "custom"),
        Case("bshd", True, "custom", "fractional"),
        Case("bshd", True, "prompt_mean", kind="second step"),
    ],
    "dp2": [
        Case("thd", True, "token_mean"),
        Case("bshd", False, "prompt_mean"),
        Case("bshd", True, "prompt_mean", kind="several calls"),
        Case("bshd", False, "token_mean", kind="coefficient"),
        Case("bshd", False, "token_mean", kind="host"),
    ],
    "pp2": [Case("thd", True, "prompt_mean"), Case("bshd", False, "token_mean")],
    "tp2": [Case("thd", False, "prompt_mean"), Case("bshd", True, "token_mean")],
}


def with_mtp(name: str) -> Topology:
    topology = TOPOLOGIES[name]
    return dataclasses.replace(topology, config={**topology.config, **CONFIG})


Step = list[tuple[str, Weights]]


def oracle(step: Step) -> list[tuple[Gradient, list[float]]]:
    from tests.host import gpt

    gpt.initialize()
    return alone(gpt.build(**CONFIG), step)


def alone(model: Any, step: Step) -> list[tuple[Gradient, list[float]]]:
    """One process that runs every sample alone: gradient, and the weighted sum at each depth.

    At depth d, the logits of position t predict label t + d, with the weight of that label.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = []
    for masks, weights in step:
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(DEPTHS + 1)]
        for i, of_sample in weights:
            sequence, w = sequences(masks)[i], torch.tensor(of_sample, dtype=torch.float64)
            for depth, logits in enumerate(logits_of(model, sequence)):
                kept = max(len(w) - depth, 0)
                losses = F.cross_entropy(logits[:kept], sequence.labels[depth:], reduction="none")
                sums[depth] = sums[depth] + (w[depth:] * losses).sum()
        loss = sums[0] + FACTOR / DEPTHS * sum(sums[1:])
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        found.append((dict(zip(names, gradients, strict=True)), [float(x) for x in sums]))
    return found


def logits_of(model: Any, sequence: Any) -> list[Tensor]:
    """[tokens, vocabulary] of the main head, then of each depth; no loss of the host's is used."""
    from tests.host import gpt

    seen: list[Tensor] = []

    def see(labels: Tensor, logits: Tensor) -> Tensor:
        seen.append(logits.squeeze(1))
        return torch.zeros_like(labels, dtype=torch.float64)

    setattr(model, METHOD, see)
    tokens = sequence.tokens.unsqueeze(0)
    arguments = {"labels": tokens, "loss_mask": torch.ones_like(tokens)}
    with gpt.precision(model.config):
        model(tokens, gpt.positions_like(tokens), None, **arguments)
    delattr(model, METHOD)
    return [seen[-1], *seen[:-1]]


@functools.cache
def references() -> dict[tuple[str, str], Any]:
    wanted = sorted({(case.mode, case.masks) for cases in CASES.values() for case in cases})
    step = [(masks, weights_of(mode, PLACES[1], masks)) for mode, masks in wanted]
    return dict(zip(wanted, run_host_ranks(oracle, 1, step, timeout=200)[0], strict=True))


def run(topology: Topology, cases: dict[Case, Any]) -> dict[Case, tuple[float, list[float]]]:
    """Every rank, of each case: the gradient's error; reports of depths 0 to `DEPTHS`, and of the
    total, if there is one.
    """
    from tests.host import gpt, gradients

    gpt.initialize(**topology.sizes)
    chunks = {flag: build_chunks(topology, flag) for flag in {case.per_token for case in cases}}
    found = {}
    for case, (expected, _) in cases.items():
        if case.layout == "thd" and not packs():
            continue
        model = chunks[case.per_token]
        reports = train(topology, model, case)
        names = [*(f"{part}{case.mode} loss" for part in ("", "mtp_1 ", "mtp_2 ")), "loss"]
        sums = [gpt.reported(reports, name) for name in names if reports and name in reports[0]]
        factor = 0.25 if case.kind == "coefficient" else 1.0
        wanted = {name: factor * gradient for name, gradient in expected.items()}
        found[case] = gradients.error(model, wanted), sums
    return found


def train(topology: Topology, model: Any, case: Case) -> Any:
    """The step, or the last of two; its reports."""
    from tests.host import gpt

    terms: Any = aggregation(case.mode)
    if case.kind == "coefficient":
        terms = {case.mode: Term(terms, coefficient=0.25)}
    parts = [] if case.kind == "host" else [MultiTokenPrediction()]
    hook = LossHook(terms, extensions=parts)
    places = PLACES[topology.data_parallel_size]
    data = [data_for(topology, places, case.layout, case.masks) for _ in range(3)]
    step = partial(gpt.run_step, hook, model, forward_step_func=watched(case.kind != "host"))
    if case.kind == "several calls":
        with hook.step(microbatches(places, case.layout)):
            return step(data[0], 1) + step(data[0], N_MB - 1, zero_grad=False)
    reports = step(data[0], N_MB)
    assert METHOD not in vars(model[0].module)
    if case.kind != "second step":
        return reports
    reports = step(data[1], N_MB)
    evaluated = gpt.run_step(
        hook,
        model,
        data[2],
        N_MB,
        zero_grad=False,
        forward_step_func=forward_step,
        forward_only=True,
    )
    assert sorted(evaluated[0]) == sorted({"lm loss", f"{case.mode} loss"})
    return reports


def watched(aggregates: bool) -> Callable[..., Any]:
    """The forward step; looks whether the host's method is its own."""

    def step(data_iterator: Any, model: Any) -> Any:
        module = model.module
        assert (METHOD in vars(module)) == (aggregates and module.post_process)
        return forward_step(data_iterator, model)

    return step


def packs() -> bool:
    """Whether this release moves labels inside the sequences of a pack; others refuse packs."""
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    return "packed_seq_params" in inspect.signature(roll_tensor).parameters


@pytest.mark.parametrize("name", CASES)
def test_losses_are_aggregated_as_the_main_loss(name: str) -> None:
    topology, known = with_mtp(name), references()
    cases = {case: known[case.mode, case.masks] for case in CASES[name]}
    for rank in run_host_ranks(run, topology.world_size, topology, cases, timeout=300):
        for case, (error, sums) in rank.items():
            if case.kind == "host":
                # Means of microbatches; NaN before 0.17, since one has no token.
                assert not error <= 0.2
                assert len(sums) == 1
                continue
            assert error <= EXACT, case
            if not sums:  # not on the last pipeline stage
                continue
            main, *depths = wanted = cases[case][1]
            if case.kind == "coefficient":
                wanted = [*wanted, 0.25 * (main + FACTOR / DEPTHS * sum(depths))]
            assert sums == pytest.approx(wanted, rel=1e-13), case
    assert sums  # the last rank is on the last pipeline stage
