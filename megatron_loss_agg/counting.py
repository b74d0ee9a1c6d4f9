"""Counts a step: one table of all ranks' samples gives every coefficient.

    w_t = m_t * c_s        c_s = v_s / (D * M_within * C * N_across)

Every rank has the samples of all ranks (see `exchange`) and computes the same coefficients from the
same table.

Suffixes: ``_S`` one number for each sample, ``_G`` one for each group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.aggregation import BY_ID, LossAggregation, Unit
from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.ids import ids_key
from megatron_loss_agg.microbatch import (
    BY_SAMPLE,
    Microbatch,
    MicrobatchShape,
    starts_at_zero_and_never_decreases,
)
from megatron_loss_agg.tensors import LARGEST_FP32, described, is_plain

_SMALLEST_FP32 = torch.finfo(torch.float32).tiny  # the smallest normal number


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a step, one row each: of one rank, or of all ranks in rank order.

    A function of mode ``custom`` gets the samples of all ranks. Vectors are on the CPU.
    """

    mask_sum: Tensor
    """``M_s``, fp64 [samples]."""
    weight: Tensor
    """``v_s``, fp64 [samples]; 1 without sample weights."""
    rejected: Tensor
    """bool [samples]."""
    microbatch: Tensor
    """int64 [samples]: the number of the sample's microbatch in the step."""
    ids: Mapping[Unit, Tensor] = field(default_factory=dict)
    """int64 [samples] by unit, such as ``ids["prompt"]``, for units that every microbatch has."""
    active_tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [microbatches]: positions with a nonzero mask."""
    routed_tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [microbatches]; -1 where not given."""
    _groups: dict[Unit, Groups] = field(default_factory=dict, init=False, repr=False)

    @property
    def microbatches(self) -> int:
        """Number of microbatches, including those without samples."""
        return len(self.active_tokens)

    @property
    def model_tokens(self) -> Tensor:
        """int64 [microbatches], as Megatron counts them: routed tokens, otherwise active ones."""
        return torch.where(self.routed_tokens < 0, self.active_tokens, self.routed_tokens)

    def copied(self) -> Samples:
        """A copy with a copy of every tensor."""
        tensors: Any = {k: x.clone() for k, x in vars(self).items() if isinstance(x, Tensor)}
        ids = {unit: x.clone() for unit, x in self.ids.items()}
        return replace(self, ids=ids, **tensors)

    def groups(self, unit: Unit) -> Groups:
        """The groups of ``unit`` among the samples, computed once for the table.

        Raises:
            DataError: some microbatch has no ids for this unit.
        """
        if unit not in self._groups:
            self._groups[unit] = self._compute_groups(unit)
        return self._groups[unit]

    def _compute_groups(self, unit: Unit) -> Groups:
        if unit == "all":
            zeros = torch.zeros_like(self.microbatch)
            return Groups(zeros[:1], zeros)
        if unit == "sample":
            rows = torch.arange(len(self.microbatch))
            return Groups(rows, rows)
        if unit == "microbatch":
            return Groups.of(self.microbatch)
        if unit not in self.ids:
            raise DataError(
                f"samples grouped by {unit!r} need its ids, got ids of {sorted(self.ids)}. Give "
                f"'{unit}_ids' in every microbatch."
            )
        return Groups.of(self.ids[unit])


class Groups(NamedTuple):
    """The group of each sample."""

    ids_G: Tensor  # int64, sorted and distinct
    group_S: Tensor  # int64: index of each sample's group

    @classmethod
    def of(cls, ids_S: Tensor) -> Groups:
        return cls(*torch.unique(ids_S, return_inverse=True))

    def sums(self, x_S: Tensor) -> Tensor:
        """The sum over each group, in the dtype of ``x_S``: [groups]."""
        return x_S.new_zeros(len(self.ids_G)).index_add_(0, self.group_S, x_S)


class StepCounts(NamedTuple):
    """Counts over the whole optimizer step: all microbatches of all data-parallel ranks."""

    tokens: float  # sum of the masks that count
    accepted_tokens: float  # without tokens of rejected samples
    all_tokens: float  # with tokens of rejected samples
    active_tokens: int | None  # positions with a nonzero mask; None in a plan from mask sums
    model_tokens: int  # as Megatron counts them: routed tokens, otherwise active ones
    microbatches: int
    all_samples: int
    rejected_samples: int
    samples: int  # only those that count; likewise for the groups below
    rollouts: int | None  # None: some microbatch has no such ids
    prompts: int | None
    datasets: int | None
    across: float  # N_across or V_across; 1 without an outer mean


