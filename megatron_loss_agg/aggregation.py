"""Aggregation modes: what each divides a token's weight by.

A mode is a path of units from outside to inside: a mean over the groups of the first, in each of
these over those of the next, and so on; the last one pools its tokens. So token ``t`` of sample
``s``, with loss mask ``m``, gets the weight

    w_t = m_t / (D * M_within(s) * C(s) * N_across)

``N_across`` is the number of the outermost groups in the whole optimizer step; ``C`` the product,
over all units of the path but the first, of the number of groups that have the same parent as that
of ``s`` (1 on a path of one unit); ``M_within`` the mask sum of the innermost group, and ``D`` the
divisor. A sample's own weight ``v_s``
multiplies it; if such weights count, ``V_across`` takes the place of ``N_across``:

    w_t = v_s m_t / (D * M_within(s) * C(s) * V_across)
    V_across = sum over innermost groups g of V_g / C(g)
    V_g = (sum over samples s of g of v_s M_s) / M_g, the mean weight of the group's tokens

``V_g`` of a group without tokens is the mean of ``v_s`` over its samples. ``token_mean`` has no
outer mean: its ``V_across`` is the mean weight of the step's tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from difflib import get_close_matches
from numbers import Real
from typing import Any, Literal, NamedTuple

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.presets import PRESETS, SYSTEMS, presets_of

Unit = str
"""A way to group the tokens of an optimizer step: one of `WITHOUT_IDS`, or told by ids."""
WITHOUT_IDS: tuple[Unit, ...] = ("step", "microbatch", "sample")
BY_ID: tuple[Unit, ...] = ("prompt", "rollout", "dataset")
"""Units whose ids `Microbatch` has as ``<unit>_ids``; it has those of other names in ``ids``."""


class Mode(NamedTuple):
    """One row of the table of modes."""

    path: tuple[Unit, ...]  # units from outside to inside, see above
    pools: bool = True  # divide by the mask sum of the innermost group, without a path the step's
    divisor: Literal["refused", "optional", "required"] = "refused"


MODES: dict[str, Mode] = {
    "token_mean": Mode(()),
    "sample_mean": Mode(("sample",)),
    "rollout_mean": Mode(("rollout",)),
    "prompt_mean": Mode(("prompt",)),
    "dataset_mean": Mode(("dataset",)),
    "nested_mean": Mode(()),  # its path is `LossAggregation.levels`
    "sample_sum": Mode(("sample",), pools=False),
    "constant": Mode(("sample",), pools=False, divisor="required"),
    "sum": Mode((), pools=False, divisor="optional"),
    "microbatch_mean": Mode(("microbatch",)),
    "custom": Mode((), pools=False),
}

_COUNTABLE = ("sample", "rollout", "prompt", "dataset")


@dataclass(frozen=True)
class LossAggregation:
    """How the token losses of one whole optimizer step are reduced to one number.

    ``L = sum_t w_t * loss_t`` over all microbatches and data-parallel ranks of the step, with
    ``w_t = m_t / (divisor * M_within * C * N_across)``; see `MODES`. A group without active tokens
    contributes 0.

    Raises:
        OptionError: unknown ``mode``, ``empty``, ``rejected`` or ``sample_weights``, or ``levels`` or
            a ``count`` that the mode does not support.
        OptionError: ``divisor`` is missing, not supported by the mode, or not a finite positive
            number.
        OptionError: ``function`` is missing for ``custom``, or given for another mode.
    """

    _: KW_ONLY
    mode: str
    """What the mean is over: a name of the table in docs/modes.md."""
    divisor: float | None = None
    """D of `constant` and `sum`, in tokens."""
    empty: str = "count"
    """Whether groups without active tokens are included in N_across and C: `count` or `skip`."""
    count: str | None = None
    """Unit of N_across, if not the mode's own."""
    levels: Sequence[str] | None = None
    """For `nested_mean`: units from outside to inside, such as ("prompt", "rollout", "sample") or
    "prompt,rollout,sample": the mean over prompts of the mean over each prompt's rollouts of the
    mean over their samples. A unit may be any name of `Microbatch.ids`.
    """
    rejected: str | None = None
    """Whether rejected samples (weight 0) are included in M_within and N_across: `count` or
    `skip`. Must be set if the step has any.
    """
    sample_weights: str | None = None
    """Whether `Microbatch.sample_weights` are in the denominators: `count` (V_across instead of
    N_across) or `skip`. Must be set if the step has any.
    """
    function: Callable[..., Any] | None = None
    """For `custom`: (plan, i) -> weights of microbatch i, in the shape of its mask."""
    name: str | None = field(default=None, compare=False, repr=False)
    """What `label` shows, if not the mode; `preset` sets it to the preset's name."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            hint = _did_you_mean(self.mode, MODES)
            raise OptionError(
                f"unknown mode {self.mode!r}; {hint}expected one of {', '.join(MODES)}"
            )
        for name in ("empty", "rejected", "sample_weights"):
            given = getattr(self, name)
            if given not in ("count", "skip") and (given is not None or name == "empty"):
                raise OptionError(f"{name}={given!r}; expected 'count' or 'skip'")
        countable = {*MODES[self.mode].path} & {*_COUNTABLE}
        if self.count is not None and not (countable and self.count in _COUNTABLE):
            expected = f"one of {', '.join(_COUNTABLE)}" if countable else "none"
            raise OptionError(f"count={self.count!r} with mode {self.mode!r}; expected {expected}")
        self._check_levels()
        self._check_divisor()
        is_custom = self.mode == "custom"
        if not (callable(self.function) if is_custom else self.function is None):
            expected = "a function (plan, i) -> weights of microbatch i" if is_custom else "none"
            raise OptionError(
                f"function={self.function!r} with mode {self.mode!r}; expected {expected}"
            )

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        divisor: float | None = None,
        empty: str | None = None,
        rejected: str | None = None,
        sample_weights: str | None = None,
    ) -> LossAggregation:
        """The aggregation that another system calls ``name``, such as ``verl/token-mean``.

        ``empty`` and ``rejected`` override the preset's own choice.
        """
        if name not in PRESETS:
            system, _, own = name.partition("/")
            known = presets_of(system) or [f"{x}/..." for x in SYSTEMS]
            hint = _did_you_mean(name, presets_of(system) or PRESETS) if own else ""
            raise OptionError(f"unknown preset {name!r}; {hint}expected one of {', '.join(known)}")
        preset = PRESETS[name]
        if preset.needs_divisor != (divisor is not None):
            expected = "a number > 0" if preset.needs_divisor else "none"
            raise OptionError(f"divisor={divisor!r} with preset {name!r}; expected {expected}")
        return cls(
            mode=preset.mode,
            divisor=divisor,
            empty=preset.empty if empty is None else empty,
            count=preset.count,
            rejected=preset.rejected if rejected is None else rejected,
            sample_weights=sample_weights,
            name=name,
        )

    @property
    def label(self) -> str:
        """The name of the preset, or else the mode."""
        return self.name or self.mode

    @property
    def path(self) -> tuple[Unit, ...]:
        """The units of its means, from outside to inside."""
        return MODES[self.mode].path if self.levels is None else (*self.levels,)

    @property
    def within(self) -> Unit | None:
        """The unit whose mask sum divides a token's weight."""
        if not MODES[self.mode].pools:
            return None
        return self.path[-1] if self.path else "step"

    @property
    def across(self) -> Unit | None:
        """The unit whose number of groups divides a token's weight."""
        return self.count or next(iter(self.path), None)

    @functools.cached_property
    def units(self) -> set[Unit]:
        """All units by which it groups tokens."""
        return {unit for unit in (self.within, self.across, *self.path) if unit is not None}

    @property
    def by_id(self) -> list[Unit]:
        """Those of the `units` whose groups are told by ids."""
        return sorted(self.units - {*WITHOUT_IDS})

    @property
    def weighted(self) -> Unit | None:
        """The unit of ``V_g``; None where `sample_weights` are in no denominator."""
        if self.sample_weights != "count":
            return None
        innermost = self.path[-1] if self.path else self.within
        return self.count or innermost

    @property
    def scale(self) -> float:
        """``1 / D``."""
        return 1.0 if self.divisor is None else 1.0 / float(self.divisor)

    def _check_levels(self) -> None:
        levels: Any = self.levels
        if isinstance(levels, str):
            levels = [unit.strip() for unit in levels.split(",")]
        if self.mode != "nested_mean":
            if levels is not None:
                raise OptionError(f"levels={levels!r} with mode {self.mode!r}; expected none")
            return
        are_names = isinstance(levels, (list, tuple)) and {*map(type, levels)} == {str}
        if not (
            are_names
            and all(map(str.isidentifier, levels))
            and len({*levels}) == len(levels)
            and {"step", "microbatch"}.isdisjoint(levels)
            and "sample" not in levels[:-1]
        ):
            raise OptionError(
                f"levels={levels!r} with mode 'nested_mean'; expected units from outside to "
                f"inside, each once, of {', '.join(_COUNTABLE)} or ids of another name, with "
                "sample last: such as ('prompt', 'rollout', 'sample')"
            )
        object.__setattr__(self, "levels", (*levels,))

    def _check_divisor(self) -> None:
        divisor: Any = self.divisor  # callers may pass any type
        rule = MODES[self.mode].divisor
        if divisor is None:
            if rule == "required":
                raise OptionError(f"mode {self.mode!r} needs a divisor and got none; give one > 0")
            return
        if rule == "refused":
            raise OptionError(
                f"divisor={divisor!r} with mode {self.mode!r}, which takes none; "
                "drop it, or choose mode 'constant' or 'sum'"
            )
        if not isinstance(divisor, Real) or not 0 < float(divisor) < math.inf:
            raise OptionError(f"divisor={divisor!r}; expected a finite number > 0")


