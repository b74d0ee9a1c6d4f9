"""The first lines of the log: how the hook reads the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.distributed as dist

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.describe import (
    counts_in_words,
    formula,
    in_lines,
    number_of,
    title_and_weights,
)
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.scale import MegatronScale
from megatron_loss_agg.plan import StepPlan, plan_of_first_term


def prints_first_lines(call: Call) -> bool:
    """Whether this rank is the one that prints: the first of the last pipeline stage."""
    groups = call.groups
    is_first = not any(dist.get_rank(group) for group in (groups.dp, groups.cp, groups.tp))
    return groups.is_last_stage and is_first


def first_lines(
    call: Call,
    terms: Mapping[str, Term],
    plans: Mapping[str, StepPlan],
    is_empty: bool,
    split: str,
    measured: float | None,
    further: Iterable[tuple[str, str]],
) -> str:
    """The terms, counts and settings of a training step, or of a call of an evaluation.

    Args:
        is_empty: it has no active token.
        measured: the result of `checks.scaling`.
        further: more lines, by label.
    """
    formulas = {
        name: formula(plan.aggregation, None if is_empty else plan.counts)
        for name, plan in plans.items()
    }
    title, rows = title_and_weights(terms, formulas)
    first = plan_of_first_term(plans)
    kinds = {"rows" if x.starts is None else "packed sequences" for x in first.shapes}
    rows += [
        ("step" if call.trains else "evaluation", _microbatches(call, first)),
        ("counts", counts_in_words(first.counts, " and ".join(sorted(kinds, reverse=True)))),
    ]
    if is_empty:
        later = "the first step with tokens gets such lines, too"
        rows.append(("empty", f"every token is masked or rejected; {later}"))
    if any(call.groups.cp_rank_in(x).size > 1 for x in first.shapes if x.starts is not None):
        rows.append(("split", f"{split}, over context-parallel ranks"))
    rows += further
    if call.trains:
        rows.append(("measured", measured_in_words(measured)))
    return in_lines(title, rows)


def audit_lines(measured: float | None, scale: MegatronScale) -> str:
    """The result of `checks.scaling`, and Megatron's scaling that was measured."""
    ranks = number_of(scale.data_parallel_size, "data-parallel rank")
    numbers = f"{number_of(scale.num_microbatches, 'microbatch')} on this rank of {ranks}"
    return in_lines(
        f"loss aggregation audit: {measured_in_words(measured)}",
        [("of", numbers), ("Megatron", scale.in_words())],
    )


def measured_in_words(measured: float | None) -> str:
    """The result of `checks.scaling`."""
    if measured is None:
        return "gradients are not measured, but trusted"
    return f"gradients are {measured:.6f} times the planned ones"


def _microbatches(call: Call, plan: StepPlan) -> str:
    kind = "data-parallel" if call.groups.dp_cp is None else "data- and context-parallel"
    ranks = number_of(dist.get_world_size(call.groups.count_group), f"{kind} rank")
    return f"{number_of(plan.counts.microbatches, 'microbatch')} on {ranks}"
