"""One colour a mode in every picture, and pictures that are legible on light and dark pages alike."""

from __future__ import annotations

from typing import Any

# Each has a contrast of 3 and more on white and on dark grey.
COLORS = {
    "token_mean": "#808080",
    "sample_mean": "#D55E00",
    "rollout_mean": "#3A9BD9",
    "prompt_mean": "#0C7BC0",
    "nested_mean": "#8C6BB1",
    "dataset_mean": "#9A8600",
    "sample_sum": "#009E73",
    "constant": "#C8699E",
    "sum": "#9C6B4E",
    "microbatch_mean": "#C98500",
}
INK = "#808080"
"""Of texts and axes."""


def save_without_background(figure: Any, path: str) -> None:
    """Save a figure of matplotlib, its texts, axes and grids in `INK`."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_color(INK)
    for axes in figure.axes:
        axes.tick_params(which="both", color=INK, labelcolor=INK)
        axes.spines[:].set_color(INK)
        for line in [*axes.get_xgridlines(), *axes.get_ygridlines()]:
            line.set(color=INK, alpha=0.25)
    figure.savefig(path, transparent=True)
