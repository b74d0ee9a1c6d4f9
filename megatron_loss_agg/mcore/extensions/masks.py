"""Compares the masks and tokens of a call's loss functions with those that were counted.

The weights follow the mask that the script passes to its loss function. They are right only if its
sums are those that were counted, over the ranks that split its tokens:

    sum_t m_t = M_s                                         of each sample
    sum_t m_t = sum_s M_s  and  sum_t w_t = sum_s c_s M_s   of packs, after the first step

In the first step the tokens are compared, too, by fingerprints (see `reading.prints`): ranks may
hold some twice and lack others, and forward steps may use those of another microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import all_gather, fitting
from megatron_loss_agg.errors import LayoutError, MaskError, StepError
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss
from megatron_loss_agg.mcore.host import Call, ParallelGroups
from megatron_loss_agg.mcore.reading.keys import HOW_TO_READ
from megatron_loss_agg.mcore.reading.prints import Prints, counts_up, fingerprint
from megatron_loss_agg.mcore.step import PlannedStep
from megatron_loss_agg.weights import at_least_fp32

_TOLERANCE = 1e-5
"""Of sums, relative: they are in fp32."""
_INPUTS = 4  # of the model's integer inputs: a fixed number, since ranks add them up


class MaskCheck(Extension):
    """Raises if masks or tokens are not the planned ones, on all context-parallel ranks together.

    Numbers are collected on the device, and added over the ranks and read once the call has ended.
    """

    def __init__(self) -> None:
        self.needs = frozenset({"prints"})  # until a training step is verified
        self._places: dict[int, set[int]] = {}  # see `_places`; over the calls of a step

    @contextmanager
    def around(
        self, call: Call, plan: PlannedStep | None
    ) -> Iterator[Callable[[MicrobatchLoss], None] | None]:
        seen = _Seen(call.groups, verifies=bool(self.needs))
        yield seen.collect
        if seen.plan is None:
            return
        tokens = seen.tokens_by_rank() if self.needs else {}
        found = seen.summed()
        prints = seen.plan.first.prints
        if tokens and prints is not None:
            self._places = {} if call.first == 0 else self._places
            self._places |= {i: _places(i, prints, by_rank) for i, by_rank in tokens.items()}
            if call.ends_step:
                _check_order(self._places)
        _check_masks(call, seen.plan, found, seen.planned)
        if call.trains and call.ends_step and not seen.plan.is_empty:
            self.needs = frozenset()


@dataclass
class _Seen:
    """What the loss functions of one call have, on this rank."""

    groups: ParallelGroups
    verifies: bool  # compares sums of packs by sample, and tokens
    plan: PlannedStep | None = None
    copies: int = 1  # ranks that have the same masks
    found: list[Tensor] = field(default_factory=list)  # numbers of masks
    planned: dict[int, list[Tensor]] = field(default_factory=dict)  # what they add up to over ranks
    tokens: dict[int, Tensor] = field(default_factory=dict)  # by microbatch: see `_tokens`

    def collect(self, x: MicrobatchLoss) -> None:
        """Add a microbatch; if its loss is computed twice, the first time alone."""
        if x.i in self.planned:
            return
        self.planned[x.i] = []
        self.plan, self.copies = x.plan, x.local[x.first].copies
        compared: list[tuple[Tensor, list[Tensor]]] = []
        for name, mask in x.masks.items():
            term = x.plan.terms[name]
            numbers = [y[x.i] for y in (term.mask_sums, term.coefficients) if y]
            if term.given is None and any(
                mask is other and all(map(torch.equal, numbers, y)) for other, y in compared
            ):
                continue  # an earlier term has the same mask and plan
            compared.append((mask, numbers))
            for found, planned in self._numbers(x, name):
                self.found.append(found.reshape(-1))
                self.planned[x.i].append(planned.reshape(-1).double())
        if self.verifies:
            self.tokens[x.i] = _tokens(x, self.groups.cp_size)

    def _numbers(self, x: MicrobatchLoss, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Numbers of a term's mask on this rank, and what they add up to over ranks."""
        term, local, mask, w_T = x.plan.terms[name], x.local[name], x.masks[name], x.weights[name]
        if x.plan.is_late:  # nothing was counted, and only its values can be checked
            legal = mask.isfinite() & (mask >= 0)
            if x.plan.divided_by_host:
                legal = (mask == 0) | (mask == 1)
            yield (~legal).sum(), torch.zeros(1)
            return
        planned_S = term.mask_sums[x.i]
        packed, follows = local.samples.starts is not None, term.given is None
        if packed or not follows:
            yield mask.sum(dtype=at_least_fp32(mask.dtype)), planned_S.sum()
        # Of a pack whose split makes no difference to its weights, sums by sample are not known.
        is_split = self.groups.cp_size > 1 and x.whole is None
        if packed and follows and (not self.verifies or (is_split and local.split is None)):
            yield w_T.sum(), term.coefficients[x.i] @ planned_S
        else:
            yield local.samples.sums(mask), planned_S
        if not follows:
            yield ((w_T != 0) & (mask.reshape(-1) == 0)).sum(), torch.zeros(1)

    def tokens_by_rank(self) -> dict[int, Tensor]:
        """By microbatch, `_tokens` of the context-parallel ranks.

        Raises:
            LayoutError: on every rank: the ranks have different numbers to add up.
        """
        size = len(torch.cat(self.found))
        of_all = torch.stack([*self.tokens.values()]).cpu()
        row = torch.cat([torch.tensor([size], dtype=torch.float64), of_all.flatten()])
        rows = all_gather(row, self.groups.cp)
        if bool((rows[:, 0] != size).any()):
            raise LayoutError(
                "the context-parallel ranks have read different numbers of samples, or losses with "
                "other masks; expected the same batches on all ranks of a context-parallel group, "
                "each of which takes its own part of every sequence"
            )
        by_rank = rows[:, 1:].view(len(rows), *of_all.shape)
        return dict(zip(self.tokens, by_rank.unbind(dim=1), strict=True))

    def summed(self) -> Tensor:
        """The numbers of masks, added up over context-parallel ranks."""
        found = torch.cat(self.found).double()
        if self.groups.cp_size > 1:
            found = fitting(found, self.groups.cp)
            dist.all_reduce(found, group=self.groups.cp)
        return found.cpu() / self.copies


