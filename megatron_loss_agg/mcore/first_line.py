"""The first line of the log: how the hook reads the run."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.describe import counts_in_words, formula, terms_in_words
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.plan import StepPlan, plan_of_first_term


def prints_first_line(call: Call) -> bool:
    """Whether this rank is the one that prints."""
    groups = call.groups
    is_first = not any(dist.get_rank(group) for group in (groups.dp, groups.cp, groups.tp))
    return groups.is_last_stage and is_first


def first_line(
    call: Call,
    terms: Mapping[str, Term],
    plans: Mapping[str, StepPlan],
    split: str,
    measured: float | None,
    settings: Mapping[str, object],
) -> str:
    """The terms, counts and settings of a training step, in one line."""
    parts = [terms_in_words(terms)]
    for plan in plans.values():
        parts.append(formula(plan.aggregation, plan.counts.tokens, plan.counts.across))
    first = plan_of_first_term(plans)
    parts.append(_step(call, first))
    is_packed = any(shape.starts is not None for shape in first.shapes)
    if call.groups.cp_size > 1 and is_packed:
        parts.append(f"context-parallel split: {split}")
    parts += [f"{name}: {value}" for name, value in settings.items()]
    parts.append(measured_in_words(measured))
    return f"loss aggregation: {'; '.join(parts)}"


def measured_in_words(measured: float | None) -> str:
    """The result of `checks.scaling`."""
    if measured is None:
        return "gradients not measured"
    return f"gradients are {measured:.6f} times the planned ones"


def _step(call: Call, plan: StepPlan) -> str:
    counts, ranks = plan.counts, call.scale.data_parallel_size
    kinds = {"rows" if x.starts is None else "packed sequences" for x in plan.shapes}
    return (
        f"a step of {counts.microbatches} microbatches on {ranks} data-parallel "
        f"rank{'s' if ranks > 1 else ''}, "
        f"{counts_in_words(counts, ' and '.join(sorted(kinds, reverse=True)))}"
    )
