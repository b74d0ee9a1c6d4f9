"""Prints every figure, and the verdict on its goal; the exit status is 1 if a goal is missed."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from pathlib import Path

import torch

from benchmarks.results import Results, counted, line

PARTS = ("plan", "counts", "loader", "startup", "path", "loss_function", "step")
"""All except the first two change torch for the whole process. The loader is the first of these,
since it forks."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks.json"))
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--quick", action="store_true", help="small shapes once, and no goals")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"one core of {_processor()}, torch {torch.__version__}")
    results = Results(arguments.json, arguments.quick)
    for name in PARTS:
        if arguments.only in (None, name):
            results.part = name
            importlib.import_module(f"benchmarks.{name}").measure(results)
    counts = counted([results.rows])
    print(f"\n{counts['met']} of {counts['met'] + counts['missed']} goals are met", end="")
    print(f"; all figures are in {arguments.json}")
    for figure in results.rows["figures"]:
        if figure["verdict"] == "missed":
            print(line(figure))
    return 1 if counts["missed"] or counts["failed"] else 0


def _processor() -> str:
    """The processor's name, printed since even ratios differ between processors."""
    capability = torch.backends.cpu.get_cpu_capability()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({capability})"


if __name__ == "__main__":
    sys.exit(main())
