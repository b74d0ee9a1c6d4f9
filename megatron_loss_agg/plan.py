"""The plan of one optimizer step: counts over all ranks, and the coefficient of every sample."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Term, Unit, named_terms, units_read
from megatron_loss_agg.collectives import gather_objects, ranks_of, send_failure
from megatron_loss_agg.counting import (
    RankRows,
    Samples,
    StepCounts,
    check_fields,
    coefficients,
    counts_of,
    joined_ranks,
    read_samples,
)
from megatron_loss_agg.describe import terms_in_words
from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.masks import brought_to_cpu, sums_by_sample
from megatron_loss_agg.microbatch import (
    Ids,
    Microbatch,
    MicrobatchOfTerms,
    MicrobatchShape,
    checked_by_sample,
    listed,
    of_term,
)
from megatron_loss_agg.tensors import at_least_fp32, check_tensors, described
from megatron_loss_agg.weighted_sum import weights_of_tokens

_WEIGHT_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The coefficient of every sample of this rank's microbatches, exact for the whole step.

    Built by `build`, `build_terms` (for a loss of several terms) or `from_mask_sums` (from sums
    alone). Vectors are on the CPU, with the samples of all microbatches in their order.
    """

    aggregation: LossAggregation
    """The aggregation of the step."""
    counts: StepCounts
    """Over all microbatches of all ranks."""
    sizes: Sequence[int]
    """Samples of each microbatch."""
    coefficient_S: Tensor
    """``c_s``, fp64; see `coefficients`."""
    mask_sum_S: Tensor
    """``M_s``, fp64; see `mask_sums`."""
    ids_S: Mapping[Unit, Tensor]
    """int64, by unit; see `ids`."""
    rows: RankRows
    """Of this rank's samples and microbatches in the table of all ranks."""
    has_split_packs: bool
    """Whether several ranks hold a microbatch of several samples; see `Microbatch.local_cp_size`."""
    shapes: Sequence[MicrobatchShape] = ()
    """Of each microbatch's whole mask; empty in a plan from mask sums."""
    model_tokens: Sequence[int] = ()
    """Tokens of each microbatch as Megatron counts them: its routed tokens, or its active ones."""
    positions: Sequence[int] = ()
    """Tokens of each microbatch that routers see: its routed tokens, or its mask's elements."""
    sequences: Sequence[Sequences | None] = ()
    """Of each microbatch with losses by sample, the token sequences behind them."""
    microbatches: Sequence[Microbatch] = ()
    """This rank's, in order; empty where masks are not at hand."""
    samples: Samples | None = None
    """Those of all ranks; None where they are not at hand."""

    @classmethod
    def build(
        cls,
        agg: LossAggregation,
        microbatches: Sequence[Microbatch],
        group: dist.ProcessGroup | None = None,
    ) -> StepPlan:
        """Count the step over all ranks, in two collectives.

        Masks are whole: every context-parallel rank has the same full mask. So ``group`` is the
        data-parallel group *without* context parallelism (of microbatches with ``local_cp_size``:
        with it). The plan holds copies of the microbatches, which later edits of the originals do
        not reach.

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
        microbatches: Sequence[MicrobatchOfTerms],
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, StepPlan]:
        """`build` for a loss of several terms, each with a denominator of its own: plans by name.

        The loss of the step is the sum of ``multiplier * w_t * loss_t`` over terms, tokens,
        microbatches and ranks.

        Args:
            terms: by name, the same in the same order on every rank; a bare aggregation has
                multiplier 1.
            microbatches: where the terms' masks differ, mappings of term name to `Microbatch`.

        Raises:
            AggregationError: as `build`; OptionError also for bad ``terms``.
        """
        return plan_step(terms, microbatches, group, copies=True)

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
            OptionError, DataError, PeerError: as `build`.
        """
        by_sample: dict[str, Any] = {
            "prompt_ids": prompt_ids,
            "rollout_ids": rollout_ids,
            "dataset_ids": dataset_ids,
            "rejected": rejected,
            "sample_weights": sample_weights,
        }

        def rows() -> list[Microbatch]:
            """A microbatch of samples with all of their mask in one token, for each vector."""
            vectors = _vectors(mask_sums)
            sizes = [len(x) for x in vectors]
            by_unit = _by_name(ids)
            fields = {
                name: _split(name, x, sizes) for name, x in by_sample.items() if x is not None
            }
            units = {unit: _split(f"{unit}_ids", x, sizes) for unit, x in by_unit.items()}
            return [
                Microbatch(
                    vector.unsqueeze(1),
                    ids={unit: parts[i] for unit, parts in units.items()},
                    **{name: parts[i] for name, parts in fields.items()},
                )
                for i, vector in enumerate(vectors)
            ]

        plan = plan_step({"": agg}, rows, group)[""]
        return replace(
            plan,
            counts=plan.counts._replace(active_tokens=None),
            shapes=(),
            model_tokens=(),
            positions=(),
            sequences=(),
            microbatches=(),
        )

    @staticmethod
    def abandon(group: dist.ProcessGroup | None) -> None:
        """Call instead of a constructor on a rank that failed to read its step and raises.

        The other ranks then raise PeerError instead of hanging.
        """
        send_failure(DataError("this rank could not read its step"), group)

    def __getstate__(self) -> dict[str, Any]:
        """Without masks and the samples of other ranks: a few numbers for each sample.

        Nor with a custom function, which may be a lambda, and has done its work.
        """
        aggregation = copy.copy(self.aggregation)
        object.__setattr__(aggregation, "function", None)
        return {**vars(self), "aggregation": aggregation, "microbatches": (), "samples": None}

    @property
    def is_empty(self) -> bool:
        """Whether every token of the whole step is masked or belongs to a rejected sample."""
        return self.counts.accepted_tokens == 0

    def coefficients(self, i: int) -> Tensor:
        """``c_s`` of each sample of microbatch ``i``, with ``w_t = m_t * c_s``: fp64 [samples].

        With the sample's own weight; 0 for rejected samples and for samples whose mask sum is 0.
        """
        return self._of_microbatch(self.coefficient_S, i)

    def mask_sums(self, i: int) -> Tensor:
        """Mask sum of each sample of microbatch ``i``, rejected ones included: fp64 [samples]."""
        return self._of_microbatch(self.mask_sum_S, i)

    def ids(self, unit: Unit, i: int) -> Tensor:
        """Ids by ``unit`` of the samples of microbatch ``i``, int64 [samples].

        Raises:
            DataError: some microbatch of the step has no such ids.
        """
        if unit not in self.ids_S:
            raise DataError(
                f"ids must be of one of {sorted(self.ids_S)} in this plan, got {unit!r}. Give "
                f"'{unit}_ids' in every microbatch."
            )
        return self._of_microbatch(self.ids_S[unit], i)

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

        A policy loss is proportional to its advantage, so the sum of ``loss(w_t * A_t)`` over the
        step is that of ``w_t * loss(A_t)``. Tinker's ``importance_sampling`` and ``ppo`` losses are
        such sums, without a mask. Clipping depends on the sign of the advantage, so weights must be
        non-negative, as in all modes but ``custom``.

        A loss that compares the advantage with a constant, as a covariance clip or a threshold
        does, is not proportional to it: multiply its token losses by `weights` instead.

        Args:
            advantages: in the shape of the mask; masked positions become 0, whatever they hold.

        Raises:
            DataError: the shapes differ, or as `weights`.
            OptionError: a custom aggregation has negative coefficients.
        """
        mask = self._microbatch(i).loss_mask
        check_tensors(DataError, "real", loss_mask=mask, advantages=advantages)
        if bool((self.coefficients(i) < 0).any()):
            raise OptionError(
                "coefficients that scale advantages must be >= 0, got negative ones, which would "
                "flip signs. Change the aggregation function, or multiply token losses by weights."
            )
        w = self.weights(i, at_least_fp32(advantages.dtype))
        return torch.where(w != 0, advantages.to(w), 0) * w

    @property
    def microbatch_rows(self) -> Tensor:
        """Rows of this rank's microbatches in the table of all ranks, int64 [microbatches]."""
        return self.rows.microbatches

    def sample_rows(self, i: int) -> Tensor:
        """Rows of the samples of microbatch ``i`` in the table of all ranks, int64 [samples]."""
        return self._of_microbatch(self.rows.samples, i)

    def _of_microbatch(self, x_S: Tensor, i: int) -> Tensor:
        """A copy of the part of ``x_S`` that is of microbatch ``i``."""
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

    Of several terms that of a pack, if there is one: it says more of the split than rows.
    """
    shapes = []
    for plan in plans.values():
        sequences = plan.sequences[i]
        shapes.append(plan.shapes[i] if sequences is None else sequences.shape)
    return next((x for x in shapes if x.starts is not None), shapes[0])


@dataclass(frozen=True, eq=False)
class Sequences:
    """The token sequences of one microbatch from which losses by sample are computed."""

    shape: MicrobatchShape
    mask_sum: Tensor  # fp64 [sequences]


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
    """Weights of a step that is one microbatch on one rank.

    ``(token_weights(agg, mask) * token_loss).sum()`` is the aggregated loss. Equivalent code for
    ``sample_mean`` on rows:

        sum((mask[s] * loss[s]).sum() / mask[s].sum() for s in range(batch)) / batch

    Args:
        loss_mask: [samples, seq] or, with ``cu_seqlens``, [tokens]. It and the others are as for
            `Microbatch`.

    Returns:
        ``dtype``, as for `StepPlan.weights`, in the shape of ``loss_mask``.

    Raises:
        AggregationError: as `Microbatch`, `StepPlan.build` and `StepPlan.weights`.
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
    terms: Mapping[str, Term | LossAggregation],
    microbatches: Any,
    group: dist.ProcessGroup | None,
    copies: bool = False,
) -> dict[str, StepPlan]:
    """`StepPlan.build_terms`; unless it ``copies``, plans refer to the given microbatches.

    Args:
        microbatches: a list; or a function that returns it, whose failure the other ranks learn of.
    """

    def read() -> _RankPart:
        items = listed(microbatches() if callable(microbatches) else microbatches)
        by_name = named_terms(terms)
        # Ranks compare them; one alone skips them, since small steps are fast.
        words = terms_in_words(by_name) if ranks_of(group) > 1 else ""
        return _RankPart.of(by_name, words, items, copies)

    parts = gather_objects(read, group, "reading the step")
    words = dict.fromkeys(part.words for part in parts)
    if len(words) > 1:
        raise OptionError(
            f"all ranks must have the same aggregations, got {' and '.join(words)}. Give every "
            "rank the same terms in the same order."
        )
    rank = 0 if group is None else dist.get_rank(group)
    return {
        name: _plan_of_term(
            term.aggregation, [part.samples[name] for part in parts], rank, parts[rank].local[name]
        )
        for name, term in named_terms(terms).items()
    }


