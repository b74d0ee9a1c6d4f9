"""Reading a step ahead: its batches, and the weights of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.gather import failing_together
from megatron_loss_agg.mcore.batches import ReadBatch, read_ahead
from megatron_loss_agg.mcore.prefetch import prefetch_of
from megatron_loss_agg.mcore.ranks import Ranks
from megatron_loss_agg.mcore.scaling import HostScale
from megatron_loss_agg.mcore.weighting import PlannedWeights, check_layouts, shared
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.terms import StepTerms, Term, of_term


class LookAhead:
    """Plans a step out of its batches, on every rank of the last pipeline stage.

    Args:
        inserts_prefetch: draw the next step's batches behind the compute of this one, out of an
            iterator that is no `Prefetch` too.

    Raises (by `weigh`):
        PeerError: another rank failed; this one's own error is raised as it is.
    """

    def __init__(
        self, terms: Mapping[str, Term], read_batch: ReadBatch, inserts_prefetch: bool
    ) -> None:
        self._terms = terms
        self._read_batch = read_batch
        self._inserts_prefetch = inserts_prefetch

    def weigh(
        self, ranks: Ranks, scale: HostScale, kwargs: dict[str, Any]
    ) -> tuple[PlannedWeights, StepTerms | None]:
        """The weights, and the plans that they are of on a rank that reads its data.

        ``kwargs``, the schedule's, get an iterator that replays what was read.
        """
        plans: StepTerms | None = None

        def read() -> PlannedWeights:
            nonlocal plans
            plans = self._plan(ranks, scale, kwargs)
            return _weights_of(plans, ranks)

        alone = dist.get_world_size(ranks.tensor) == 1
        weights = read() if alone else shared(read if ranks.reads_data else None, ranks)
        return weights, plans

    def _plan(self, ranks: Ranks, scale: HostScale, kwargs: dict[str, Any]) -> StepTerms:
        source = _last_iterator(kwargs)
        try:
            if source is None:
                raise HostError(
                    "no data_iterator on a rank that reads data; expected one on tensor-parallel "
                    "rank 0 of the last pipeline stage"
                )
            microbatches, replay = read_ahead(
                source, scale.num_microbatches, self._read_batch, self._terms
            )
            for_terms = (of_term(name, m) for m in microbatches for name in self._terms)
            check_layouts([*{id(m): m for m in for_terms}.values()], ranks)
        except Exception:
            StepPlan.abandon(ranks.data)
            raise
        replace_iterator(kwargs, lambda _: replay)
        plans = StepPlan.build_terms(self._terms, microbatches, ranks.data)
        if not kwargs.get("forward_only"):
            self._fetch_next(source, scale)
        return plans

    def _fetch_next(self, data_iterator: Any, scale: HostScale) -> None:
        """Begin to draw the next step's batches, which will be read ahead too."""
        prefetch = prefetch_of(data_iterator, insert=self._inserts_prefetch)
        if prefetch is not None:
            prefetch.fetch(scale.num_microbatches)


def _weights_of(plans: StepTerms, ranks: Ranks) -> PlannedWeights:
    """Of a custom function, which may fail on one rank: then on every data-parallel rank."""
    if all(plan.aggregation.function is None for plan in plans.values()):
        return PlannedWeights.of(plans, ranks)
    elsewhere = (
        "the aggregation function failed on another rank of the data-parallel group; "
        "expected it to succeed on every rank: see the error of that rank"
    )
    with failing_together([ranks.data], elsewhere):
        return PlannedWeights.of(plans, ranks)


def _last_iterator(kwargs: dict[str, Any]) -> Any:
    """The data iterator of the last model chunk, which computes the loss."""
    iterators = kwargs["data_iterator"]
    return iterators[-1] if isinstance(iterators, list) else iterators


def replace_iterator(kwargs: dict[str, Any], wrap: Callable[[Any], Any]) -> None:
    """Put ``wrap`` around that iterator, where this rank has one."""
    iterators, last = kwargs["data_iterator"], _last_iterator(kwargs)
    if last is not None:
        wrapped = wrap(last)
        chunks = isinstance(iterators, list)
        kwargs["data_iterator"] = [*iterators[:-1], wrapped] if chunks else wrapped
