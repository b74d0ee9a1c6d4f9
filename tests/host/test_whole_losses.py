"""Losses that every context-parallel rank holds whole, gathered from the ranks.

Ranks gather log-probabilities, or losses, in both ways that loops have, and in none of them. The
gradient is that of the fp64 reference, and a gather that is not as it was said is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import CPLayout, Microbatch
from megatron_loss_agg.mcore import LossHook, TokenLoss
from megatron_loss_agg.mcore.host import GATHERS
from megatron_loss_agg.report import Sum, reduce_reports
from tests.host.harness import CP2, EXACT, TOPOLOGIES, TP2, Topology, error_of, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import PLACES, aggregation, batches, weights_of
from tests.host.test_terms import PLACES as PLACES_OF_TERMS
from tests.host.test_terms import expected as expected_of_terms

pytestmark = pytest.mark.host


class Gathered(torch.autograd.Function):
    """[ranks, *x]: all ranks' ``x``; in backward, the sum of all ranks' gradients of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        group, size, _ = context_parallel()
        gathered = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(gathered, x.contiguous(), group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        group, _, rank = context_parallel()
        dist.all_reduce(gradient, group=group)
        return gradient[rank]


class Consumed(torch.autograd.Function):
    """Overwrites what it keeps outside of ``save_for_backward``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = torch.ones_like(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.kept.mul_(gradient).clone()


def context_parallel() -> tuple[Any, int, int]:
    """The group, its size, and this rank's place."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    return group, dist.get_world_size(group), dist.get_rank(group)


def parts(x: Tensor, kind: str) -> list[Tensor]:
    """All context-parallel ranks' ``x``: without communication in backward, or with a sum there."""
    group, size, rank = context_parallel()
    if kind == "reduced_grad":
        return [*Gathered.apply(x)]
    gathered = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(gathered, x.detach().contiguous(), group=group)
    gathered[rank] = x
    if kind == "a mix":  # a part of the gradient is summed over ranks
        reduced = parts(x, "reduced_grad")
        return [0.7 * a + 0.3 * b for a, b in zip(gathered, reduced, strict=True)]
    if kind == "detached on a rank":
        return [part.detach() if rank else part for part in gathered]
    return gathered


def layout_of(batch: dict[str, Tensor]) -> CPLayout:
    _, size, rank = context_parallel()
    if "cu_seqlens_padded" in batch:
        return CPLayout.thd(batch["cu_seqlens_padded"], size, rank)
    return CPLayout.bshd(batch["tokens"].shape[1], size, rank)


def script(
    kind: str,
    *,
    whole: str | None = "as it is",
    early: bool = False,
    function: Any = None,
    metric: bool = False,
    gathers: bool = True,
) -> Callable[..., Any]:
    """A forward step with whole losses.

    Args:
        whole: what the loss function says of them.
        gathers: or else losses and mask are this rank's.
        early: gather in the forward step, so that the loss function has a whole input.
        function: of the whole log-probabilities.
        metric: report the losses again, by the weights.
    """

    def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, TokenLoss]:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        from tests.host import gpt

        batch = next(data_iterator)
        layout = layout_of(batch)
        tokens, labels, local_mask, packed = gpt.local_batch(iter([batch]))
        logits = model(tokens, gpt.positions_like(tokens), None, packed_seq_params=packed)

        def gathered(logits: Tensor) -> Tensor:
            with gpt.KeepDouble():
                # It overwrites the logits, and its backward pass what it kept for it.
                flat = logits.reshape(1, -1, logits.shape[-1])
                losses = vocab_parallel_cross_entropy(flat, labels.reshape(1, -1))
            losses = losses.view_as(labels)
            if not gathers:
                return losses
            losses = layout.unshard(parts(losses, kind))
            return losses if function is None else function(losses)

        def compute(output: Any, weights: Any = None) -> tuple[Tensor, dict[str, Any]]:
            losses = output["whole"] if early else gathered(output)
            report = {"again": Sum.of(losses, weights)} if metric else {}
            return losses, report

        output = {"whole": gathered(logits)} if early else logits
        said = kind if whole == "as it is" else whole
        mask = batch["loss_mask"] if gathers else local_mask
        return output, TokenLoss(compute, mask, said, takes_weights=metric)

    return forward_step


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
        assert hook._splits.gathers.measured == ({mode: kind} if topology.sizes else {})
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