@dataclass(frozen=True, eq=False)
class _LocalMicrobatches:
    """This rank's microbatches of one term."""

    microbatches: list[Microbatch]
    shapes: list[MicrobatchShape]
    sequences: list[Sequences | None]


@dataclass(frozen=True, eq=False)
class _RankPart:
    """One rank's part of the step, by term; other ranks get only words and samples."""

    words: str  # the terms, to compare them between ranks
    samples: dict[str, Samples]
    local: dict[str, _LocalMicrobatches]

    @classmethod
    def of(
        cls, terms: Mapping[str, Term], words: str, items: Sequence[Any], copies: bool
    ) -> _RankPart:
        part = cls(words, {}, {})
        shares_masks = not any(isinstance(x, Mapping) for x in items)
        first = next(iter(terms))
        for name, term in terms.items():
            microbatches = [of_term(name, x) for x in items]
            check_fields(term.aggregation, microbatches)
            if shares_masks and name != first:
                part.samples[name], part.local[name] = part.samples[first], part.local[first]
                continue
            if copies:
                microbatches = [m.copied() for m in microbatches]
            on_cpu = brought_to_cpu(microbatches)
            part.samples[name] = read_samples(on_cpu, units_read(terms))
            part.local[name] = _LocalMicrobatches(
                microbatches, [m.shape for m in on_cpu], [_sequences(m) for m in on_cpu]
            )
        return part

    def __getstate__(self) -> dict[str, Any]:
        return {"words": self.words, "samples": self.samples, "local": {}}


