"""Presets: the aggregation behind each name that other training systems use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """The `LossAggregation` fields of one preset, and what it was compared with."""

    mode: str
    # The release or commit, and the function in it.
    compared_with: str
    # Where that system's own result may differ; empty where it does not.
    caveat: str = ""
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

_GENERATION_BATCH = (
    "divides by the tokens of the generation batch times the step's fraction of its microbatches: "
    "the same only where one step uses the whole generation batch"
)

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
    "verl/seq-mean-token-sum-norm": Preset(
        "constant",
        _VERL,
        needs_divisor=True,
        caveat="without loss_scale_factor it divides by the padded width of the microbatch; before "
        "2026 (up to 0.7.0) it did not divide by the number of samples",
    ),
    "slime/token_mean": Preset(
        "token_mean",
        _SLIME,
        caveat="divides by the sum over samples of max(M_s, 1): a sample without tokens counts as "
        "one token",
    ),
    "slime/sample_mean": Preset("rollout_mean", _SLIME),
    "slime/prompt_mean": Preset(
        "prompt_mean",
        _SLIME_MODES,
        caveat="takes the number of prompts to be that of rollouts over n_samples_per_prompt",
    ),
    "slime/constant": Preset("constant", _SLIME_MODES, needs_divisor=True, count="rollout"),
    "open-instruct/token": Preset("token_mean", _OPEN_INSTRUCT),
    "open-instruct/constant": Preset("sum", _OPEN_INSTRUCT, needs_divisor=True),
    # Samples outside of NeMo-RL's sample mask are rejected.
    "nemo-rl/token_level": Preset("token_mean", _NEMO, rejected="skip"),
    "nemo-rl/sequence_level": Preset("sample_mean", _NEMO, rejected="skip"),
    "areal/token_mean": Preset("token_mean", _AREAL),
    "areal/seq_mean": Preset("sample_mean", _AREAL_MODES, empty="skip"),
    "areal/prompt_mean": Preset("prompt_mean", _AREAL_MODES, empty="skip"),
    "areal/constant": Preset("constant", _AREAL_MODES, needs_divisor=True, empty="skip"),
    "trl/grpo": Preset("sample_mean", _TRL),
    "trl/bnpo": Preset("microbatch_mean", _TRL),
    "trl/dapo": Preset("token_mean", _TRL, caveat=_GENERATION_BATCH),
    "trl/dr_grpo": Preset("constant", _TRL, needs_divisor=True),
    "trl/sapo": Preset("sample_mean", _TRL),
    "trl/cispo": Preset("token_mean", _TRL, caveat=_GENERATION_BATCH),
    "trl/vespo": Preset("token_mean", _TRL, caveat=_GENERATION_BATCH),
    "trl/luspo": Preset(
        "sample_sum",
        _TRL,
        caveat="the same only at importance_sampling_level 'sequence', which TRL recommends for it",
    ),
    "megatron/default": Preset("microbatch_mean", _MEGATRON),
    "megatron/per-token": Preset("token_mean", _MEGATRON),
}
"""``system/its own name`` -> the aggregation with that system's formula."""
