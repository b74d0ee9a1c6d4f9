"""One call of Megatron's schedule, or several, as one exact optimizer step.

read -> count -> plan -> hand on -> weigh -> report
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_loss_agg.aggregation import LossAggregation, Term, named_terms
from megatron_loss_agg.collectives import any_rank, failing_together, handed_on
from megatron_loss_agg.errors import DataError, OptionError
from megatron_loss_agg.mcore.call_losses import CallLosses
from megatron_loss_agg.mcore.extension import Extension, settings_of
from megatron_loss_agg.mcore.host import Call, Loop, defaults_of, stock
from megatron_loss_agg.mcore.reading.ahead import LookAhead, Source
from megatron_loss_agg.mcore.reading.keys import (
    ReadBatch,
    ReadStep,
    factors_of,
    read_batch,
    reading,
)
from megatron_loss_agg.mcore.reading.late import LateMicrobatch, read_samples
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.mcore.step import PlannedStep, Step, planned_step
from megatron_loss_agg.microbatch import MicrobatchOfTerms, listed
from megatron_loss_agg.report import RunningMean

_FAILED = "a rank of the last pipeline stage could not plan the step; expected it to: see its error"


class Hook:
    """`megatron_loss_agg.mcore.LossHook` without the checks that every hook has."""

    _complete: Callable[[Iterable[Extension]], list[Extension]]

    def __init__(
        self,
        aggregation: LossAggregation | Mapping[str, Term | LossAggregation],
        *,
        read_batch: ReadBatch = read_batch,
        read_step: ReadStep | None = None,
        extensions: Iterable[Extension] = (),
        empty_step: str = "step",
        total: str = "loss",
        loop: Loop = Loop(),  # noqa: B008  (immutable)
    ) -> None:
        if empty_step not in ("step", "error", "skip"):
            raise OptionError(f"empty_step={empty_step!r}; expected one of step, error, skip")
        self._total: str | None = total  # None: no total is reported
        if isinstance(aggregation, LossAggregation):
            aggregation, self._total = {aggregation.label: aggregation}, None
        self.terms = named_terms(aggregation)
        names = ["lm loss", *(f"{name} loss" for name in self.terms), total]
        if not isinstance(total, str) or len({*names}) < len(names):
            raise OptionError(
                f"reports named {names}; expected different names of the terms and total=, and no "
                "term 'lm', since 'lm loss' is the mean over tokens"
            )
        self._extensions = self._complete(extensions)
        self._source = Source(reading(read_batch, self.terms, "dataset" in self._needs), read_step)
        self.empty_step, self._loop = empty_step, loop
        mask = "model" if read_batch is read_samples else "batch"
        own = {"mask": mask, "factors": factors_of(read_batch), "empty_step": empty_step}
        self._settings = settings_of(own | {"total": total} | loop._asdict(), self._extensions)
        self.step_is_empty = False
        self._splits = Splits()
        self._open: Step | None = None
        self._kinds_planned: set[bool] = set()  # `Call.trains` of the calls that were planned
        self._evaluation: defaultdict[str, RunningMean] = defaultdict(RunningMean)

    @property
    def _needs(self) -> frozenset[str]:
        return frozenset[str]().union(*(x.needs for x in self._extensions))  # they may change

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's schedule, from ``get_forward_backward_func()``, with its loss aggregated.

        Returns:
            a function that takes the schedule's arguments, by keyword, and returns its result.

        Raises:
            AggregationError: when called; every error of this package, see docs/errors.md.
        """
        schedule = stock(forward_backward)
        defaults = defaults_of(schedule)
        self._evaluation = defaultdict(RunningMean)  # of the next one: Megatron asks for each

        @functools.wraps(schedule)
        def wrapped(**arguments: Any) -> Any:
            if arguments.get("collect_non_loss_data"):  # no loss is computed
                return schedule(**arguments)
            call = Call.of(
                defaults | arguments,
                terms=self.terms,
                loop=self._loop,
                settings=self._settings,
                extensions=self._extensions,
                total_name=self._total,
                splits=self._splits,
            )
            step, iterator = self._open if call.trains else None, call.data_iterator
            if step is None:
                read, iterator = self._source.reader(call, "fingerprints" in self._needs)
                step = Step(call.scale.num_microbatches, read)
            first = step.take(call.scale.num_microbatches)
            means = None
            if self._loop.averages_quotients and not call.trains:
                means = self._evaluation if self._loop.of_megatron else defaultdict(RunningMean)
            call = replace(call, first_index=first, ends_step=not step.left, running_means=means)
            if call.begins_step:
                for extension in self._extensions:
                    extension.start(call)
            return self._run(schedule, call, step, iterator)

        return wrapped

    @contextlib.contextmanager
    def step(self, microbatches: Sequence[MicrobatchOfTerms | LateMicrobatch]) -> Iterator[None]:
        """Make several forward-backward calls one optimizer step:

            with hook.step(microbatches):
                forward_backward(num_microbatches=2, **the_rest)
                forward_backward(num_microbatches=6, **the_rest)

        Each training call inside takes the next ``num_microbatches``; the hook reads nothing from
        its iterator. The step is counted once, by the first call, and the host reduces and scales
        the gradients in the last one. Reports are partial: sum both elements of the pairs over all
        calls, then divide.

        Args:
            microbatches: this data-parallel rank's whole step, in the order of the calls.

        Raises:
            DataError: the block ends with microbatches left, or a step is open already.
        """
        if self._open is not None:
            raise DataError("hook.step inside another hook.step; expected one step at a time")
        given = listed(microbatches)
        self._open = step = Step(len(given), lambda: given)
        try:
            yield
            step.check_all_taken()
        finally:
            self._open = None

    def _run(self, schedule: Callable[..., Any], call: Call, step: Step, iterator: Any) -> Any:
        """One call of the schedule, which is all of ``step`` or a part of it."""
        plan = None if call.may_lack_mask else self._plan_before_call(call, step)
        with contextlib.ExitStack() as stack:
            if not call.ends_step:
                stack.enter_context(call.accumulating())
            watchers = [stack.enter_context(x.around(call, plan)) for x in self._extensions]
            if not call.groups.last_stage:
                result = call.run(schedule, call.arguments["forward_step_func"], iterator)
            else:
                planned = functools.partial(self._planned, call, step)
                losses = CallLosses(call, planned, watchers, step.own_tokens)
                result = losses.run(schedule, iterator)
                if isinstance(iterator, LookAhead):
                    iterator.check_taken()
        if call.trains and self.empty_step == "skip":
            self.step_is_empty = any_rank(plan is not None and plan.is_empty, call.groups.pp)
        return result

    def _plan_before_call(self, call: Call, step: Step) -> PlannedStep | None:
        """The plan of a step, before its calls; None on stages that do not get it."""
        if not call.begins_step:
            return step.plan
        groups, to_stages = call.groups, call.trains and "stages" in self._needs
        refuses_empty = call.trains and self.empty_step == "error"
        # Exchanging failures makes ranks wait: only where one is likely.
        likely = call.trains not in self._kinds_planned or refuses_empty or to_stages
        with failing_together([groups.cp, groups.pp] if likely else [], _FAILED):
            if groups.last_stage and self._planned(call, step).is_empty and refuses_empty:
                raise DataError(
                    "every token of the step is masked or rejected; expected an active token: "
                    "fix the data, or choose --loss-aggregation-empty-step skip or step "
                    "(LossHook(empty_step=))"
                )
        self._kinds_planned.add(call.trains)
        if to_stages:
            step.plan = handed_on(lambda: step.plan, groups.pp, groups.pp.size() - 1)
        return step.plan

    def _planned(self, call: Call, step: Step) -> PlannedStep:
        """The step's plan, made once; the next step's batches are drawn while this one computes."""
        if step.plan is None:
            # In a loss, one context-parallel rank may fail alone.
            with failing_together([call.groups.cp] if call.may_lack_mask else [], _FAILED):
                step.plan = planned_step(step, call, self._needs)
            if step is not self._open:
                self._source.fetch_next(call)
        return step.plan