def _plan_of_term(
    agg: LossAggregation, parts: Sequence[Samples], rank: int, local: _LocalMicrobatches
) -> StepPlan:
    """The plan of one term, from the samples of each rank, and this rank's microbatches."""
    samples, rows_of_ranks = joined_ranks(parts)
    of_rank, rows = parts[rank], rows_of_ranks[rank]
    c_S, across = coefficients(agg, samples)
    sizes_M = torch.bincount(samples.microbatch, minlength=samples.microbatches)
    return StepPlan(
        aggregation=agg,
        counts=counts_of(agg, samples, across),
        sizes=[m.num_samples for m in local.microbatches],
        coefficient_S=c_S[rows.samples],
        mask_sum_S=of_rank.mask_sum,
        ids_S={unit: x[rows.samples] for unit, x in samples.ids.items()},
        rows=rows,
        has_split_packs=bool(((samples.holders > 1) & (sizes_M > 1)).any()),
        shapes=local.shapes,
        model_tokens=of_rank.model_tokens.tolist(),
        positions=of_rank.positions.tolist(),
        sequences=local.sequences,
        microbatches=local.microbatches,
        samples=samples,
    )


def _sequences(microbatch: Microbatch) -> Sequences | None:
    of_tokens = microbatch.sequences
    if of_tokens is None:
        return None
    return Sequences(of_tokens.shape, sums_by_sample([of_tokens]))


