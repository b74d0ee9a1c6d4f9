"""Step time and peak memory of the plugin over stock Megatron, interleaved in one process."""

from __future__ import annotations

import gc
import math
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import model, world
from benchmarks.gpu.evidence import Evidence, estimate
from benchmarks.gpu.microbatch import milliseconds
from benchmarks.gpu.model import LARGE, LOSSES, POLICY, TINY, Training
from benchmarks.megatron import causal_mask
from benchmarks.shapes import Gpt, Step

ROUNDS = 40


def run(evidence: Evidence, dry: bool, seconds: float, folder: Path) -> None:
    """Rounds until three quarters of the part's time are gone."""
    begin = time.monotonic()
    with world.groups(dry):
        gpt, step = TINY if dry else (LARGE, model.large_step())
        with_te = _has_te(evidence, gpt, step) and not dry
        ddp = model.build(gpt, step.length, with_te)
        causal = None if with_te else causal_mask(step.length).cuda()
        parts = ddp, model.adam(ddp), model.batches(gpt, step), step, causal
        size = sum(p.numel() for p in ddp.parameters()) / 1e6
        layers = "Transformer Engine" if with_te else "local layers"
        where = f"{size:.3g} million, {layers}, {step.microbatches} x {step.rows} x {step.length}"
        _memory(evidence, where, parts)
        _times(evidence, where, parts, begin + 0.75 * seconds, 3 if dry else ROUNDS)


def _has_te(evidence: Evidence, gpt: Gpt, step: Step) -> bool:
    """Whether a step runs with layers of Transformer Engine; if not, the evidence says why."""
    reason = "it is not installed"
    if model.transformer_engine():
        try:
            ddp = model.build(gpt, step.length, with_te=True)
            Training("token_mean", False, ddp, None, model.batches(gpt, step), step, None).run()
            return True
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        finally:
            gc.collect()
            torch.cuda.empty_cache()
    evidence.could_not_run("layers of Transformer Engine; local ones stand in", reason)
    return False


def _memory(evidence: Evidence, where: str, parts: tuple[Any, ...]) -> None:
    """Each kind alone: a hook's weights live from one step to the next."""
    Training("token_mean", False, *parts).run()  # the optimizer allocates its state
    for loss in LOSSES:
        stock, hooked = (_peak(Training(loss, with_hook, *parts)) for with_hook in (False, True))
        if not stock:
            evidence.could_not_run(f"peak memory, {loss}", "dry run: a CPU's is not counted")
            continue
        evidence.add("peak memory, stock", f"{loss}; {where}", stock / 1e9, "GB")
        evidence.add(f"peak memory, {loss}", where, hooked / stock, "x stock", "gpu_memory")


def _peak(training: Training) -> int:
    """Bytes, in the third step."""
    training.run()
    training.run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training.run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def _times(
    evidence: Evidence, where: str, parts: tuple[Any, ...], deadline: float, rounds: int
) -> None:
    """Each step between two stock ones, whose mean it is compared with: a drift cancels."""
    stock, policy = (Training(loss, False, *parts) for loss in ("token_mean", POLICY))
    kinds = {
        "stock again": (stock, stock),
        "token_mean": (stock, Training("token_mean", True, *parts)),
        "prompt_mean": (stock, Training("prompt_mean", True, *parts)),
        "stock again, policy + KL": (policy, policy),
        POLICY: (policy, Training(POLICY, True, *parts)),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    base: dict[str, list[float]] = {name: [] for name in kinds}
    for training in {id(x): x for pair in kinds.values() for x in pair}.values():
        training.run()
        training.run()
    gc.collect()
    gc.freeze()  # the collector's passes fall on whatever step runs then
    for number in range(rounds):
        for name, (without, training) in kinds.items():
            before = milliseconds(without.run)
            taken = milliseconds(training.run)
            base[name].append((before + milliseconds(without.run)) / 2)
            found[name].append(taken / base[name][-1])
        if number >= 2 and time.monotonic() > deadline:
            break
    for name, ratios in found.items():
        ratio, noise = estimate(ratios)
        text = f"{where}; {len(ratios)} rounds"
        if name.startswith("stock"):
            least = abs(ratio - 1)
            evidence.add(name.replace("again", "step"), text, estimate(base[name])[0], "ms")
            evidence.add(f"step, {name}", text, ratio, "x stock", noise=noise)
        else:
            # What a step of the same kind differs by from itself is noise too.
            evidence.add(
                f"step, {name}", text, ratio, "x stock", "gpu_step", math.hypot(noise, least)
            )
