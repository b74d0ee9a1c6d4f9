"""Presets: the aggregation behind each name that other training systems use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """The `LossAggregation` fields of one preset, and the function that it was compared with.

    docs/modes.md lists where that system's own result may differ.
    """

    mode: str
    # The release or commit, and the function in it.
    compared_with: str
    needs_divisor: bool = False
    count: str | None = None
    empty: str = "count"
    rejected: str | None = None


_SKYRL = "skyrl 0.4.0: apply_loss_reduction_to_advantages_minibatch, in ppo_utils"
_VERL = "verl 0.9.1: agg_loss, in core_algos"
_TRL = "trl 1.16.0: GRPOTrainer._compute_loss"
_SLIME = "THUDM/slime at 624b824: loss_function"
_SLIME_MODES = "THUDM/slime at 1951fa0 (its unmerged --loss-aggregation): get_pg_loss_reducer"
_OPEN_INSTRUCT = "allenai/open-instruct at e6c3044: masked_mean, in rl_utils"
_NEMO = "NVIDIA-NeMo/RL at 7ea279a: ClippedPGLossFn, on process_global_batch"
_AREAL = "areal-project/AReaL at cbff54d: MegatronEngine.train_batch, on ppo_actor_loss_fn"
_AREAL_MODES = "areal-project/AReaL at 5f61b97 (its unmerged request 1546): PolicyGradientReduction"
_MEGATRON = "megatron-core 0.19.2: forward_step_calc_loss"
_BRIDGE = "megatron-bridge 0.6.2: create_masked_next_token_loss_function"
_MILES = "radixark/miles at 31f1ca9: loss_function"
_MILES_REDUCER = "radixark/miles at 31f1ca9: loss_function, with examples/experimental/DrGRPO"
_ROLL = "alibaba/ROLL at 8eb27cc: agg_loss, in functionals"
_TUNIX = "google/tunix at c7d8950: aggregate_loss"
_PRIME_RL = "PrimeIntellect-ai/prime-rl at 559b447: compute_loss"
_SWIFT = "ms-swift 4.6.0: MegatronGRPOTrainer.loss_func"
_TRINITY = "trinity-rft 0.6.0: PPOPolicyLossFn, as its verl_legacy trainer scales it"

PRESETS: dict[str, Preset] = {
    "skyrl/token_mean": Preset("token_mean", _SKYRL),
    "skyrl/token_mean_legacy": Preset("microbatch_mean", _SKYRL),
    "skyrl/sequence_mean": Preset("sample_mean", _SKYRL),
    "skyrl/seq_mean_token_sum_norm": Preset("constant", _SKYRL, needs_divisor=True),
    "skyrl/prompt_mean": Preset("prompt_mean", _SKYRL),
    "verl/token-mean": Preset("token_mean", _VERL),
    "verl/token-sum": Preset("sum", _VERL),
    "verl/seq-mean-token-sum": Preset("sample_sum", _VERL),
    "verl/seq-mean-token-mean": Preset("sample_mean", _VERL),
    "verl/seq-mean-token-sum-norm": Preset("constant", _VERL, needs_divisor=True),
    "slime/token_mean": Preset("token_mean", _SLIME),
    "slime/sample_mean": Preset("rollout_mean", _SLIME),
    "slime/prompt_mean": Preset("prompt_mean", _SLIME_MODES),
    "slime/constant": Preset("constant", _SLIME_MODES, needs_divisor=True, count="rollout"),
    "miles/token_mean": Preset("token_mean", _MILES),
    "miles/sample_mean": Preset("rollout_mean", _MILES),
    "miles/constant": Preset("constant", _MILES_REDUCER, needs_divisor=True, count="rollout"),
    "open-instruct/token": Preset("token_mean", _OPEN_INSTRUCT),
    "open-instruct/constant": Preset("sum", _OPEN_INSTRUCT, needs_divisor=True),
    # Samples outside of NeMo-RL's sample mask are rejected.
    "nemo-rl/token_level": Preset("token_mean", _NEMO, rejected="skip"),
    "nemo-rl/sequence_level": Preset("sample_mean", _NEMO, rejected="skip"),
    "areal/token_mean": Preset("token_mean", _AREAL),
    "areal/seq_mean": Preset("sample_mean", _AREAL_MODES, empty="skip"),
    "areal/prompt_mean": Preset("prompt_mean", _AREAL_MODES, empty="skip"),
    "areal/constant": Preset("constant", _AREAL_MODES, needs_divisor=True, empty="skip"),
    "roll/token-mean": Preset("token_mean", _ROLL),
    "roll/seq-mean-token-sum": Preset("sample_sum", _ROLL, empty="skip"),
    "roll/seq-mean-token-mean": Preset("sample_mean", _ROLL, empty="skip"),
    "roll/seq-mean-token-sum-norm": Preset("sum", _ROLL, needs_divisor=True),
    "tunix/token-mean": Preset("token_mean", _TUNIX),
    "tunix/sequence-mean-token-mean": Preset("sample_mean", _TUNIX, empty="skip"),
    "tunix/sequence-mean-token-scale": Preset("constant", _TUNIX, needs_divisor=True, empty="skip"),
    "tunix/seq-mean-token-sum": Preset("sample_sum", _TUNIX, empty="skip"),
    "tunix/sequence-mean-token-sum-norm": Preset("sample_sum", _TUNIX),
    "prime-rl/default": Preset("token_mean", _PRIME_RL),
    "trinity/token-mean": Preset("microbatch_mean", _TRINITY),
    "trinity/seq-mean-token-sum": Preset("sample_sum", _TRINITY),
    "trinity/seq-mean-token-mean": Preset("sample_mean", _TRINITY),
    "ms-swift/grpo": Preset("sample_mean", _SWIFT),
    "ms-swift/sapo": Preset("sample_mean", _SWIFT),
    "ms-swift/bnpo": Preset("token_mean", _SWIFT),
    "ms-swift/dapo": Preset("token_mean", _SWIFT),
    "ms-swift/cispo": Preset("token_mean", _SWIFT),
    "ms-swift/fipo": Preset("token_mean", _SWIFT),
    "ms-swift/dr_grpo": Preset("constant", _SWIFT, needs_divisor=True),
    "trl/grpo": Preset("sample_mean", _TRL),
    "trl/bnpo": Preset("microbatch_mean", _TRL),
    "trl/dapo": Preset("token_mean", _TRL),
    "trl/dr_grpo": Preset("constant", _TRL, needs_divisor=True),
    "trl/sapo": Preset("sample_mean", _TRL),
    "trl/cispo": Preset("token_mean", _TRL),
    "trl/vespo": Preset("token_mean", _TRL),
    "trl/luspo": Preset("sample_sum", _TRL),
    "megatron/default": Preset("microbatch_mean", _MEGATRON),
    "megatron/per-token": Preset("token_mean", _MEGATRON),
    "megatron-bridge/default": Preset("microbatch_mean", _BRIDGE),
    "megatron-bridge/per-token": Preset("token_mean", _BRIDGE),
}
"""``system/its own name`` -> the aggregation with that system's formula."""

SYSTEMS = tuple(dict.fromkeys(name.partition("/")[0] for name in PRESETS))
"""The part before the slash."""


def presets_of(system: str) -> list[str]:
    """The names of the presets of ``system``; empty if it has none."""
    return [name for name in PRESETS if name.startswith(f"{system}/")]
