"""The weights of this rank's tokens, made in the loss function from its own mask.

    w_t = m_t * c_[sample of t]

Suffixes: ``_S`` samples of a microbatch, ``_T`` this rank's tokens of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

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
from megatron_loss_agg.mcore.splits import Samples, Splits, local_starts, only
from megatron_loss_agg.mcore.step import PlannedTerm
from megatron_loss_agg.weights import at_least_fp32, in_dtype, sample_coefficients, token_weights_of


@dataclass(frozen=True)
class LocalSamples:
    """Which of this rank's tokens of a microbatch are of which sample."""

    number: int  # of samples
    tokens: int
    starts: Tensor | None  # int64 [samples + 1], among this rank's tokens; None: rows

    @cached_property
    def _lengths(self) -> Tensor:
        """int64 [samples + 1]: tokens of each sample, and of none."""
        assert self.starts is not None
        return pad(self.starts, (0, 1), value=self.tokens).diff()

    def shaped(self, x_T: Tensor) -> Tensor:
        """Rows as [samples, tokens of each]; packs flat."""
        if self.starts is not None:
            return x_T.reshape(-1)
        if x_T.dim() == 2 and x_T.shape[0] == self.number:
            return x_T
        return x_T.reshape(self.number, self.tokens // max(self.number, 1))

    def spread(self, x_S: Tensor) -> Tensor:
        """The value of each token's sample, [tokens]; 0 for tokens of none. Waits for no device."""
        if self.starts is None:
            length = self.tokens // max(self.number, 1)
            return x_S.unsqueeze(1).expand(-1, length).reshape(-1)
        lengths = moved(self._lengths, x_S.device)
        return pad(x_S, (0, 1)).repeat_interleave(lengths, output_size=self.tokens)

    def sums(self, x_T: Tensor) -> Tensor:
        """The sum over each sample's tokens, [samples]; at least fp32, of packs fp64."""
        x_T = self.shaped(x_T)
        if self.starts is None:
            return x_T.sum(dim=1, dtype=at_least_fp32(x_T.dtype))
        lengths = moved(self._lengths, x_T.device)  # their tokens are added one after the other
        return torch.segment_reduce(x_T.double(), "sum", lengths=lengths, unsafe=True)[:-1]


@dataclass(frozen=True)
class LocalWeights:
    """One microbatch of one term on this rank."""

    samples: LocalSamples
    coefficient_S: Tensor  # fp64, on the CPU or on the mask's device
    given: Tensor | None  # of a custom function: the weights of all tokens
    layouts: Callable[[], Mapping[str, CPLayout]] | None  # by split; None: this rank has all tokens
    split: str | None  # how a pack is split, if several ranks have parts of it and it is recognised
    copies: int  # context-parallel ranks that have the same tokens

    def weights(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens], in ``dtype``, on the device of ``mask``, the loss function's."""
        if self.given is not None:
            return moved(self.local(self.given), mask.device, dtype).reshape(-1)
        coefficient_S = moved(self.coefficient_S, mask.device, at_least_fp32(dtype))
        starts = self.samples.starts
        starts = None if starts is None else moved(starts, mask.device)
        return token_weights_of(coefficient_S, self.samples.shaped(mask), starts, dtype).reshape(-1)

    def local(self, whole: Tensor) -> Tensor:
        """This rank's part of what is known of all tokens, in the mask's shape; LayoutError."""
        if self.layouts is None:
            return whole
        return only({split: layout.shard(whole) for split, layout in self.layouts().items()})


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

    Raises:
        HostError: the model was not called.
        LayoutError: the mask is of all tokens and should not be, or the other way round; or it is
            not known how the tokens are split, and it matters.
        GroupError: samples are packed, but were planned as rows.
        MaskError: a mask of another shape.
    """
    samples, size = term.samples[i], groups.cp_size
    units = {aggregation.within, aggregation.across}
    by_sample = aggregation.function is not None or not units <= {"step", "microbatch", None}
    if model_call is None and (by_sample or size > 1):
        raise HostError(
            "a loss without a call of the model that the schedule was given: its packing and "
            "its split over context-parallel ranks are unknown; expected the forward step to "
            "call that model (--overlap-moe-expert-parallel-comm does not: drop it)"
        )
    packed = None if model_call is None else model_call.packed_sequences
    if term.is_late:
        return _late(term, aggregation, i, mask, packed, groups, whole)
    if samples.starts is None and by_sample:
        _check_rows(samples, packed)
    if size > 1 and not whole:
        splits.possible(samples, size)  # whose error says more than that of the shape
    _check_shape(mask, samples.shape, size, whole)
    coefficient_S = term.coefficients(i)
    given = None if term.given is None else term.given[i]
    by_token = given is not None or term.masks is not None
    starts, split, layouts = samples.starts, None, None
    if size > 1 and not whole:
        if term.prints is not None and model_call is not None and (starts is not None or by_token):
            splits.recognise(samples, term.prints[i], model_call.inputs, mask, groups.cp)
        if starts is not None:
            # Groups ask for the sample of each token, weights for its coefficient alone.
            telling_S = torch.arange(1.0, 1 + samples.number) if term.ids else coefficient_S
            starts, split = _local_starts(samples, mask, telling_S, splits, groups)
        layouts = functools.partial(splits.layouts, samples, size, groups.cp_rank)
    local = LocalSamples(samples.number, mask.numel(), starts)
    return LocalWeights(local, coefficient_S, given, layouts, split, size if whole else 1)


def _local_starts(
    samples: Samples, mask: Tensor, telling_S: Tensor, splits: Splits, groups: ParallelGroups
) -> tuple[Tensor, str | None]:
    """See `local_starts`; and the split, if only one is left.

    Raises:
        LayoutError: several are left, which differ in ``telling_S`` of active tokens.
    """
    possible = splits.possible(samples, groups.cp_size)
    starts = {
        name: local_starts(samples, split, groups.cp_size, groups.cp_rank)
        for name, split in possible.items()
    }
    if len(starts) > 1:
        made = {name: LocalSamples(samples.number, mask.numel(), x) for name, x in starts.items()}
        active = mask.detach().reshape(-1).cpu() != 0
        only({name: x.spread(telling_S) * active for name, x in made.items()})
    return next(iter(starts.values())), splits.recognised(True)


def _late(
    term: PlannedTerm,
    aggregation: LossAggregation,
    i: int,
    mask: Tensor,
    packed: int | None,
    groups: ParallelGroups,
    whole: bool,
) -> LocalWeights:
    """`weighed` where the model makes the mask: ``c_s`` may come from its sums."""
    number = term.samples[i].number
    check_mask(mask, number, packed, aggregation)
    # The samples of a pack have one coefficient: here, it is one sample.
    samples = LocalSamples(number if packed is None else 1, mask.numel(), None)

    def sums_S() -> Tensor:
        sums = samples.sums(mask).double()
        if groups.cp_size == 1 or whole or aggregation.within not in ("sample", "microbatch"):
            return sums
        sums = fitting(sums, groups.cp)
        dist.all_reduce(sums, group=groups.cp)
        return sums.to(mask.device)

    coefficient_S = _late_coefficients(term.counts.across, aggregation, sums_S())
    copies = groups.cp_size if whole else 1
    return LocalWeights(samples, coefficient_S, None, None, None, copies)


def _late_coefficients(across: float, aggregation: LossAggregation, sums_S: Tensor) -> Tensor:
    """``c_s`` of a microbatch whose mask the model made: fp64 [samples]; see `reading.late`.

    Args:
        sums_S: its mask, fp64, summed by sample over context-parallel ranks.
    """
    within_S = sums_S
    if aggregation.within == "microbatch":
        within_S = sums_S.sum().expand_as(sums_S)
    elif aggregation.within != "sample":
        within_S = torch.ones_like(sums_S)
    return sample_coefficients(within_S, across, aggregation.scale, within_S == 0)


def moved(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``x`` on ``device`` without a wait for it; in ``dtype``, if given."""
    if x.device != device:
        if x.is_cpu and torch.accelerator.is_available():
            x = x.pin_memory()
        x = x.to(device, non_blocking=True)
    return x if dtype is None else in_dtype(x, dtype)


def _check_rows(samples: Samples, packed_sequences: int | None) -> None:
    """Raise GroupError for rows of several packed sequences."""
    if packed_sequences is None or packed_sequences == samples.number == 1:
        return
    raise GroupError(
        "the model is called with packed sequences and the batch has no 'cu_seqlens'; "
        f"expected that key: add it, or {HOW_TO_READ}"
    )


def _check_shape(mask: Tensor, planned: tuple[int, ...], cp: int, whole: bool) -> None:
    """Raise unless ``mask`` is as long as this rank's part of the planned shape, in its order."""
    size = math.prod(planned)
    if cp > 1 and not whole and mask.numel() == size > 0:
        raise LayoutError(
            f"a loss mask of all {size} tokens of the batch on a context-parallel rank of "
            f"{cp}; expected those of this rank's part, {size // cp}: shard the losses and the "
            "mask as the model's inputs are (CPLayout.shard), or, if every rank gathers the losses "
            "of all tokens, say how: TokenLoss(whole='local_grad') or 'reduced_grad'"
        )
    if cp > 1 and whole and cp * mask.numel() == size > 0:
        raise LayoutError(
            f"TokenLoss(whole=...) with a mask of {mask.numel()} tokens on a context-parallel "
            f"rank of {cp}; expected all {size} of the batch: gather the losses and the mask, "
            "or leave out whole="
        )
    parts = 1 if whole else cp
    if mask.numel() * parts != size:
        raise MaskError(
            f"a loss mask of {mask.numel()} tokens, where this rank's part of the batch's is "
            f"{size // parts}; expected a batch that is whole, and the losses of this rank's part "
            "of every sequence; where the model makes its own mask, give --loss-aggregation-mask "
            f"model (LossHook(read_batch=read_samples)), or {HOW_TO_READ}"
        )
    expected = (*planned[:-1], planned[-1] // parts)
    long = [[n for n in shape if n > 1] for shape in (mask.shape, expected)]
    if long[0] != long[1] and min(map(len, long)) > 1:
        raise MaskError(
            f"a loss mask of shape {tuple(mask.shape)}, where this rank's part of the batch's "
            f"is {expected}; expected [samples, seq], for losses too: transpose both"
        )
