"""One optimizer step: its microbatches over calls of the schedule, their plan, and who gets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, Unit
from megatron_loss_agg.coefficients import StepCoefficients
from megatron_loss_agg.collectives import abandoning_on_error, failing_together, handed_on
from megatron_loss_agg.errors import StepError
from megatron_loss_agg.masks import brought_to_cpu
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.reading.keys import checked_microbatches
from megatron_loss_agg.mcore.reading.late import LateMicrobatch, check_late, checked_samples
from megatron_loss_agg.mcore.reading.prints import Prints
from megatron_loss_agg.mcore.splits import MicrobatchShape, Splits
from megatron_loss_agg.microbatch import Microbatch, listed, of_term
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.weights import at_least_fp32


class Step:
    """Microbatches that are counted together and taken by one call of the schedule, or several.

    Args:
        number: of this data-parallel rank's microbatches.
        read: returns them; called once, on the ranks that read data.
    """

    def __init__(self, number: int, read: Callable[[], Any]) -> None:
        self.number = number
        self.left = number
        self.read = read
        self.own_tokens: dict[int, int | Tensor] = {}  # of each microbatch, as told to the host
        self.plan: PlannedStep | None = None  # of all of them, once it is made

    @property
    def is_untouched(self) -> bool:
        """Whether no call has taken any of them yet."""
        return self.left == self.number

    def take(self, number: int) -> int:
        """Take the next ``number`` microbatches; return the index of the first.

        Raises:
            StepError: fewer are left.
        """
        if number > self.left:
            raise StepError(
                f"a call with num_microbatches={number} in a hook.step with {self.left} of "
                f"{self.number} microbatches left; expected at most as many (a call that failed "
                "has taken its own)"
            )
        self.left -= number
        return self.number - self.left - number

    def check_all_taken(self) -> None:
        """Raise StepError if some are left."""
        if self.left:
            raise StepError(
                f"hook.step ends with {self.left} of {self.number} microbatches left; expected "
                "calls that take all of them: see their num_microbatches"
            )


@dataclass(frozen=True, eq=False)
class PlannedTerm(StepCoefficients):
    """What a step's losses need to know of one term: a few numbers for each sample.

    Only custom functions and extensions that ask for it have more, by token. Lists are by
    microbatch of this data-parallel rank; tensors are on the CPU.
    """

    samples: Sequence[MicrobatchShape]
    ids: Mapping[Unit, Sequence[Tensor]]  # int64 [samples], of the units that are needed
    custom: Sequence[Tensor] | None  # weights of all tokens, by a custom function
    masks: Sequence[Tensor] | None  # of all tokens, if they are needed
    prints: Sequence[Prints] | None  # of the tokens, while these are compared
    is_late: bool  # the model makes the masks: coefficients and mask sums are not known

    @cached_property
    def _by_microbatch(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        sizes = [*self.sizes]
        return self.coefficient_S.split(sizes), self.mask_sum_S.split(sizes)

    def coefficients(self, i: int) -> Tensor:
        """As `StepPlan.coefficients`, but not a copy."""
        return self._by_microbatch[0][i]

    def mask_sums(self, i: int) -> Tensor:
        """Likewise."""
        return self._by_microbatch[1][i]


@dataclass(frozen=True)
class PlannedStep:
    """The plan of one step: a value, made once for each context-parallel rank and handed on."""

    terms: Mapping[str, PlannedTerm]
    tokens: Sequence[int]  # of each microbatch, as the host counts them, over all its ranks
    total_tokens: int  # of the whole step, likewise
    routed: Sequence[int]  # of each microbatch: tokens that the model's routers see
    is_empty: bool  # every token of the whole step is masked or rejected
    divided_by_host: bool = False  # by the step's tokens: see `reading.late`

    @property
    def first(self) -> PlannedTerm:
        """The term whose tokens the host counts."""
        return next(iter(self.terms.values()))

    @property
    def microbatches(self) -> int:
        """Of the whole step, over all data-parallel ranks."""
        return self.first.counts.microbatches

    @property
    def is_late(self) -> bool:
        """Whether the model makes the masks."""
        return self.first.is_late


def planned_step(step: Step, call: Call, splits: Splits, needs: Set[str]) -> PlannedStep:
    """Count a step; on every rank of the last pipeline stage.

    Args:
        needs: see `Extension.needs`.

    Raises:
        AggregationError: this rank's own error.
        PeerError: another rank failed.
    """
    return handed_on(lambda: _counted(step, call, splits, needs), call.groups.tp, 0)


def _counted(step: Step, call: Call, splits: Splits, needs: Set[str]) -> PlannedStep:
    terms, dp = call.terms, call.groups.dp
    with abandoning_on_error(dp):
        given = listed(step.read())
        is_late = any(isinstance(x, LateMicrobatch) for x in given)
        if is_late:
            numbers = checked_samples(given, step.number)
            check_late(terms, call, needs)
            # Of masks nothing is known; the counts of samples and microbatches are right.
            given = [Microbatch(torch.ones(n, 1), routed_tokens=0) for n in numbers]
        else:
            # All at once: each transfer from a device waits for it.
            given = brought_to_cpu(checked_microbatches(given, step.number, terms))
        units = [unit for unit in BY_ID if unit in needs]
        if not call.trains:  # validation sets are often read one by one, and then lack ids
            all_terms = [of_term(name, m) for m in given for name in terms]
            units = [x for x in units if all(getattr(m, f"{x}_ids") is not None for m in all_terms)]
    plans = StepPlan.build_terms(terms, given, dp, group_by=units)
    custom = any(plan.aggregation.function is not None for plan in plans.values())
    # A custom function may fail on one data-parallel rank alone; the others must learn of it.
    with failing_together([dp] if custom else [], _CUSTOM_FAILED):
        planned = {
            name: _planned_term(plan, call, splits, set() if is_late else needs, units, is_late)
            for name, plan in plans.items()
        }
    first = next(iter(plans.values()))
    if is_late:
        return _late_step(planned, plans, call.groups.cp_size)
    counts = first.counts
    routed = [m.routed_tokens for m in first.microbatches]
    assert counts.active_tokens is not None
    return PlannedStep(
        terms=planned,
        tokens=[a if r is None else r for a, r in zip(first.active_tokens, routed, strict=True)],
        total_tokens=counts.active_tokens if counts.routed_tokens is None else counts.routed_tokens,
        routed=[
            m.loss_mask.numel() if r is None else r
            for m, r in zip(first.microbatches, routed, strict=True)
        ],
        is_empty=plans.is_empty,
    )


_CUSTOM_FAILED = (
    "the aggregation function failed on another rank of the data-parallel group; expected it to "
    "succeed on every rank: see the error of that rank"
)


def _planned_term(
    plan: StepPlan,
    call: Call,
    splits: Splits,
    needs: Set[str],
    units: Sequence[Unit],
    is_late: bool,
) -> PlannedTerm:
    microbatches, numbers = plan.microbatches, range(len(plan.microbatches))
    samples = [MicrobatchShape.of(m) for m in microbatches]
    is_custom = plan.aggregation.function is not None
    by_token = is_custom or "masks" in needs
    cp, rank = call.groups.cp_size, call.groups.cp_rank
    prints = None
    if "prints" in needs or any(splits.is_open(x, cp, by_token) for x in samples):
        prints = [
            splits.prints(m, x, cp, rank, by_token)
            for m, x in zip(microbatches, samples, strict=True)
        ]
    dtype = at_least_fp32(torch.get_default_dtype())
    known = {x.name: getattr(plan, x.name) for x in fields(StepCoefficients)}
    return PlannedTerm(
        **{**known, "sums_by_unit": {}},  # only custom functions ask for them
        samples=samples,
        ids={unit: [getattr(m, f"{unit}_ids").cpu() for m in microbatches] for unit in units},
        custom=[plan.weights(i, dtype) for i in numbers] if is_custom else None,
        masks=[m.loss_mask for m in microbatches] if "masks" in needs else None,
        prints=prints,
        is_late=is_late,
    )


def _late_step(
    terms: Mapping[str, PlannedTerm], plans: Mapping[str, StepPlan], ranks: int
) -> PlannedStep:
    """The plan of a step whose masks the model makes; see `reading.late`.

    Args:
        ranks: of the context-parallel group.
    """
    by_host = any(plan.aggregation.within == "step" for plan in plans.values())
    first = next(iter(plans.values()))
    number = len(first.sizes)
    return PlannedStep(
        terms=terms,
        # One for each rank and microbatch, unless the host divides by what it counts itself.
        tokens=[ranks] * number,
        total_tokens=1 if by_host else first.counts.microbatches * ranks,
        routed=[0] * number,
        is_empty=False,
        divided_by_host=by_host,
    )
