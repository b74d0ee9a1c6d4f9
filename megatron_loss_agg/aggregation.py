"""Aggregation modes: the weight of a token under each.

A mode is a path of units from outside to inside: a mean over the groups of the first unit, within
each of them a mean over the groups of the next unit, and so on; groups of the last unit pool their
tokens. So token ``t`` of sample ``s``, with loss mask ``m``, gets the weight

    w_t = m_t / (D * M_within(s) * C(s) * N_across)

``N_across`` is the number of outermost groups in the whole optimizer step. ``C`` is the product,
over all units of the path except the first, of the number of groups with the same parent as the
group of ``s`` (1 on a path of one unit). ``M_within`` is the mask sum of the innermost group, and
``D`` is the divisor. The weight is multiplied by the sample's own weight ``v_s``; if such weights
count, ``V_across`` replaces ``N_across``:

    w_t = v_s m_t / (D * M_within(s) * C(s) * V_across)
    V_across = sum over innermost groups g of V_g / C(g)
    V_g = (sum over samples s of g of v_s M_s) / M_g, the mean weight of the group's tokens

``V_g`` of a group without tokens is the mean of ``v_s`` over its samples. ``token_mean`` has no
outer mean: its ``V_across`` is the mean weight of the step's tokens. If data sets have weights,
``v_s`` is the sample's own weight times the weight of its data set.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, Literal, NamedTuple

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.presets import PRESETS, SYSTEMS, presets_of

Unit = str
"""A way to group the samples of an optimizer step: one of `WITHOUT_IDS`, or a name of ids."""
WITHOUT_IDS: tuple[Unit, ...] = ("all", "microbatch", "sample")
BY_ID: tuple[Unit, ...] = ("prompt", "rollout", "dataset")
"""Units whose ids are fields of `Microbatch` (``<unit>_ids``). Other units' ids are in ``ids``."""


