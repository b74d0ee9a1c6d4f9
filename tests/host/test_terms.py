"""Losses of several terms through the real host, each with a denominator of its own.

The data-parallel ranks have different numbers of samples, and padding microbatches where one has
fewer. Metrics are those of the gathered step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import Microbatch, Term
from megatron_loss_agg.mcore import LossHook, TokenLoss
from megatron_loss_agg.report import Max, Mean, Min, Sum
from tests import oracle
from tests.host import gpt, gradients, parallel_state
from tests.host.cases import Batch, Call, Case, Expected, assert_exact, covering, run
from tests.host.harness import TOPOLOGIES, build_chunks, error_of, on_ranks_of
from tests.host.reference import gradient_of_sum, reference
from tests.host.refusals import Refusal, assert_says, assert_told
from tests.host.steps import Places, aggregation, sequences, weights_of, weights_with

TERMS = {
    "policy": Term(aggregation("prompt_mean")),
    "kl": Term(aggregation("token_mean"), multiplier=0.3),
    "entropy": Term(aggregation("sample_mean"), multiplier=-0.1),
    "value": Term(aggregation("constant"), multiplier=0.5),
}
# The losses of each, of the cross entropy of a token; and their slopes.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "policy": (lambda x: x, torch.ones_like),
    "kl": (lambda x: x * x, lambda x: 2 * x),
    "entropy": (torch.sin, torch.cos),
    "value": (torch.exp, torch.exp),
}
LARGE = 3.5  # of a cross entropy


def again(losses: Any, weights: Any) -> dict[str, Any]:
    """The aggregated losses, from the weights that a report gets."""
    return {f"{name} again": Sum.of(losses[name], w) for name, w in weights.items()}


def forward_step(iterator: Any, model: Any, gathers: bool = False) -> tuple[Tensor, TokenLoss]:
    """If it ``gathers``, every context-parallel rank has the losses of all tokens."""
    batch = gpt.received(iterator)
    output, loss_func = gpt.forward_step(iter([batch]), model)
    mask = batch["loss_mask"] if gathers else loss_func.args[0]

    def compute(x: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        losses = {name: function(x) for name, (function, _) in FUNCTIONS.items()}
        return losses, {
            "large": Mean.of(x > LARGE, mask),
            "mean": Mean.of(x, mask),
            "max": Max.of(x, mask),
            "min": Min.of(x, mask),
        }

    gather = Tensor.clone if gathers else None
    return output, TokenLoss(compute, mask, gather, report=again)


# Steps of 1 and 3 microbatches for each number of data-parallel ranks; () is a padding microbatch.
# Prompts lie on both ranks.
STEPS = {
    1: [((tuple(range(10)),),), (((0, 1, 2), (5,), (3, 4, 6, 7, 8, 9)),)],
    2: [
        (((0, 1, 2, 3, 4, 5),), ((6, 7, 8, 9),)),
        (((0,), (1, 2, 5), (3, 4, 6, 7)), ((8, 9), (), ())),
    ],
}


def expected(case: Case, model: str) -> Expected:
    losses, mask = reference(model).losses, [torch.tensor(x.sample.mask) for x in sequences()]
    x = torch.cat(losses)[torch.cat(mask) > 0]
    reports = {"mean": x.mean(), "max": x.max(), "min": x.min()}
    reports["large"] = (x > LARGE).double().mean()
    total, parts = 0.0, []
    for name, term in (case.terms or TERMS).items():
        function, slope = FUNCTIONS[name]
        weights = weights_of(term.aggregation.mode, case.places)
        by_sample = [(i, torch.tensor(w, dtype=torch.float64)) for i, w in weights]
        loss = sum(w @ function(losses[i]) for i, w in by_sample)
        reports |= {f"{name} loss": loss, f"{name} again": loss}
        total += term.multiplier * loss
        slopes = [(i, (w * slope(losses[i])).tolist()) for i, w in by_sample]
        parts.append((term.multiplier, reference(model), slopes))
    reports["loss"] = total
    return gradient_of_sum(*parts), {name: float(value) for name, value in reports.items()}


@pytest.mark.parametrize("name", ["dp2-cp2", "tp2", "pp2"])
def test_every_term_is_exact_over_the_whole_step(name: str) -> None:
    topology = TOPOLOGIES[name]
    ways = (False, True) if "cp" in topology.sizes else (False,)
    cases = []
    steps = STEPS[topology.data_parallel_size]
    for places, per_token, gathers in covering(2, steps, (False, True), ways):
        step = partial(forward_step, gathers=gathers)
        cases.append(Case("", terms=TERMS, places=places, per_token=per_token, step=step))
    assert_exact(topology, cases, partial(expected, model=topology.model))


def some_terms(iterator: Any, model: Any, names: tuple[str, ...]) -> tuple[Tensor, TokenLoss]:
    """As in an evaluation that has no rewards, say."""
    output, loss = forward_step(iterator, model)
    return output, TokenLoss(lambda x: {n: loss.compute(x)[0][n] for n in names}, loss.loss_mask)


def test_an_evaluation_may_lack_terms() -> None:
    names, call = ("kl", "value"), {"forward_only": True}
    step = partial(some_terms, names=names)
    case = Case("", terms=TERMS, places=STEPS[2][0], step=step, call=call)

    def of_some(case: Case) -> Expected:
        gradient, reports = expected(case, "dense")
        return gradient, {f"{name} loss": reports[f"{name} loss"] for name in names}

    assert_exact(TOPOLOGIES["dp2"], [case], of_some)
    for rank in run(TOPOLOGIES["dp2"], [case], [reference().gradient([(0, [0.0] * 24)])])[case]:
        assert rank.reports.keys() == {f"{name} loss" for name in names}  # and no "loss"


def with_kl(multiplier: float) -> dict[str, Term]:
    return {**TERMS, "kl": dataclasses.replace(TERMS["kl"], multiplier=multiplier)}


def repeated(batches: Any) -> Any:
    return itertools.cycle([*batches])


def adapted(hook: LossHook, model: Any, call: Call, by_rank: tuple[float, ...]) -> Any:
    """Two steps, the second with another multiplier, as a loop that controls the KL sets it."""
    call(1)
    hook.terms["kl"] = with_kl(by_rank[gpt.data_rank()])["kl"]
    return call(1)


def adapted_case(*by_rank: float) -> Case:
    way: Any = {"run": partial(adapted, by_rank=by_rank), "iterator": repeated}
    return Case("", terms=TERMS, places=STEPS[2][0], step=forward_step, **way)


def test_a_multiplier_may_change_between_steps() -> None:
    case = adapted_case(0.7, 0.7)

    def after_the_change(case: Case) -> Expected:
        return expected(dataclasses.replace(case, terms=with_kl(0.7)), "dense")

    assert_exact(TOPOLOGIES["dp2"], [case], after_the_change)


# The losses of the second one are NaN, and only logged.
WATCHED = {"policy": TERMS["policy"], "watched": Term(aggregation("token_mean"), multiplier=0.0)}


def watched_step(iterator: Any, model: Any) -> tuple[Tensor, TokenLoss]:
    output, loss_func = gpt.forward_step(iterator, model)
    # The slope of the root is infinite, and times a gradient of 0 it would be NaN.
    compute = lambda x: {"policy": x, "watched": torch.sqrt(0 * x) + torch.nan}  # noqa: E731
    return output, TokenLoss(compute, *loss_func.args)


def test_a_term_with_multiplier_0_reaches_no_gradient() -> None:
    case = Case("prompt_mean", terms=WATCHED, step=watched_step)
    gradient = reference().gradient(case.weights)
    assert_exact(TOPOLOGIES["dp2"], [case], lambda _: (gradient, {}))


@on_ranks_of("dp2", "pp2")
def test_a_loss_whose_terms_are_all_off_has_no_gradient(name: str) -> None:
    chunks = build_chunks(TOPOLOGIES[name], False)
    terms = {x: dataclasses.replace(WATCHED[x], multiplier=0.0) for x in ("watched", "policy")}
    data = Case("", places=(((0, 1),),)).data(0)
    gpt.run_step(LossHook(terms), chunks, data, 1, forward_step_func=watched_step)
    assert not gradients.flat(chunks).any()  # as it is with NaN


NO_TOKENS = (
    "DataError: a step must have an active token, and every token is masked ... "
    "skip or train (--loss-aggregation-empty-step"
)


@on_ranks_of("dp2", "cp2", "pp2")
def test_every_rank_hears_of_an_empty_step(name: str) -> None:
    chunks = build_chunks(TOPOLOGIES[name], False)
    # The first of several pipeline stages only hears of it.
    refused = (
        NO_TOKENS
        if parallel_state.is_pipeline_last_stage()
        else "PeerError: another rank of the last"
    )
    for policy in ("skip", "error", "train"):
        hook = LossHook(TERMS, empty_step=policy, aggregate_evaluation=True)
        for place, evaluates in (((0, 1), False), ((), True), ((), False)):
            options = {"forward_step_func": forward_step, "forward_only": evaluates}
            data = Case("", places=((place,),)).data(0)
            error = error_of(gpt.run_step, hook, chunks, data, 1, **options)
            is_empty = not place and not evaluates
            assert_says(error, refused if is_empty and policy == "error" else "")
            assert hook.step_is_empty == (is_empty and policy == "skip")
            assert place or error or not gradients.flat(chunks).any()


def misfit(says: str, losses_of: Any, terms: Any = TERMS, report: Any = None) -> Refusal:
    """The step above, of whose terms ``losses_of`` makes the losses, with a report of its own."""

    def step(iterator: Any, model: Any) -> Any:
        output, loss = forward_step(iterator, model)
        compute = lambda x: (losses_of(loss.compute(x)[0]), report or {})  # noqa: E731
        return output, TokenLoss(compute, loss.loss_mask)

    one = Case(terms=terms, places=(((0, 1),),), step=step if losses_of else None)
    return Refusal(says, one, "dp1")


KL = itemgetter("kl")
OF_TERMS = "DataError: losses must be a mapping with one for each term of"
ROWS = {
    "stock": misfit(
        "HostError: a loss of the terms ['entropy', 'kl', 'policy', 'value'] must be a TokenLoss",
        None,
    ),
    "unnamed": misfit(f"{OF_TERMS} ... got a torch.float64 tensor of shape ", KL),
    "one alone": misfit(f"{OF_TERMS} ... got ['kl']. Return all", lambda x: {"kl": x["kl"]}),
    "too many": misfit(
        f"{OF_TERMS} ['token_mean'], got ['entropy', 'kl', 'policy', 'value']",
        dict,
        aggregation("token_mean"),
    ),
    "another multiplier on one rank, in a later step": Refusal(
        "OptionError: all ranks must have the same aggregations, got ... 0.7 * kl ... 0.8 * kl",
        adapted_case(0.7, 0.8),
    ),
    "one of one": misfit("", KL, aggregation("token_mean")),
    "taken name": misfit(
        "DataError: reports must have different names, got ['loss'] twice ... Rename",
        dict,
        report={"loss": 1},
    ),
}


# Two terms of the same losses. The mask of the second lacks the first token of every row in some
# microbatches, which are told by their first samples.
MULTIPLIERS = {"plain": 1.0, "shorter": 0.3}
PLACES: Places = (((0, 1), (2, 3)), ((4, 5), (6, 7)))
Modes = dict[str, str]
ALIKE: Modes = dict.fromkeys(MULTIPLIERS, "token_mean")
MODES: Modes = {"plain": "token_mean", "shorter": "prompt_mean"}
MASKED: list[tuple[Modes, tuple[int, ...]]] = [
    (ALIKE, ()),
    (MODES, ()),
    (MODES, (0, 2, 4, 6)),
    # They count in the denominator of both microbatches, and of both data-parallel ranks.
    (ALIKE, (2, 6)),
    (ALIKE, (6,)),
    (dict.fromkeys(MULTIPLIERS, "custom"), ()),
]


def without_first(mask: Tensor) -> Tensor:
    return mask.masked_fill(mask.cumsum(dim=-1) == 1, 0)


def with_masks(batch: Batch, of_mb: tuple[int, ...], own: tuple[int, ...]) -> Batch:
    """With masks by term, which are one where the second has no own."""
    mask = batch["loss_mask"].clone()
    shorter = without_first(mask) if of_mb[0] in own else mask
    return {**batch, "masks": {"plain": mask, "shorter": shorter}}


def read(batch: Batch) -> dict[str, Microbatch]:
    """Terms whose masks are one share a microbatch."""
    of_terms, prompts = batch["masks"], batch["prompt_ids"]
    shared = {id(mask): Microbatch(mask, prompt_ids=prompts) for mask in of_terms.values()}
    return {name: shared[id(mask)] for name, mask in of_terms.items()}


def masked_step(iterator: Any, model: Any, edits: bool = False, lacks: str = "") -> Any:
    """With the masks of the batch; or the second edits its own, or a term lacks its mask."""
    batch = gpt.received(iterator)
    losses, _ = gpt.forward_step(iter([batch]), model)
    masks = batch["masks"]
    if edits:
        masks = {**masks, "shorter": without_first(masks["shorter"])}
    masks = {name: mask for name, mask in masks.items() if name != lacks}
    return losses, TokenLoss(lambda x: dict.fromkeys(MULTIPLIERS, x), masks)


def masked_case(modes: Modes, own: tuple[int, ...] = (), ranks: int = 2) -> Case:
    return Case(
        "",
        layout="bshd",
        places=PLACES[:ranks],
        terms={name: Term(aggregation(mode), MULTIPLIERS[name]) for name, mode in modes.items()},
        hook={"read_batch": read},
        batch=partial(with_masks, own=own),
        step=masked_step,
        call={"micro_batch_size": 2},
        times=2,
    )


def masked_sample(own: tuple[int, ...], i: int, of_mb: tuple[int, ...]) -> oracle.Sample:
    """Of the second term."""
    whole = sequences()[i].sample
    mask = [*whole.mask]
    if of_mb[0] in own and any(mask):
        mask[mask.index(1)] = 0.0
    return dataclasses.replace(whole, mask=tuple(mask))


# The second rank of two tensor-parallel ones gets its weights by pickle.
@pytest.mark.parametrize("name", ["dp2", "tp2"])
def test_terms_whose_masks_are_one_equal_or_different_are_exact_alike(name: str) -> None:
    expected: dict[Case, Expected] = {}
    for modes, own in MASKED:
        case = masked_case(modes, own, TOPOLOGIES[name].data_parallel_size)
        weights = {term: weights_of(mode, case.places) for term, mode in modes.items()}
        if own:
            sample = partial(masked_sample, own)
            weights["shorter"] = weights_with(modes["shorter"], case.places, sample)
        parts = [(MULTIPLIERS[term], reference(), w) for term, w in weights.items()]
        expected[case] = gradient_of_sum(*parts), {}
    assert_exact(TOPOLOGIES[name], [*expected], expected.__getitem__)


def edited(modes: Modes, later: bool) -> Refusal:
    """A mask of one term that was not planned; or in a second step alone."""
    case = dataclasses.replace(masked_case(modes), times=1)
    step = partial(masked_step, edits=True)
    return Refusal(
        "DataError: the loss function's mask must be this rank's part",
        dataclasses.replace(case, step=step, after=case if later else None),
    )


ROWS |= {
    "own mask at once": edited(ALIKE, later=False),
    "own mask later": edited(ALIKE, later=True),
    "own mask of another mode at once": edited(MODES, later=False),
    "own mask of another mode later": edited(MODES, later=True),
    "no mask of one term": Refusal(
        "DataError: a TokenLoss must have a mask for each term, got ['plain']. Add 'shorter'",
        dataclasses.replace(
            masked_case(ALIKE), times=1, step=partial(masked_step, lacks="shorter")
        ),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_losses_and_masks_that_do_not_fit_the_terms_are_refused(name: str) -> None:
    assert_told(__name__, name)
