"""Counts a step: one table of all ranks' samples, from which every coefficient is read.

    w_t = m_t * c_s        c_s = v_s / (D * M_within * C * N_across)

Every rank gathers the samples of all, and computes the same coefficients from the same table.

Suffixes: ``_S`` one number for each sample, ``_G`` one for each group, ``_M`` one for each microbatch
of each rank, ``_K`` one for each microbatch, however many ranks hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, LossAggregation, Unit
from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.masks import sums_by_sample
from megatron_loss_agg.microbatch import BY_SAMPLE, Microbatch
from megatron_loss_agg.tensors import LARGEST_FP32, described, is_plain

NO_DATASET = -1
"""The id of samples of an evaluation that reads one data set, without ids."""
_SMALLEST_FP32 = torch.finfo(torch.float32).tiny  # the smallest normal number


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a step, one row each: of one rank, or of all ranks in their order.

    A function of mode ``custom`` gets those of all ranks. Vectors are on the CPU.
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
    """int64 [samples] by unit, such as ``ids["prompt"]``; of units that every microbatch has."""
    active_tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [microbatches]: positions with a nonzero mask."""
    elements: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [microbatches]: elements of the mask."""
    routed_tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [microbatches]; -1 for a microbatch that does not say them."""
    holders: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [microbatches]: number of ranks that hold a part of the microbatch's tokens."""
    name: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [microbatches]: the same on all ranks that hold the microbatch."""

    @property
    def microbatches(self) -> int:
        """Number of microbatches, those without samples included."""
        return len(self.active_tokens)

    @property
    def model_tokens(self) -> Tensor:
        """int64 [microbatches], as Megatron counts them: routed tokens, or else active ones."""
        return torch.where(self.routed_tokens < 0, self.active_tokens, self.routed_tokens)

    @property
    def positions(self) -> Tensor:
        """int64 [microbatches], as routers see them: routed tokens, or else elements."""
        return torch.where(self.routed_tokens < 0, self.elements, self.routed_tokens)

    def __getstate__(self) -> dict[str, Any]:
        """With NumPy's arrays, which are pickled much faster than tensors."""
        arrays = {name: x.numpy() for name, x in vars(self).items() if isinstance(x, Tensor)}
        return {**arrays, "ids": {unit: x.numpy() for unit, x in self.ids.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ids = {unit: torch.from_numpy(x) for unit, x in state.pop("ids").items()}
        tensors = {name: torch.from_numpy(x) for name, x in state.items()}
        vars(self).update(tensors, ids=ids)

    def groups(self, unit: Unit) -> Groups:
        """The groups of ``unit`` among the samples.

        Raises:
            DataError: some microbatch has no ids of that unit.
        """
        if unit == "all":
            return Groups.of(torch.zeros_like(self.microbatch))
        if unit == "sample":
            rows = torch.arange(len(self.microbatch))
            return Groups(rows, rows)
        if unit == "microbatch":
            return Groups.of(self.microbatch)
        if unit not in self.ids:
            raise DataError(
                f"samples need ids to be grouped by {unit!r}, got those of {sorted(self.ids)}. Give "
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
    accepted_tokens: float  # without those of rejected samples
    all_tokens: float  # with them
    active_tokens: int | None  # positions with a nonzero mask; None in a plan from mask sums
    model_tokens: int  # as Megatron counts them: routed tokens, or else active ones
    positions: int  # as routers see them: routed tokens, or else elements of masks
    microbatches: int
    all_samples: int
    rejected_samples: int
    samples: int  # that count, as are the groups
    rollouts: int | None  # None: some microbatch has no ids
    prompts: int | None
    datasets: int | None
    across: float  # N_across or V_across; 1 without an outer mean


def read_samples(microbatches: Sequence[Microbatch], units: Sequence[Unit]) -> Samples:
    """The samples of this rank's microbatches, which are on the CPU.

    Args:
        units: whose ids are read, if every microbatch with samples has them.

    Raises:
        DataError: bad masks, offsets or sample weights.
    """
    sizes = [m.num_samples for m in microbatches]
    weights = _column(microbatches, "sample_weights", default=1.0)
    is_bad_S = ~(weights.isfinite() & (weights >= 0))
    if bool(is_bad_S.any()):
        raise DataError(
            f"sample_weights must be finite and >= 0, got {weights[is_bad_S][0].item():g}. Correct "
            "them."
        )
    ids = {}
    for unit in units:
        of_microbatches = [m.ids_of(unit) for m in microbatches if m.num_samples]
        if all(x is not None for x in of_microbatches):
            ids[unit] = _concatenated(of_microbatches, torch.int64)
    routed = [-1 if m.routed_tokens is None else m.routed_tokens for m in microbatches]
    # Of floats, counting nonzero ones is slow.
    active = [int(m.loss_mask.bool().count_nonzero()) for m in microbatches]
    return Samples(
        mask_sum=sums_by_sample(microbatches),
        weight=weights,
        rejected=_column(microbatches, "rejected", default=False),
        microbatch=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes).long()),
        ids=ids,
        active_tokens=torch.tensor(active, dtype=torch.int64),
        elements=torch.tensor([m.loss_mask.numel() for m in microbatches], dtype=torch.int64),
        routed_tokens=torch.tensor(routed, dtype=torch.int64),
        holders=torch.tensor([m.local_cp_size or 1 for m in microbatches], dtype=torch.int64),
        name=torch.tensor(
            [i if m.gid is None else m.gid for i, m in enumerate(microbatches)], dtype=torch.int64
        ),
    )


class RankRows(NamedTuple):
    """The rows of one rank's samples and microbatches in the table of all ranks."""

    samples: Tensor  # int64 [samples]
    microbatches: Tensor  # int64 [microbatches]


def joined_ranks(parts: Sequence[Samples]) -> tuple[Samples, list[RankRows]]:
    """The table of all ranks' samples, from those of each in rank order; and each rank's rows.

    A microbatch that several ranks hold is in the table once, as the first of them has it.

    Raises:
        DataError: the ranks that hold a microbatch are not the planned neighbours, or do not have
            the same masks, ids and weights; on all ranks alike.
    """
    everything = _concatenated_ranks(parts)
    of_rank_S = [len(x.mask_sum) for x in parts]
    of_rank_M = [x.microbatches for x in parts]
    if bool((everything.holders == 1).all()):
        rows_S = torch.arange(len(everything.mask_sum)).split(of_rank_S)
        rows_M = torch.arange(everything.microbatches).split(of_rank_M)
        return everything, [RankRows(*rows) for rows in zip(rows_S, rows_M, strict=True)]

    rank_M = torch.arange(len(parts)).repeat_interleave(torch.tensor(of_rank_M))
    first_M = rank_M - rank_M % everything.holders
    is_first_M = rank_M == first_M
    # Of each microbatch of each rank, the index of the one that it is a part of.
    keys = torch.stack([first_M, everything.name], dim=1)
    _, key_M = torch.unique(keys, dim=0, return_inverse=True)
    first_K = key_M.new_full((len(key_M),), -1)
    first_K[key_M[is_first_M]] = is_first_M.nonzero().view(-1)
    index_M = first_K[key_M]
    sizes_M = torch.bincount(everything.microbatch, minlength=len(rank_M))
    _check_holders(everything, rank_M, key_M, index_M, sizes_M)
    starts_M = sizes_M.cumsum(0) - sizes_M
    in_microbatch_S = torch.arange(len(everything.mask_sum)) - starts_M[everything.microbatch]
    index_S = starts_M[index_M[everything.microbatch]] + in_microbatch_S
    _check_holders_agree(everything, index_S, index_M)

    is_first_S = is_first_M[everything.microbatch]
    row_M, row_S = is_first_M.cumsum(0) - 1, is_first_S.cumsum(0) - 1
    table = _selected(everything, is_first_S, is_first_M, row_M)
    of_ranks = zip(
        row_S[index_S].split(of_rank_S),
        row_M[index_M].split(of_rank_M),
        strict=True,
    )
    return table, [RankRows(*rows) for rows in of_ranks]


def _check_holders(
    everything: Samples, rank_M: Tensor, key_M: Tensor, index_M: Tensor, sizes_M: Tensor
) -> None:
    """Raise DataError unless every microbatch is held by as many neighbours as it says.

    Args:
        key_M: the index of the microbatch.
        index_M: the row of the first rank that holds it; < 0 if that rank does not.
    """
    of_ranks = torch.unique(torch.stack([key_M, rank_M], dim=1), dim=0)
    ranks_K = torch.bincount(of_ranks[:, 0])  # that give the microbatch
    times_K = torch.bincount(key_M)  # that it is given, on all of them together
    is_wrong_M = (ranks_K != times_K)[key_M] | (ranks_K[key_M] != everything.holders)
    is_wrong_M |= (index_M < 0) | (sizes_M != sizes_M[index_M])
    if bool(is_wrong_M.any()):
        m = int((everything.holders * is_wrong_M).argmax())
        ranks = rank_M[key_M == key_M[m]].tolist()
        number = int(everything.holders[m])
        first = int(rank_M[m]) // number * number
        raise DataError(
            f"a microbatch with local_cp_size={number} must be given by the data- and "
            f"context-parallel ranks {first} to {first + number - 1}, once each and with the same "
            f"samples, got it on ranks {ranks}. Let one of Megatron's groups hold it, and give its gid "
            "where its index differs by rank."
        )


def _check_holders_agree(everything: Samples, index_S: Tensor, index_M: Tensor) -> None:
    """Raise DataError unless all ranks that hold a microbatch say the same of its samples."""
    by_sample = {
        "mask sums": everything.mask_sum,
        "sample_weights": everything.weight,
        "rejected": everything.rejected,
        **{f"{unit}_ids": x for unit, x in everything.ids.items()},
    }
    different = [name for name, x in by_sample.items() if bool((x != x[index_S]).any())]
    if bool((everything.model_tokens != everything.model_tokens[index_M]).any()):
        different.append("tokens")
    if different:
        raise DataError(
            "all ranks that hold a microbatch must give the same whole microbatch, got different "
            f"{', '.join(different)}. Give the batch before context parallelism."
        )


def _selected(
    everything: Samples, is_first_S: Tensor, is_first_M: Tensor, row_M: Tensor
) -> Samples:
    """The samples and microbatches of their first ranks alone."""
    return Samples(
        mask_sum=everything.mask_sum[is_first_S],
        weight=everything.weight[is_first_S],
        rejected=everything.rejected[is_first_S],
        microbatch=row_M[everything.microbatch[is_first_S]],
        ids={unit: x[is_first_S] for unit, x in everything.ids.items()},
        active_tokens=everything.active_tokens[is_first_M],
        elements=everything.elements[is_first_M],
        routed_tokens=everything.routed_tokens[is_first_M],
        holders=everything.holders[is_first_M],
        name=everything.name[is_first_M],
    )


def _concatenated_ranks(parts: Sequence[Samples]) -> Samples:
    """The samples of all ranks, one after the other."""
    firsts = accumulate((x.microbatches for x in parts), initial=0)
    microbatch = [x.microbatch + first for x, first in zip(parts, firsts, strict=False)]
    units = set.intersection(*({*x.ids} for x in parts))
    return Samples(
        mask_sum=torch.cat([x.mask_sum for x in parts]),
        weight=torch.cat([x.weight for x in parts]),
        rejected=torch.cat([x.rejected for x in parts]),
        microbatch=torch.cat(microbatch),
        ids={unit: torch.cat([x.ids[unit] for x in parts]) for unit in sorted(units)},
        active_tokens=torch.cat([x.active_tokens for x in parts]),
        elements=torch.cat([x.elements for x in parts]),
        routed_tokens=torch.cat([x.routed_tokens for x in parts]),
        holders=torch.cat([x.holders for x in parts]),
        name=torch.cat([x.name for x in parts]),
    )


def check_fields(agg: LossAggregation, microbatches: Sequence[Microbatch]) -> None:
    """Raise DataError unless the microbatches have all that ``agg`` needs, and nothing it ignores."""
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
            "a mean over microbatches needs those of the loop, got samples that Megatron deals out "
            "anew in every step (dynamic context parallelism). Choose another mode."
        )
    for unit in agg.by_id:
        if any(m.ids_of(unit) is None for m in microbatches if m.num_samples):
            raise DataError(_missing_ids(agg, unit))


