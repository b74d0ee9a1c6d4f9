"""The split of tokens over context-parallel ranks, with weights, sums and gathers under a split.

============ ==============================================================================
split        a rank holds
============ ==============================================================================
zigzag       two chunks of every sequence: of each row, or of each sequence of a pack
zigzag_pack  two chunks of the whole pack: a sequence may be on only some of the ranks
contiguous   one chunk of each row, or of the whole pack
============ ==============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.collectives import SumOverRanks, ranks_of
from megatron_loss_agg.cp_layout import CPLayout
from megatron_loss_agg.errors import DataError, HostError
from megatron_loss_agg.mcore.call import Call, CPRank, ProcessGroups
from megatron_loss_agg.microbatch import MicrobatchShape
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.tensors import at_least_fp32, moved
from megatron_loss_agg.weighted_sum import padded_lengths, weights_by_length

if TYPE_CHECKING:
    from megatron_loss_agg.mcore.forward_step import TermLosses

SPLITS = ("zigzag", "zigzag_pack", "contiguous")


def rank_layout(shape: MicrobatchShape, split: str, cp_size: int, cp_rank: int) -> CPLayout:
    """The positions of a microbatch's last axis that this rank holds."""
    length = shape.mask[-1]
    if split == "contiguous":
        return CPLayout.contiguous(length, cp_size, cp_rank)
    if shape.starts is None or split == "zigzag_pack":
        return CPLayout.bshd(length, cp_size, cp_rank)
    # Padding after the last sample is split like a separate sequence.
    offsets = torch.cat([shape.starts, shape.starts.new_tensor([length])])
    return CPLayout.thd(offsets, cp_size, cp_rank)


def local_starts(shape: MicrobatchShape, split: str, cp_size: int, cp_rank: int) -> Tensor | None:
    """The start of each sample of a pack among this rank's tokens; None for rows.

    int64 [samples + 1], on the CPU.
    """
    starts = shape.starts
    if starts is None or cp_size == 1:
        return starts
    if split != "zigzag":
        # A rank holds its tokens in the order of the pack.
        return torch.searchsorted(rank_layout(shape, split, cp_size, cp_rank).index, starts)
    # Do not use the layout, which has an element for each token of the pack. Padding after the last
    # sample is split like a separate sequence.
    lengths = padded_lengths(starts, shape.mask[-1])
    if bool((lengths % (2 * cp_size)).any()):
        raise DataError(
            f"sequences of a pack must be padded to multiples of 2 * cp_size = {2 * cp_size}, got "
            f"{lengths.tolist()}. Pad them, or declare how the pack is split "
            "(--loss-aggregation-split, or LossHook(split=))."
        )
    return starts // cp_size


class RankSamples(NamedTuple):
    """The samples of one microbatch among this rank's tokens with losses, for one term."""

    cp: CPRank
    starts: Tensor | None  # where each begins, on the CPU; None: rows
    lengths: Tensor  # in a pack, see `padded_lengths`; empty for rows
    coefficient_S: Tensor  # for a pack with one extra, for the padding


class TermSamples:
    """The samples of a step on this rank, for one term.

    The first loss moves the samples of all microbatches to its device together, so later ones need
    no copy from the host. That is safe since Megatron computes all losses of a step on one stream.
    """

    def __init__(self, call: Call, plan: StepPlan) -> None:
        self._call, self._plan = call, plan
        self._samples: dict[Any, list[RankSamples]] = {}

    def in_microbatch(self, i: int, term: TermLosses) -> RankSamples:
        """The samples of microbatch ``i`` on the device, in the dtype of the losses' weights.

        Raises:
            DataError: the mask does not have this rank's tokens.
        """
        key = term.is_whole, term.mask.device, at_least_fp32(term.losses.dtype)
        if key not in self._samples:
            self._samples[key] = self._moved(*key)
        samples = self._samples[key][i]
        check_local_mask(term.mask, self._plan.shapes[i], samples.cp.size, term.is_whole)
        return samples

    def _moved(self, is_whole: bool, device: torch.device, dtype: torch.dtype) -> list[RankSamples]:
        coefficients = self._plan.coefficient_S.to(dtype).split([*self._plan.sizes])
        samples = [self._on_cpu(i, c_S, is_whole) for i, c_S in enumerate(coefficients)]
        lengths = _moved_together([x.lengths for x in samples], device)
        coefficients = _moved_together([x.coefficient_S for x in samples], device)
        return [
            x._replace(lengths=n_S, coefficient_S=c_S)
            for x, n_S, c_S in zip(samples, lengths, coefficients, strict=True)
        ]

    def _on_cpu(self, i: int, coefficient_S: Tensor, is_whole: bool) -> RankSamples:
        shape = self._plan.shapes[i]
        cp, num_tokens = self._call.groups.cp_rank_in(shape), math.prod(shape.mask)
        if is_whole:
            # Every rank has all losses, and adds its share to the sum over ranks.
            coefficient_S, starts = coefficient_S / cp.size, shape.starts
        else:
            starts = local_starts(shape, self._call.split, cp.size, cp.rank)
            num_tokens //= cp.size
        if starts is None:
            return RankSamples(cp, None, torch.empty(0, dtype=torch.int32), coefficient_S)
        return RankSamples(
            cp, starts, padded_lengths(starts, num_tokens), pad(coefficient_S, (0, 1))
        )


