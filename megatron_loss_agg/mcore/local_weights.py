"""The weights of this rank's tokens of one microbatch: its mask times the samples' coefficients."""

from __future__ import annotations

from torch import Tensor

from megatron_loss_agg.mcore.call import Holders
from megatron_loss_agg.mcore.forward_step import TermLosses
from megatron_loss_agg.mcore.split import check_local_mask, local_starts
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.tensors import at_least_fp32
from megatron_loss_agg.weighted_sum import weights_of_tokens


def starts_on_rank(
    plan: StepPlan, i: int, term: TermLosses, holders: Holders, split: str
) -> Tensor | None:
    """The start of each sample of microbatch ``i`` among the tokens with losses; None: rows."""
    shape = plan.shapes[i]
    check_local_mask(term.mask, shape, holders.size, term.is_whole)
    if term.is_whole:
        return shape.starts
    return local_starts(shape, split, holders.size, holders.rank)


def weights_on_rank(
    plan: StepPlan, i: int, term: TermLosses, holders: Holders, starts: Tensor | None
) -> Tensor:
    """``m_t * c_s`` in the shape of the losses, at least fp32.

    Where every context-parallel rank has all losses, each counts its share of them.
    """
    coefficient_S = plan.coefficients(i)
    if term.is_whole:
        coefficient_S = coefficient_S / holders.size
    mask = term.mask.reshape(-1)
    if starts is None:
        samples = plan.sizes[i]
        mask = mask.reshape(samples, mask.numel() // max(samples, 1))
    weights = weights_of_tokens(coefficient_S, mask, starts, at_least_fp32(term.losses.dtype))
    return weights.view(term.losses.shape)