def counts_of(agg: LossAggregation, samples: Samples, across: float) -> StepCounts:
    """The counts of the whole step, from the samples of all ranks.

    Raises:
        DataError: only some of the microbatches say their routed tokens.
    """
    mask_S, counts_S = counted(agg, samples)

    def number(unit: Unit) -> int | None:
        if unit != "sample" and unit not in samples.ids:
            return None
        return int((samples.groups(unit).sums(counts_S) > 0).sum())

    with_routed = int((samples.routed_tokens >= 0).sum())
    if with_routed not in (0, samples.microbatches):
        raise DataError(
            f"all microbatches of a step must have routed_tokens, or none, got {with_routed} of "
            f"{samples.microbatches}. Give each Microbatch its own."
        )
    return StepCounts(
        tokens=float(mask_S.sum()),
        accepted_tokens=float(samples.mask_sum[~samples.rejected].sum()),
        all_tokens=float(samples.mask_sum.sum()),
        active_tokens=int(samples.active_tokens.sum()),
        model_tokens=int(samples.model_tokens.sum()),
        positions=int(samples.positions.sum()),
        microbatches=samples.microbatches,
        all_samples=len(samples.mask_sum),
        rejected_samples=int(samples.rejected.sum()),
        samples=number("sample") or 0,
        rollouts=number("rollout"),
        prompts=number("prompt"),
        datasets=number("dataset"),
        across=across,
    )


