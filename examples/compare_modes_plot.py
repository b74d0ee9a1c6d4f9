"""Plot and summarise the runs of `compare_modes.sh`.

    python examples/compare_modes_plot.py FOLDER [MODE ...]

FOLDER holds a folder for each run. Writes ``loss_by_length.png``, of the given modes or of all
runs, and ``gradient_norm.png`` there. Prints two tables: the share of the gradient of each class of
answers, and the last losses and the gradient norms of each run.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from stdlib_pairs import CLASSES, PackedPairs, class_of

from megatron_loss_agg.explain.samples import Sample
from megatron_loss_agg.explain.shares import explain

# The colour-blind safe palette of Okabe and Ito.
COLORS = {
    "stock": "#E69F00",
    "token_mean": "#000000",
    "sample_mean": "#D55E00",
    "prompt_mean": "#0072B2",
    "sample_sum": "#009E73",
    "sum": "#7F7F7F",
}
TITLES = {
    "short": "short answers: under 64 tokens",
    "medium": "medium: 64 to 255 tokens",
    "long": "long: 256 tokens and more",
}
PACKS, SEQ_LENGTH = 8, 1024  # those of `compare_modes.sh`
SHARES = {
    "microbatch_mean": "stock",
    "token_mean": "token_mean",
    "sample_mean": "sample_mean",
    "prompt_mean": "prompt_mean",
}


def losses(run: Path) -> dict[int, dict[str, float]]:
    """By step, the validation loss of each class."""
    lines = map(json.loads, (run / "losses.jsonl").read_text().splitlines())
    return {line.pop("step"): line for line in lines}


def gradient_norms(run: Path) -> list[float]:
    """Of every step, before clipping, as Megatron logs it."""
    found = re.findall(r"iteration +\d+/.* grad norm: (\S+)", (run / "log.txt").read_text())
    return [float(value) for value in found]


def plot_losses(output: Path, runs: Sequence[Path], reference: str = "token_mean") -> None:
    """A panel for each class: the loss of every run less that of the reference."""
    figure = Figure(figsize=(10.0, 3.4), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(CLASSES), sharey=True)
    base = losses(output.parent / reference)
    for run in runs:
        of_run = losses(run)
        for axes, name in zip(panels, CLASSES, strict=True):
            values = [of_run[step][name] - base[step][name] for step in of_run]
            axes.plot(list(of_run), values, label=run.name, color=COLORS.get(run.name))
    for axes, title in zip(panels, TITLES.values(), strict=True):
        _finish(axes, title)
    panels[0].set_ylabel(f"validation loss less that of {reference}\n(nats per token)")
    panels[-1].legend(frameon=False)
    figure.savefig(output)


def plot_norms(output: Path, runs: Sequence[Path]) -> None:
    """The norm of the gradient against the step, for each run."""
    figure = Figure(figsize=(7.0, 3.4), dpi=100, layout="constrained")
    axes = figure.subplots()
    for run in runs:
        norms = gradient_norms(run)
        steps = range(1, len(norms) + 1)
        axes.plot(steps, norms, label=run.name, color=COLORS.get(run.name), linewidth=1)
    axes.set_yscale("log")
    axes.set_ylabel("norm of the gradient before clipping")
    _finish(axes, "all parameters, fp32")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(output)


def shares(steps: int, packs: int = PACKS) -> str:
    """How the sum of all weights is divided between the classes; mean over the steps, as a table.

    Args:
        packs: of one step.
    """
    data = PackedPairs("train", packs=steps * packs, seq_length=SEQ_LENGTH, pad_to=2)
    sums = {mode: dict.fromkeys(CLASSES, 0.0) for mode in SHARES}
    for step in range(steps):
        samples = [
            Sample(len(pair.response) + 1, pair.module, microbatch=pack)
            for pack in range(step * packs, (step + 1) * packs)
            for pair in data.pairs(pack)
        ]
        for mode, of_mode in explain(samples, SHARES, None, "count")[0].items():
            for sample, fraction in zip(samples, of_mode.fractions.tolist(), strict=True):
                sums[mode][class_of(int(sample.tokens))] += fraction / steps
    rows = [["share of the gradient", *CLASSES], ["---"] * (len(CLASSES) + 1)]
    for mode, name in SHARES.items():
        rows.append([f"`{name}`", *(f"{100 * share:.1f} %" for share in sums[mode].values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("optimizer step")
    axes.grid(color="#e2e2e2", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def table(runs: Sequence[Path]) -> str:
    """The last losses of each run, and its gradient norms, as a table in Markdown."""
    rows = [["", *CLASSES, "norm in step 1", "median norm"], ["---"] * (len(CLASSES) + 3)]
    for run in runs:
        last = list(losses(run).values())[-1]
        norms = gradient_norms(run)
        median = sorted(norms)[len(norms) // 2]
        rows.append([f"`{run.name}`", *(f"{last[name]:.3f}" for name in CLASSES)])
        rows[-1] += [f"{norms[0]:.3g}", f"{median:.3g}"]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(folder: Path, plotted: Sequence[str]) -> None:
    """Plot and print."""
    every = sorted(path.parent for path in folder.glob("*/losses.jsonl"))
    shown = [run for run in every if run.name in plotted] if plotted else every
    pictures: dict[str, Callable[[Path, Sequence[Path]], None]] = {
        "loss_by_length.png": plot_losses,
        "gradient_norm.png": plot_norms,
    }
    for name, draw in pictures.items():
        draw(folder / name, shown if draw is plot_losses else every)
        print(f"plot: {folder / name}")
    print(shares(max(losses(every[0]))))
    print(table(every))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
