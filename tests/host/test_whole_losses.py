"""Losses of whole sequences, whose tokens lie on several context-parallel ranks.

The hook gathers a number for each token, such as log-probabilities, for losses that mix the tokens
of a sequence; or adds the numbers up over each sequence, for losses by sample or by pair. A pair, as
of preference losses, is two samples that follow one another. Steps of several terms are also in
`test_terms`, other splits in `test_splits`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_loss_agg import Microbatch, Term
from megatron_loss_agg.mcore import SampleLoss, TokenLoss, read_batch
from megatron_loss_agg.report import Sum
from tests import oracle
from tests.host import gpt, gradients, scripts
from tests.host.cases import EVALUATION, Batch, Call, Case, Expected, assert_exact, covering, run
from tests.host.harness import CP2, EXACT, TOPOLOGIES, TP2, Topology, run_host_ranks
from tests.host.reference import Gradient, gradient_of, gradient_of_sum, reference, references
from tests.host.refusals import Refusal, assert_told
from tests.host.steps import (
    PLACES,
    PROMPTS,
    Places,
    aggregation,
    sequences,
    weights_of,
    weights_with,
)

LAYOUTS, FLAGS = ("thd", "bshd"), (False, True)
TP2_CP2 = Topology(4, {**TP2, **CP2})


def topology_of(name: str) -> Topology:
    return TP2_CP2 if name == "tp2-cp2" else TOPOLOGIES[name]


# Losses of tokens.


def slices(batch: Batch) -> list[tuple[int, slice]]:
    """Of each sample its row of the batch, and its place there, with padding."""
    if "cu_seqlens_padded" not in batch:
        return [(row, slice(None)) for row in range(len(batch["loss_mask"]))]
    starts = batch["cu_seqlens_padded"].tolist()
    return [(0, slice(*ends)) for ends in pairwise(starts)]


def times_mean_probability(losses: Tensor, batch: Batch) -> Tensor:
    """Each loss times the geometric mean of the probabilities of its sequence, as of GSPO."""
    mask, factor = batch["loss_mask"], torch.zeros_like(losses)
    for where in slices(batch):
        m, x = mask[where], losses[where]
        mean = (m * x).sum() / m.sum().clamp(min=1e-3)
        factor = factor.index_put(torch.where(place(mask, where)), torch.exp(-mean))
    return losses * factor


def place(mask: Tensor, where: tuple[int, slice]) -> Tensor:
    """Bool, True there."""
    found = torch.zeros_like(mask, dtype=torch.bool)
    found[where] = True
    return found


def as_they_are(losses: Tensor, batch: Batch) -> Tensor:
    return losses


def reported_again(losses: Tensor, weights: Tensor) -> dict[str, Any]:
    return {"again": Sum.of(losses, weights)}


def whole_losses(
    iterator: Iterator[Any] | None,
    model: Any,
    change: Callable[[Tensor, Batch], Tensor] = as_they_are,
    several: bool = False,
) -> tuple[Tensor, TokenLoss]:
    """A forward step whose losses depend on all tokens.

    Args:
        change: of the losses of all tokens.
        several: it gathers two numbers a token.
    """
    batch = gpt.received(iterator)
    losses, _ = gpt.forward_step(iter([batch]), model)

    def gather(x: Tensor) -> Any:
        # In either form, flat or in the shape of the mask.
        return {"half": x.reshape(-1) / 2, "other": x.square() / (2 * x)} if several else x

    def compute(x: Any) -> Tensor:
        x = x["half"] + x["other"] if several else x
        assert x.shape == batch["loss_mask"].shape
        return change(x, batch)

    return losses, TokenLoss(compute, batch["loss_mask"], gather, report=reported_again)


MIXED = partial(whole_losses, change=times_mean_probability)
WAYS = {
    "linear": whole_losses,
    "several": partial(whole_losses, several=True),
    "mixed": MIXED,
}
# Modes by topology.
MODES = {
    "dp2": ("prompt_mean",),
    "cp2": ("prompt_mean", "token_mean", "custom"),
    "dp2-cp2": ("prompt_mean", "token_mean", "constant"),
    "tp2-cp2": ("prompt_mean",),
}


def expected(case: Case) -> Expected:
    """By the reference's losses: that of a token is ``l exp(-mean l)``, or ``l`` itself."""
    weights, total = case.weights, reference().loss(case.weights)
    if case.step is MIXED:
        weights, total = [], 0.0
        for i, w_T in case.weights:
            losses = reference().losses[i].clone().requires_grad_()
            mask = torch.tensor(sequences(case.masks)[i].sample.mask, dtype=losses.dtype)
            mean = mask @ losses / mask.sum().clamp(min=1e-3)
            loss = torch.tensor(w_T, dtype=losses.dtype) @ losses * torch.exp(-mean)
            (slope,) = torch.autograd.grad(loss, losses)
            weights.append((i, slope.tolist()))
            total += float(loss.detach())
    return reference().gradient(weights), {f"{case.mode} loss": total, "again": total}