MEASURED = ("LayoutError: TokenLoss(whole=", "for the losses of 'prompt_mean'; measured: ")
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "reduced, said local": (
        {"kind": "reduced_grad", "whole": "local_grad"},
        (*MEASURED, "the sum of the gradients of all", "expected whole='reduced_grad'"),
    ),
    "local, said reduced": (
        {"kind": "local_grad", "whole": "reduced_grad"},
        (*MEASURED, "gradient of its own losses alone", "expected whole='local_grad'"),
    ),
    "local, said reduced, gathered early": (
        {"kind": "local_grad", "whole": "reduced_grad", "early": True},
        (*MEASURED, "expected whole='local_grad'"),
    ),
    "neither": (
        {"kind": "a mix", "whole": "local_grad"},
        ("LayoutError", "passes on neither kind of gradient", "expected one of local_grad: the"),
    ),
    "taken once only": (
        {"kind": "local_grad", "function": Consumed.apply},
        ("LayoutError", "differ when they are taken again", "ctx.save_for_backward"),
    ),
    "attached on one rank": (
        {"kind": "detached on a rank", "whole": "local_grad"},
        ("LayoutError", "have a gradient on the context-parallel ranks [0] alone"),
    ),
    "apart from the model": (
        {"kind": "local_grad", "function": lambda x: torch.zeros_like(x, requires_grad=True)},
        ("LayoutError", "do not depend on what the model returned"),
    ),
    "not said": (
        {"kind": "local_grad", "whole": None},
        ("LayoutError: losses for all", "TokenLoss(whole='local_grad') or 'reduced_grad'"),
    ),
    "not whole": (
        {"kind": "local_grad", "gathers": False},
        ("LayoutError: TokenLoss(whole=...) with a mask of", "leave out whole="),
    ),
    "said on one rank": (
        {"kind": "local_grad", "whole": "by rank"},
        ("LayoutError: ", "['local_grad', None], in their order", "the same on every"),
    ),
    "good": ({"kind": "local_grad"}, ()),
}


def odd_pack(batch: dict[str, Tensor]) -> Microbatch:
    """The mask without the last token, which no other rank's part is as long as."""
    starts = batch["cu_seqlens"]
    mask = torch.cat([batch["loss_mask"][:, :13], batch["loss_mask"][:, :14]], dim=1)
    return Microbatch(mask, starts.new_tensor([0, 13, 27]), batch["prompt_ids"])


def odd_step(whole: bool) -> Callable[..., Any]:
    """A forward step whose losses have nothing to do with the text, of `odd_pack`."""

    def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, TokenLoss]:
        batch = next(data_iterator)
        output, _ = script("local_grad")(iter([batch]), model)
        mask = odd_pack(batch).loss_mask

        def compute(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
            x = torch.cat(parts(output.sum(dim=-1), "local_grad"), dim=1)
            return (x[:, :27] if whole else x[:, :14]), {}

        kind = "local_grad" if whole else None
        return output, TokenLoss(compute, mask if whole else mask[:, :14], kind)

    return forward_step


def errors_on_host() -> dict[str, str | None]:
    """Every rank, CP 2: what each script is told; and of others in one run."""
    from tests.host import gpt

    gpt.initialize(cp=2)
    ddp = gpt.ddp_model()

    def run(hook: LossHook, step: Any, **options: Any) -> None:
        data = batches(((0, 1),), "thd")
        gpt.run_step(hook, ddp, data, 1, forward_step_func=step, **options)

    found: dict[str, str | None] = {}
    for name, (given, _) in REFUSED.items():
        options = dict(given)
        if options.get("whole") == "by rank":
            options["whole"] = ("local_grad", None)[dist.get_rank()]
        found[name] = error_of(run, LossHook(aggregation("prompt_mean")), script(**options))
    for name, step in (("odd", odd_step(True)), ("odd parts", odd_step(False))):
        hook = LossHook(aggregation("prompt_mean"), read_batch=odd_pack)
        found[name] = error_of(run, hook, step)
    hook = LossHook(aggregation("prompt_mean"))
    found["first"] = error_of(run, hook, script("reduced_grad"))
    found["another gather later"] = error_of(run, hook, script("local_grad"))
    found["parts later"] = error_of(run, hook, gpt.forward_step)
    ddp.zero_grad_buffer()
    hook = LossHook(aggregation("prompt_mean"))
    with torch.no_grad():
        found["evaluation"] = error_of(run, hook, script("reduced_grad"), forward_only=True)
    found["after an evaluation"] = error_of(run, hook, script("reduced_grad", whole="local_grad"))
    return found


def test_another_gather_than_said_is_refused_on_every_rank() -> None:
    for rank in run_host_ranks(errors_on_host, 2, timeout=90):
        for name, (_, texts) in REFUSED.items():
            assert (rank[name] is None) is (not texts), (name, rank[name])
            assert [text for text in texts if text not in str(rank[name])] == [], rank[name]
        assert rank["first"] is rank["evaluation"] is rank["odd"] is None
        assert "LayoutError: sequence 0 has (padded) length 13" in str(rank["odd parts"])
        assert "measured: " in str(rank["another gather later"])
        assert "measured: " in str(rank["after an evaluation"])
        assert "LayoutError: losses of a part of the tokens" in str(rank["parts later"])
