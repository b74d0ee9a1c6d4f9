"""Weights of each sample under each mode, computed by the same plan as a training step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import BY_ID, MODES, LossAggregation
from megatron_loss_agg.describe import formula
from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.explain.samples import LISTS, Sample
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.presets import PRESETS

ALL_MODES = tuple(mode for mode in MODES if mode != "custom")


@dataclass(frozen=True)
class Shares:
    """Weights of the samples of a step under one mode."""

    aggregation: LossAggregation
    # fp64 [samples]: loss tokens.
    tokens: Tensor
    # fp64 [samples]: weight of a token with mask 1; 0 for samples without tokens.
    per_token: Tensor
    # See `weights.formula`.
    formula: str

    @property
    def total(self) -> float:
        """The sum of all weights of the step."""
        return float((self.per_token * self.tokens).sum())

    @property
    def fractions(self) -> Tensor:
        """fp64 [samples]: each sample's fraction of `total`; 0 in a step without tokens."""
        return self.per_token * self.tokens / (self.total or 1.0)

    @property
    def relative_to_token_mean(self) -> Tensor:
        """fp64 [samples]: weight of a token, over its weight ``1 / M`` under `token_mean`."""
        return self.per_token * self.tokens.sum()


def explain(
    samples: Sequence[Sample],
    modes: Iterable[str],
    divisor: float | None,
    empty: str | None,
    levels: str | None = None,
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
        if name == "nested_mean" and levels is None:
            left_out[name] = "needs --levels"
            continue
        try:
            agg = _aggregation(name, divisor, empty, levels)
        except OptionError:
            if divisor is not None:
                raise
            left_out[name] = "needs --divisor"
            continue
        if unknown := sorted({*agg.by_id} - {*BY_ID}):
            left_out[name] = f"needs ids of {unknown}, and explain has those of {', '.join(BY_ID)}"
            continue
        units = {flag: u for flag, u in LISTS.items() if u in agg.units}
        missing = {flag: u for flag, u in units.items() if getattr(samples[0], u) is None}
        for flag, unit in missing.items():
            left_out[name] = f"needs --{flag}, or {unit!r} on every line"
        if not missing:
            shown[name] = _shares(agg, samples)
    if not shown:
        reasons = ", ".join(f"{name} {why}" for name, why in left_out.items())
        raise OptionError(f"no mode to show: {reasons}")
    return shown, left_out


def _aggregation(
    name: str, divisor: float | None, empty: str | None, levels: str | None
) -> LossAggregation:
    """The mode or preset ``name``, with the divisor and the levels if it takes them."""
    if "/" in name:
        takes = name in PRESETS and PRESETS[name].needs_divisor
        return LossAggregation.preset(name, divisor=divisor if takes else None, empty=empty)
    takes = name in MODES and MODES[name].divisor != "refused"
    return LossAggregation(
        mode=name,
        divisor=divisor if takes else None,
        levels=levels if name == "nested_mean" else None,
        empty=empty or "count",
    )


def _shares(agg: LossAggregation, samples: Sequence[Sample]) -> Shares:
    """From one plan over the microbatches of all ranks."""
    places: dict[str, list[int]] = {}
    for s, sample in enumerate(samples):
        places.setdefault(json.dumps([sample.rank, sample.microbatch]), []).append(s)
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
    return Shares(agg, tokens, per_token, formula(agg, plan.counts.tokens, plan.counts.across))


def _strings(values: Sequence[Any]) -> list[str] | None:
    """Equal strings for equal JSON values; None if they were not given."""
    if values[0] is None:
        return None
    return [json.dumps(value, sort_keys=True) for value in values]