@pytest.mark.parametrize("name", MODES)
def test_losses_of_all_tokens_are_exact(name: str) -> None:
    topology = topology_of(name)
    rows = [(*row, "01") for row in covering(2, MODES[name], [*WAYS], LAYOUTS, FLAGS)]
    # The last tokens of sequences are on the first context-parallel rank.
    rows += product(["sample_mean"], ["mixed"], ["thd"], FLAGS, ["single", "fractional"])
    cases = [
        Case(
            mode,
            masks=masks,
            layout=layout,
            places=PLACES[topology.data_parallel_size],
            per_token=per_token,
            step=WAYS[way],
        )
        for mode, way, layout, per_token, masks in rows
    ]
    cases += [
        replace(cases[0], times=2),
        replace(cases[-1], call=EVALUATION),
        replace(cases[-1], calls=(1, 3)),  # of one step
    ]
    assert_exact(topology, cases, expected)


# Losses by pair.

BETA, TARGET = 0.3, 0.4
# Pairs of i and i + 1, by data-parallel rank and microbatch; of one, an answer has no tokens. A
# microbatch of padding evens out the ranks.
PAIRS: dict[int, Places] = {
    1: (((0, 1), (2, 3, 4, 5, 8, 9), (6, 7)),),
    2: (((0, 1), (6, 7), ()), ((2, 3), (4, 5), (8, 9))),
}
OF_PAIRS: dict[str, dict[str, Any]] = {
    "sample_mean": {},
    "prompt_mean": {},
    "nested_mean": {"levels": ("prompt", "sample")},
    "constant": {"divisor": 7.0},
}


# By name, of the log-probabilities [pairs, 2] of answers, and their lengths.
def dpo(log_probs: Tensor, lengths: Tensor) -> Tensor:
    chosen, rejected = log_probs.unbind(dim=1)
    return -logsigmoid(BETA * (chosen - rejected))


def simpo(log_probs: Tensor, lengths: Tensor) -> Tensor:
    chosen, rejected = (log_probs / lengths.clamp(min=1)).unbind(dim=1)
    return -logsigmoid(BETA * (chosen - rejected) - TARGET)


def ipo(log_probs: Tensor, lengths: Tensor) -> Tensor:
    chosen, rejected = (log_probs / lengths.clamp(min=1)).unbind(dim=1)
    return (chosen - rejected - 1 / (2 * BETA)).square()


PAIR_LOSSES = {"dpo": dpo, "simpo": simpo, "ipo": ipo}


def read_pairs(batch: Batch) -> Microbatch:
    tokens, ids = read_batch(batch), batch["prompt_ids"][::2]
    return Microbatch.of_samples(len(ids), sequences=tokens, prompt_ids=ids)


def of_pairs(name: str, mask: Tensor, several: bool = False) -> SampleLoss:
    """Of a model that computes the losses of tokens. Padding has no log-probabilities."""

    def log_probs(losses: Tensor) -> Any:
        x = torch.where(mask == 0, torch.nan, -losses)
        return {"half": x / 2, "other": x.square() / (2 * x)} if several else x

    def compute(sums: Any, lengths: Tensor) -> Tensor:
        sums = sums["half"] + sums["other"] if several else sums
        return PAIR_LOSSES[name](sums.view(-1, 2), lengths.view(-1, 2))

    return SampleLoss(compute, log_probs, mask, report=reported_again)


