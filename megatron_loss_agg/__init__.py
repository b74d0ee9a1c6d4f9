"""Exact loss aggregation over the whole optimizer step, for Megatron-Core."""

from megatron_loss_agg.aggregation import LossAggregation, Term
from megatron_loss_agg.cp_layout import CPLayout
from megatron_loss_agg.errors import AggregationError
from megatron_loss_agg.masks import predicting_mask
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.plan import StepPlan, token_weights
from megatron_loss_agg.sequences import SequenceMean, SequenceSum
from megatron_loss_agg.weighted_sum import weigh, weighted_sum

__all__ = [
    "AggregationError",
    "CPLayout",
    "LossAggregation",
    "Microbatch",
    "SequenceMean",
    "SequenceSum",
    "StepPlan",
    "Term",
    "predicting_mask",
    "token_weights",
    "weigh",
    "weighted_sum",
]

__version__ = "0.4.0"
