"""Shares and weights as text tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_loss_agg.explain.samples import COLUMNS, Sample
from megatron_loss_agg.explain.shares import Shares, relative_to_token_mean

_WIDEST_ID = 16


def as_text(
    samples: Sequence[Sample], shown: Mapping[str, Shares], left_out: Mapping[str, str]
) -> str:
    """Two tables, of shares and of weights, with one row per sample."""
    fixed = [
        ["sample", *map(str, range(len(samples)))],
        ["tokens", *(f"{sample.tokens:.10g}" for sample in samples)],
    ]
    for name in COLUMNS:
        values = [getattr(sample, name) for sample in samples]
        if values[0] is not None:
            fixed.append([name, *map(_short, values)])
    shares = [
        [name, *(f"{100 * x:.3g}" for x in s.fractions.tolist())] for name, s in shown.items()
    ]
    weights = [
        [name, *_times(relative_to_token_mean(s, samples), samples)] for name, s in shown.items()
    ]
    parts = [
        "Share of the gradient: the sample's part of the sum of all weights, in percent",
        _aligned([*fixed, *shares]),
        "",
        "Weight of one token of the sample, as a multiple of its weight under token_mean",
        _aligned([*fixed, *weights]),
    ]
    if left_out:
        parts += ["", *(f"left out: {name} {why}" for name, why in left_out.items())]
    return "\n".join(parts)


def as_json(
    samples: Sequence[Sample], shown: Mapping[str, Shares], left_out: Mapping[str, str]
) -> dict[str, Any]:
    """The same in full precision, with shares as fractions and weights also as absolute numbers."""
    return {
        "samples": [
            {"tokens": s.tokens, **{name: getattr(s, name) for name in COLUMNS}} for s in samples
        ],
        "modes": {
            name: {
                "share": shares.fractions.tolist(),
                "weight_per_token": shares.per_token.tolist(),
                "relative_to_token_mean": relative_to_token_mean(shares, samples).tolist(),
                "sum_of_weights": shares.total,
            }
            for name, shares in shown.items()
        },
        "left_out": dict(left_out),
    }


def _times(relative: Tensor, samples: Sequence[Sample]) -> list[str]:
    """``-`` for samples without tokens."""
    pairs = zip(relative.tolist(), samples, strict=True)
    return [f"{times:.4g}" if sample.tokens else "-" for times, sample in pairs]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _WIDEST_ID else text[: _WIDEST_ID - 1] + "…"


def _aligned(columns: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
