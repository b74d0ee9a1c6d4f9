"""Runs a part of the GPU script in a process of its own, with a time limit."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import world
from benchmarks.gpu.evidence import CannotRun, Evidence


class Part(NamedTuple):
    module: str
    function: str
    seconds: float
    needs: tuple[str, ...]  # modules


HERE = "benchmarks.gpu."
LEAST = 10.0  # seconds, without which a part is not begun
PARTS = {
    "machine": Part(HERE + "parts", "machine", 60, ()),
    "microbatch": Part(HERE + "parts", "microbatch", 90, ("megatron.core",)),
    "indices": Part(HERE + "parts", "indices", 60, ()),
    "waits": Part(HERE + "waits", "run", 90, ("megatron.core",)),
    "tests": Part(HERE + "parts", "tests", 90, ("pytest",)),
    "gradients": Part(HERE + "gradients", "run", 120, ("megatron.core",)),
    "ranks": Part(HERE + "gradients", "ranks", 120, ("megatron.core",)),
    "training": Part(HERE + "training", "run", 220, ("megatron.core",)),
}


def no_gpu() -> str | None:
    """Why nothing can run; asked in another process, since CUDA takes memory in the one it asks."""
    with world.context(dry=False).Pool(1) as pool:
        return pool.apply(_no_gpu)


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


def preload() -> None:
    """What the parts of a dry run need, before they are forked."""
    world.enter(dry=True)
    importlib.import_module("tests.host.preload")
    importlib.import_module("tests.host.gpt")
    for part in PARTS.values():
        importlib.import_module(part.module)


def run(name: str, dry: bool, seconds: float, folder: Path) -> dict[str, Any]:
    """What the part found, whatever became of it; ``seconds`` may be less than it is due."""
    begin, path = time.monotonic(), folder / f"{name}.json"
    path.unlink(missing_ok=True)
    seconds, failure = min(seconds, PARTS[name].seconds), None
    if seconds < LEAST:
        failure = "no time was left for it"
    else:
        process = world.context(dry).Process(target=_part, args=(name, dry, seconds, folder))
        process.start()
        process.join(seconds)
        if process.is_alive():
            failure = f"still running after {seconds:.0f} s, and was killed"
        elif process.exitcode:
            failure = f"its process ended with {process.exitcode}; see {folder / name}.log"
        world.stop(process)
    rows: dict[str, Any] = {"figures": [], "could_not_run": [], "failed": []}
    if path.exists():
        rows.update(json.loads(path.read_text(encoding="utf-8")))
    if failure is not None:
        rows["failed"].append({"what": name, "reason": failure})
    return {**rows, "seconds": round(time.monotonic() - begin, 1)}


def _part(name: str, dry: bool, seconds: float, folder: Path) -> None:
    """In the part's process, which leads its children; what it prints goes to a log."""
    os.setsid()
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(0.95 * seconds)  # where it hangs, before it is killed
    evidence, part = Evidence(folder / f"{name}.json", dry), PARTS[name]
    try:
        for needed in part.needs:
            _check(needed)
        module = importlib.import_module(part.module)
        getattr(module, part.function)(evidence, dry, seconds, folder)
    except CannotRun as reason:
        evidence.could_not_run(name, str(reason))
    except BaseException as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        evidence.fail(name, f"{text}; see {folder / name}.log")
    sys.stdout.flush()
    sys.stderr.flush()


def _check(needed: str) -> None:
    """Raise CannotRun if the module is missing, or something that it imports."""
    try:
        importlib.import_module(needed)
    except ImportError as error:
        raise CannotRun(
            f"cannot import {needed} ({error}): put the wheels that are missing into WHEELS"
        ) from error
