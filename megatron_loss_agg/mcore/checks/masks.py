"""Compares the masks and tokens of a call's loss functions with those that were counted.

The weights follow the mask that the script passes to its loss function. They are right only if its
sums are those that were counted, over the ranks that split its tokens:

    sum_t m_t = M_s                                         of each sample, in the first step
    sum_t m_t = sum_s M_s  and  sum_t w_t = sum_s c_s M_s   of each microbatch

In the first step the tokens themselves are compared, too: they verify the declared split, and the
order of the microbatches. Padding is not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import all_gather, broadcast_result, for_backend, gather_objects
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.mcore.batches import HOW_TO_READ, model_inputs_of
from megatron_loss_agg.mcore.call import Call, Holders
from megatron_loss_agg.mcore.forward_step import TermLosses
from megatron_loss_agg.mcore.split import SPLITS, is_by_token, layout_of, sums_of_samples
from megatron_loss_agg.microbatch import (
    Microbatch,
    MicrobatchOfTerms,
    MicrobatchShape,
    term_microbatches,
)
from megatron_loss_agg.plan import StepPlan, plan_of_first_term, token_shape

_TOLERANCE = 1e-5
"""Of sums, relative: they are in fp32."""


_BY_SAMPLE = "mask sum of a sample"


class SumsOnRank(NamedTuple):
    """Sums of one term of one microbatch over this rank's tokens, on their device."""

    plan: StepPlan
    i: int  # of the microbatch in its step
    sums: Mapping[str, Tensor]  # by name, see `_planned_sums`


def sums_on_rank(
    holders: Holders,
    plan: StepPlan,
    i: int,
    term: TermLosses,
    weights: Tensor,
    starts: Tensor | None,
    is_first_step: bool,
) -> SumsOnRank:
    """The sums that are compared after the call; in the first step by sample, too.

    Those show most wrong splits. Waits for no device.
    """
    share = 1 / holders.size if term.is_whole else 1.0
    sums = {}
    if is_first_step:
        mask = term.mask.double().reshape(-1)
        sums[_BY_SAMPLE] = sums_of_samples(mask, plan.shapes[i], starts) * share
        if term.sequence_mask_sum is not None:
            sums["mask sum of a sequence"] = term.sequence_mask_sum
    sums["mask sum"] = term.mask.sum() * share
    sums["sum of weights"] = weights.sum()
    if term.sequence_mask_sum is not None:
        sums["mask sum of all sequences"] = term.sequence_mask_sum.sum()
    return SumsOnRank(plan, i, sums)


def check_mask_sums(
    call: Call, plans: Mapping[str, StepPlan], terms: Sequence[SumsOnRank], is_first_step: bool
) -> None:
    """Raise DataError, on all ranks that hold a microbatch alike, unless the sums are planned ones.

    Waits for the device once.
    """
    columns = [x.reshape(-1).double() for term in terms for x in term.sums.values()]
    numbers = torch.cat(columns) if columns else torch.zeros(0, dtype=torch.float64)
    remaining = iter(_over_holders(call, plans, terms, numbers, is_first_step).tolist())
    for plan, i, sums in terms:
        for name in sums:
            for planned, size in _planned_sums(plan, i, name):
                total = next(remaining)
                if not abs(total - planned) <= _allowed(name, planned, size):  # NaN is not
                    raise _wrong_sum(call, i, name, planned, total)


def _wrong_sum(call: Call, i: int, name: str, planned: float, total: float) -> DataError:
    ranks = dist.get_world_size(call.groups.comparing)
    if name == "sum of weights" and ranks > 1:  # though the mask has the planned sum
        return DataError(
            f"the weights of microbatch {i} must add up to {planned:g} over its context-parallel ranks, "
            f"got {total:g}. Give all of them the same ids, sample_weights and rejected, and each its "
            "part of the batch's 'loss_mask', split as declared (--loss-aggregation-split, "
            "LossHook(split=))."
        )
    return DataError(
        "the loss function's mask must be this rank's part of the batch's 'loss_mask': in microbatch "
        f"{i} its {name} must be {planned:g}, got {total:g}. Leave the mask undivided (and fractions "
        "in fp32), split it as declared (--loss-aggregation-split, LossHook(split=)), or give the final "
        f"mask: {HOW_TO_READ}."
    )


def _allowed(name: str, planned: float, size: float) -> float:
    """The error that a sum may have: of masks of 0 and 1 fp32 adds up exactly."""
    is_count = name != "sum of weights" and planned.is_integer() and planned < 2**24
    return min(_TOLERANCE * size, 0.5) if is_count else _TOLERANCE * size


