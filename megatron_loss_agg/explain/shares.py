"""Weights of each sample under each mode, computed by the same plan as a training step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import (
    BY_ID,
    MODES,
    LossAggregation,
    aggregation_named,
    is_preset,
    takes_divisor,
)
from megatron_loss_agg.describe import formula
from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.explain.samples import LISTS, Sample
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.presets import PRESETS

ALL_MODES = tuple(mode for mode in MODES if mode != "custom")


@dataclass(frozen=True)
class Shares:
    """Weights of the samples of a step, under one mode or in one run."""

    tokens: Tensor
    """Loss tokens, fp64 [samples]."""
    per_token: Tensor
    """Weight of a token with mask 1, fp64 [samples]; 0 for samples without tokens."""
    formula: str
    """See `describe.formula`."""

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
        """fp64 [samples]: a token's weight, divided by its weight ``1 / M`` under `token_mean`."""
        return self.per_token * self.tokens.sum()


def shares_by_mode(
    samples: Sequence[Sample],
    modes: Iterable[str],
    divisor: float | None = None,
    empty: str | None = None,
    levels: Sequence[str] | None = None,
    sample_weights: str | None = None,
) -> tuple[dict[str, Shares], dict[str, str]]:
    """The shares under every mode or preset in ``modes`` that the input suffices for.

    Returns:
        the shares by mode, and the reason for each mode that was left out.

    Raises:
        AggregationError: an unknown mode, a bad divisor, or all modes were left out.
    """
    shares: dict[str, Shares] = {}
    left_out: dict[str, str] = {}
    for name in modes:
        if name == "nested_mean" and levels is None:
            left_out[name] = "needs --levels"
        elif divisor is None and _needs_divisor(name):
            left_out[name] = "needs --divisor"
        else:
            agg = _aggregation(name, divisor, empty, levels, sample_weights)
            reason = _missing_input(agg, samples[0])
            if reason is None:
                shares[name] = _shares(agg, samples)
            else:
                left_out[name] = reason
    if not shares:
        reasons = ", ".join(f"{name} {reason}" for name, reason in left_out.items())
        raise OptionError(
            f"at least one mode must have all of its input, got none: {reasons}. Give that input, "
            "or choose other modes (--modes)."
        )
    return shares, left_out


def _needs_divisor(name: str) -> bool:
    if name in PRESETS:
        return PRESETS[name].needs_divisor
    return name in MODES and MODES[name].divisor == "required"


def _aggregation(
    name: str,
    divisor: float | None,
    empty: str | None,
    levels: Sequence[str] | None,
    sample_weights: str | None,
) -> LossAggregation:
    """The mode or preset ``name``, with the divisor and levels if it takes them."""
    options: dict[str, Any] = {"divisor": divisor if takes_divisor(name) else None}
    options["sample_weights"] = sample_weights
    if name == "nested_mean":
        options["levels"] = levels
    # A preset makes its own choice if --empty is absent.
    options["empty"] = empty if is_preset(name) else empty or "count"
    return aggregation_named(name, **options)


def _missing_input(agg: LossAggregation, sample: Sample) -> str | None:
    """The input that the mode needs but the samples lack, in words; None if they have it all."""
    if unknown := sorted({*agg.by_id} - {*BY_ID}):
        return f"needs ids of {unknown}, but explain has only ids of {', '.join(BY_ID)}"
    for option, unit in LISTS.items():
        if unit in agg.units and getattr(sample, unit) is None:
            return f"needs --{option}, or {unit!r} on every line"
    return None


def _shares(agg: LossAggregation, samples: Sequence[Sample]) -> Shares:
    """The shares from one plan over the microbatches of all ranks."""
    by_microbatch: dict[str, list[int]] = {}
    for s, sample in enumerate(samples):
        by_microbatch.setdefault(json.dumps([sample.rank, sample.microbatch]), []).append(s)
    tokens = torch.tensor([sample.tokens for sample in samples], dtype=torch.float64)
    in_order = [[samples[s] for s in members] for members in by_microbatch.values()]
    plan = StepPlan.from_mask_sums(
        agg,
        [tokens[members] for members in by_microbatch.values()],
        prompt_ids=_strings([[sample.prompt for sample in part] for part in in_order]),
        rollout_ids=_strings([[sample.rollout for sample in part] for part in in_order]),
        dataset_ids=_strings([[sample.dataset for sample in part] for part in in_order]),
        sample_weights=_weights([[sample.weight for sample in part] for part in in_order]),
    )
    per_token = torch.zeros_like(tokens)
    for i, members in enumerate(by_microbatch.values()):
        per_token[members] = plan.coefficients(i)
    return Shares(tokens, per_token, formula(agg, None if plan.is_empty else plan.counts))


def _strings(values: Sequence[Sequence[Any]]) -> list[list[str]] | None:
    """Equal strings for equal JSON values; None if they are unknown."""
    if values[0][0] is None:
        return None
    return [[json.dumps(value, sort_keys=True) for value in part] for part in values]


def _weights(values: Sequence[Sequence[float | None]]) -> list[Tensor] | None:
    """fp64 [samples] by microbatch; None if samples have no weights."""
    if values[0][0] is None:
        return None
    return [torch.tensor(part, dtype=torch.float64) for part in values]
