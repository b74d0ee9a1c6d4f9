"""The weights of this rank's tokens, made in the loss function from its own mask.

    w_t = m_t * c_[sample of t]

Suffixes: ``_S`` samples of a microbatch, ``_T`` this rank's tokens of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.collectives import fitting
from megatron_loss_agg.errors import GroupError, HostError, LayoutError, MaskError
from megatron_loss_agg.layout import CPLayout
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.mcore.reading.keys import HOW_TO_READ
from megatron_loss_agg.mcore.reading.late import check_mask
from megatron_loss_agg.mcore.reading.model_calls import ModelCall
from megatron_loss_agg.mcore.splits import Splits, only
from megatron_loss_agg.mcore.step import PlannedTerm
from megatron_loss_agg.weights import at_least_fp32, moved, sample_coefficients, token_weights_of


@dataclass(frozen=True)
class LocalSamples:
    """Which of this rank's tokens of a microbatch are of which sample."""

    number: int  # of samples
    starts: Tensor | None  # int64 [samples + 1], among this rank's tokens; None: rows

    def shaped(self, x_T: Tensor) -> Tensor:
        """Rows as [samples, tokens of each]; packs flat."""
        if self.starts is not None:
            return x_T.reshape(-1)
        if x_T.dim() == 2 and len(x_T) == self.number:
            return x_T
        return x_T.reshape(self.number, x_T.numel() // max(self.number, 1))

    def sums(self, x_T: Tensor) -> Tensor:
        """The sum over each sample's tokens, [samples]; at least fp32, of packs fp64."""
        x_T = self.shaped(x_T)
        if self.starts is None:
            return x_T.sum(dim=1, dtype=at_least_fp32(x_T.dtype))
        # The tokens of a sample are added one after the other. Those of none are left out.
        lengths = pad(moved(self.starts, x_T.device), (0, 1), value=x_T.numel()).diff()
        return torch.segment_reduce(x_T.double(), "sum", lengths=lengths, unsafe=True)[:-1]


@dataclass(frozen=True)
class LocalWeights:
    """One microbatch of one term on this rank."""

    samples: LocalSamples
    coefficient_S: Tensor  # fp64, on the CPU or on the mask's device
    copies: int  # context-parallel ranks that have the same tokens
    layouts: Mapping[str, CPLayout]  # by split, where ranks split tokens and it matters how
    custom: Tensor | None  # weights of all tokens, by a custom function

    @property
    def split(self) -> str | None:
        """How the tokens are split over ranks, if it matters and is known."""
        return next(iter(self.layouts)) if len(self.layouts) == 1 else None

    def weights(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens], in ``dtype``, on the device of ``mask``, the loss function's."""
        if self.custom is not None:
            return moved(self.local(self.custom), mask.device, dtype).reshape(-1)
        mask, starts = self.samples.shaped(mask), self.samples.starts
        return token_weights_of(self.coefficient_S, mask, starts, dtype).reshape(-1)

    def local(self, whole: Tensor) -> Tensor:
        """This rank's part of what is known of all tokens, in the mask's shape; LayoutError."""
        if not self.layouts:
            return whole
        return only({split: layout.shard(whole) for split, layout in self.layouts.items()})


def weighed(
    term: PlannedTerm,
    aggregation: LossAggregation,
    i: int,
    mask: Tensor,
    model_call: ModelCall | None,
    groups: ParallelGroups,
    splits: Splits,
    whole: bool,
) -> LocalWeights:
    """The weights of microbatch ``i``, for the ``mask`` of its loss function.

    Args:
        whole: losses are of all tokens on every context-parallel rank.
    """
    samples, copies = term.samples[i], groups.cp_size if whole else 1
    parts = groups.cp_size // copies
    units = {aggregation.within, aggregation.across}
    by_sample = aggregation.function is not None or not units <= {"step", "microbatch", None}
    if model_call is None and (by_sample or groups.cp_size > 1):
        raise HostError(
            "a loss without a call of the model that the schedule was given: its packing and "
            "its split over context-parallel ranks are unknown; expected the forward step to "
            "call that model (--overlap-moe-expert-parallel-comm does not: drop it)"
        )
    sequences = None if model_call is None else model_call.packed_sequences
    if term.is_late:
        return _late(term, aggregation, i, mask, sequences, groups, copies)
    starts, layouts = samples.starts, dict[str, CPLayout]()
    packed = starts is not None
    if by_sample and not packed and sequences is not None and not sequences == samples.number == 1:
        raise GroupError(
            "the model is called with packed sequences and the batch has no 'cu_seqlens'; "
            f"expected that key: add it, or {HOW_TO_READ}"
        )
    _check_shape(mask, samples.shape, groups.cp_size, whole)
    custom = None if term.custom is None else term.custom[i]
    if parts > 1 and (packed or custom is not None or term.masks is not None):
        if term.prints is not None and model_call is not None:
            splits.recognise(samples, term.prints[i], model_call.inputs, mask, groups.cp)
        layouts = splits.layouts(samples, parts, groups.cp_rank)
        if starts is not None:
            # Groups ask for the sample of each token, weights for its coefficient alone.
            sample_S = torch.arange(1.0, 1 + samples.number)
            telling_S = sample_S if term.ids else term.coefficients(i)
            starts = _local_starts(starts, layouts, mask, telling_S)
    local = LocalSamples(samples.number, starts)
    return LocalWeights(local, term.coefficients(i), copies, layouts, custom)


def _local_starts(
    starts: Tensor, layouts: Mapping[str, CPLayout], mask: Tensor, telling_S: Tensor
) -> Tensor:
    """Where each sample of a pack begins among this rank's tokens: int64 [samples + 1].

    In every split, they are in the order of the pack.

    Raises:
        LayoutError: several splits are left, which differ in ``telling_S`` of active tokens.
    """
    found = {name: torch.searchsorted(x.index, starts) for name, x in layouts.items()}
    if len(found) > 1:
        active = mask.reshape(-1).cpu() != 0
        only({k: token_weights_of(telling_S, active, x, torch.float64) for k, x in found.items()})
    return next(iter(found.values()))


def _late(
    term: PlannedTerm,
    aggregation: LossAggregation,
    i: int,
    mask: Tensor,
    sequences: int | None,
    groups: ParallelGroups,
    copies: int,
) -> LocalWeights:
    """`weighed` where the model makes the mask, from its sums; see `reading.late`."""
    number = term.samples[i].number
    check_mask(mask, number, sequences, aggregation)
    # The samples of a pack have one coefficient: here, it is one sample.
    samples = LocalSamples(number if sequences is None else 1, None)
    sums_S = samples.sums(mask).double()
    if copies < groups.cp_size and aggregation.within in ("sample", "microbatch"):
        sums_S = fitting(sums_S, groups.cp)
        dist.all_reduce(sums_S, group=groups.cp)
        sums_S = sums_S.to(mask.device)
    within_S = sums_S
    if aggregation.within == "microbatch":
        within_S = sums_S.sum().expand_as(sums_S)
    elif aggregation.within != "sample":
        within_S = torch.ones_like(sums_S)
    scale, across = aggregation.scale, term.counts.across
    coefficient_S = sample_coefficients(within_S, across, scale)
    return LocalWeights(samples, coefficient_S, copies, {}, None)


def _check_shape(mask: Tensor, planned: tuple[int, ...], cp: int, whole: bool) -> None:
    """Raise unless ``mask`` is as long as this rank's part of the planned shape, in its order."""
    expected = planned if whole else (*planned[:-1], planned[-1] // cp)
    if fit(mask.shape, expected):
        return
    size = math.prod(planned)
    if cp > 1 and mask.numel() == (size // cp if whole else size):
        raise LayoutError(
            f"a loss mask of {'a part' if whole else 'all'} of the {size} tokens of the batch on a "
            f"context-parallel rank of {cp}, {'with' if whole else 'without'} whole=; expected the "
            "losses and the mask sharded as the model's inputs are (CPLayout.shard); or all of "
            "them on every rank, and how: TokenLoss(whole='local_grad') or 'reduced_grad'"
        )
    raise MaskError(
        f"a loss mask of shape {tuple(mask.shape)}, where this rank's part of the batch's is "
        f"{expected}; expected a batch that is whole, and losses and a mask [samples, seq], not "
        "transposed, of this rank's part of every sequence; where the model makes its own mask, "
        "give --loss-aggregation-mask model (LossHook(read_batch=read_samples)), or "
        f"{HOW_TO_READ}"
    )


def fit(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether tensors of these shapes have as many elements, in one order; one may be flat."""
    if one == other:
        return True
    long = [[n for n in shape if n != 1] for shape in (one, other)]
    in_order = long[0] == long[1] or min(map(len, long)) <= 1
    return in_order and math.prod(one) == math.prod(other)