def _over_holders(
    call: Call,
    plans: Mapping[str, StepPlan],
    terms: Sequence[SumsOnRank],
    numbers: Tensor,
    is_first_step: bool,
) -> Tensor:
    """``numbers``, those of ``terms`` in order, added up over the ranks that hold the microbatch."""
    group = call.groups.comparing
    if dist.get_world_size(group) == 1:
        return numbers
    if call.groups.dp_cp is None:  # all ranks hold the same microbatches
        if is_first_step:
            sizes = all_gather(torch.tensor([len(numbers)]), group)
            if bool((sizes != len(numbers)).any()):
                raise _other_batches("numbers of samples")
        totals = for_backend(numbers, group)
        dist.all_reduce(totals, group=group)
        return totals
    index, size = _rows_of_sums(plans, terms)
    index = index.to(numbers.device)
    totals = for_backend(numbers.new_zeros(size).index_add_(0, index, numbers), group)
    dist.all_reduce(totals, group=group)
    return totals.to(numbers.device)[index]


def _rows_of_sums(plans: Mapping[str, StepPlan], terms: Sequence[SumsOnRank]) -> tuple[Tensor, int]:
    """The row of each sum in a table of all ranks' microbatches and samples; and its length."""
    first_row: dict[tuple[int, str], int] = {}  # alike on all ranks, whatever terms they have
    size = 0
    for plan in plans.values():
        for name in (_BY_SAMPLE, "mask sum", "sum of weights"):
            first_row[id(plan), name] = size
            size += plan.counts.all_samples if name == _BY_SAMPLE else plan.counts.microbatches
    rows = [torch.zeros(0, dtype=torch.int64)]
    for plan, i, sums in terms:
        for name in sums:
            of_sums = plan.sample_rows(i) if name == _BY_SAMPLE else plan.rows.microbatches[[i]]
            rows.append(first_row[id(plan), name] + of_sums)
    return torch.cat(rows), size


def _planned_sums(plan: StepPlan, i: int, name: str) -> list[tuple[float, float]]:
    """The planned sums of this name, over all context-parallel ranks.

    Each with the size of its terms, by which an error is measured.
    """
    if name == "sum of weights":
        c_S, mask_sum_S = plan.coefficients(i), plan.mask_sums(i)
        return [(float(c_S.dot(mask_sum_S)), float(c_S.abs().dot(mask_sum_S)))]
    if name in ("mask sum", _BY_SAMPLE):
        mask_sums = plan.mask_sums(i)
    else:
        sequences = plan.sequences[i]
        assert sequences is not None  # since the script's loss is of them
        mask_sums = sequences.mask_sum
    if name in ("mask sum", "mask sum of all sequences"):
        mask_sums = mask_sums.sum().reshape(1)
    return [(x, x) for x in mask_sums.tolist()]


class WholeTokens(NamedTuple):
    """The tokens of one microbatch, before context parallelism."""

    inputs: list[Tensor]  # integers that the model is called with: copies, on the CPU
    shape: MicrobatchShape  # as of `token_shape`
    is_real: Tensor  # not padding; in the shape of the mask

    @classmethod
    def of(cls, of_terms: MicrobatchOfTerms, batch: Any = None) -> WholeTokens:
        """Of a microbatch; where its losses are by sample, of its sequences.

        Args:
            batch: of the microbatch, if one was drawn.
        """
        microbatch = _with_tokens(of_terms)
        inputs = microbatch.model_inputs or model_inputs_of(batch, microbatch.loss_mask)
        if not is_by_token(microbatch.shape):
            inputs = ()
        telling = [x for x in inputs if not _are_alike(x) and not _are_positions(x)]
        copies = [x.detach().cpu().clone() for x in telling]
        return cls(copies, microbatch.shape, _is_real(microbatch))


def is_pack_of_several(of_terms: MicrobatchOfTerms) -> bool:
    """Whether it is a pack of several samples, whose tokens may show their split."""
    offsets = _with_tokens(of_terms).cu_seqlens
    return offsets is not None and len(offsets) > 2


def _with_tokens(of_terms: MicrobatchOfTerms) -> Microbatch:
    """The microbatch of the term that says most of the split, as `token_shape` chooses it."""
    several = [x if x.sequences is None else x.sequences for x in term_microbatches(of_terms)]
    packs = [x for x in several if x.cu_seqlens is not None]
    return (packs or several)[0]


class SplitFinding(NamedTuple):
    """The splits of one microbatch that fit a rank's model inputs."""

    splits: Sequence[str]  # of which these are this rank's part
    others: Sequence[int]  # if of none: other microbatches whose part they are