def pair_step(
    iterator: Iterator[Any] | None, model: Any, loss: str, several: bool = False
) -> tuple[Tensor, SampleLoss]:
    losses, loss_func = gpt.forward_step(iterator, model)
    return losses, of_pairs(loss, loss_func.args[0], several)


STEPS_OF_PAIRS = {
    **{name: partial(pair_step, loss=name) for name in PAIR_LOSSES},
    "dpo of two numbers": partial(pair_step, loss="dpo", several=True),
}


def pair(i: int, _: tuple[int, ...]) -> oracle.Sample:
    return oracle.Sample((1.0,), prompt=PROMPTS[i])


def of_masked_sums(case: Case, loss: str, model: str = "dense") -> tuple[Gradient, float]:
    """A token's gradient is the reference's, times the slope of its pair's loss and its weight."""
    pairs = tuple(tuple(of_mb[::2] for of_mb in rank) for rank in case.places)
    weights = weights_with(case.mode, pairs, pair, **case.options)
    masks = [torch.tensor(x.sample.mask, dtype=torch.float64) for x in sequences(case.masks)]
    log_prob = torch.stack([-m @ x for m, x in zip(masks, reference(model).losses, strict=True)])
    log_prob.requires_grad_()
    lengths = torch.stack([m.sum() for m in masks])
    numbers = torch.tensor([[i, i + 1] for i, _ in weights])
    of_each = PAIR_LOSSES[loss](log_prob[numbers], lengths[numbers])
    total = of_each @ torch.tensor([w for _, (w,) in weights], dtype=of_each.dtype)
    (slopes,) = torch.autograd.grad(total, log_prob)
    of_tokens = [(i, (-x * m).tolist()) for i, (x, m) in enumerate(zip(slopes, masks, strict=True))]
    return reference(model).gradient(of_tokens), float(total.detach())


def expected_of_pairs(case: Case, model: str) -> Expected:
    gradient, total = of_masked_sums(case, case.step.keywords["loss"], model)
    return gradient, {f"{case.mode} loss": total, "again": total}


# With tensor parallelism, `test_losses_of_all_tokens_are_exact` gathers over the same groups.
EXTENDED = pytest.param("tp2-cp2", marks=pytest.mark.extended)


@pytest.mark.parametrize("name", ["dp2", "cp2", "dp2-cp2", EXTENDED, "pp2"])
def test_losses_by_pair_are_exact(name: str) -> None:
    topology = topology_of(name)
    way = {"hook": {"read_batch": read_pairs}}
    rows = covering(2, [*OF_PAIRS.items()], [*STEPS_OF_PAIRS], LAYOUTS, FLAGS, ("01", "fractional"))
    cases = []
    for (mode, options), step, layout, per_token, masks in rows:
        places = PAIRS[topology.data_parallel_size]
        if layout == "bshd":  # rows have no padding microbatch
            places = tuple(tuple(of_mb for of_mb in rank if of_mb) for rank in places)
        given = {"layout": layout, "per_token": per_token, "masks": masks, "places": places}
        cases.append(Case(mode, options, step=STEPS_OF_PAIRS[step], **given, **way))
    cases += [
        replace(cases[0], times=2),
        replace(cases[0], call=EVALUATION),
        replace(cases[0], calls=(1, len(cases[0].places[0]) - 1)),
    ]
    assert_exact(topology, cases, partial(expected_of_pairs, model=topology.model))


def padding_alone(batch: Batch, _: tuple[int, ...]) -> Batch:
    keys = ("tokens", "labels", "loss_mask")
    return {**batch, **{key: torch.zeros_like(batch[key]) for key in keys}}