def _moved_together(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """The vectors ``parts`` on ``device``, with a single copy."""
    return moved(torch.cat([*parts]), device).split([len(x) for x in parts])


def weights_on_rank(samples: RankSamples, term: TermLosses) -> Tensor:
    """The weights ``m_t * c_s`` of this rank's tokens, in the shape of the losses, at least fp32."""
    coefficient_S, mask = samples.coefficient_S, term.mask.to(samples.coefficient_S.dtype)
    if samples.starts is None:
        rows = len(coefficient_S)
        mask = mask.reshape(rows, mask.numel() // max(rows, 1))
        weights = weights_by_length(coefficient_S, mask, None)
    else:
        weights = weights_by_length(coefficient_S, mask, samples.lengths)
    return weights.reshape(term.losses.shape)


def gathered(values: Tensor, shape: MicrobatchShape, call: Call) -> Tensor:
    """The values of all tokens of a microbatch, in the shape of its mask, from this rank's values.

    In the backward pass, a value gets the sum of its gradients on all context-parallel ranks.
    """
    cp = call.groups.cp_rank_in(shape)
    expected = local_shape(shape, cp.size)
    if not isinstance(values, Tensor) or not same_order(values.shape, expected):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise DataError(
            f"gather of a TokenLoss must return a number for each token of this rank, {expected}, "
            f"got {got}. Return, for example, log-probabilities in that shape."
        )
    values = values.reshape(expected)
    if cp.size == 1:
        return values
    layout = rank_layout(shape, call.split, cp.size, cp.rank)
    return layout.unshard(values, call.groups.cp_group(cp.size))


def sums_by_sequence(
    values: Tensor,
    mask: Tensor,
    shape: MicrobatchShape,
    split: str,
    cp: CPRank,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``sum m_t x_t`` over each sequence, [sequences], over all ranks of ``group``; None: this rank.

    Values where the mask is 0 are ignored, even NaN. Summed in fp64; the result is at least fp32.
    """
    check_local_mask(mask, shape, cp.size, is_whole=False)
    products = values.double().reshape(-1).masked_fill(mask.reshape(-1) == 0, 0) * mask.reshape(-1)
    sums = sums_of_samples(products, shape, local_starts(shape, split, cp.size, cp.rank))
    if ranks_of(group) > 1:
        sums = SumOverRanks.apply(sums, group)  # type: ignore[no-untyped-call]
    return sums.to(at_least_fp32(values.dtype))


def sums_of_samples(x_T: Tensor, shape: MicrobatchShape, starts: Tensor | None) -> Tensor:
    """The sum over each sample's tokens, [samples]; differentiable.

    Args:
        x_T: values of this rank's tokens, in order.
        starts: where each sample begins among them; None for rows.
    """
    if starts is None:
        rows = shape.mask[0]
        return x_T.reshape(rows, x_T.numel() // max(rows, 1)).sum(dim=1)
    tokens = x_T.numel()
    lengths = pad(moved(starts, x_T.device), (0, 1), value=tokens).diff()
    samples = torch.arange(len(lengths), device=x_T.device)
    sample_T = samples.repeat_interleave(lengths, output_size=tokens)
    return x_T.new_zeros(len(lengths)).index_add(0, sample_T, x_T.reshape(-1))[:-1]


def check_has_one_group(groups: ProcessGroups) -> None:
    """Raise HostError if each microbatch has its own context-parallel ranks."""
    if groups.dp_cp is not None:
        raise HostError(
            "a SampleLoss of tokens on several ranks needs the same context-parallel ranks for all "
            "microbatches, got dynamic or hybrid context parallelism, where sums of sequences are not "
            "compared. Use losses by token (TokenLoss, also with gather=)."
        )


def is_by_token(shape: MicrobatchShape) -> bool:
    """True if a mask has an element per token, not per sample (`Microbatch.of_samples`)."""
    return shape.starts is not None or shape.mask[-1] != 1


def local_shape(shape: MicrobatchShape, cp_size: int) -> tuple[int, ...]:
    """The shape of this rank's part of the mask."""
    return (*shape.mask[:-1], shape.mask[-1] // cp_size)


def check_local_mask(mask: Tensor, shape: MicrobatchShape, cp_size: int, is_whole: bool) -> None:
    """Raise DataError unless ``mask`` has the planned number of tokens in the planned order."""
    expected = shape.mask if is_whole else local_shape(shape, cp_size)
    if same_order(mask.shape, expected):
        return
    if not is_whole and cp_size > 1 and mask.numel() == math.prod(shape.mask):
        raise DataError(
            "losses and mask must cover this context-parallel rank's part of the tokens, "
            f"{expected}, got all of them, {tuple(mask.shape)}. Shard them like the model's inputs "
            "(CPLayout.shard), or let the hook gather: TokenLoss(compute, whole_mask, gather)."
        )
    whose = "the whole" if is_whole else "this rank's part of the batch's"
    raise DataError(
        f"the loss function's mask must have the shape of {whose} mask, {expected}, got "
        f"{tuple(mask.shape)}. Give masks [samples, seq], not transposed, and a batch that is "
        "whole (a mask that the model makes, as in LLaVA, is not supported); or give a function "
        "batch -> Microbatch (--loss-aggregation-batch, or LossHook(read_batch=...))."
    )


def same_order(one: Sequence[int], other: Sequence[int]) -> bool:
    """True if these shapes have the same number of elements in the same order; one may be flat."""
    if one == other:
        return True
    long_axes = [[n for n in shape if n != 1] for shape in (one, other)]
    in_order = long_axes[0] == long_axes[1] or min(map(len, long_axes)) <= 1
    return in_order and math.prod(one) == math.prod(other)