@dataclass(frozen=True, eq=False)
class Sequences:
    """The token sequences that one microbatch's losses by sample are computed from."""

    shape: MicrobatchShape
    mask_sum: Tensor  # fp64 [sequences]

    @classmethod
    def of(cls, microbatch: Microbatch) -> Sequences:
        """The sequences of a ``microbatch`` on the CPU; DataError for bad values."""
        return cls(microbatch.shape, sums_by_sample([microbatch]))


def read_samples(microbatches: Sequence[Microbatch], units: Sequence[Unit]) -> Samples:
    """The samples of this rank's microbatches, which must be on the CPU.

    Args:
        units: their ids are read if every microbatch with samples has them.

    Raises:
        DataError: bad masks, offsets or sample weights.
    """
    sizes = [m.num_samples for m in microbatches]
    weights = _column(microbatches, "sample_weights", default=1.0)
    is_bad_S = ~((weights >= 0) & (weights < torch.inf))  # NaN is bad, too
    if bool(is_bad_S.any()):
        raise DataError(
            f"sample_weights must be finite and >= 0, got {weights[is_bad_S][0].item():g}. Correct "
            "them."
        )
    ids = {}
    for unit in units:
        columns = [m.ids_of(unit) for m in microbatches if m.num_samples]
        if all(x is not None for x in columns):
            ids[unit] = _concatenated(columns, torch.int64)
    routed = [-1 if m.routed_tokens is None else m.routed_tokens for m in microbatches]
    # Counting nonzero floats is slow.
    active = [int(m.loss_mask.bool().count_nonzero()) for m in microbatches]
    return Samples(
        mask_sum=sums_by_sample(microbatches),
        weight=weights,
        rejected=_column(microbatches, "rejected", default=False),
        microbatch=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes).long()),
        ids=ids,
        active_tokens=torch.tensor(active, dtype=torch.int64),
        routed_tokens=torch.tensor(routed, dtype=torch.int64),
    )


def sums_by_sample(microbatches: Sequence[Microbatch]) -> Tensor:
    """The mask sums of all samples of microbatches on the CPU: fp64 [samples].

    Raises:
        DataError: values or offsets that `Microbatch` does not allow.
    """
    sums = [_sums(microbatch, i) for i, microbatch in enumerate(microbatches)]
    return torch.cat([torch.empty(0, dtype=torch.float64), *sums])


def check_fields(agg: LossAggregation, microbatches: Sequence[Microbatch]) -> None:
    """Raise DataError unless microbatches have everything ``agg`` needs and nothing it ignores."""
    for name in ("rejected", "sample_weights"):
        if getattr(agg, name) is None and any(getattr(m, name) is not None for m in microbatches):
            raise DataError(
                f"a microbatch has {name}, and the aggregation does not say whether they count. "
                f"Set LossAggregation({name}='count') or 'skip' (--loss-aggregation-"
                f"{name.replace('_', '-')})."
            )
    have_weights = [m.sample_weights is not None for m in microbatches if m.num_samples]
    needs_weights = agg.sample_weights is not None and agg.dataset_weights is None
    if (needs_weights or any(have_weights)) and not all(have_weights):
        raise DataError(
            f"sample_weights={agg.sample_weights!r} needs a weight for each sample, and a "
            "microbatch has none. Give sample_weights= (the batch key 'sample_weights', floats "
            "[samples]), or leave out that option of the aggregation "
            "(--loss-aggregation-sample-weights)."
        )
    if "microbatch" in agg.units and any(m.local_cp_size is not None for m in microbatches):
        raise DataError(
            "a mean over microbatches needs the loop's microbatches, got samples that Megatron "
            "regroups in every step (dynamic context parallelism). Choose another mode."
        )
    for unit in agg.by_id:
        if any(m.ids_of(unit) is None for m in microbatches if m.num_samples):
            raise DataError(_missing_ids(agg, unit))


