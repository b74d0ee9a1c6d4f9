"""The plugin for Megatron-Core: `LossHook` around its schedule."""

from megatron_loss_agg.mcore.batches import read_batch
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.forward_step import SampleLoss, TokenLoss
from megatron_loss_agg.mcore.hook import LossHook
from megatron_loss_agg.mcore.parts.datasets import DatasetReports
from megatron_loss_agg.mcore.parts.distillation import distillation_terms, distilled
from megatron_loss_agg.mcore.parts.mtp import MTPLosses, aggregate_mtp
from megatron_loss_agg.mcore.parts.packing import with_ids
from megatron_loss_agg.mcore.parts.routers import aggregate_routers
from megatron_loss_agg.mcore.parts.weighing import WeightReports
from megatron_loss_agg.mcore.prefetch import Prefetch
from megatron_loss_agg.mcore.reports import MicrobatchLoss

__all__ = [
    "Call",
    "DatasetReports",
    "Extension",
    "LossHook",
    "MTPLosses",
    "MicrobatchLoss",
    "Prefetch",
    "SampleLoss",
    "TokenLoss",
    "WeightReports",
    "aggregate_mtp",
    "aggregate_routers",
    "distillation_terms",
    "distilled",
    "read_batch",
    "with_ids",
]
