"""What the plugin adds before the first step: imports, the audit; and what `doctor` takes."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks import megatron
from benchmarks.results import Results
from benchmarks.shapes import AGGREGATIONS, MODEL, TRAINING_STEP

REPEATS = 3
HOST = "megatron.core, megatron.core.distributed, megatron.core.pipeline_parallel"
TIMED = (
    "import time, {}; begin = time.process_time(); import {}; print(time.process_time() - begin)"
)


def measure(results: Results) -> None:
    """CPU seconds, the least of several fresh processes; the audit's on the real Megatron."""
    imports = {"megatron_loss_agg": "torch", "megatron_loss_agg.mcore": f"torch, {HOST}"}
    for ours, theirs in imports.items():
        code = TIMED.format(theirs, ours)
        seconds = min(float(_python("-c", code)) for _ in range(REPEATS))
        where = "after torch" if theirs == "torch" else "after torch and megatron.core"
        results.add(f"import {ours}", where, seconds, "s", "import_s")
    doctor = ("-m", "megatron_loss_agg", "doctor")
    hosts = ("-c", "import torch, megatron.core, megatron.training")
    results.add("doctor", "a process", _of_process(*doctor), "s")
    results.add("import torch and Megatron", "a process", _of_process(*hosts), "s")
    with megatron.one_rank():
        _audit(results)


def _python(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def _of_process(*arguments: str) -> float:
    """CPU seconds of a whole process."""
    begin = _of_children()
    _python(*arguments)
    return _of_children() - begin


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _audit(results: Results) -> None:
    """Every hook audits before its first step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg.mcore import LossHook
    from megatron_loss_agg.mcore.audit import Auditor

    check, audits = Auditor.check, []

    def timed(self: Auditor, call: Any) -> None:
        begin = time.process_time()
        check(self, call)
        audits.append(time.process_time() - begin)

    ddp = megatron.build(MODEL, TRAINING_STEP.length)
    data = megatron.batches(TRAINING_STEP, MODEL.vocabulary)
    steps: dict[str, list[float]] = {"first": [], "second": []}
    Auditor.check = timed  # type: ignore[method-assign]
    try:
        for _ in range(REPEATS):
            hook = LossHook(AGGREGATIONS["prompt_mean"])
            schedule = hook.wrap(get_forward_backward_func())
            for taken in steps.values():
                begin = time.process_time()
                megatron.train(schedule, ddp, iter(data), TRAINING_STEP)
                taken.append(time.process_time() - begin)
    finally:
        Auditor.check = check  # type: ignore[method-assign]
    where = f"GPT {MODEL.layers} x {MODEL.hidden}, one rank"
    results.add("audit", where, 1e3 * min(audits[::2]), "ms")
    for name, taken in steps.items():
        results.add(f"{name} step", where, 1e3 * min(taken), "ms")