def test_a_first_step_of_padding_alone_needs_no_split() -> None:
    step = Case(
        "sample_mean",
        places=PAIRS[1],
        step=STEPS_OF_PAIRS["dpo"],
        hook={"read_batch": read_pairs},
        batch=padding_alone,
    )
    second = replace(step, batch=None, after=step)
    wanted = {case: expected_of_pairs(case, "dense") for case in (step, second)}
    found = run(TOPOLOGIES["cp2"], [*wanted], [gradient for gradient, _ in wanted.values()])
    for error, reports in found[second]:
        assert error <= EXACT
        assert reports == pytest.approx({**reports, **wanted[second][1]}, rel=EXACT)


# DPO as it is trained: the policy starts as its reference model, and moves away from it.
STEPS, LR = 4, 0.05
Steps = list[tuple[Gradient, float]]
"""Of each optimizer step, the gradient and the loss."""


def margins(log_probs: Tensor, of_reference: Tensor) -> Tensor:
    return -logsigmoid(BETA * (log_probs - of_reference).view(-1, 2).diff(dim=1).squeeze(1))


def alone(places: tuple[int, ...]) -> tuple[Steps, list[float]]:
    """One process; and the log-probabilities of answers under the reference model."""
    gpt.initialize()
    model, chosen = gpt.build(), sequences()
    masks = [torch.tensor(x.sample.mask, dtype=torch.float64) for x in chosen]
    of_reference, steps = torch.empty(0), []
    for _ in range(STEPS):
        log_probs = torch.stack(
            [-(masks[i] * gpt.plain_losses(model, chosen[i])).sum() for i in places]
        )
        of_reference = of_reference if steps else log_probs.detach()
        loss = margins(log_probs, of_reference).mean()
        gradient = gradient_of(loss, model)
        steps.append((gradient, float(loss.detach())))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= LR * gradient[name]
    return steps, of_reference.tolist()


def dpo_step(iterator: Iterator[Any] | None, model: Any) -> tuple[Tensor, SampleLoss]:
    batch = gpt.received(iterator)
    losses, loss_func = gpt.forward_step(iter([batch]), model)
    compute = lambda sums, lengths: margins(sums, batch["of_reference"])  # noqa: E731
    return losses, SampleLoss(compute, torch.neg, *loss_func.args)


def with_reference(batch: Batch, of_mb: tuple[int, ...], of_reference: dict[int, float]) -> Batch:
    return {**batch, "of_reference": torch.tensor([of_reference[i] for i in of_mb])}


def trained(case: Case, topology: Topology, steps: Steps) -> list[tuple[float, float, float]]:
    """Of each optimizer step, the error of the gradient, the loss, and what it must be."""
    from tests.host.cases import reduced, take

    gpt.initialize(**topology.sizes)
    model, hook, found = gpt.ddp_model(case.per_token), case.new_hook(), []
    for gradient, loss in steps:
        reports = reduced(take(case, topology, [model], hook))
        found.append((gradients.error(model, gradient), reports["sample_mean loss"], loss))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.main_grad
    return found


@pytest.mark.parametrize("name", ["cp2", "dp2-cp2"])
@pytest.mark.parametrize("layout, per_token", [("thd", True), ("bshd", False)])
def test_a_policy_that_starts_as_its_reference_is_trained_exactly(
    name: str, layout: str, per_token: bool
) -> None:
    topology = TOPOLOGIES[name]
    places = PAIRS[topology.data_parallel_size]
    places = tuple(tuple(of_mb for of_mb in rank if of_mb) for rank in places)
    order = tuple(i for rank in places for of_mb in rank for i in of_mb)
    ((steps, of_reference),) = run_host_ranks(alone, 1, order)
    case = Case(
        "sample_mean",
        layout=layout,
        places=places,
        per_token=per_token,
        batch=partial(with_reference, of_reference=dict(zip(order, of_reference, strict=True))),
        step=dpo_step,
        hook={"read_batch": read_pairs},
    )
    assert steps[0][1] == pytest.approx(0.6931471805599453)  # ln 2: both models are one
    assert steps[-1][1] < 0.6
    for rank in run_host_ranks(trained, topology.world_size, case, topology, steps):
        for k, (error, loss, wanted) in enumerate(rank):
            assert error <= (k + 1) * EXACT, k  # errors of the steps before add up
            assert loss == pytest.approx(wanted, rel=(k + 1) * EXACT)


