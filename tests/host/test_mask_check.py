"""Masks and tokens of loss functions that are not those that were counted, and some that are.

Masks are uniform where tokens are compared, so that they tell nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg import CPLayout, Microbatch
from megatron_loss_agg.mcore import Loop, LossHook, TokenLoss, read_batch
from tests.host.harness import CP2, error_of, run_host_ranks
from tests.host.steps import aggregation, batches

pytestmark = pytest.mark.host

N_MB, ROWS, LENGTH = 4, 2, 16
Batch = dict[str, Tensor]


def stream(rows: int = ROWS) -> list[Batch]:
    """Consecutive windows of one text: the labels of a batch are the tokens of the next one."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, 32, (N_MB + 1, rows, LENGTH), generator=generator)
    mask = torch.ones(rows, LENGTH, dtype=torch.float64)
    return [{"tokens": text[i], "labels": text[i + 1], "loss_mask": mask} for i in range(N_MB)]


def tokens_alone(batch: Batch) -> Microbatch:
    return Microbatch(batch["loss_mask"], token_ids=batch["tokens"])


def labels_alone(batch: Batch) -> Microbatch:
    return Microbatch(batch["loss_mask"], token_ids=batch["labels"])


def script(
    part: Callable[[int], int] = int,
    tokens: Callable[[Tensor], Tensor] = Tensor.clone,
    own_tokens: Callable[[Tensor], Tensor] = Tensor.clone,
    mask: Callable[[Tensor, int], Tensor] = lambda mask, rank: mask,
) -> Callable[..., Any]:
    """A forward step.

    Args:
        part: the context-parallel rank whose part a rank takes.
        tokens, own_tokens, mask: changes of the batch's tokens, of the rank's and of its mask.
    """

    def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        from megatron.core import parallel_state

        from tests.host import gpt

        batch = next(data_iterator)
        size = parallel_state.get_context_parallel_world_size()
        rank = parallel_state.get_context_parallel_rank()
        layout = CPLayout.bshd(batch["tokens"].shape[1], size, part(rank))
        own, loss_mask = layout.shard(tokens(batch["tokens"])), layout.shard(batch["loss_mask"])
        own = own_tokens(own)
        losses = model(own, gpt.positions_like(own), None).logsumexp(-1)
        return losses, functools.partial(gpt.stock_loss_func, mask(loss_mask, rank))

    return forward_step


def positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def without_a_token(mask: Tensor, rank: int) -> Tensor:
    return mask.masked_fill(mask.cumsum(dim=-1) == 1, 0) if rank == 1 else mask


def pack_of_rank(batch: Batch) -> Microbatch:
    """A row as a pack, of two samples on the second rank."""
    starts = torch.tensor([0, LENGTH // 2, LENGTH] if dist.get_rank() else [0, LENGTH])
    return Microbatch(batch["loss_mask"], starts, token_ids=batch["tokens"])


def reversed_step(iterator: Any, number: int) -> list[Microbatch]:
    return [tokens_alone(batch) for batch in reversed(stream())]


# By name: options of the hook, of the script, of the data, and what every rank says.
SPLIT: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str | None]] = {
    "good": ({}, {}, stream, None),
    "the same part twice": (
        {},
        {"part": lambda rank: 0},
        stream,
        "LayoutError: the model is called with the same tokens",
    ),
    "tokens of its own": ({}, {"tokens": lambda x: 31 - x}, stream, None),
    # As where the model gets embeddings: they tell nothing.
    "positions alone": ({}, {"own_tokens": positions}, stream, None),
    "a token less on one rank": (
        {},
        {"mask": without_a_token},
        stream,
        "MaskError: the loss function's mask is not this rank's part",
    ),
    "another order": (
        {"read_step": reversed_step},
        {},
        stream,
        "StepError: the model is called with the tokens of microbatch 3 of the step in place of 0",
    ),
    "other samples on each rank": (
        {"read_batch": pack_of_rank},
        {},
        functools.partial(stream, 1),
        "LayoutError: the context-parallel ranks have read different numbers",
    ),
}


def split_on_host() -> dict[str, list[str | None]]:
    """Every rank, CP 2: how a step ends; a wrong mask also after a good step."""
    from tests.host import gpt

    gpt.initialize(**CP2)
    model = gpt.ddp_model()

    def run(hook: LossHook, data: Any, **change: Any) -> str | None:
        options = {"forward_step_func": script(**change)}
        return error_of(gpt.run_step, hook, model, iter(data()), N_MB, ROWS, **options)

    found = {}
    for name, (options, change, data, _) in SPLIT.items():
        found[name] = [run(LossHook(aggregation("token_mean"), **options), data, **change)]
        if "mask" in change:
            hook = LossHook(aggregation("token_mean"))
            found[name] += [run(hook, data), run(hook, data, **change)]
    return found


def test_every_context_parallel_rank_refuses_what_is_wrong_on_one() -> None:
    for rank in run_host_ranks(split_on_host, 2):
        for name, (*_, expected) in SPLIT.items():
            error, *others = rank[name]
            assert (error or "").startswith(expected or "") and bool(error) == bool(expected), name
            if others:
                assert others[0] is None and others[1].startswith(expected)