class _RankFindings(NamedTuple):
    """The findings of one context-parallel rank, by the row of the microbatch in the step."""

    shared: dict[int, dict[str, Any]]  # see `_shared_values`
    splits: dict[int, SplitFinding | None]  # None: nothing can be compared
    depend_on_split: Collection[int]  # rows whose weights are right under one split alone
    are_split: Collection[int]  # rows that several ranks hold


def depends_on_split(
    holders: Holders, plans: Mapping[str, StepPlan], i: int, is_gathered: bool
) -> bool:
    """Whether the weights of microbatch ``i`` are right under one split alone."""
    if holders.size == 1:
        return False
    if not any(_has_tokens_with_loss(plan, i) for plan in plans.values()):
        return False
    return is_gathered or has_several_samples(plans, i)


def _has_tokens_with_loss(plan: StepPlan, i: int) -> bool:
    sequences = plan.sequences[i]
    has_loss = bool(plan.coefficients(i).any())
    # Of losses by sample, sequences of padding alone count, too.
    return has_loss and (sequences is None or bool(sequences.mask_sum.any()))


def check_tokens(
    call: Call,
    tokens: Mapping[int, WholeTokens],
    inputs: Mapping[int, Sequence[Tensor] | None],
    plans: Mapping[str, StepPlan],
    depend_on_split: Collection[int],
    split: str,
    is_declared: bool,
) -> set[str] | None:
    """Raise unless each rank's model was called with its part of the planned tokens.

    On all ranks of the last stage; the tensor-parallel ranks that read batches compare.

    Args:
        tokens: of the microbatches of the step that are compared; empty on ranks that read none.
        inputs: by microbatch, the integer tensors that the model was called with.
        depend_on_split: microbatches whose weights are right under one split alone.
        is_declared: the user or the launcher has said that the split is ``split``.

    Returns:
        the splits under which all that could be compared fits; None if nothing could be.

    Raises:
        DataError: another split, or other microbatches.
    """
    rows = plan_of_first_term(plans).rows.microbatches.tolist()
    numbers = {row: i for i, row in enumerate(rows)}  # of this rank's microbatches

    def findings() -> _RankFindings:
        return _RankFindings(
            {rows[i]: _shared_values(plans, i, x.shape) for i, x in tokens.items()},
            {rows[i]: _finding(call, tokens, i, x) for i, x in inputs.items() if i in tokens},
            {rows[i] for i in depend_on_split},
            {rows[i] for i, x in tokens.items() if call.groups.holders(x.shape).size > 1},
        )

    def compare() -> set[str] | None:
        ranks = gather_objects(findings, call.groups.comparing, "comparing tokens")
        splits = {}
        for row in sorted({row for rank in ranks for row in rank.splits}):
            holders = [rank for rank in ranks if row in rank.shared]
            for name, x in holders[0].shared[row].items():
                if any(rank.shared[row][name] != x for rank in holders):
                    raise _other_batches(name)
            of_holders = [rank.splits.get(row) for rank in holders]
            i = numbers.get(row, row)
            splits[row] = _common_splits(i, [x for x in of_holders if x is not None])
        are_split = {row for rank in ranks for row in rank.are_split}
        compared = [x for row, x in splits.items() if x is not None and row in are_split]
        fitting = set.intersection(*compared) if compared else None
        for row in sorted({row for rank in ranks for row in rank.depend_on_split}):
            of_microbatch = fitting if splits.get(row) is None else splits[row]
            i = numbers.get(row, row)
            check_split_was_verified(i, of_microbatch, split, is_declared)
        return fitting

    return broadcast_result(compare, call.groups.tp, 0, "comparing tokens")


def _other_batches(different: str) -> DataError:
    return DataError(
        f"all context-parallel ranks must read the same batches, got different {different}. Split "
        "every batch by sequence, not by sample, and draw nothing at random on one rank alone."
    )


def check_split_was_verified(
    i: int, fitting: Collection[str] | None, split: str, is_declared: bool
) -> None:
    """Raise DataError unless the declared split, on which microbatch ``i`` depends, fits.

    Args:
        fitting: the splits that fit the tokens that were compared; None if there were none.
    """
    if fitting is None and not is_declared:
        raise DataError(
            f"the split of microbatch {i} must be verified, and the model is not called with labels or "
            f"tokens of the batch. Declare it: --loss-aggregation-split {{{','.join(SPLITS)}}} "
            "(LossHook(split=)), or give Microbatch(model_inputs=...)."
        )
    if fitting is None or split in fitting:
        return
    if not fitting:
        raise DataError(
            f"microbatch {i} must be split over context-parallel ranks as one of {', '.join(SPLITS)}, "
            "got tokens that are no part of the batch's under any of them. Split every sequence as "
            "CPLayout does, or give Microbatch(model_inputs=...) with the tensors of the model's calls."
        )
    names = " or ".join(sorted(fitting))
    raise DataError(
        f"microbatch {i} must be split over context-parallel ranks as declared, {split}, got {names}. "
        f"Give --loss-aggregation-split {names} (LossHook(split=))."
    )


