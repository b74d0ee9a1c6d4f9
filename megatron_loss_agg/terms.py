"""A loss of several terms, each a weighted sum of token losses with a denominator of its own.

Policy in one mode, KL in another, entropy in a third: every term is a linear functional of token
losses, so the terms share one exchange of counts and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import MaskError, ModeError
from megatron_loss_agg.loss import weighted_sum
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.plan import StepPlan, as_list, build_plans


@dataclass(frozen=True)
class Term:
    """One term of a loss.

    Raises:
        ModeError: no `LossAggregation`, or a coefficient that is not a finite number.
    """

    aggregation: LossAggregation
    # What the term is multiplied by in the loss; its report is without.
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        aggregation: Any = self.aggregation
        if not isinstance(aggregation, LossAggregation):
            got = type(aggregation).__name__
            raise ModeError(f"a {got} for the aggregation of a term; expected a LossAggregation")
        number: Any = self.coefficient
        try:
            finite = isinstance(number, Real) and math.isfinite(number)
        except OverflowError:
            finite = False
        if not finite or isinstance(number, bool):
            raise ModeError(f"coefficient={number!r}; expected a finite number")
        object.__setattr__(self, "coefficient", float(number))

    def scaled(self, part: Tensor, losses: Tensor) -> Tensor:
        """``coefficient * part``, where ``part`` was made of ``losses``.

        With a coefficient of 0 it is 0 whatever ``part`` is, and keeps the autograd path.
        """
        if self.coefficient == 0:
            return weighted_sum(torch.zeros_like(losses), losses).to(part.dtype)
        return self.coefficient * part


class StepTerms(Mapping[str, StepPlan]):
    """The plans of one step's terms, by name. Built by `StepPlan.build_terms`.

    The loss of the step is the sum over terms, microbatches and ranks of ``coefficient * w_t *
    loss_t``; `weighted_sum` is one microbatch's part of it.
    """

    def __init__(self, terms: Mapping[str, Term], plans: Mapping[str, StepPlan]) -> None:
        self.terms = dict(terms)
        self._plans = dict(plans)

    @classmethod
    def build(
        cls,
        terms: Mapping[str, Term | LossAggregation],
        microbatches: Sequence[Microbatch | Mapping[str, Microbatch]],
        group: dist.ProcessGroup | None,
        sharded_over: dist.ProcessGroup | None,
    ) -> StepTerms:
        """See `StepPlan.build_terms`."""
        try:
            named = named_terms(terms)
            of_step = as_list(microbatches)
            of_terms = [[of_term(name, m) for m in of_step] for name in named]
        except Exception:
            StepPlan.abandon(group)
            raise
        aggregations = {name: term.aggregation for name, term in named.items()}
        plans = build_plans(aggregations, of_terms, group, sharded_over)
        return cls(named, dict(zip(named, plans, strict=True)))

    def __getitem__(self, name: str) -> StepPlan:
        return self._plans[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def is_empty(self) -> bool:
        """Whether no token of the whole step weighs anything in the loss."""
        return all(
            plan.is_empty for name, plan in self._plans.items() if self.terms[name].coefficient != 0
        )

    def weighted_sum(self, i: int, losses: Mapping[str, Tensor]) -> Tensor:
        """``sum over terms of coefficient * sum_t w_t * loss_t`` of microbatch ``i``; a scalar.

        Args:
            losses: for every term its token losses, in the shape of the microbatch's mask.

        Raises:
            MaskError: a term has no losses, or losses have no term.
        """
        check_losses(losses, self.terms)
        parts = []
        for name, plan in self._plans.items():
            dtype = torch.promote_types(losses[name].dtype, torch.float32)
            w = plan.weights(i, dtype)
            parts.append(self.terms[name].scaled(weighted_sum(w, losses[name]), losses[name]))
        return torch.stack(parts).sum()


def named_terms(terms: Mapping[str, Term | LossAggregation]) -> dict[str, Term]:
    """``terms`` with a coefficient each.

    Raises:
        ModeError: none at all, or one that is neither a term nor an aggregation.
    """
    if not isinstance(terms, Mapping) or not terms:
        raise ModeError(f"terms={terms!r}; expected a mapping of names to Term or LossAggregation")
    return {name: term if isinstance(term, Term) else Term(term) for name, term in terms.items()}


def check_losses(losses: Mapping[str, Tensor], terms: Mapping[str, Term]) -> None:
    """Raise MaskError unless ``losses`` are tensors of ``terms``."""
    if not isinstance(losses, Mapping) or losses.keys() != terms.keys():
        got = sorted(losses) if isinstance(losses, Mapping) else type(losses).__name__
        raise MaskError(f"losses {got} for the terms {sorted(terms)}; expected one for each term")
    for name, loss in losses.items():
        if not isinstance(loss, Tensor):
            raise MaskError(f"losses of {name!r} are a {type(loss).__name__}; expected a tensor")


def of_term(name: str, microbatch: Microbatch | Mapping[str, Microbatch]) -> Microbatch:
    """The microbatch of one term, where terms have masks of their own."""
    if not isinstance(microbatch, Mapping):
        return microbatch
    if name not in microbatch:
        raise MaskError(
            f"a microbatch with masks for {sorted(microbatch)} has none for the term {name!r}; "
            "expected one Microbatch for each term"
        )
    return microbatch[name]
