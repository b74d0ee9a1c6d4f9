"""Which mean a loss is: the modes, what each divides by, and their names in other systems.

Every mode gives token ``t`` of sample ``s`` with loss mask ``m`` the weight

    w_t = m_t / (D * M_within(s) * N_across)

``M_within`` is the mask sum of the group that ``s`` belongs to, ``N_across`` the number of groups
in the whole optimizer step, ``D`` the divisor. A mode is one row: which group is which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

from megatron_loss_agg.errors import DivisorError, FunctionError, ModeError

Unit = Literal["step", "microbatch", "sample", "rollout", "prompt"]
"""A way to group the tokens of an optimizer step."""


class Mode(NamedTuple):
    """One row of the table of modes."""

    within: Unit | None  # divide by the mask sum of this group; None: by 1
    across: Unit | None  # divide by the number of these groups; None: by 1
    divisor: Literal["refused", "optional", "required"] = "refused"


MODES: dict[str, Mode] = {
    "token_mean": Mode("step", None),
    "sample_mean": Mode("sample", "sample"),
    "rollout_mean": Mode("rollout", "rollout"),
    "prompt_mean": Mode("prompt", "prompt"),
    "sample_sum": Mode(None, "sample"),
    "constant": Mode(None, "sample", "required"),
    "sum": Mode(None, None, "optional"),
    "microbatch_mean": Mode("microbatch", "microbatch"),
    "custom": Mode(None, None),
}

_CHOICES = ("count", "skip")
_COUNTABLE = ("sample", "rollout", "prompt")
_LEAST_DIVISOR = 1e-37
"""One over this, and one over its inverse, are normal numbers in fp32, in which weights are."""

PRESETS: dict[str, dict[str, Any]] = {
    "skyrl/token_mean": {"mode": "token_mean"},
    "skyrl/token_mean_legacy": {"mode": "microbatch_mean"},
    "skyrl/sequence_mean": {"mode": "sample_mean"},
    "skyrl/seq_mean_token_sum_norm": {"mode": "constant"},
    "skyrl/prompt_mean": {"mode": "prompt_mean"},
    "verl/token-mean": {"mode": "token_mean"},
    "verl/seq-mean-token-sum": {"mode": "sample_sum"},
    "verl/seq-mean-token-mean": {"mode": "sample_mean"},
    "verl/seq-mean-token-sum-norm": {"mode": "constant"},
    "slime/token_mean": {"mode": "token_mean"},
    "slime/sample_mean": {"mode": "rollout_mean"},
    "slime/prompt_mean": {"mode": "prompt_mean", "count": "sample"},
    "slime/constant": {"mode": "constant"},
    "open-instruct/token": {"mode": "token_mean"},
    "open-instruct/constant": {"mode": "sum"},
    "nemo-rl/token_level": {"mode": "token_mean"},
    "nemo-rl/sequence_level": {"mode": "sample_mean", "empty": "skip"},
    "trl/grpo": {"mode": "sample_mean"},
    "trl/bnpo": {"mode": "microbatch_mean"},
    "trl/dapo": {"mode": "token_mean"},
    "trl/dr_grpo": {"mode": "constant"},
    "megatron/default": {"mode": "microbatch_mean"},
    "megatron/per-token": {"mode": "token_mean"},
}
"""``system/its own name`` -> fields of the `LossAggregation` with that system's formula."""

_PRESETS_NEEDING_DIVISOR = ("open-instruct/constant",)