# A preference loss beside a loss of the tokens of all answers, each with its own denominator.
MULTIPLIERS = {"dpo": 1.0, "nll": 0.2}


def read_both(batch: Batch) -> dict[str, Microbatch]:
    return {"dpo": read_pairs(batch), "nll": read_batch(batch)}


def both_losses(iterator: Iterator[Any] | None, model: Any, gathers: bool) -> Any:
    batch = gpt.received(iterator)
    losses, loss_func = gpt.forward_step(iter([batch]), model)
    (mask,) = loss_func.args
    nll = TokenLoss(Tensor.clone, mask)
    if gathers:
        nll = TokenLoss(Tensor.clone, batch["loss_mask"], Tensor.clone)
    return losses, {"nll": nll, "dpo": of_pairs("dpo", mask)}


def expected_of_both(case: Case) -> Expected:
    of_pairs, pairs = of_masked_sums(replace(case, mode="sample_mean"), "dpo")
    weights = weights_of("token_mean", case.places)
    nll = reference().loss(weights)
    of_tokens = gradient_of_sum((MULTIPLIERS["nll"], reference(), weights))
    gradient = {name: g + of_tokens[name] for name, g in of_pairs.items()}
    total = pairs + MULTIPLIERS["nll"] * nll
    return gradient, {"dpo loss": pairs, "nll loss": nll, "loss": total}


@pytest.mark.parametrize("name", ["cp2", "dp2-cp2"])
def test_a_preference_loss_beside_a_token_loss_is_exact(name: str) -> None:
    topology = TOPOLOGIES[name]
    modes = {"dpo": "sample_mean", "nll": "token_mean"}
    terms = {n: Term(aggregation(mode), MULTIPLIERS[n]) for n, mode in modes.items()}
    cases = [
        Case(
            "",
            layout=layout,
            places=tuple(tuple(mb for mb in r if mb) for r in PAIRS[topology.data_parallel_size]),
            per_token=per_token,
            terms={n: terms[n] for n in order},  # the first one's tokens are counted
            step=partial(both_losses, gathers=gathers),
            hook={"read_batch": read_both},
            times=2,
        )
        for order, layout, per_token, gathers in covering(
            2, [("dpo", "nll"), ("nll", "dpo")], LAYOUTS, FLAGS, (False, True)
        )
    ]
    assert_exact(topology, cases, expected_of_both)


# A reward model: one number for each answer, at its last token, which it is told. A target by sample
# happens to be the last token of a sample in the other microbatch of its rank.
ANSWERS: Places = (((0, 1), (2, 3)), ((4, 7), (6, 8)))
TARGETS = {0: 8, 1: 0, 2: 23, 3: 2, 4: 11, 7: 19, 6: 16, 8: 1}


def score_of(model: Any, sequence: Any) -> dict[str, Tensor]:
    tokens = sequence.tokens.unsqueeze(0)
    logits = model(tokens, gpt.positions_like(tokens), None)
    return {"score": logits[:, -1].logsumexp(dim=-1)}


