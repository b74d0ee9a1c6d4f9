"""The first lines of the log: the hook's losses, counts and settings in its first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_loss_agg.collectives import ranks_of
from megatron_loss_agg.describe import (
    counts_in_words,
    formula,
    in_lines,
    number_of,
    print_lines,
    title_and_weights,
)
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.checks.ids import warn_of_restarting_ids
from megatron_loss_agg.mcore.scale import MegatronScale
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.plan import StepPlan, plan_of_first_term

if TYPE_CHECKING:
    from megatron_loss_agg.mcore.hook import LossHook


def is_printing_rank(call: Call) -> bool:
    """True on one rank of a model: the first one of the last pipeline stage."""
    groups = call.groups
    is_first = not any(dist.get_rank(group) for group in (groups.dp, groups.cp, groups.tp))
    return groups.is_last_stage and is_first


def print_first_lines(
    hook: LossHook, call: Call, plans: Mapping[str, StepPlan], without_tokens: bool
) -> None:
    """Print once for a step with tokens; before it, once for a step without, and an evaluation."""
    kind, printed = "step" if call.trains else "evaluation", hook.verified.printed
    if without_tokens:
        kind = f"empty {kind}"
    if {"step", kind} & printed:
        return
    printed.add(kind)
    if is_printing_rank(call):
        rows = [(name, str(value)) for name, value in hook.settings.items()]
        if hook.also:
            rows.append(("also", ", ".join(x.label for x in hook.also)))
        factor = hook.verified.factor
        print_lines(*first_lines(call, plans, without_tokens, _split_in_words(hook), factor, rows))
        warn_of_restarting_ids(plans)


def print_end_counted_lines(hook: LossHook, call: Call, denominator: float) -> None:
    """Print the lines of the first step with tokens that was counted at its end."""
    if not is_printing_rank(call):
        return
    formulas = {name: formula(term.aggregation) for name, term in call.terms.items()}
    title, rows = title_and_weights(call.terms, formulas)
    rows.append(("step", f"counted at its end; the denominator of this one is {denominator:.10g}"))
    if call.groups.cp_size > 1:
        rows.append(("split", f"{_split_in_words(hook)}, over context-parallel ranks"))
    rows += [(name, str(value)) for name, value in hook.settings.items()]
    rows.append(("measured", factor_in_words(hook.verified.factor)))
    print_lines(title, rows)


def first_lines(
    call: Call,
    plans: Mapping[str, StepPlan],
    without_tokens: bool,
    split: str,
    factor: float | None,
    extra_rows: Iterable[tuple[str, str]],
) -> tuple[str, list[tuple[str, str]]]:
    """The terms, counts and settings of a training step or of one call of an evaluation.

    Args:
        without_tokens: True if every token is masked or rejected.
        factor: the measured gradients as a multiple of the planned ones; None if not measured.
        extra_rows: more lines, each a label and its text.

    Returns:
        a title, and a text for each label.
    """
    formulas = {
        name: formula(plan.aggregation, None if without_tokens else plan.counts)
        for name, plan in plans.items()
    }
    title, rows = title_and_weights(call.terms, formulas)
    plan = plan_of_first_term(plans)  # counts of microbatches and samples are the same for all
    rows += [
        ("step" if call.trains else "evaluation", _microbatches(call, plan)),
        ("counts", _counts(plan)),
    ]
    if without_tokens:
        later = "such lines are also printed for the first step with tokens"
        rows.append(("empty", f"every token is masked or rejected; {later}"))
    if any(call.groups.cp_rank_in(x).size > 1 for x in plan.shapes if x.starts is not None):
        rows.append(("split", f"{split}, over context-parallel ranks"))
    rows += extra_rows
    if call.trains:
        rows.append(("measured", factor_in_words(factor)))
    return title, rows


def audit_lines(factor: float | None, scale: MegatronScale) -> str:
    """The factor as in `first_lines`, and the Megatron scaling that it was measured under."""
    ranks = number_of(scale.data_parallel_size, "data-parallel rank")
    numbers = f"{number_of(scale.num_microbatches, 'microbatch')} on this rank of {ranks}"
    return in_lines(
        f"loss aggregation audit: {factor_in_words(factor)}",
        [("of", numbers), ("Megatron", scale.in_words())],
    )


def factor_in_words(factor: float | None) -> str:
    if factor is None:
        return "gradients are not measured, but trusted"
    return f"gradients are {factor:.6f} times the planned ones"


def _split_in_words(hook: LossHook) -> str:
    return hook.split if hook.verified.splits else f"{hook.split} (not verified)"


def _counts(plan: StepPlan) -> str:
    kinds = sorted({_kind_of_sample(x) for x in plan.microbatches}, reverse=True)
    are_losses = bool(kinds) and all(x.has_losses_by_sample for x in plan.microbatches)
    return counts_in_words(plan.counts, " and ".join(kinds), "loss" if are_losses else "token")


def _kind_of_sample(microbatch: Microbatch) -> str:
    if microbatch.has_losses_by_sample:
        sequences = microbatch.sequences
        are_pairs = sequences and sequences.num_samples == 2 * microbatch.num_samples
        return "pairs" if are_pairs else "one loss each"
    return "rows" if microbatch.sample_starts is None else "packed sequences"


def _microbatches(call: Call, plan: StepPlan) -> str:
    kind = "data-parallel" if call.groups.dp_cp is None else "data- and context-parallel"
    ranks = number_of(ranks_of(call.groups.count_group), f"{kind} rank")
    return f"{number_of(plan.counts.microbatches, 'microbatch')} on {ranks}"
