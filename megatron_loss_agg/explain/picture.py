"""The plot: token weight and share of the gradient against sample length, for each mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_loss_agg.errors import DependencyError, InputError
from megatron_loss_agg.explain.samples import Sample
from megatron_loss_agg.explain.shares import Shares, relative_to_token_mean

# The colour-blind safe palette of Okabe and Ito.
_COLORS = {
    "token_mean": "#000000",
    "sample_mean": "#D55E00",
    "rollout_mean": "#56B4E9",
    "prompt_mean": "#0072B2",
    "dataset_mean": "#F0E442",
    "sample_sum": "#009E73",
    "constant": "#CC79A7",
    "sum": "#7F7F7F",
    "microbatch_mean": "#E69F00",
}
# Hollow and of different sizes, so that overlapping points stay visible.
_MARKERS = {
    "rollout_mean": ("s", 10.0),
    "prompt_mean": ("D", 7.0),
    "dataset_mean": ("^", 5.5),
    "microbatch_mean": ("o", 4.0),
}
# For several presets of one mode. Of their points, all but the first are filled.
_LINES = ("-", "--", ":", "-.")
# Up to this many samples, lines also have markers.
_FEW = 12


def draw(path: str, samples: Sequence[Sample], shown: Mapping[str, Shares]) -> None:
    """Save the two panels to ``path``, in the format of its suffix.

    Raises:
        DependencyError: matplotlib is not installed.
        InputError: no sample has tokens, or ``path`` cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError(
            f"--plot needs matplotlib, which cannot be imported ({error}): pip install matplotlib"
        ) from error
    with_tokens = [s for s, sample in enumerate(samples) if sample.tokens > 0]
    if not with_tokens:
        raise InputError("--plot: no sample has loss tokens; expected a length > 0")
    figure = Figure(figsize=(13.0, 5.0), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2, subplot_kw={"xscale": "log", "yscale": "log"})
    lengths = [samples[s].tokens for s in with_tokens]
    _draw_panel(left, lengths, shown, lambda shares: relative_to_token_mean(shares, samples))
    _draw_panel(right, lengths, shown, lambda shares: 100 * shares.fractions)
    left.set_ylabel("weight of one token, as a multiple of token_mean")
    right.set_ylabel("the sample's share of the gradient, in percent")
    right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.suptitle(
        f"A step of {len(samples):,} samples and {sum(lengths):,.10g} loss tokens\n"
        "lines: the sample's length decides; points: its group decides",
        x=0.01,
        ha="left",
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--plot {path}: {error}; expected a writable .png, .svg or .pdf"
        ) from error


def _draw_panel(
    axes: Any,
    lengths: Sequence[float],
    shown: Mapping[str, Shares],
    height_S: Callable[[Shares], Tensor],
) -> None:
    """Draw ``height_S`` of every mode against ``lengths``, of the samples with tokens."""
    points = {}
    for name, shares in shown.items():
        heights = height_S(shares)[shares.sums != 0]
        points[name] = sorted(zip(lengths, heights.tolist(), strict=True))
    # Order the legend like the right end of the plot, from top to bottom.
    for name in sorted(points, key=lambda name: -points[name][-1][1]):
        axes.plot(*zip(*points[name], strict=True), label=name, **_style(name, shown, len(lengths)))
    _label_ticks(axes.xaxis, lengths)
    _label_ticks(axes.yaxis, [height for pairs in points.values() for _, height in pairs])
    axes.set_xlabel("loss tokens of the sample (grey ticks: the samples)")
    rug = {"linestyle": "none", "marker": "|", "color": "#777777"}
    axes.plot(lengths, [0.012] * len(lengths), transform=axes.get_xaxis_transform(), **rug)
    axes.grid(which="major", color="#e2e2e2", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _style(name: str, shown: Mapping[str, Shares], samples: int) -> dict[str, Any]:
    """A line if the weight depends on the length alone, else points."""
    mode = shown[name].aggregation.mode
    few, color = samples <= _FEW, _COLORS[mode]
    same_mode = [other for other, shares in shown.items() if shares.aggregation.mode == mode]
    position = same_mode.index(name)
    if shown[name].depends_on_length_alone:
        line = {"linestyle": _LINES[position % len(_LINES)], "linewidth": 1.8}
        return {**line, "color": color, "marker": "o" if few else None, "markersize": 5}
    marker, size = _MARKERS[mode]
    return {
        "color": color,
        "linestyle": "none",
        "marker": marker,
        "markersize": size if few else 0.6 * size,
        "markerfacecolor": color if position else "none",
        "markeredgewidth": 1.6 if few else 1.1,
        "zorder": 3,
    }


def _label_ticks(axis: Any, values: Sequence[float]) -> None:
    """Label powers of ten, and numbers between them if the range is short."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if max(values) < 50 * min(values):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