def counted(agg: LossAggregation, samples: Samples) -> tuple[Tensor, Tensor]:
    """Each sample's mask sum and 1, as denominators see them: fp64 [samples] each.

    Both are 0 for a rejected sample that does not count.
    """
    is_skipped_S = samples.rejected & (agg.rejected == "skip")
    return samples.mask_sum.masked_fill(is_skipped_S, 0.0), (~is_skipped_S).double()


def coefficients(agg: LossAggregation, samples: Samples) -> tuple[Tensor, float]:
    """``c_s`` of the samples of all ranks, fp64 [samples]; and ``N_across`` (or ``V_across``).

    A sample that is rejected, or has no active token, has the coefficient 0.

    Raises:
        DataError: a group with two parents, or coefficients that fp32 cannot hold; on all ranks
            alike.
        OptionError: a custom function returned something else than coefficients.
    """
    if agg.function is not None:
        c_S = _custom_coefficients(agg, samples)
        _check_range(c_S)
        return c_S, 1.0
    mask_S, counts_S = counted(agg, samples)
    v_S = _weights_of(agg, samples)
    groups = {unit: samples.groups(unit) for unit in agg.units}

    def in_means_G(unit: Unit) -> Tensor:
        """Whether a mean over ``unit`` includes the group: bool [groups]."""
        return groups[unit].sums(mask_S if agg.empty == "skip" else counts_S) > 0

    # M_within: the mask sum of the innermost group.
    within_S = torch.ones_like(mask_S)
    if agg.within is not None:
        within_S = groups[agg.within].sums(mask_S)[groups[agg.within].group_S]

    # C: on each inner level of the path, how many groups have the same parent.
    siblings_S = torch.ones_like(mask_S)
    for outer, inner in pairwise(agg.path):
        parents, children = groups[outer], groups[inner]
        parent_G = torch.zeros_like(children.ids_G).index_copy_(
            0, children.group_S, parents.group_S
        )
        _check_one_parent(agg, samples, outer, inner, parent_G)
        number_G = torch.zeros(len(parents.ids_G), dtype=torch.float64)
        number_G.index_add_(0, parent_G, in_means_G(inner).double())
        siblings_S = siblings_S * number_G[parents.group_S]

    # N_across: the number of outermost groups; or V_across: their weight.
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
        across = float(weight_G[in_means_G(agg.weighted)].sum())
    elif agg.across is not None:
        across = float(in_means_G(agg.across).sum())
    else:
        across = 1.0
    # Microbatches without samples are in no group, and count as empty ones.
    if (agg.weighted or agg.across) == "microbatch" and agg.empty == "count":
        microbatches_with_samples = int(in_means_G("microbatch").sum())
        across += samples.microbatches - microbatches_with_samples

    if across == 0:
        return torch.zeros_like(mask_S), across
    c_S = v_S * (agg.inverse_divisor / across) / (within_S * siblings_S)
    c_S = c_S.masked_fill(samples.rejected | (mask_S == 0), 0.0)
    _check_range(c_S)
    return c_S, across


