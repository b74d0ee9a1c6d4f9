"""Plot and summarise the runs of `compare_modes.sh`.

    PYTHONPATH=examples python docs/images/compare_modes_plot.py FOLDER [MODE ...]

FOLDER holds a folder for each run. If ``token_mean`` is among them, writes ``loss_by_length.png``
there, for the modes on the command line or for all runs. Prints two tables: the share of the
gradient of each class of answers, and the last losses and the gradient norms of each run.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from stdlib_pairs import CLASSES, PackedPairs, class_of

from megatron_loss_agg.explain.samples import Sample
from megatron_loss_agg.explain.shares import shares_by_mode

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


def logged(run: Path, pattern: str) -> list[float]:
    """The numbers after ``pattern`` in Megatron's log."""
    values = re.findall(rf"{pattern}: (\S+)", (run / "log.txt").read_text())
    return [float(x) for x in values]


def plot_losses(output: Path, runs: Sequence[Path], reference: Path) -> None:
    """Draw a panel for each class: the loss of every run less that of the reference."""
    figure = Figure(figsize=(10.0, 3.4), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(CLASSES), sharey=True)
    base = losses(reference)
    for run in runs:
        run_losses = losses(run)
        for axes, name in zip(panels, CLASSES, strict=True):
            values = [run_losses[step][name] - base[step][name] for step in run_losses]
            axes.plot(list(run_losses), values, label=run.name)
    for axes, title in zip(panels, TITLES.values(), strict=True):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("optimizer step")
        axes.grid(linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"validation loss less that of {reference.name}\n(nats per token)")
    panels[-1].legend(frameon=False)
    figure.savefig(output)


def shares(steps: int) -> str:
    """Each class's share of the sum of all weights, as a table: means over steps."""
    data = PackedPairs("train", packs=steps * PACKS, seq_length=SEQ_LENGTH, pad_to=2)
    sums = {mode: dict.fromkeys(CLASSES, 0.0) for mode in SHARES}
    for step in range(steps):
        samples = [
            Sample(len(pair.response) + 1, pair.module, microbatch=pack)
            for pack in range(step * PACKS, (step + 1) * PACKS)
            for pair in data.pairs(pack)
        ]
        for mode, step_shares in shares_by_mode(samples, SHARES)[0].items():
            for sample, fraction in zip(samples, step_shares.fractions.tolist(), strict=True):
                sums[mode][class_of(int(sample.tokens))] += fraction / steps
    rows = [["share of the gradient", *CLASSES], ["---"] * (len(CLASSES) + 1)]
    for mode, name in SHARES.items():
        rows.append([f"`{name}`", *(f"{100 * share:.1f} %" for share in sums[mode].values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def table(runs: Sequence[Path]) -> str:
    """The last losses of each run, and its gradient norms before clipping, as a table."""
    rows = [["", *CLASSES, "lm loss", "norm in step 1", "median norm", "norms above 1"]]
    rows.append(["---"] * len(rows[0]))
    for run in runs:
        last = list(losses(run).values())[-1]
        norms = logged(run, r"iteration +\d+/.* grad norm")
        evaluated = logged(run, r"validation loss at iteration \d+ \|.*lm loss value")
        values = [*last.values(), evaluated[-1]]
        rows.append([f"`{run.name}`", *(f"{value:.3f}" for value in values)])
        median = sorted(norms)[len(norms) // 2]
        rows[-1] += [f"{norms[0]:.3g}", f"{median:.3g}", str(sum(norm > 1 for norm in norms))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(folder: Path, plotted: Sequence[str]) -> None:
    """Plot and print."""
    runs = sorted(path.parent for path in folder.glob("*/losses.jsonl"))
    output, reference = folder / "loss_by_length.png", folder / "token_mean"
    if reference in runs:
        plot_losses(output, [run for run in runs if run.name in plotted or not plotted], reference)
        print(f"plot: {output}")
    print(shares(max(losses(runs[0]))))
    print(table(runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
