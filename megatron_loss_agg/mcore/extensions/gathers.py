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
a sum, every rank gets the same gradient both times; without one, only the rank itself gets any.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import all_gather
from megatron_loss_agg.errors import LayoutError
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss
from megatron_loss_agg.mcore.extensions.masked_sum import kind_of
from megatron_loss_agg.mcore.host import GATHERS, Call, ParallelGroups
from megatron_loss_agg.mcore.step import PlannedStep
from megatron_loss_agg.mcore.token_loss import TokenLoss

_TOLERANCE = 0.1
"""Of norms, relative: half precision is coarse, and the two kinds differ by 1 or more."""
_SAME = 1e-6
"""Relative difference up to which two ranks' sums are of the same values."""
_TRIES = 16
"""Microbatches after which what cannot be measured is left as it is declared."""

_KINDS = (None, *GATHERS)
_ARRIVES = {
    "local_grad": "the gradient of its own losses alone",
    "reduced_grad": "the sum of the gradients of all ranks' losses",
}


class GatherCheck(Extension):
    """Raises, on all context-parallel ranks, if losses were gathered otherwise than declared.

    To measure it, ``compute`` is called twice more for each term, with copies of what the model
    returned: in the first training step, and later if it is another function.

    Not seen are a gather before ``compute``, in the forward step; losses of anything but its
    argument; and a factor by which a gather multiplies every gradient.
    """

    def __init__(self) -> None:
        self._verified = False
        # What is still to be measured, by declaration and function.
        self._open: dict[tuple[str, Any], set[str]] = {}
        self._tries: Counter[tuple[str, Any]] = Counter()
        self._compared = False

    def adapt(
        self, call: Call, loss_func: Callable[..., Any], names: Sequence[str]
    ) -> tuple[Callable[..., Any], Sequence[str]]:
        if call.groups.cp_size == 1 or not (call.trains and torch.is_grad_enabled()):
            return loss_func, names
        whole = loss_func.whole if isinstance(loss_func, TokenLoss) else None
        if not self._verified:
            _check_same(whole, call.groups.cp)
        if whole is None or not isinstance(loss_func, TokenLoss):
            return loss_func, names
        key, compute = (whole, kind_of(loss_func.compute)), loss_func.compute
        left = self._open.setdefault(key, set(names))
        self._tries[key] += bool(left)
        if not left or self._tries[key] > _TRIES:
            return loss_func, names

        def measured(output: Any, *weights: Any) -> Any:
            for name in sorted(left):
                found = _measured(name, loss_func, output, weights, call.groups)
                if found not in (None, whole):
                    raise _differs(name, whole, found)
                if found is not None:
                    left.discard(name)
            return compute(output, *weights)

        takes = loss_func.takes_weights
        return TokenLoss(measured, loss_func.loss_mask, whole, takes_weights=takes), names

    @contextmanager
    def around(
        self, call: Call, plan: PlannedStep | None
    ) -> Iterator[Callable[[MicrobatchLoss], None] | None]:
        splits = call.trains and call.groups.cp_size > 1

        def on_loss(x: MicrobatchLoss) -> None:
            # Masks that were counted tell by their shapes.
            if splits and x.plan.is_late and not self._compared:
                losses, mask = x.losses[x.first], x.masks[x.first]
                self._compared = _compare(losses, mask, x.whole is not None, call.groups.cp)

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
    name: str, loss_func: TokenLoss, output: Any, weights: Sequence[Any], groups: ParallelGroups
) -> str | None:
    """One of `GATHERS`; None if nothing can be said, such as of gradients that are 0.

    All context- and tensor-parallel ranks must call; if one raises, all do.
    """
    norms = []
    for rank in (0, groups.cp_size - 1):
        pairs = list[tuple[Tensor, Tensor]]()
        given = [_copied(x, pairs) for x in (output, *weights)]
        pairs = [(x, y) for x, y in pairs if y.requires_grad]
        versions = [x._version for x, _ in pairs]
        parts = _of_ranks(pairs, groups.cp)
        if not parts:
            return None
        with torch.enable_grad():
            loss = _sum_of(loss_func.compute(*given), loss_func.loss_mask, name)
        if versions != [x._version for x, _ in pairs]:
            raise LayoutError(
                "the function of a TokenLoss(whole=...) changes what the model returned otherwise "
                "than by its argument; expected it to use its argument alone"
            )
        if loss is None or not _is_attached(name, loss, groups.cp):
            return None  # if it is an error, it is better said of the loss itself
        loss = loss * float(groups.cp_rank == rank)
        found = torch.autograd.grad(loss, parts, allow_unused=True)
        # Detached: what a function returns from what it saved may have a graph of its own.
        grads = [g.detach() for g in found if g is not None]
        sizes = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]
        norms.append(torch.stack([loss.new_zeros((), dtype=torch.float64), *sizes]).norm())
    rows = all_gather(torch.stack(norms).cpu(), groups.cp)
    rows = all_gather(rows.flatten(), groups.tp).view(-1, groups.cp_size, 2)
    return _kind(name, *rows.norm(dim=0).unbind(-1))


