"""Reports of the loss under further modes, beside the one that is trained on.

Each has coefficients of its own, from the same counts of the step, and costs one more weighted sum
of the same losses, without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import (
    LossAggregation,
    Term,
    Unit,
    aggregation_named,
    units_read,
)
from megatron_loss_agg.collectives import broadcast_result, failing_together
from megatron_loss_agg.counting import (
    Samples,
    StepCounts,
    check_fields,
    coefficients,
    counts_of,
)
from megatron_loss_agg.describe import plural
from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.local_weights import weights_on_rank
from megatron_loss_agg.mcore.reports import MicrobatchLoss, denominator_of, report_pair
from megatron_loss_agg.plan import StepPlan, plan_of_first_term
from megatron_loss_agg.weighted_sum import weighted_sum_unchecked

_ANOTHER_RANK_FAILED = (
    "another rank's batches lack what a mode of also= (--loss-aggregation-also) needs. Fix its error "
    "first."
)
_SAME = 1e-12
"""Relative difference of coefficients up to which two modes weigh all samples alike."""


class ModeReports(Extension):
    """Adds the loss of the first term under further modes, such as ``sample_mean loss``.

    A term with a name of its own is named before the mode: ``policy sample_mean loss``. Each number is
    that of a run in its mode, over one training step or the calls of an evaluation. An evaluation
    whose batches lack the ids that a mode needs has no report of it.

    Args:
        aggregations: as of `aggregations_beside`.

    Raises:
        DataError: in a training step: a microbatch without ids that a mode needs.
    """

    def __init__(self, aggregations: Sequence[LossAggregation]) -> None:
        self._aggregations = aggregations
        # By `Call.trains`: an evaluation may come between the calls of a step.
        self._plans: dict[bool, list[StepPlan]] = {}
        self._has_trained = False

    def before_step(self, call: Call, plans: Mapping[str, StepPlan] | None) -> None:
        is_first = call.trains and not self._has_trained
        with failing_together([call.groups.pp], _ANOTHER_RANK_FAILED, when=is_first):
            if plans is not None:
                self._plans[call.trains] = self._plans_of(call, plan_of_first_term(plans))
        self._has_trained |= call.trains

    def _plans_of(self, call: Call, plan: StepPlan) -> list[StepPlan]:
        """The plan of the step in every mode that is reported, on every tensor-parallel rank."""
        reported = [agg for agg in self._aggregations if _has_ids(plan, agg)]
        if call.trains and len(reported) < len(self._aggregations):
            raise _missing_ids(plan, self._aggregations)
        return replanned(call, plan, reported)

    @torch.no_grad()
    def on_loss(self, microbatch: MicrobatchLoss) -> None:
        call, i = microbatch.call, microbatch.i
        name, first = next(iter(microbatch.plans.items()))
        if name not in microbatch.terms:  # an evaluation may lack terms
            return
        term, starts = microbatch.terms[name], microbatch.starts[name]
        holders = call.groups.holders(first.shapes[i])
        of_term = "" if name == first.aggregation.label else f"{name} "
        for plan in self._plans[call.trains]:
            weights = weights_on_rank(plan, i, term, holders, starts)
            part = weighted_sum_unchecked(weights, term.losses)
            pair = report_pair(call, plan, part, denominator_of(plan))
            microbatch.report(f"{of_term}{plan.aggregation.label} loss", pair)

    def first_lines(self, plans: Mapping[str, StepPlan]) -> Mapping[str, str]:
        """The modes, and which of them and the loss's own are equal on this step."""
        plan = plan_of_first_term(plans)
        lines = {"also": ", ".join(x.label for x in self._aggregations)}
        modes = [plan.aggregation, *(x for x in self._aggregations if _has_ids(plan, x))]
        assert plan.samples is not None  # of the rank that prints
        equal = [] if plan.is_empty else equal_modes(modes, plan.samples)
        return {**lines, "equal": "; ".join(equal)} if equal else lines


