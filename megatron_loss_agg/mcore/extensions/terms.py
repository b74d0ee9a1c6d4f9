"""The terms of a loss in words, for the settings that ranks compare and for the first line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_loss_agg.aggregation import Term


def described(terms: Mapping[str, Term]) -> str:
    """The terms in words, the same in every process: modes, and what is not the default."""
    texts = []
    for name, term in terms.items():
        aggregation = term.aggregation
        label, mode = aggregation.label, aggregation.mode
        settings = [] if label == mode else [label]
        for field in dataclasses.fields(aggregation):
            value = getattr(aggregation, field.name)
            if field.name not in ("mode", "name") and value != field.default:
                settings.append(f"{field.name.replace('_', ' ')}: {_shown(value)}")
        shown = f"{mode} ({', '.join(settings)})" if settings else mode
        coefficient = "" if term.coefficient == 1 else f"{term.coefficient!r} * "
        texts.append(coefficient + (shown if name in (mode, label) else f"{name}: {shown}"))
    return " + ".join(texts)


def _shown(value: Any) -> str:
    """A word, a number, or the name of a function, since its address differs between processes."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return value if isinstance(value, str) else f"{float(value):.15g}"
