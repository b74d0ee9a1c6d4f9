"""ms-swift: a plugin file that hooks Megatron's schedule, and hands ms-swift's losses to the hook.

Stands on ``--external_plugins``, which takes the path of a file alone. ms-swift runs it in every
process that trains, before the trainer. Its SFT has the mean over all tokens of the step, and its
DPO the mean over micro-batches of the mean over their pairs. The hook makes both

    sum over tokens (or pairs) of c_s * loss

ms-swift puts the folder of a plugin first on Python's path. So this one has a folder of its own:
from that of the other adapters, ``import skyrl`` would find an adapter in place of SkyRL.
"""

from __future__ import annotations

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.frameworks import check_names

try:
    from swift.megatron.trainers import BaseMegatronTrainer, base
except ImportError as error:
    raise HostError(
        f"ms-swift 4.6.0 and mcore-bridge must be installed, got: {error}. Install them."
    ) from error

check_names(
    "ms-swift",
    "4.6.0 has",
    [
        (BaseMegatronTrainer, "prepare_model"),
        (BaseMegatronTrainer, "_log_callback"),
        (base, "reduce_max_stat_across_model_parallel_group"),
    ],
)

SETTINGS = """\
export MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation sample_mean"
PLUGIN=$(python -c "import megatron_loss_agg.frameworks as m; print(*m.__path__)")/ms_swift/plugin.py
megatron sft ... --external_plugins "$PLUGIN"
"""
"""The lines that a user sets."""
