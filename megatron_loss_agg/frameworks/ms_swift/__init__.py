"""ms-swift: a plugin file that hooks Megatron's schedule, and hands ms-swift's losses to the hook.

Stands on ``--external_plugins``, the path of a file. ms-swift runs it in every process that trains,
before the trainer. Its SFT has the mean over all tokens of the step, and its
DPO the mean over micro-batches of the mean over their pairs. The hook makes both

    sum over tokens (or pairs) of c_s * loss

ms-swift puts the folder of a plugin first on Python's path. So this one has a folder of its own: in
the folder of the other adapters, ``import skyrl`` would find our adapter in place of SkyRL.
"""

from __future__ import annotations

from operator import attrgetter

from megatron_loss_agg.frameworks import required_release

with required_release("ms-swift", "swift", "4.6.0 with mcore-bridge"):
    from swift.megatron.arguments import MegatronArguments
    from swift.megatron.trainers import BaseMegatronTrainer, base

    # Replaced in `plugin`, and read there.
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
"""The lines that a user sets."""
