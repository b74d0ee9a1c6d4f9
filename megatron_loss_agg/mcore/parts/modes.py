"""Reports of the loss under modes other than the trained one, and of the weights of samples.

A further mode has its own coefficients, from the same counts of the step. It costs one more weighted
sum of the same losses, without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import (
    LossAggregation,
    Term,
    aggregation_named,
    units_read,
)
from megatron_loss_agg.collectives import broadcast_result, failing_together
from megatron_loss_agg.counting import StepCounts, check_fields, coefficients, counts_of
from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.ids import ids_key
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.reports import MicrobatchLoss, aggregated_pair
from megatron_loss_agg.mcore.split import TermSamples, weights_on_rank
from megatron_loss_agg.plan import StepPlan, plan_of_first_term
from megatron_loss_agg.weighted_sum import weighted_sum_unchecked

_ANOTHER_RANK_FAILED = (
    "another rank's batches lack what a mode of also= (--loss-aggregation-also) needs. Fix its error "
    "first."
)


class ModeReports(Extension):
    """Adds the loss of the first term under further modes, such as ``sample_mean loss``.

    If the term is not named after its mode, its name comes first: ``policy sample_mean loss``. Each
    number equals that of a run in its mode, over one training step or the calls of an evaluation.
    If an evaluation's batches lack the ids that a mode needs, it does not report that mode.

    Args:
        aggregations: as in `also_aggregations`.

    Raises:
        DataError: in a training step, a microbatch lacks ids that a mode needs.
    """

    def __init__(self, aggregations: Sequence[LossAggregation]) -> None:
        self._aggregations = aggregations
        # By `Call.trains`: an evaluation may come between the calls of a step.
        self._plans: dict[bool, list[StepPlan]] = {}
        self._samples: dict[bool, list[TermSamples]] = {}
        self._has_trained = False

    @contextmanager
    def around(self, call: Call, plans: Mapping[str, StepPlan] | None) -> Iterator[None]:
        if call.begins_step:
            is_first = call.trains and not self._has_trained
            with failing_together([call.groups.pp], _ANOTHER_RANK_FAILED, when=is_first):
                if plans is not None:
                    first = plan_of_first_term(plans)
                    reported = self._reported_plans(call, first)
                    self._plans[call.trains] = reported
                    self._samples[call.trains] = [TermSamples(call, plan) for plan in reported]
            self._has_trained |= call.trains
        yield

    def _reported_plans(self, call: Call, plan: StepPlan) -> list[StepPlan]:
        """The plan of the step in every reported mode, on every tensor-parallel rank."""
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
        term = microbatch.terms[name]
        prefix = "" if name == first.aggregation.label else f"{name} "
        pairs = zip(self._plans[call.trains], self._samples[call.trains], strict=True)
        for plan, samples in pairs:
            weights = weights_on_rank(samples.in_microbatch(i, term), term)
            part = weighted_sum_unchecked(weights, term.losses)
            pair = aggregated_pair(call, plan, part)
            microbatch.report(f"{prefix}{plan.aggregation.label} loss", pair)


def also_aggregations(
    also: Sequence[str | LossAggregation], terms: Mapping[str, Term]
) -> list[LossAggregation]:
    """The aggregations of ``LossHook(also=)``.

    Args:
        also: modes, presets or aggregations. Options for rejected samples and for weights of
            samples or data sets are taken from the first term unless they are set.

    Raises:
        OptionError: not a sequence of modes with different names, or a mode that groups by ids that
            are not read.
    """
    if isinstance(also, (str, LossAggregation)) or not isinstance(also, Sequence):
        raise OptionError(
            f"also= must be a list of modes, got {also!r}. Give also=['sample_mean'] "
            "(--loss-aggregation-also)."
        )
    first = next(iter(terms.values())).aggregation
    aggregations = [
        _inherit_options(first, x if isinstance(x, LossAggregation) else aggregation_named(x))
        for x in also
    ]
    labels = [first.label, *(agg.label for agg in aggregations)]
    if repeated := sorted({x for x in labels if labels.count(x) > 1}):
        raise OptionError(
            "also= must have modes that differ from each other and from the loss's own, got "
            f"{repeated[0]!r} twice. Remove it (also=, or --loss-aggregation-also), or give a "
            "LossAggregation with a name= of its own."
        )
    units = units_read(terms)
    for agg in aggregations:
        if others := sorted({*agg.by_id} - {*units}):
            raise OptionError(
                f"also= must group by {', '.join(units)} or sample, whose ids are read, got "
                f"{others} in {agg.label!r}. Remove it (also=, or --loss-aggregation-also)."
            )
    return aggregations


def _inherit_options(first: LossAggregation, agg: LossAggregation) -> LossAggregation:
    """``agg``, with the first term's options for samples where ``agg`` does not set them."""
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
        f"{agg.label!r} in also= groups by {unit}, and a microbatch has no {unit}_ids. Give them "
        f"in every batch, as {ids_key(unit)}, or remove that mode (also=, or "
        "--loss-aggregation-also)."
    )


