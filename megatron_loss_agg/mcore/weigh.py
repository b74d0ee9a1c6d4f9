"""The weights of this rank's tokens, made in the loss function from its own mask.

    w_t = m_t * c_[sample of t], times the token's factor, if it has one

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
from megatron_loss_agg.collectives import for_backend
from megatron_loss_agg.cp_layout import CPLayout
from megatron_loss_agg.errors import DataError, HostError
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.reading.keys import HOW_TO_READ
from megatron_loss_agg.mcore.reading.late import check_mask
from megatron_loss_agg.mcore.reading.model_calls import ModelCall
from megatron_loss_agg.mcore.splits import MicrobatchShape, only
from megatron_loss_agg.mcore.step import PlannedStep, PlannedTerm
from megatron_loss_agg.tensors import at_least_fp32, moved
from megatron_loss_agg.weighted_sum import sample_coefficients, times_factors, token_weights_of


@dataclass(frozen=True)
class LocalWeights:
    """One microbatch of one term on this rank."""

    coefficient_S: Tensor  # fp64, on the CPU or on the mask's device
    starts: Tensor | None  # int64 [samples + 1], among this rank's tokens; None: rows
    copies: int  # context-parallel ranks that have the same tokens
    layouts: Mapping[str, CPLayout]  # by split, where ranks split tokens and it matters how
    custom: Tensor | None = None  # weights of all tokens, by a custom function
    factors: Tensor | None = None  # of all tokens

    @property
    def split(self) -> str | None:
        """How the tokens are split over ranks, if it matters and is known."""
        return next(iter(self.layouts)) if len(self.layouts) == 1 else None

    def weights(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens], in ``dtype``, on the device of ``mask``, the loss function's."""
        return self.factored(self.unfactored(mask, dtype))

    def factored(self, w_T: Tensor) -> Tensor:
        """Of what is `unfactored`, the weights."""
        return w_T if self.factors is None else times_factors(w_T, self.part_of_rank(self.factors))

    def unfactored(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """`weights` without the factors of tokens, which are in no denominator."""
        if self.custom is not None:
            return moved(self.part_of_rank(self.custom), mask.device, dtype).reshape(-1)
        mask = mask.reshape(-1) if self.starts is not None else _rows(mask, len(self.coefficient_S))
        return token_weights_of(self.coefficient_S, mask, self.starts, dtype).reshape(-1)

    def sums(self, x_T: Tensor) -> Tensor:
        """The sum over each sample's tokens, [samples]; at least fp32, of packs fp64."""
        if self.starts is None:
            return _sums_of_rows(x_T, len(self.coefficient_S))
        # The tokens of a sample are added one after the other. Those of none are left out.
        lengths = pad(moved(self.starts, x_T.device), (0, 1), value=x_T.numel()).diff()
        x_T = x_T.reshape(-1).double()
        return torch.segment_reduce(x_T, "sum", lengths=lengths, unsafe=True)[:-1]

    def part_of_rank(self, whole: Tensor) -> Tensor:
        """This rank's part of what is known of all tokens, in the mask's shape; DataError."""
        if not self.layouts:
            return whole
        return only({split: layout.shard(whole) for split, layout in self.layouts.items()})


def _rows(x_T: Tensor, samples: int) -> Tensor:
    """[samples, tokens of each]."""
    if x_T.dim() == 2 and len(x_T) == samples:
        return x_T
    return x_T.reshape(samples, x_T.numel() // max(samples, 1))


def _sums_of_rows(x_T: Tensor, samples: int) -> Tensor:
    return _rows(x_T, samples).sum(dim=1, dtype=at_least_fp32(x_T.dtype))


@dataclass(frozen=True)
class Weigher:
    """Makes the weights of one microbatch on this rank."""

    call: Call
    plan: PlannedStep
    i: int  # of the microbatch in its step
    model_call: ModelCall | None
    copies: int  # see `LocalWeights`

    def of_term(self, name: str, mask: Tensor) -> LocalWeights:
        """For the ``mask`` of the loss function."""
        term, aggregation = self.plan.terms[name], self.call.terms[name].aggregation
        units = aggregation.units
        by_sample = aggregation.function is not None or not units <= {"step", "microbatch"}
        shape, size = term.shapes[self.i], self.call.groups.cp_size
        if self.model_call is None and (by_sample or size > 1):
            raise HostError(
                "a loss without a call of the model that the schedule was given: its packing and "
                "its split over context-parallel ranks are unknown; expected the forward step to "
                "call that model (--overlap-moe-expert-parallel-comm does not: drop it)"
            )
        sequences = None if self.model_call is None else self.model_call.packed_sequences
        if self.plan.is_late:
            check_mask(mask, shape.samples, sequences, aggregation)
            # The samples of a pack have one coefficient: here, it is one sample.
            rows = shape.samples if sequences is None else 1
            coefficient_S = self._late(aggregation, term.counts.across, mask, rows)
            return LocalWeights(coefficient_S, None, self.copies, {})
        if by_sample and shape.starts is None and self.model_call is not None:
            _check_unpacked(mask, shape, self.model_call)
        _check_shape(mask, shape.mask, size, self.copies)
        starts, layouts = self._places(term, mask)
        custom = None if term.custom is None else term.custom[self.i]
        return LocalWeights(
            term.coefficients(self.i), starts, self.copies, layouts, custom, term.factors[self.i]
        )

    def _places(
        self, term: PlannedTerm, mask: Tensor
    ) -> tuple[Tensor | None, Mapping[str, CPLayout]]:
        """`LocalWeights.starts` and `LocalWeights.layouts`."""
        groups, splits, shape = self.call.groups, self.call.splits, term.shapes[self.i]
        of_tokens = term.custom, term.masks, term.factors[self.i]
        by_token = any(x is not None for x in of_tokens)
        if groups.cp_size == self.copies or (shape.starts is None and not by_token):
            return shape.starts, {}
        if term.fingerprints is not None and self.model_call is not None:
            inputs = self.model_call.inputs
            splits.narrow(shape, term.fingerprints[self.i], inputs, mask, groups.cp)
        layouts = splits.layouts(shape, groups.cp_size, groups.cp_rank)
        if shape.starts is None:
            return None, layouts
        # Groups ask for the sample of each token, weights for its coefficient alone.
        sample_S = torch.arange(1.0, 1 + shape.samples)
        telling_S = sample_S if term.ids else term.coefficients(self.i)
        return _local_starts(shape.starts, layouts, mask, telling_S), layouts

    def _late(self, aggregation: LossAggregation, across: float, mask: Tensor, rows: int) -> Tensor:
        """``c_s`` where the model makes the mask, from its sums; see `reading.late`."""
        cp, within_S = self.call.groups.cp, _sums_of_rows(mask, rows).double()
        if aggregation.within not in ("sample", "microbatch"):
            within_S = torch.ones_like(within_S)
        elif self.copies < self.call.groups.cp_size:
            within_S = for_backend(within_S, cp)
            dist.all_reduce(within_S, group=cp)
            within_S = within_S.to(mask.device)
        if aggregation.within == "microbatch":
            within_S = within_S.sum().expand_as(within_S)
        return sample_coefficients(within_S, across, aggregation.scale)


def _local_starts(
    starts: Tensor, layouts: Mapping[str, CPLayout], mask: Tensor, telling_S: Tensor
) -> Tensor:
    """Where each sample of a pack begins among this rank's tokens: int64 [samples + 1].

    In every split, they are in the order of the pack.

    Raises:
        DataError: several splits are left, which differ in ``telling_S`` of active tokens.
    """
    found = {name: torch.searchsorted(x.index, starts) for name, x in layouts.items()}
    local, *others = found.values()
    # All splits agree where a pack is one sample: no wait for the mask then.
    if any(not torch.equal(local, other) for other in others):
        active = mask.reshape(-1).cpu() != 0
        only({k: token_weights_of(telling_S, active, x, torch.float64) for k, x in found.items()})
    return local


def _check_unpacked(mask: Tensor, shape: MicrobatchShape, model_call: ModelCall) -> None:
    """Raise DataError for a pack without offsets, unless it is one sequence.

    A microbatch of one number for each sample, and not for each token, needs none.
    """
    sequences = model_call.packed_sequences
    by_token = shape.mask[-1] > 1 or any(x.numel() == mask.numel() for x in model_call.inputs)
    if sequences is not None and by_token and not sequences == shape.samples == 1:
        raise DataError(
            "the model is called with packed sequences and the batch has no 'cu_seqlens'; "
            f"expected that key: add it, or {HOW_TO_READ}"
        )


def _check_shape(mask: Tensor, planned: tuple[int, ...], cp: int, copies: int) -> None:
    """Raise unless ``mask`` is as long as this rank's part of the planned shape, in its order."""
    whole = copies == cp
    expected = (*planned[:-1], planned[-1] // (cp // copies))
    if same_order(mask.shape, expected):
        return
    size = math.prod(planned)
    if cp > 1 and mask.numel() == (size // cp if whole else size):
        raise DataError(
            f"a loss mask of {'a part' if whole else 'all'} of the {size} tokens of the batch on a "
            f"context-parallel rank of {cp}, {'with' if whole else 'without'} whole=; expected the "
            "losses and the mask sharded as the model's inputs are (CPLayout.shard); or all of "
            "them on every rank, and how: TokenLoss(whole='local_grad') or 'reduced_grad'"
        )
    raise DataError(
        f"a loss mask of shape {tuple(mask.shape)}, where this rank's part of the batch's is "
        f"{expected}; expected a batch that is whole, and losses and a mask [samples, seq], not "
        "transposed, of this rank's part of every sequence; where the model makes its own mask, "
        "give --loss-aggregation-mask model (LossHook(read_batch=read_samples)), or "
        f"{HOW_TO_READ}"
    )


def same_order(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether tensors of these shapes have as many elements, in one order; one may be flat."""
    if one == other:
        return True
    long = [[n for n in shape if n != 1] for shape in (one, other)]
    in_order = long[0] == long[1] or min(map(len, long)) <= 1
    return in_order and math.prod(one) == math.prod(other)
