"""Losses of several terms through the real host, each with a denominator of its own.

The policy step of `rl` has four terms; the data-parallel ranks have different numbers of samples,
and padding microbatches where one has fewer. Metrics are those of the gathered step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from itertools import chain, product
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import Microbatch, Term
from megatron_loss_agg.mcore import LossHook, TokenLoss
from tests import oracle
from tests.host import rl
from tests.host.cases import Batch, Case, run
from tests.host.harness import EXACT, TOPOLOGIES, Topology, build_chunks, error_of, run_host_ranks
from tests.host.reference import reference
from tests.host.refusals import Row, assert_told, hook_of, thd
from tests.host.steps import aggregation, batch_of, sequences

pytestmark = pytest.mark.host

# Steps of 1 and 3 microbatches for each number of data-parallel ranks; () is a padding microbatch.
# Prompts lie on both ranks.
STEPS = {
    1: [((tuple(range(10)),),), (((0, 1, 2), (5,), (3, 4, 6, 7, 8, 9)),)],
    2: [
        (((0, 1, 2, 3, 4, 5),), ((6, 7, 8, 9),)),
        (((0,), (1, 2, 5), (3, 4, 6, 7)), ((8, 9), (), ())),
    ],
}


@functools.cache
def expected_of_terms() -> tuple[Any, dict[str, float]]:
    return run_host_ranks(rl.reference, 1)[0]


@pytest.mark.parametrize("name", ["dp1", "dp2", "cp2", "dp2-cp2", "tp2", "pp2"])
def test_every_term_is_exact_over_the_whole_step(name: str) -> None:
    gradient, numbers = expected_of_terms()
    assert 0 < numbers["clip_fraction"] < 1
    topology = TOPOLOGIES[name]
    steps = product(STEPS[topology.data_parallel_size], topology.per_token_flags)
    cases = [
        Case("", terms=rl.TERMS, step=rl.forward_step, places=places, per_token=flag)
        for places, flag in steps
    ]
    for case, ranks in run(topology, cases, [gradient] * len(cases)).items():
        for error, metrics in ranks:
            assert error <= EXACT, case
            if metrics:
                assert metrics == pytest.approx(numbers, rel=EXACT, abs=1e-15), case
        assert metrics  # of the last rank, which is on the last stage


def empty_steps(topology: Topology) -> dict[str, list[tuple[str | None, bool]]]:
    """Every rank, for each policy, of a step with tokens, an evaluation without and a step without:
    the error of each, and whether the last training step is known to be empty.
    """
    from tests.host import gpt, gradients

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
    if rows:
        next(iterator)
        iterator = iter([batch_of(list(sequences()[:2]), "bshd")])
    output, loss = rl.forward_step(iterator, model)
    return output, TokenLoss(
        lambda x: (losses_of(loss.compute(x)[0]), report or {}), loss.loss_mask
    )


def misfit(says: str, losses_of: Any, terms: Any = rl.TERMS, **options: Any) -> Row:
    step = partial(policy_step, losses_of=losses_of, **options) if losses_of else None
    of_step = {"step": step, "data": thd(((0, 1),)), "number": 1}
    return Row(says, topology="dp1", hook=hook_of(terms), **of_step)


KL = itemgetter("kl")
ROWS = {
    "stock": misfit(
        "HostError: the forward step returned the loss function ... "
        "expected a TokenLoss, whose losses are",
        None,
    ),
    "unnamed": misfit("MaskError: losses are a torch.float64 tensor of shape ", KL),
    "one alone": misfit(
        "MaskError: losses for ['kl']; expected one for each of", lambda x: {"kl": x["kl"]}
    ),
    "too many": misfit(
        "MaskError: losses for ['entropy', 'kl', 'policy', 'value']", dict, "token_mean"
    ),
    "one of one": misfit("", KL, "token_mean"),
    "taken name": misfit(
        "ReportError: the loss function reports 'loss', which is the name of an aggregated loss; "
        "expected another name, or for the sum of several terms LossHook(total=...)",
        dict,
        report={"loss": 1},
    ),
    "transposed": misfit(
        "MaskError: a loss mask of shape (2, 72), where this rank's part of the batch's is (1, 28)",
        lambda x: x["kl"].T,
        "token_mean",
        rows=True,
    ),
}


# Terms weigh their microbatches alike as far as the batches tell; the script may hand them one
# mask, equal ones, or different ones.
COEFFICIENTS = {"policy": 1.0, "kl": 0.3, "entropy": -0.1}
POWERS = {"policy": 1, "kl": 2, "entropy": 3}  # of the cross entropy: what a term's losses are
MODES = {"policy": "prompt_mean", "kl": "prompt_mean", "entropy": "token_mean"}
ALIKE = dict.fromkeys(MODES, "token_mean")
PLACES = (((0, 1), (2, 3)), ((4, 5), (6, 7)))  # by data-parallel rank

OF_ROWS = {"micro_batch_size": 2}

Masks = Callable[[Tensor, tuple[int, ...]], dict[str, Tensor]]
"""(mask of the batch, its samples) -> mask of every term."""


def one(mask: Tensor, of_mb: tuple[int, ...]) -> dict[str, Tensor]:
    return dict.fromkeys(MODES, mask)


def equal(mask: Tensor, of_mb: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: mask.clone() for name in MODES}


def own(
    mask: Tensor, of_mb: tuple[int, ...], name: str = "kl", samples: Any = range(8)
) -> dict[str, Tensor]:
    """The term ``name`` leaves the first token of every row out, in microbatches of ``samples``."""
    left_out = mask.masked_fill(mask.cumsum(dim=-1) == 1, 0)
    return {**one(mask, of_mb), name: left_out if of_mb[0] in samples else mask}


own_entropy = partial(own, name="entropy")
own_later = partial(own, samples=(2, 6))
own_elsewhere = partial(own, samples=(6,))

# Modes; the masks that are planned; those of the loss functions.
MASKED: dict[str, tuple[dict[str, str], Masks, Masks]] = {
    "all alike": (ALIKE, one, one),
    "another mode": (MODES, one, one),
    "equal masks": (MODES, one, equal),
    "own masks": (MODES, own, own),
    # The second microbatch alone has them, but they count in the denominator of both, and of both
    # data-parallel ranks.
    "own masks later": (ALIKE, own_later, own_later),
    "own masks on one rank": (ALIKE, own_elsewhere, own_elsewhere),
    "custom": (dict.fromkeys(MODES, "custom"), one, one),
}


def with_masks(batch: Batch, of_mb: tuple[int, ...], planned: Masks, given: Masks) -> Batch:
    mask = batch["loss_mask"]
    return {**batch, "planned": planned(mask, of_mb), "given": given(mask, of_mb)}


def read(batch: Batch) -> dict[str, Microbatch]:
    """Terms whose masks are one share a microbatch."""
    masks, prompts = batch["planned"], batch["prompt_ids"]
    shared = {id(mask): Microbatch(mask, prompt_ids=prompts) for mask in masks.values()}
    return {name: shared[id(mask)] for name, mask in masks.items()}


def masked_step(data_iterator: Any, model: Any) -> Any:
    from tests.host import gpt

    batch = gpt.received(data_iterator)
    losses, _ = gpt.forward_step(iter([batch]), model)

    def compute(x: Tensor) -> Any:
        return {name: x**power for name, power in POWERS.items()}, {}

    return losses, TokenLoss(compute, batch["given"])


def masked_terms(modes: dict[str, str]) -> dict[str, Term]:
    return {name: Term(aggregation(mode), COEFFICIENTS[name]) for name, mode in modes.items()}


def masked_case(modes: dict[str, str], planned: Masks, given: Masks, ranks: int = 2) -> Case:
    return Case(
        "",
        layout="bshd",
        places=PLACES[:ranks],
        terms=masked_terms(modes),
        hook={"read_batch": read},
        batch=partial(with_masks, planned=planned, given=given),
        step=masked_step,
        call=OF_ROWS,
        times=2,
    )


def masked_gradient(modes: dict[str, str], planned: Masks, ranks: int) -> Any:
    """The reference's gradient of ``sum coefficient * w * loss ** power``."""
    exact, total = reference(), []
    for name, power in POWERS.items():
        step = [
            [masked_samples(planned, name, of_mb) for of_mb in of_rank]
            for of_rank in PLACES[:ranks]
        ]
        mode, divisor = modes[name], None
        if mode == "custom":  # of masks of 0 and 1
            mode, divisor = "sum", len(flat(step))
        nested = oracle.step_weights(mode, step, divisor=divisor)
        for k, w in zip(flat(PLACES[:ranks]), flat(nested), strict=True):
            slope = COEFFICIENTS[name] * power * exact.losses[k] ** (power - 1)
            total.append((k, (torch.tensor(w, dtype=slope.dtype) * slope).tolist()))
    return exact.gradient(total)