def replanned(
    call: Call, plan: StepPlan, aggregations: Sequence[LossAggregation]
) -> list[StepPlan]:
    """``plan`` under other aggregations of its samples, on every tensor-parallel rank."""

    def replan() -> list[tuple[Tensor, StepCounts]]:
        """The coefficients of this rank's samples, and the counts of the step."""
        assert plan.samples is not None  # since this rank reads data
        results = []
        for agg in aggregations:
            check_fields(agg, plan.microbatches)
            c_S, across = coefficients(agg, plan.samples, is_evaluation=not call.trains)
            counts = counts_of(agg, plan.samples, across)
            results.append((c_S[plan.rows_S].clone(), counts))
        return results

    results = broadcast_result(replan, call.groups.tp)
    return [
        replace(plan, aggregation=agg, coefficient_S=c_S, counts=counts)
        for agg, (c_S, counts) in zip(aggregations, results, strict=True)
    ]


class Unevenness(NamedTuple):
    """Measures of how uneven the samples' weights ``W_s = c_s * M_s`` are."""

    effective_samples: float
    """``(sum W)^2 / sum W^2``, the effective sample size."""
    longest_tenth: float
    """The share of ``sum W`` on the tenth of the samples with the most tokens."""

    @classmethod
    def of(cls, mask_sum_S: Tensor, coefficient_S: Tensor) -> Unevenness:
        """From all samples with a nonzero weight; 0 and 0 if these weights sum to 0.

        Samples of equal length at the boundary of the longest tenth are split evenly.
        """
        weight_S = mask_sum_S * coefficient_S
        is_weighed_S = weight_S != 0
        weight_S, mask_sum_S = weight_S[is_weighed_S], mask_sum_S[is_weighed_S]
        total = weight_S.sum()
        if not len(weight_S) or total == 0:
            return cls(0.0, 0.0)
        lengths_L, length_S = torch.unique(mask_sum_S, return_inverse=True)  # in ascending order
        number_L = torch.bincount(length_S, minlength=len(lengths_L)).double().flip(0)
        weight_L = weight_S.new_zeros(len(lengths_L)).index_add_(0, length_S, weight_S).flip(0)
        longer_L = number_L.cumsum(0) - number_L
        share_L = ((0.1 * len(weight_S) - longer_L) / number_L).clamp(0, 1)
        return cls(
            float(total.square() / weight_S.square().sum()),
            float((share_L * weight_L).sum() / total),
        )


class WeightReports(Extension):
    """Adds ``effective samples`` and ``weight of longest tenth`` to the reports of training steps.

        hook = LossHook(LossAggregation(mode="token_mean"), extensions=[WeightReports()])

    Both are numbers of the whole step, under the first term's aggregation; see `Unevenness`.
    """

    def __init__(self) -> None:
        self._unevenness = Unevenness(0.0, 0.0)

    @contextmanager
    def around(self, call: Call, plans: Mapping[str, StepPlan] | None) -> Iterator[None]:
        if call.begins_step and call.trains and plans is not None:
            plan = plan_of_first_term(plans)
            self._unevenness = broadcast_result(lambda: _unevenness(plan), call.groups.tp)
        yield

    def on_loss(self, microbatch: MicrobatchLoss) -> None:
        if microbatch.call.trains:
            effective_samples, longest_tenth = map(microbatch.constant_pair, self._unevenness)
            microbatch.report("effective samples", effective_samples)
            microbatch.report("weight of longest tenth", longest_tenth)


def _unevenness(plan: StepPlan) -> Unevenness:
    """The unevenness over the samples of all ranks, on ranks that read data."""
    assert plan.samples is not None
    coefficient_S, _ = coefficients(plan.aggregation, plan.samples)
    return Unevenness.of(plan.samples.mask_sum, coefficient_S)
