"""The plugin for Megatron-Core: `LossHook` around its schedule."""

from megatron_loss_agg.mcore.batches import read_batch
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.hook import LossHook
from megatron_loss_agg.mcore.parts.datasets import DatasetReports
from megatron_loss_agg.mcore.parts.modes import WeightReports
from megatron_loss_agg.mcore.parts.mtp import MTPAggregation
from megatron_loss_agg.mcore.parts.packing import with_ids
from megatron_loss_agg.mcore.prefetch import Prefetch
from megatron_loss_agg.mcore.reports import MicrobatchLoss
from megatron_loss_agg.mcore.token_loss import MaskedLosses, SampleLoss, TokenLoss

__all__ = [
    "Call",
    "DatasetReports",
    "Extension",
    "LossHook",
    "MTPAggregation",
    "MaskedLosses",
    "MicrobatchLoss",
    "Prefetch",
    "SampleLoss",
    "TokenLoss",
    "WeightReports",
    "read_batch",
    "with_ids",
]