def _weights_of(agg: LossAggregation, samples: Samples) -> Tensor:
    """``v_s``, with the weight of the sample's data set."""
    if agg.dataset_weights is None:
        return samples.weight
    datasets = samples.groups("dataset")
    ids = datasets.ids_G.tolist()
    # Evaluations may read a set without an id, see `with_dataset_ids`: alone, it needs no weight.
    weights = {NO_DATASET: 1.0} if ids == [NO_DATASET] else agg.dataset_weights
    if missing := [d for d in ids if d not in weights]:
        raise DataError(
            f"dataset_weights must have a weight for each data set of the step, got none for "
            f"{', '.join(map(str, missing[:4]))}. Add it (dataset_weights=, or "
            "--loss-aggregation-dataset-weights)."
        )
    weight_G = torch.tensor([weights[d] for d in ids], dtype=torch.float64)
    return samples.weight * weight_G[datasets.group_S]


def _custom_coefficients(agg: LossAggregation, samples: Samples) -> Tensor:
    assert agg.function is not None
    c_S: Any = agg.function(replace(samples, mask_sum=samples.mask_sum.clone()))
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
            "the aggregation function must return finite coefficients, got infinite or NaN ones of "
            "samples with tokens. Change the function (function=, or --loss-aggregation-function)."
        )
    return c_S


def _check_one_parent(
    agg: LossAggregation, samples: Samples, outer: Unit, inner: Unit, parent_G: Tensor
) -> None:
    """Raise DataError if a group of ``inner`` lies in two groups of ``outer``."""
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
    """Raise DataError where fp32 overflows or has less than 24 bits."""
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
        f"mode {agg.mode!r} groups by {unit}, and a microbatch has no {unit}_ids. Give {argument} "
        f"(the batch key '{unit}_ids', int64 [samples], which with_ids keeps where Megatron packs "
        f"samples), or choose a mode without {unit}s (--loss-aggregation)."
    )


def _column(microbatches: Sequence[Microbatch], name: str, default: float) -> Tensor:
    """The field ``name`` of all samples; ``default`` for microbatches without it."""
    dtype = BY_SAMPLE[name]
    values = []
    for m in microbatches:
        x = getattr(m, name)
        values.append(torch.full((m.num_samples,), default, dtype=dtype) if x is None else x)
    return _concatenated(values, dtype)


def _concatenated(parts: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """One vector; empty if there are no parts."""
    return torch.cat([torch.empty(0, dtype=dtype), *(x.detach().to(dtype) for x in parts)])
