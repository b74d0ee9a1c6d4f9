"""The hook around Megatron's forward-backward function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.audit import Auditor
from megatron_loss_agg.mcore.batches import ReadBatch, read_ahead, read_batch
from megatron_loss_agg.mcore.ranks import Ranks
from megatron_loss_agg.mcore.scaling import HostScale
from megatron_loss_agg.mcore.step import Step
from megatron_loss_agg.mcore.weighting import (
    PlannedWeights,
    RowWeights,
    SharedWeights,
    StepWeights,
)
from megatron_loss_agg.plan import StepPlan

ForwardBackward = Callable[..., Any]


class LossHook:
    """Makes Megatron's schedule compute one aggregation exactly, whatever it averages itself.

    In a custom loop::

        hook = LossHook(LossAggregation(mode="prompt_mean"))
        forward_backward = hook.wrap(get_forward_backward_func())

    Every call of ``forward_backward`` is one optimizer step (or one evaluation). Its forward step
    returns what Megatron's own does: per-token losses with ``partial(loss_func, loss_mask)``; or a
    `TokenLoss`. Reports keep ``lm loss`` as the mean over tokens, and get ``"<mode> loss"``, the
    aggregated loss of the step; both as (sum, count) pairs.

    Args:
        aggregation: what to compute.
        read_batch: batch of the data iterator -> `Microbatch` with the whole mask.
        audit: measure the host's averaging again, and print it, whenever the number of microbatches
            changes; without it, it is measured once, before the first step.
        evaluates_by_microbatch: the host's evaluation divides every microbatch's report before it
            averages (Megatron's training loop under ``--sft``); reports are made exact all the
            same.
    """

    def __init__(
        self,
        aggregation: LossAggregation,
        read_batch: ReadBatch = read_batch,
        *,
        audit: bool = False,
        evaluates_by_microbatch: bool = False,
    ) -> None:
        self.aggregation = aggregation
        self.read_batch = read_batch
        self._auditor = Auditor(repeat=audit)
        self._evaluates_by_microbatch = evaluates_by_microbatch
        # What the first step found, the same on all ranks: whether the microbatches have a fixed
        # number of rows, and their masks show them, so that later steps may need no look-ahead.
        self._fixed_rows = False
        self._verified = False

    def wrap(self, forward_backward: ForwardBackward) -> ForwardBackward:
        """The same forward-backward function, computing the aggregation."""

        @functools.wraps(forward_backward)
        def wrapped(**kwargs: Any) -> Any:
            ranks = Ranks.of(kwargs.get("pg_collection"))
            scale = _scale_of(ranks, kwargs)
            if not kwargs.get("forward_only"):
                self._auditor.check(scale, kwargs)
            if kwargs.get("collect_non_loss_data") or not ranks.last_stage:
                return forward_backward(**kwargs)
            step = self._begin(ranks, scale, kwargs)
            kwargs["forward_step_func"] = step.hook_forward_step(kwargs["forward_step_func"])
            with step.watch(kwargs["model"]):
                result = forward_backward(**kwargs)
            step.finish()
            self._fixed_rows = self._fixed_rows and step.masks_have_rows
            self._verified = True
            return result

        return wrapped

    def _begin(self, ranks: Ranks, scale: HostScale, kwargs: dict[str, Any]) -> Step:
        """Weigh the step; where that reads ahead, ``kwargs`` gets an iterator that replays it."""
        size = kwargs["micro_batch_size"]
        shares = self._evaluates_by_microbatch and bool(kwargs.get("forward_only"))
        if not shares and RowWeights.suffice(self.aggregation, scale, self._fixed_rows):
            weights: StepWeights = RowWeights(self.aggregation, scale, size)
        else:
            weights = self._look_ahead(ranks, scale, size, kwargs)
        return Step(self.aggregation, weights, scale, size, not self._verified, shares)

    def _look_ahead(
        self, ranks: Ranks, scale: HostScale, size: int, kwargs: dict[str, Any]
    ) -> StepWeights:
        plan = functools.partial(self._plan, ranks, scale, kwargs)
        weights: StepWeights
        if dist.get_world_size(ranks.tensor) == 1:
            weights = plan()
        else:
            reader = plan if ranks.reads_data else None
            weights = SharedWeights(reader, scale.num_microbatches, ranks)
        rows = size * scale.num_microbatches * scale.data_parallel_size
        self._fixed_rows = weights.rows == rows
        return weights

    def _plan(self, ranks: Ranks, scale: HostScale, kwargs: dict[str, Any]) -> PlannedWeights:
        iterators = kwargs["data_iterator"]
        chunks = isinstance(iterators, list)
        try:
            microbatches, replay = read_ahead(
                iterators[-1] if chunks else iterators,
                scale.num_microbatches,
                self.read_batch,
                self.aggregation,
            )
        except Exception:
            StepPlan.abandon(self.aggregation, ranks.data)
            raise
        kwargs["data_iterator"] = [*iterators[:-1], replay] if chunks else replay
        return PlannedWeights(StepPlan.build(self.aggregation, microbatches, ranks.data), ranks)


def _scale_of(ranks: Ranks, kwargs: dict[str, Any]) -> HostScale:
    from megatron.core.utils import get_model_config

    model = kwargs["model"]
    config = get_model_config(model[0] if isinstance(model, list) else model)
    if getattr(config, "hybrid_context_parallel", False):
        raise HostError(
            "the model's hybrid_context_parallel gives samples context-parallel groups of their "
            "own; expected one group for all: turn it off"
        )
    return HostScale(
        num_microbatches=kwargs["num_microbatches"],
        data_parallel_size=dist.get_world_size(ranks.data),
        context_parallel_size=dist.get_world_size(ranks.context),
        per_token=config.calculate_per_token_loss,
    )
