"""What each sample weighs under each mode, computed by the plan that a training step uses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import MODES, LossAggregation
from megatron_loss_agg.errors import DivisorError, FunctionError, InputError, ModeError
from megatron_loss_agg.explain.samples import Sample
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.presets import PRESETS

ALL_MODES = tuple(mode for mode in MODES if mode != "custom")


@dataclass(frozen=True)
class Shares:
    """What the samples of a step weigh under one mode."""

    aggregation: LossAggregation
    # fp64 [samples]: the weight of one token whose mask is 1; 0 for a sample without tokens.
    per_token: Tensor
    # fp64 [samples]: the sum of a sample's weights.
    sums: Tensor

    @property
    def total(self) -> float:
        """The sum of all weights of the step: what a loss of 1 on every token comes to."""
        return float(self.sums.sum())

    @property
    def fractions(self) -> Tensor:
        """fp64 [samples]: each sample's part of `total`; 0 in a step without tokens."""
        return self.sums / (self.total or 1.0)

    @property
    def depends_on_length_alone(self) -> bool:
        """Whether samples of equal length always weigh the same."""
        return self.aggregation.within in (None, "step", "sample")


def explain(
    samples: Sequence[Sample], modes: Iterable[str], divisor: float | None, empty: str | None
) -> tuple[dict[str, Shares], dict[str, str]]:
    """The shares under every mode (or preset) of ``modes`` for which the input suffices.

    Returns:
        the shares by mode, and for each mode that is left out, why.

    Raises:
        AggregationError: an unknown mode, a bad divisor, or no mode is left.
    """
    shown: dict[str, Shares] = {}
    left_out: dict[str, str] = {}
    for name in modes:
        missing = _missing(name, samples, divisor, empty)
        if missing is not None:
            left_out[name] = missing
        else:
            shown[name] = _shares(_aggregation(name, divisor, empty), samples)
    if not shown:
        reasons = ", ".join(f"{name} {why}" for name, why in left_out.items())
        raise InputError(f"no mode to show: {reasons or 'none was named'}")
    return shown, left_out


def relative_to_token_mean(shares: Shares, samples: Sequence[Sample]) -> Tensor:
    """fp64 [samples]: weight of one token over its weight ``1 / M`` under `token_mean`."""
    return shares.per_token * sum(sample.tokens for sample in samples)


def _missing(
    name: str, samples: Sequence[Sample], divisor: float | None, empty: str | None
) -> str | None:
    """What the input lacks for mode ``name``; None if nothing."""
    try:
        agg = _aggregation(name, divisor, empty)
    except DivisorError:
        if divisor is not None:
            raise
        return "needs --divisor"
    needs = {"prompt": "prompts", "rollout": "rollouts", "microbatch": "microbatches"}
    for unit in (agg.within, agg.across):
        if unit in needs and getattr(samples[0], unit) is None:
            return f"needs --{needs[unit]}, or {unit!r} on every line"
    return None


def _aggregation(name: str, divisor: float | None, empty: str | None) -> LossAggregation:
    if name == "custom":
        raise FunctionError("mode 'custom' has no table: its weights are what your function says")
    options: dict[str, Any] = {} if empty is None else {"empty": empty}
    preset = name in PRESETS
    mode = PRESETS[name].mode if preset else name
    if mode not in MODES:
        raise ModeError(
            f"unknown mode {name!r}; expected one of {', '.join(ALL_MODES)}; "
            f"or of the presets {', '.join(PRESETS)}"
        )
    if MODES[mode].divisor != "refused":
        options["divisor"] = divisor
    return (
        LossAggregation.preset(name, **options) if preset else LossAggregation(mode=name, **options)
    )


def _shares(agg: LossAggregation, samples: Sequence[Sample]) -> Shares:
    """One plan with the microbatches of all ranks, which is the plan that the ranks share.

    A token weighs its mask times a factor of its sample. So a sample may stand as one token that
    has all of the sample's mask.
    """
    places: dict[tuple[int | None, int | None], list[int]] = {}
    for s, sample in enumerate(samples):
        places.setdefault((sample.rank, sample.microbatch), []).append(s)
    tokens = torch.tensor([sample.tokens for sample in samples], dtype=torch.float64)
    prompts = _numbered([sample.prompt for sample in samples])
    rollouts = _numbered([sample.rollout for sample in samples])
    microbatches = [
        Microbatch(
            tokens[members].unsqueeze(1),
            prompt_ids=None if prompts is None else prompts[members],
            rollout_ids=None if rollouts is None else rollouts[members],
        )
        for members in places.values()
    ]
    plan = StepPlan.build(agg, microbatches)
    per_token, sums = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for i, members in enumerate(places.values()):
        per_token[members] = plan.coefficients(i)
        sums[members] = plan.weights(i, torch.float64).squeeze(1)
    return Shares(agg, per_token.masked_fill(tokens == 0, 0), sums)


def _numbered(values: Sequence[Any]) -> Tensor | None:
    """int64 [samples]: equal JSON values get equal numbers; None where there is no value."""
    if any(value is None for value in values):
        return None
    keys = [json.dumps(value, sort_keys=True) for value in values]
    number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([number[key] for key in keys], dtype=torch.int64)
