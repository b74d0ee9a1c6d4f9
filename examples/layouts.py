"""Compare the runs of `layouts.sh`: print what they logged, and draw `layouts.png`.

    python examples/layouts.py FOLDER

FOLDER contains a folder for each mode, including `stock` for stock Megatron, with a log per layout.
The exit status is 0 if the layouts agree in every mode except `stock`, and differ there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

AGREE, PART = 1e-5, 1e-3
"""Losses of two layouts agree below the first and part above the second: bounds of their largest
relative difference in a step."""
# The lines overlap if all is well, so the first ones are wide.
STYLES = (
    {"linewidth": 7, "color": "0.8"},
    {"linewidth": 3.4, "color": "C0"},
    {"linewidth": 1.8, "color": "C1"},
    {"linewidth": 1.8, "color": "black", "linestyle": (0, (2, 3))},
)


class Run(NamedTuple):
    """The numbers that Megatron logged, by step."""

    losses: list[float]
    norms: list[float]

    @classmethod
    def read(cls, log: Path) -> Run:
        """Read the progress lines of a log."""
        pattern = r"iteration +\d+/.* lm loss: (\S+) .* grad norm: (\S+)"
        steps = re.findall(pattern, log.read_text())
        return cls([float(loss) for loss, _ in steps], [float(norm) for _, norm in steps])

    def differences(self, other: Run) -> list[float]:
        """Relative differences from the losses of ``other``, by step."""
        return [x / y - 1 for x, y in zip(self.losses, other.losses, strict=True)]


Runs = Mapping[str, Run]
"""By layout; the others are compared with the first one."""


def farthest(runs: Runs) -> float:
    """The largest relative difference of a loss from the first layout's."""
    first = next(iter(runs.values()))
    return max(abs(x) for run in runs.values() for x in run.differences(first))


def norms_agree(runs: Runs) -> bool:
    """True if gradient norms, logged with three decimals, agree in each step."""
    by_step = zip(*(run.norms for run in runs.values()), strict=True)
    return all(max(norms) - min(norms) < 0.002 + 1e-3 * max(norms) for norms in by_step)


def step_of_norms(runs: Runs) -> int:
    """The step, from 0, in which gradient norms differ by the largest factor."""
    ratios = [max(x) / min(x) for x in zip(*(run.norms for run in runs.values()), strict=True)]
    return ratios.index(max(ratios))


def table(modes: Mapping[str, Runs]) -> str:
    """For each layout in each mode: the last loss, the largest difference, and a gradient norm."""
    step = step_of_norms(modes["stock"])
    lines = [f"{'':32}{'last loss':>11}{'farthest':>11}{f'norm, step {step + 1}':>15}"]
    for mode, runs in modes.items():
        lines.append("stock Megatron" if mode == "stock" else f"--loss-aggregation {mode}")
        first = next(iter(runs.values()))
        for layout, run in runs.items():
            off = 100 * max(run.differences(first), key=abs)
            row = f"{run.losses[-1]:11.6f}{off:9.5f} %{run.norms[step]:15.3f}"
            lines.append(f"  {layout:30}{row}")
    return "\n".join(lines)


def draw(output: Path, modes: Mapping[str, Runs]) -> None:
    """Draw a panel for each mode, with a curve for each layout."""
    figure = Figure(figsize=(8.4, 3.5), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(modes), sharey=True)
    for axes, (mode, runs) in zip(panels, modes.items(), strict=True):
        first = next(iter(runs.values()))
        for style, (layout, run) in zip(STYLES, runs.items(), strict=True):
            percent = [100 * x for x in run.differences(first)]
            axes.plot(range(1, len(percent) + 1), percent, label=layout, **style)
        title = "stock Megatron" if mode == "stock" else f"--loss-aggregation {mode}"
        axes.set_title(title, fontsize=12)
        axes.set_xlabel("optimizer step", fontsize=11)
        axes.set_xticks(range(0, len(first.losses) + 1, 2))
        axes.tick_params(labelsize=11)
        axes.grid(linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("training loss less that\nof 1 rank, in percent", fontsize=11)
    panels[-1].legend(loc="best", frameon=False, fontsize=10)
    figure.savefig(output)


def main(folder: Path) -> int:
    """Print, draw, and return the exit status."""
    logs = sorted(folder.glob("*/*.log"), key=lambda log: log.stem)
    names = sorted({log.parent.name for log in logs}, key=lambda mode: mode != "stock")
    modes = {
        name: {log.stem: Run.read(log) for log in logs if log.parent.name == name} for name in names
    }
    print(table(modes))
    draw(folder / "layouts.png", modes)
    print(f"drawn: {folder / 'layouts.png'}")
    stock = modes.pop("stock")
    first, by_cp = (stock[name] for name in ("1 rank", "CP 2"))
    if max(map(abs, by_cp.differences(first))) <= AGREE:
        print(
            "Context parallelism alone changes nothing in this Megatron: it has the fix of "
            "Megatron-LM's issue 7452, finding 9."
        )
    apart = farthest(stock)
    agree = all(farthest(runs) <= AGREE and norms_agree(runs) for runs in modes.values())
    ours = max(map(farthest, modes.values()))
    is_shown = agree and apart >= PART
    verdict = "SHOWN" if is_shown else "NOT SHOWN"
    print(
        f"{verdict}: losses of these layouts differ by {apart:.1e} in stock Megatron, and by "
        f"{ours:.1e} with the plugin"
    )
    return int(not is_shown)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
