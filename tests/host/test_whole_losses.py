"""Losses that every context-parallel rank holds whole, gathered from the ranks or summed by pair.

Ranks gather log-probabilities, or losses, in both ways that loops have. A pair, as of preference
losses, is two samples that follow one another; its loss depends on the log-probabilities of both.
Steps of several terms are in `test_terms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import exp, log1p
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_loss_agg import Microbatch, SequenceSum
from megatron_loss_agg.mcore import TokenLoss, read_batch
from megatron_loss_agg.report import Sum
from tests import oracle
from tests.host import gpt, parallel_state, scripts
from tests.host.cases import EVALUATION, Case, Expected, assert_exact, covering
from tests.host.harness import CP2, TOPOLOGIES, TP2, Topology, on_ranks_of
from tests.host.reference import reference
from tests.host.refusals import Refusal, assert_told, two_rows
from tests.host.steps import PLACES, PROMPTS, Places, sequences, weights_with


class Gathered(torch.autograd.Function):
    """[ranks, *x]: all ranks' ``x``; in backward, the sum of all ranks' gradients of it.

    torch's own scatters in backward over gloo, to ranks of the world.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        dist.all_reduce(gradient, group=group)
        return gradient[dist.get_rank(group)]


def gathered(x: Tensor, batch: dict[str, Tensor], kind: str) -> Tensor:
    """``x`` of all tokens of the batch; in backward, a sum over the ranks' gradients of it
    ("reduced_grad"), or no communication ("local_grad").
    """
    parts = [*Gathered.apply(x)]
    if kind == "local_grad":
        parts = [part.detach() for part in parts]
        parts[parallel_state.get_context_parallel_rank()] = x
    return gpt.layout_of(batch).unshard(parts)


def whole_losses(
    iterator: Iterator[Any] | None,
    model: Any,
    *,
    kind: str,
    said: str | None = "as it is",
    early: bool = False,
    advantage: float = 1.0,
) -> tuple[Any, TokenLoss]:
    """A forward step whose losses every context-parallel rank has whole; reports them again.

    Args:
        kind: how they are gathered, see `gathered`.
        said: what the loss function says of that.
        early: gathers in the forward step, so that the loss function has a whole input.
        advantage: by which losses are multiplied.
    """
    batch = gpt.received(iterator)
    losses, _ = gpt.forward_step(iter([batch]), model)

    def compute(x: Any, weights: Tensor) -> tuple[Tensor, dict[str, Any]]:
        if not early:
            x = x.mul_(2) / 2  # overwrites its input, as Megatron's cross entropy does
            x = gathered(x, batch, kind)
        return advantage * x, {"again": Sum.of(x, weights)}

    output = gathered(losses, batch, kind) if early else losses
    said = kind if said == "as it is" else said
    return output, TokenLoss(compute, batch["loss_mask"], said, takes_weights=True)


def whole(kind: str, **options: Any) -> Callable[..., Any]:
    return partial(whole_losses, kind=kind, **options)


KINDS, LAYOUTS, FLAGS = ("local_grad", "reduced_grad"), ("thd", "bshd"), (False, True)
# Modes by topology. The losses of "token_mean" are gathered in the forward step.
MODES = {
    "dp2": ("prompt_mean",),
    "dp2-cp2": ("prompt_mean", "token_mean", "constant"),
    "tp2-cp2": ("prompt_mean",),
}


def expected(case: Case) -> Expected:
    loss = reference().loss(case.weights)
    return reference().gradient(case.weights), {f"{case.mode} loss": loss, "again": loss}


@pytest.mark.parametrize("name", MODES)
def test_gradients_and_reports_of_whole_losses_are_exact(name: str) -> None:
    topology = TOPOLOGIES.get(name, Topology(4, {**TP2, **CP2}))
    rows = [(*row, "01") for row in covering(2, MODES[name], KINDS, LAYOUTS, FLAGS)]
    if name == "dp2-cp2":  # the last tokens of sequences are on the first context-parallel rank
        rows += product(["sample_mean"], KINDS, ["thd"], FLAGS, ["single"])
    cases = [
        Case(
            mode,
            masks=masks,
            layout=layout,
            places=PLACES[topology.data_parallel_size],
            per_token=per_token,
            step=whole(kind, early=mode == "token_mean"),
            times=2,  # the first step measures
        )
        for mode, kind, layout, per_token, masks in rows
    ]
    assert_exact(topology, cases, expected)