def with_targets(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    last = torch.tensor([len(sequences()[i].tokens) - 1 for i in of_mb])
    return {**batch, "last": last, "labels": torch.tensor([TARGETS[i] for i in of_mb])}


def scores(forward: Any, tokens: Tensor, positions: Tensor, last: Tensor) -> Tensor:
    """The model's forward pass, with an integer for each sample."""
    logits = forward(tokens, positions, None)
    return logits[torch.arange(len(last)), last].logsumexp(dim=-1)


def of_reward_model(hook: Any, model: Any, call: Call) -> Any:
    """A call with a model that gives scores."""
    gpt_model = model.module
    gpt_model.forward = partial(scores, gpt_model.forward)
    try:
        return call(2)
    finally:
        del gpt_model.forward


def preferred(rewards: Tensor, targets: Tensor) -> Tensor:
    """One number for each pair."""
    return -logsigmoid(rewards.view(-1, 2) @ rewards.new_tensor([1.0, -1.0]))


def regressed(rewards: Tensor, targets: Tensor) -> Tensor:
    return (rewards - targets).square() / 100


def reward_step(iterator: Iterator[Any] | None, model: Any, loss: Any) -> tuple[Tensor, SampleLoss]:
    batch = gpt.received(iterator)
    tokens = batch["tokens"]
    output = model(tokens, gpt.positions_like(tokens), batch["last"])
    return output, SampleLoss(lambda rewards: loss(rewards, batch["labels"]))


def read_answers(batch: Batch, number: int) -> Microbatch:
    ids = batch["prompt_ids"][::number]
    return Microbatch.of_samples(len(ids), prompt_ids=ids)


def test_a_reward_model_is_exact() -> None:
    of_scores = references(score_of)["score"]
    rewards = torch.cat(of_scores.losses).requires_grad_()
    wanted: dict[Case, Expected] = {}
    for (loss, number), per_token in product(((preferred, 2), (regressed, 1)), FLAGS):
        case = Case(
            "prompt_mean",
            layout="bshd",
            places=ANSWERS,
            per_token=per_token,
            batch=with_targets,
            step=partial(reward_step, loss=loss),
            run=of_reward_model,
            hook={"read_batch": partial(read_answers, number=number)},
        )
        counted = tuple(tuple(of_mb[::number] for of_mb in rank) for rank in ANSWERS)
        of_losses = [w for _, (w,) in weights_with("prompt_mean", counted, pair)]
        order = [i for rank in ANSWERS for of_mb in rank for i in of_mb]
        losses = loss(rewards[order], torch.tensor([TARGETS[i] for i in order]))
        total = losses @ torch.tensor(of_losses, dtype=losses.dtype)
        (slopes,) = torch.autograd.grad(total, rewards)
        gradient = of_scores.gradient([(i, [float(x)]) for i, x in enumerate(slopes)])
        wanted[case] = gradient, {"prompt_mean loss": float(total.detach())}
    assert_exact(TOPOLOGIES["dp2"], [*wanted], wanted.__getitem__)


# What is refused.

ONE_PACK = Case("sample_mean", places=(((0, 1),),))
ONE_ROW = {"layout": "bshd", "places": (((0,),),)}


def of_all_tokens(iterator: Any, model: Any, whole: bool = True) -> Any:
    """A script that gathers by itself, and says nothing of it."""
    batch = gpt.received(iterator)
    losses, loss_func = gpt.forward_step(iter([batch]), model)
    all_of_them = torch.cat([losses, losses], dim=-1)
    mask = batch["loss_mask"] if whole else torch.cat(2 * [*loss_func.args], dim=-1)
    return losses, TokenLoss(lambda x: all_of_them, mask)


def gathering(
    iterator: Any,
    model: Any,
    gather: Callable[[Tensor], Any] = Tensor.clone,
    mask: Callable[[Tensor], Tensor] = Tensor.clone,
    compute: Callable[[Tensor], Any] = Tensor.clone,
) -> Any:
    batch = gpt.received(iterator)
    losses, _ = gpt.forward_step(iter([batch]), model)
    return losses, TokenLoss(compute, mask(batch["loss_mask"]), gather)


def summed_on_rank(losses: Tensor, mask: Tensor) -> Any:
    """A loss by sample of this rank's tokens alone."""
    return losses, SampleLoss(lambda x: (x * mask).sum().expand(1))


def of_one_pair(losses: Tensor, mask: Tensor, change: Callable[[Any], Any] = lambda x: x) -> Any:
    loss = of_pairs("dpo", mask)
    return losses, SampleLoss(lambda *x: change(loss.compute(*x)), torch.neg, mask)


def wrong_numbers(losses: Tensor, mask: Tensor) -> Any:
    return losses, SampleLoss(lambda *x: torch.ones(1), lambda x: x[..., 1:], mask)


def refused(step: Any, says: str = "", reads: Any = read_batch, **options: Any) -> Refusal:
    way = {"step": step, "hook": {"read_batch": reads}, **options}
    return Refusal(says, replace(ONE_PACK, **way), "cp2")


def form(function: Any, **options: Any) -> Any:
    return partial(scripts.returning, partial(function, **options))


def without_sequences(batch: Batch) -> Microbatch:
    return Microbatch.of_samples(len(batch["prompt_ids"]) // 2)


def half_the_mask(mask: Tensor) -> Tensor:
    return mask / 2


ALL_OF_THEM = "DataError: losses and mask must cover this context-parallel rank's part ... got all"
PART = "DataError: gather of a TokenLoss must return a number for each token of this rank"
WHOLE_MASK = (
    "DataError: losses of a TokenLoss must have one value for each element of the loss mask"
)
ROWS = {
    "losses of all tokens": refused(of_all_tokens, f"{ALL_OF_THEM} of them ... gather)"),
    "losses and masks of all tokens": refused(
        partial(of_all_tokens, whole=False), f"{ALL_OF_THEM} of them ... gather)"
    ),
    "a gather of all tokens": refused(
        partial(gathering, gather=lambda x: torch.cat([x, x], dim=-1)), f"{PART}, (1, 14), got"
    ),
    "a gather of no tensor": refused(
        partial(gathering, gather=lambda x: [x]), f"{PART}, (1, 14), got list"
    ),
    "a gather, and losses of a part": refused(
        partial(gathering, compute=lambda x: x[..., ::2]), WHOLE_MASK
    ),
    "a gather, and a mask of another kind": refused(
        partial(gathering, mask=half_the_mask),
        "DataError: the loss function's mask must be this rank's part ... its mask sum of a sample",
    ),
    "losses by sample of each rank's own tokens": refused(
        form(summed_on_rank),
        "DataError: a SampleLoss under context parallelism needs per_token=",
        read_pairs,
    ),
    "sums of no sequences": refused(
        form(of_one_pair),
        "DataError: SampleLoss(per_token=) needs the token sequences ... of_samples(number, seq",
        without_sequences,
    ),
    "numbers of other tokens": refused(
        form(wrong_numbers),
        "DataError: losses of per_token of a SampleLoss must have one value for each element",
        read_pairs,
    ),
    "another mask": refused(
        form(lambda losses, mask: of_one_pair(losses, mask.roll(1, -1))),
        "DataError: the loss function's mask must be this rank's part ... mask sum of a sequence",
        read_pairs,
    ),
    "another mask later": refused(
        form(lambda losses, mask: of_one_pair(losses, half_the_mask(mask))),
        "DataError: the loss function's mask must be this ... its mask sum of all sequences must",
        read_pairs,
        after=replace(ONE_PACK, step=form(of_one_pair), hook={"read_batch": read_pairs}),
    ),
    "losses by pair that are summed": refused(
        form(of_one_pair, change=lambda x: x.expand(2)),
        "DataError: a SampleLoss must have a loss for each of the 1 samples ... shape (2,)",
        read_pairs,
    ),
    # As in reinforcement learning: a number of losses that the ranks cannot share evenly.
    "losses of an odd length": refused(
        partial(gathering, mask=lambda mask: mask[:, :-1]),
        f"{PART}, (1, 11), got (1, 12)",
        scripts.without_the_last,
        **ONE_ROW,
    ),
    "parts of an odd length": refused(
        partial(scripts.returning, scripts.stock),
        "DataError: the loss function's mask must have the shape ... (1, 11), got (1, 12)",
        scripts.without_the_last,
        **ONE_ROW,
    ),
    "a good step": refused(partial(gathering)),
    "a good step of pairs": refused(form(of_one_pair), reads=read_pairs),
}


@pytest.mark.parametrize("name", ROWS)
def test_losses_of_whole_sequences_that_would_not_be_exact_are_refused(name: str) -> None:
    assert_told(__name__, name)


def test_a_lone_part_of_a_sample_loss_is_refused() -> None:
    for given in ({"per_token": torch.neg}, {"loss_mask": torch.ones(2)}):
        with pytest.raises(ValueError, match="per_token and loss_mask of a SampleLoss go together"):
            SampleLoss(torch.neg, **given)
