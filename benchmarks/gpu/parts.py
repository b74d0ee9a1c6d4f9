"""The parts of the GPU script, each with its measurement, number of ranks, and time limit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import subprocess
import sys
from datetime import datetime, timezone
from typing import NamedTuple

import torch

from benchmarks import loss_function as loss_benchmark
from benchmarks.results import CannotRun, Results

PACKAGES = ("megatron-core", "transformer-engine", "flash-attn", "apex", "numpy", "pytest")


class Part(NamedTuple):
    """A function, as ``module:name``, and its limit; it gets `Results` and the seconds left for it."""

    function: str
    seconds: float
    ranks: int = 1


HERE = "benchmarks.gpu."
PARTS = {
    "machine": Part(HERE + "parts:machine", 60),
    "loss function": Part(HERE + "parts:loss_function", 90),
    "tests": Part(HERE + "parts:tests", 90),
    "gradients": Part(HERE + "gradients:run", 120),
    "gradients of two ranks": Part(HERE + "gradients:run", 120, ranks=2),
    "waits": Part(HERE + "training:waits", 90),
    "training": Part(HERE + "training:run", 220),
}


def machine(results: Results, seconds: float) -> None:
    """Record chips and versions."""
    results.fact("date", f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC")
    if results.quick:
        results.fact("device", "none: dry run on a CPU")
    else:
        for i in range(torch.cuda.device_count()):
            chip = torch.cuda.get_device_properties(i)
            results.fact(f"GPU {i}", f"{chip.name}, {chip.total_memory / 1e9:.0f} GB")
        query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
        results.fact("driver", subprocess.getoutput(query))
        results.fact("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    results.fact("python", platform.python_version())
    results.fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            results.fact(name, importlib.metadata.version(name))
    results.fact("commit", subprocess.getoutput("git rev-parse --short HEAD"))


def loss_function(results: Results, seconds: float) -> None:
    """Measure like the part of this name on a CPU."""
    loss_benchmark.measure(results, gpu=not results.quick)


def tests(results: Results, seconds: float) -> None:
    """Run ``pytest -m gpu``: tests of a single process on a GPU, without Megatron's training."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-rs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, flush=True)
    if "No module named pytest" in done.stderr:
        raise CannotRun("pytest is not installed")
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    results.fact("pytest -m gpu", summary)
    if done.returncode:
        results.fail("pytest -m gpu", f"{summary}; see the part's log")
