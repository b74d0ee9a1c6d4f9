"""Reports by data set: the mean over its tokens, and the aggregated loss of its tokens alone.

With the weights ``w`` of a term, the aggregated loss of data set ``d`` is

- ``sum_{t in d} w_t loss_t / sum_{t in d} w_t`` for means: the same mean over the tokens of ``d``
  alone, without groups that have none;
- ``sum_{t in d} w_t loss_t`` for sums (``sample_sum``, ``constant``, ``sum``) and ``custom``: its
  part of the loss; the parts of all data sets add up to it.

Both divisors, ``M_d`` and ``sum_{t in d} w_t``, are of the whole step and known before it, so each
rank reports its part of a quotient by `report_pair`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.collectives import broadcast_result, failing_together
from megatron_loss_agg.counting import coefficients
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.reports import MicrobatchLoss, denominator_of, report_pair
from megatron_loss_agg.mcore.split import sums_of_samples
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.tensors import at_least_fp32, moved

_ANOTHER_RANK_FAILED = "another rank has batches without ids of data sets. Fix its error first."


class DatasetSums(NamedTuple):
    """Sums over the tokens of one data set in the whole step, of one term."""

    mask_sum: float  # M_d, with rejected samples
    weight_sum: float


@dataclass(frozen=True)
class _Reported:
    """The reports of one step's, or of one evaluation call's, microbatches."""

    ids: Sequence[int]  # of the data sets
    without_mean: Collection[int]  # those whose means are NaN
    sums: Mapping[str, Mapping[int, DatasetSums]]  # by term and id

    def mean(
        self,
        call: Call,
        plan: StepPlan,
        d: int,
        part: Tensor,
        divisor: float,
        denominator: float,
    ) -> Tensor:
        """[2]: this rank's part of the mean ``sum part / divisor`` of a data set."""
        has_no_weight = divisor == 0 and call.trains  # an evaluation has more calls
        if has_no_weight or d in self.without_mean:
            return part.new_full((2,), math.nan)
        return report_pair(call, plan, part / (divisor or 1.0), denominator)

    def sums_of(self, name: str, d: int) -> DatasetSums:
        """Zeros for a data set without tokens in the step."""
        return self.sums[name].get(d, DatasetSums(0.0, 0.0))


class DatasetReports(Extension):
    """Adds reports by data set: ``lm loss of dataset 3``, ``sample_mean loss of dataset 3``.

        hook = LossHook(LossAggregation(mode="sample_mean"), extensions=[DatasetReports()])

    Exact for each training step and each call of an evaluation. Over the calls of an evaluation
    Megatron adds up pairs, so that a data set's mean is over its tokens, samples or groups of all
    calls. Under ``--sft`` Megatron averages quotients: there each call with tokens of the data set
    weighs the same, however many it has, as it does for every loss that Megatron reports.

    Args:
        log_interval: over how many steps Megatron's log averages.

    Raises:
        DataError: in a training step: a microbatch without ids of data sets. In an evaluation there
            are then no reports.
    """

    def __init__(self, log_interval: int = 1) -> None:
        self._log_interval = log_interval
        self._steps = 0  # of training
        self._first_step: dict[int, int] = {}  # by id: the training step that had it first
        # By `Call.trains`: an evaluation may come between the calls of a step.
        self._reported: dict[bool, _Reported] = {}

    @contextmanager
    def around(self, call: Call, plans: Mapping[str, StepPlan] | None) -> Iterator[None]:
        if call.begins_step:
            self._prepare(call, plans)
        yield

    def _prepare(self, call: Call, plans: Mapping[str, StepPlan] | None) -> None:
        if call.trains:
            with failing_together([call.groups.pp], _ANOTHER_RANK_FAILED, when=self._steps == 0):
                _check_ids(plans)
        sums = {} if plans is None else _sums_of_step(call, plans)
        present = {d for of_term in sums.values() for d in of_term}
        if call.trains:
            self._reported[True] = self._of_training_step(present, sums)
        else:
            self._reported[False] = _Reported(sorted(present), set(), sums)

    def _of_training_step(
        self, present: set[int], sums: Mapping[str, Mapping[int, DatasetSums]]
    ) -> _Reported:
        """The report of a training step whose tokens are of the data sets ``present``.

        Megatron's log averages a name over the steps of its interval, with 0 for those before its
        first report, and leaves out NaN. So a data set's mean is NaN in a step without its tokens,
        and in the first `log_interval` steps of a data set that the run's first step lacks.
        """
        for d in present:
            self._first_step.setdefault(d, self._steps)
        recent = max(0, self._steps - self._log_interval)
        ids = sorted(self._first_step)
        without_mean = {d for d in ids if self._first_step[d] > recent or d not in present}
        self._steps += 1
        return _Reported(ids, without_mean, sums)

    @torch.no_grad()
    def on_loss(self, microbatch: MicrobatchLoss) -> None:
        call, plans = microbatch.call, microbatch.plans
        reported = self._reported[call.trains]
        if not reported.ids:
            return
        first = next(iter(plans))
        if first in microbatch.terms:
            term = microbatch.terms[first]
            shape = plans[first].shapes[microbatch.i]
            share = 1 / call.groups.cp_rank_in(shape).size if term.is_whole else 1.0
            mask = term.mask * share
            for d, part in _sums_on_rank(microbatch, reported.ids, first, mask).items():
                mask_sum = reported.sums_of(first, d).mask_sum
                pair = reported.mean(call, plans[first], d, part, mask_sum, mask_sum)
                microbatch.report(f"lm loss of dataset {d}", pair)
        for name, weights in microbatch.weights.items():
            plan = plans[name]
            for d, part in _sums_on_rank(microbatch, reported.ids, name, weights).items():
                if plan.aggregation.within is None:
                    pair = report_pair(call, plan, part, denominator_of(plan))
                else:
                    weight_sum = reported.sums_of(name, d).weight_sum
                    denominator = weight_sum * denominator_of(plan)
                    pair = reported.mean(call, plan, d, part, weight_sum, denominator)
                microbatch.report(f"{name} loss of dataset {d}", pair)