def counts_of(agg: LossAggregation, samples: Samples, across: float) -> StepCounts:
    """The counts of the whole step, from the samples of all ranks.

    Raises:
        DataError: only some of the microbatches have ``routed_tokens``.
    """
    num_routed = int((samples.routed_tokens >= 0).sum())
    if num_routed not in (0, samples.microbatches):
        raise DataError(
            f"all or none of a step's microbatches must have routed_tokens, got {num_routed} of "
            f"{samples.microbatches}. Give each Microbatch its own."
        )
    rejected_samples = int(samples.rejected.sum())
    is_skipping = agg.rejected == "skip" and rejected_samples > 0
    mask_S, counts_S = without_skipped(agg, samples)
    tokens = float(samples.mask_sum.sum())
    # Without rejected samples the sums are the same to the last bit.
    accepted = float(samples.mask_sum[~samples.rejected].sum()) if rejected_samples else tokens

    def number(unit: Unit) -> int | None:
        if unit not in samples.ids:
            return None
        groups = samples.groups(unit)
        # Without skipped samples every group counts.
        return int((groups.sums(counts_S) > 0).sum()) if is_skipping else len(groups.ids_G)

    return StepCounts(
        tokens=float(mask_S.sum()) if is_skipping else tokens,
        accepted_tokens=accepted,
        all_tokens=tokens,
        active_tokens=int(samples.active_tokens.sum()),
        model_tokens=int(samples.model_tokens.sum()),
        microbatches=samples.microbatches,
        all_samples=len(samples.mask_sum),
        rejected_samples=rejected_samples,
        samples=int(counts_S.sum()) if is_skipping else len(counts_S),
        rollouts=number("rollout"),
        prompts=number("prompt"),
        datasets=number("dataset"),
        across=across,
    )


def without_skipped(agg: LossAggregation, samples: Samples) -> tuple[Tensor, Tensor]:
    """Mask sums, and ones for the samples; both are 0 for skipped samples: fp64 [samples] each.

    A rejected sample is skipped if the aggregation leaves it out of the denominators.
    """
    if agg.rejected != "skip":
        return samples.mask_sum, torch.ones_like(samples.mask_sum)
    is_skipped_S = samples.rejected
    return samples.mask_sum.masked_fill(is_skipped_S, 0.0), (~is_skipped_S).double()


def coefficients(
    agg: LossAggregation, samples: Samples, is_evaluation: bool = False
) -> tuple[Tensor, float]:
    """``c_s`` of the samples of all ranks, fp64 [samples]; and ``N_across`` (or ``V_across``).

    A sample that is rejected or has no active tokens has coefficient 0.

    Args:
        is_evaluation: a data set without a weight in `dataset_weights` has weight 1.

    Raises:
        DataError: a group with two parents, or coefficients that fp32 cannot represent. All ranks
            raise it, since they have the same table.
        OptionError: a custom function returned something other than coefficients.
    """
    if agg.function is not None:
        c_S = _custom_coefficients(agg, samples)
        _check_range(c_S)
        return c_S, 1.0
    mask_S, counts_S = without_skipped(agg, samples)
    v_S = _sample_weights(agg, samples, is_evaluation)
    groups = {unit: samples.groups(unit) for unit in agg.units}

    def is_counted_G(unit: Unit) -> Tensor:
        """True for each group of ``unit`` that a mean includes: bool [groups]."""
        return groups[unit].sums(mask_S if agg.empty == "skip" else counts_S) > 0

    # M_within: the mask sum of the innermost group.
    within_S = torch.ones_like(mask_S)
    if agg.within is not None:
        within_S = groups[agg.within].sums(mask_S)[groups[agg.within].group_S]

    # C: on each inner level of the path, the number of groups with the same parent.
    siblings_S = torch.ones_like(mask_S)
    for outer, inner in pairwise(agg.path):
        parents, children = groups[outer], groups[inner]
        parent_G = torch.zeros_like(children.ids_G).index_copy_(
            0, children.group_S, parents.group_S
        )
        _check_one_parent(agg, samples, outer, inner, parent_G)
        number_G = torch.zeros(len(parents.ids_G), dtype=torch.float64)
        number_G.index_add_(0, parent_G, is_counted_G(inner).double())
        siblings_S = siblings_S * number_G[parents.group_S]

    # N_across, the number of outermost groups; or V_across, their weight.
    if agg.weighted == "all":
        tokens = float(mask_S.sum())
        across = float((v_S * mask_S).sum()) / tokens if tokens else 0.0
    elif agg.weighted is not None:
        weighted = groups[agg.weighted]
        tokens_G, samples_G = weighted.sums(mask_S), weighted.sums(counts_S)
        mean_by_token_G = weighted.sums(v_S * mask_S) / tokens_G
        mean_by_sample_G = weighted.sums(v_S * counts_S) / samples_G
        siblings_G = torch.ones_like(tokens_G).index_copy_(0, weighted.group_S, siblings_S)
        weight_G = torch.where(tokens_G > 0, mean_by_token_G, mean_by_sample_G) / siblings_G
        across = float(weight_G[is_counted_G(agg.weighted)].sum())
    elif agg.across is not None:
        across = float(is_counted_G(agg.across).sum())
    else:
        across = 1.0
    # Microbatches without samples are in no group but count as empty groups.
    if (agg.weighted or agg.across) == "microbatch" and agg.empty == "count":
        microbatches_with_samples = int(is_counted_G("microbatch").sum())
        across += samples.microbatches - microbatches_with_samples

    if across == 0:
        return torch.zeros_like(mask_S), across
    c_S = v_S * (agg.inverse_divisor / across) / (within_S * siblings_S)
    c_S = c_S.masked_fill(samples.rejected | (mask_S == 0), 0.0)
    _check_range(c_S)
    return c_S, across


