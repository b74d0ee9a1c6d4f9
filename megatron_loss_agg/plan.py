"""The plan of one optimizer step: counts over all ranks, and the coefficient of every sample."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Term, Unit, named_terms, units_read
from megatron_loss_agg.collectives import broadcast, ranks_of
from megatron_loss_agg.counting import (
    Samples,
    Sequences,
    StepCounts,
    check_fields,
    coefficients,
    counts_of,
)
from megatron_loss_agg.describe import terms_in_words
from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.exchange import (
    RankTable,
    StepTable,
    TermsInWords,
    exchange,
    failing_in_exchange,
)
from megatron_loss_agg.ids import Ids, hashed
from megatron_loss_agg.mask_sums import microbatches_from
from megatron_loss_agg.microbatch import (
    Microbatch,
    MicrobatchShape,
    TermMicrobatches,
    listed,
    term_microbatch,
)
from megatron_loss_agg.tensors import at_least_fp32, check_tensors
from megatron_loss_agg.weighted_sum import weights_of_tokens

_WEIGHT_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class MicrobatchSums(NamedTuple):
    """The planned sums of one microbatch, over its tokens on all ranks."""

    mask: float
    weights: float
    absolute_weights: float


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The coefficient of every sample of this rank's microbatches, exact for the whole step.

    Built by `build`, `build_terms` (for a loss of several terms) or `from_mask_sums` (from sums
    alone). Vectors are on the CPU, with the samples of all microbatches in order.
    """

    aggregation: LossAggregation
    """The aggregation of the step."""
    counts: StepCounts
    """Counts over all microbatches of all ranks."""
    sizes: Sequence[int]
    """Number of samples of each microbatch."""
    coefficient_S: Tensor
    """``c_s``, fp64; see `coefficients`."""
    mask_sum_S: Tensor
    """``M_s``, fp64; see `mask_sums`."""
    ids_S: Mapping[Unit, Tensor]
    """int64, by unit; see `ids`."""
    microbatch_rows: Tensor
    """Rows of this rank's microbatches in the table of all ranks, int64 [microbatches]."""
    rows_S: slice | Tensor
    """Rows of this rank's samples in that table; see `sample_rows`."""
    shapes: Sequence[MicrobatchShape] = ()
    """Shape of each microbatch's mask. This and the next two are empty in a plan from mask sums."""
    model_tokens: Sequence[int] = ()
    """Tokens of each microbatch as Megatron counts them: routed tokens, otherwise active ones."""
    sequences: Sequence[Sequences | None] = ()
    """Token sequences of each microbatch with losses by sample."""
    microbatches: Sequence[Microbatch] = ()
    """This rank's microbatches; empty on ranks that do not read data."""
    samples: Samples | None = None
    """The samples of all ranks; None on ranks that do not read data."""

    @classmethod
    def build(
        cls,
        agg: LossAggregation,
        microbatches: Sequence[Microbatch],
        group: dist.ProcessGroup | None = None,
    ) -> StepPlan:
        """Count the step over all ranks, in two collectives.

        Masks are whole: every context-parallel rank has the same full mask. So ``group`` is the
        data-parallel group *without* context parallelism (but with it for microbatches that have a
        ``local_cp_size``). The plan holds copies of the microbatches, so later edits to the
        originals do not change it.

        Args:
            agg: the same on every rank.
            microbatches: this rank's, for the whole step. Their number may differ between ranks.
            group: the ranks that share the step; None for one process.

        Raises:
            DataError: bad values or missing ids on this rank.
            OptionError: ``agg`` is not a `LossAggregation`, or differs between ranks.
            PeerError: bad input on another rank; every rank of ``group`` raises.
        """
        return cls.build_terms({"": agg}, microbatches, group)[""]

    @staticmethod
    def build_terms(
        terms: Mapping[str, Term | LossAggregation],
        microbatches: Sequence[TermMicrobatches],
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, StepPlan]:
        """`build` for a loss of several terms, each with its own denominator: plans by name.

        The loss of the step is the sum of ``multiplier * w_t * loss_t`` over terms, tokens,
        microbatches and ranks. Terms with their own masks take two collectives each.

        Args:
            terms: by name, with the same terms in the same order on every rank; a bare aggregation
                has multiplier 1.
            microbatches: if the terms' masks differ, mappings of term name to `Microbatch`.

        Raises:
            AggregationError: see `build`; OptionError also for bad ``terms``.
        """
        with failing_in_exchange(group):
            checked_terms = named_terms(terms)
        return plan_step(checked_terms, units_read(checked_terms), microbatches, group, copies=True)

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
                `Microbatch`, in the same form as ``mask_sums``: for all samples, or a list with one
                entry for each microbatch.
            group: the data-parallel ranks that share the step; None if all samples are here.

        Raises:
            DataError: sums that are not vectors of finite numbers >= 0.
            OptionError, DataError, PeerError: see `build`.
        """
        by_sample: dict[str, Any] = {
            "prompt_ids": prompt_ids,
            "rollout_ids": rollout_ids,
            "dataset_ids": dataset_ids,
            "rejected": rejected,
            "sample_weights": sample_weights,
        }

        with failing_in_exchange(group):
            microbatches = microbatches_from(mask_sums, ids, by_sample)
        plan = cls.build_terms({"": agg}, microbatches, group)[""]
        return replace(
            plan,
            counts=plan.counts._replace(active_tokens=None),
            shapes=(),
            model_tokens=(),
            sequences=(),
            microbatches=(),
        )

    def __getstate__(self) -> dict[str, Any]:
        """A few numbers for each of this rank's samples, for ranks that do not read data.

        Masks, other ranks' samples and cached properties are left out. So is the aggregation, since
        a custom function may be a lambda: see `broadcast_plans`.
        """
        state = {x.name: getattr(self, x.name) for x in fields(self)}
        del state["aggregation"]
        return {**state, "microbatches": (), "samples": None}

    @property
    def is_empty(self) -> bool:
        """True if every token of the step is masked or belongs to a rejected sample."""
        return self.counts.accepted_tokens == 0

    def coefficients(self, i: int) -> Tensor:
        """``c_s`` of each sample of microbatch ``i``, with ``w_t = m_t * c_s``: fp64 [samples].

        Includes the sample's own weight; 0 for rejected samples and for samples with mask sum 0.
        """
        return self._microbatch_part(self.coefficient_S, i)

    @cached_property
    def sums(self) -> Sequence[MicrobatchSums]:
        """The planned sums of each microbatch."""
        if not self.sizes:
            return []
        c_S, mask_sum_S = self.coefficient_S, self.mask_sum_S
        columns = torch.stack([mask_sum_S, c_S * mask_sum_S, c_S.abs() * mask_sum_S], dim=1)
        sums = torch.segment_reduce(columns, "sum", lengths=torch.tensor(self.sizes))
        return [MicrobatchSums(*row) for row in sums.tolist()]

    def mask_sums(self, i: int) -> Tensor:
        """Mask sum of each sample of microbatch ``i``, including rejected ones: fp64 [samples]."""
        return self._microbatch_part(self.mask_sum_S, i)

    def ids(self, unit: Unit, i: int) -> Tensor:
        """Ids of the samples of microbatch ``i`` by ``unit``, int64 [samples].

        Raises:
            DataError: some microbatch of the step has no such ids.
        """
        if unit not in self.ids_S:
            raise DataError(
                f"the unit of ids must be one of {sorted(self.ids_S)} in this plan, got {unit!r}. "
                f"Give '{unit}_ids' in every microbatch."
            )
        return self._microbatch_part(self.ids_S[unit], i)

    def weights(self, i: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Weights of microbatch ``i``, in ``dtype``, with the shape and device of its mask.

        Summed over all microbatches and data-parallel ranks, ``(w * token_loss).sum()`` is the
        aggregated loss of the step.

        Raises:
            DataError: a plan without masks, or a ``dtype`` in which weights would underflow.
        """
        if dtype not in _WEIGHT_DTYPES:
            raise DataError(
                f"weights must have the range of fp32, got dtype {dtype!r}. Choose torch.float32, "
                "torch.float64 or torch.bfloat16."
            )
        mask, starts = self._microbatch(i).loss_mask, self._microbatch(i).sample_starts
        return weights_of_tokens(self.coefficients(i), mask, starts, dtype)

    def scaled_advantages(self, i: int, advantages: Tensor) -> Tensor:
        """``w_t * A_t`` of microbatch ``i``, for a trainer that only sums its token losses.

        A policy loss is proportional to its advantage, so over the step the sum of
        ``loss(w_t * A_t)`` equals the sum of ``w_t * loss(A_t)``. Tinker's ``importance_sampling``
        and ``ppo`` losses are such sums, without a mask. Clipping depends on the sign of the
        advantage, so weights must be non-negative, as they are in all modes except ``custom``.

        A loss that compares the advantage with a constant, like a covariance clip or a threshold,
        is not proportional to it: multiply its token losses by `weights` instead.

        Args:
            advantages: in the shape of the mask; masked positions become 0, whatever they hold.

        Raises:
            DataError: the shapes differ, or as in `weights`.
            OptionError: a custom aggregation has negative coefficients.
        """
        mask = self._microbatch(i).loss_mask
        check_tensors(DataError, "real", loss_mask=mask, advantages=advantages)
        if bool((self.coefficients(i) < 0).any()):
            raise OptionError(
                "coefficients that scale advantages must be >= 0, got negative ones, which would "
                "flip their signs. Change the aggregation function, or multiply token losses by "
                "weights instead."
            )
        w = self.weights(i, at_least_fp32(advantages.dtype))
        return torch.where(w != 0, advantages.to(w), 0) * w

    def sample_rows(self, i: int) -> Tensor:
        """Rows of the samples of microbatch ``i`` in the table of all ranks, int64 [samples]."""
        rows_S = self.rows_S
        if isinstance(rows_S, slice):
            rows_S = torch.arange(rows_S.start, rows_S.stop)
        return self._microbatch_part(rows_S, i)

    def _microbatch_part(self, x_S: Tensor, i: int) -> Tensor:
        """A copy of the part of ``x_S`` for microbatch ``i``."""
        i = self._index(i)
        return x_S[self._starts[i] : self._starts[i + 1]].clone()

    @cached_property
    def _starts(self) -> list[int]:
        return [*accumulate(self.sizes, initial=0)]

    def _index(self, i: Any) -> int:
        try:
            return range(len(self.sizes))[operator.index(i)]
        except (TypeError, IndexError):
            raise DataError(
                f"a microbatch of this plan must be an int from 0 to {len(self.sizes) - 1}, got "
                f"{i!r}. Count the microbatches of the step in order."
            ) from None

    def _microbatch(self, i: int) -> Microbatch:
        if not self.microbatches and self.sizes:
            raise DataError(
                "weights need masks, and this plan has none. Call StepPlan.build, or multiply your "
                "mask by coefficients(i)."
            )
        return self.microbatches[self._index(i)]


