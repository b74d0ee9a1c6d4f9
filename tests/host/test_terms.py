"""A policy step of four terms through the real host, against one fp64 process.

Each term has its own denominator over the whole step; the data-parallel ranks have different
numbers of samples, and padding microbatches where one has fewer. Metrics are those of the gathered
step.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.host.ranks import run_host_ranks
from tests.host.steps import batch_of, sequences
from tests.host.topology import KeepDouble, Topology, build_chunks

pytestmark = pytest.mark.host

EXACT = 1e-12
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
TOPOLOGIES = {
    "dp1": Topology(1),
    "dp2": Topology(2),
    "cp2": Topology(2, {"cp": 2}),
    "dp2-cp2": Topology(4, {"cp": 2}),
    "tp2": Topology(2, TP2),
    "pp2": Topology(2, PP2),
}
# Samples by data-parallel rank and microbatch; [] is a padding microbatch. Prompts lie on both
# ranks.
PLACES = {
    1: {1: [[list(range(10))]], 3: [[[0, 1, 2], [5], [3, 4, 6, 7, 8, 9]]]},
    2: {
        1: [[[0, 1, 2, 3, 4, 5]], [[6, 7, 8, 9]]],
        3: [[[0], [1, 2, 5], [3, 4, 6, 7]], [[8, 9], [], []]],
    },
}


def reference() -> tuple[Any, dict[str, float]]:
    from tests.host import rl

    return rl.reference(sequences(fractional=False), {"num_layers": 4})


def run(topology: Topology, gradient: Any) -> dict[Any, tuple[float, dict[str, float]]]:
    """Every rank, for each (microbatches, per-token flag): gradient error, and what is reported."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg.mcore import LossHook
    from megatron_loss_agg.report import reduce_reports
    from tests.host import gpt, rl

    gpt.initialize(**topology.sizes)
    rank = parallel_state.get_data_parallel_rank()
    reads = parallel_state.get_tensor_model_parallel_rank() == 0
    answers = {}
    for per_token in topology.per_token_flags:
        chunks = build_chunks(topology, per_token)
        for number, places in PLACES[parallel_state.get_data_parallel_world_size()].items():
            hook = LossHook(rl.TERMS)
            data = rl.packs(sequences(fractional=False), places[rank]) if reads else None
            with KeepDouble():
                reports = gpt.run_step(
                    hook.wrap(get_forward_backward_func()),
                    chunks,
                    data,
                    number,
                    forward_step_func=rl.forward_step,
                )
            metrics = {}
            if parallel_state.is_pipeline_last_stage():
                group = parallel_state.get_data_parallel_group(with_context_parallel=True)
                metrics = reduce_reports(reports, group)
            answers[number, per_token] = (gpt.gradient_error(chunks, gradient), metrics)
    return answers


@functools.cache
def expected() -> tuple[Any, dict[str, float]]:
    return run_host_ranks(reference, 1)[0]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_term_is_exact_over_the_whole_step(name: str) -> None:
    gradient, numbers = expected()
    assert 0 < numbers["clip_fraction"] < 1
    topology = TOPOLOGIES[name]
    for answers in run_host_ranks(run, topology.world_size, topology, gradient, timeout=300):
        assert len(answers) == 2 * 2
        for case, (error, metrics) in answers.items():
            assert error <= EXACT, case
            if metrics:
                assert metrics == pytest.approx(numbers, rel=EXACT, abs=1e-15), case
    assert metrics  # of the last rank, which is on the last stage


