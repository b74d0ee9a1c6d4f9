"""The hook around Megatron's forward-backward function."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_loss_agg.aggregation import LossAggregation, Term, named_terms
from megatron_loss_agg.collectives import any_rank, failing_together
from megatron_loss_agg.errors import HostError, MaskError, ModeError, StepError
from megatron_loss_agg.mcore.agreement import agree, described
from megatron_loss_agg.mcore.audit import Auditor
from megatron_loss_agg.mcore.batches import (
    LookAhead,
    ReadBatch,
    ReadStep,
    checked_microbatches,
    read_batch,
    reading,
)
from megatron_loss_agg.mcore.choices import checked_choices
from megatron_loss_agg.mcore.datasets import SeenDatasets
from megatron_loss_agg.mcore.evaluation import RunningMean
from megatron_loss_agg.mcore.host import Call, is_own, stock
from megatron_loss_agg.mcore.late_batches import LateMicrobatch
from megatron_loss_agg.mcore.late_masks import check_possible, plan_late, reader
from megatron_loss_agg.mcore.left_gradients import LeftGradients
from megatron_loss_agg.mcore.moe import RouterLosses
from megatron_loss_agg.mcore.mtp import Depths, check_first_term, number_of_depths
from megatron_loss_agg.mcore.optimizer_step import OptimizerStep
from megatron_loss_agg.mcore.prefetch import prefetch_of
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.mcore.step import Options, Step
from megatron_loss_agg.mcore.step_weights import StepWeights, Wanted
from megatron_loss_agg.mcore.summary import summary
from megatron_loss_agg.microbatch import MicrobatchOfTerms
from megatron_loss_agg.samples import listed

_MARK = "wrapped_by_loss_hook"
_FAILED = (
    "the last pipeline stage, or another context-parallel rank of it, could not plan the step; "
    "expected it to: see its error"
)


class LossHook:
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
    differentiated. If there are two terms, and the second is named ``kd``, it may also return a
    loss function of Megatron's for distillation.

    Args:
        aggregation: what to compute; or several terms, by name. The host's token count and ``lm
            loss`` are those of the first term.
        read_batch: batch of the data iterator -> `Microbatch` with the whole mask; or a mapping by
            term, where their masks differ. The hook draws the step's batches before its first
            forward pass and then passes them to the schedule.
        read_step: (data iterator of the last model chunk, number of microbatches) -> list of that
            many `Microbatch` (or mappings by term), for loops that hold the step in memory or whose
            iterator must not be drawn ahead. The hook then draws nothing.
        audit: measure the host's averaging before the first step of each number of microbatches,
            and print it; without it, it is measured once, before the first step.
        unmeasured: what to do where that cannot be measured, since the model is in an unknown
            data-parallel wrapper or the loop itself reduces gradients: raise HostError
            (``refuse``), or go on as if it was as planned (``trust``).
        evaluates_by_microbatch: the host's evaluation divides every microbatch's report before it
            averages (Megatron's training loop under ``--sft``); reports stay exact: in Megatron's
            loop those of the whole evaluation, in a custom loop those of each call.
        empty_step: what to do about a step in which every token is masked or rejected: raise
            MaskError (``error``); set `step_is_empty`, so that the caller can skip the optimizer
            (``skip``); or nothing, so that momentum and weight decay still move the model
            (``step``).
        total: the name under which a loss of several terms reports their sum.
        mtp: what becomes of the losses of multi-token prediction: what the host makes of them
            (``host``), or they are aggregated as the loss is (``same``; see docs/losses.md), with
            reports ``"mtp_1 <name> loss"`` and so on, without Megatron's factor. Of a loss of
            several terms, they get the weights and the coefficient of the first one.
        moe: who weighs the auxiliary losses of routers (MoE): Megatron, by its own rules
            (``host``), or the hook, by tokens over the whole step (``step``); see docs/losses.md.
        patience: seconds that ranks wait for each other's hook before the first step.
        in_training_loop: called by Megatron's own training loop. Batches of the next step are then
            drawn while this one computes (`Prefetch`), and evaluation is aggregated as training is.
            In a custom loop, a call with ``forward_only=True`` is left alone if its loss functions
            carry no mask.
        mask: who makes the loss mask: the ``batch`` brings it, or the ``model`` makes it in its
            forward pass, as vision-language models do. With ``model`` the loss functions' masks are
            the true ones, and batches are read for their number of samples alone: readers return
            `LateMicrobatch`, by default of the batch's rows.
        report_datasets: report ``"lm loss of dataset <id>"`` and ``"<name> loss of dataset <id>"``
            for every data set of the step, whose ids the batches or microbatches hold
            (``dataset_ids``, or Megatron's own key ``dataset_id``). As a number, it says over how
            many steps the host's log averages.

    Attributes:
        terms: `Term` by name.
        step_is_empty: whether the last training step was empty, the same on every rank; always
            False unless ``empty_step`` is ``skip``.

    Raises:
        ModeError: an unknown ``empty_step``, ``unmeasured``, ``mtp``, ``moe`` or ``mask``, bad
            terms, terms or settings that need masks which the model makes too late, or a ``total``
            that names another report.
    """

    def __init__(
        self,
        aggregation: LossAggregation | Mapping[str, Term | LossAggregation],
        read_batch: ReadBatch = read_batch,
        *,
        read_step: ReadStep | None = None,
        audit: bool = False,
        unmeasured: str = "refuse",
        evaluates_by_microbatch: bool = False,
        empty_step: str = "step",
        total: str = "loss",
        mtp: str = "host",
        moe: str = "host",
        patience: float = 60.0,
        in_training_loop: bool = False,
        mask: str = "batch",
        report_datasets: int = False,
    ) -> None:
        self._choices = choices = checked_choices(
            empty_step=empty_step, unmeasured=unmeasured, mask=mask, mtp=mtp, moe=moe
        )
        self._total: str | None = total  # None: no total is reported
        if isinstance(aggregation, LossAggregation):
            aggregation, self._total = {aggregation.label: aggregation}, None
        self.terms = named_terms(aggregation)
        if mtp == "same":
            check_first_term(self.terms)
        _check_names(self.terms, total, mtp)
        if mask == "model":
            check_possible(self.terms, choices, bool(report_datasets), evaluates_by_microbatch)
            read_batch = reader(read_batch)
        self.read_batch = reading(read_batch, self.terms, bool(report_datasets))
        self.read_step = read_step
        self.empty_step = empty_step
        self.step_is_empty = False
        self.evaluates_by_microbatch = evaluates_by_microbatch
        self._in_training_loop = in_training_loop
        self._auditor = Auditor(audit, unmeasured)
        self._router_losses = RouterLosses(moe)
        self._settings = {
            **{f"term {name!r}": described(term) for name, term in self.terms.items()},
            "order of terms": [*self.terms],
            **choices,
            "audit": audit,
            "evaluates_by_microbatch": evaluates_by_microbatch,
            "total": total,
            "in_training_loop": in_training_loop,
            "report_datasets": report_datasets,
        }
        self._datasets = SeenDatasets(int(report_datasets)) if report_datasets else None
        self._agreed = False
        self._patience = timedelta(seconds=patience)
        self._verified = False
        self._model: weakref.ref[Any] | None = None
        self._checked_losses: set[Any] = set()  # kinds of loss functions
        self._left_gradients = LeftGradients()
        self._splits = Splits()
        self._planned: set[bool] = set()  # whether a training or an evaluation call was planned
        self._open_step: OptimizerStep | None = None
        self._evaluation: defaultdict[str, RunningMean] = defaultdict(RunningMean)

    @property
    def reported(self) -> list[str]:
        """Names under which the aggregated losses are reported, and their total if there is one."""
        total = [] if self._total is None else [self._total]
        return [*(f"{name} loss" for name in self.terms), *total]

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward_backward`` with its loss aggregated.

        Args:
            forward_backward: Megatron's schedule, from ``get_forward_backward_func()``.

        Returns:
            a function that takes the schedule's arguments, by keyword, and returns its result. Once
            it returns, it keeps nothing of the call; only a `Prefetch` keeps its batches, and still
            reads the iterator.

        Raises:
            MaskError, GroupError, LayoutError, FunctionError: when called: bad batches, masks or
                ids, or a loss function's mask differs from the planned one.
            ReportError: when called: the loss function reports a name that the hook adds.
            ModeError: when called: ranks have different settings.
            HostError: ``forward_backward`` is wrapped already; or, when called: the host scales or
                calls the loss in another way than planned.
            StepError: when called: gradients that the last call left, batches that change or are in
                another order than the microbatches, or as `step`.
            PeerError: when called: another rank failed, or has no hook.
        """
        forward_backward = stock(forward_backward)
        if hasattr(forward_backward, _MARK):
            raise HostError(
                "a forward-backward function that a LossHook has wrapped already; expected "
                "Megatron's own: wrap it once"
            )
        self._evaluation = defaultdict(RunningMean)  # for each, Megatron asks for the schedule anew

        @functools.wraps(forward_backward)
        def wrapped(**arguments: Any) -> Any:
            call = Call.of(arguments)
            if not self._agreed:
                agree(self._settings, call.groups, self._patience)
                self._agreed = True
            step = None if call.forward_only else self._open_step
            if not call.forward_only:
                self._check_model(call)
                self._router_losses.check(call)
                # Once a step: data-parallel ranks may differ in how many calls a step has.
                if step is None or step.is_whole:
                    self._left_gradients.check(call.chunks[0])
                    self._auditor.check(call)
            if call.collects_other_data:
                return forward_backward(**arguments)
            iterator = call.data_iterator
            if step is None:
                lazily, verify = self._may_lack_mask(call), not self._verified
                step, iterator = OptimizerStep.of_call(
                    call, self.read_batch, self.read_step, lazily, verify
                )
            return self._run(forward_backward, call, step, iterator)

        setattr(wrapped, _MARK, True)
        return wrapped

    @contextlib.contextmanager
    def step(self, microbatches: Sequence[MicrobatchOfTerms | LateMicrobatch]) -> Iterator[None]:
        """Make several forward-backward calls one optimizer step:

            with hook.step(microbatches):
                forward_backward(num_microbatches=2, **the_rest)
                forward_backward(num_microbatches=6, **the_rest)
            optimizer.step()

        Each training call inside takes the next ``num_microbatches``; the hook reads nothing from
        its iterator. The step is counted once, by the first call. Gradients accumulate over the
        calls; the host reduces and scales them in the last call only, whatever its settings.
        Reports are partial: sum both elements of the pairs over all calls, then divide.

        Args:
            microbatches: this data-parallel rank's whole optimizer step, in the order of the calls;
                `Microbatch`, or mappings of them by term. The same number on all model-parallel
                ranks.

        Raises:
            StepError: the block ends with microbatches left, a call asks for more than are left, or
                a step is open already.
        """
        if self._open_step is not None:
            raise StepError("hook.step inside another hook.step; expected one step at a time")
        given = listed(microbatches)
        self._open_step = step = OptimizerStep(len(given), lambda: given)
        try:
            yield
            if step.left:
                raise StepError(
                    f"hook.step ends with {step.left} of {len(given)} microbatches left; expected "
                    "calls that take all of them: see their num_microbatches"
                )
        finally:
            self._open_step = None

    def _may_lack_mask(self, call: Call) -> bool:
        """Custom loops compute log-probabilities, for one, in forward-only calls without a loss."""
        return call.forward_only and not self._in_training_loop

    def _run(
        self, forward_backward: Callable[..., Any], call: Call, step: OptimizerStep, iterator: Any
    ) -> Any:
        """One call of the schedule, which is all of ``step`` or a part of it."""
        first = step.take(call.scale.num_microbatches)
        is_empty = not self._may_lack_mask(call) and self._plan_together(step, call, first)
        with contextlib.ExitStack() as stack:
            if step.left:
                stack.enter_context(call.accumulating())
            if not call.forward_only:
                stack.enter_context(self._router_losses.scaled(call, first, not step.left))
            if call.groups.last_stage:
                hooked = self._step(call, step, first, is_own(forward_backward))
                hooked.watch(stack)
                result = call.run(forward_backward, hooked.forward_step, iterator)
                hooked.finish()
                if isinstance(iterator, LookAhead):
                    iterator.check_taken()
                if (prefetch := prefetch_of(call.data_iterator, insert=False)) is not None:
                    prefetch.check()
                if not (self._verified or call.forward_only or step.left):
                    weights = self._weights(call, step)
                    if not weights.is_empty:  # of masked tokens nothing can be compared
                        self._report_first(call, weights)
                        self._verified = True
            else:
                result = call.run(forward_backward, call.forward_step, iterator)
        if not call.forward_only:
            self._left_gradients.note(call.chunks[0])
            if self.empty_step == "skip":
                self.step_is_empty = any_rank(is_empty, call.groups.pp)
        return result

    def _check_model(self, call: Call) -> None:
        """Raise HostError for a second model, or one whose MTP cannot be aggregated.

        Averaging and losses are those of the first one.
        """
        model = call.chunks[0]
        if self._model is None:
            self._model = weakref.ref(model)
        if self._model() is not model:
            raise HostError(
                "a LossHook trains a second model; expected a hook for each: it measures the "
                "host's averaging, and checks losses and splits, in the first step of one model"
            )
        self._depths(call)

    def _depths(self, call: Call) -> int:
        """Of MTP, whose losses this call aggregates."""
        aggregates = self._choices["mtp"] == "same" and not call.forward_only
        return number_of_depths(call.config) if aggregates else 0

    def _report_first(self, call: Call, weights: StepWeights) -> None:
        """Say on one rank what was understood of the first training step."""
        groups = (call.groups.dp, call.groups.cp, call.groups.tp)
        if not any(map(dist.get_rank, groups)):
            measured = self._auditor.measured
            line = summary(self.terms, call, weights, self._splits, measured, self._choices)
            print(line, flush=True)

    def _step(self, call: Call, step: OptimizerStep, first: int, reports_late: bool) -> Step:
        lazily = self._may_lack_mask(call)
        options = Options(
            verify=not self._verified,
            checked_losses=self._checked_losses,
            total=self._total,
            running_means=self._running_means(call),
            passes_unmasked=lazily,
            depths=Depths(call) if self._depths(call) else None,
            reports_late=reports_late,
        )

        @functools.cache
        def weights() -> StepWeights:
            with failing_together([call.groups.cp] if lazily else [], _FAILED):
                return self._weights(call, step)

        carried = step.carried_tokens(first)
        return Step(call, self.terms, weights, self._splits, options, first, carried)

    def _running_means(self, call: Call) -> defaultdict[str, RunningMean] | None:
        """Of the evaluation that the call is a part of; in a custom loop, of the call."""
        if not (self.evaluates_by_microbatch and call.forward_only):
            return None
        return self._evaluation if self._in_training_loop else defaultdict(RunningMean)

    def _plan_together(self, step: OptimizerStep, call: Call, first: int) -> bool:
        """Plan the step on the last pipeline stage; return whether it is known to be empty.

        Raises:
            PeerError: planning failed on the last stage, or on another context-parallel rank.
        """
        trains, groups = not call.forward_only, call.groups
        # Exchanging failures makes ranks wait: only where one is likely, in a step's first call.
        likely = trains not in self._planned or (
            trains and (self.empty_step == "error" or self._router_losses.waits(call))
        )
        is_empty = False
        with failing_together([groups.cp, groups.pp] if likely and not first else [], _FAILED):
            if groups.last_stage:
                weights = self._weights(call, step)
                is_empty = weights.is_empty
                if is_empty and trains and self.empty_step == "error":
                    raise MaskError(
                        "every token of the step is masked or rejected; expected an active token: "
                        "fix the data, or choose --loss-aggregation-empty-step skip or step"
                    )
                if trains and not first:
                    self._router_losses.plan(call, weights)
        if trains and not first:
            self._router_losses.tell_stages(call, step.number)
        self._planned.add(trains)
        return is_empty

    def _wanted(self, call: Call) -> Wanted:
        # Under --sft, an evaluation averages quotients: none by data set would be exact.
        datasets = self._datasets is not None and self._running_means(call) is None
        # Batches that the hook draws are in order.
        given = self.read_step is not None or self._open_step is not None
        return Wanted(
            masks=not self._verified,
            order=given and not self._verified,
            depths=self._depths(call),
            datasets=datasets,
            trains=not call.forward_only,
        )

    def _weights(self, call: Call, step: OptimizerStep) -> StepWeights:
        return step.weights(functools.partial(self._plan, call))

    def _plan(self, call: Call, read: Callable[[], Any], number: int) -> StepWeights:
        """The weights of ``number`` microbatches; on every rank of the last stage."""
        if self._choices["mask"] == "model":
            weights: StepWeights = plan_late(read, number, self.terms, call)
        else:
            weights = StepWeights.plan(
                lambda: checked_microbatches(read(), number, self.terms),
                self.terms,
                call.groups,
                self._splits,
                self._wanted(call),
            )
        trains = not call.forward_only
        if trains and self._datasets is not None and weights.datasets is not None:
            self._datasets.note(weights.datasets)
        reads = call.groups.reads_data and trains and self._open_step is None
        if reads and self.read_step is None:
            prefetch = prefetch_of(call.data_iterator, insert=self._in_training_loop)
            if prefetch is not None:
                prefetch.fetch(number)
        return weights


def _check_names(terms: Mapping[str, Term], total: str, mtp: str) -> None:
    """Raise ModeError if two reports of the hook had the same name."""
    if "lm" in terms:
        raise ModeError(
            "a term named 'lm'; expected another name, since 'lm loss' is the mean over tokens"
        )
    if not isinstance(total, str) or total in ("lm loss", *(f"{name} loss" for name in terms)):
        raise ModeError(f"total={total!r}; expected a name that no other report of the hook has")
    if mtp == "same" and any(name.startswith("mtp_") for name in (*terms, total)):
        raise ModeError(
            f"mtp='same' and reports of {[*terms, total]}; expected other names than mtp_..., "
            "which are those of multi-token prediction"
        )
