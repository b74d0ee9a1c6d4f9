"""Compares the masks and tokens of a call's loss functions with those that were counted.

The weights follow the mask that the script passes to its loss function. They are right only if its
sums are those that were counted, over the ranks that split its tokens:

    sum_t m_t = M_s                                         of each sample, in the first step
    sum_t m_t = sum_s M_s  and  sum_t w_t = sum_s c_s M_s   of each microbatch, after it

and with factors of tokens, whose places matter, ``sum_t |w_t f_t|`` of each microbatch.

In the first step the tokens are compared, too, by fingerprints (see `reading.fingerprints`): ranks
may hold some twice and lack others, and forward steps may use those of another microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import all_gather, for_backend
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss, Watch
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.reading.fingerprints import Fingerprints, counts_up, fingerprint
from megatron_loss_agg.mcore.reading.keys import HOW_TO_READ
from megatron_loss_agg.mcore.step import PlannedStep

_TOLERANCE = 1e-5
"""Of sums, relative: they are in fp32."""
_Numbers = tuple[str, Tensor, Sequence[float]]
"""Their name, this rank's values, and what these should add up to over ranks."""
_INPUTS = 4  # of the model's integer inputs: a fixed number, since ranks gather them


class MaskCheck(Extension):
    """Raises if masks or tokens are not the planned ones, on all context-parallel ranks together.

    Numbers stay on the device until the call has ended, and are then added over the ranks.
    """

    def __init__(self) -> None:
        self.needs = frozenset({"fingerprints"})  # until a training step is verified
        self._places: dict[int, int | None] = {}  # see `_place`; over the calls of a step

    @contextmanager
    def around(self, call: Call, plan: PlannedStep | None) -> Iterator[Watch | None]:
        # In the first step, also compare tokens, and sums by sample.
        verifies = bool(self.needs)
        copies, cp_size, cp = 1, call.groups.cp_size, call.groups.cp
        numbers: dict[int, list[_Numbers]] = {}  # by microbatch: see `_numbers`
        tokens: dict[int, Tensor] = {}  # likewise, see `_tokens`

        def on_loss(x: MicrobatchLoss) -> None:
            nonlocal plan, copies
            plan, copies = x.plan, x.copies
            numbers[x.i] = [
                found for name in x.masks for found in _numbers(x, name, cp_size, verifies)
            ]
            if verifies:
                tokens[x.i] = _tokens(x)

        yield on_loss
        if plan is None or not numbers:
            return
        found = torch.cat([x.reshape(-1) for of in numbers.values() for _, x, _ in of]).double()
        by_rank = _by_rank(len(found), tokens, cp) if verifies else {}
        if cp_size > 1:
            found = for_backend(found, cp)
            dist.all_reduce(found, group=cp)
        if verifies and plan.first.fingerprints is not None:
            self._check_tokens(call, plan.first.fingerprints, by_rank)
        _check_masks(plan, (found / copies).tolist(), numbers)
        if call.trains and call.ends_step and not plan.is_empty:
            self.needs = frozenset()

    def _check_tokens(
        self, call: Call, fingerprints: Sequence[Fingerprints], by_rank: Mapping[int, Tensor]
    ) -> None:
        """Raise DataError if forward steps have used the tokens of other microbatches.

        Only if all of them are in the step: a script may change its tokens, and in one stream of
        text the labels of a microbatch are the tokens of the next.
        """
        places = {} if call.begins_step or not call.trains else self._places
        places |= {i: _place(i, fingerprints, x) for i, x in by_rank.items()}
        if call.trains:  # an evaluation may come between the calls of a step
            self._places = places
        moved = [(i, j) for i, j in places.items() if i != j]
        if call.ends_step and moved and None not in places.values():
            i, j = moved[0]
            raise DataError(
                f"the model is called with the tokens of microbatch {j} of the step in place of "
                f"{i}; expected microbatches in the order of the forward steps (see read_step, "
                "hook.step), and new tensors in each, since all are drawn before the first forward "
                "pass: copy what the data iterator returns"
            )


