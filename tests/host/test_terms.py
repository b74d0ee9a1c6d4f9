"""A policy step of four terms through the real host, against one fp64 process.

Each term has its own denominator over the whole step; the data-parallel ranks have different
numbers of samples, and padding microbatches where one has fewer. Metrics are those of the gathered
step.
"""

from __future__ import annotations

import functools
from functools import partial
from operator import itemgetter
from typing import Any

import pytest

from megatron_loss_agg.mcore import LossHook, TokenLoss
from megatron_loss_agg.report import reduce_reports
from tests.host.harness import EXACT, TOPOLOGIES, Topology, build_chunks, error_of, run_host_ranks
from tests.host.steps import aggregation, batch_of, sequences

pytestmark = pytest.mark.host

# Steps of 1 and 3 microbatches for each number of data-parallel ranks; () is a padding microbatch.
# Prompts lie on both ranks.
PLACES = {
    1: [((tuple(range(10)),),), (((0, 1, 2), (5,), (3, 4, 6, 7, 8, 9)),)],
    2: [
        (((0, 1, 2, 3, 4, 5),), ((6, 7, 8, 9),)),
        (((0,), (1, 2, 5), (3, 4, 6, 7)), ((8, 9), (), ())),
    ],
}


def run(topology: Topology, gradient: Any) -> dict[Any, tuple[float, dict[str, float]]]:
    """Every rank, for each (microbatches, per-token flag): gradient error, and what is reported."""
    from megatron.core import parallel_state

    from tests.host import gpt, gradients, rl

    gpt.initialize(**topology.sizes)
    rank = gpt.data_rank()
    answers = {}
    for per_token in topology.per_token_flags:
        chunks = build_chunks(topology, per_token)
        for places in PLACES[topology.data_parallel_size]:
            number = len(places[rank])
            data = rl.packs(*places[rank]) if gpt.reads_data() else None
            options = {"forward_step_func": rl.forward_step}
            reports = gpt.run_step(LossHook(rl.TERMS), chunks, data, number, **options)
            metrics = {}
            if parallel_state.is_pipeline_last_stage():
                group = parallel_state.get_data_parallel_group(with_context_parallel=True)
                metrics = reduce_reports(reports, group)
            answers[number, per_token] = (gradients.error(chunks, gradient), metrics)
    return answers


def reference() -> tuple[Any, dict[str, float]]:
    from tests.host import rl

    return rl.reference()


@functools.cache
def expected() -> tuple[Any, dict[str, float]]:
    return run_host_ranks(reference, 1)[0]


@pytest.mark.parametrize("name", ["dp1", "dp2", "cp2", "dp2-cp2", "tp2", "pp2"])
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


def empty_steps(topology: Topology) -> dict[str, list[tuple[str | None, bool]]]:
    """Every rank, for each policy, of a step with tokens, an evaluation without and a step without:
    the error of each, and whether the last training step is known to be empty.
    """
    from tests.host import gpt, gradients, rl

    gpt.initialize(**topology.sizes)
    chunks = build_chunks(topology, False)

    def steps(policy: str) -> list[tuple[str | None, bool]]:
        hook = LossHook(rl.TERMS, empty_step=policy)
        found = []
        for place, evaluates in (((0, 1), False), ((), True), ((), False)):
            options = {"forward_step_func": rl.forward_step, "forward_only": evaluates}
            error = error_of(gpt.run_step, hook, chunks, rl.packs(place), 1, **options)
            found.append((error, hook.step_is_empty))
            assert place or error or not gradients.flat(chunks).any()
        return found

    return {policy: steps(policy) for policy in ("skip", "error", "step")}


@pytest.mark.parametrize("name", ["dp2", "cp2", "pp2"])
def test_every_rank_hears_of_an_empty_step(name: str) -> None:
    for rank in run_host_ranks(empty_steps, 2, TOPOLOGIES[name]):
        assert rank["skip"] == [(None, False), (None, False), (None, True)]
        assert rank["step"] == [(None, False)] * 3  # passes by default
        assert rank["error"][:2] == [(None, False)] * 2
        error = str(rank["error"][2][0])
        if name != "pp2":  # whose first stage only hears of it
            assert "every token of the step is masked or rejected" in error
            assert "--loss-aggregation-empty-step skip or step" in error
        assert error != "None"


def policy_step(
    iterator: Any, model: Any, losses_of: Any, report: Any = None, rows: bool = False
) -> Any:
    """The policy step, of whose terms ``losses_of`` makes the losses, and a report of its own."""
    from tests.host import rl

    if rows:
        next(iterator)
        iterator = iter([batch_of(list(sequences()[:2]), "bshd")])
    output, loss = rl.forward_step(iterator, model)
    return output, TokenLoss(
        lambda x: (losses_of(loss.compute(x)[0]), report or {}), loss.loss_mask
    )


# A forward step (or the stock one), whether the loss has several terms, and what is said.
MISFITS: dict[str, tuple[Any, bool, str | None]] = {
    "stock": (None, True, "HostError: the forward step returned the loss function"),
    "unnamed": (
        partial(policy_step, losses_of=itemgetter("kl")),
        True,
        "MaskError: losses are a torch.float64 tensor of shape ",
    ),
    "one alone": (
        partial(policy_step, losses_of=lambda losses: {"kl": losses["kl"]}),
        True,
        "MaskError: losses for ['kl']; expected one for each of",
    ),
    "too many": (
        partial(policy_step, losses_of=dict),
        False,
        "MaskError: losses for ['entropy', 'kl', 'policy', 'value']",
    ),
    "one of one": (partial(policy_step, losses_of=itemgetter("kl")), False, None),
    "taken name": (
        partial(policy_step, losses_of=dict, report={"loss": 1}),
        True,
        "ReportError: the loss function reports 'loss', which is the name of an aggregated loss; "
        "expected another name, or for the sum of several terms LossHook(total=...)",
    ),
    "transposed": (
        partial(policy_step, losses_of=lambda losses: losses["kl"].T, rows=True),
        False,
        "MaskError: a loss mask of shape (2, 72), where this rank's part of the batch's is (1, 28)",
    ),
}


def misfits_on_host() -> dict[str, str | None]:
    """One rank: what forward steps that do not fit the terms are told."""
    from tests.host import gpt, rl

    gpt.initialize()
    model = gpt.ddp_model()

    def told(forward_step: Any, several: bool) -> str | None:
        hook = LossHook(rl.TERMS if several else aggregation("token_mean"))
        options = {"forward_step_func": forward_step or gpt.forward_step}
        return error_of(gpt.run_step, hook, model, rl.packs((0, 1)), 1, **options)

    return {name: told(*given) for name, (*given, _) in MISFITS.items()}


def test_losses_that_do_not_fit_the_terms_are_named() -> None:
    (told,) = run_host_ranks(misfits_on_host, 1)
    for name, (_, _, error) in MISFITS.items():
        assert told[name] is None if error is None else told[name].startswith(error), name
    assert "expected a TokenLoss, whose losses are" in told["stock"]
