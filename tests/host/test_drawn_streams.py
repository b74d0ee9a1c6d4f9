"""Drawn steps that are counted as they train, against one process that knows the whole step.

A draw deals all samples to data-parallel ranks, calls and microbatches, and chooses a mode, its
options, masks, a loss and how it decides its masks. Two draws follow each other on one hook.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import Microbatch, Term
from tests.host import gpt
from tests.host.cases import Batch, Case, Expected, assert_exact, by_the_oracle
from tests.host.harness import TOPOLOGIES, Topology, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import LENGTHS, Places, Weights, aggregation, sequences, weights_with
from tests.host.test_steps import twice
from tests.oracle import Sample

MODES: list[tuple[str, dict[str, Any]]] = [
    ("token_mean", {}),
    ("sample_mean", {}),
    ("rollout_mean", {}),
    ("prompt_mean", {}),
    ("nested_mean", {"levels": ("prompt", "rollout", "sample")}),
    ("sample_sum", {}),
    ("constant", {"divisor": 7.0}),
    ("constant", {"divisor": 7.0, "count": "rollout"}),
    ("sample_mean", {"count": "prompt"}),
    ("sum", {}),
    ("microbatch_mean", {}),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"empty": "skip"},
    *({"rejected": x} for x in ("count", "skip")),
    *({"sample_weights": x} for x in ("count", "skip")),
    {"sample_weights": "count", "rejected": "skip", "empty": "skip"},
]
MASKS = {"01": ("01", 1.0), "fractional": ("fractional", 1.0), "tiny": ("fractional", 2.0**-12)}
"""By name: those of `sequences`, and a factor, with which all together are less than 1."""
LOSSES = ("stock", "tokens", "gathered", "samples", "terms")
TERMS = {"one": 1.0, "two": 0.5}  # multipliers
V = [x / 2**12 for x in (0.5, 2.0, 1.0, 0.0, 0.25, 3.0, 1.0, 0.125, 1.5, 1.0)]
REJECTED = [i % 3 == 1 for i in range(len(LENGTHS))]
REJECTED_LATE = [i in (0, 4, 8) for i in range(len(LENGTHS))]


@dataclass(frozen=True)
class Draw:
    """A drawn step."""

    mode: str
    options: dict[str, Any]
    layout: str
    masks: str
    loss: str
    decides: bool  # the loss decides its masks
    at_end: bool  # LossHook(count="end"), not hook.stream
    places: Places
    calls: tuple[tuple[int, ...], ...]  # by data-parallel rank, the microbatches of each call

    def sample(self, i: int, _: tuple[int, ...] = ()) -> Sample:
        """As the loss counts it."""
        masks, factor = MASKS[self.masks]
        x = sequences(masks)[i].sample
        mask = tuple(m * factor for m in x.mask)
        if self.loss == "samples":
            mask = (share(i) if self.decides else 1.0,)
        elif self.decides:
            mask = tuple(0.0 if leaves_out(i, t) else m for t, m in enumerate(mask))
        return replace(x, mask=mask, weight=V[i] if "sample_weights" in self.options else 1.0)

    def is_rejected(self, i: int) -> bool:
        rejects = "rejected" in self.options
        return rejects and (REJECTED[i] or (self.decides and REJECTED_LATE[i]))


def leaves_out(i: int, t: int) -> bool:
    """Whether the loss decides against token ``t`` of sample ``i``: all tokens of samples 2, 8."""
    return i in (2, 8) or (i + 3 * t) % 4 == 0


def share(i: int) -> float:
    """The mask that the loss of a sample decides."""
    return (i % 3) / 2


def expected(draw: Draw, model: str) -> Expected:
    options, places = {**draw.options}, draw.places
    if options.pop("rejected", None) == "skip":
        places = tuple(
            tuple(tuple(i for i in mb if not draw.is_rejected(i)) for mb in rank) for rank in places
        )
    weights: Weights = weights_with(draw.mode, places, draw.sample, **options)
    weights = [(i, w) for i, w in weights if not draw.is_rejected(i)]
    if draw.loss == "samples":  # the mean over the tokens of the sample
        masks = {i: sequences(MASKS[draw.masks][0])[i].sample.mask for i, _ in weights}
        weights = [(i, [w * m / (sum(masks[i]) or 1.0) for m in masks[i]]) for i, (w,) in weights]
    stock = reference(model)
    gradient, loss = stock.gradient(weights), stock.loss(weights)
    if draw.loss != "terms":
        return gradient, {f"{draw.mode} loss": loss}
    factor = sum(TERMS.values())
    reports = {"loss": factor * loss, **{f"{name} loss": loss for name in TERMS}}
    return {name: factor * g for name, g in gradient.items()}, reports


def batch_of_draw(batch: Batch, samples: tuple[int, ...], draw: Draw) -> Batch:
    """The batch with the masks and keys of the draw."""
    batch = {**batch, "loss_mask": batch["loss_mask"] * MASKS[draw.masks][1]}
    batch["decided"] = batch["loss_mask"].clone()
    starts = batch.get("cu_seqlens_padded")
    for place, i in enumerate(samples):
        for t in range(LENGTHS[i]):
            if leaves_out(i, t):
                index = (place, t) if starts is None else (0, int(starts[place]) + t)
                batch["decided"][index] = 0
    batch["shares"] = torch.tensor([share(i) for i in samples], dtype=torch.float64)
    if "rejected" in draw.options:
        batch["rejected"] = torch.tensor([REJECTED[i] for i in samples], dtype=torch.bool)
        batch["late"] = torch.tensor([REJECTED_LATE[i] for i in samples], dtype=torch.bool)
    if "sample_weights" in draw.options:
        weights = [V[i] for i in samples]
        batch["sample_weights"] = torch.tensor(weights, dtype=torch.float64)
    return batch


def read_samples(batch: Batch) -> Microbatch:
    """A reader for losses of samples."""
    from megatron_loss_agg.mcore import read_batch

    keys = ("prompt_ids", "rollout_ids", "rejected", "sample_weights")
    tokens = read_batch({key: x for key, x in batch.items() if key not in keys})
    by_sample = {key: batch[key] for key in keys if key in batch}
    return Microbatch.of_samples(len(batch["prompt_ids"]), sequences=tokens, **by_sample)


def step_of_draw(data_iterator: Any, model: Any, draw: Draw) -> Any:
    """The forward step of a draw whose loss is not a stock one."""
    from megatron_loss_agg.mcore import MaskedLosses, SampleLoss, TokenLoss

    batch = gpt.received(data_iterator)
    output, labels, mask = gpt.outputs(batch, model)
    if not gpt.get_attr_wrapped_model(model, "post_process"):
        return output, None

    def losses_of(logits: Tensor) -> Tensor:
        logits = gpt.gather_from_tensor_model_parallel_region(logits)
        losses = gpt.F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view_as(labels)

    def masked(losses: Any, decided: Tensor) -> Any:
        if draw.loss == "terms":
            losses = dict.fromkeys(TERMS, losses)
        return MaskedLosses(losses, decided, batch.get("late")) if draw.decides else losses

    if draw.loss == "samples":

        def by_sample(sums: Tensor, lengths: Tensor) -> Any:
            return masked(sums / torch.where(lengths == 0, 1.0, lengths), batch["shares"])

        return output, SampleLoss(by_sample, losses_of, mask)
    if draw.loss == "gathered":
        whole = batch["decided"]
        return output, TokenLoss(lambda x: masked(x, whole), batch["loss_mask"], losses_of)
    local = gpt.layout_of(batch).shard(batch["decided"])
    return output, TokenLoss(lambda logits: masked(losses_of(logits), local), mask)


def run_of_draw(hook: Any, model: Any, step: Any, draw: Draw) -> list[Any]:
    """The calls of this rank, and reports of nothing if it makes none."""
    sizes = draw.calls[gpt.data_rank()]
    if draw.at_end:
        (number,) = sizes
        return step(number)
    chunks = model if isinstance(model, list) else [model]
    for ddp in chunks:
        ddp.zero_grad_buffer()
    reports = []
    with hook.stream(model=model):
        for number in sizes:
            reports += step(number, zero_grad=False)
    if not sizes and gpt.parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        names = [*hook.terms, *(["lm"] if draw.loss == "stock" else [])]
        keys = [f"{name} loss" for name in names] + ["loss"] * (draw.loss == "terms")
        reports = [{key: torch.zeros(2) for key in keys}]
    return reports


def case_of(draw: Draw, per_token: bool, after: Case | None) -> Case:
    stock = draw.loss == "stock"
    hook: dict[str, Any] = {"count": "end"} if draw.at_end else {}
    if draw.loss == "samples":
        hook["read_batch"] = read_samples
    agg = aggregation(draw.mode, **draw.options)
    return Case(
        draw.mode,
        options=draw.options,
        masks=MASKS[draw.masks][0],
        layout=draw.layout,
        places=draw.places,
        per_token=per_token,
        terms={name: Term(agg, x) for name, x in TERMS.items()} if draw.loss == "terms" else None,
        hook=hook,
        batch=partial(batch_of_draw, draw=draw),
        step=None if stock else partial(step_of_draw, draw=draw),
        run=partial(run_of_draw, draw=draw),
        after=after,
    )


def draws(topology: Topology, number: int, seed: int) -> Iterator[list[Draw]]:
    """Two steps of one hook, ``number`` times; each mode and loss in turn, so that none is rare."""
    rng = random.Random(seed)
    for k in range(number):
        mode, options = MODES[(k + seed) % len(MODES)]
        options = {**options, **rng.choice(OPTIONS)}
        loss = LOSSES[(k + seed) % len(LOSSES)]
        if topology.chunks > 1 and loss == "samples":
            loss = "tokens"
        decides = loss != "stock" and rng.random() < 0.7
        at_end = rng.random() < 0.4
        layout = "thd" if topology.chunks > 1 else rng.choice(("thd", "bshd"))
        masks = rng.choice([*MASKS])
        draw = Draw(mode, options, layout, masks, loss, decides, at_end, (), ())
        yield [deal(rng, topology, draw) for _ in range(2)]


def deal(rng: random.Random, topology: Topology, draw: Draw) -> Draw:
    """All samples, with groups whole in calls or microbatches."""
    most = 1 if draw.at_end else 3
    numbers = [rng.randint(int(draw.at_end), most) for _ in range(topology.data_parallel_size)]
    if not any(numbers) or (draw.mode == "sum" and not numbers[0]):  # whose report needs rank 0
        numbers[0] = 2
    multiple = 2 if topology.chunks > 1 else 1  # for interleaved schedules
    calls: list[list[list[list[int]]]] = [
        [[[] for _ in range(multiple * rng.randint(1, 3))] for _ in range(n)] for n in numbers
    ]
    for group in groups(draw):
        call = rng.choice([call for rank in calls for call in rank])
        microbatch = rng.choice(call)
        for i in group:
            (microbatch if draw.at_end or draw.decides else rng.choice(call)).append(i)
    if draw.layout == "bshd" or draw.loss == "samples":  # no microbatch is without samples
        calls = [[[mb for mb in call if mb] for call in rank] for rank in calls]
        calls = [[call for call in rank if call] for rank in calls]
        if (draw.at_end and not all(calls)) or (draw.mode == "sum" and not calls[0]):
            return deal(rng, topology, draw)
    places = tuple(tuple(tuple(mb) for call in rank for mb in call) for rank in calls)
    return replace(draw, places=places, calls=tuple(tuple(map(len, rank)) for rank in calls))


def groups(draw: Draw) -> list[list[int]]:
    """The samples that must be together."""
    units = {"prompt_mean": "prompt", "nested_mean": "prompt", "rollout_mean": "rollout"}
    unit = draw.options.get("count") or units.get(draw.mode)
    by_id: dict[Any, list[int]] = {}
    for i, x in enumerate(sequences()):
        by_id.setdefault(getattr(x.sample, unit) if unit else i, []).append(i)
    return [*by_id.values()]


# With seeds whose draws have much: all losses that decide, late rejection, ranks without a call.
@pytest.mark.parametrize(
    "name, number, seed",
    [
        ("dp2", 16, 5),
        ("cp2", 10, 25),
        ("tp2-sp", 6, 12),
        ("pp2", 6, 12),
        ("dp2-cp2", 10, 28),
        ("vpp2", 5, 10),
        ("pp2-dp2-distributed-overlap", 10, 28),
    ],
)
def test_drawn_streams_are_exact(name: str, number: int, seed: int) -> None:
    topology = TOPOLOGIES[name]
    wanted: dict[Case, Expected] = {}
    for k, steps in enumerate(draws(topology, number, seed)):
        case: Case | None = None
        for draw in steps:
            case = case_of(draw, topology.per_token_flags[k % len(topology.per_token_flags)], case)
            wanted[case] = expected(draw, topology.model)
    assert_exact(topology, [*wanted], wanted.__getitem__)


# Each kind of step in turn, on one hook; with the masks of the batch.
KINDS = ("stream", "planned", "step", "stream", "evaluation", "end", "stream", "planned")
TOGETHER = {"aggregate_evaluation": True, "audit": True, "mismatch": "warn"}
WHOLE: dict[int, tuple[Places, Places]] = {
    1: ((((0, 1, 4), (2, 5, 9), (3, 6), (7, 8)),), (((7, 8), (), (2, 5, 9), (3, 6)),)),
    2: (
        (((0, 1, 4), (), (2, 5, 9), ()), ((3, 6), (7, 8), (), ())),
        (((7, 8), (3, 6), (), ()), ((2, 5, 9), (), (), (0, 1, 4))),
    ),
}


def run_of_kind(hook: Any, model: Any, step: Any, kind: str) -> list[Any]:
    if kind == "stream":
        with hook.stream():
            return step(2) + step(2, zero_grad=False)
    assert kind == "end"
    hook.count = "end"
    reports = step(4)
    hook.count = "before"
    return reports


@pytest.mark.parametrize("name", ["dp2-distributed-overlap", "cp2"])
def test_each_kind_of_step_is_exact_after_the_others(name: str) -> None:
    topology, last = TOPOLOGIES[name], None
    cases = []
    for k, kind in enumerate(KINDS):
        way: dict[str, Any] = {"run": partial(run_of_kind, kind=kind)}
        if kind == "step":
            way = {"calls": (2, 2)}
        if kind in ("planned", "evaluation"):
            way = {"call": {"forward_only": kind == "evaluation"}}
        # Whole prompts in each microbatch.
        rotated = WHOLE[topology.data_parallel_size][k % 2]
        last = Case("prompt_mean", places=rotated, hook=TOGETHER, after=last, **way)
        cases.append(last)
    assert_exact(topology, cases, partial(by_the_oracle, model=topology.model))


def finalized_by(chunks: Any, num_tokens: Any = None, *, scale: float, **options: Any) -> None:
    """A finalization of the script's own, that is bound."""
    gpt.finalize_model_grads(chunks, num_tokens, **options)


