"""Presets: the aggregation behind each name that other training systems use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """The `LossAggregation` fields of one preset.

    tests/peers names the function that each was compared with; docs/modes.md says where that
    system's own result may differ.
    """

    mode: str
    needs_divisor: bool = False
    count: str | None = None
    empty: str = "count"
    rejected: str | None = None


PRESETS: dict[str, Preset] = {
    "skyrl/token_mean": Preset("token_mean"),
    "skyrl/token_mean_legacy": Preset("microbatch_mean"),
    "skyrl/sequence_mean": Preset("sample_mean"),
    "skyrl/seq_mean_token_sum_norm": Preset("constant", needs_divisor=True),
    "skyrl/prompt_mean": Preset("prompt_mean"),
    "verl/token-mean": Preset("token_mean"),
    "verl/token-sum": Preset("sum"),
    "verl/seq-mean-token-sum": Preset("sample_sum"),
    "verl/seq-mean-token-mean": Preset("sample_mean"),
    "verl/seq-mean-token-sum-norm": Preset("constant", needs_divisor=True),
    "slime/token_mean": Preset("token_mean"),
    "slime/sample_mean": Preset("rollout_mean"),
    "slime/prompt_mean": Preset("prompt_mean"),
    "slime/constant": Preset("constant", needs_divisor=True, count="rollout"),
    "miles/token_mean": Preset("token_mean"),
    "miles/sample_mean": Preset("rollout_mean"),
    "miles/constant": Preset("constant", needs_divisor=True, count="rollout"),
    "open-instruct/token": Preset("token_mean"),
    "open-instruct/constant": Preset("sum", needs_divisor=True),
    # Samples outside NeMo-RL's sample mask are rejected.
    "nemo-rl/token_level": Preset("token_mean", rejected="skip"),
    "nemo-rl/sequence_level": Preset("sample_mean", rejected="skip"),
    "areal/token_mean": Preset("token_mean"),
    "areal/seq_mean": Preset("sample_mean", empty="skip"),
    "areal/prompt_mean": Preset("prompt_mean", empty="skip"),
    "areal/constant": Preset("constant", needs_divisor=True, empty="skip"),
    "roll/token-mean": Preset("token_mean"),
    "roll/seq-mean-token-sum": Preset("sample_sum", empty="skip"),
    "roll/seq-mean-token-mean": Preset("sample_mean", empty="skip"),
    "roll/seq-mean-token-sum-norm": Preset("sum", needs_divisor=True),
    "tunix/token-mean": Preset("token_mean"),
    "tunix/sequence-mean-token-mean": Preset("sample_mean", empty="skip"),
    "tunix/sequence-mean-token-scale": Preset("constant", needs_divisor=True, empty="skip"),
    "tunix/seq-mean-token-sum": Preset("sample_sum", empty="skip"),
    "tunix/sequence-mean-token-sum-norm": Preset("sample_sum"),
    "prime-rl/default": Preset("token_mean"),
    "trinity/token-mean": Preset("microbatch_mean"),
    "trinity/seq-mean-token-sum": Preset("sample_sum"),
    "trinity/seq-mean-token-mean": Preset("sample_mean"),
    "ms-swift/grpo": Preset("sample_mean"),
    "ms-swift/sapo": Preset("sample_mean"),
    "ms-swift/bnpo": Preset("token_mean"),
    "ms-swift/dapo": Preset("token_mean"),
    "ms-swift/cispo": Preset("token_mean"),
    "ms-swift/fipo": Preset("token_mean"),
    "ms-swift/dr_grpo": Preset("constant", needs_divisor=True),
    "trl/grpo": Preset("sample_mean"),
    "trl/bnpo": Preset("microbatch_mean"),
    "trl/dapo": Preset("token_mean"),
    "trl/dr_grpo": Preset("constant", needs_divisor=True),
    "trl/sapo": Preset("sample_mean"),
    "trl/cispo": Preset("token_mean"),
    "trl/vespo": Preset("token_mean"),
    "trl/luspo": Preset("sample_sum"),
    "megatron/default": Preset("microbatch_mean"),
    "megatron/per-token": Preset("token_mean"),
    "megatron-bridge/default": Preset("microbatch_mean"),
    "megatron-bridge/per-token": Preset("token_mean"),
}
"""Maps ``system/its own name`` to the aggregation with that system's formula."""

SYSTEMS = tuple(dict.fromkeys(name.partition("/")[0] for name in PRESETS))
"""The part before the slash."""


def presets_of(system: str) -> list[str]:
    """The names of the presets of ``system``; empty if it has none."""
    return [name for name in PRESETS if name.startswith(f"{system}/")]
