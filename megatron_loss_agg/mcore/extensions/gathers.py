"""Checks what `TokenLoss(whole=)` says of losses that every context-parallel rank has whole.

Each of the ``c`` ranks computes the same losses of all tokens, from what the ranks gathered from
each other. What the gather does in the backward pass decides how often a parameter's gradient
arrives in the host's sum over ranks, and loops differ:

============ ================================================ =======
gather       a rank's part gets, in backward                  arrives
============ ================================================ =======
local_grad   the gradient of this rank's losses               once
reduced_grad the sum of the gradients of all ranks' losses    c times
============ ================================================ =======

So the losses of the first rank alone are differentiated, and then those of the last one alone: with
a sum, both reach the same ranks; without one, each reaches its own rank or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import all_gather
from megatron_loss_agg.errors import LayoutError
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss
from megatron_loss_agg.mcore.host import GATHERS, Call, ParallelGroups
from megatron_loss_agg.mcore.step import PlannedStep
from megatron_loss_agg.mcore.token_loss import TokenLoss

_SAME = 1e-6
"""Relative difference up to which two ranks' sums are of the same values."""
_KINDS = (None, *GATHERS)
_ARRIVES = {
    "local_grad": "the gradient of its own losses alone",
    "reduced_grad": "the sum of the gradients of all ranks' losses",
}


class GatherCheck(Extension):
    """Raises, on all context-parallel ranks, if losses were gathered otherwise than declared.

    In the first training step ``compute`` is called twice more for each term, with copies of what
    the model returned: a tensor, or lists, tuples and dicts of them. Not seen are a gather in the
    forward step, before ``compute``, and a factor by which a gather multiplies gradients.
    """

    def __init__(self) -> None:
        self._verified = False

    def adapt(
        self, call: Call, loss_func: Callable[..., Any], names: Sequence[str]
    ) -> tuple[Callable[..., Any], Sequence[str]]:
        trains = call.trains and torch.is_grad_enabled()
        if self._verified or call.groups.cp_size == 1 or not trains:
            return loss_func, names
        whole = loss_func.whole if isinstance(loss_func, TokenLoss) else None
        _check_same(whole, call.groups.cp)
        if whole is None or not isinstance(loss_func, TokenLoss):
            return loss_func, names
        given = loss_func

        def measured(output: Any, *weights: Any) -> Any:
            for name in names:
                found = _measured(name, given, (output, *weights), call.groups)
                if found not in (None, whole):
                    raise LayoutError(
                        f"TokenLoss(whole={whole!r}) for the losses of {name!r}; measured: in the "
                        f"backward pass a context-parallel rank gets {_ARRIVES[found]}, so that "
                        "the gradient would be wrong by a factor of the number of ranks; expected "
                        f"whole={found!r}"
                    )
            return given.compute(output, *weights)

        takes = given.takes_weights
        return TokenLoss(measured, given.loss_mask, whole, takes_weights=takes), names

    @contextmanager
    def around(
        self, call: Call, plan: PlannedStep | None
    ) -> Iterator[Callable[[MicrobatchLoss], None] | None]:
        def on_loss(x: MicrobatchLoss) -> None:
            # Masks that were counted tell by their shapes.
            if call.trains and call.groups.cp_size > 1 and x.plan.is_late and not self._verified:
                _compare(x.losses[x.first], x.masks[x.first], x.whole is not None, call.groups.cp)

        yield on_loss
        self._verified |= call.trains and plan is not None and not plan.is_empty


def _check_same(whole: str | None, cp: dist.ProcessGroup) -> None:
    """Raise LayoutError unless all ranks of ``cp``, which must call, have the same ``whole``."""
    row = torch.tensor([_KINDS.index(whole)], dtype=torch.float64)
    kinds = [_KINDS[int(kind)] for kind in all_gather(row, cp)]
    if len(set(kinds)) > 1:
        raise LayoutError(
            f"the context-parallel ranks return TokenLoss(whole=...) with {kinds}, in their order; "
            "expected the same on every rank"
        )


