"""Weights of each sample under each mode, computed by the same plan as a training step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, MODES, LossAggregation
from megatron_loss_agg.errors import DivisorError, FunctionError, InputError, ModeError
from megatron_loss_agg.explain.samples import Sample
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.presets import PRESETS

ALL_MODES = tuple(mode for mode in MODES if mode != "custom")


@dataclass(frozen=True)
class Shares:
    """Weights of the samples of a step under one mode."""

    aggregation: LossAggregation
    # fp64 [samples]: weight of a token with mask 1; 0 for samples without tokens.
    per_token: Tensor
    # fp64 [samples]: sum of the weights of each sample.
    sums: Tensor

    @property
    def total(self) -> float:
        """The sum of all weights of the step."""
        return float(self.sums.sum())

    @property
    def fractions(self) -> Tensor:
        """fp64 [samples]: each sample's fraction of `total`; 0 in a step without tokens."""
        return self.sums / (self.total or 1.0)

    @property
    def depends_on_length_alone(self) -> bool:
        """Whether samples of equal length always have the same weight."""
        return self.aggregation.within in (None, "step", "sample")


def explain(
    samples: Sequence[Sample], modes: Iterable[str], divisor: float | None, empty: str
) -> tuple[dict[str, Shares], dict[str, str]]:
    """The shares under every mode or preset in ``modes`` for which the input suffices.

    Returns:
        the shares by mode, and for each mode left out, the reason.

    Raises:
        AggregationError: an unknown mode, a bad divisor, or all modes were left out.
    """
    shown: dict[str, Shares] = {}
    left_out: dict[str, str] = {}
    for name in modes:
        try:
            agg = _aggregation(name, divisor, empty)
        except DivisorError:
            if divisor is not None:
                raise
            left_out[name] = "needs --divisor"
            continue
        missing = _missing_unit(agg, samples[0])
        if missing is None:
            shown[name] = _shares(agg, samples)
        else:
            flag = "--microbatches" if missing == "microbatch" else f"--{missing}s"
            left_out[name] = f"needs {flag}, or {missing!r} on every line"
    if not shown:
        reasons = ", ".join(f"{name} {why}" for name, why in left_out.items())
        raise InputError(f"no mode to show: {reasons or 'none was named'}")
    return shown, left_out


def relative_to_token_mean(shares: Shares, samples: Sequence[Sample]) -> Tensor:
    """fp64 [samples]: weight of one token, relative to its weight ``1 / M`` under `token_mean`."""
    return shares.per_token * sum(sample.tokens for sample in samples)


def _missing_unit(agg: LossAggregation, sample: Sample) -> str | None:
    for unit in (agg.within, agg.across):
        if unit in (*BY_ID, "microbatch") and getattr(sample, unit) is None:
            return unit
    return None


def _aggregation(name: str, divisor: float | None, empty: str) -> LossAggregation:
    if name == "custom":
        raise FunctionError(
            "mode 'custom' has no table, since its weights are what your function says; expected "
            "another mode"
        )
    mode = PRESETS[name].mode if name in PRESETS else name
    if mode not in MODES:
        raise ModeError(
            f"unknown mode {name!r}; expected one of {', '.join(ALL_MODES)}; "
            f"or of the presets {', '.join(PRESETS)}"
        )
    if MODES[mode].divisor == "refused":
        divisor = None
    if name in PRESETS:
        divisor = divisor if PRESETS[name].needs_divisor else None
        return LossAggregation.preset(name, divisor=divisor, empty=empty)
    return LossAggregation(mode=name, divisor=divisor, empty=empty)


def _shares(agg: LossAggregation, samples: Sequence[Sample]) -> Shares:
    """From one plan over the microbatches of all ranks."""
    places: dict[tuple[int | None, int | None], list[int]] = {}
    for s, sample in enumerate(samples):
        places.setdefault((sample.rank, sample.microbatch), []).append(s)
    tokens = torch.tensor([sample.tokens for sample in samples], dtype=torch.float64)
    ordered = [samples[s] for members in places.values() for s in members]
    plan = StepPlan.from_mask_sums(
        agg,
        [tokens[members] for members in places.values()],
        prompt_ids=_strings([sample.prompt for sample in ordered]),
        rollout_ids=_strings([sample.rollout for sample in ordered]),
        dataset_ids=_strings([sample.dataset for sample in ordered]),
    )
    per_token = torch.zeros_like(tokens)
    for i, members in enumerate(places.values()):
        per_token[members] = plan.coefficients(i)
    return Shares(agg, per_token, per_token * tokens)


def _strings(values: Sequence[Any]) -> list[str] | None:
    """Equal strings for equal JSON values; None if a value is missing."""
    if any(value is None for value in values):
        return None
    return [json.dumps(value, sort_keys=True) for value in values]