ORDER = "StepError: the model is called with the tokens of microbatch"
# The reader, the order of the planned microbatches, calls of the step, and what it says.
ORDERS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], str | None]] = {
    "in order": (read_batch, (0, 1, 2, 3), (4,), None),
    "by labels": (labels_alone, (0, 1, 2, 3), (4,), None),
    "by labels, in calls": (labels_alone, (0, 1, 2, 3), (2, 2), None),
    "turned": (tokens_alone, (3, 0, 1, 2), (4,), ORDER),
    "two swapped": (tokens_alone, (0, 2, 1, 3), (4,), ORDER),
    "calls swapped": (tokens_alone, (2, 3, 0, 1), (2, 2), ORDER),
    "one in place of another": (tokens_alone, (0, 1, 2, 2), (4,), None),
}


def orders_on_host() -> dict[str, str | None]:
    """One rank: steps whose microbatches are given in an order."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.ddp_model()

    def run(read: Any, order: tuple[int, ...], calls: tuple[int, ...]) -> None:
        hook = LossHook(aggregation("token_mean"))
        given, data = [read(stream()[i]) for i in order], iter(stream())
        with hook.step(given):
            for k, number in enumerate(calls):
                options = {"forward_step_func": script(), "zero_grad": k == 0}
                gpt.run_step(hook, model, data, number, ROWS, **options)

    found = {name: error_of(run, *case[:3]) for name, case in ORDERS.items()}
    kept = stream()[0]["tokens"]
    always = script(tokens=lambda tokens: kept)
    hook = LossHook(aggregation("token_mean"))
    options = {"forward_step_func": always}
    found["one for all"] = error_of(gpt.run_step, hook, model, iter(stream()), 4, ROWS, **options)
    return found


def test_an_order_is_told_by_all_microbatches_of_a_step() -> None:
    (answers,) = run_host_ranks(orders_on_host, 1)
    assert answers.pop("one for all").startswith(ORDER)
    for name, (*_, expected) in ORDERS.items():
        error = answers.pop(name)
        assert (error or "").startswith(expected or "") and bool(error) == bool(expected), name
    assert not answers


def between_samples(mask: Tensor) -> Tensor:
    """Moves a token's mask from the first sample to padding of the second; the sum stays."""
    mask = mask.clone()
    mask[0, 0], mask[0, 27] = mask[0, 27].item(), mask[0, 0].item()
    return mask


def within_a_sample(mask: Tensor) -> Tensor:
    mask = mask.clone()
    place = int((mask[0] == 0).nonzero()[0])
    mask[0, place], mask[0, int((mask[0] != 0).nonzero()[0])] = 1.0, 0.0
    return mask


BOTH = ("token_mean", "sample_mean")
MOVED: dict[str, tuple[Any, Callable[[Tensor], Tensor], bool, bool]] = {
    # Mode, or those of two terms; change; whether the first step refuses it; whether later ones do.
    "between samples": ("sample_mean", between_samples, True, True),
    "between samples that do not matter": ("token_mean", between_samples, True, False),
    "between samples that matter to the second term": (BOTH, between_samples, True, True),
    "within a sample": ("sample_mean", within_a_sample, False, False),
    "within a sample, custom": ("custom", within_a_sample, True, True),
}


def moved_on_host() -> dict[str, list[str | None]]:
    """One rank, a pack of two samples: how steps end in which a part of the mask moved."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.ddp_model()

    def run(hook: LossHook, change: Callable[[Tensor], Tensor] | None) -> str | None:
        def changed(stock: Any, mask: Tensor) -> Any:
            mask = mask if change is None else change(mask)
            if len(hook.terms) == 1:
                return functools.partial(stock, mask)
            return TokenLoss(lambda losses: (dict.fromkeys(hook.terms, losses), {}), mask)

        options = {"forward_step_func": gpt.forward_step_with(changed)}
        return error_of(gpt.run_step, hook, model, batches(((0, 1),), "thd"), 1, **options)

    found = {}
    for case, (mode, change, *_) in MOVED.items():
        modes = BOTH if mode == BOTH else (mode,)
        terms = {name: aggregation(name) for name in modes}
        hooks = [LossHook(terms, loop=Loop(of_megatron=True)) for _ in range(2)]
        found[case] = [run(hooks[0], change), run(hooks[1], None), run(hooks[1], change)]
    return found


def test_a_mask_that_moved_is_refused_where_weights_do_not_follow() -> None:
    (answers,) = run_host_ranks(moved_on_host, 1)
    for name, (*_, at_first, later) in MOVED.items():
        first, between, last = answers[name]
        assert between is None
        for error, expected in ((first, at_first), (last, later)):
            assert (error is not None) == expected, (name, error)
            assert error is None or error.startswith("MaskError: the loss function's mask is not")


def two_hooks_on_host() -> list[str | None]:
    """One rank: two hooks that train one model by turns, without and with zeroing between."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.ddp_model()
    hooks = [LossHook(aggregation(mode)) for mode in ("token_mean", "sample_mean")]
    data = functools.partial(batches, ((0, 1),), "thd")
    return [
        error_of(gpt.run_step, hook, model, data(), 1, zero_grad=zero)
        for hook, zero in ((hooks[0], True), (hooks[1], False), (hooks[1], True))
    ]


def test_a_hook_sees_the_gradients_that_another_one_left() -> None:
    ((first, second, third),) = run_host_ranks(two_hooks_on_host, 1)
    assert first is third is None
    assert second is not None and "on the gradients that the last one left" in second
