"""Checks what `TokenLoss(whole=)` says of losses that every context-parallel rank has whole.

The losses of one rank alone are differentiated: if the gather sums in its backward pass
(``reduced_grad``), they reach the parts of other ranks. Since one rank's part may have no active
token, the first and the last rank take turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_loss_agg.collectives import all_gather, any_rank
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.host import Call, ParallelGroups
from megatron_loss_agg.mcore.token_loss import TokenLoss


class GatherCheck(Extension):
    """Raises, on all context-parallel ranks, if losses were gathered otherwise than declared.

    Or if the ranks have different losses. For a term's first losses with a gradient ``compute`` is
    called twice more, with copies of what the model returned and parameters without gradients. Not
    seen are a gather in the forward step, before ``compute``, and a factor by which a gather
    multiplies gradients.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()  # terms whose gather was measured

    def adapt(
        self, call: Call, loss_func: Callable[..., Any], names: Sequence[str]
    ) -> tuple[Callable[..., Any], Sequence[str]]:
        trains = call.trains and torch.is_grad_enabled()
        whole = loss_func.whole if isinstance(loss_func, TokenLoss) else None
        # What a coefficient of 0 multiplies cannot be wrong by a factor.
        unknown = [x for x in names if x not in self._known and call.terms[x].coefficient]
        if not unknown or whole is None or call.groups.cp_size == 1 or not trains:
            return loss_func, names
        given: Any = loss_func

        def measured(output: Any, *weights: Any) -> Any:
            for name in unknown:
                with _frozen(call.chunks):
                    found = _measured(name, given, (output, *weights), call.groups)
                if found not in (None, whole):
                    raise DataError(
                        f"TokenLoss(whole={whole!r}) for the losses of {name!r}, whose gather is "
                        f"{found!r}: the gradient would be wrong by a factor of the number of "
                        f"context-parallel ranks; expected whole={found!r}"
                    )
                if found is not None:
                    self._known.add(name)
            return given.compute(output, *weights)

        mask, takes = given.loss_mask, given.takes_weights
        return TokenLoss(measured, mask, whole, takes_weights=takes), names


@contextlib.contextmanager
def _frozen(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Parameters without gradients: a layer may add them to those of the step in its backward."""
    parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_()


def _measured(
    name: str, loss_func: TokenLoss, arguments: Sequence[Any], groups: ParallelGroups
) -> str | None:
    """One of `GATHERS`, the same on all context- and tensor-parallel ranks.

    None if no gradient arrived, as with advantages of 0.
    """
    own = other = False  # whether losses of this rank, and of another one, reach this rank's part
    for rank in (0, groups.cp_size - 1):
        copies, leaves = _copied(arguments, groups.cp)
        if not leaves:
            return None
        with torch.enable_grad():
            losses = loss_func.compute(*copies)[0]
        losses, mask = (
            x[name] if isinstance(x, Mapping) else x for x in (losses, loss_func.loss_mask)
        )
        if not losses.requires_grad:
            continue  # refused by the hook
        losses = losses.reshape(-1)[mask.reshape(-1) != 0]
        _check_same(name, loss_func, losses.detach(), groups.cp)
        is_own = groups.cp_rank == rank
        loss = losses.sum() * float(is_own)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        reached = any(g is not None and bool(g.nan_to_num().any()) for g in gradients)
        own, other = own or (reached and is_own), other or (reached and not is_own)
    own, other = (any_rank(any_rank(x, groups.cp), groups.tp) for x in (own, other))
    if other:
        return "reduced_grad"
    return "local_grad" if own else None


def _check_same(name: str, loss_func: TokenLoss, losses: Tensor, cp: dist.ProcessGroup) -> None:
    """Raise DataError, on all ranks of ``cp``, unless they have the same losses."""
    sizes = losses.double().nan_to_num().abs()
    of_ranks = all_gather(torch.stack([sizes.sum(), sizes.square().sum()]).cpu(), cp)
    if not torch.allclose(of_ranks, of_ranks[:1], rtol=1e-3, atol=0):
        raise DataError(
            f"the losses of {name!r} differ between context-parallel ranks, and TokenLoss(whole="
            f"{loss_func.whole!r}) says that every rank has all of them; expected the same on all: "
            "of log-probabilities that were gathered, or summed by SequenceSum(microbatch, layout, "
            "group); or this rank's losses and mask without whole="
        )


def _copied(arguments: Any, cp: dist.ProcessGroup) -> tuple[Any, list[Tensor]]:
    """What a model returned, cut off from its graph; and the new leaves that ranks of ``cp`` split.

    Those that are the same on all of them were gathered before.
    """
    leaves: list[Tensor] = []

    def copied(x: Tensor) -> Tensor:
        copy = x.detach().clone()
        if not x.requires_grad:
            return copy
        leaves.append(copy.requires_grad_())
        return copy * 1  # not a leaf: `compute` may overwrite it

    copies = tree_map_only(Tensor, copied, arguments)
    if not leaves:
        return copies, []
    sums = torch.stack([x.detach().sum(dtype=torch.float64) for x in leaves]).cpu()
    alike = torch.isclose(all_gather(sums, cp), sums, rtol=1e-6, atol=0).all(dim=0)
    return copies, [x for x, same in zip(leaves, alike.tolist(), strict=True) if not same]