@dataclass(frozen=True)
class LossAggregation:
    """How the token losses of one whole optimizer step become one number.

    ``L = sum_t w_t * loss_t`` over every microbatch and every data-parallel rank of the step, with
    ``w_t = m_t / (divisor * M_within * N_across)``; see `MODES`. A group without active tokens
    contributes 0.

    Raises:
        ModeError: an unknown ``mode``, ``empty`` or ``rejected``, or a ``count`` that the mode does
            not take.
        DivisorError: ``divisor`` missing, not taken by the mode, not finite and positive, or one
            whose inverse fp32 has not.
        FunctionError: ``function`` missing for ``custom``, or given for another mode.
    """

    _: KW_ONLY
    mode: str
    # The D of `constant` and `sum`, in tokens.
    divisor: float | None = None
    # Whether a group without active tokens counts in N_across.
    empty: str = "count"
    # The unit of N_across, where it differs from the mode's own.
    count: str | None = None
    # Whether rejected samples, which weigh nothing, count in M_within and N_across: `count` or
    # `skip`. A choice to be made where there are any.
    rejected: str | None = None
    # `custom` only: (plan, i) -> the weights of microbatch i, shaped like its mask.
    function: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise ModeError(f"unknown mode {self.mode!r}; expected one of {', '.join(MODES)}")
        for name, choices in (("empty", _CHOICES), ("rejected", (*_CHOICES, None))):
            if getattr(self, name) not in choices:
                raise ModeError(f"{name}={getattr(self, name)!r}; expected 'count' or 'skip'")
        self._check_count()
        self._check_divisor()
        self._check_function()

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        divisor: float | None = None,
        empty: str | None = None,
        rejected: str | None = None,
    ) -> LossAggregation:
        """The aggregation that another system calls ``name``, such as ``verl/token-mean``.

        ``empty`` replaces the preset's own choice where given.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ModeError(f"unknown preset {name!r}; expected one of {', '.join(PRESETS)}")
        fields = PRESETS[name] if empty is None else {**PRESETS[name], "empty": empty}
        required = MODES[fields["mode"]].divisor == "required" or name in _PRESETS_NEEDING_DIVISOR
        if required and divisor is None:
            raise DivisorError(f"preset {name!r} needs a divisor and got none; give one > 0")
        return cls(**fields, divisor=divisor, rejected=rejected)

    @property
    def within(self) -> Unit | None:
        """The group whose mask sum divides a token's weight."""
        return MODES[self.mode].within

    @property
    def across(self) -> Unit | None:
        """The group whose number divides a token's weight."""
        return self.count or MODES[self.mode].across  # type: ignore[return-value]

    @property
    def scale(self) -> float:
        """``1 / D``."""
        return 1.0 if self.divisor is None else 1.0 / float(self.divisor)

    def _check_count(self) -> None:
        if self.count is None:
            return
        takes = MODES[self.mode].across in _COUNTABLE and MODES[self.mode].within in _COUNTABLE
        if not takes:
            raise ModeError(f"count={self.count!r} with mode {self.mode!r}, which takes no count")
        if self.count not in _COUNTABLE:
            raise ModeError(f"count={self.count!r}; expected one of {', '.join(_COUNTABLE)}")

    def _check_divisor(self) -> None:
        rule = MODES[self.mode].divisor
        if self.divisor is None:
            if rule == "required":
                raise DivisorError(f"mode {self.mode!r} needs a divisor and got none; give one > 0")
            return
        if rule == "refused":
            raise DivisorError(
                f"divisor={self.divisor!r} with mode {self.mode!r}, which takes none; "
                "drop it, or choose mode 'constant' or 'sum'"
            )
        divisor: Any = self.divisor  # of whatever type a caller gives
        usable = isinstance(divisor, Real) and not isinstance(divisor, bool)
        try:
            usable = usable and _LEAST_DIVISOR <= float(divisor) <= 1 / _LEAST_DIVISOR
        except OverflowError:
            usable = False
        if not usable:
            raise DivisorError(
                f"divisor={self.divisor!r}; expected a finite number > 0, from "
                f"{_LEAST_DIVISOR:g} to {1 / _LEAST_DIVISOR:g}: weights are fp32"
            )

    def _check_function(self) -> None:
        if self.mode == "custom" and not callable(self.function):
            raise FunctionError(
                f"mode 'custom' needs a callable function and got {self.function!r}"
            )
        if self.mode != "custom" and self.function is not None:
            raise FunctionError(f"function given with mode {self.mode!r}; only 'custom' takes one")