@dataclass(frozen=True)
class Term:
    """One term of a loss.

    Raises:
        OptionError: no `LossAggregation`, or a coefficient that is not a finite number.
    """

    aggregation: LossAggregation
    """How its token losses are reduced."""
    coefficient: float = 1.0
    """Multiplies the term in the loss, but not in its report."""

    def __post_init__(self) -> None:
        aggregation: Any = self.aggregation
        if not isinstance(aggregation, LossAggregation):
            got = type(aggregation).__name__
            raise OptionError(f"a {got} for the aggregation of a term; expected a LossAggregation")
        number: Any = self.coefficient
        if not isinstance(number, Real) or not math.isfinite(number):
            raise OptionError(f"coefficient={number!r}; expected a finite number")
        object.__setattr__(self, "coefficient", float(number))


def named_terms(terms: Mapping[str, Term | LossAggregation]) -> dict[str, Term]:
    """``terms`` with a coefficient each; OptionError for none at all."""
    if not isinstance(terms, Mapping) or not terms:
        raise OptionError(
            f"terms={terms!r}; expected a mapping of names to Term or LossAggregation"
        )
    return {name: term if isinstance(term, Term) else Term(term) for name, term in terms.items()}


def units_by_id(terms: Mapping[str, Term]) -> set[Unit]:
    """The units of all terms whose groups are told by ids."""
    return {unit for term in terms.values() for unit in term.aggregation.by_id}


def _did_you_mean(name: object, known: Iterable[str]) -> str:
    """Names the one of ``known`` that is nearest to ``name``; empty if none is near."""
    near = get_close_matches(str(name), known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""