def policy_and_kl(data_iterator: Any, model: Any, draw: Draw) -> Any:
    """A mapping of loss functions, of which the first alone decides its mask."""
    from megatron_loss_agg.mcore import TokenLoss

    output, deciding = step_of_draw(
        data_iterator, model, replace(draw, loss="tokens", decides=True)
    )
    if deciding is None:
        return output, None
    kl = TokenLoss(lambda logits: deciding.compute(logits).losses, deciding.loss_mask)
    return output, {"one": deciding, "two": kl}


def weighed(losses: Tensor, weights: Tensor) -> dict[str, Any]:
    from megatron_loss_agg.report import Mean

    return {"weighed": Mean.of(losses, weights), "squares": Mean.of(losses.square(), weights != 0)}


def reporting(data_iterator: Any, model: Any) -> Any:
    """A forward step that reports means by the weights of the loss."""
    from megatron_loss_agg.mcore import TokenLoss

    losses, loss_func = gpt.forward_step(data_iterator, model)
    return losses, TokenLoss(lambda x: x, *loss_func.args, report=weighed)


HALVES: Places = (((0, 1, 4), (7, 8)), ((2, 5, 9), (3, 6)))
STREAM = Draw("prompt_mean", {}, "thd", "01", "tokens", True, False, HALVES, ((1, 1), (2,)))
END = replace(STREAM, at_end=True, calls=((2,), (2,)))
MEANS = Draw(
    "sample_mean",
    {"rejected": "count"},
    "bshd",
    "01",
    "terms",
    False,
    False,
    HALVES,
    ((2,), (1, 1)),
)