def _measured(
    name: str, loss_func: TokenLoss, arguments: Sequence[Any], groups: ParallelGroups
) -> str | None:
    """One of `GATHERS`; None if nothing can be said, as where gradients are 0.

    All context- and tensor-parallel ranks must call; if one raises, all do.
    """
    reached = []
    for rank in (0, groups.cp_size - 1):
        leaves: list[Tensor] = []
        copies = [_copied(x, leaves) for x in arguments]
        leaves = _of_ranks(leaves, groups.cp)
        if not leaves:
            return None
        with torch.enable_grad():
            losses = loss_func.compute(*copies)[0]
        losses, mask = (
            x[name] if isinstance(x, Mapping) else x for x in (losses, loss_func.loss_mask)
        )
        if not _is_attached(name, losses, groups.cp):
            return None
        loss = losses.reshape(-1)[mask.reshape(-1) != 0].sum() * float(groups.cp_rank == rank)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        reached.append(any(g is not None and bool(g.nan_to_num().any()) for g in found))
    rows = all_gather(torch.tensor(reached, dtype=torch.float64), groups.cp)
    rows = all_gather(rows.flatten(), groups.tp).view(-1, groups.cp_size, 2).amax(dim=0)
    of_first, of_last = rows.bool().unbind(-1)
    if not rows.any():
        return None
    if torch.equal(of_first, of_last):
        return "reduced_grad"
    if not of_first[1:].any() and not of_last[:-1].any():
        return "local_grad"
    kinds = "; ".join(f"{kind}: {arrives}" for kind, arrives in _ARRIVES.items())
    raise LayoutError(
        f"TokenLoss(whole=...) for the losses of {name!r}, whose gather passes on neither kind of "
        f"gradient to a context-parallel rank; expected one of {kinds}"
    )


def _copied(x: Any, leaves: list[Tensor]) -> Any:
    """A copy of what a model returns, cut off from its graph; its leaves are added."""
    if isinstance(x, Tensor):
        copy = x.detach().clone()
        if not x.requires_grad:
            return copy
        leaves.append(copy.requires_grad_())
        return copy * 1  # not a leaf: `compute` may overwrite it
    if type(x) is dict:
        return {key: _copied(value, leaves) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        values = [_copied(value, leaves) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    return x


def _of_ranks(leaves: Sequence[Tensor], cp: dist.ProcessGroup) -> list[Tensor]:
    """Those that differ between the ranks of ``cp``: others were gathered before."""
    if not leaves:
        return []
    sums = torch.stack([x.detach().sum(dtype=torch.float64) for x in leaves])
    rows = all_gather(sums.cpu(), cp)
    alike = torch.isclose(rows, rows[:1], rtol=_SAME, atol=0).all(dim=0)
    return [x for x, same in zip(leaves, alike.tolist(), strict=True) if not same]


def _is_attached(name: str, losses: Tensor, cp: dist.ProcessGroup) -> bool:
    """Whether they have a gradient.

    Raises:
        LayoutError: on some ranks of ``cp`` alone, so that others would wait in a backward pass.
    """
    attached = all_gather(torch.tensor([losses.requires_grad], dtype=torch.float64), cp).view(-1)
    if attached.any() and not attached.all():
        raise LayoutError(
            f"the losses of {name!r} have a gradient on the context-parallel ranks "
            f"{attached.nonzero().view(-1).tolist()} alone; expected it on every rank: gather "
            "with autograd on ranks without active tokens, too"
        )
    return bool(attached.all())


def _compare(losses: Tensor, mask: Tensor, whole: bool, cp: dist.ProcessGroup) -> None:
    """Raise LayoutError if values tell that losses are of all tokens on every rank, or are not.

    All ranks of ``cp`` must call; if one raises, all do. Losses that are all equal tell nothing.

    Args:
        losses, mask: [tokens] of one microbatch.
        whole: what the script says.
    """
    x = losses.detach().reshape(-1)[mask.reshape(-1) != 0].double()
    spread = x.max() - x.min() if len(x) else x.sum()
    facts = [x.new_tensor(mask.numel()), x.new_tensor(len(x)), x.sum(), x.square().sum(), spread]
    rows = all_gather(torch.stack(facts), cp)
    equal = torch.allclose(rows, rows[:1], rtol=_SAME, atol=0)
    if equal == whole or not bool((rows[:, -1] > 0).any()):
        return
    if equal:
        raise LayoutError(
            "losses and masks are the same on all context-parallel ranks; expected those of each "
            "rank's own tokens, or TokenLoss(whole='local_grad') or 'reduced_grad' where every "
            "rank gathers the losses of all tokens"
        )
    raise LayoutError(
        "TokenLoss(whole=...) with losses and masks that differ between the context-parallel "
        "ranks; expected those of all tokens on each: gather both, or leave out whole="
    )