class Mode(NamedTuple):
    """One row of the table of modes."""

    path: tuple[Unit, ...]  # units from outside to inside, see above
    pools: bool = True  # divide by the mask sum of the innermost group, or of the step if no path
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
    """A reduction of the token losses of one whole optimizer step to one number.

    ``L = sum_t w_t * loss_t`` over all microbatches and data-parallel ranks of the step, with
    ``w_t = m_t / (divisor * M_within * C * N_across)``; see `MODES`. A group without active tokens
    contributes 0.

    Raises:
        OptionError: an unknown ``mode``, ``empty``, ``rejected`` or ``sample_weights``;
            ``levels``, ``count``, ``divisor`` or ``function`` missing where the mode needs it, or
            given where the mode does not take it; a divisor that is not a finite number > 0; or
            ``dataset_weights`` that are not numbers >= 0, or without ``sample_weights``.
    """

    _: KW_ONLY
    mode: str
    """The unit of the mean: a name from the table in docs/modes.md."""
    divisor: float | None = None
    """D of `constant` and `sum`, in tokens."""
    empty: str = "count"
    """`count` or `skip` groups without active tokens in N_across and C."""
    count: str | None = None
    """Unit of N_across, if not the mode's own."""
    levels: Sequence[str] | None = None
    """For `nested_mean`: units from outside to inside, such as ("prompt", "rollout", "sample") or
    "prompt,rollout,sample": the mean over prompts of the mean over each prompt's rollouts of the
    mean over their samples. A unit may be any name of `Microbatch.ids`.
    """
    rejected: str | None = None
    """`count` or `skip` rejected samples (weight 0) in M_within and N_across. Must be set if the step
    has any.
    """
    sample_weights: str | None = None
    """`count` `Microbatch.sample_weights` in the denominators (V_across instead of N_across), or
    `skip` them there. Must be set if the step has any.
    """
    dataset_weights: Mapping[int, float] | None = field(default=None, hash=False)
    """A weight >= 0 for each data set, by its id in `Microbatch.dataset_ids`, such as {0: 0.5, 1: 2}
    or "0:0.5,1:2". It multiplies the weights of the data set's samples; `sample_weights` must be
    set, too. In an evaluation, a data set without a weight has weight 1.
    """
    function: Callable[..., Any] | None = field(default=None, hash=False)
    """For `custom`: maps the `Samples` of all ranks to the coefficient ``c_s`` of each."""
    name: str | None = field(default=None, repr=False)
    """The `label`, if not the mode; `preset` sets it to the preset's name."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"unknown mode {self.mode!r}. {_advice_on_mode(self.mode)}")
        for name in ("empty", "rejected", "sample_weights"):
            value = getattr(self, name)
            if value not in ("count", "skip") and (value is not None or name == "empty"):
                raise OptionError(
                    f"{name} must be 'count' or 'skip', got {value!r}. Choose one ({name}=, or "
                    f"--loss-aggregation-{name.replace('_', '-')})."
                )
        self._check_count()
        self._check_levels()
        self._check_divisor()
        self._check_function()
        self._check_dataset_weights()

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        divisor: float | None = None,
        empty: str | None = None,
        rejected: str | None = None,
        sample_weights: str | None = None,
        dataset_weights: Mapping[int, float] | None = None,
    ) -> LossAggregation:
        """The aggregation that another system calls ``name``, such as ``verl/token-mean``.

        ``empty`` and ``rejected`` override the preset's own choice.
        """
        if name not in PRESETS:
            raise OptionError(f"unknown preset {name!r}. {_advice_on_preset(name)}")
        preset = PRESETS[name]
        if preset.needs_divisor and divisor is None:
            raise OptionError(
                f"preset {name!r} needs a divisor, got none. Give a number > 0 (divisor=, or "
                "--loss-aggregation-divisor)."
            )
        if divisor is not None and not preset.needs_divisor:
            raise OptionError(
                f"preset {name!r} takes no divisor, got {divisor!r}. Drop it (divisor=, or "
                "--loss-aggregation-divisor)."
            )
        return cls(
            mode=preset.mode,
            divisor=divisor,
            empty=preset.empty if empty is None else empty,
            count=preset.count,
            rejected=preset.rejected if rejected is None else rejected,
            sample_weights=sample_weights,
            dataset_weights=dataset_weights,
            name=name,
        )

    @functools.cached_property
    def label(self) -> str:
        """The name of the preset, otherwise the mode."""
        return self.name or self.mode

    @functools.cached_property
    def path(self) -> tuple[Unit, ...]:
        """The units of the means, from outside to inside."""
        return MODES[self.mode].path if self.levels is None else (*self.levels,)

    @functools.cached_property
    def within(self) -> Unit | None:
        """The unit whose mask sum divides a token's weight."""
        if not MODES[self.mode].pools:
            return None
        return self.path[-1] if self.path else "all"

    @functools.cached_property
    def across(self) -> Unit | None:
        """The unit whose number of groups divides a token's weight."""
        return self.count or next(iter(self.path), None)

    @functools.cached_property
    def units(self) -> set[Unit]:
        """All units that it groups tokens by."""
        weighted_unit = None if self.dataset_weights is None else "dataset"
        units = (self.within, self.across, weighted_unit, *self.path)
        return {unit for unit in units if unit is not None}

    @property
    def ignores_samples(self) -> bool:
        """True if a microbatch's active tokens all have one weight, whatever their samples."""
        sample_options = (self.function, self.rejected, self.sample_weights)
        return self.units <= {"all", "microbatch"} and all(x is None for x in sample_options)

    @functools.cached_property
    def by_id(self) -> list[Unit]:
        """The `units` that need ids."""
        return sorted(self.units - {*WITHOUT_IDS})

    @functools.cached_property
    def weighted(self) -> Unit | None:
        """The unit of ``V_g``; None if `sample_weights` are in no denominator."""
        if self.sample_weights != "count":
            return None
        innermost = self.path[-1] if self.path else self.within
        return self.count or innermost

    @functools.cached_property
    def inverse_divisor(self) -> float:
        """``1 / D``."""
        return 1.0 if self.divisor is None else 1.0 / float(self.divisor)

    def _check_count(self) -> None:
        if self.count is None:
            return
        if {*MODES[self.mode].path}.isdisjoint(_COUNTABLE):
            raise OptionError(
                f"mode {self.mode!r} takes no count, got {self.count!r}. Drop count=."
            )
        if self.count not in _COUNTABLE:
            raise OptionError(
                f"count must be one of {', '.join(_COUNTABLE)}, got {self.count!r}. Choose one."
            )

    def _check_levels(self) -> None:
        levels: Any = self.levels  # callers may pass any type
        if self.mode != "nested_mean":
            if levels is not None:
                raise OptionError(
                    f"mode {self.mode!r} takes no levels, got {levels!r}. Drop them, or choose "
                    "nested_mean (--loss-aggregation-levels)."
                )
            return
        if isinstance(levels, str):
            levels = words_in(levels)
        if not _are_levels(levels):
            raise OptionError(
                "levels of nested_mean must be units from outside to inside, each once, with "
                f"sample only last, got {levels!r}. Give {', '.join(_COUNTABLE)} or your own names "
                "of ids, such as prompt,rollout,sample (levels=, or --loss-aggregation-levels)."
            )
        mean = f"{levels[0]}_mean"
        if mean in MODES and MODES[mean].path == (*levels,):
            raise OptionError(
                f"nested_mean must have levels besides {levels[0]!r}, got only that one, which is "
                f"{mean}. Choose that mode, or add levels (levels=, or --loss-aggregation-levels)."
            )
        object.__setattr__(self, "levels", (*levels,))

    def _check_divisor(self) -> None:
        divisor: Any = self.divisor  # callers may pass any type
        rule = MODES[self.mode].divisor
        if divisor is None and rule == "required":
            raise OptionError(
                f"mode {self.mode!r} needs a divisor, got none. Give a number > 0 (divisor=, or "
                "--loss-aggregation-divisor)."
            )
        if divisor is None:
            return
        if rule == "refused":
            raise OptionError(
                f"mode {self.mode!r} takes no divisor, got {divisor!r}. Drop it, or choose mode "
                "constant or sum (divisor=, or --loss-aggregation-divisor)."
            )
        if not isinstance(divisor, Real) or not 0 < float(divisor) < math.inf:
            raise OptionError(
                f"divisor must be a finite number > 0, got {divisor!r}. Change divisor= (or "
                "--loss-aggregation-divisor)."
            )

    def _check_function(self) -> None:
        if self.mode == "custom" and not _takes_one_argument(self.function):
            got = repr(self.function)
            if callable(self.function):
                name = getattr(self.function, "__name__", type(self.function).__name__)
                got = f"{name}({', '.join(inspect.signature(self.function).parameters)})"
            raise OptionError(
                "mode 'custom' needs a function (samples) -> coefficient of each sample, got "
                f"{got}. Give function= (or --loss-aggregation-function)."
            )
        if self.mode != "custom" and self.function is not None:
            raise OptionError(
                f"mode {self.mode!r} takes no function, got {self.function!r}. Drop it, or choose "
                "mode custom (function=, or --loss-aggregation-function)."
            )

    def _check_dataset_weights(self) -> None:
        if self.dataset_weights is None:
            return
        weights = _weights_by_id(self.dataset_weights)
        if not weights:
            raise OptionError(
                "dataset_weights must be one finite number >= 0 for each id of a data set, got "
                f"{self.dataset_weights!r}. Give them by id, such as 0:0.5,1:2 (dataset_weights=, or "
                "--loss-aggregation-dataset-weights)."
            )
        if self.mode == "custom":
            raise OptionError(
                "mode 'custom' takes no dataset_weights, since its function weights samples, got "
                f"{weights}. Use samples.ids['dataset'] in the function, or drop dataset_weights= "
                "(--loss-aggregation-dataset-weights)."
            )
        if self.sample_weights is None:
            raise OptionError(
                "dataset_weights need sample_weights 'count', for a weighted mean, or 'skip', to leave "
                "the denominators as they are, got none. Choose one (sample_weights=, or "
                "--loss-aggregation-sample-weights)."
            )
        object.__setattr__(self, "dataset_weights", weights)