def plan_of_first_term(plans: Mapping[str, StepPlan]) -> StepPlan:
    """The plan of the term whose tokens Megatron counts."""
    return next(iter(plans.values()))


def token_shape(plans: Mapping[str, StepPlan], i: int) -> MicrobatchShape:
    """The shape of the tokens of microbatch ``i``, before context parallelism.

    With several terms, the shape of a pack if any term has one, since packs are split differently
    from rows.
    """
    shapes = []
    for plan in plans.values():
        sequences = plan.sequences[i]
        shapes.append(plan.shapes[i] if sequences is None else sequences.shape)
    return next((x for x in shapes if x.starts is not None), shapes[0])


def token_weights(
    agg: LossAggregation,
    loss_mask: Tensor,
    cu_seqlens: Tensor | None = None,
    prompt_ids: Ids | None = None,
    rollout_ids: Ids | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    cu_seqlens_padded: Tensor | None = None,
    dataset_ids: Ids | None = None,
    ids: Mapping[str, Ids] | None = None,
    sample_weights: Tensor | None = None,
) -> Tensor:
    """Weights of a step with a single microbatch on a single rank.

    ``(token_weights(agg, mask) * token_loss).sum()`` is the aggregated loss. Equivalent code for
    ``sample_mean`` on rows:

        sum((mask[s] * loss[s]).sum() / mask[s].sum() for s in range(batch)) / batch

    Args:
        loss_mask: [samples, seq] or, with ``cu_seqlens``, [tokens]. This and the other arguments
            are as in `Microbatch`.

    Returns:
        weights in ``dtype``, as from `StepPlan.weights`, in the shape of ``loss_mask``.

    Raises:
        AggregationError: as in `Microbatch`, `StepPlan.build` and `StepPlan.weights`.
    """
    microbatch = Microbatch(
        loss_mask,
        cu_seqlens,
        prompt_ids,
        rollout_ids,
        cu_seqlens_padded=cu_seqlens_padded,
        dataset_ids=dataset_ids,
        ids=ids or {},
        sample_weights=sample_weights,
    )
    return StepPlan.build(agg, [microbatch]).weights(0, dtype)


