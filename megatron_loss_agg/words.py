"""A loss in words: what all ranks must have alike, and what the log says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.presets import PRESETS


def terms_in_words(terms: Mapping[str, Term]) -> str:
    """Modes, and what is not the default; the same text in every process."""
    texts = []
    for name, term in terms.items():
        aggregation = term.aggregation
        label, mode = aggregation.label, aggregation.mode
        settings, preset = [] if label == mode else [label], PRESETS.get(label)
        for x in fields(aggregation):
            value, default = getattr(aggregation, x.name), getattr(preset, x.name, x.default)
            if x.name not in ("mode", "name") and value != default:
                settings.append(f"{x.name.replace('_', ' ')}: {_shown(value)}")
        shown = f"{mode} ({', '.join(settings)})" if settings else mode
        coefficient = "" if term.coefficient == 1 else f"{term.coefficient!r} * "
        texts.append(coefficient + (shown if name in (mode, label) else f"{name}: {shown}"))
    return " + ".join(texts)


def _shown(value: Any) -> str:
    """A word, a number, or the name of a function, since its address differs between processes."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, tuple):
        return " > ".join(value)
    return value if isinstance(value, str) else f"{float(value):.15g}"
