"""What scripts read of the flags."""

from megatron_loss_agg.mcore.launch.flags import (
    VARIABLE,
    add_arguments,
    aggregation_from_environment,
)

__all__ = ["VARIABLE", "add_arguments", "aggregation_from_environment"]
