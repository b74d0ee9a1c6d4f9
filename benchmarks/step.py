"""What the hook adds to a training step on the real Megatron-Core, and how that grows."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import megatron
from benchmarks.megatron import Training
from benchmarks.results import Results
from benchmarks.shapes import LOSSES, TINY, Gpt, microbatch

GROWTH_FROM = {"microbatches": 4, "terms": 1, "samples": 64}
GROWTH_TOKENS = 16  # of a sample


def measure(results: Results) -> None:
    """Checks and reports included."""
    with megatron.groups():
        _training_steps(results)
        for axis, numbers in results.shapes.growth:
            _growth(results, axis, numbers)


def _training_steps(results: Results) -> None:
    """Steps as such differ by more than the hook adds; so that is measured where it can be."""
    gpt, step = results.shapes.model, results.shapes.step
    where = f"GPT {gpt.layers} x {gpt.hidden}, {step.microbatches} x {step.rows} x {step.length}"
    base, _ = _added(results, gpt, rounds=10)
    results.add("stock step", where, 1e3 * base, "ms")
    for loss, added in _added(results, TINY, rounds=120)[1].items():
        goals = ("added_ms", "step") if loss == "prompt_mean" else ("", "")
        results.add(f"added by {loss}", where, 1e3 * added, "ms", goals[0])
        results.add(f"added by {loss}", where, added / base, "of a stock step", goals[1])


def _added(results: Results, gpt: Gpt, rounds: int) -> tuple[float, dict[str, float]]:
    """CPU seconds of a stock step of `prompt_mean`'s model, and what the hook adds, by loss."""
    step = results.shapes.step
    ddp, data = megatron.build(gpt, step.length), megatron.batches(gpt, step)
    base, added = {}, {}
    for loss in LOSSES:
        stock, hooked = (Training(loss, with_hook, ddp, step, data) for with_hook in (False, True))
        runs = [stock.run, hooked.run, stock.run]  # on both sides, so that a drift cancels
        taken = [[_seconds(run) for run in runs] for _ in range(2 + results.rounds(rounds))][2:]
        base[loss] = statistics.median((before + after) / 2 for before, _, after in taken)
        added[loss] = statistics.median(
            ours - (before + after) / 2 for before, ours, after in taken
        )
    return base["prompt_mean"], added


def _seconds(function: Callable[[], object]) -> float:
    """Of the process's CPU: a hook's threads, if any, count."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def _growth(results: Results, axis: str, numbers: tuple[int, ...]) -> None:
    """A line; every point of it against the one before."""
    before = None
    for number in numbers:
        added = _added_to_losses(results, **{**GROWTH_FROM, axis: number})
        results.add("added by the hook", f"{number} {axis}", 1e3 * added, "ms")
        if before is not None:
            growth = added / before[1] / (number / before[0])
            results.add("grows", f"{before[0]} to {number} {axis}", growth, "of linearly", "growth")
        before = number, added


def _added_to_losses(results: Results, microbatches: int, terms: int, samples: int) -> float:
    """Seconds that the hook adds to a step of a model of one parameter; the median of rounds."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg.mcore import LossHook, TokenLoss

    names = [f"term {i}" for i in range(terms)]
    model, schedule = scale(), get_forward_backward_func()
    batch = microbatch(samples, GROWTH_TOKENS, "rows")
    batch["losses"] = torch.randn(samples, GROWTH_TOKENS)
    hook = LossHook(dict.fromkeys(names, LOSSES["prompt_mean"]))

    def of_hook(mask: Tensor) -> Callable[..., Any]:
        return TokenLoss(lambda output: (dict.fromkeys(names, output), {}), mask)

    def run(schedule: Callable[..., Any], loss_of: Callable[[Tensor], Callable[..., Any]]) -> None:
        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
            batch = next(data_iterator)
            return model(batch["losses"]), loss_of(batch["loss_mask"])

        schedule(
            forward_step_func=forward_step,
            data_iterator=itertools.repeat(batch),
            model=[model],
            num_microbatches=microbatches,
            seq_length=GROWTH_TOKENS,
            micro_batch_size=samples,
            forward_only=False,
        )

    def of_stock(mask: Tensor) -> Callable[..., Any]:
        return functools.partial(_stock_loss, terms, mask)

    works = [(hook.wrap(schedule), of_hook), (schedule, of_stock)]
    rounds = 2 + results.rounds(max(5, 80 // microbatches))
    taken = [
        [results.seconds(functools.partial(run, *work)) for work in works] for _ in range(rounds)
    ]
    return statistics.median(ours - theirs for ours, theirs in taken[2:])


def _stock_loss(terms: int, loss_mask: Tensor, output: Tensor) -> Any:
    """Of as many terms: each a sum over the mask."""
    loss, num_tokens, report = megatron.loss_func(loss_mask, output)
    for _ in range(terms - 1):
        loss = loss + torch.sum(output.view(-1) * loss_mask.view(-1))
    return loss, num_tokens, report


def scale() -> torch.nn.Module:
    """A model that multiplies losses by its only parameter."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model_type = ModelType.encoder_or_decoder
            self.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, losses: Tensor) -> Tensor:
            return losses * self.scale

        def set_input_tensor(self, _: Any) -> None:
            """Asked for by the schedule."""

    return Scale()