def masked_samples(planned: Masks, name: str, of_mb: tuple[int, ...]) -> list[oracle.Sample]:
    """With the mask of a term."""
    chosen = [sequences()[k] for k in of_mb]
    rows = planned(batch_of(chosen, "bshd")["loss_mask"], of_mb)[name]
    return [
        oracle.Sample(tuple(row[: len(s.tokens)].tolist()), s.sample.prompt)
        for s, row in zip(chosen, rows, strict=True)
    ]


def flat(step: Any) -> list[Any]:
    """The samples of a step, of all its ranks and microbatches."""
    return [sample for rank in step for microbatch in rank for sample in microbatch]


# The second rank of two tensor-parallel ones gets its weights by pickle.
@pytest.mark.parametrize("name", ["dp2", "tp2"])
def test_terms_whose_masks_are_one_equal_or_different_are_exact_alike(name: str) -> None:
    topology = TOPOLOGIES[name]
    ranks = topology.data_parallel_size
    cases = {case: masked_case(*masked, ranks) for case, masked in MASKED.items()}
    expected = [masked_gradient(modes, planned, ranks) for modes, planned, _ in MASKED.values()]
    found = run(topology, list(cases.values()), expected)
    for name_of, case in cases.items():
        assert max(rank.error for rank in found[case]) <= EXACT, name_of


def changed(own_mask: Masks, *, later: bool) -> Row:
    """A mask of one term's own, which was not planned; or in a second step alone."""
    steps = [masked_case(MODES, one, given) for given in (*[one] * later, own_mask)]
    return Row(
        "MaskError: the loss function's mask is not this rank's part",
        hook=hook_of(masked_terms(MODES), read_batch=read),
        data=lambda rank: chain.from_iterable(case.data(rank) for case in steps),
        before=[{"forward_step_func": masked_step, **OF_ROWS}] * later,
        step=masked_step,
        call=OF_ROWS,
    )


ROWS |= {
    "own mask at once": changed(own, later=False),
    "own mask later": changed(own, later=True),
    "own mask of other weights at once": changed(own_entropy, later=False),
    "own mask of other weights later": changed(own_entropy, later=True),
}


@pytest.mark.parametrize("name", ROWS)
def test_losses_and_masks_that_do_not_fit_the_terms_are_refused(name: str) -> None:
    assert_told(__name__, name)