def of_policy_and_kl(draw: Draw) -> Expected:
    """The losses of the first term have decided masks."""
    policy = expected(replace(draw, loss="tokens", decides=True), "dense")
    kl = expected(replace(draw, loss="tokens"), "dense")
    gradient = {key: policy[0][key] + TERMS["two"] * kl[0][key] for key in kl[0]}
    one, two = (x[1]["sample_mean loss"] for x in (policy, kl))
    return gradient, {"one loss": one, "two loss": two, "loss": one + TERMS["two"] * two}


def with_means(draw: Draw) -> Expected:
    gradient, reports = expected(replace(draw, loss="tokens"), "dense")
    tokens = torch.cat([torch.tensor(draw.sample(i).mask) for i in range(len(LENGTHS))]) != 0
    squares = torch.cat(reference().losses).square()[tokens].mean()
    return gradient, {"weighed": reports["prompt_mean loss"], "squares": float(squares)}


def test_streams_that_are_not_as_usual_are_exact() -> None:
    wanted: dict[Case, Expected] = {}
    own = partial(finalized_by, scale=1.0)
    for draw, change in (
        (STREAM, {"call": {"schedule": twice}}),
        (END, {"call": {"schedule": twice}}),
        (STREAM, {"config": {"finalize_model_grads_func": None}}),
        (STREAM, {"config": {"finalize_model_grads_func": own}}),
        (END, {"config": {"finalize_model_grads_func": own}}),
    ):
        wanted[replace(case_of(draw, False, None), times=2, **change)] = expected(draw, "dense")
    step = partial(policy_and_kl, draw=MEANS)
    wanted[replace(case_of(MEANS, True, None), step=step)] = of_policy_and_kl(MEANS)
    means = replace(STREAM, decides=False, loss="stock")
    for draw in (means, replace(means, at_end=True, calls=END.calls)):
        wanted[replace(case_of(draw, True, None), step=reporting)] = with_means(draw)
    assert_exact(TOPOLOGIES["dp2"], [*wanted], wanted.__getitem__)


