"""Compares the masks and tokens of a call's loss functions with those that were counted.

The weights follow the mask that the script passes to its loss function. They are right only if its
sums are those that were counted, over the ranks that split its tokens:

    sum_t m_t = M_s                                         of each sample, in the first step
    sum_t m_t = sum_s M_s  and  sum_t w_t = sum_s c_s M_s   of each microbatch

In the first step the tokens themselves are compared, too: they verify the declared split, and the
order of the microbatches. Padding is not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import broadcast_result, for_backend, gather_objects
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.mcore.batches import HOW_TO_READ, model_inputs_of
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.forward_step import TermLosses
from megatron_loss_agg.mcore.split import SPLITS, has_tokens, layout_of, sums_of_samples
from megatron_loss_agg.microbatch import Microbatch, MicrobatchShape
from megatron_loss_agg.plan import StepPlan

_TOLERANCE = 1e-5
"""Of sums, relative: they are in fp32."""


class MaskSum(NamedTuple):
    """Sums on this rank, and what they should add up to over the context-parallel ranks."""

    what: str
    i: int  # of the microbatch in its step
    on_rank: Tensor
    planned: Sequence[float]
    sizes: Sequence[float]  # of the terms that add up to each, by which an error is measured


def mask_sums(
    call: Call, plan: StepPlan, i: int, term: TermLosses, weights: Tensor
) -> Iterator[MaskSum]:
    """The sums of one microbatch of one term; waits for no device."""
    mask_sum_S = plan.mask_sums(i)
    c_S = plan.coefficients(i)
    weight_sum, weight_size = (float(x.dot(mask_sum_S)) for x in (c_S, c_S.abs()))
    mask_sum = term.mask.sum()
    if term.is_whole:
        mask_sum = mask_sum / call.groups.cp_size
    planned = [float(mask_sum_S.sum())]
    yield MaskSum("mask sum", i, mask_sum, planned, planned)
    yield MaskSum("sum of weights", i, weights.sum(), [weight_sum], [weight_size])
    if term.sequence_mask_sum is not None:
        sequences = plan.sequences[i]
        assert sequences is not None
        planned = [float(sequences.mask_sum.sum())]
        yield MaskSum(
            "mask sum of all sequences", i, term.sequence_mask_sum.sum(), planned, planned
        )


def mask_sums_by_sample(
    call: Call, plan: StepPlan, i: int, term: TermLosses, starts: Tensor | None
) -> Iterator[MaskSum]:
    """The sums of each sample, which show a wrong split; waits for no device."""
    sums = sums_of_samples(term.mask.double().reshape(-1), plan.shapes[i], starts)
    if term.is_whole:
        sums = sums / call.groups.cp_size
    planned = plan.mask_sums(i).tolist()
    yield MaskSum("mask sum of a sample", i, sums, planned, planned)
    if term.sequence_mask_sum is not None:
        sequences = plan.sequences[i]
        assert sequences is not None
        planned = sequences.mask_sum.tolist()
        yield MaskSum("mask sum of a sequence", i, term.sequence_mask_sum, planned, planned)


def check_mask_sums(call: Call, sums: Sequence[MaskSum]) -> None:
    """Raise DataError, on all context-parallel ranks alike, unless the sums are the planned ones.

    Waits for the device once.
    """
    if not sums:
        return
    numbers = torch.cat([x.on_rank.reshape(-1).double() for x in sums])
    if call.groups.cp_size > 1:
        numbers = for_backend(numbers, call.groups.cp)
        dist.all_reduce(numbers, group=call.groups.cp)
    remaining = iter(numbers.tolist())
    for x in sums:
        for planned, size in zip(x.planned, x.sizes, strict=True):
            found = next(remaining)
            if not abs(found - planned) <= _TOLERANCE * size:  # NaN is not
                raise DataError(
                    "the loss function's mask must be this rank's part of the batch's 'loss_mask': in "
                    f"microbatch {x.i} its {x.what} must be {planned:g}, got {found:g}. Leave the mask "
                    "undivided (and fractions in fp32), split it as declared "
                    f"(--loss-aggregation-split, LossHook(split=)), or give the final"
                    f" mask: {HOW_TO_READ}."
                )


@dataclass
class FirstTokens:
    """The integers that the model is called with in the first step, whole, by microbatch."""

    of_batches: list[list[Tensor]] = field(default_factory=list)  # copies, on the CPU
    shapes: list[MicrobatchShape] = field(default_factory=list)
    is_real: list[Tensor] = field(default_factory=list)  # not padding; in the shape of the mask

    def add(self, microbatch: Microbatch, batch: Any = None) -> None:
        """Add those of the next microbatch; where its losses are by sample, of its sequences.

        Args:
            batch: of the microbatch, if one was drawn.
        """
        if microbatch.sequences is not None:
            microbatch = microbatch.sequences
        inputs = microbatch.model_inputs or model_inputs_of(batch, microbatch.loss_mask)
        if not has_tokens(microbatch.shape):
            inputs = ()
        self.of_batches.append([x.detach().cpu().clone() for x in inputs if _tells_tokens_apart(x)])
        self.shapes.append(microbatch.shape)
        self.is_real.append(_is_real(microbatch))


class SplitFinding(NamedTuple):
    """What a rank's model inputs say of one microbatch."""

    splits: Sequence[str]  # of which these are this rank's part
    others: Sequence[int]  # if of none: other microbatches whose part they are


