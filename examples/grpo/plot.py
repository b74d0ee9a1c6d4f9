"""Plots of reward and answer length over steps, for one run or several together.

python -m examples.grpo.plot OUTPUT RUN_FOLDER [RUN_FOLDER ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from examples.grpo.metrics import read

PANELS = {"reward": "mean reward (1: the right sum)", "length": "mean answer length (tokens)"}
WINDOW = 8  # steps; a single one is 16 prompts, some harder than others


def smooth(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """At each value, the mean of the last ``window`` values, or of as many as there are."""
    return [
        sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))
    ]


def plot(output: Path, runs: Sequence[Path]) -> None:
    """Write a picture with a panel for each of `PANELS` and a line for each run."""
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(10, 3.8), dpi=96, layout="constrained")
    for run in runs:
        metrics = read(run)
        steps = [int(m["step"]) for m in metrics]
        for axis, name in zip(axes, PANELS, strict=True):
            values = [m[name] for m in metrics]
            (line,) = axis.plot(steps, smooth(values), label=run.name)
            if len(runs) == 1:
                axis.plot(steps, values, color=line.get_color(), alpha=0.3)
    for axis, title in zip(axes, PANELS.values(), strict=True):
        axis.set_xlabel(f"batch of rollouts (lines: mean of the last {WINDOW})")
        axis.set_ylabel(title)
        axis.grid()
    axes[0].set_ylim(0, 1)
    if len(runs) > 1:
        axes[0].legend(frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    pyplot.close(figure)


def summary(run: Path) -> str:
    """First and last values of a run, as a line."""
    metrics = read(run)
    first, last = metrics[:WINDOW], metrics[-WINDOW:]
    parts = []
    for name, title in PANELS.items():
        before, after = (sum(m[name] for m in some) / len(some) for some in (first, last))
        parts.append(f"{title} {before:.3f} -> {after:.3f}")
    return f"{run.name}: {', '.join(parts)} (first and last {WINDOW} of {len(metrics)} steps)"


def main(output: Path, runs: Sequence[Path]) -> None:
    """Plot ``runs`` and print their summaries."""
    plot(output, runs)
    for run in runs:
        print(summary(run))
    print(f"plot: {output}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
