"""Prints every figure and whether its goal is met; the exit status is 1 if one is not."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from pathlib import Path

import torch

from benchmarks import results as figures
from benchmarks import shapes
from benchmarks.results import Results

PARTS = (
    *("hook", "loss_function", "reduction", "plan", "broadcast"),
    *("loader", "startup", "host", "growth"),
)
"""The last four change torch for good; ``loader`` is the first of them, since it forks."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks.json"))
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument(
        "--quick", action="store_true", help="measure small shapes once; missed goals do not fail"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"one core of {_processor()}, torch {torch.__version__}")
    if arguments.quick:  # before the parts are imported, which take their shapes from it
        vars(shapes).update(shapes.QUICK)
        figures.quick = True
    results = Results()
    for name in PARTS:
        if arguments.only in (None, name):
            results.part = name
            importlib.import_module(f"benchmarks.{name}").measure(results)
    results.write(arguments.json)
    goals = [figure for figure in results.figures if figure.goal is not None]
    print(f"\n{len(goals) - len(results.missed)} of {len(goals)} goals are met", end="")
    print(f"; all figures are in {arguments.json}")
    for figure in results.missed:
        print(f"missed: {figure.what}, {figure.where}: {figure.value:.3f} > {figure.goal:g}")
    return 1 if results.missed and not arguments.quick else 0


def _processor() -> str:
    """Ratios, too, differ between processors."""
    capability = torch.backends.cpu.get_cpu_capability()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({capability})"


if __name__ == "__main__":
    sys.exit(main())
