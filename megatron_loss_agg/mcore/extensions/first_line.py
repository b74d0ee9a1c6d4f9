"""Lines of the log: how the hook reads the run, from its first step; evaluations."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step import PlannedStep


class FirstLine(Extension):
    """Says on one rank what was understood of the first training step with an active token."""

    def __init__(self) -> None:
        self._said = False

    @contextmanager
    def around(
        self, call: Call, plan: PlannedStep | None
    ) -> Iterator[Callable[[MicrobatchLoss], None] | None]:
        groups = call.groups
        speaks = groups.last_stage and not any(
            map(dist.get_rank, (groups.dp, groups.cp, groups.tp))
        )
        if self._said or not speaks or not call.trains or plan is None:
            yield None
            return
        known = set[str]()  # of tokens over context-parallel ranks

        def on_loss(x: MicrobatchLoss) -> None:
            if x.whole is not None:
                known.add("every context-parallel rank has the losses of all tokens")
            elif (split := x.local[x.first].split) is not None:
                known.add(f"context-parallel split: {split}")

        yield on_loss
        if call.ends_step and not plan.is_empty:
            packed = any(x.starts is not None for x in plan.first.samples)
            if groups.cp_size > 1 and packed and not known:
                known.add("context-parallel split: any (all give the same weights)")
            print(_line(call, plan, sorted(known)), flush=True)
            self._said = True


def _line(call: Call, plan: PlannedStep, known: Sequence[str]) -> str:
    modes = [_mode(name, term) for name, term in call.terms.items()]
    first, ranks = plan.first, call.scale.data_parallel_size
    kinds = {"rows" if x.starts is None else "packed sequences" for x in first.samples}
    counts = first.counts
    counted = [f"{counts.samples} samples ({' and '.join(sorted(kinds, reverse=True))})"]
    for unit in ("rollouts", "prompts", "datasets"):
        number = getattr(counts, unit)
        counted += [] if number is None else [f"{number} {unit.replace('datasets', 'data sets')}"]
    tokens = f"{counts.tokens:.10g} tokens"
    if plan.is_late:
        tokens = "masks that the model makes"
    elif counts.active_tokens not in (None, counts.tokens):
        tokens = f"{counts.active_tokens} tokens whose masks sum to {counts.tokens:.10g}"
    step = (
        f"a step of {counts.microbatches} microbatches on {ranks} data-parallel "
        f"rank{'s' if ranks > 1 else ''}, {', '.join(counted)}, {tokens}"
    )
    return f"loss aggregation: {'; '.join([' + '.join(modes), step, *known, *call.words()])}"


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
