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
from typing import Any, NamedTuple

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


class _Sums(NamedTuple):
    """Of one microbatch, to be added over context-parallel ranks."""

    of_masks: list[Tensor]
    of_tokens: list[Tensor]  # see `_token_sums`; none where tokens are not compared
    planned: list[Tensor]  # on the CPU: what those of masks add up to


class MaskCheck(Extension):
    """Raises if masks or tokens are not the planned ones, on all context-parallel ranks together.

    Numbers are collected on the device, added over the ranks once the last loss of a call is made,
    and read once when the call has ended.
    """

    def __init__(self) -> None:
        self.needs = frozenset({"prints"})  # until a training step is verified
        self._places: dict[int, set[int]] = {}  # see `_places`; over the calls of a step

    @contextmanager
    def around(
        self, call: Call, plan: PlannedStep | None
    ) -> Iterator[Callable[[MicrobatchLoss], None] | None]:
        seen = _Seen(call, verifies=bool(self.needs))
        yield seen.collect
        if seen.plan is None:
            return
        masks, tokens = seen.read()
        if tokens:
            self._check_tokens(call, seen.plan, tokens)
        _check_masks(call, seen.plan, masks, seen.sums)
        if call.trains and call.ends_step and not seen.plan.is_empty:
            self.needs = frozenset()

    def _check_tokens(self, call: Call, plan: PlannedStep, tokens: Mapping[int, Tensor]) -> None:
        prints = plan.first.prints
        assert prints is not None
        if call.first == 0 and call.trains:
            self._places = {}
        places = self._places if call.trains else {}  # an evaluation may come between calls
        for i, rows in tokens.items():
            places[i] = _places(i, prints, rows, call.groups.cp_size > 1)
        if call.ends_step:
            _check_order(places)


class _Seen:
    """What the loss functions of one call have."""

    def __init__(self, call: Call, verifies: bool) -> None:
        self.plan: PlannedStep | None = None
        self._call = call
        self._verifies = verifies  # compares sums of packs by sample, and tokens
        self.sums: dict[int, _Sums] = {}
        self._copies = 1  # ranks that have the same tokens
        self._sent = torch.zeros(0)
        self._work: Any = None

    def collect(self, x: MicrobatchLoss) -> None:
        """Add a microbatch; if its loss is computed twice, the first time alone."""
        if x.i in self.sums:
            return
        self.plan, self._copies = x.plan, x.local[x.first].copies
        sums = _Sums([], [], [])
        for name in _distinct(x):
            self._add_mask(sums, x, name)
        if self._verifies and x.plan.first.prints is not None:
            sums.of_tokens.extend(_token_sums(x, self._call.groups))
        self.sums[x.i] = sums
        if x.is_last:
            self._send()

    def read(self) -> tuple[Tensor, dict[int, Tensor]]:
        """What was collected of all masks, and of the tokens of each microbatch; waits for it."""
        if self._work is not None:
            self._work.wait()
        sent = self._sent.cpu()
        number = sum(x.numel() for sums in self.sums.values() for x in sums.planned)
        masks, tokens = (
            sent[:number],
            sent[number:].view(-1, _INPUTS, 3 + self._call.groups.cp_size),
        )
        compared = [i for i, sums in self.sums.items() if sums.of_tokens]
        return masks / self._copies, dict(zip(compared, tokens, strict=True))

    def _send(self) -> None:
        """Start to add over ranks: their backward passes overlap it."""
        cp, found = self._call.groups.cp, self.sums.values()
        of_masks = [x for sums in found for x in sums.of_masks]
        of_tokens = [x for sums in found for x in sums.of_tokens]
        self._sent = _joined([*of_masks, *of_tokens])
        if self._call.groups.cp_size > 1:
            if self._verifies:
                _check_same_size(len(self._sent), cp)
            self._sent = fitting(self._sent, cp)
            self._work = dist.all_reduce(self._sent, group=cp, async_op=True)

    def _add_mask(self, sums: _Sums, x: MicrobatchLoss, name: str) -> None:
        """Add numbers of a term's mask, and what they add up to over ranks."""
        term, local, mask = x.plan.terms[name], x.local[name], x.masks[name]
        if x.plan.is_late:  # nothing was counted, and only its values can be checked
            legal = mask.isfinite() & (mask >= 0) & mask.sum(dtype=torch.float32).isfinite()
            if x.plan.divided_by_host:
                legal = (mask == 0) | (mask == 1)
            sums.of_masks.append((~legal).sum())
            sums.planned.append(torch.zeros(1))
            return
        planned_S = term.mask_sums(x.i)
        packed, follows = local.samples.starts is not None, term.given is None
        if follows and not packed:
            sums.of_masks.append(local.samples.sums(mask))
            sums.planned.append(planned_S)
            return
        sums.of_masks.append(mask.sum(dtype=at_least_fp32(mask.dtype)))
        sums.planned.append(planned_S.sum())
        # Of a pack whose split makes no difference to its weights, sums by sample are not known.
        is_split = self._call.groups.cp_size > 1 and x.whole is None
        if not follows or (self._verifies and not (is_split and local.split is None)):
            sums.of_masks.append(local.samples.sums(mask))
            sums.planned.append(planned_S)
        else:
            sums.of_masks.append(x.weights[name].sum())
            sums.planned.append(term.coefficients(x.i) @ planned_S)
        if not follows:  # weights where the mask is 0
            sums.of_masks.append(((x.weights[name] != 0) & (mask.reshape(-1) == 0)).sum())
            sums.planned.append(torch.zeros(1))


