"""The interface of what a call does besides its loss: checks, and parts that add to it.

`extensions` has one file for each. The route calls them and knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from megatron_loss_agg.errors import ReportError
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step import PlannedStep
from megatron_loss_agg.mcore.weigh import LocalWeights


class SumPair(Protocol):
    """See `call_losses.Reports.summed`."""

    def __call__(self, key: str, part: Tensor, denominator: float = 1.0) -> Tensor: ...


@dataclass
class MicrobatchLoss:
    """The loss of one microbatch on this rank, before the host's scale.

    Mappings are by term. Losses and weights are flat: [tokens of this rank]. Masks have the shapes
    that the script gave them.
    """

    i: int  # of the microbatch in its step
    is_last: bool  # of its call
    plan: PlannedStep
    losses: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]  # the loss function's
    local: Mapping[str, LocalWeights]
    weights: Mapping[str, Tensor]
    whole: str | None  # see `TokenLoss`; None, too, where no context-parallel ranks split tokens
    returned: Sequence[Any] | None  # by a stock loss function; None: it is a `TokenLoss`
    inputs: Sequence[Tensor]  # the integer tensors that the model was called with
    sum_pair: SumPair
    total: Tensor
    reports: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> str:
        """The term whose tokens the host counts, and whose mean is ``lm loss``."""
        return next(iter(self.losses))

    def report(self, key: str, pair: Tensor) -> None:
        """Add a report: a pair, see `call_losses.Reports`.

        Raises:
            ReportError: the script's loss function, or another part, has one of this name.
        """
        if key in self.reports:
            raise ReportError(
                f"the loss function reports {key!r}, which is the name of an aggregated loss; "
                "expected another name, or for the sum of several terms LossHook(total=...)"
            )
        self.reports[key] = pair


class Extension:
    """One thing that a call does besides its loss; every method may be left out.

    A check raises and changes no number. A part adds to `MicrobatchLoss.total` and its reports.
    What lives no longer than a call belongs into `around`, not into attributes.
    """

    needs: frozenset[str] = frozenset()
    """What the plan has to hold besides coefficients, in the next step:

    - ``masks``: whole, by token, on every rank of the last pipeline stage;
    - ``prints``: fingerprints of the tokens;
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
        """On every rank, once for each step or evaluation, before anything is read.

        May refuse the call, and may communicate.
        """

    def adapt(
        self, call: Call, loss_func: Callable[..., Any], names: Sequence[str]
    ) -> tuple[Callable[..., Any], Sequence[str]]:
        """What the forward step returned, as the route reads it; and the terms that it computes."""
        return loss_func, names

    @contextmanager
    def around(
        self, call: Call, plan: PlannedStep | None
    ) -> Iterator[Callable[[MicrobatchLoss], None] | None]:
        """Around one call of the schedule, on every rank.

        Yields a function of each microbatch's loss, or None. What follows the ``yield`` runs only
        if the call succeeded.

        Args:
            plan: None where none was made before the call: on other pipeline stages, unless the
                extension needs ``stages``, and in a forward-only call of a custom loop, whose loss
                functions may carry no mask.
        """
        yield None