def _sums_on_rank(
    microbatch: MicrobatchLoss, of_ids: Sequence[int], name: str, weights: Tensor
) -> dict[int, Tensor]:
    """By data set: the sum of ``weight * loss`` over its tokens on this rank.

    Summed in fp64. NaN or inf at a weight of 0 is ignored.
    """
    plan, i, losses = microbatch.plans[name], microbatch.i, microbatch.terms[name].losses
    w_T = weights.reshape(-1).double()
    products_T = losses.reshape(-1).double().masked_fill(w_T == 0, 0) * w_T
    sums_S = sums_of_samples(products_T, plan.shapes[i], microbatch.starts[name])
    ids, id_S = torch.tensor(of_ids), plan.ids("dataset", i)
    # Data sets that have no token in the step are not among the ids.
    index_S = torch.searchsorted(ids, id_S).where(torch.isin(id_S, ids), len(ids))
    sums = sums_S.new_zeros(len(ids) + 1)
    sums.index_add_(0, moved(index_S, sums.device), sums_S)
    return dict(zip(of_ids, sums[:-1].to(at_least_fp32(losses.dtype)), strict=True))


def _check_ids(plans: Mapping[str, StepPlan] | None) -> None:
    for plan in (plans or {}).values():
        if "dataset" not in plan.ids_S:
            raise DataError(
                "reports by data set need ids in every batch, got a microbatch without. Give the batch "
                "key 'dataset_ids' (or Megatron's 'dataset_id'), or drop DatasetReports "
                "(--loss-aggregation-report-datasets)."
            )


def _sums_of_step(call: Call, plans: Mapping[str, StepPlan]) -> dict[str, dict[int, DatasetSums]]:
    """By term and data set, on every tensor-parallel rank; empty where a microbatch has no ids."""
    if any("dataset" not in plan.ids_S for plan in plans.values()):
        return {}

    def of_terms() -> dict[str, dict[int, DatasetSums]]:
        return {name: _sums_by_dataset(plan) for name, plan in plans.items()}

    return broadcast_result(of_terms, call.groups.tp, 0)


def _sums_by_dataset(plan: StepPlan) -> dict[int, DatasetSums]:
    """Of the data sets with tokens in the step, from the samples of all ranks."""
    samples = plan.samples
    assert samples is not None  # of this rank, which reads data
    groups = samples.groups("dataset")
    mask_sums = groups.sums(samples.mask_sum)
    weight_sums = torch.zeros_like(mask_sums)
    if plan.aggregation.within is not None:  # only means divide by them
        coefficient_S, _ = coefficients(plan.aggregation, samples)
        weight_sums = groups.sums(coefficient_S * samples.mask_sum)
    rows = zip(groups.ids_G.tolist(), mask_sums.tolist(), weight_sums.tolist(), strict=True)
    return {d: DatasetSums(*sums) for d, *sums in rows if sums[0] > 0}
