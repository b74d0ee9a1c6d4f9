"""The plugin for Megatron-Core: `LossHook` around its schedule."""

from megatron_loss_agg.mcore.batches import read_batch
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.forward_step import SampleLoss, TokenLoss
from megatron_loss_agg.mcore.hook import LossHook
from megatron_loss_agg.mcore.prefetch import Prefetch
from megatron_loss_agg.mcore.reports import MicrobatchLoss

__all__ = [
    "Call",
    "Extension",
    "LossHook",
    "MicrobatchLoss",
    "Prefetch",
    "SampleLoss",
    "TokenLoss",
    "read_batch",
]
