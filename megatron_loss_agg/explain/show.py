"""Shares and weights as text tables, as JSON and as a picture."""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.explain.colors import COLORS, save_without_background
from megatron_loss_agg.explain.samples import COLUMNS, Sample, shortened
from megatron_loss_agg.explain.shares import Shares

# Points are hollow and of different sizes, so that overlapping ones stay visible.
_POINTS = {"linestyle": "none", "markerfacecolor": "none", "zorder": 3}
# The other modes, which give samples of equal length the same weight, are lines; the wider ones lie
# below the others.
_STYLES: dict[str, dict[str, Any]] = {
    "token_mean": {"linewidth": 4.0, "zorder": 2.0},
    "sample_mean": {"linewidth": 2.4, "zorder": 2.4},
    "rollout_mean": {"marker": "s", "markersize": 10.0, **_POINTS},
    "prompt_mean": {"marker": "D", "markersize": 7.0, **_POINTS},
    "nested_mean": {"marker": "v", "markersize": 8.5, **_POINTS},
    "dataset_mean": {"marker": "^", "markersize": 5.5, **_POINTS},
    "sample_sum": {"linewidth": 3.2, "zorder": 2.1},
    "constant": {"linewidth": 2.2, "zorder": 2.2},
    "sum": {"linewidth": 1.2, "zorder": 2.3},
    "microbatch_mean": {"marker": "o", "markersize": 4.0, **_POINTS},
}
# Further curves of one mode, such as presets.
_FURTHER_LINES = ("--", ":", "-.")
_FURTHER_POINTS = ("x", "+", "*")
_LONGEST = 45
"""Characters of a name in a legend of two columns."""
_MOST_ROWS = 20
"""Samples of which each gets a row of the tables; of more, each quarter does."""


def as_text(
    samples: Sequence[Sample], shown: Mapping[str, Shares], left_out: Mapping[str, str]
) -> str:
    """Two tables, of shares and of weights, by sample or by quarters of them; and the formulas."""
    are_few = len(samples) <= _MOST_ROWS
    rows = _by_sample(samples, shown) if are_few else _by_quarter(samples, shown)
    whose, of_whose = ("the sample's", " of the sample") if are_few else ("a quarter's", "")
    keys = len(rows.keys)
    lines = [
        f"Share of the gradient: {whose} part of the sum of all weights, in percent",
        aligned({**rows.keys, **rows.shares}, keys),
        "",
        f"Weight of one token{of_whose}, as a multiple of its weight under token_mean",
        aligned({**rows.keys, **rows.weights}, keys),
        "",
    ]
    if not are_few:
        without = sum(not sample.tokens for sample in samples)
        lines += [
            f"{len(samples):,} samples, {without:,} of them without loss tokens; "
            "--csv FILE has a line for each",
            "",
        ]
    lines += [
        "Weight of one token with mask m_t",
        *(f"{name}: {shares.formula}" for name, shares in shown.items()),
    ]
    if left_out:
        lines += ["", *(f"left out: {name} {why}" for name, why in left_out.items())]
    return "\n".join(lines)


class _Rows(NamedTuple):
    """Columns of the two tables, by name: the first ones of both, and those by mode of each."""

    keys: dict[str, list[str]]
    shares: dict[str, list[str]]
    weights: dict[str, list[str]]


def _by_sample(samples: Sequence[Sample], shown: Mapping[str, Shares]) -> _Rows:
    """A row for each sample: its groups, its shares and its weights."""
    columns = {
        "sample": [str(s) for s in range(len(samples))],
        "tokens": [f"{sample.tokens:.10g}" for sample in samples],
    }
    for name in _groups(samples):
        columns[name] = [shortened(getattr(sample, name)) for sample in samples]
    shares = {name: [f"{100 * x:.3g}" for x in s.fractions.tolist()] for name, s in shown.items()}
    weights = {
        name: [
            f"{times:.4g}" if sample.tokens else "-"
            for times, sample in zip(s.relative_to_token_mean.tolist(), samples, strict=True)
        ]
        for name, s in shown.items()
    }
    return _Rows(columns, shares, weights)


def _by_quarter(samples: Sequence[Sample], shown: Mapping[str, Shares]) -> _Rows:
    """A row for each quarter of the samples with tokens, by length: sums of shares, and spans."""
    tokens_S = torch.tensor([sample.tokens for sample in samples], dtype=torch.float64)
    parts = quarters(tokens_S)
    columns = {
        "tokens": [span(tokens_S[is_in_S], ",.10g") for is_in_S in parts],
        "samples": [f"{int(is_in_S.sum()):,}" for is_in_S in parts],
    }
    shares, weights = {}, {}
    for name, s in shown.items():
        shares[name] = [f"{100 * float(s.fractions[is_in_S].sum()):.3g}" for is_in_S in parts]
        weights[name] = [span(s.relative_to_token_mean[is_in_S], ".3g") for is_in_S in parts]
    return _Rows(columns, shares, weights)


def _groups(samples: Sequence[Sample]) -> list[str]:
    """The columns of groups that are known; samples have the same ones."""
    return [name for name in COLUMNS if getattr(samples[0], name) is not None]


