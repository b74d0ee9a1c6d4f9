"""The plugin for Megatron-Core: `LossHook` around its schedule."""

from __future__ import annotations

from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.extensions import with_checks
from megatron_loss_agg.mcore.extensions.agreement import Agreement
from megatron_loss_agg.mcore.extensions.audit import Audit
from megatron_loss_agg.mcore.extensions.datasets import DatasetReports
from megatron_loss_agg.mcore.extensions.distillation import Distillation
from megatron_loss_agg.mcore.extensions.mtp import MTPLosses, MultiTokenPrediction
from megatron_loss_agg.mcore.extensions.routers import RouterLosses
from megatron_loss_agg.mcore.hook import Hook
from megatron_loss_agg.mcore.host import Loop
from megatron_loss_agg.mcore.reading.keys import read_batch
from megatron_loss_agg.mcore.reading.late import LateMicrobatch, read_samples
from megatron_loss_agg.mcore.reading.prefetch import Prefetch
from megatron_loss_agg.mcore.token_loss import TokenLoss

__all__ = [
    "Agreement",
    "Audit",
    "DatasetReports",
    "Distillation",
    "Extension",
    "LateMicrobatch",
    "Loop",
    "LossHook",
    "MTPLosses",
    "MultiTokenPrediction",
    "Prefetch",
    "RouterLosses",
    "TokenLoss",
    "read_batch",
    "read_samples",
]


class LossHook(Hook):
    """Makes Megatron's schedule compute an exact loss, whatever averaging the host does itself.

    In a custom loop:

        hook = LossHook(LossAggregation(mode="prompt_mean"))
        forward_backward = hook.wrap(get_forward_backward_func())

    Every call of ``forward_backward`` is one optimizer step, or one evaluation; for a step of
    several calls see `step`. The forward step returns what Megatron's own does, per-token losses
    and ``partial(loss_func, loss_mask)``, or a `TokenLoss` as the loss function. Reports keep ``lm
    loss`` as the mean over tokens, and get the aggregated loss of the step, named ``"<mode> loss"``
    or by the preset; both are (sum, count) pairs.

    A loss of several terms, each with a denominator of its own:

        hook = LossHook({"policy": LossAggregation(mode="prompt_mean"),
                         "kl": Term(LossAggregation(mode="token_mean"), coefficient=0.01)})

    Its forward step returns a `TokenLoss` with losses by name. Reports get ``"<name> loss"`` for
    each, without its coefficient, and ``"loss"`` (see ``total``), the weighted sum that is
    differentiated.

    Args:
        aggregation: what to compute; or several terms, by name, of which the first has the host's
            token count and ``lm loss``.
        read_batch: batch of the data iterator -> `Microbatch` with the whole mask; or a mapping by
            term, where their masks differ. The hook draws the step's batches before its first
            forward pass and then passes them to the schedule. Where the model makes the mask in its
            forward pass, as vision-language models do: batch -> `LateMicrobatch`, such as
            `read_samples`; the loss functions' masks are then the true ones.
        read_step: (data iterator of the last model chunk, number of microbatches) -> list of that
            many `Microbatch` (or mappings by term), for loops that hold the step in memory or whose
            iterator must not be drawn ahead. The hook then draws nothing.
        extensions: what a call does besides: `MultiTokenPrediction`, `RouterLosses`,
            `Distillation`, `DatasetReports`, or an `Extension` of your own. A check that every hook
            has, such as ``Audit(trust=True)`` or ``Agreement(patience=600)``, takes its place.
        empty_step: in a step without an active token, raise DataError (``error``); set
            `step_is_empty`, so that the caller can skip the optimizer (``skip``); or do nothing, so
            that momentum and weight decay still move the model (``step``).
        total: the name under which a loss of several terms reports their sum.
        loop: what the loop around the schedule does, if it is not one of your own.

    Attributes:
        terms: `Term` by name.
        step_is_empty: whether the last training step was empty, the same on every rank; always
            False unless ``empty_step`` is ``skip``.

    Raises:
        OptionError: an unknown ``empty_step``, bad terms or extensions, or a ``total`` that names
            another report.
    """

    _complete = staticmethod(with_checks)
