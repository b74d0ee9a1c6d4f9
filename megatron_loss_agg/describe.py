"""A loss in words: compared between ranks, and printed in the log."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from megatron_loss_agg.aggregation import LossAggregation, Term
from megatron_loss_agg.counting import StepCounts
from megatron_loss_agg.presets import PRESETS

_WIDTH = 80
"""Width of a terminal in columns."""


def in_lines(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """``title``, then a text for each label, wrapped to 80 columns unless a word is longer."""
    rows = list(rows)
    indent = max((len(label) for label, _ in rows), default=0) + 4  # "  label: text"
    lines = [title]
    for label, text in rows:
        lines += textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=f"  {label}:".ljust(indent),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def print_lines(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print `in_lines`, with the title as a rule that is easy to find in a long log.

    On a terminal the rule is coloured.
    """
    rule = f"==== {title} ".ljust(_WIDTH, "=")
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(in_lines(f"\033[1;36m{rule}\033[0m" if is_coloured else rule, rows), flush=True)


def title_and_weights(
    terms: Mapping[str, Term], formulas: Mapping[str, str], who: str = ""
) -> tuple[str, list[tuple[str, str]]]:
    """The title of the log's first lines, and their rows on the weights; arguments are by term.

    Args:
        formulas: from `formula`.
        who: the model being trained, such as ``critic``, if a process trains several.
    """
    title = f"loss aggregation of the {who}: " if who else "loss aggregation: "
    (name, term), *others = terms.items()
    if not others and _is_mode_name(name, term):
        return title + _term_in_words(name, term), [("weight", formulas[name])]
    total = " + ".join(_multiplied(name, term) for name, term in terms.items())
    return title + total, [
        (name, f"{aggregation_in_words(term.aggregation)}; {formulas[name]}")
        for name, term in terms.items()
    ]


def terms_in_words(terms: Mapping[str, Term]) -> str:
    """The modes and all options other than defaults; the same text in every process."""
    return " + ".join(_term_in_words(name, term) for name, term in terms.items())


def formula(agg: LossAggregation, counts: StepCounts | None = None) -> str:
    """The weight of a token in words, such as ``w_t = m_t / (M_sample * 10)``.

    Args:
        counts: from a step with tokens, to show numbers instead of ``M_all`` and ``N_across`` (or
            ``V_across``).
    """
    if agg.mode == "custom":
        return "w_t = m_t * function(samples)"
    factors = []
    if agg.divisor is not None:
        factors.append(f"{agg.divisor:.10g}")
    if agg.within == "all" and counts is not None:
        factors.append(f"{counts.tokens:.10g}")
    elif agg.within is not None:
        factors.append(f"M_{agg.within}")
    if len(agg.path) > 1:
        factors.append("C")
    if agg.weighted or agg.across:
        name = "V_across" if agg.weighted else f"N_{agg.across}"
        factors.append(name if counts is None else f"{counts.across:.10g}")
    mask = "m_t" if agg.sample_weights is None else "v_s * m_t"
    if not factors:
        return f"w_t = {mask}"
    product = " * ".join(factors)
    return f"w_t = {mask} / {product}" if len(factors) == 1 else f"w_t = {mask} / ({product})"


def counts_in_words(counts: StepCounts, kind: str = "", unit: str = "token") -> str:
    """The samples, groups and tokens of a step.

    Args:
        kind: the kind of sample, such as "pairs".
        unit: the thing that the masks mark: a "token", or a "loss".
    """
    samples = number_of(counts.samples, "sample")
    words = [f"{samples} ({kind})" if kind else samples]
    for name, number in (
        ("rollout", counts.rollouts),
        ("prompt", counts.prompts),
        ("data set", counts.datasets),
    ):
        if number is not None:
            words.append(number_of(number, name))
    are_left_out = counts.samples < counts.all_samples
    if counts.active_tokens in (None, counts.all_tokens):
        words.append(f"{counts.tokens:.10g} {plural(unit)}")
    else:
        # Active tokens are counted by microbatch, so they include those of rejected samples.
        active = "" if are_left_out else f"{counts.active_tokens} "
        words.append(f"{active}{plural(unit)} whose masks sum to {counts.tokens:.10g}")
    if counts.rejected_samples:
        rejected = number_of(counts.rejected_samples, "rejected sample")
        words.append(f"{rejected} {'left out' if are_left_out else 'included'}")
    return ", ".join(words)


def aggregation_in_words(agg: LossAggregation) -> str:
    """The mode and all options other than defaults."""
    preset = PRESETS.get(agg.label)
    settings = [] if agg.label == agg.mode else [agg.label]
    for field in fields(agg):
        value = getattr(agg, field.name)
        default = getattr(preset, field.name, field.default)
        if field.name not in ("mode", "name") and value != default:
            settings.append(f"{field.name.replace('_', ' ')}: {_shown(value)}")
    return f"{agg.mode} ({', '.join(settings)})" if settings else agg.mode


def number_of(number: int, thing: str) -> str:
    """A count with its noun, such as ``1 sample`` or ``2 microbatches``."""
    return f"{number} {thing if number == 1 else plural(thing)}"


def plural(thing: str) -> str:
    """The plural of a noun, such as ``samples``, ``losses`` or ``microbatches``."""
    return f"{thing}es" if thing.endswith(("ch", "s")) else f"{thing}s"


def _term_in_words(name: str, term: Term) -> str:
    text = aggregation_in_words(term.aggregation)
    if not _is_mode_name(name, term):
        text = f"{name}: {text}"
    return _multiplied(text, term)


def _is_mode_name(name: str, term: Term) -> bool:
    """True if the term is named after its mode or preset."""
    return name in (term.aggregation.mode, term.aggregation.label)


def _multiplied(text: str, term: Term) -> str:
    return text if term.multiplier == 1 else f"{term.multiplier!r} * {text}"


def _shown(value: Any) -> str:
    """A word, a number, or a function's name (its address differs between processes)."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, tuple):
        return " > ".join(value)
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{float(x):.15g}" for key, x in value.items())
    return value if isinstance(value, str) else f"{float(value):.15g}"
