"""The time that the hook adds to a training step on the real Megatron-Core, by step size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import megatron
from benchmarks.loss_function import Losses, reruns_disabled
from benchmarks.megatron import Training
from benchmarks.results import Results
from benchmarks.shapes import TINY, Gpt, microbatch

GROWTH_FROM: dict[str, Any] = {"microbatches": 4, "terms": 1, "samples": 64}
GROWTH_TOKENS = 16  # per sample


def measure(results: Results) -> None:
    """Measure whole steps, including reading, planning, checks and reports."""
    with megatron.groups():
        _training_steps(results)
        with reruns_disabled():
            for axis, numbers in results.shapes.growth:
                _growth(results, axis, numbers)


def _training_steps(results: Results) -> None:
    """Measure the hook's time on a tiny model: large steps differ by more than the hook adds."""
    gpt, step = results.shapes.model, results.shapes.step
    base, _ = _added(results, gpt, rounds=10)
    _, added = _added(results, TINY, rounds=120)
    where = f"GPT {gpt.layers} x {gpt.hidden}, {step.microbatches} x {step.rows} x {step.length}"
    results.add("stock step", where, 1e3 * base, "ms")
    results.add("added by the hook", where, 1e3 * added, "ms", "added_ms")
    results.add("added by the hook", where, added / base, "of a stock step", "step")
    _, at_end = _added(results, TINY, rounds=120, count="end")
    results.add("counted at its end", where, at_end / added, "of counted before")


def _added(results: Results, gpt: Gpt, rounds: int, **options: Any) -> tuple[float, float]:
    """CPU seconds of a stock step, and seconds that the hook adds to it: medians."""
    step = results.shapes.step
    ddp, data = megatron.build(gpt, step.length), megatron.batches(gpt, step)
    for i, batch in enumerate(data):
        # One prompt in each microbatch, as required in a step that is counted at its end.
        batch["prompt_ids"] = torch.full_like(batch["prompt_ids"], i)
    stock = Training(False, ddp, step, data).run
    hooked = Training(True, ddp, step, data, **options).run
    both_sides = stock, hooked, stock  # so that a drift cancels
    taken = [[_seconds(run) for run in both_sides] for _ in range(2 + results.rounds(rounds))][2:]
    base = [(before + after) / 2 for before, _, after in taken]
    added = [ours - theirs for (_, ours, _), theirs in zip(taken, base, strict=True)]
    return statistics.median(base), statistics.median(added)


def _seconds(function: Callable[[], object]) -> float:
    """CPU seconds of the whole process, including its threads."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def _growth(results: Results, axis: str, numbers: tuple[int, ...]) -> None:
    """Measure a series of sizes, and the growth from each to the next."""
    before = None
    for number in numbers:
        added = _added_to_losses(results, **{**GROWTH_FROM, axis: number})
        results.add("added to losses alone", f"{number} {axis}", 1e3 * added, "ms")
        if before is not None:
            growth = added / before[1] / (number / before[0])
            results.add("grows", f"{before[0]} to {number} {axis}", growth, "of linearly", "growth")
        before = number, added


def _added_to_losses(results: Results, microbatches: int, terms: int, samples: int) -> float:
    """Seconds that the hook adds to a step; the median of rounds."""
    batch = microbatch(samples, GROWTH_TOKENS, "rows")
    step = Losses(results.clock, batch, microbatches, terms)
    works = step.hooked(), step.stock
    rounds = 2 + results.rounds(max(9, 160 // microbatches))
    taken = [[results.seconds(work) for work in works] for _ in range(rounds)][2:]
    return statistics.median(ours - theirs for ours, theirs in taken)
