"""The adapter: everything that knows Megatron."""

from megatron_loss_agg.mcore.hook import LossHook
from megatron_loss_agg.mcore.lossfunc import TokenLoss

__all__ = ["LossHook", "TokenLoss"]