BETA = 0.3
# Pairs of i and i + 1, by data-parallel rank and microbatch; of one, an answer has no tokens.
PAIRS: dict[int, Places] = {
    1: (((0, 1), (2, 3, 4, 5, 8, 9), (6, 7)),),
    2: (((0, 1), (6, 7)), ((2, 3, 4, 5), (8, 9))),
}
OF_PAIRS: dict[str, dict[str, Any]] = {
    "sample_mean": {},
    "prompt_mean": {},
    "nested_mean": {"levels": ("prompt", "sample")},
    "constant": {"divisor": 7.0},
}


def read_pairs(batch: dict[str, Tensor]) -> Microbatch:
    ids = batch["prompt_ids"][::2]
    return Microbatch(torch.ones(len(ids), 1), prompt_ids=ids)


def pair_step(iterator: Iterator[Any] | None, model: Any) -> tuple[Tensor, TokenLoss]:
    batch = gpt.received(iterator)
    output, _ = gpt.forward_step(iter([batch]), model)
    offsets = {k: batch[k] for k in ("cu_seqlens", "cu_seqlens_padded") if k in batch}
    group = parallel_state.get_context_parallel_group()
    sums = SequenceSum(Microbatch(batch["loss_mask"], **offsets), gpt.layout_of(batch), group)

    def compute(losses: Tensor) -> tuple[Tensor, dict[str, Any]]:
        chosen, rejected = sums(-losses).view(-1, 2).unbind(dim=1)
        return -logsigmoid(BETA * (chosen - rejected)), {}

    return output, TokenLoss(compute, torch.ones(len(batch["prompt_ids"]) // 2), "reduced_grad")


def pair(i: int, _: tuple[int, ...]) -> oracle.Sample:
    return oracle.Sample((1.0,), prompt=PROMPTS[i])


def expected_of_pairs(case: Case, model: str) -> Expected:
    """A token's gradient is the reference's, times the slope of its pair's loss and its weight."""
    pairs = tuple(tuple(of_mb[::2] for of_mb in rank) for rank in case.places)
    weights = weights_with(case.mode, pairs, pair, **case.options)
    masks = [x.sample.mask for x in sequences()]
    tokens = zip(masks, reference(model).losses, strict=True)
    log_prob = [-float(torch.tensor(m, dtype=x.dtype) @ x) for m, x in tokens]
    total, of_tokens = 0.0, []
    for i, (w,) in weights:
        j = i + 1
        margin = BETA * (log_prob[i] - log_prob[j])
        total += w * log1p(exp(-margin))
        slope = w * BETA / (1 + exp(margin))  # of the token losses of the chosen answer
        of_tokens += [(i, [slope * m for m in masks[i]]), (j, [-slope * m for m in masks[j]])]
    return reference(model).gradient(of_tokens), {f"{case.mode} loss": total}


@pytest.mark.parametrize("name", ["dp2-cp2", "pp2", "tp2"])
def test_losses_by_pair_are_exact(name: str) -> None:
    topology = TOPOLOGIES[name]
    way = {"hook": {"read_batch": read_pairs}, "step": pair_step, "times": 2}
    way["places"] = PAIRS[topology.data_parallel_size]
    rows = covering(2, [*OF_PAIRS.items()], LAYOUTS, FLAGS)
    cases = [Case(*mode, layout=layout, per_token=flag, **way) for mode, layout, flag in rows]
    assert_exact(topology, cases, partial(expected_of_pairs, model=topology.model))


def after_a_layer(iterator: Iterator[Any] | None, model: Any) -> tuple[Tensor, TokenLoss]:
    """The loss function goes through the output layer once more."""
    from megatron.core.utils import get_attr_wrapped_model

    batch = gpt.received(iterator)
    output, *_ = gpt.outputs(batch, model)
    layer = get_attr_wrapped_model(model, "output_layer")

    def compute(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        again, _ = layer(x[..., : gpt.SETTINGS["hidden_size"]])
        return gathered(again.logsumexp(-1), batch, "local_grad"), {}

    return output, TokenLoss(compute, batch["loss_mask"], "local_grad")


@on_ranks_of("cp2")
def test_measuring_adds_nothing_to_fused_gradients(name: str) -> None:
    from megatron.core.tensor_parallel import layers

    # In place of APEX's kernel, by which a layer's backward adds to the gradient of the step.
    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=lambda x, g, total: total.add_(g.t() @ x))
    layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = kernel, True
    model = gpt.data_parallel(gpt.build(torch.float32, gradient_accumulation_fusion=True))
    hook, gradients = ONE_PACK.new_hook(), []
    for _ in range(2):  # the first step measures
        gpt.run_step(hook, model, ONE_PACK.data(0), 1, forward_step_func=after_a_layer)
        gradients.append(torch.cat([p.main_grad.flatten() for p in model.parameters()]))
    assert gradients[0].any()
    assert torch.equal(*gradients)


def all_but_the_last(iterator: Any, model: Any) -> Any:
    """As in reinforcement learning: a number of losses that the ranks cannot share evenly."""
    batch = gpt.received(iterator)
    losses, _ = gpt.forward_step(iter([batch]), model)
    mask = batch["loss_mask"][:, :-1]
    compute = lambda x: (gathered(x, batch, "local_grad")[:, :-1], {})  # noqa: E731
    return losses, TokenLoss(compute, mask, "local_grad")


def of_parts(losses: Tensor, mask: Tensor, said: str | None = None) -> Any:
    """Losses of this rank's tokens alone."""
    return losses, TokenLoss(lambda x: (x, {}), mask, said)


def summed_parts(losses: Tensor, mask: Tensor) -> Any:
    """What they sum up to, for each of two samples."""
    by_sample = lambda x: ((x * mask).sum().expand(2), {})  # noqa: E731
    return losses, TokenLoss(by_sample, torch.ones(2), "local_grad")


def by_sample(batch: dict[str, Tensor]) -> Microbatch:
    return Microbatch(torch.ones(len(batch["prompt_ids"]), 1))


ONE_PACK = Case("sample_mean", places=(((0, 1),),))
ONE_ROW = {"layout": "bshd", "places": (((0,),),)}


def refused(step: Any, says: str = "", reads: Any = read_batch, **options: Any) -> Refusal:
    way = {"step": step, "hook": {"read_batch": reads}, **options}
    return Refusal(says, replace(ONE_PACK, **way), "cp2")


MEASURED = "DataError: TokenLoss(whole= ... for the losses of 'sample_mean', whose gather"
REDUCED_SAID_LOCAL = whole("reduced_grad", said="local_grad")
ROWS = {
    "reduced gradients, said local": refused(
        REDUCED_SAID_LOCAL, f"{MEASURED} ... expected whole='reduced_grad'"
    ),
    "local gradients, said reduced": refused(
        whole("local_grad", said="reduced_grad"), f"{MEASURED} ... expected whole='local_grad'"
    ),
    "reduced gradients, said local, after an evaluation": refused(
        REDUCED_SAID_LOCAL,
        MEASURED,
        after=replace(ONE_PACK, step=whole("reduced_grad"), call=EVALUATION),
    ),
    "reduced gradients, said local, after a step without a gradient": refused(
        REDUCED_SAID_LOCAL,
        MEASURED,
        after=replace(ONE_PACK, step=whole("reduced_grad", said="local_grad", advantage=0.0)),
    ),
    "losses that say nothing": refused(
        whole("local_grad", said=None),
        "DataError: a loss mask of all ... TokenLoss(whole='local_grad') or 'reduced_grad'",
    ),
    "parts said to be whole": refused(
        partial(scripts.returning, partial(of_parts, said="local_grad")),
        "DataError: a loss mask of a part ... sharded as the model's inputs are",
    ),
    "losses by sample of each rank's own tokens": refused(
        partial(scripts.returning, summed_parts),
        "DataError: the losses of 'sample_mean' differ between ... SequenceSum(",
        by_sample,
    ),
    "losses of an odd length": refused(all_but_the_last, reads=scripts.without_the_last, **ONE_ROW),
    "parts of an odd length": refused(
        partial(scripts.returning, of_parts),
        "DataError: a loss mask of shape (1, 12), where",
        scripts.without_the_last,
        **ONE_ROW,
    ),
    "a good step": Refusal(case=two_rows(), topology="cp2"),
}


@pytest.mark.parametrize("name", ROWS)
def test_whole_losses_that_would_not_be_exact_are_refused(name: str) -> None:
    assert_told(__name__, name)