def _sample_weights(agg: LossAggregation, samples: Samples, is_evaluation: bool) -> Tensor:
    """``v_s``, including the weight of the sample's data set."""
    weights = agg.dataset_weights
    if weights is None:
        return samples.weight
    datasets = samples.groups("dataset")
    ids = datasets.ids_G.tolist()
    missing = [d for d in ids if d not in weights]
    if is_evaluation:
        # Validation data have their own blend, which may contain other data sets.
        weights = {**weights, **dict.fromkeys(missing, 1.0)}
    elif missing:
        raise DataError(
            f"dataset_weights must have a weight for each data set of the step, got none for "
            f"{', '.join(map(str, missing[:4]))}. Add it (dataset_weights=, or "
            "--loss-aggregation-dataset-weights)."
        )
    weight_G = torch.tensor([weights[d] for d in ids], dtype=torch.float64)
    return samples.weight * weight_G[datasets.group_S]


def _custom_coefficients(agg: LossAggregation, samples: Samples) -> Tensor:
    assert agg.function is not None
    # The function may write into its samples, and other terms share this table.
    c_S: Any = agg.function(samples.copied())
    if not is_plain(c_S) or c_S.shape != samples.mask_sum.shape:
        raise OptionError(
            "the aggregation function must return a real coefficient for each of the "
            f"{len(samples.mask_sum)} samples, got {described(c_S)}. Change the function "
            "(function=, or --loss-aggregation-function)."
        )
    c_S = c_S.detach().to("cpu", torch.float64)
    c_S = c_S.masked_fill(samples.rejected | (samples.mask_sum == 0), 0.0)
    if not bool(c_S.isfinite().all()):
        raise OptionError(
            "the aggregation function must return finite coefficients, got infinite or NaN ones "
            "for samples with tokens. Change the function (function=, or "
            "--loss-aggregation-function)."
        )
    return c_S


def _check_one_parent(
    agg: LossAggregation, samples: Samples, outer: Unit, inner: Unit, parent_G: Tensor
) -> None:
    """Raise DataError if a group of ``inner`` is in two groups of ``outer``."""
    parents, children = samples.groups(outer), samples.groups(inner)
    strays = (parent_G[children.group_S] != parents.group_S).nonzero()
    if strays.numel():
        row = int(strays[0])
        child = children.group_S[row]
        ids = [int(parents.ids_G[x]) for x in (parent_G[child], parents.group_S[row])]
        raise DataError(
            f"each {inner} must be in one {outer} for the levels {' > '.join(agg.path)}, got the "
            f"{inner} {int(children.ids_G[child])} in the {outer}s {ids[0]} and {ids[1]}. Give ids "
            "that are unique over the whole step (batch keys "
            f"'{inner}_ids' and '{outer}_ids')."
        )


def _check_range(c_S: Tensor) -> None:
    """Raise DataError if a coefficient overflows in fp32, or is subnormal there."""
    size_S = c_S[c_S != 0].abs()
    if not size_S.numel():
        return
    least, largest = (float(x) for x in size_S.aminmax())
    if not (least >= _SMALLEST_FP32 and largest <= LARGEST_FP32):
        raise DataError(
            f"coefficients of samples must be in the range of fp32, got {least:.3g} to "
            f"{largest:.3g}. Give a loss_mask, sample_weights and divisor of moderate size."
        )