def _distinct(x: MicrobatchLoss) -> list[str]:
    """The terms, without those of which an earlier one has the same mask and plan."""
    kept: dict[str, tuple[Tensor, list[Tensor]]] = {}
    for name, mask in x.masks.items():
        term, starts = x.plan.terms[name], x.plan.terms[name].samples[x.i].starts
        numbers = [term.mask_sums(x.i), term.coefficients(x.i)]
        numbers += [] if term.given is None else [term.given[x.i]]
        numbers += [] if starts is None else [starts]
        if not any(mask is other and _are_equal(numbers, y) for other, y in kept.values()):
            kept[name] = mask, numbers
    return [*kept]


def _are_equal(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    return len(one) == len(two) and all(map(torch.equal, one, two))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """fp64 [numbers]."""
    return torch.cat([x.reshape(-1) for x in parts]).double()


def _check_same_size(size: int, cp: dist.ProcessGroup) -> None:
    """Raise LayoutError, on every rank of ``cp``, unless all have as many numbers to add."""
    sizes = all_gather(torch.tensor([size], dtype=torch.float64), cp)
    if bool((sizes != size).any()):
        raise LayoutError(
            "the context-parallel ranks have read different numbers of samples, or losses with "
            "other masks; expected the same batches on all ranks of a context-parallel group, each "
            "of which takes its own part of every sequence"
        )


def _check_masks(call: Call, plan: PlannedStep, found: Tensor, sums: Mapping[int, _Sums]) -> None:
    """Raise MaskError if some mask does not have the planned sums."""
    planned = _joined([x for s in sums.values() for x in s.planned])
    fits = (found - planned).abs() <= _TOLERANCE * planned.abs()  # NaN does not
    if bool(fits.all()):
        return
    k = int((~fits).nonzero()[0])
    i = [i for i, s in sums.items() for x in s.planned for _ in range(x.numel())][k]
    if plan.is_late:
        raise _illegal(call, plan, i)
    several = call.groups.cp_size > 1
    split = "split it over context-parallel ranks as CPLayout can and " if several else ""
    raise MaskError(
        "the loss function's mask is not this rank's part of the batch's 'loss_mask': in "
        f"microbatch {i} it sums to {float(found[k]):g}, by sample or weighted, and that to "
        f"{float(planned[k]):g}; expected the script to {split}leave it as it is, undivided "
        f"(a cast to half precision changes fractions): otherwise {HOW_TO_READ} with the final "
        "mask"
    )


def _illegal(call: Call, plan: PlannedStep, i: int) -> MaskError:
    if plan.divided_by_host:
        label = next(iter(call.terms.values())).aggregation.label
        return MaskError(
            f"{label!r} with a model's mask that is not 0 or 1 everywhere, by whose sum the host "
            "cannot divide; expected 0 and 1, or another mode"
        )
    return MaskError(
        f"the model's mask of microbatch {i} has negative, infinite or NaN values, or some beyond "
        "fp32; expected non-negative, finite ones"
    )


def _token_sums(x: MicrobatchLoss, groups: ParallelGroups) -> list[Tensor]:
    """Of the model's integer inputs with a number for each token: `_INPUTS` of fp64 [3 + ranks].

    The fingerprint; whether they are positions, which tell nothing; whether they differ; and again
    the fingerprint, at the place of this rank.
    """
    size, mask = groups.cp_size, x.masks[x.first]
    tokens = mask.numel() // (1 if x.whole is None else size)
    rows = []
    for y in [ids for ids in x.inputs if ids.numel() == tokens > 0][:_INPUTS]:
        own, varies = fingerprint(y), (y != y.reshape(-1)[0]).any()
        by_rank = [own * (rank == groups.cp_rank) for rank in range(size)]
        rows.append(torch.stack([own, counts_up(y), varies, *by_rank]).to(mask.device))
    nothing = torch.tensor([0, 1, 0, *[0] * size], device=mask.device)
    return [*rows, *[nothing] * (_INPUTS - len(rows))]


def _matches(prints: Prints, rows: Tensor) -> bool:
    """Whether one of the tensors with these `_token_sums` is a planned one."""
    seen = set(rows[:, 0].tolist())
    return any(ids.tells and ids.whole in seen for ids in prints.ids)


def _places(i: int, prints: Sequence[Prints], rows: Tensor, split: bool) -> set[int]:
    """The microbatches of the step whose tokens the model may have been called with for ``i``.

    ``{i}`` where these tell nothing; none where a script has changed its tokens.

    Raises:
        LayoutError: none, and two of the ranks that ``split`` them hold the same tokens.
    """
    rows = rows[(rows[:, 1] == 0) & ((rows[:, 2] > 0) | split)]
    if not len(rows) or not any(ids.tells for ids in prints[i].ids):
        return {i}
    found = {j for j, other in enumerate(prints) if _matches(other, rows)}
    telling = rows[rows[:, 2] > 0, 3:].tolist()
    if split and not found and any(len({*by_rank}) < len(by_rank) for by_rank in telling):
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
    if not moved or len(taken) < len(places):
        return
    i, j = moved[0]
    if sorted(taken.values()) == sorted(taken):
        raise StepError(
            f"the model is called with the tokens of microbatch {j} of the step in place of {i}; "
            "expected the microbatches in the order in which the forward steps draw their "
            "batches: see read_step or hook.step"
        )
    raise StepError(
        "the data iterator changed a batch when it returned a later one; expected new tensors for "
        "every batch, since batches are drawn before their forward passes: copy what it returns, "
        "or give LossHook(read_step=...)"
    )