def empty_steps(topology: Topology, policy: str) -> list[tuple[str, bool]]:
    """Every rank, of a step with tokens, an evaluation without and a step without: the error of
    each, and whether the last training step is known to be empty.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg import AggregationError
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt, rl

    gpt.initialize(**topology.sizes)
    chunks = build_chunks(topology, False)
    hook = LossHook(rl.TERMS, empty_step=policy)
    found = []
    for places, evaluates in (([[0, 1]], False), ([[]], True), ([[]], False)):
        error = "none"
        try:
            gpt.run_step(
                hook.wrap(get_forward_backward_func()),
                chunks,
                rl.packs(sequences(fractional=False), places),
                1,
                forward_step_func=rl.forward_step,
                forward_only=evaluates,
            )
        except AggregationError as raised:
            error = str(raised)
        found.append((error, hook.step_is_empty))
        gradients = [p.main_grad for ddp in chunks for p in ddp.parameters()]
        if error == "none" and places == [[]]:
            assert not any(bool(g.any()) for g in gradients)
    return found


@pytest.mark.parametrize("name", ["dp2", "cp2", "pp2"])
def test_an_empty_step_is_known_on_every_rank(name: str) -> None:
    for found in run_host_ranks(empty_steps, 2, TOPOLOGIES[name], "skip"):
        assert found == [("none", False), ("none", False), ("none", True)]


def test_an_empty_step_can_be_an_error_on_every_rank() -> None:
    for found in run_host_ranks(empty_steps, 2, TOPOLOGIES["dp2"], "error"):
        assert found[:2] == [("none", False), ("none", False)]
        assert "no token of the whole step weighs anything" in found[2][0]
        assert "--loss-aggregation-empty-step skip or step" in found[2][0]


def test_an_empty_step_passes_by_default() -> None:
    for found in run_host_ranks(empty_steps, 2, TOPOLOGIES["dp2"], "step"):
        assert found == [("none", False), ("none", False), ("none", False)]


def bad_terms() -> list[str]:
    """One rank: what forward steps and policies that do not fit the terms are told."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg import AggregationError, LossAggregation
    from megatron_loss_agg.mcore import LossHook, TokenLoss
    from tests.host import gpt, rl

    gpt.initialize()
    model = gpt.data_parallel(gpt.build(torch.float64, False))

    def told(hook: LossHook, forward_step: Any) -> str:
        data = rl.packs(sequences(fractional=False), [[0, 1]])
        schedule = hook.wrap(get_forward_backward_func())
        try:
            gpt.run_step(schedule, model, data, 1, forward_step_func=forward_step)
        except AggregationError as error:
            return f"{type(error).__name__}: {error}"
        return "none"

    def unnamed(data_iterator: Any, model: Any) -> Any:
        output, loss = rl.forward_step(data_iterator, model)
        return output, TokenLoss(lambda x: (loss.compute(x)[0]["kl"], {}), loss.loss_mask)

    def one_short(data_iterator: Any, model: Any) -> Any:
        output, loss = rl.forward_step(data_iterator, model)
        return output, TokenLoss(lambda x: ({"kl": loss.compute(x)[0]["kl"]}, {}), loss.loss_mask)

    def reports_loss(data_iterator: Any, model: Any) -> Any:
        output, loss = rl.forward_step(data_iterator, model)
        report = {"loss": torch.ones(2)}
        return output, TokenLoss(lambda x: (loss.compute(x)[0], report), loss.loss_mask)

    def turned(data_iterator: Any, model: Any) -> Any:
        batch = batch_of(sequences(fractional=False)[:2], "bshd")
        output, loss = rl.forward_step(iter([batch]), model)
        next(data_iterator)
        return output, TokenLoss(lambda x: (loss.compute(x)[0]["kl"].T, {}), loss.loss_mask)

    single = LossHook(LossAggregation(mode="token_mean"))
    messages = [
        told(LossHook(rl.TERMS), gpt.forward_step),
        told(LossHook(rl.TERMS), unnamed),
        told(LossHook(rl.TERMS), one_short),
        told(single, rl.forward_step),
        told(single, unnamed),
        told(LossHook(rl.TERMS), reports_loss),
        told(single, turned),
    ]
    for terms, policy in ((rl.TERMS, "ignore"), ({"lm": LossAggregation(mode="sum")}, "step")):
        try:
            LossHook(terms, empty_step=policy)
        except AggregationError as error:
            messages.append(str(error))
    return messages


def test_losses_that_do_not_fit_the_terms_are_named() -> None:
    stock, unnamed, one_short, too_many, fits, taken, turned, policy, name = run_host_ranks(
        bad_terms, 1
    )[0]
    assert stock.startswith("HostError") and "expected a TokenLoss, whose losses are" in stock
    assert unnamed.startswith("MaskError: losses are a Tensor; expected one for each of")
    assert one_short.startswith("MaskError: losses for ['kl']; expected one for each of")
    assert too_many.startswith("MaskError: losses for ['entropy', 'kl', 'policy', 'value']")
    assert fits == "none"
    assert taken.startswith("ReportError: the loss function reports ['loss']")
    assert turned.startswith("MaskError: losses (72, 2) for a loss mask of shape (2, 72)")
    assert policy == "empty_step='ignore'; expected one of error, skip, step"
    assert name.startswith("a term named 'lm'; expected another name")
