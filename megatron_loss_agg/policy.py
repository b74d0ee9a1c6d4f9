"""The public path of `megatron_loss_agg.losses.policy`."""

from megatron_loss_agg.losses.policy import *  # noqa: F403
from megatron_loss_agg.losses.policy import LOG_RATIO_BOUND as LOG_RATIO_BOUND
from megatron_loss_agg.losses.policy import __all__ as __all__