@dataclass(frozen=True)
class Term:
    """One term of a loss.

    Raises:
        OptionError: no `LossAggregation`, or a multiplier that is not a finite number.
    """

    aggregation: LossAggregation
    """The reduction of its token losses."""
    multiplier: float = 1.0
    """Multiplies the term in the loss, but not in its report."""

    def __post_init__(self) -> None:
        aggregation: Any = self.aggregation  # callers may pass any type
        multiplier: Any = self.multiplier
        if not isinstance(aggregation, LossAggregation):
            raise OptionError(
                "a term's aggregation must be a LossAggregation, got a "
                f"{type(aggregation).__name__}. Give Term(LossAggregation(mode=...), "
                "multiplier=...)."
            )
        if not isinstance(multiplier, Real) or not math.isfinite(multiplier):
            raise OptionError(
                f"a term's multiplier must be a finite number, got {multiplier!r}. Change "
                "multiplier=."
            )
        object.__setattr__(self, "multiplier", float(multiplier))


def named_terms(terms: Mapping[str, Term | LossAggregation]) -> dict[str, Term]:
    """``terms``, each with a multiplier; OptionError unless there is at least one."""
    if not isinstance(terms, Mapping) or not terms:
        raise OptionError(
            f"terms must be a mapping of names to Term or LossAggregation, got {terms!r}. Give one."
        )
    return {name: term if isinstance(term, Term) else Term(term) for name, term in terms.items()}


