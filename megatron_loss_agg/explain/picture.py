"""The plot: token weight and share of the gradient against sample length, for each mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.explain.samples import Sample
from megatron_loss_agg.explain.shares import Shares

# Points are hollow and of different sizes, so that overlapping ones stay visible.
_POINTS = {"linestyle": "none", "markerfacecolor": "none", "zorder": 3}
# The colour-blind safe palette of Okabe and Ito. Lines are of modes that give samples of equal
# length the same weight.
_STYLES: dict[str, dict[str, Any]] = {
    "token_mean": {"color": "#000000"},
    "sample_mean": {"color": "#D55E00"},
    "rollout_mean": {"color": "#56B4E9", "marker": "s", "markersize": 10.0, **_POINTS},
    "prompt_mean": {"color": "#0072B2", "marker": "D", "markersize": 7.0, **_POINTS},
    "nested_mean": {"color": "#000000", "marker": "v", "markersize": 8.5, **_POINTS},
    "dataset_mean": {"color": "#F0E442", "marker": "^", "markersize": 5.5, **_POINTS},
    "sample_sum": {"color": "#009E73"},
    "constant": {"color": "#CC79A7"},
    "sum": {"color": "#7F7F7F"},
    "microbatch_mean": {"color": "#E69F00", "marker": "o", "markersize": 4.0, **_POINTS},
}


def draw(path: str, samples: Sequence[Sample], shown: Mapping[str, Shares]) -> None:
    """Save the two panels to ``path``, in the format of its suffix.

    Raises:
        OptionError: matplotlib is not installed.
        OptionError: no sample has tokens, or ``path`` cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            f"--plot needs matplotlib, which cannot be imported ({error}): pip install matplotlib"
        ) from error
    lengths = [sample.tokens for sample in samples if sample.tokens > 0]
    if not lengths:
        raise OptionError("--plot: no sample has loss tokens; expected a length > 0")
    figure = Figure(figsize=(13.0, 5.0), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2, subplot_kw={"xscale": "log", "yscale": "log"})
    _draw_panel(left, shown, {name: s.relative_to_token_mean for name, s in shown.items()})
    _draw_panel(right, shown, {name: 100 * s.fractions for name, s in shown.items()})
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
        raise OptionError(
            f"--plot {path}: {error}; expected a writable .png, .svg or .pdf"
        ) from error


def _draw_panel(axes: Any, shown: Mapping[str, Shares], heights_S: Mapping[str, Tensor]) -> None:
    """Draw the heights of every mode against the lengths, of the samples with tokens."""
    points = {}
    for name, heights in heights_S.items():
        pairs = zip(shown[name].tokens.tolist(), heights.tolist(), strict=True)
        points[name] = sorted(pair for pair in pairs if pair[0] > 0)
    # Order the legend like the right end of the plot, from top to bottom.
    for name in sorted(points, key=lambda name: -points[name][-1][1]):
        style = {"marker": ".", **_STYLES[shown[name].aggregation.mode]}
        axes.plot(*zip(*points[name], strict=True), label=name, **style)
    axes.set_xlabel("loss tokens of the sample")
    axes.grid(which="major", color="#e2e2e2", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
