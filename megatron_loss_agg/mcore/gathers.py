"""Measures how losses that every context-parallel rank holds whole were gathered.

Each of the ``c`` ranks computes the same losses of all tokens, from what the ranks gathered from
each other. What the gather does in the backward pass decides how often a parameter's gradient
arrives in the host's sum over ranks, and loops differ:

============ ================================================ =======
gather       a rank's part gets, in backward                  arrives
============ ================================================ =======
local_grad   the gradient of this rank's losses               once
reduced_grad the sum of the gradients of all ranks' losses    c times
============ ================================================ =======

The measurement differentiates the losses by what the model returned, three times: under equal
gradients on all ranks, under ``c`` times these on the first rank alone, which have the same sum,
and under the equal ones again, which shows whether the backward pass can be repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge

from megatron_loss_agg.collectives import all_gather
from megatron_loss_agg.errors import LayoutError
from megatron_loss_agg.mcore.host import GATHERS, ParallelGroups

_TOLERANCE = 0.1
"""Of norms, relative: half precision is coarse, and the two kinds differ by 1 or more."""

_SAME = 1e-6
"""Relative difference up to which two ranks' sums are of the same losses."""

_UNREACHED = -1.0
"""Instead of a norm, where the losses do not depend on what the model returned."""

_KINDS = (None, *GATHERS)
_ARRIVES = {
    "local_grad": "the gradient of its own losses alone",
    "reduced_grad": "the sum of the gradients of all ranks' losses",
}


def check_same(gather: str | None, cp: dist.ProcessGroup) -> None:
    """Raise LayoutError unless all ranks of ``cp``, which must call, have the same ``gather``."""
    row = torch.tensor([_KINDS.index(gather)], dtype=torch.float64)
    kinds = [_KINDS[int(kind)] for kind in all_gather(row, cp)]
    if len(set(kinds)) > 1:
        raise LayoutError(
            f"the context-parallel ranks return TokenLoss(whole=...) with {kinds}, in their order; "
            "expected the same on every rank"
        )


class Gathers:
    """How losses are gathered, as far as it is known.

    Attributes:
        all_tokens: whether losses are of all tokens on every rank; None: not known yet.
        measured: one of `GATHERS` for each term whose losses had a gradient that is not 0.
        compared: whether `compare` has told whole losses from parts.
    """

    def __init__(self) -> None:
        self.all_tokens: bool | None = None
        self.measured: dict[str, str] = {}
        self.compared = False

    def settle(self, all_tokens: bool) -> None:
        """Losses are, or are not, of all tokens on every rank.

        Raises:
            LayoutError: they were otherwise before.
        """
        if self.all_tokens not in (None, all_tokens):
            now, before = ("all", "a part") if all_tokens else ("a part", "all")
            raise LayoutError(
                f"losses of {now} of the tokens on a context-parallel rank, after losses of "
                f"{before} of them; expected TokenLoss(whole=...) in every call, or in none"
            )
        self.all_tokens = all_tokens

    def is_open(self, terms: Iterable[str]) -> bool:
        """Whether the gather of some of ``terms`` is still to be measured."""
        return bool(self.all_tokens) and not self.measured.keys() >= {*terms}

    def compare(
        self, losses: Tensor, mask: Tensor, all_tokens: bool, cp: dist.ProcessGroup
    ) -> None:
        """Check by the values that losses are of all tokens on every rank of ``cp``, or are not.

        For masks whose whole shape is not known. All ranks must call; if one raises, all do. Where
        losses are all equal, as those of an output layer of zeros, nothing is decided.

        Args:
            losses, mask: [tokens] of one microbatch.
            all_tokens: what the script says.

        Raises:
            LayoutError: it is the other way round.
        """
        if self.compared:
            return
        x = losses.detach().reshape(-1)[mask.reshape(-1) != 0].double()
        place = torch.arange(len(x), device=x.device) / max(len(x), 1)
        spread = x.max() - x.min() if len(x) else x.sum()
        facts = [x.new_tensor(mask.numel()), x.new_tensor(len(x)), x.sum(), (x * place).sum()]
        *rows, spreads = all_gather(torch.stack([*facts, spread]), cp).T
        if not bool((spreads > 0).any()):
            return
        equal = all(torch.allclose(row, row[:1], rtol=_SAME, atol=0) for row in rows)
        if equal and not all_tokens:
            raise LayoutError(
                "losses and masks are the same on all context-parallel ranks; expected those of "
                "each rank's own tokens, or TokenLoss(whole='local_grad') or 'reduced_grad' where "
                "every rank gathers the losses of all tokens"
            )
        if all_tokens and not equal:
            raise LayoutError(
                "TokenLoss(whole=...) with losses and masks that differ between the "
                "context-parallel ranks; expected those of all tokens on each: gather both, or "
                "leave out whole="
            )
        self.compared = True

    def check(
        self,
        gather: str,
        losses: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        outputs: Sequence[GradientEdge],
        groups: ParallelGroups,
    ) -> None:
        """Compare ``gather`` with that of a microbatch's losses, until it is known of every term.

        All context- and tensor-parallel ranks must call; if one raises, all do.

        Args:
            gather: `TokenLoss.whole`.
            losses, weights: [tokens], by term.
            outputs: of the model.

        Raises:
            LayoutError: they differ, or it cannot be measured.
        """
        if all(self.measured.get(name) == gather for name in losses):
            return
        row = torch.tensor([x.requires_grad for x in losses.values()], dtype=torch.float64)
        rows = all_gather(row, groups.cp).bool()
        for name, attached in zip(losses, rows.T, strict=True):
            found = self.measured.get(name)
            if found is None and attached.any():
                _check_attached(name, attached)
                found = _kind(name, _norms(losses[name], weights[name], outputs, groups))
            if found is None:
                continue
            if found != gather:
                raise _differs(name, gather, found)
            self.measured[name] = found


