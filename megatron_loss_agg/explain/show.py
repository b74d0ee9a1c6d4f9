"""Shares and weights as text tables, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.explain.colors import COLORS, save_without_background
from megatron_loss_agg.explain.samples import COLUMNS, Sample, shortened
from megatron_loss_agg.explain.shares import Shares

# Points are hollow and of different sizes, so that overlapping ones stay visible.
_POINTS = {"linestyle": "none", "markerfacecolor": "none", "zorder": 3}
# The other modes, which give samples of equal length the same weight, are lines.
_STYLES: dict[str, dict[str, Any]] = {
    "rollout_mean": {"marker": "s", "markersize": 10.0, **_POINTS},
    "prompt_mean": {"marker": "D", "markersize": 7.0, **_POINTS},
    "nested_mean": {"marker": "v", "markersize": 8.5, **_POINTS},
    "dataset_mean": {"marker": "^", "markersize": 5.5, **_POINTS},
    "microbatch_mean": {"marker": "o", "markersize": 4.0, **_POINTS},
}


def as_text(
    samples: Sequence[Sample], shown: Mapping[str, Shares], left_out: Mapping[str, str]
) -> str:
    """Two tables, of shares and of weights, with one row per sample; and the formulas."""
    columns = {
        "sample": [str(s) for s in range(len(samples))],
        "tokens": [f"{sample.tokens:.10g}" for sample in samples],
    }
    for name in COLUMNS:
        values = [getattr(sample, name) for sample in samples]
        if values[0] is not None:
            columns[name] = [shortened(value) for value in values]
    shares = {name: [f"{100 * x:.3g}" for x in s.fractions.tolist()] for name, s in shown.items()}
    weights = {
        name: [
            f"{times:.4g}" if sample.tokens else "-"
            for times, sample in zip(s.relative_to_token_mean.tolist(), samples, strict=True)
        ]
        for name, s in shown.items()
    }
    lines = [
        "Share of the gradient: the sample's part of the sum of all weights, in percent",
        aligned({**columns, **shares}),
        "",
        "Weight of one token of the sample, as a multiple of its weight under token_mean",
        aligned({**columns, **weights}),
        "",
        "Weight of one token with mask m_t",
        *(f"{name}: {shares.formula}" for name, shares in shown.items()),
    ]
    if left_out:
        lines += ["", *(f"left out: {name} {why}" for name, why in left_out.items())]
    return "\n".join(lines)


def as_json(
    samples: Sequence[Sample], shown: Mapping[str, Shares], left_out: Mapping[str, str]
) -> str:
    """The same in full precision, with shares as fractions and weights also as absolute numbers."""
    return json.dumps(
        {
            "samples": [vars(sample) for sample in samples],
            "modes": {
                name: {
                    "share": shares.fractions.tolist(),
                    "weight_per_token": shares.per_token.tolist(),
                    "relative_to_token_mean": shares.relative_to_token_mean.tolist(),
                    "sum_of_weights": shares.total,
                    "formula": shares.formula,
                }
                for name, shares in shown.items()
            },
            "left_out": dict(left_out),
        }
    )


def aligned(columns: Mapping[str, Sequence[str]]) -> str:
    """Columns under their names, flush right."""
    cells = [
        [cell.rjust(max(map(len, [name, *column]))) for cell in [name, *column]]
        for name, column in columns.items()
    ]
    return "\n".join("  ".join(row) for row in zip(*cells, strict=True))


def draw(path: str, samples: Sequence[Sample], shown: Mapping[str, Shares]) -> None:
    """Save both tables as panels over the samples' lengths; the suffix of ``path`` is the format.

    Raises:
        OptionError: matplotlib is not installed, no sample has tokens, or ``path`` cannot be
            written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            f"--plot needs matplotlib, got {type(error).__name__}: {error}. Install it, by "
            "pip install matplotlib."
        ) from error
    lengths = [sample.tokens for sample in samples if sample.tokens > 0]
    if not lengths:
        raise OptionError("--plot needs a sample with loss tokens, got none. Give a length > 0.")
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
        save_without_background(figure, path)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--plot must name a .png, .svg or .pdf that can be written, got {path} ({error}). "
            "Change it."
        ) from error


def _draw_panel(axes: Any, shown: Mapping[str, Shares], heights_S: Mapping[str, Tensor]) -> None:
    """Draw the heights of every mode against the lengths, of the samples with tokens."""
    points = {}
    for name, heights in heights_S.items():
        pairs = zip(shown[name].tokens.tolist(), heights.tolist(), strict=True)
        points[name] = sorted(pair for pair in pairs if pair[0] > 0)
    # Order the legend like the right end of the plot, from top to bottom.
    for name in sorted(points, key=lambda name: -points[name][-1][1]):
        mode = shown[name].aggregation.mode
        style = {"marker": ".", "color": COLORS[mode], **_STYLES.get(mode, {})}
        axes.plot(*zip(*points[name], strict=True), label=name, **style)
    axes.set_xlabel("loss tokens of the sample")
    axes.grid(which="major", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
