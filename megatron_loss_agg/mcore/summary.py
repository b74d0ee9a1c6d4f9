"""Lines of the log: how the hook reads the run, from its first step; evaluations."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.mcore.choices import CHOICES
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.mcore.step_weights import StepWeights

_KINDS = {False: "rows", True: "packed sequences"}


def summary(
    terms: Mapping[str, Term],
    call: Call,
    weights: StepWeights,
    splits: Splits,
    measured: float | None,
    choices: Mapping[str, str],
) -> str:
    """One line for the log.

    Args:
        choices: values of `CHOICES`.
        call: of the step, on a rank of the last pipeline stage.
        measured: see `Auditor.measured`.
    """
    modes = [_mode(name, term) for name, term in terms.items()]
    counts, scale = weights.counts, call.scale
    packed = {weights.local_mask(i).packed for i in range(len(weights))}
    kinds = " and ".join(_KINDS[kind] for kind in sorted(packed))
    counted = [f"{counts.samples} samples ({kinds})"]
    for unit in ("rollouts", "prompts", "datasets"):
        number = getattr(counts, unit)
        counted += [] if number is None else [f"{number} {unit.replace('datasets', 'data sets')}"]
    ranks = scale.data_parallel_size
    split = ""
    if scale.context_parallel_size > 1 and splits.gathers.all_tokens:
        split = "; every context-parallel rank has the losses of all tokens"
    elif scale.context_parallel_size > 1:
        found = {splits.recognised(kind) or "any (all give the same weights)" for kind in packed}
        split = f"; context-parallel split: {', '.join(sorted(found))}"
    tokens = f"{counts.tokens:.10g} tokens"
    if counts.active_tokens not in (None, counts.tokens):
        tokens = f"{counts.active_tokens} tokens whose masks sum to {counts.tokens:.10g}"
    if math.isnan(counts.tokens):
        tokens, split = "masks that the model makes", ""
    others = [f"; {n}: {choices[n]}" for n in ("mtp", "moe") if choices[n] != CHOICES[n][0]]
    factor = "gradients not measured"
    if measured is not None:
        factor = f"measured gradients: {measured:.6f} times the planned ones"
    return (
        f"loss aggregation: {' + '.join(modes)}; a step of {counts.microbatches} microbatches on "
        f"{ranks} data-parallel rank{'s' if ranks > 1 else ''}, {', '.join(counted)}, "
        f"{tokens}{split}{''.join(others)}; {factor}"
    )


def _mode(name: str, term: Term) -> str:
    """The mode, and all settings that are not the default."""
    aggregation = term.aggregation
    label, mode = aggregation.label, aggregation.mode
    settings = [] if label == mode else [label]
    for field in dataclasses.fields(aggregation):
        value = getattr(aggregation, field.name)
        if field.name not in ("mode", "name") and value != field.default:
            settings.append(f"{field.name.replace('_', ' ')}: {_shown(value)}")
    shown = f"{mode} ({', '.join(settings)})" if settings else mode
    coefficient = "" if term.coefficient == 1 else f"{term.coefficient:g} * "
    return coefficient + (shown if name in (mode, label) else f"{name}: {shown}")


def _shown(value: Any) -> str:
    """A word, a number, or the name of a function."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return value if isinstance(value, str) else f"{float(value):.10g}"


def without_perplexities(line: str, losses: Iterable[str]) -> str:
    """Megatron's line of an evaluation, without ``<key> PPL`` of the aggregated ``losses``.

    Megatron prints ``exp(min(20, value))`` of every key. That of ``lm loss`` is a perplexity.
    """
    keys = "|".join(map(re.escape, losses))
    ours = rf"(?<=\| )(mtp_\d+ )?({keys})( of dataset \S+)? PPL: \S+ \| "
    return re.sub(ours, "", line)