def units_by_id(terms: Mapping[str, Term]) -> set[Unit]:
    """The units, of all terms, that need ids."""
    return {unit for term in terms.values() for unit in term.aggregation.by_id}


def units_read(terms: Mapping[str, Term]) -> list[Unit]:
    """The units whose ids are read: those that the terms need, and the usual ones.

    A custom function also gets ids of any other name that every microbatch has.
    """
    return sorted({*BY_ID, *units_by_id(terms)})


def is_preset(name: object) -> bool:
    """True for "system/name", and for a system's name alone (the error then lists its presets)."""
    return isinstance(name, str) and ("/" in name or name.lower() in SYSTEMS)


def takes_divisor(name: str) -> bool:
    """True if the mode or preset of this name takes a divisor."""
    if name in PRESETS:
        return PRESETS[name].needs_divisor
    return name in MODES and MODES[name].divisor != "refused"


def aggregation_named(name: str, **options: Any) -> LossAggregation:
    """The mode or preset of this name, with its options."""
    return (
        LossAggregation.preset(name, **options)
        if is_preset(name)
        else LossAggregation(mode=name, **options)
    )


def words_in(text: str) -> list[str]:
    """The words of ``text``, separated by commas or spaces."""
    return text.replace(",", " ").split()


def _takes_one_argument(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        return True
    return True


def _are_levels(levels: Any) -> bool:
    if not isinstance(levels, (list, tuple)) or not levels:
        return False
    if not all(isinstance(unit, str) and unit.isidentifier() for unit in levels):
        return False
    is_repeated = len({*levels}) < len(levels)
    is_misplaced = "sample" in levels[:-1]
    is_reserved = not {"all", "microbatch"}.isdisjoint(levels)
    return not (is_repeated or is_misplaced or is_reserved)


def _weights_by_id(weights: Any) -> dict[int, float]:
    """Weights by id, in order; empty unless ``weights`` have one number >= 0 for each id."""
    if isinstance(weights, str):
        weights = words_in(weights)
    items = weights.items() if isinstance(weights, Mapping) else weights
    try:
        items = [x.split(":") if isinstance(x, str) else x for x in items]
        pairs = [(int(d) if isinstance(d, str) else operator.index(d), float(w)) for d, w in items]
    except (TypeError, ValueError):
        return {}
    by_id = dict(sorted(pairs))
    is_repeated = len(by_id) < len(pairs)
    return {} if is_repeated or any(not 0 <= w < math.inf for w in by_id.values()) else by_id


def _advice_on_mode(name: object) -> str:
    """Advice on an unknown mode."""
    if name in PRESETS:
        return f"It is a preset: write LossAggregation.preset({name!r})."
    words = str(name).lower().replace("-", "_")
    # Systems share a name for different means, and have different names for the same mean.
    system_presets = [x for x in PRESETS if x.partition("/")[2].replace("-", "_") == words]
    if words in MODES and words != name:
        also = (
            f", or the preset of a system: {_with_modes(system_presets)}" if system_presets else ""
        )
        return f"Choose {words}{also} (mode=, or --loss-aggregation)."
    if system_presets:
        return (
            f"Choose the preset of your system, {_with_modes(system_presets)} "
            "(LossAggregation.preset, or --loss-aggregation)."
        )
    return f"Choose one of {', '.join(MODES)} (mode=, or --loss-aggregation)."


def _with_modes(presets: Sequence[str]) -> str:
    """Presets, each with its mode."""
    return ", ".join(f"{name} ({PRESETS[name].mode})" for name in presets)


def _advice_on_preset(name: str) -> str:
    """Advice on an unknown preset."""
    choices = presets_of(name.partition("/")[0].lower()) or [f"{x}/..." for x in SYSTEMS]
    return f"Choose one of {', '.join(choices)} (--loss-aggregation)."
