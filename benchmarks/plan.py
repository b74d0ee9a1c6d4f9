"""Planning a step: a rank's own masks, and the table of the samples of all ranks."""

from __future__ import annotations

import functools

import torch

from benchmarks.results import Results
from benchmarks.shapes import LAYOUTS, MODE, microbatch
from megatron_loss_agg import Microbatch, StepPlan

NUMBER = 8
"""Microbatches of a step."""


def measure(results: Results) -> None:
    """In one process; a table of all ranks' samples costs what as many of one rank cost."""
    samples, length = results.shapes.plan
    for layout in LAYOUTS:
        step = [Microbatch(**microbatch(samples // NUMBER, length, layout))] * NUMBER
        work = functools.partial(StepPlan.build, MODE, step)
        (seconds,) = results.least_seconds([work], 40)
        where = f"{samples} x {length} {layout}, {NUMBER} microbatches"
        results.add("plan of one rank", where, 1e3 * seconds, "ms", "plan_ms")
    sizes = results.shapes.samples
    taken = results.least_seconds([_table(size) for size in sizes], 20)
    for size, seconds in zip(sizes, taken, strict=True):
        goal = "table_ms" if size == sizes[-1] else ""
        results.add("samples of all ranks", f"{size:,} in 8 to a prompt", 1e3 * seconds, "ms", goal)


def _table(samples: int) -> functools.partial[StepPlan]:
    """From sums of masks: the sums themselves are made by each rank of its own samples alone."""
    sums = (1 + torch.arange(samples, dtype=torch.float64)).chunk(NUMBER)
    ids = (torch.arange(samples) // 8).chunk(NUMBER)
    return functools.partial(StepPlan.from_mask_sums, MODE, sums, prompt_ids=ids)
