"""Shares and weights as text tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_loss_agg.explain.samples import COLUMNS, Sample
from megatron_loss_agg.explain.shares import Shares

_WIDEST_ID = 16


def as_text(
    samples: Sequence[Sample], shown: Mapping[str, Shares], left_out: Mapping[str, str]
) -> str:
    """Two tables, of shares and of weights, with one row per sample; and the formulas."""
    fixed = {
        "sample": [str(s) for s in range(len(samples))],
        "tokens": [f"{sample.tokens:.10g}" for sample in samples],
    }
    for name in COLUMNS:
        values = [getattr(sample, name) for sample in samples]
        if values[0] is not None:
            fixed[name] = [_short(value) for value in values]
    shares = {name: [f"{100 * x:.3g}" for x in s.fractions.tolist()] for name, s in shown.items()}
    weights = {
        name: [
            f"{times:.4g}" if sample.tokens else "-"
            for times, sample in zip(s.relative_to_token_mean.tolist(), samples, strict=True)
        ]
        for name, s in shown.items()
    }
    parts = [
        "Share of the gradient: the sample's part of the sum of all weights, in percent",
        aligned({**fixed, **shares}),
        "",
        "Weight of one token of the sample, as a multiple of its weight under token_mean",
        aligned({**fixed, **weights}),
        "",
        "Weight of one token with mask m_t",
        *(f"{name}: {shares.formula}" for name, shares in shown.items()),
    ]
    if left_out:
        parts += ["", *(f"left out: {name} {why}" for name, why in left_out.items())]
    return "\n".join(parts)


def as_json(
    samples: Sequence[Sample], shown: Mapping[str, Shares], left_out: Mapping[str, str]
) -> str:
    """The same in full precision, with shares as fractions and weights also as absolute numbers."""
    found = {
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
    return json.dumps(found)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _WIDEST_ID else text[: _WIDEST_ID - 1] + "…"


def aligned(columns: Mapping[str, Sequence[str]]) -> str:
    """Columns under their names, flush right."""
    cells = [
        [cell.rjust(max(map(len, [name, *column]))) for cell in [name, *column]]
        for name, column in columns.items()
    ]
    return "\n".join("  ".join(row) for row in zip(*cells, strict=True))