def aggregations_beside(
    also: Sequence[str | LossAggregation], terms: Mapping[str, Term]
) -> list[LossAggregation]:
    """The aggregations of ``LossHook(also=)``.

    Args:
        also: modes, presets or aggregations. What they do not say of samples that are rejected or
            have weights, their own or those of data sets, is as in the first term.

    Raises:
        OptionError: not a sequence of modes with names of their own, or one that groups by ids that
            are not read.
    """
    if isinstance(also, (str, LossAggregation)) or not isinstance(also, Sequence):
        raise OptionError(
            f"also must be a list of modes, got {also!r}. Give also=['sample_mean'] "
            "(--loss-aggregation-also)."
        )
    first = next(iter(terms.values())).aggregation
    aggregations = [
        _beside(first, x if isinstance(x, LossAggregation) else aggregation_named(x)) for x in also
    ]
    labels = [first.label, *(agg.label for agg in aggregations)]
    if repeated := sorted({x for x in labels if labels.count(x) > 1}):
        raise OptionError(
            f"also must have modes that differ from each other and from the loss's own, got "
            f"{repeated[0]!r} twice. Remove it (also=, or --loss-aggregation-also), or give a "
            "LossAggregation with a name= of its own."
        )
    units = units_read(terms)
    for agg in aggregations:
        if others := sorted({*agg.by_id} - {*units}):
            raise OptionError(
                f"also must group by {', '.join(units)} or sample, whose ids are read, got "
                f"{others} in {agg.label!r}. Remove it (also=, or --loss-aggregation-also)."
            )
    return aggregations


def _beside(first: LossAggregation, agg: LossAggregation) -> LossAggregation:
    """``agg``, with the first term's options for samples where it leaves them open."""
    options = {
        name: getattr(first, name)
        for name in ("rejected", "sample_weights", "dataset_weights")
        if getattr(agg, name) is None
    }
    return replace(agg, **options)


def _has_ids(plan: StepPlan, agg: LossAggregation) -> bool:
    return plan.ids_S.keys() >= {*agg.by_id}


def _missing_ids(plan: StepPlan, aggregations: Sequence[LossAggregation]) -> DataError:
    agg = next(x for x in aggregations if not _has_ids(plan, x))
    unit = next(unit for unit in agg.by_id if unit not in plan.ids_S)
    return DataError(
        f"{agg.label!r} of also groups by {unit}, and a microbatch has no {unit}_ids. Give them in "
        f"every batch (the key '{unit}_ids', int64 [samples]), or remove that mode (also=, or "
        "--loss-aggregation-also)."
    )


def replanned(
    call: Call, plan: StepPlan, aggregations: Sequence[LossAggregation]
) -> list[StepPlan]:
    """``plan`` under other aggregations of its samples, on every tensor-parallel rank."""

    def of_samples() -> list[tuple[Tensor, StepCounts]]:
        """The coefficients of this rank's samples, and the counts of the step."""
        assert plan.samples is not None  # of a rank that reads data
        results = []
        for agg in aggregations:
            check_fields(agg, plan.microbatches)
            c_S, across = coefficients(agg, plan.samples)
            counts = counts_of(agg, plan.samples, across)
            results.append((c_S[plan.rows_S].clone(), counts))
        return results

    results = broadcast_result(of_samples, call.groups.tp, 0)
    return [
        replace(plan, aggregation=agg, coefficient_S=c_S, counts=counts)
        for agg, (c_S, counts) in zip(aggregations, results, strict=True)
    ]


def equal_modes(modes: Sequence[LossAggregation], samples: Samples) -> list[str]:
    """Sentences on modes that weigh all samples as one before them does."""
    by_sample = [coefficients(agg, samples)[0] for agg in modes]
    sentences = []
    for i, agg in enumerate(modes):
        for other, c_S in zip(modes[:i], by_sample, strict=False):
            if torch.allclose(by_sample[i], c_S, rtol=_SAME, atol=0.0):
                reason = _reason(agg, other, samples)
                because = f": {reason}" if reason else ""
                sentences.append(f"{agg.label} equals {other.label}{because}")
                break
    return sentences


def _reason(agg: LossAggregation, other: LossAggregation, samples: Samples) -> str:
    """A fact of the samples that makes two modes equal; empty for any other."""
    units = sorted((agg.units | other.units) - {"all"})
    groups = [samples.groups(unit) for unit in units]
    words = [_word(unit) for unit in units]
    if len(units) == 2 and torch.equal(*(_first_rows(x.group_S) for x in groups)):
        return f"each {words[0]} is one {words[1]}"
    sums = [x.sums(samples.mask_sum) for x in groups]
    if len(units) == 1 and len(sums[0]) == 1:
        return f"there is one {words[0]}"
    if units and all(bool((x == x[0]).all()) for x in sums):
        return f"all {' and '.join(map(plural, words))} have as many tokens"
    return ""


def _word(unit: Unit) -> str:
    return "data set" if unit == "dataset" else unit


def _first_rows(group_S: Tensor) -> Tensor:
    """For each sample, the first one of its group: alike for the same groups, however numbered."""
    rows = torch.arange(len(group_S))
    first_G = rows.new_full((int(group_S.max()) + 1 if len(group_S) else 0,), len(group_S))
    return first_G.scatter_reduce(0, group_S, rows, "amin")[group_S]