def plan_step(
    terms: Mapping[str, Term],
    units: Sequence[Unit],
    microbatches: Any,
    group: dist.ProcessGroup | None,
    copies: bool = False,
    is_evaluation: bool = False,
) -> dict[str, StepPlan]:
    """`StepPlan.build_terms`; without ``copies``, plans refer to the microbatches themselves.

    Args:
        units: the units whose ids are read, see `aggregation.units_read`.
        is_evaluation: see `coefficients`.
    """
    with failing_in_exchange(group):
        items = listed(microbatches)
        tables = _read_tables(terms, units, items, group, copies)
    step_tables = exchange(_in_words(tuple(terms.items())), tables, group)
    return {
        name: _plan_term(term.aggregation, step_tables[name], is_evaluation)
        for name, term in terms.items()
    }


@functools.lru_cache
def _in_words(terms: tuple[tuple[str, Term], ...]) -> TermsInWords:
    """The terms in words. They are cached, since they are the same in every step of a run."""
    words = terms_in_words(dict(terms))
    return TermsInWords(words, hashed(words))


def recounted(
    plan: StepPlan,
    i: int,
    units: Sequence[Unit],
    mask_sum_S: Tensor,
    active_tokens: int,
    rejected: Tensor | None,
) -> StepPlan:
    """The plan of microbatch ``i`` alone, with masks that its loss has decided.

    Args:
        plan: of a step that this rank has counted alone, with its microbatches.
        units: the units whose ids are read, see `aggregation.units_read`.
        mask_sum_S: ``M_s``, fp64 [samples], on the CPU.
        active_tokens: number of positions with a nonzero mask.
        rejected: samples that are rejected in addition to those that were read as rejected.

    Raises:
        DataError: there are rejected samples, and the aggregation does not say whether they count.
    """
    microbatch = plan.microbatches[i]
    if rejected is not None:
        before = microbatch.rejected
        rejected = rejected.bool().cpu() if before is None else before.cpu() | rejected.bool().cpu()
        microbatch = replace(microbatch, rejected=rejected)
        check_fields(plan.aggregation, [microbatch])
    table = RankTable([microbatch], units)
    table.samples = replace(
        table.samples, mask_sum=mask_sum_S, active_tokens=torch.tensor([active_tokens])
    )
    return _plan_term(plan.aggregation, StepTable.from_one_rank(table), is_evaluation=False)


