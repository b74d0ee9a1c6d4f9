"""Text tables, and the picture."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.explain.samples import COLUMNS, Sample, shortened
from megatron_loss_agg.explain.shares import Shares

_MOST_ROWS = 20
"""Most samples for which a table has one row each."""
_MARKERS = "osD^v<>pPX*"


def tables(
    samples: Sequence[Sample], shares: Mapping[str, Shares], left_out: Mapping[str, str]
) -> str:
    """Two tables, of shares and of weights, and the formulas."""
    keys, members = rows_and_members(torch.tensor([sample.tokens for sample in samples]).double())
    are_few = len(members) == len(samples)
    if are_few:
        for name in COLUMNS:
            if getattr(samples[0], name) is not None:
                keys[name] = [shortened(getattr(sample, name)) for sample in samples]
    percent, weights = {}, {}
    for name, s in shares.items():
        percent[name] = [f"{100 * float(s.fractions[is_in_S].sum()):.3g}" for is_in_S in members]
        weights[name] = [span(s.relative_to_token_mean[is_in_S], ".4g") for is_in_S in members]
    lines = [
        f"Share of the gradient: the {'sample' if are_few else 'quarter'}'s part of the sum of all "
        "weights, in percent",
        aligned({**keys, **percent}, len(keys)),
        "",
        "Weight of one token of the sample, as a multiple of its weight under token_mean",
        aligned({**keys, **weights}, len(keys)),
        "",
    ]
    if not are_few:
        empty = sum(not sample.tokens for sample in samples)
        lines += [
            f"{len(samples):,} samples, {empty:,} of them without loss tokens; --json has each",
            "",
        ]
    lines += ["Weight of one token with mask m_t"]
    lines += [f"{name}: {s.formula}" for name, s in shares.items()]
    if left_out:
        lines += ["", *(f"left out: {name} {reason}" for name, reason in left_out.items())]
    return "\n".join(lines)


def rows_and_members(tokens_S: Tensor) -> tuple[dict[str, list[str]], list[Tensor]]:
    """The first columns of a table, and the samples of each row: bool [samples].

    A row is one sample. If there are many, a row is a quarter, by length, of the samples with
    tokens. Samples of equal length are in the same quarter, so there may be fewer than four.
    """
    if len(tokens_S) <= _MOST_ROWS:
        members = [*torch.eye(len(tokens_S), dtype=torch.bool)]
        first = {"sample": [str(s) for s in range(len(tokens_S))]}
    else:
        lengths = tokens_S[tokens_S > 0].sort().values
        cuts = lengths[[len(lengths) * k // 4 for k in range(4) if len(lengths)]].unique()
        quarter_S = torch.bucketize(tokens_S, cuts, right=True)  # 0: without tokens
        members = [quarter_S == k for k in range(1, len(cuts) + 1)]
        first = {"samples": [f"{int(is_in_S.sum()):,}" for is_in_S in members]}
    return {**first, "tokens": [span(tokens_S[is_in_S], ".10g") for is_in_S in members]}, members


def span(x: Tensor, form: str = ".2f") -> str:
    """The smallest and largest value in words; just one if both look the same."""
    if not x.numel():
        return "-"
    return " to ".join(dict.fromkeys(format(float(end), form) for end in x.aminmax()))


def aligned(columns: Mapping[str, Sequence[str]], num_keys: int) -> str:
    """Columns under their names, flush right.

    Columns that do not fit the terminal's width come in further blocks, which repeat the first
    ``num_keys`` columns.
    """
    cells = []
    for name, column in columns.items():
        width = max(map(len, [name, *column]))
        cells.append([text.rjust(width) for text in [name, *column]])
    room = shutil.get_terminal_size().columns
    blocks = [cells[: num_keys + 1]]
    for cell in cells[num_keys + 1 :]:
        width = sum(len(column[0]) + 2 for column in blocks[-1]) + len(cell[0])
        if width > room:
            blocks.append([*cells[:num_keys], cell])
        else:
            blocks[-1].append(cell)
    return "\n\n".join(
        "\n".join("  ".join(row) for row in zip(*block, strict=True)) for block in blocks
    )


def draw(path: str, curves: Mapping[str, Shares]) -> None:
    """Save a picture of weights and shares over sample lengths, in the format of the suffix.

    Raises:
        OptionError: matplotlib is not installed, no sample has tokens, or ``path`` cannot be
            written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            f"--plot needs matplotlib, got {type(error).__name__}: {error}. Install it with pip "
            "install matplotlib."
        ) from error
    tokens_S = next(iter(curves.values())).tokens
    if not bool(tokens_S.any()):
        raise OptionError("--plot needs a sample with loss tokens, got none. Give a length > 0.")
    figure = Figure(figsize=(9.0, 4.8), dpi=200, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_panel(left, {name: s.relative_to_token_mean for name, s in curves.items()}, tokens_S)
    _draw_panel(right, {name: 100 * s.fractions for name, s in curves.items()}, tokens_S)
    left.set_ylabel("weight of one token, as a multiple of token_mean")
    right.set_ylabel("the sample's share of the gradient, in percent")
    names = left.get_legend_handles_labels()  # the same on both sides
    figure.legend(*names, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"One step of all {len(tokens_S):,} samples: {float(tokens_S.sum()):,.10g} loss tokens"
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--plot must name a .png, .svg or .pdf that can be written, got {path} ({error}). "
            "Change it."
        ) from error


def _draw_panel(axes: Any, heights: Mapping[str, Tensor], tokens_S: Tensor) -> None:
    """Draw every curve's heights over the lengths of the samples with tokens."""
    has_tokens_S = tokens_S > 0
    for (name, height_S), marker in zip(heights.items(), cycle(_MARKERS), strict=False):
        axes.loglog(
            tokens_S[has_tokens_S].tolist(),
            height_S[has_tokens_S].tolist(),
            marker=marker,
            linestyle="none",
            fillstyle="none",  # so that overlapping points remain visible
            label=name,
        )
    axes.set_xlabel("loss tokens of the sample")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid()