def _vectors(mask_sums: Any) -> list[Tensor]:
    """fp64 [samples] of each microbatch; all samples are one microbatch if there is no list."""
    is_list = isinstance(mask_sums, (list, tuple))
    # An empty list is a rank without microbatches.
    is_vector = not is_list or any(_is_number(x) for x in mask_sums)
    vectors = []
    for x in [mask_sums] if is_vector else mask_sums:
        vector = torch.as_tensor(x, dtype=torch.float64).detach().cpu()
        if vector.dim() != 1:
            raise DataError(
                "mask_sums must be a vector of numbers, one for each sample, or a list of such "
                f"vectors, got {described(vector)}. Flatten it."
            )
        vectors.append(vector)
    return vectors


def _by_name(ids: Any) -> Mapping[str, Any]:
    if ids is None:
        return {}
    if not isinstance(ids, Mapping):
        raise DataError(
            f"ids must be a mapping by unit, got a {type(ids).__name__}. Give {{unit: ids}}."
        )
    return ids


def _split(name: str, values: Any, sizes: Sequence[int]) -> list[Any]:
    """``values`` of each microbatch, whether they come by microbatch or for all samples at once."""
    is_list = isinstance(values, (list, tuple))
    is_vector = not is_list or any(isinstance(x, str) or _is_number(x) for x in values)
    if is_vector or (not values and sizes):
        return list(checked_by_sample(name, values, sum(sizes)).split(list(sizes)))
    if len(values) != len(sizes):
        raise DataError(
            f"{name} must have one entry for each of the {len(sizes)} microbatches of mask_sums, "
            f"or be one vector for all samples, got {len(values)} entries. Correct its length."
        )
    return [checked_by_sample(name, x, size) for x, size in zip(values, sizes, strict=True)]


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) or getattr(x, "ndim", 1) == 0