def _check_masks(
    call: Call, plan: PlannedStep, found: Tensor, by_microbatch: Mapping[int, list[Tensor]]
) -> None:
    """Raise MaskError if some mask does not have the planned sums."""
    planned = torch.cat([x for parts in by_microbatch.values() for x in parts])
    fits = (found - planned).abs() <= _TOLERANCE * planned.abs()  # NaN does not
    if bool(fits.all()):
        return
    k = int((~fits).nonzero()[0])
    i = [i for i, parts in by_microbatch.items() for _ in range(len(torch.cat(parts)))][k]
    if plan.is_late:
        legal = "0 and 1, or another mode" if plan.divided_by_host else "finite numbers from 0 on"
        raise MaskError(
            f"the model's mask of microbatch {i} has other values than those by "
            f"which it is counted; expected {legal}"
        )
    several = call.groups.cp_size > 1
    split = "split it over context-parallel ranks as CPLayout can and " if several else ""
    raise MaskError(
        "the loss function's mask is not this rank's part of the batch's 'loss_mask': in "
        f"microbatch {i} it sums to {float(found[k]):g}, by sample or weighted, and "
        f"that to {float(planned[k]):g}; expected the script to {split}leave it as it is, "
        f"undivided (a cast to half precision changes fractions): otherwise {HOW_TO_READ} with the "
        "final mask"
    )


def _tokens(x: MicrobatchLoss, cp_size: int) -> Tensor:
    """Of the model's integer inputs with a number for each token: fp64 [`_INPUTS`, 3].

    The fingerprint; whether it is of anything but positions, which tell nothing; and whether the
    numbers differ. 0 for inputs that there are not.
    """
    mask = x.masks[x.first]
    tokens = mask.numel() // (1 if x.whole is None else cp_size)
    found = mask.new_zeros(_INPUTS, 3, dtype=torch.float64)
    for row, ids in zip(found, [y for y in x.inputs if y.numel() == tokens > 0], strict=False):
        varies = (ids != ids.reshape(-1)[0]).any()
        row.copy_(torch.stack([fingerprint(ids), ~counts_up(ids), varies]))
    return found


def _places(i: int, prints: Sequence[Prints], by_rank: Tensor) -> set[int]:
    """The microbatches of the step whose tokens the model may have been called with for ``i``.

    ``{i}`` where these tell nothing; none where a script has changed its tokens.

    Args:
        by_rank: [context-parallel ranks, `_INPUTS`, 3], see `_tokens`.

    Raises:
        LayoutError: none, and two ranks hold the same tokens.
    """
    varies = by_rank[..., 2].any(dim=0)
    tells = by_rank[..., 1].all(dim=0) & (varies | (len(by_rank) > 1))
    if not tells.any() or not any(ids.tells for ids in prints[i].ids):
        return {i}
    whole = by_rank[:, tells, 0].sum(dim=0).tolist()
    found = {
        j
        for j, other in enumerate(prints)
        if any(ids.tells and ids.whole in whole for ids in other.ids)
    }
    own_parts = by_rank[:, tells & varies, 0].T.tolist()
    if not found and any(len({*parts}) < len(parts) for parts in own_parts):
        raise LayoutError(
            f"the model is called with the same tokens on several context-parallel ranks, for "
            f"microbatch {i}; expected each token of the batch on one rank: split every sequence "
            "as CPLayout can"
        )
    return found


def _check_order(places: Mapping[int, set[int]]) -> None:
    """Raise StepError if forward steps have used the tokens of other microbatches.

    Only if all of them are in the step: a script may change its tokens, and in one stream of text
    the labels of a microbatch are the tokens of the next.

    Args:
        places: see `_places`; of each microbatch of the step.
    """
    taken = {i: i if i in js else min(js) for i, js in places.items() if js}
    moved = [(i, j) for i, j in taken.items() if i != j]
    if moved and len(taken) == len(places):
        raise StepError(
            "the model is called with the tokens of microbatch {1} of the step in place of {0}; "
            "expected the microbatches in the order in which the forward steps draw their batches "
            "(see read_step, hook.step), and new tensors in each, since all are drawn before the "
            "first forward pass: copy what the data iterator returns".format(*moved[0])
        )
