"""A loss in words: what all ranks must have alike, and what the log says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_loss_agg.aggregation import LossAggregation, Term
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


def formula(agg: LossAggregation, tokens: float | None = None, across: float | None = None) -> str:
    """The weight of a token in words, such as ``w_t = m_t / (M_sample * 10)``.

    Args:
        tokens, across: the step's ``M_step`` and ``N_across`` (or ``V_across``), if known.
    """
    if agg.mode == "custom":
        return "w_t = function(plan, i)"
    factors = [] if agg.divisor is None else [f"{agg.divisor:.10g}"]
    if agg.within is not None:
        is_known = agg.within == "step" and tokens is not None
        factors.append(f"{tokens:.10g}" if is_known else f"M_{agg.within}")
    if len(agg.path) > 1:
        factors.append("C")
    if agg.weighted or agg.across:
        name = "V_across" if agg.weighted else f"N_{agg.across}"
        factors.append(name if across is None else f"{across:.10g}")
    product = " * ".join(factors)
    divided = f" / ({product})" if len(factors) > 1 else f" / {product}" if factors else ""
    return "w_t = " + ("m_t" if agg.sample_weights is None else "v_s * m_t") + divided