def _check_attached(name: str, attached: Tensor) -> None:
    if not attached.all():
        raise LayoutError(
            f"the losses of {name!r} have a gradient on the context-parallel ranks "
            f"{attached.nonzero().view(-1).tolist()} alone; expected it on every rank: gather "
            "with autograd on ranks without active tokens, too"
        )


def _norms(
    losses: Tensor, weights: Tensor, outputs: Sequence[GradientEdge], groups: ParallelGroups
) -> Tensor:
    """Of the gradients by ``outputs``: fp64 [tensor-parallel ranks, context-parallel ranks, 3].

    Under equal gradients, under those of the first rank alone, and under equal ones again.
    """
    size, first = groups.cp_size, groups.cp_rank == 0
    equal = weights / torch.linalg.vector_norm(weights).clamp(min=1e-37)
    row = []
    saved = _saved_by_functions(losses, outputs)
    copies = [x.detach().clone() for x in saved]
    for given in (equal, equal * size * first, equal):
        with contextlib.ExitStack() as stack:
            for x in saved:
                stack.enter_context(_unsafe_preserve_version_counter(x))
            row.append(_norm(losses, given.to(losses.dtype), outputs).cpu())
        for x, copy in zip(saved, copies, strict=True):
            x.data.copy_(copy)
    rows = all_gather(torch.stack(row), groups.cp)
    return all_gather(rows.flatten(), groups.tp).view(-1, size, len(row))


def _norm(losses: Tensor, given: Tensor, outputs: Sequence[GradientEdge]) -> Tensor:
    found: Sequence[Tensor | None] = []
    if outputs:
        try:
            found = torch.autograd.grad(
                losses, outputs, given, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            raise LayoutError(
                f"losses that cannot be differentiated twice ({error}), by which the gather of "
                "TokenLoss(whole=...) is measured; expected a compute function without reentrant "
                "checkpoints: use_reentrant=False, or none"
            ) from error
    # What a function returns from what it saved may have a graph of its own.
    found = [g.detach() for g in found if g is not None]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in found]
    return torch.stack(norms).norm() if norms else torch.full((), _UNREACHED).double()


def _saved_by_functions(losses: Tensor, outputs: Sequence[GradientEdge]) -> list[Tensor]:
    """What functions written in Python keep for the backward pass, from ``losses`` to ``outputs``.

    Some overwrite it there, as Megatron's cross entropy does, since a backward pass comes once.
    """
    seen: set[Any] = {x.node for x in outputs} | {None}
    left: list[Any] = [losses.grad_fn]
    saved: list[Tensor] = []
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        left += [other for other, _ in node.next_functions]
        if isinstance(node, BackwardCFunction):
            saved += [x for x in node.saved_tensors if x is not None]
    return saved


def _kind(name: str, norms: Tensor) -> str | None:
    """One of `GATHERS`; None if the gradient is 0, or not finite, and says nothing.

    Raises:
        LayoutError: it is neither, or the measurement failed.
    """
    equal, of_first, again = norms.unbind(-1)
    if bool((norms == _UNREACHED).any()):
        raise LayoutError(
            f"the losses of {name!r} do not depend on what the model returned, by which the gather "
            "of TokenLoss(whole=...) is measured; expected them computed from that"
        )
    total = equal.norm()
    if not total.isfinite() or total == 0:
        return None
    if not (again - equal).norm() <= _TOLERANCE * total:
        raise LayoutError(
            f"the gradients of the losses of {name!r} differ when they are taken again, by which "
            "the gather of TokenLoss(whole=...) is measured; expected autograd functions that keep "
            "what they need for the backward pass by ctx.save_for_backward"
        )
    alone = torch.zeros_like(equal)
    alone[:, 0] = equal[:, 0] * equal.shape[1]
    expected = {"local_grad": alone, "reduced_grad": equal}
    for kind, norms_of_kind in expected.items():
        if (of_first - norms_of_kind).norm() <= _TOLERANCE * total:
            return kind
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
