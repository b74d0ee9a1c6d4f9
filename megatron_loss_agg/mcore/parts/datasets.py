"""Reports by data set: the mean over its tokens, and the aggregated loss of only its tokens.

With the weights ``w`` of a term, the aggregated loss of data set ``d`` is

- ``sum_{t in d} w_t loss_t / sum_{t in d} w_t`` for means: the same mean over only the tokens of
  ``d``, without groups that have none;
- ``sum_{t in d} w_t loss_t`` for sums (``sample_sum``, ``constant``, ``sum``) and ``custom``: the
  data set's part of the loss; the parts of all data sets add up to the loss.

For the mean over tokens, the weights are the mask. The divisors are sums over the whole step and
counted before it, so each rank reports its part of a quotient with `report_pair`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import Term, units_by_id
from megatron_loss_agg.collectives import broadcast_result, failing_together
from megatron_loss_agg.counting import coefficients
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.mcore.batches import changed_terms
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.reports import MicrobatchLoss, report_denominator, report_pair
from megatron_loss_agg.mcore.split import sums_of_samples
from megatron_loss_agg.microbatch import Microbatch, TermMicrobatches, term_microbatches
from megatron_loss_agg.plan import StepPlan, plan_of_first_term
from megatron_loss_agg.tensors import at_least_fp32, moved

NO_DATASET = -1
"""The id of all samples in an evaluation without ids, which reads a single data set."""

_ANOTHER_RANK_FAILED = "another rank has batches without ids of data sets. Fix its error first."
Divisors = Mapping[str, Mapping[int, float]]
"""By report ("lm", or a term), and by data set with tokens in the step."""


class DatasetReports(Extension):
    """Adds reports by data set: ``lm loss of dataset 3``, ``sample_mean loss of dataset 3``.

        hook = LossHook(LossAggregation(mode="sample_mean"), extensions=[DatasetReports()])

    The reports are exact for each training step and each call of an evaluation. Over the calls of
    an evaluation, Megatron adds up pairs, so a data set's mean is over its tokens, samples or
    groups in all calls. With ``--sft``, Megatron averages quotients, as for every loss that it
    reports: each call with tokens of the data set then has the same weight, whatever the number of
    tokens.

    A data set that is missing from the first step has mean NaN in the step where it first appears.
    Megatron leaves a name out of its log for an interval with NaN; otherwise it would also divide
    by the steps before.

    Raises:
        DataError: in a training step, a microbatch has no data set ids. An evaluation without them
            has no reports.
    """

    def __init__(self) -> None:
        self._has_trained = False
        self._seen: set[int] = set()  # data sets with tokens in any training step
        self._new: set[int] = set()  # data sets that are new in this step, if it is not the first
        # By `Call.trains`: an evaluation may come between the calls of a step.
        self._divisors: dict[bool, Divisors] = {}

    @contextmanager
    def around(self, call: Call, plans: Mapping[str, StepPlan] | None) -> Iterator[None]:
        if call.begins_step:
            is_first = call.trains and not self._has_trained
            with failing_together([call.groups.pp], _ANOTHER_RANK_FAILED, when=is_first):
                if call.trains:
                    _check_ids(plans)
            self._divisors[call.trains] = divisors = _divisors_of_step(call, plans)
            if call.trains:
                datasets = {*_datasets(divisors)}
                self._new = datasets - self._seen if self._has_trained else set()
                self._seen |= datasets
                self._has_trained = True
        yield

    @torch.no_grad()
    def on_loss(self, microbatch: MicrobatchLoss) -> None:
        call, plans = microbatch.call, microbatch.plans
        first = next(iter(plans))
        if first in microbatch.terms:
            term, shape = microbatch.terms[first], plans[first].shapes[microbatch.i]
            share = 1 / call.groups.cp_rank_in(shape).size if term.is_whole else 1.0
            self._report(microbatch, "lm", first, term.mask * share, is_mean=True)
        for name, weights in microbatch.weights.items():
            is_mean = plans[name].aggregation.within is not None
            self._report(microbatch, name, name, weights, is_mean)

    def _report(
        self, microbatch: MicrobatchLoss, label: str, name: str, weights: Tensor, is_mean: bool
    ) -> None:
        """Report ``sum w_t loss_t`` over the tokens of each data set; for a mean, over its divisor."""
        call, plan = microbatch.call, microbatch.plans[name]
        divisors = self._divisors[call.trains]
        denominator = 1.0 if label == "lm" else report_denominator(plan)
        ids = sorted(self._seen) if call.trains else _datasets(divisors)
        for d, part in _sums_on_rank(microbatch, ids, name, weights).items():
            divisor = divisors[label].get(d, 0.0) if is_mean else 1.0
            if divisor == 0 and not call.trains:
                # 0 / 0: NaN, unless another call of the evaluation has tokens of the data set.
                pair = part.new_zeros(2)
            elif divisor == 0 or (is_mean and call.trains and d in self._new):
                pair = part.new_full((2,), math.nan)
            else:
                pair = report_pair(call, plan, part / divisor, divisor * denominator)
            microbatch.report(f"{label} loss of dataset {d}", pair)


def _datasets(divisors: Divisors) -> list[int]:
    return sorted({d for by_dataset in divisors.values() for d in by_dataset})


def _sums_on_rank(
    microbatch: MicrobatchLoss, ids: Sequence[int], name: str, weights: Tensor
) -> dict[int, Tensor]:
    """By data set: the sum of ``weight * loss`` over its tokens on this rank.

    Summed in fp64. NaN or inf at a weight of 0 is ignored.
    """
    if not ids:
        return {}
    plan, i, losses = microbatch.plans[name], microbatch.i, microbatch.terms[name].losses
    w_T = weights.reshape(-1).double()
    products_T = losses.reshape(-1).double().masked_fill(w_T == 0, 0) * w_T
    sums_S = sums_of_samples(products_T, plan.shapes[i], microbatch.samples[name].starts)
    id_D, id_S = torch.tensor(ids), plan.ids("dataset", i)
    # Samples of a data set without tokens in the step have sum 0, wherever they are added.
    index_S = torch.searchsorted(id_D, id_S)
    sum_D = sums_S.new_zeros(len(ids) + 1)
    sum_D.index_add_(0, moved(index_S, sum_D.device), sums_S)
    return dict(zip(ids, sum_D[:-1].to(at_least_fp32(losses.dtype)), strict=True))


def _check_ids(plans: Mapping[str, StepPlan] | None) -> None:
    if any("dataset" not in plan.ids_S for plan in (plans or {}).values()):
        raise DataError(
            "reports by data set need ids in every batch, got a microbatch without. Give the batch "
            "key 'dataset_ids' (or Megatron's 'dataset_id'), or drop DatasetReports "
            "(--loss-aggregation-report-datasets)."
        )


def _divisors_of_step(call: Call, plans: Mapping[str, StepPlan] | None) -> Divisors:
    """The step's divisors, on every tensor-parallel rank; empty without ids or without a loss."""
    if plans is None or any("dataset" not in plan.ids_S for plan in plans.values()):
        return {}

    def divisors() -> dict[str, dict[int, float]]:
        mask_sums = {"lm": _sums_by_dataset(call, plan_of_first_term(plans), are_weighted=False)}
        return mask_sums | {
            name: _sums_by_dataset(call, plan, are_weighted=plan.aggregation.within is not None)
            for name, plan in plans.items()
        }

    return broadcast_result(divisors, call.groups.tp)