def quarters(tokens_S: Tensor) -> list[Tensor]:
    """bool [samples] for each quarter of the samples with tokens, by length.

    Samples of equal length are in one quarter, so that there may be fewer than four.
    """
    lengths = tokens_S[tokens_S > 0].sort().values
    cuts = lengths[[len(lengths) * k // 4 for k in range(4)]].unique() if len(lengths) else lengths
    quarter_S = torch.bucketize(tokens_S, cuts, right=True)  # 0: without tokens
    return [quarter_S == k for k in range(1, len(cuts) + 1)]


def span(x: Tensor, form: str = ".2f") -> str:
    """The least and the largest value in words; one of them where both look alike."""
    return " to ".join(dict.fromkeys(format(float(end), form) for end in x.aminmax()))


def shares_by_sample(samples: Sequence[Sample], shown: Mapping[str, Shares]) -> Iterator[list[Any]]:
    """The lines of a CSV file: of each mode and sample, the same as in `as_json`."""
    groups = _groups(samples)
    yield [
        *("mode", "sample", "tokens", *groups),
        *("share", "weight_per_token", "relative_to_token_mean"),
    ]
    for name, shares in shown.items():
        columns = (shares.fractions, shares.per_token, shares.relative_to_token_mean)
        numbers = zip(samples, *(column.tolist() for column in columns), strict=True)
        for s, (sample, *values) in enumerate(numbers):
            ids = [shortened(getattr(sample, group)) for group in groups]
            yield [name, s, sample.tokens, *ids, *values]


def write_csv(path: str, lines: Iterable[Sequence[Any]]) -> None:
    """Write the lines, the first of which names the columns.

    Raises:
        OptionError: ``path`` cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(lines)
    except OSError as error:
        raise OptionError(
            f"--csv must name a file that can be written, got {path} ({error}). Change it."
        ) from error


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


def aligned(columns: Mapping[str, Sequence[str]], keys: int, left: Collection[str] = ()) -> str:
    """Columns under their names, flush right or ``left``.

    Columns that a terminal has no room for come in further blocks, behind the first ``keys``.
    """
    cells = []
    for name, column in columns.items():
        width = max(map(len, [name, *column]))
        cells.append([x.ljust(width) if name in left else x.rjust(width) for x in [name, *column]])
    room = shutil.get_terminal_size().columns
    blocks = [cells[: keys + 1]]
    for cell in cells[keys + 1 :]:
        block = blocks[-1]
        if sum(len(x[0]) + 2 for x in block) + len(cell[0]) > room:
            blocks.append([*cells[:keys], cell])
        else:
            block.append(cell)
    return "\n\n".join(
        "\n".join("  ".join(row).rstrip() for row in zip(*block, strict=True)) for block in blocks
    )


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
    figure = Figure(figsize=(13.0, 6.0), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2, subplot_kw={"xscale": "log", "yscale": "log"})
    _draw_panel(left, shown, {name: s.relative_to_token_mean for name, s in shown.items()}, "{:g}")
    _draw_panel(right, shown, {name: 100 * s.fractions for name, s in shown.items()}, "{:g} %")
    left.set_ylabel("weight of one token, as a multiple of token_mean")
    right.set_ylabel("the sample's share of the gradient")
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


def _draw_panel(
    axes: Any, shown: Mapping[str, Shares], heights_S: Mapping[str, Tensor], tick: str
) -> None:
    """Draw the heights of every mode against the lengths, of the samples with tokens.

    Modes of equal heights are one curve, with all of their names.
    """
    names: dict[tuple[tuple[float, str], ...], list[str]] = {}
    for name, heights in heights_S.items():
        pairs = zip(shown[name].tokens.tolist(), heights.tolist(), strict=True)
        # As many digits as a curve shows.
        points = tuple(sorted((tokens, f"{y:.4g}") for tokens, y in pairs if tokens > 0))
        names.setdefault(points, []).append(name)
    styles = _styles({of_curve[0]: shown[of_curve[0]] for of_curve in names.values()})
    # Order the legend like the right end of the plot, from top to bottom.
    for points, of_curve in sorted(names.items(), key=lambda item: -float(item[0][-1][1])):
        curve = zip(*((tokens, float(y)) for tokens, y in points), strict=True)
        axes.plot(*curve, label=" = ".join(of_curve), **styles[of_curve[0]])
    axes.set_xlabel("loss tokens of the sample")
    for axis, form in ((axes.xaxis, "{:,g}"), (axes.yaxis, tick)):
        _set_plain_ticks(axis, form)
    axes.grid(which="major", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    longest = max(len(" = ".join(of_curve)) for of_curve in names.values())
    columns = 2 if longest <= _LONGEST else 1
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), frameon=False, ncols=columns)


def _styles(shown: Mapping[str, Shares]) -> dict[str, dict[str, Any]]:
    """A style for each curve; further curves of a mode have others than its first."""
    drawn: Counter[str] = Counter()  # curves of each mode
    styles = {}
    for name, shares in shown.items():
        mode = shares.aggregation.mode
        style = {"marker": ".", "markersize": 6.0, "color": COLORS[mode], **_STYLES[mode]}
        is_line, k = "linestyle" not in style, drawn[mode] - 1
        drawn[mode] += 1
        if k >= 0 and is_line:
            style["linestyle"] = _FURTHER_LINES[k % len(_FURTHER_LINES)]
        elif k >= 0:
            style["marker"] = _FURTHER_POINTS[k % len(_FURTHER_POINTS)]
        style["markersize"] *= min(1.0, max(0.4, 5 / math.sqrt(len(shares.tokens))))
        styles[name] = style
    return styles


def _set_plain_ticks(axis: Any, form: str) -> None:
    """Ticks as plain numbers, of which a narrow range has more."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    subs = (1.0,) if decades > 4 else (1.0, 3.0) if decades > 1.5 else (1.0, 2.0, 3.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: form.format(x)))
    axis.set_minor_formatter(NullFormatter())
