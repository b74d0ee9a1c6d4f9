"""The plan of one optimizer step: counts over all ranks, and the weight of every token."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, LossAggregation, Term, Unit, named_terms
from megatron_loss_agg.coefficients import StepCoefficients
from megatron_loss_agg.collectives import abandon, abandoning_on_error
from megatron_loss_agg.counting.exchange import Counted, LocalTerm, count_step
from megatron_loss_agg.counting.samples import Samples, read_terms
from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.microbatch import BY_SAMPLE, Ids, Microbatch, MicrobatchOfTerms, listed
from megatron_loss_agg.tensors import at_least_fp32, check_tensors, in_dtype
from megatron_loss_agg.weighted_sum import (
    custom_weights,
    times_coefficient,
    times_factors,
    token_weights_of,
    weighted_sum,
    where_weighted,
)

_WEIGHT_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class StepPlan(StepCoefficients):
    """The weight of every token of this rank's microbatches, exact for the whole step.

    Built by `build`, `build_terms` (for a loss of several terms) or `from_mask_sums` (from sums
    alone). It holds copies of the microbatches, which later edits of the originals do not reach.
    """

    aggregation: LossAggregation
    """What it was made for."""
    microbatches: Sequence[Microbatch]
    """Copies of this rank's, in order; empty in a plan from mask sums."""
    active_tokens: Sequence[int]
    """Positions with a nonzero mask, of each microbatch; empty in a plan from mask sums."""
    counted: Counted
    """From which `group_sums` are read."""

    @classmethod
    def build(
        cls,
        agg: LossAggregation,
        microbatches: Sequence[Microbatch],
        group: dist.ProcessGroup | None = None,
        *,
        sharded_over: dist.ProcessGroup | None = None,
    ) -> StepPlan:
        """Count the step over all ranks, in two collectives.

        Masks are whole (every context-parallel rank has the same full mask): ``group`` is the
        data-parallel group *without* context parallelism. Or they are sharded, and masks and
        offsets are this rank's local ones: ``sharded_over`` is the context-parallel group,
        ``group`` the combined data-and-context-parallel group.

        Args:
            agg: the same on every rank.
            microbatches: this rank's, for the whole step. Their number may differ between ranks.
            group: the ranks that share the step; None for one process.

        Raises:
            DataError: bad values or missing ids on this rank.
            OptionError: ``agg`` is not a `LossAggregation`, or differs between ranks.
            PeerError: bad input on another rank; every rank of ``group`` raises.
        """
        return cls.build_terms({"": agg}, microbatches, group, sharded_over=sharded_over)[""]

    @staticmethod
    def build_terms(
        terms: Mapping[str, Term | LossAggregation],
        microbatches: Sequence[MicrobatchOfTerms],
        group: dist.ProcessGroup | None = None,
        *,
        sharded_over: dist.ProcessGroup | None = None,
        group_by: Sequence[Unit] = (),
    ) -> StepTerms:
        """`build` for a loss of several terms, each with a denominator of its own.

        Args:
            terms: by name, the same in the same order on every rank; a bare aggregation has
                coefficient 1.
            microbatches: where the terms' masks differ, mappings of term name to `Microbatch`.
            group_by: units with ids, such as ``"dataset"``, whose `groups` are needed whatever the
                modes use; the same on every rank.

        Raises:
            AggregationError: as `build`; OptionError also for bad ``terms``, DataError for
                ``group_by``.
        """
        with abandoning_on_error(group):
            if sharded_over is not None and group is None:
                raise DataError(
                    "sharded_over without group; expected the combined data-and-context-parallel "
                    "group"
                )
            named = named_terms(terms)
            if unknown := [unit for unit in group_by if unit not in BY_ID]:
                raise DataError(f"group_by={unknown}; expected some of {', '.join(BY_ID)}")
            read = read_terms(named, listed(microbatches))
            local = {
                name: LocalTerm(term.aggregation, samples, sharded_over, tuple(group_by))
                for (name, term), (_, samples) in zip(named.items(), read, strict=True)
            }
        parts = zip(local.items(), count_step(local, group), read, strict=True)
        plans = {
            name: StepPlan(
                **vars(counted.coefficients),
                aggregation=term.agg,
                microbatches=own,
                active_tokens=term.samples.active_tokens,
                counted=counted,
            )
            for (name, term), counted, (own, _) in parts
        }
        return StepTerms(named, plans)

    @classmethod
    def from_mask_sums(
        cls,
        agg: LossAggregation,
        mask_sums: Any,
        *,
        prompt_ids: Ids | Sequence[Ids] | None = None,
        rollout_ids: Ids | Sequence[Ids] | None = None,
        dataset_ids: Ids | Sequence[Ids] | None = None,
        ids: Mapping[str, Ids | Sequence[Ids]] | None = None,
        rejected: Tensor | Sequence[Tensor] | None = None,
        sample_weights: Tensor | Sequence[Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StepPlan:
        """A plan from mask sums alone, for loops that apply the `coefficients` themselves.

        A controller that knows the samples of all ranks calls this with ``group=None`` and sends
        each rank its slice.

        Args:
            mask_sums: the mask sum of each sample, [samples], in any form that converts to an fp64
                tensor; or a list of such vectors, one for each microbatch.
            prompt_ids, rollout_ids, dataset_ids, ids, rejected, sample_weights: as in
                `Microbatch`, for all samples in order; or a list, one entry for each microbatch.
            group: the data-parallel ranks that share the step; None if all samples are here.

        Raises:
            DataError: sums that are not vectors of finite numbers >= 0.
            OptionError: mode ``custom``, whose function needs masks.
            DataError, OptionError, PeerError: as `build`.
        """
        with abandoning_on_error(group):
            given = prompt_ids, rollout_ids, dataset_ids, rejected, sample_weights
            of_names = {} if ids is None else ids
            samples = Samples.of_sums(mask_sums, dict(zip(BY_SAMPLE, given, strict=True)), of_names)
            (term,) = named_terms({"": agg}).values()
            local = LocalTerm(term.aggregation, samples, None)
            if agg.mode == "custom":
                raise OptionError("mode 'custom' needs masks; expected a call of StepPlan.build")
        (counted,) = count_step({"": local}, group)
        known = vars(counted.coefficients)
        return cls(**known, aggregation=agg, microbatches=(), active_tokens=(), counted=counted)

    @staticmethod
    def abandon(group: dist.ProcessGroup | None) -> None:
        """Call instead of a constructor on a rank that failed to read its step and raises.

        The other ranks then raise PeerError instead of hanging.
        """
        abandon(group)

    def weights(self, i: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Weights of microbatch ``i``, in ``dtype``, with the shape and device of its mask.

        Summed over all microbatches and data-parallel ranks, ``(w * token_loss).sum()`` is the
        aggregated loss of the step.

        Raises:
            DataError: a plan from mask sums; or a ``dtype`` in which weights would underflow.
            OptionError: a custom function returned something that cannot be weights.
        """
        if dtype not in _WEIGHT_DTYPES:
            raise DataError(
                f"weights in dtype {dtype!r}; expected a floating dtype with the range of fp32: "
                "torch.float32, torch.float64 or torch.bfloat16"
            )
        microbatch, function = self._microbatch(i), self.aggregation.function
        mask, starts, rejected = microbatch.loss_mask, microbatch.sample_starts, microbatch.rejected
        computed, kept = at_least_fp32(dtype), mask
        if function is None:
            w = token_weights_of(self.coefficients(i), mask, starts, computed)
        else:
            if rejected is not None:
                kept = token_weights_of((~rejected).double(), mask, starts, computed)
            w = custom_weights(functools.partial(function, self, i), mask, kept, computed)
        return in_dtype(times_factors(w, microbatch.token_factors), dtype)

    def group_sums(self, unit: Unit, i: int) -> Tensor:
        """Mask sum over the step of each sample's group, for microbatch ``i``: fp64 [samples].

        Raises:
            DataError: the mode does not use ``unit``, or a microbatch has no ids for it.
        """
        known = {"step", "microbatch", "sample", *self.groups_by_unit}
        if unit not in known:
            expected = ", ".join(sorted(known))
            raise DataError(f"no sums by {unit!r} in this plan; expected one of {expected}")
        return self._of_microbatch(self.counted.table.group_sums(unit)[self.counted.own], i)

    def scaled_advantages(self, i: int, advantages: Tensor) -> Tensor:
        """``w_t * A_t`` of microbatch ``i``, for a trainer that only sums its token losses.

        A policy loss is proportional to its advantage, so the sum of ``loss(w_t * A_t)`` over the
        step is that of ``w_t * loss(A_t)``. Tinker's ``importance_sampling`` and ``ppo`` losses are
        such sums, without a mask. Clipping depends on the sign of the advantage, so weights must be
        non-negative, as in all modes but ``custom``.

        A loss that compares the advantage with a constant, as a covariance clip or a threshold
        does, is not proportional to it: multiply its token losses by `weights` instead.

        Args:
            advantages: in the shape of the mask; masked positions become 0, whatever they hold.

        Raises:
            DataError: the shapes differ, or factors make weights negative; or as `weights`.
            OptionError: a custom aggregation has negative weights; or as `weights`.
        """
        mask = self._microbatch(i).loss_mask
        check_tensors(DataError, "real", loss_mask=mask, advantages=advantages)
        dtype = at_least_fp32(advantages.dtype)
        w, has_factors = self.weights(i, dtype), self.microbatches[i].token_factors is not None
        if has_factors and bool((w < 0).any()):
            raise DataError("negative token_factors flip advantages; expected factors >= 0")
        if self.aggregation.function is not None and bool((w < 0).any()):
            raise OptionError(
                "the aggregation function returned negative weights, which flip the sign of an "
                "advantage; expected non-negative ones to scale advantages with"
            )
        return where_weighted(w, advantages.to(w)) * w

    def _microbatch(self, i: int) -> Microbatch:
        if not self.microbatches and self.sizes:
            raise DataError(
                "weights of a plan from mask sums, which has no masks; expected StepPlan.build, or "
                "multiply your mask by coefficients(i)"
            )
        return self.microbatches[self._index(i)]


class StepTerms(dict[str, StepPlan]):
    """The plans of one step's terms, by name; built by `StepPlan.build_terms`.

    The loss of the step is the sum of ``coefficient * w_t * loss_t`` over terms, tokens,
    microbatches and ranks.
    """

    def __init__(self, terms: Mapping[str, Term], plans: Mapping[str, StepPlan]) -> None:
        super().__init__(plans)
        self.terms = dict(terms)

    @property
    def is_empty(self) -> bool:
        """Whether the plan of every term with a nonzero coefficient is empty."""
        return all(plan.is_empty for name, plan in self.items() if self.terms[name].coefficient)

    def weighted_sum(self, i: int, losses: Mapping[str, Tensor]) -> Tensor:
        """``sum over terms of coefficient * sum_t w_t * loss_t`` of microbatch ``i``; a scalar.

        Args:
            losses: token losses of every term, in the shape of the microbatch's mask.

        Raises:
            DataError: not exactly the terms' names, or losses of another shape.
            OptionError: as `StepPlan.weights`.
        """
        if losses.keys() != self.keys():
            raise DataError(
                f"losses {sorted(losses)} for the terms {sorted(self)}; expected one for each term"
            )
        parts = []
        for name, plan in self.items():
            w = plan.weights(i, at_least_fp32(losses[name].dtype))
            term, part = self.terms[name], weighted_sum(w, losses[name])
            parts.append(times_coefficient(term.coefficient, part, losses[name]))
        return torch.stack(parts).sum()
