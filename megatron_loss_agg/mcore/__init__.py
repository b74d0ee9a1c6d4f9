"""The Megatron adapter: the only code that depends on Megatron."""

from megatron_loss_agg.mcore.hook import LossHook
from megatron_loss_agg.mcore.host_loss import TokenLoss
from megatron_loss_agg.mcore.late_batches import LateMicrobatch
from megatron_loss_agg.mcore.prefetch import Prefetch

__all__ = ["LateMicrobatch", "LossHook", "Prefetch", "TokenLoss"]
