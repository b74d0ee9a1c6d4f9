"""Presets: the aggregation behind each name that other training systems use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial


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
    rejected: str | None = None


_skyrl = partial(
    Preset, compared_with="skyrl 0.4.0: apply_loss_reduction_to_advantages_minibatch, in ppo_utils"
)
_verl = partial(Preset, compared_with="verl 0.9.1: agg_loss, in core_algos")
_trl = partial(Preset, compared_with="trl 1.16.0: GRPOTrainer._compute_loss")
_slime = partial(Preset, compared_with="THUDM/slime at 624b824: loss_function")
_slime_modes = partial(
    Preset,
    compared_with="THUDM/slime at 1951fa0 (its unmerged --loss-aggregation): get_pg_loss_reducer",
)
_open_instruct = partial(
    Preset, compared_with="allenai/open-instruct at e6c3044: masked_mean, in rl_utils"
)
# Samples outside its sample mask are rejected.
_nemo = partial(
    Preset,
    compared_with="NVIDIA-NeMo/RL at 7ea279a: ClippedPGLossFn, on process_global_batch",
    rejected="skip",
)
_megatron = partial(Preset, compared_with="megatron-core 0.19.2: forward_step_calc_loss")

_GENERATION_BATCH = (
    "divides by the tokens of the generation batch times the step's fraction of its microbatches: "
    "the same only where one step uses the whole generation batch"
)

PRESETS: dict[str, Preset] = {
    "skyrl/token_mean": _skyrl("token_mean"),
    "skyrl/token_mean_legacy": _skyrl("microbatch_mean"),
    "skyrl/sequence_mean": _skyrl("sample_mean"),
    "skyrl/seq_mean_token_sum_norm": _skyrl("constant", needs_divisor=True),
    "skyrl/prompt_mean": _skyrl("prompt_mean"),
    "verl/token-mean": _verl("token_mean"),
    "verl/token-sum": _verl("sum"),
    "verl/seq-mean-token-sum": _verl("sample_sum"),
    "verl/seq-mean-token-mean": _verl("sample_mean"),
    "verl/seq-mean-token-sum-norm": _verl(
        "constant",
        needs_divisor=True,
        caveat="without loss_scale_factor it divides by the padded width of the microbatch; before "
        "2026 (up to 0.7.0) it did not divide by the number of samples",
    ),
    "slime/token_mean": _slime(
        "token_mean",
        caveat="divides by the sum over samples of max(M_s, 1): a sample without tokens counts as "
        "one token",
    ),
    "slime/sample_mean": _slime("rollout_mean"),
    "slime/prompt_mean": _slime_modes(
        "prompt_mean",
        caveat="takes the number of prompts to be that of rollouts over n_samples_per_prompt",
    ),
    "slime/constant": _slime_modes("constant", needs_divisor=True, count="rollout"),
    "open-instruct/token": _open_instruct("token_mean"),
    "open-instruct/constant": _open_instruct("sum", needs_divisor=True),
    "nemo-rl/token_level": _nemo("token_mean"),
    "nemo-rl/sequence_level": _nemo("sample_mean"),
    "trl/grpo": _trl("sample_mean"),
    "trl/bnpo": _trl("microbatch_mean"),
    "trl/dapo": _trl("token_mean", caveat=_GENERATION_BATCH),
    "trl/dr_grpo": _trl("constant", needs_divisor=True),
    "trl/sapo": _trl("sample_mean"),
    "trl/cispo": _trl("token_mean", caveat=_GENERATION_BATCH),
    "trl/vespo": _trl("token_mean", caveat=_GENERATION_BATCH),
    "trl/luspo": _trl(
        "sample_sum",
        caveat="the same only at importance_sampling_level 'sequence', which TRL recommends for it",
    ),
    "megatron/default": _megatron("microbatch_mean"),
    "megatron/per-token": _megatron("token_mean"),
}
"""``system/its own name`` -> the aggregation with that system's formula."""