def broadcast_plans(
    plans: Mapping[str, StepPlan] | None, terms: Mapping[str, Term], group: dist.ProcessGroup
) -> Mapping[str, StepPlan]:
    """The plans of rank 0 on all ranks of ``group``, with each rank's own aggregations.

    Raises:
        PeerError: rank 0 failed earlier, in `failing_in_broadcast`.
    """
    plans = broadcast(plans, group)
    for name, plan in plans.items():
        object.__setattr__(plan, "aggregation", terms[name].aggregation)
    return plans


def _read_tables(
    terms: Mapping[str, Term],
    units: Sequence[Unit],
    items: Sequence[TermMicrobatches],
    group: dist.ProcessGroup | None,
    copies: bool,
) -> dict[str, RankTable]:
    """This rank's table for each term: the same object for all terms if they share masks."""
    rank = 0 if group is None else dist.get_rank(group)
    shares_masks = not any(isinstance(x, Mapping) for x in items)
    has_function = any(term.aggregation.function is not None for term in terms.values())
    tables: dict[str, RankTable] = {}
    for name, term in terms.items():
        microbatches = [term_microbatch(name, x) for x in items]
        check_fields(term.aggregation, microbatches)
        if shares_masks and tables:
            tables[name] = next(iter(tables.values()))
            continue
        if has_function:  # which may group by any ids
            units = sorted({*units, *(unit for m in microbatches for unit in m.ids)})
        if copies:
            microbatches = [m.copied() for m in microbatches]
        tables[name] = RankTable(microbatches, units, rank, ranks_of(group))
    return tables


def _plan_term(agg: LossAggregation, table: StepTable, is_evaluation: bool) -> StepPlan:
    samples, rank_table, rows_S = table.samples, table.rank_table, table.sample_rows
    c_S, across = coefficients(agg, samples, is_evaluation)
    return StepPlan(
        aggregation=agg,
        counts=counts_of(agg, samples, across),
        sizes=rank_table.sizes,
        # Copies, since views would keep, and pickle, the samples of all ranks.
        coefficient_S=c_S[rows_S].clone(),
        mask_sum_S=rank_table.samples.mask_sum,
        ids_S={unit: x[rows_S].clone() for unit, x in samples.ids.items()},
        microbatch_rows=table.microbatch_rows,
        rows_S=rows_S,
        shapes=rank_table.shapes,
        model_tokens=rank_table.samples.model_tokens.tolist(),
        sequences=rank_table.sequences,
        microbatches=rank_table.microbatches,
        samples=samples,
    )
