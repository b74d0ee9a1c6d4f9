"""The interface of what a call does besides its loss: checks, and parts that add to it.

`extensions` has one file for each. The route calls them and knows none of them by name.

Megatron's loop adds up both elements of a report's pairs over microbatches, ranks and, in an
evaluation, its calls, and then divides the first by the second. A call's aggregated loss is
``L = S / D``, with the denominator ``D`` of the aggregation. In an evaluation its pairs add up to
``(L * D, D)``, so that ``sum L * D / sum D`` is the mean over the tokens, samples or groups of all
calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step import PlannedStep, PlannedTerm
from megatron_loss_agg.mcore.weigh import LocalWeights
from megatron_loss_agg.tensors import detached, in_dtype
from megatron_loss_agg.weighted_sum import weighted_sum_of_fitting

_LEAST = torch.finfo(torch.float32).tiny
"""The weight of an empty call: lost beside any other, but no division by 0 without others."""


def denominator(aggregation: LossAggregation, term: PlannedTerm) -> float:
    """What the aggregation divides by, over one whole call of the schedule.

    ``token_mean``: the sum of the masks. Modes that count groups: their number, without empty ones
    under ``empty="skip"``. Both with sample weights, where they count. ``sum`` and ``custom``: 1.
    """
    counts = term.counts
    return counts.across * (counts.tokens if aggregation.within == "step" else 1.0)


@dataclass
class MicrobatchLoss:
    """The loss of one microbatch on this rank, before the host's scale.

    Mappings are by term. Losses and weights are flat: [tokens of this rank]. Masks have the shapes
    that the script gave them, and are at least fp32.
    """

    call: Call
    plan: PlannedStep
    i: int  # of the microbatch in its step
    losses: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]  # the loss function's
    local: Mapping[str, LocalWeights]
    unfactored: Mapping[str, Tensor]  # weights without factors of tokens
    weights: Mapping[str, Tensor]
    loss_func: Callable[..., Any]  # the script's, as extensions have adapted it
    returned: Sequence[Any] | None  # by a stock loss function; None: it is a `TokenLoss`
    inputs: Sequence[Tensor]  # the integer tensors that the model was called with
    total: Tensor
    reports: dict[str, Any]

    @property
    def first(self) -> str:
        """The term whose tokens the host counts, and whose mean is ``lm loss``."""
        return next(iter(self.losses))

    @property
    def copies(self) -> int:
        """Context-parallel ranks that have the losses of the same tokens."""
        return self.local[self.first].copies

    @functools.cached_property
    def mask_sums(self) -> Mapping[str, Tensor]:
        return {name: mask.sum() for name, mask in self.masks.items()}

    def sum_pair(self, key: str, part: Tensor, denominator: float = 1.0) -> Tensor:
        """The pair for this rank's part of a sum over the step, whose quotient becomes the sum.

        In an evaluation of several calls, a call weighs as much as the denominator.
        """
        call, part, copies = self.call, detached(part), self.copies
        if self.plan.divided_by_host:
            return _pair(part, self.mask_sums[self.first], copies)
        pairs = self.plan.first.counts.microbatches * call.groups.cp_size  # of the step
        if call.running_means is not None:
            value = call.running_means[key].add(part, denominator, self.i == call.first_index)
            return _pair(value.to(part) * (pairs // copies), 1.0)
        count = 1.0 if call.trains else max(denominator / pairs, _LEAST)
        factor = pairs // copies * count
        return _pair(part if factor == 1 else part * factor, count)

    def token_mean(self, key: str) -> Tensor:
        """The pair of the microbatch's masked sum and mask sum, whose quotient is the mean."""
        losses, mask = self.losses[self.first].detach(), self.masks[self.first].flatten()
        total = in_dtype(weighted_sum_of_fitting(mask, losses), self.total.dtype)
        if not self.call.loop.averages_quotients:
            return _pair(total, self.mask_sums[self.first], self.copies)
        tokens = self.plan.first.counts.all_tokens
        return self.sum_pair(key, total / (tokens or 1.0), tokens)

    def report(self, key: str, pair: Tensor) -> None:
        """Add a report: a pair, see `sum_pair`.

        Raises:
            DataError: there is one of this name.
        """
        if key in self.reports:
            raise DataError(
                f"two reports named {key!r}, of the script's loss function, an aggregated loss or "
                "an extension; expected different names: rename yours, or the sum of several terms "
                "by LossHook(total=...)"
            )
        self.reports[key] = pair


def _pair(total: Tensor, count: Tensor | float, copies: int = 1) -> Tensor:
    """[2]: both, divided by ``copies``; in the dtype of ``total``. Waits for no device."""
    if isinstance(count, Tensor):
        pair = torch.stack([total, in_dtype(count, total.dtype)])
    else:
        pair = pad(total.view(1), (0, 1), value=count)
    return pair if copies == 1 else pair / copies


Watch = Callable[[MicrobatchLoss], None]
"""What an extension makes of the loss of each microbatch of a call."""


class Extension:
    """One thing that a call does besides its loss; every method may be left out.

    A check raises and changes no number. A part adds to `MicrobatchLoss.total` and its reports.
    What lives no longer than a call belongs in `around`, not into attributes.
    """

    needs: frozenset[str] = frozenset()
    """What the plan has to hold besides coefficients, in the next step:

    - ``masks``: whole, by token, on every rank of the last pipeline stage;
    - ``fingerprints``: fingerprints of the tokens;
    - ``stages``: the plan is wanted on every pipeline stage;
    - ``prompt``, ``rollout`` or ``dataset``: the groups by this unit.
    """

    def settings(self) -> Mapping[str, object]:
        """What must be the same on every rank, by name; as JSON."""
        return {}

    def words(self) -> str:
        """What the first line of the log says of it; empty: nothing."""
        return ""

    def start(self, call: Call) -> None:
        """On every rank, once for each step or evaluation, before anything is counted.

        May refuse the call, and may communicate.
        """

    def adapt(
        self, call: Call, loss_func: Callable[..., Any], names: Sequence[str]
    ) -> tuple[Callable[..., Any], Sequence[str]]:
        """What the forward step returned, as the route reads it; and the terms that it computes."""
        return loss_func, names

    @contextmanager
    def around(self, call: Call, plan: PlannedStep | None) -> Iterator[Watch | None]:
        """Around one call of the schedule, on every rank.

        Yields a function of each microbatch's loss, or None. What follows the ``yield`` runs only
        if the call succeeded.

        Args:
            plan: None where none was made before the call: on other pipeline stages, unless the
                call trains and the extension needs ``stages``; and in a forward-only call of a
                custom loop, whose loss functions may carry no mask.
        """
        yield None


def settings_of(hook: Mapping[str, object], extensions: Iterable[Extension]) -> dict[str, object]:
    """Of a hook and its extensions; raises OptionError if two of them have one name."""
    found = dict(hook)
    for extension in extensions:
        if taken := found.keys() & extension.settings().keys():
            raise OptionError(
                f"the settings {sorted(taken)} of {type(extension).__name__} are taken by the hook "
                "or another extension; expected names of its own: rename them, or drop it"
            )
        found |= extension.settings()
    return found
