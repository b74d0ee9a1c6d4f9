"""ms-swift: a plugin file that hooks Megatron's schedule and passes ms-swift's losses to the hook.

Relies on ``--external_plugins``, the path of a file that ms-swift runs before the trainer in every
process that trains. ms-swift's SFT computes the mean over all tokens of the step; its DPO, the mean
over micro-batches of the mean over their pairs. The hook makes both

    sum over tokens (or pairs) of c_s * loss

ms-swift puts a plugin's folder first on Python's path, so this plugin has its own folder: in the
folder of the other adapters, ``import skyrl`` would find our adapter instead of SkyRL.
"""

from __future__ import annotations

from operator import attrgetter

from megatron_loss_agg.frameworks import required_release

with required_release("ms-swift", "swift", "4.6.0 with mcore-bridge"):
    from swift.megatron.arguments import MegatronArguments
    from swift.megatron.trainers import BaseMegatronTrainer, base

    # Replaced and read in `plugin`.
    attrgetter("prepare_model", "_log_callback", "forward_step")(BaseMegatronTrainer)
    attrgetter("reduce_max_stat_across_model_parallel_group")(base)
    attrgetter("cp_partition_mode", "enable_dft_loss", "rlhf_type", "rpo_alpha", "task_type")(
        MegatronArguments
    )

SETTINGS = """\
export MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation sample_mean"
PLUGIN=$(python -c "import megatron_loss_agg.frameworks as m; print(*m.__path__)")/ms_swift/plugin.py
megatron sft ... --external_plugins "$PLUGIN"
"""
"""The lines for a user to set."""