def in_groups(hook: Any, model: Any, step: Any) -> list[Any]:
    """A stream in process groups of the script's own, with an evaluation; one rank trains nothing."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    model.zero_grad_buffer()
    with hook.stream(model=model, pg_collection=groups):
        step(2, pg_collection=groups, zero_grad=False, forward_only=True)
        if gpt.data_rank() == 1:
            return [dict.fromkeys(("lm loss", "sample_mean loss"), torch.zeros(2))]
        return step(2, pg_collection=groups, zero_grad=False)


def test_a_stream_in_groups_of_its_own_and_with_an_evaluation_is_exact() -> None:
    hook = {"aggregate_evaluation": True}
    case = Case("sample_mean", places=(HALVES[0] * 2, HALVES[1]), hook=hook, run=in_groups)
    of_first = by_the_oracle(replace(case, places=HALVES[:1]))
    assert_exact(TOPOLOGIES["dp2"], [case], lambda _: of_first)


def forced_gradients() -> Tensor:
    """Those of all parameters on one rank of a distributed optimizer, which has a shard otherwise."""
    gpt.initialize()
    model = gpt.data_parallel(gpt.build(), use_distributed_optimizer=True)
    case = Case("sample_mean", places=HALVES)
    hook = case.new_hook()
    assert hook is not None
    with hook.stream():
        gpt.run_step(hook, model, case.data(gpt.data_rank()), 2, force_all_reduce=True)
    return torch.cat([p.main_grad.flatten() for p in model.parameters()])


def test_a_stream_reduces_all_gradients_on_each_rank_if_its_calls_ask_for_it() -> None:
    one, other = run_host_ranks(forced_gradients, 2)
    assert torch.equal(one, other)