def _common_splits(i: int, findings: Sequence[SplitFinding]) -> set[str] | None:
    """The splits that fit on all ranks whose tokens tell anything; None if there is no such rank.

    Raises:
        DataError: the tokens are those of other microbatches, or of several ranks the same.
    """
    if not findings:
        return None
    common = set.intersection(*({*x.splits} for x in findings))
    misfits = [x for x in findings if not x.splits]
    if misfits and all(x.others for x in misfits):
        raise DataError(
            f"the model must be called with the tokens of microbatch {i} of the step in its turn, got "
            f"those of {misfits[0].others[0]}. Give microbatches in the order of the forward steps "
            "(read_step, hook.step), with new tensors in each, since all are drawn before the first "
            "forward pass."
        )
    if not common and any(x.splits for x in findings):
        raise DataError(
            f"every context-parallel rank must have its own part of the tokens of microbatch {i}, got "
            f"parts of the splits {[[*x.splits] for x in findings]} on different ranks. Split every "
            f"sequence as one of {', '.join(SPLITS)} does (CPLayout)."
        )
    return common


def has_several_samples(plans: Mapping[str, StepPlan], i: int) -> bool:
    """Whether microbatch ``i`` is a pack of several samples.

    The mask sum of a lone sample shows a wrong split by itself.
    """
    starts = token_shape(plans, i).starts
    return starts is not None and len(starts) > 2


def _finding(
    call: Call, tokens: Mapping[int, WholeTokens], i: int, inputs: Sequence[Tensor] | None
) -> SplitFinding | None:
    """None where nothing can be compared."""
    whole = tokens[i]
    if not whole.inputs:
        return None
    on_rank = [x.detach().cpu() for x in inputs or () if not _are_positions(x)]
    # A rank that holds only padding is called with tokens that are all alike: they are compared, too.
    splits = [split for split in SPLITS if _fits(call, whole, on_rank, split)]
    if splits:
        return SplitFinding(splits, [])
    telling = [x for x in on_rank if not _are_alike(x)]
    if not telling:
        return None
    others = [
        j for j, x in tokens.items() if any(_fits(call, x, telling, split) for split in SPLITS)
    ]
    return SplitFinding([], others)


def _fits(call: Call, tokens: WholeTokens, on_rank: Sequence[Tensor], split: str) -> bool:
    """Whether one of this rank's tensors is its part of a microbatch's, but for padding."""
    shape = tokens.shape
    try:
        holders = call.groups.holders(shape)
        layout = layout_of(shape, split, holders.size, holders.rank)
    except DataError:  # of a length that cannot be split in this way
        return False
    is_padding = ~layout.shard(tokens.is_real)
    for whole in tokens.inputs:
        part = layout.shard(whole.reshape(shape.mask))
        same_size = (x.reshape(part.shape) for x in on_rank if x.numel() == part.numel())
        if any(bool(((x == part) | is_padding).all()) for x in same_size):
            return True
    return False


def _is_real(microbatch: Microbatch) -> Tensor:
    """True at tokens of a sample, False at padding: bool in the shape of the mask, on the CPU.

    In rows, padding is all behind the last active token.
    """
    sample_index = microbatch.sample_index()
    if sample_index is not None:
        is_real = sample_index < microbatch.num_samples
    else:
        is_active = microbatch.loss_mask.detach() != 0
        is_real = is_active.flip(-1).cummax(dim=-1).values.flip(-1)
    return is_real.reshape(microbatch.loss_mask.shape).cpu()


def _shared_values(plans: Mapping[str, StepPlan], i: int, shape: MicrobatchShape) -> dict[str, Any]:
    """By name, the values that all ranks of a microbatch must have alike.

    Later ones depend on earlier ones, so that the first that differs is the cause.
    """
    return {
        "shapes of masks": shape.mask,
        "offsets": None if shape.starts is None else shape.starts.tolist(),
        "masks": [x.mask_sums(i).tolist() for x in plans.values()],
        "ids or weights of samples": [x.coefficients(i).tolist() for x in plans.values()],
    }


def _are_alike(x: Tensor) -> bool:
    """Whether all numbers are equal."""
    flat = x.reshape(-1)
    return not flat.numel() or bool((flat == flat[0]).all())


def _are_positions(x: Tensor) -> bool:
    """Whether each row is 0, 1, 2 and so on, which a script may make itself whatever its split."""
    row = x if x.dim() else x.reshape(1)
    return bool((row == torch.arange(row.shape[-1], device=x.device)).all())