def _missing_ids(agg: LossAggregation, unit: Unit) -> str:
    if unit == "dataset" and agg.dataset_weights is not None:
        return (
            "dataset_weights are by data set, and a microbatch has no dataset_ids. Give dataset_ids= "
            "(the batch key 'dataset_ids', or Megatron's 'dataset_id'), or drop dataset_weights= "
            "(--loss-aggregation-dataset-weights)."
        )
    argument = f"{unit}_ids=" if unit in BY_ID else f"ids={{{unit!r}: ...}}"
    return (
        f"mode {agg.mode!r} groups by {unit}, and a microbatch has no {unit}_ids. Give {argument}, "
        f"or {ids_key(unit)} (with_ids keeps it where Megatron packs samples), or choose a mode "
        f"without {unit}s (--loss-aggregation)."
    )


def _column(microbatches: Sequence[Microbatch], name: str, default: float) -> Tensor:
    """The field ``name`` of all samples; ``default`` for microbatches without it."""
    dtype = BY_SAMPLE[name]
    values = [getattr(m, name) for m in microbatches]
    sizes = [m.num_samples for m in microbatches]
    if all(x is None for x in values):
        return torch.full((sum(sizes),), default, dtype=dtype)
    pairs = zip(values, sizes, strict=True)
    filled = [torch.full((n,), default, dtype=dtype) if x is None else x for x, n in pairs]
    return _concatenated(filled, dtype)


def _concatenated(parts: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """One vector; empty if there are no parts."""
    return torch.cat([torch.empty(0, dtype=dtype), *(x.detach().to(dtype) for x in parts)])


def _sums(microbatch: Microbatch, i: int) -> Tensor:
    """The mask sum of each sample of microbatch ``i`` of the step, fp64 [samples]."""
    mask = microbatch.loss_mask.detach()
    # As Python numbers, since half precision would round the limit to infinity.
    least, largest = (x.item() for x in mask.aminmax()) if mask.numel() else (0, 0)
    if not (least >= 0 and largest <= LARGEST_FP32):
        raise DataError(
            f"loss_mask must be finite, >= 0 and in the range of fp32 (mask_sums too), got values "
            f"from {least:g} to {largest:g} in microbatch {i}. Correct the mask."
        )
    if microbatch.cu_seqlens is None:
        return mask.sum(dim=1, dtype=torch.float64)
    bounds = _segment_bounds(microbatch, i)
    flat = mask.reshape(-1).double()
    sums = torch.segment_reduce(flat, "sum", offsets=bounds, unsafe=True)
    # Segments alternate: a sample, then the padding after it. The last sample is empty.
    sample_sums, padding_sums = sums[:-2:2], sums[1::2]
    if bool(padding_sums.any()):
        raise DataError(
            f"loss_mask must be 0 outside of all samples, got other values in microbatch {i}. Mask "
            "the padding, or correct cu_seqlens and cu_seqlens_padded."
        )
    return sample_sums


def _segment_bounds(microbatch: Microbatch, i: int) -> Tensor:
    """Segment boundaries of a pack: start and end of each sample in turn, then the end of the mask.

    int64 [2 * samples + 3]; the last sample is empty.

    Raises:
        DataError: see `sums_by_sample`.
    """
    assert microbatch.cu_seqlens is not None
    real, padded = microbatch.cu_seqlens.long(), microbatch.cu_seqlens_padded
    starts = real if padded is None else padded.long()
    bounds = torch.stack([starts, starts + pad(real.diff(), (0, 1))], dim=1).view(-1)
    bounds = pad(bounds, (0, 1), value=microbatch.loss_mask.numel())
    # Without padded offsets, the bounds are the real offsets.
    offsets = [bounds] if padded is None else [real, bounds]
    if not all(map(starts_at_zero_and_never_decreases, offsets)):
        raise DataError(
            "offsets must start at 0, never decrease, and end inside the mask, with samples no "
            f"longer than their padded lengths, got cu_seqlens={real.tolist()} and "
            f"cu_seqlens_padded={None if padded is None else padded.tolist()} for the "
            f"{microbatch.loss_mask.numel()} tokens of microbatch {i}. Correct them, or give the "
            "whole pack, not one rank's part."
        )
    return bounds