def _numbers(x: MicrobatchLoss, name: str, cp_size: int, verifies: bool) -> Iterator[_Numbers]:
    term, local, mask, w_T = x.plan.terms[name], x.local[name], x.masks[name], x.unfactored[name]
    if x.plan.is_late:  # nothing was counted, and only its values can be checked
        legal, what = mask.isfinite() & (mask >= 0), "values that are negative, infinite or NaN"
        if x.plan.divided_by_host:
            legal, what = (mask == 0) | (mask == 1), "values other than 0 and 1"
        yield what, (~legal).sum(), [0.0]
        return
    mask_sum, weight_sum = term.sums[x.i]
    # Of a pack whose split makes no difference to its weights, sums by sample are not known.
    known = local.starts is None or cp_size == 1 or local.copies > 1 or local.split is not None
    if verifies and known:
        yield "mask sum of a sample", local.sums(mask), term.mask_sums(x.i).tolist()
    yield "mask sum", x.mask_sums[name], [mask_sum]
    factored_sum = term.factored_sums[x.i]
    if factored_sum is not None:
        yield "sum of weights with factors", x.weights[name].abs().sum(), [factored_sum]
    if term.custom is None:
        yield "sum of weights", w_T.sum(), [weight_sum]
    else:
        outside = (w_T != 0) & (mask.reshape(-1) == 0)
        yield "number of nonzero weights on masked tokens", outside.sum(), [0.0]


def _by_rank(number: int, tokens: Mapping[int, Tensor], cp: dist.ProcessGroup) -> dict[int, Tensor]:
    """By microbatch, the ``tokens`` of all context-parallel ranks: [ranks, `_INPUTS`].

    Raises DataError, on every rank, unless all have the same ``number`` of what is added up.
    """
    of_all = torch.stack([*tokens.values()]).cpu()
    rows = all_gather(torch.cat([of_all.new_tensor([number]), of_all.flatten()]), cp)
    if bool((rows[:, 0] != number).any()):
        raise DataError(
            "the context-parallel ranks have read different numbers of samples, or losses with "
            "other masks; expected the same batches on all of them, split by sequence"
        )
    by_microbatch = rows[:, 1:].view(len(rows), *of_all.shape).unbind(dim=1)
    return dict(zip(tokens, by_microbatch, strict=True))


def _check_masks(
    plan: PlannedStep, found: Sequence[float], numbers: Mapping[int, Sequence[_Numbers]]
) -> None:
    """Raise DataError if some mask does not have the planned sums."""
    planned = [(what, i, y) for i, of in numbers.items() for what, _, ys in of for y in ys]
    for x, (what, i, y) in zip(found, planned, strict=True):
        if abs(x - y) <= _TOLERANCE * abs(y):  # NaN is not
            continue
        if plan.is_late:
            raise DataError(
                f"the model's mask of microbatch {i} has {x:g} {what}; expected none: mend "
                "the mask, or for fractions choose a mode other than token_mean"
            )
        raise DataError(
            "the loss function's mask is not this rank's part of the batch's 'loss_mask': in "
            f"microbatch {i} its {what} is {x:g}, and was planned as {y:g}; expected the script to "
            "leave it undivided (and fractions in fp32), and to split it as CPLayout can: "
            f"otherwise {HOW_TO_READ} with the final mask"
        )


def _tokens(x: MicrobatchLoss) -> Tensor:
    """Fingerprints of the model's integer inputs with a number for each token: fp64 [`_INPUTS`].

    NaN where there is none, and for what tells nothing: positions, and equal numbers.
    """
    mask = x.masks[x.first]
    tokens = mask.numel() // x.copies
    found = mask.new_full([_INPUTS], torch.nan, dtype=torch.float64)
    for i, ids in enumerate([y for y in x.inputs if y.numel() == tokens > 0][:_INPUTS]):
        tells = (ids != ids.reshape(-1)[0]).any() & ~counts_up(ids)
        found[i] = torch.where(tells, fingerprint(ids), torch.nan)
    return found


def _place(i: int, fingerprints: Sequence[Fingerprints], by_rank: Tensor) -> int | None:
    """The microbatch of the step with whose tokens the model was called for ``i``.

    ``i`` where these tell nothing; None where a script has changed its tokens, or DataError if
    two ranks hold the same ones.
    """
    telling = by_rank.T[~by_rank.isnan().any(dim=0)]
    if not len(telling) or not any(ids.tells for ids in fingerprints[i].ids):
        return i
    whole = {*telling.sum(dim=1).tolist()}
    for j in (i, *range(len(fingerprints))):
        if any(ids.tells and ids.whole in whole for ids in fingerprints[j].ids):
            return j
    if any(len({*parts}) < len(parts) for parts in telling.tolist()):
        raise DataError(
            f"the model is called with the same tokens on several context-parallel ranks, for "
            f"microbatch {i}; expected each on one rank: split every sequence as CPLayout can"
        )
    return None
