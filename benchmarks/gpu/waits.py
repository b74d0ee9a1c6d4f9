"""Where a training step makes the CPU wait for the GPU, with the plugin and without."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from pathlib import Path

import torch

from benchmarks.gpu import model, world
from benchmarks.gpu.evidence import CannotRun, Evidence
from benchmarks.gpu.model import LOSSES, SMALL, TINY, Training
from benchmarks.megatron import causal_mask


def run(evidence: Evidence, dry: bool, seconds: float, folder: Path) -> None:
    """Counts of torch's own check, which sees copies and reads, but no collectives."""
    with world.groups(dry):
        gpt, step = TINY if dry else SMALL
        ddp = model.build(gpt, step.length, with_te=False)
        causal = causal_mask(step.length).cuda()
        on_cpu = model.batches(gpt, step)
        on_gpu = [{**batch, "loss_mask": batch["loss_mask"].cuda()} for batch in on_cpu]
        for place, batches in {"CPU": on_cpu, "GPU": on_gpu}.items():
            for loss in LOSSES:
                pair = [Training(loss, h, ddp, None, batches, step, causal) for h in (False, True)]
                _compare(evidence, loss, place, pair, dry)
        if dry:
            raise CannotRun("dry run: waits were not counted, since a CPU does not wait")


def _compare(evidence: Evidence, loss: str, place: str, pair: list[Training], dry: bool) -> None:
    """After the first step, in which the hook measures and checks."""
    for training in pair:
        training.run()
        training.run()
    if dry:
        return
    stock, hooked = (_waits(training) for training in pair)
    where = f"{loss}, masks on the {place}, a step of {pair[0].step.microbatches} microbatches"
    evidence.add("waits, stock", where, stock.total(), "a step")
    added = hooked - stock
    goal = "gpu_waits" if place == "CPU" else "gpu_waits_of_masks"
    evidence.add("waits, added", where, added.total(), "a step", goal)
    for line, number in added.items():
        print(f"{where}: {number} more at {line}", flush=True)
    if place == "CPU":
        _strictly(evidence, where, *pair)


def _waits(training: Training) -> collections.Counter[str]:
    """How often a line waits, in one step."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            training.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return collections.Counter(
        f"{w.filename}:{w.lineno}" for w in seen if "synchronizing CUDA" in str(w.message)
    )


def _strictly(evidence: Evidence, where: str, stock: Training, hooked: Training) -> None:
    """A step in which every wait is an error; shown only where stock passes too."""
    what = 'set_sync_debug_mode("error")'
    if (error := _error(stock)) is not None:
        evidence.could_not_run(f"{what}, {where}", f"stock Megatron itself waits: {error}")
    elif (error := _error(hooked)) is not None:
        evidence.fail(f"{what}, {where}", error)
    else:
        evidence.add(f"errors under {what}", where, 0, "a step", "gpu_waits")


def _error(training: Training) -> str | None:
    # Of a step of its own, since an error leaves a schedule where it is.
    training = dataclasses.replace(training)
    training.run()
    training.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.run()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None