class _Found(NamedTuple):
    """Of one rank."""

    offsets: list[Any]  # of each microbatch, the shape of its mask and where its samples begin
    findings: dict[int, SplitFinding | None]  # None: nothing can be compared


def check_tokens(
    call: Call,
    tokens: FirstTokens | None,
    inputs: Mapping[int, Sequence[Tensor] | None],
    gathered: Collection[int],
    split: str,
    is_declared: bool,
) -> None:
    """Raise unless each rank's model was called with its part of the planned tokens.

    On all ranks of the last stage; the tensor-parallel ranks that read batches compare.

    Args:
        inputs: by microbatch, the integer tensors that the model was called with.
        gathered: microbatches whose losses depend on the order in which tokens are gathered.
        is_declared: the user has said that the split is ``split``.

    Raises:
        DataError: another split, or other microbatches.
    """

    def compare() -> bool:
        assert tokens is not None
        found = _Found(
            [_offsets(shape) for shape in tokens.shapes],
            {i: _finding(call, tokens, i, x) for i, x in inputs.items()},
        )
        of_ranks = gather_objects(lambda: found, call.groups.cp, "comparing tokens")
        if any(x.offsets != found.offsets for x in of_ranks):
            raise DataError(
                "all context-parallel ranks must read the same batches, got different samples or "
                "masks. Split every batch by sequence, not by sample."
            )
        for i in inputs:
            known = [x for of_rank in of_ranks if (x := of_rank.findings[i]) is not None]
            _check_microbatch(call, tokens.shapes[i], i, known, i in gathered, split, is_declared)
        return True

    broadcast_result(compare, call.groups.tp, 0)


