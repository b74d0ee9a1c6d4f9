"""The time before the first step: imports, measuring Megatron's scaling, and checks."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any
from unittest import mock

from benchmarks import megatron
from benchmarks.megatron import Training
from benchmarks.results import Results
from megatron_loss_agg.mcore import hook

MEGATRON = "megatron.core, megatron.core.distributed, megatron.core.pipeline_parallel"
TIMED = (
    "import time, {}; begin = time.process_time(); import {}; print(time.process_time() - begin)"
)


def measure(results: Results) -> None:
    """Measure CPU seconds of imports (the least of several processes) and of Megatron steps."""
    imports = {"megatron_loss_agg": "torch", "megatron_loss_agg.mcore": f"torch, {MEGATRON}"}
    for ours, theirs in imports.items():
        code = TIMED.format(theirs, ours)
        seconds = min(_seconds(code) for _ in range(results.rounds(3)))
        where = "after torch" if theirs == "torch" else "after torch and megatron.core"
        results.add(f"import {ours}", where, seconds, "s", "import_s")
    with megatron.groups():
        _first_step(results)


def _seconds(code: str) -> float:
    command = [sys.executable, "-W", "ignore", "-c", code]
    return float(subprocess.check_output(command, text=True, timeout=120))


def _first_step(results: Results) -> None:
    """Measure the first step, which measures Megatron's scaling and has more checks than others."""
    gpt, step = results.shapes.model, results.shapes.step
    ddp, data = megatron.build(gpt, step.length), megatron.batches(gpt, step)
    seconds_by_name: dict[str, list[float]] = {
        "measuring": [],
        "first step": [],
        "second step": [],
    }
    check_scaling = hook.check_scaling

    def timed(*args: Any) -> float | None:
        begin = time.process_time()
        measured = check_scaling(*args)
        seconds_by_name["measuring"].append(time.process_time() - begin)
        return measured

    for _ in range(results.rounds(3)):
        training = Training(True, ddp, step, data)
        with mock.patch.object(hook, "check_scaling", timed):
            for name in ("first step", "second step"):
                begin = time.process_time()
                training.run()
                seconds_by_name[name].append(time.process_time() - begin)
    for name, seconds in seconds_by_name.items():
        where = f"GPT {gpt.layers} x {gpt.hidden}, one rank"
        results.add(name, where, 1e3 * min(seconds), "ms")
