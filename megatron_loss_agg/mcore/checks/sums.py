"""Compares the masks of a step's loss functions with the counted masks, by their sums.

The weights follow the mask that the script passes to its loss function. They are right only if the
mask's sums over the ranks that split its tokens are the counted ones:

    sum_t m_t = M_s                                         for each sample, in the first step
    sum_t m_t = sum_s M_s  and  sum_t w_t = sum_s c_s M_s   for each microbatch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import for_backend
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.mcore.batches import HOW_TO_READ
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.forward_step import TermLosses
from megatron_loss_agg.mcore.split import RankSamples, sums_of_samples
from megatron_loss_agg.plan import StepPlan

_TOLERANCE = 1e-5
"""Relative; the sums are in fp32."""

_BY_SAMPLE = "mask sum of a sample"


class TermSums(NamedTuple):
    """Sums over this rank's tokens of one microbatch, for one term, on the tokens' device."""

    plan: StepPlan
    i: int  # the microbatch's index in its step
    sums: Mapping[str, Tensor]  # by name, see `_planned_sums`


def note_sums(
    samples: RankSamples,
    plan: StepPlan,
    i: int,
    term: TermLosses,
    weights: Tensor,
    is_first_step: bool,
) -> TermSums:
    """The sums of one microbatch for `check_sums`, which compares them after the step.

    They stay on their device, so that no microbatch waits for it. The first step also has sums by
    sample, which catch most wrong splits.
    """
    # Sums are added up over context-parallel ranks. If each rank has all tokens, count them once.
    parts = samples.cp.size if term.is_whole else 1
    sums = {}
    if is_first_step:
        mask = term.mask.double().reshape(-1)
        sums[_BY_SAMPLE] = sums_of_samples(mask, plan.shapes[i], samples.starts) / parts
        if term.sequence_mask_sum is not None:
            sums["mask sum of a sequence"] = term.sequence_mask_sum
    mask_sum = term.mask.sum()
    sums["mask sum"] = mask_sum if parts == 1 else mask_sum / parts
    sums["sum of weights"] = weights.sum()
    if term.sequence_mask_sum is not None:
        sums["mask sum of all sequences"] = term.sequence_mask_sum.sum()
    return TermSums(plan, i, sums)


def check_sums(call: Call, plans: Mapping[str, StepPlan], notes: Sequence[TermSums]) -> None:
    """Raise DataError, on all ranks that share a microbatch, unless its sums are the planned ones.

    Waits for the device once.
    """
    columns = [x.reshape(-1) for note in notes for x in note.sums.values()]
    numbers = torch.cat(columns).double() if columns else torch.zeros(0, dtype=torch.float64)
    totals = iter(_over_cp_ranks(call, plans, notes, numbers).tolist())
    for plan, i, sums in notes:
        for name in sums:
            for planned, size in _planned_sums(plan, i, name):
                total = next(totals)
                if not abs(total - planned) <= _tolerance(name, planned, size):  # True for NaN
                    raise _wrong_sum(call, i, name, planned, total)


def _wrong_sum(call: Call, i: int, name: str, planned: float, total: float) -> DataError:
    ranks = dist.get_world_size(call.groups.split_group)
    if name == "sum of weights" and ranks > 1:  # the mask sum was compared first and was right
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


def _tolerance(name: str, planned: float, size: float) -> float:
    """The absolute tolerance of a sum."""
    # Sums of 0 and 1 are exact in fp32, so a difference of one token is always an error.
    is_count = name != "sum of weights" and planned.is_integer()
    return min(_TOLERANCE * size, 0.5) if is_count else _TOLERANCE * size


def _planned_sums(plan: StepPlan, i: int, name: str) -> list[tuple[float, float]]:
    """The planned sums of this name over all context-parallel ranks.

    Each comes with the sum of the absolute values that it adds, since rounding errors are relative
    to that.
    """
    sums = plan.sums[i]
    if name == "sum of weights":
        return [(sums.weights, sums.absolute_weights)]
    if name == "mask sum":
        return [(sums.mask, sums.mask)]
    if name == _BY_SAMPLE:
        return [(x, x) for x in plan.mask_sums(i).tolist()]
    sequences = plan.sequences[i]
    assert sequences is not None  # since the script's loss is computed from them
    mask_sums = sequences.mask_sum
    if name == "mask sum of all sequences":
        mask_sums = mask_sums.sum().reshape(1)
    return [(x, x) for x in mask_sums.tolist()]


def _over_cp_ranks(
    call: Call,
    plans: Mapping[str, StepPlan],
    notes: Sequence[TermSums],
    numbers: Tensor,
) -> Tensor:
    """``numbers`` (the sums of ``notes``, in order) added up over the ranks of each microbatch."""
    group = call.groups.split_group
    if dist.get_world_size(group) == 1:
        return numbers
    if call.groups.dp_cp is not None:
        return _over_dynamic_groups(group, plans, notes, numbers)
    totals = for_backend(numbers, group)
    dist.all_reduce(totals, group=group)
    return totals


def _over_dynamic_groups(
    group: dist.ProcessGroup,
    plans: Mapping[str, StepPlan],
    notes: Sequence[TermSums],
    numbers: Tensor,
) -> Tensor:
    """Like `_over_cp_ranks`, but each microbatch has its own ranks.

    Uses one all-reduce of a table with a row for every sum of every microbatch of all ranks. One
    all-reduce per process group might deadlock, since ranks would run them in different orders.
    """
    first_rows: dict[tuple[int, str], int] = {}  # the same on all ranks, whatever terms they have
    size = 0
    for plan in plans.values():
        for name in (_BY_SAMPLE, "mask sum", "sum of weights"):
            first_rows[id(plan), name] = size
            size += plan.counts.all_samples if name == _BY_SAMPLE else plan.counts.microbatches
    rows = [torch.zeros(0, dtype=torch.int64)]
    for plan, i, sums in notes:
        for name in sums:
            index = plan.sample_rows(i) if name == _BY_SAMPLE else plan.microbatch_rows[[i]]
            rows.append(first_rows[id(plan), name] + index)
    index = torch.cat(rows).to(numbers.device)
    totals = for_backend(numbers.new_zeros(size).index_add_(0, index, numbers), group)
    dist.all_reduce(totals, group=group)
    return totals.to(numbers.device)[index]