def _sums_by_dataset(call: Call, plan: StepPlan, are_weighted: bool) -> dict[int, float]:
    """The mask sum of each data set with tokens in the step, or the sum of its tokens' weights."""
    samples = plan.samples
    assert samples is not None  # since this rank reads data
    groups = samples.groups("dataset")
    sums = mask_sums = groups.sums(samples.mask_sum)
    if are_weighted:
        coefficient_S, _ = coefficients(plan.aggregation, samples, is_evaluation=not call.trains)
        sums = groups.sums(coefficient_S * samples.mask_sum)
    has_tokens = mask_sums > 0
    ids = groups.ids_G[has_tokens].tolist()
    return dict(zip(ids, sums[has_tokens].tolist(), strict=True))


def with_dataset_ids(
    terms: Mapping[str, Term], microbatches: list[TermMicrobatches]
) -> list[TermMicrobatches]:
    """The microbatches of an evaluation, with data set ids if ``terms`` group by them.

    If none of them has ids, all samples get `NO_DATASET`, since validation sets are often read one
    at a time and then lack ids.
    """
    if "dataset" not in units_by_id(terms):
        return microbatches
    if any(x.dataset_ids is not None for m in microbatches for x in term_microbatches(m)):
        return microbatches

    def changed(x: Microbatch) -> Microbatch:
        return replace(x, dataset_ids=torch.full((x.num_samples,), NO_DATASET))

    return [changed_terms(changed, m) for m in microbatches]
