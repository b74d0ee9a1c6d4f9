"""Training steps of the plugin over stock Megatron's: their time, peak memory, and waits."""

from __future__ import annotations

import collections
import gc
import math
import time
import warnings

import torch

from benchmarks import megatron
from benchmarks.megatron import Training
from benchmarks.results import CannotRun, Results, estimate
from benchmarks.shapes import GPU_MODEL, GPU_WAITS, TINY, Step

ROUNDS = 40


def run(results: Results, seconds: float) -> None:
    """Measure in rounds until three quarters of the part's time are used."""
    end = time.monotonic() + 0.75 * seconds
    with megatron.groups(gpu=not results.quick):
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        gpt, step = (TINY, results.shapes.step) if results.quick else (GPU_MODEL, _large_step())
        ddp, data = megatron.build(gpt, step.length, bf16=True), megatron.batches(gpt, step)
        config = OptimizerConfig(optimizer="adam", lr=1e-5, bf16=True, params_dtype=torch.bfloat16)
        adam = get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False)
        size = sum(p.numel() for p in ddp.parameters()) / 1e6
        where = f"{size:.3g} million, {step.microbatches} x {step.rows} x {step.length}"
        stock, hooked = (Training(with_hook, ddp, step, data, adam) for with_hook in (False, True))
        base, ours = _peak(results, stock), _peak(results, hooked)
        if base:
            results.add("peak memory, stock", where, base / 1e9, "GB")
            results.add("peak memory", where, ours / base, "x stock", "gpu_memory")
        gc.collect()
        gc.freeze()  # shortens garbage collection, which adds to the time of some steps
        _times(results, where, stock, hooked, end)


def _large_step() -> Step:
    """A step with as many rows as fit comfortably; a row takes 4 GB without fused attention."""
    free = torch.cuda.mem_get_info()[0] / 1e9
    return Step(microbatches=4, rows=max(1, min(8, int((free - 10) / 6))), length=1024)


def _peak(results: Results, training: Training) -> int:
    """Peak bytes of the third step; 0 on a CPU."""
    training.run()
    training.run()
    if results.quick:
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training.run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def _times(
    results: Results, where: str, stock: Training, hooked: Training, deadline: float
) -> None:
    """Compare each step with the mean of the stock steps around it, so that drift cancels."""
    base, ratios, stock_ratios = [], [], []
    for number in range(results.rounds(ROUNDS)):
        before, ours, between, same, after = (
            results.seconds(x.run) for x in (stock, hooked, stock, stock, stock)
        )
        base.append(before)
        ratios.append(2 * ours / (before + between))
        stock_ratios.append(2 * same / (between + after))
        if number >= 2 and time.monotonic() > deadline:
            break
    where = f"{where}; {len(ratios)} rounds"
    (ratio, noise), (same, _) = estimate(ratios), estimate(stock_ratios)
    results.add("stock step", where, 1e3 * estimate(base)[0], "ms")
    # A stock step's difference from 1 in the same place is also noise.
    results.add("step", where, ratio, "x stock", "gpu_step", math.hypot(noise, same - 1))


def waits(results: Results, seconds: float) -> None:
    """Count the waits of a step with torch's check, which does not see collectives."""
    with megatron.groups(gpu=not results.quick):
        gpt, step = (TINY, results.shapes.step) if results.quick else GPU_WAITS
        ddp, on_cpu = megatron.build(gpt, step.length, bf16=True), megatron.batches(gpt, step)
        on_gpu = [{**batch, "loss_mask": batch["loss_mask"].cuda()} for batch in on_cpu]
        for place, data in {"CPU": on_cpu, "GPU": on_gpu}.items():
            stock, ours = (_waits(Training(h, ddp, step, data)) for h in (False, True))
            where, added = f"masks on the {place}", ours - stock
            if not results.quick:
                goal = "gpu_waits" if place == "CPU" else "gpu_waits_of_masks"
                results.add("waits, stock", where, stock.total(), "a step")
                results.add("waits, added", where, added.total(), "a step", goal)
                print(f"{where}: {added}", flush=True)
        if results.quick:
            raise CannotRun("dry run: waits were not counted, since a CPU does not wait")


def _waits(training: Training) -> collections.Counter[str]:
    """The waits of the third step, by line of code."""
    training.run()
    training.run()
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
