"""Exact loss aggregation over the whole optimizer step, for Megatron-Core."""

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import AggregationError
from megatron_loss_agg.layout import CPLayout, predicting_mask
from megatron_loss_agg.loss import weighted_sum
from megatron_loss_agg.microbatch import Microbatch
from megatron_loss_agg.plan import StepPlan, token_weights
from megatron_loss_agg.sequences import SequenceMean
from megatron_loss_agg.terms import StepTerms, Term

__all__ = [
    "AggregationError",
    "CPLayout",
    "LossAggregation",
    "Microbatch",
    "SequenceMean",
    "StepPlan",
    "StepTerms",
    "Term",
    "predicting_mask",
    "token_weights",
    "weighted_sum",
]

__version__ = "0.1.0"
