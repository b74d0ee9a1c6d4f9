"""Presets: the aggregation behind each name that other training systems use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """The `LossAggregation` fields of one preset, and whether it needs a divisor."""

    mode: str
    needs_divisor: bool = False
    empty: str = "count"
    count: str | None = None


PRESETS: dict[str, Preset] = {
    "skyrl/token_mean": Preset("token_mean"),
    "skyrl/token_mean_legacy": Preset("microbatch_mean"),
    "skyrl/sequence_mean": Preset("sample_mean"),
    "skyrl/seq_mean_token_sum_norm": Preset("constant", needs_divisor=True),
    "skyrl/prompt_mean": Preset("prompt_mean"),
    "verl/token-mean": Preset("token_mean"),
    "verl/seq-mean-token-sum": Preset("sample_sum"),
    "verl/seq-mean-token-mean": Preset("sample_mean"),
    "verl/seq-mean-token-sum-norm": Preset("constant", needs_divisor=True),
    "slime/token_mean": Preset("token_mean"),
    "slime/sample_mean": Preset("rollout_mean"),
    "slime/prompt_mean": Preset("prompt_mean", count="sample"),
    "slime/constant": Preset("constant", needs_divisor=True),
    "open-instruct/token": Preset("token_mean"),
    "open-instruct/constant": Preset("sum", needs_divisor=True),
    "nemo-rl/token_level": Preset("token_mean"),
    "nemo-rl/sequence_level": Preset("sample_mean", empty="skip"),
    "trl/grpo": Preset("sample_mean"),
    "trl/bnpo": Preset("microbatch_mean"),
    "trl/dapo": Preset("token_mean"),
    "trl/dr_grpo": Preset("constant", needs_divisor=True),
    "megatron/default": Preset("microbatch_mean"),
    "megatron/per-token": Preset("token_mean"),
}
"""``system/its own name`` -> the aggregation with that system's formula."""
