"""The hook around Megatron's forward-backward function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import HostError, MaskError, ModeError
from megatron_loss_agg.gather import any_of, failing_together
from megatron_loss_agg.mcore.audit import Auditor
from megatron_loss_agg.mcore.batches import ReadBatch, Unread, read_batch
from megatron_loss_agg.mcore.flags import EMPTY_STEPS
from megatron_loss_agg.mcore.lookahead import LookAhead, replace_iterator
from megatron_loss_agg.mcore.maskcheck import MaskChecks
from megatron_loss_agg.mcore.ranks import Ranks
from megatron_loss_agg.mcore.scaling import HostScale
from megatron_loss_agg.mcore.step import Step
from megatron_loss_agg.mcore.weighting import PlannedWeights, RowWeights, local_part
from megatron_loss_agg.terms import StepTerms, Term, named_terms

ForwardBackward = Callable[..., Any]

_FAILED = (
    "the last pipeline stage, or another context-parallel rank of it, could not plan the step; "
    "expected it to: see its error"
)


class LossHook:
    """Makes Megatron's schedule compute one loss exactly, whatever it averages itself.

    In a custom loop::

        hook = LossHook(LossAggregation(mode="prompt_mean"))
        forward_backward = hook.wrap(get_forward_backward_func())

    Every call of ``forward_backward`` is one optimizer step (or one evaluation). Its forward step
    returns what Megatron's own does: per-token losses with ``partial(loss_func, loss_mask)``; or a
    `TokenLoss`. Reports keep ``lm loss`` as the mean over tokens, and get ``"<mode> loss"``, the
    aggregated loss of the step; both as (sum, count) pairs.

    A loss of several terms, each with a denominator of its own::

        hook = LossHook({"policy": LossAggregation(mode="prompt_mean"),
                         "kl": Term(LossAggregation(mode="token_mean"), coefficient=0.01)})

    Its forward step returns a `TokenLoss` with losses by name. Reports get ``"<name> loss"`` for
    each, without its coefficient, and ``"loss"``, the sum that is differentiated.

    Args:
        aggregation: what to compute; or several terms, by name. The tokens that the host counts,
            and those of ``lm loss``, are the first one's.
        read_batch: batch of the data iterator -> `Microbatch` with the whole mask; or one for each
            term, where their masks differ.
        audit: measure the host's averaging before the first step of each number of microbatches,
            and print it; without it, it is measured once, before the first step.
        evaluates_by_microbatch: the host's evaluation divides every microbatch's report before it
            averages (Megatron's training loop under ``--sft``); reports are made exact all the
            same.
        empty_step: what to do about a step without any token: raise an error (``error``); say so in
            `step_is_empty`, by which the caller leaves the optimizer alone (``skip``); or nothing,
            so that momentum and weight decay still move the model (``step``).
        in_training_loop: of Megatron, where every microbatch has as many rows as the schedule is
            told, and the iterators are Megatron's own. Steps may then need no look-ahead, and
            batches are drawn behind the compute of the step before (`Prefetch`).
    """

    def __init__(
        self,
        aggregation: LossAggregation | Mapping[str, Term | LossAggregation],
        read_batch: ReadBatch = read_batch,
        *,
        audit: bool = False,
        evaluates_by_microbatch: bool = False,
        empty_step: str = "step",
        in_training_loop: bool = False,
    ) -> None:
        if empty_step not in EMPTY_STEPS:
            raise ModeError(f"empty_step={empty_step!r}; expected one of {', '.join(EMPTY_STEPS)}")
        self._reports_sum = not isinstance(aggregation, LossAggregation)
        if isinstance(aggregation, LossAggregation):
            aggregation = {aggregation.mode: aggregation}
        self.terms = named_terms(aggregation)
        if "lm" in self.terms:
            raise ModeError(
                "a term named 'lm'; expected another name, since 'lm loss' is the mean over tokens"
            )
        self.read_batch = read_batch
        self.empty_step = empty_step
        self.step_is_empty = False
        """Whether the last training step held no token; the same on every rank. Known only with
        ``empty_step="skip"``."""
        self._auditor = Auditor(repeat=audit)
        self.evaluates_by_microbatch = evaluates_by_microbatch
        self._in_training_loop = in_training_loop
        self._look_ahead = LookAhead(self.terms, read_batch, in_training_loop)
        # What the last look-ahead found, the same on all ranks: whether the microbatches have a
        # fixed number of rows, so that later steps may need none.
        self._fixed_rows = False
        self._verified = False
        # The kinds of steps, training or not, that could be planned once.
        self._planned: set[bool] = set()

    def wrap(self, forward_backward: ForwardBackward) -> ForwardBackward:
        """The same forward-backward function, computing the aggregation."""

        @functools.wraps(forward_backward)
        def wrapped(**kwargs: Any) -> Any:
            ranks = Ranks.of(kwargs.get("pg_collection"))
            scale = _scale_of(ranks, kwargs)
            trains = not kwargs.get("forward_only")
            if trains:
                self._auditor.check(scale, kwargs)
            if kwargs.get("collect_non_loss_data"):
                return forward_backward(**kwargs)
            step, is_empty = self._begin(ranks, scale, kwargs)
            if step is None:
                result = forward_backward(**kwargs)
            else:
                kwargs["forward_step_func"] = step.hook_forward_step(kwargs["forward_step_func"])
                with step.mask_checks.watch(kwargs["model"]):
                    result = forward_backward(**kwargs)
                step.finish()
                self._verified = self._verified or trains
            if trains and self.empty_step == "skip":
                self.step_is_empty = any_of(is_empty, ranks.pipeline)
            return result

        return wrapped

    def _begin(
        self, ranks: Ranks, scale: HostScale, kwargs: dict[str, Any]
    ) -> tuple[Step | None, bool]:
        """Weigh the step, on the last pipeline stage, and say whether it is empty.

        Raises:
            PeerError: that failed on the last stage, or on another context-parallel rank of it.
        """
        trains = not kwargs.get("forward_only")
        # To tell the others makes them wait for this rank, so not without a need.
        tells = trains not in self._planned or (trains and self.empty_step == "error")
        step: Step | None = None
        is_empty = False
        with failing_together([ranks.context, ranks.pipeline] if tells else [], _FAILED):
            if ranks.last_stage:
                step, is_empty = self._weigh(ranks, scale, kwargs)
        self._planned.add(trains)
        return step, is_empty

    def _weigh(self, ranks: Ranks, scale: HostScale, kwargs: dict[str, Any]) -> tuple[Step, bool]:
        """The step with its weights, and whether it is empty, where that is known.

        Where this reads ahead, ``kwargs`` gets an iterator that replays what was read.
        """
        size = kwargs["micro_batch_size"]
        shares = self.evaluates_by_microbatch and bool(kwargs.get("forward_only"))
        if not shares and self._needs_no_plan(scale):
            (term,) = self.terms.values()
            rows = RowWeights(term.aggregation, scale, size)
            replace_iterator(kwargs, functools.partial(Unread, self._fixed_rows))
            return self._step(rows, scale, size, shares), False
        weights, plans = self._look_ahead.weigh(ranks, scale, kwargs)
        total = size * scale.num_microbatches * scale.data_parallel_size
        self._fixed_rows = self._in_training_loop and weights.rows == total
        if weights.is_empty and self.empty_step == "error" and not kwargs.get("forward_only"):
            raise MaskError(
                "no token of the whole step weighs anything: every loss mask is 0, or its sample "
                "rejected; expected some: give the step data, or choose "
                "--loss-aggregation-empty-step skip or step"
            )
        step = self._step(weights, scale, size, shares)
        if plans is not None and step.verify:  # only then are the plans kept
            step.mask_checks.expected_mask = functools.partial(_local_mask, plans, ranks)
        return step, weights.is_empty

    def _step(
        self, weights: PlannedWeights | RowWeights, scale: HostScale, size: int, shares: bool
    ) -> Step:
        checks = MaskChecks(self.terms, weights, scale, size)
        step = Step(self.terms, weights, scale, checks, shares)
        step.verify = not self._verified
        step.reports_sum = self._reports_sum
        return step

    def _needs_no_plan(self, scale: HostScale) -> bool:
        if len(self.terms) > 1 or self.empty_step != "step" or self.read_batch is not read_batch:
            return False
        (term,) = self.terms.values()
        return RowWeights.suffice(term.aggregation, scale, self._fixed_rows)


def _local_mask(plans: StepTerms, ranks: Ranks, name: str, i: int) -> Tensor:
    microbatch = plans[name].microbatches[i]
    return local_part(microbatch.loss_mask, microbatch, ranks)


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
