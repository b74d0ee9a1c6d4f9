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
    if any(call.groups.holders(x).size > 1 for x in first.shapes if x.starts is not None):
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
    counts, ranks = plan.counts, dist.get_world_size(call.groups.planning)
    kinds = {"rows" if x.starts is None else "packed sequences" for x in plan.shapes}
    kind = "data-parallel" if call.groups.dp_cp is None else "data- and context-parallel"
    return (
        f"a step of {counts.microbatches} microbatches on {ranks} {kind} "
        f"rank{'s' if ranks > 1 else ''}, "
        f"{counts_in_words(counts, ' and '.join(sorted(kinds, reverse=True)))}"
    )
