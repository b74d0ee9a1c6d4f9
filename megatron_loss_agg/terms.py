"""A loss of several terms: policy in one mode, KL in another, entropy in a third.

Every term is a weighted sum of token losses with a denominator of its own, so the terms of a step
share one exchange of counts and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import ModeError


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


def named_terms(terms: Mapping[str, Term | LossAggregation]) -> dict[str, Term]:
    """``terms`` with a coefficient each.

    Raises:
        ModeError: none at all, or one that is neither a term nor an aggregation.
    """
    if not isinstance(terms, Mapping) or not terms:
        raise ModeError(f"terms={terms!r}; expected a mapping of names to Term or LossAggregation")
    return {name: term if isinstance(term, Term) else Term(term) for name, term in terms.items()}