def _copied(x: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """A copy of what a model returns, cut off from its graph; adds each tensor and its copy."""
    if isinstance(x, Tensor):
        pairs.append((x, x.detach().clone().requires_grad_(x.requires_grad)))
        return pairs[-1][1]
    if isinstance(x, MutableMapping):
        mapping = copy.copy(x)
        for key, value in x.items():
            mapping[key] = _copied(value, pairs)
        return mapping
    if isinstance(x, (list, tuple)):
        values = [_copied(value, pairs) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    return x


def _of_ranks(pairs: Sequence[tuple[Tensor, Tensor]], cp: dist.ProcessGroup) -> list[Tensor]:
    """The copies whose values differ between the ranks of ``cp``: others were gathered before."""
    numbers = all_gather(torch.tensor([len(pairs)], dtype=torch.float64), cp)
    if not pairs or bool((numbers != len(pairs)).any()):
        return []
    sums = torch.stack([x.detach().sum(dtype=torch.float64) for x, _ in pairs])
    rows = all_gather(sums.cpu(), cp)
    differ = ~torch.isclose(rows, rows[:1], rtol=_SAME, atol=0).all(dim=0)
    return [y for (_, y), differs in zip(pairs, differ, strict=True) if differs]


def _sum_of(returned: Any, mask: Any, name: str) -> Tensor | None:
    """Of the losses of active tokens; None if these are not what a `TokenLoss` returns."""
    losses = returned[0] if isinstance(returned, (tuple, list)) and returned else None
    losses, mask = (x[name] if isinstance(x, Mapping) and name in x else x for x in (losses, mask))
    if not isinstance(losses, Tensor) or losses.numel() != mask.numel():
        return None
    return torch.where(mask.reshape(-1) != 0, losses.reshape(-1), 0).sum()


def _is_attached(name: str, loss: Tensor, cp: dist.ProcessGroup) -> bool:
    """Whether it has a gradient.

    Raises:
        LayoutError: on some ranks of ``cp`` alone, so that others would wait in a backward pass.
    """
    attached = all_gather(torch.tensor([loss.requires_grad], dtype=torch.float64), cp).view(-1)
    if attached.any() and not attached.all():
        raise LayoutError(
            f"the losses of {name!r} have a gradient on the context-parallel ranks "
            f"{attached.nonzero().view(-1).tolist()} alone; expected it on every rank: gather "
            "with autograd on ranks without active tokens, too"
        )
    return bool(attached.all())


def _kind(name: str, of_first: Tensor, of_last: Tensor) -> str | None:
    """One of `GATHERS`; None if the gradient says nothing.

    Args:
        of_first, of_last: fp64 [ranks], norms of the gradients of the first and last rank's losses.

    Raises:
        LayoutError: it is neither.
    """
    total = of_first.norm() + of_last.norm()
    if not total.isfinite() or total == 0:
        return None
    if of_first[1:].norm() + of_last[:-1].norm() <= _TOLERANCE * total:
        return "local_grad"
    if (of_first - of_last).norm() <= _TOLERANCE * total:
        return "reduced_grad"
    kinds = "; ".join(f"{kind}: {arrives}" for kind, arrives in _ARRIVES.items())
    raise LayoutError(
        f"TokenLoss(whole=...) for the losses of {name!r}, whose gather passes on neither kind of "
        f"gradient to a context-parallel rank; expected one of {kinds}"
    )


def _differs(name: str, given: str, found: str) -> LayoutError:
    return LayoutError(
        f"TokenLoss(whole={given!r}) for the losses of {name!r}; measured: in the backward pass a "
        f"context-parallel rank gets {_ARRIVES[found]}, so that the gradient would be wrong by a "
        f"factor of the number of ranks; expected whole={found!r}"
    )


def _compare(losses: Tensor, mask: Tensor, whole: bool, cp: dist.ProcessGroup) -> bool:
    """Whether the values tell that losses are of all tokens on every rank of ``cp``, or are not.

    All ranks must call; if one raises, all do. Where losses are all equal, as those of an output
    layer of zeros, nothing is decided.

    Args:
        losses, mask: [tokens] of one microbatch.
        whole: what the script says.

    Raises:
        LayoutError: it is the other way round.
    """
    x = losses.detach().reshape(-1)[mask.reshape(-1) != 0].double()
    place = torch.arange(len(x), device=x.device) / max(len(x), 1)
    spread = x.max() - x.min() if len(x) else x.sum()
    facts = [x.new_tensor(mask.numel()), x.new_tensor(len(x)), x.sum(), (x * place).sum()]
    *rows, spreads = all_gather(torch.stack([*facts, spread]), cp).T
    if not bool((spreads > 0).any()):
        return False
    equal = all(torch.allclose(row, row[:1], rtol=_SAME, atol=0) for row in rows)
    if equal and not whole:
        raise LayoutError(
            "losses and masks are the same on all context-parallel ranks; expected those of each "
            "rank's own tokens, or TokenLoss(whole='local_grad') or 'reduced_grad' where every "
            "rank gathers the losses of all tokens"
        )
    if whole and not equal:
        raise LayoutError(
            "TokenLoss(whole=...) with losses and masks that differ between the context-parallel "
            "ranks; expected those of all tokens on each: gather both, or leave out whole="
        )
    return True