def _check_microbatch(
    call: Call,
    shape: MicrobatchShape,
    i: int,
    findings: Sequence[SplitFinding],
    is_gathered: bool,
    split: str,
    is_declared: bool,
) -> None:
    """As `check_tokens`, from the findings of the ranks whose tokens tell anything."""
    has_several_samples = shape.starts is not None and len(shape.starts) > 2
    has_padding = shape.starts is not None and int(shape.starts[-1]) < shape.mask[-1]
    is_split = call.groups.cp_size > 1
    depends_on_split = is_split and (is_gathered or has_several_samples or has_padding)
    # The sum of the weights shows a wrong split of a lone sample with padding behind it.
    must_be_verified = is_split and (is_gathered or has_several_samples) and not is_declared
    common = set.intersection(*({*x.splits} for x in findings)) if findings else set()
    if common:
        if depends_on_split and split not in common:
            raise DataError(
                f"microbatch {i} must be split over context-parallel ranks as declared, {split!r}, got "
                f"{' or '.join(sorted(common))!r}. Give --loss-aggregation-split {min(common)} "
                f"(LossHook(split={min(common)!r}))."
            )
        return
    if findings and all(x.others and not x.splits for x in findings):
        raise DataError(
            f"the model must be called with the tokens of microbatch {i} of the step in its turn, got "
            f"those of {findings[0].others[0]}. Give microbatches in the order of the forward steps "
            "(read_step, hook.step), with new tensors in each, since all are drawn before the first "
            "forward pass."
        )
    if any(x.splits for x in findings):
        raise DataError(
            f"every context-parallel rank must have its own part of the tokens of microbatch {i}, got "
            f"parts of the splits {[[*x.splits] for x in findings]} by rank. Split every sequence as "
            f"one of {', '.join(SPLITS)} does (CPLayout)."
        )
    if must_be_verified:
        raise DataError(
            f"the split of microbatch {i} must be verified, and the model is not called with labels or "
            f"tokens of the batch. Declare it: --loss-aggregation-split {{{','.join(SPLITS)}}} "
            "(LossHook(split=)), or give Microbatch(model_inputs=...)."
        )


def _finding(
    call: Call, tokens: FirstTokens, i: int, inputs: Sequence[Tensor] | None
) -> SplitFinding | None:
    """None where nothing can be compared."""
    own = [x.detach().cpu() for x in inputs or () if _tells_tokens_apart(x)]
    if not own or not tokens.of_batches[i]:
        return None
    splits = [split for split in SPLITS if _fits(call, tokens, i, own, split)]
    if splits:
        return SplitFinding(splits, [])
    others = [
        j
        for j in range(len(tokens.of_batches))
        if any(_fits(call, tokens, j, own, split) for split in SPLITS)
    ]
    return SplitFinding([], others)


def _fits(call: Call, tokens: FirstTokens, i: int, own: Sequence[Tensor], split: str) -> bool:
    """Whether some of this rank's tensors is its part of one of microbatch ``i``'s."""
    shape = tokens.shapes[i]
    try:
        layout = layout_of(shape, split, call.groups.cp_size, call.groups.cp_rank)
    except DataError:  # of a length that cannot be split in this way
        return False
    is_padding = ~layout.shard(tokens.is_real[i])
    for whole in tokens.of_batches[i]:
        part = layout.shard(whole.reshape(shape.mask))
        same_size = (x.reshape(part.shape) for x in own if x.numel() == part.numel())
        if any(bool(((x == part) | is_padding).all()) for x in same_size):
            return True
    return False


def _is_real(microbatch: Microbatch) -> Tensor:
    """Where tokens are of a sample, and no padding: bool in the shape of the mask, on the CPU.

    In rows, padding is all behind the last active token.
    """
    sample_index = microbatch.sample_index()
    if sample_index is not None:
        is_real = sample_index < microbatch.num_samples
    else:
        is_active = microbatch.loss_mask.detach() != 0
        is_real = is_active.flip(-1).cummax(dim=-1).values.flip(-1)
    return is_real.reshape(microbatch.loss_mask.shape).cpu()


def _offsets(shape: MicrobatchShape) -> tuple[Any, ...]:
    return shape.mask, None if shape.starts is None else shape.starts.tolist()


def _tells_tokens_apart(x: Tensor) -> bool:
    """Not equal numbers, nor positions, which a script may make itself whatever its split."""
    flat = x.reshape(-1)
    if not flat.numel() or bool((flat == flat[0]).all()):
        return False
    row = x if x.dim() else x.reshape(1)
    return not bool((row == torch.arange(row.shape[-1], device=x.device)).all())
