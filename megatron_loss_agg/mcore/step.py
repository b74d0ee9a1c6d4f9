"""One optimizer step: its microbatches over calls of the schedule, their plan, and who gets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, Unit
from megatron_loss_agg.coefficients import StepCoefficients
from megatron_loss_agg.collectives import abandoning_on_error, failing_together, handed_on
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.masks import brought_to_cpu
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.reading.fingerprints import Fingerprints
from megatron_loss_agg.mcore.reading.keys import checked_microbatches, listed_in_full
from megatron_loss_agg.mcore.reading.late import LateMicrobatch, check_possible
from megatron_loss_agg.mcore.splits import MicrobatchShape
from megatron_loss_agg.microbatch import Microbatch, of_term
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.tensors import at_least_fp32


class Step:
    """Microbatches that are counted together and taken by one call of the schedule, or several."""

    def __init__(self, number: int, read: Callable[[], Any]) -> None:
        self.number = number  # of this data-parallel rank's microbatches
        self.left = number
        self.read = read  # returns them; called once, on the ranks that read data
        self.own_tokens: dict[int, int | Tensor] = {}  # of each microbatch, as told to the host
        self.plan: PlannedStep | None = None  # of all of them, once it is made

    def take(self, number: int) -> int:
        """Take the next ``number`` microbatches; return the index of the first."""
        if number > self.left:
            raise DataError(
                f"a call with num_microbatches={number} in a hook.step with {self.left} of "
                f"{self.number} microbatches left; expected at most as many (a call that failed "
                "has taken its own)"
            )
        self.left -= number
        return self.number - self.left - number

    def check_all_taken(self) -> None:
        """Raise DataError if some microbatches are left."""
        if self.left:
            raise DataError(
                f"hook.step ends with {self.left} of {self.number} microbatches left; expected "
                "calls that take all of them: see their num_microbatches"
            )


@dataclass(frozen=True, eq=False)
class PlannedTerm(StepCoefficients):
    """What a step's losses need to know of one term: a few numbers for each sample.

    Only custom functions and extensions that ask for it have more, by token. Lists are by
    microbatch of this data-parallel rank; tensors are on the CPU.
    """

    shapes: Sequence[MicrobatchShape]
    ids: Mapping[Unit, Sequence[Tensor]]  # int64 [samples], of the units that are needed
    custom: Sequence[Tensor] | None  # weights of all tokens, by a custom function
    factors: Sequence[Tensor | None]  # of all tokens; a custom function's weights include them
    factored_sums: Sequence[float | None]  # with them, the sum of all weights without their signs
    masks: Sequence[Tensor] | None  # of all tokens, if they are needed
    fingerprints: Sequence[Fingerprints] | None  # of the tokens, while these are compared

    @cached_property
    def sums(self) -> Sequence[tuple[float, float]]:
        """Of each microbatch, ``sum_s M_s`` and ``sum_s c_s M_s``."""
        both = [(self.coefficients(i), self.mask_sums(i)) for i in range(len(self.sizes))]
        return [(float(mask_S.sum()), float(c_S.dot(mask_S))) for c_S, mask_S in both]


@dataclass(frozen=True)
class PlannedStep:
    """The plan of one step: a value, made once for each context-parallel rank and handed on."""

    terms: Mapping[str, PlannedTerm]
    tokens: Sequence[int]  # of each microbatch, as the host counts them, over all its ranks
    total_tokens: int  # of the whole step, likewise
    routed: Sequence[int]  # of each microbatch: tokens that the model's routers see
    is_empty: bool  # every token of the whole step is masked or rejected
    is_late: bool  # the model makes the masks: see `reading.late`
    divided_by_host: bool  # the host divides by the step's tokens: likewise

    @property
    def first(self) -> PlannedTerm:
        """The term whose tokens the host counts."""
        return next(iter(self.terms.values()))


def planned_step(step: Step, call: Call, needs: Set[str]) -> PlannedStep:
    """Count a step, on every rank of the last pipeline stage; for ``needs`` see `Extension`."""
    return handed_on(lambda: _plan_of(step, call, needs), call.groups.tp, 0)


def _plan_of(step: Step, call: Call, needs: Set[str]) -> PlannedStep:
    terms, dp = call.terms, call.groups.dp
    with abandoning_on_error(dp):
        given = listed_in_full(step.read(), step.number)
        is_late = bool(given) and all(isinstance(x, LateMicrobatch) for x in given)
        if is_late:
            check_possible(
                terms,
                needs=needs,
                empty_step=str(call.settings["empty_step"]),
                averages_quotients=call.loop.averages_quotients,
                per_token=call.scale.per_token,
                config=call.config,
            )
            # Of masks nothing is known; the counts of samples and microbatches are right. The host
            # is told one token of each rank and microbatch, unless it divides by its own count.
            ranks = call.groups.cp_size
            given = [Microbatch(torch.ones(x.samples, 1), routed_tokens=ranks) for x in given]
            needs = frozenset[str]()
        else:
            # All at once: each transfer from a device waits for it.
            given = brought_to_cpu(checked_microbatches(given, terms, call.trains))
        units = [unit for unit in BY_ID if unit in needs]
        if not call.trains:  # validation sets are often read one by one, and then lack ids
            all_terms = [of_term(name, m) for m in given for name in terms]
            units = [x for x in units if all(m.ids_of(x) is not None for m in all_terms)]
    plans = StepPlan.build_terms(terms, given, dp, group_by=units)
    custom = any(plan.aggregation.function is not None for plan in plans.values())
    # A custom function may fail on one data-parallel rank alone; the others must learn of it.
    with failing_together([dp] if custom else [], _CUSTOM_FAILED):
        planned = {name: _planned_term(plan, call, needs, units) for name, plan in plans.items()}
    first = next(iter(plans.values()))
    counts = first.counts
    tokens, routed = [], []
    for microbatch, active in zip(first.microbatches, first.active_tokens, strict=True):
        told = microbatch.routed_tokens
        tokens.append(active if told is None else told)
        routed.append(microbatch.loss_mask.numel() if told is None else told)
    total = counts.active_tokens if counts.routed_tokens is None else counts.routed_tokens
    assert total is not None  # masks are known
    by_host = is_late and any(plan.aggregation.within == "step" for plan in plans.values())
    return PlannedStep(
        terms=planned,
        tokens=tokens,
        total_tokens=1 if by_host else total,
        routed=routed,
        is_empty=plans.is_empty,
        is_late=is_late,
        divided_by_host=by_host,
    )


_CUSTOM_FAILED = (
    "the aggregation function failed on another rank of the data-parallel group; expected it to "
    "succeed on every rank: see the error of that rank"
)


def _planned_term(
    plan: StepPlan, call: Call, needs: Set[str], units: Sequence[Unit]
) -> PlannedTerm:
    microbatches, splits = plan.microbatches, call.splits
    shapes = [MicrobatchShape.of(m) for m in microbatches]
    is_custom = plan.aggregation.function is not None
    factors = [None if is_custom else m.token_factors for m in microbatches]
    by_token = is_custom or "masks" in needs or any(x is not None for x in factors)
    cp, rank = call.groups.cp_size, call.groups.cp_rank
    fingerprints = None
    if "fingerprints" in needs or any(splits.is_open(x, cp, by_token) for x in shapes):
        fingerprints = [
            splits.fingerprints(m, x, cp, rank, by_token)
            for m, x in zip(microbatches, shapes, strict=True)
        ]
    dtype = at_least_fp32(torch.get_default_dtype())
    return PlannedTerm(
        **vars(plan.counted.coefficients),
        shapes=shapes,
        ids={unit: [getattr(m, f"{unit}_ids").cpu() for m in microbatches] for unit in units},
        custom=[plan.weights(i, dtype) for i in range(len(shapes))] if is_custom else None,
        factors=factors,
        factored_sums=[
            None if x is None else float(plan.weights(i, torch.float64).abs().sum())
            for i, x in enumerate(factors)
        ],
        masks=[m.loss_mask for m in microbatches] if "masks" in needs else None,
        fingerprints=fingerprints,
    )
