"""`LossHook`: the options of an exact loss, and the schedule and steps that it hooks.

See `step` for the work of a call: `Step.run` is the call, `Step.loss` a microbatch in it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_loss_agg.aggregation import LossAggregation, Term, named_terms, units_read
from megatron_loss_agg.collectives import any_rank
from megatron_loss_agg.describe import aggregation_in_words, terms_in_words
from megatron_loss_agg.errors import AggregationError, DataError, HostError, OptionError
from megatron_loss_agg.mcore.batches import ReadBatch, ReadStep, read_batch, reader_for
from megatron_loss_agg.mcore.call import Call, default_arguments, original
from megatron_loss_agg.mcore.checks.scaling import check_scaling
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.first_lines import audit_lines
from megatron_loss_agg.mcore.forward_step import function_name
from megatron_loss_agg.mcore.parts.modes import ModeReports, also_aggregations
from megatron_loss_agg.mcore.reports import MicrobatchLoss
from megatron_loss_agg.mcore.split import SPLITS
from megatron_loss_agg.mcore.step import Step, Verified
from megatron_loss_agg.mcore.stream import (
    EndCountedStep,
    Stream,
    check_end_counted,
    warning_of_partial_gradients,
)
from megatron_loss_agg.mcore.token_loss import hooks
from megatron_loss_agg.microbatch import TermMicrobatches, listed

_HOOK = "loss_hook"
"""Attribute of a hooked schedule: its `LossHook`."""


class LossHook:
    """Makes Megatron's schedule compute an exact loss, whatever averaging Megatron does itself.

    In a custom loop:

        hook = LossHook(LossAggregation(mode="prompt_mean"))
        forward_backward = hook.wrap(get_forward_backward_func())

    Every training call of ``forward_backward`` is one optimizer step; for a step of several calls
    see `step`. The forward step returns the same as Megatron's own, per-token losses and
    ``partial(loss_func, loss_mask)``, or a `TokenLoss` or `SampleLoss` as the loss function. Reports
    of Megatron's loss function keep ``lm loss`` as the mean over tokens. The aggregated loss of the
    step is added to the reports, named ``"<mode> loss"`` or after the preset. Both are pairs for
    Megatron's loop, summed over microbatches and ranks; the loss is the first sum divided by the
    second.

    A loss of several terms, each with its own denominator:

        hook = LossHook({"policy": LossAggregation(mode="prompt_mean"),
                         "kl": Term(LossAggregation(mode="token_mean"), multiplier=0.01)})

    Its forward step returns a `TokenLoss` with losses by name. Reports get ``"<name> loss"`` for
    each term, without its multiplier, and ``"loss"``, the weighted sum that is differentiated.

    Args:
        aggregation: the loss's aggregation, or several terms by name. Megatron counts the tokens of
            the first term.
        read_batch: maps a batch of the data iterator to a `Microbatch` with the whole mask, or to a
            mapping by term if their masks differ. The hook draws the step's batches before its
            first forward pass and then passes them to the schedule.
        read_step: maps the data iterator of the last model chunk and the number of microbatches to
            a list of that many `Microbatch` (or mappings by term), for loops that hold the step in
            memory or whose iterator must not be drawn ahead. The hook then draws nothing. It is
            called on tensor-parallel rank 0 of the last pipeline stage; with
            ``aggregate_evaluation``, also for evaluations.
        split: how the script splits tokens over context-parallel ranks: ``zigzag`` (inside every
            row or packed sequence), ``zigzag_pack`` (over the whole pack) or ``contiguous``. None:
            ``zigzag``. It is compared with the model's inputs in the first step; see docs/limits.md.
        also: further modes, presets or aggregations; the first term's loss is also reported under
            each of these.
        extensions: `Extension` objects, such as `MTPAggregation` and `DatasetReports`.
        empty_step: in a step without an active token, raise DataError (``error``); set
            `step_is_empty`, so that the caller can skip the optimizer (``skip``); or do nothing, so
            that momentum and weight decay still move the model (``train``).
        mismatch: after a step with masks or tokens other than the counted ones, raise DataError
            (``stop``); or print the error, count it in the report ``"mismatches"``, and go on
            (``warn``). The first step with tokens always raises.
        count: count a step ``before`` its first forward pass, from batches that are drawn ahead; or
            at its ``end``, microbatch by microbatch as they train, without drawing ahead. At the
            end, every group that the aggregation reads by id must be whole in one microbatch, and
            several terms must have the same denominator; see `stream`.
        aggregate_evaluation: also aggregate forward-only calls; otherwise they are left alone.
        prefetch: draw the next step's batches while this step computes, even if Megatron's loop
            reads a torch ``DataLoader`` without a `Prefetch`.
        audit: measure Megatron's scaling again for every new number of microbatches, and print it.
        trust_unmeasured: accept a model whose averaging cannot be measured, as if Megatron's
            DistributedDataParallel averaged it.
        settings: extra settings, compared across ranks and printed in the log's first lines.

    Attributes:
        terms: `Term` by name; between steps a term may be replaced, on every rank, by one with
            another multiplier.
        also: further aggregations under which the first term's loss is reported.
        split: the declared split, or ``zigzag``.
        step_is_empty: True after a training step without an active token, on every rank; always
            False unless ``empty_step`` is ``skip``.
        num_mismatches: number of this rank's steps with such an error so far, under
            ``mismatch="warn"``.

    Raises:
        OptionError: an unknown option, bad terms, or an extension that is not an `Extension`.
    """

    def __init__(
        self,
        aggregation: LossAggregation | Mapping[str, Term | LossAggregation],
        *,
        read_batch: ReadBatch = read_batch,
        read_step: ReadStep | None = None,
        split: str | None = None,
        also: Sequence[str | LossAggregation] = (),
        extensions: Iterable[Extension] = (),
        empty_step: str = "train",
        mismatch: str = "stop",
        count: str = "before",
        aggregate_evaluation: bool = False,
        prefetch: bool = False,
        audit: bool = False,
        trust_unmeasured: bool = False,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        _check_choice("empty_step", empty_step, ("train", "error", "skip"))
        _check_choice("mismatch", mismatch, ("stop", "warn"))
        _check_choice("count", count, ("before", "end"))
        if split is not None:
            _check_choice("split", split, SPLITS)
        self.has_named_terms = not isinstance(aggregation, LossAggregation)
        if isinstance(aggregation, LossAggregation):
            aggregation = {aggregation.label: aggregation}
        self.terms = named_terms(aggregation)
        if "lm" in self.terms:
            raise OptionError(
                "a term must have a name other than 'lm', since 'lm loss' is the mean over tokens. "
                "Rename it."
            )
        self.units = units_read(self.terms)
        self.also = also_aggregations(also, self.terms)
        self.extensions = [*([ModeReports(self.also)] if also else []), *extensions]
        for extension in self.extensions:
            _check_extension(extension)
        if mismatch == "warn":
            self.extensions.append(_MismatchReports(self))
        self.read_batch = reader_for(read_batch, self.terms)
        self.read_step = read_step
        self.split = split or SPLITS[0]
        self.split_is_declared = split is not None
        self.empty_step = empty_step
        self.step_is_empty = False
        self.mismatch = mismatch
        self.num_mismatches = 0
        self.count = count
        self.aggregate_evaluation = aggregate_evaluation
        self.prefetch = prefetch
        self.audit = audit
        self.trust_unmeasured = trust_unmeasured
        self.verified = Verified()
        self.settings = dict(settings or {})
        self._open_step: Step | Stream | None = None
        if count == "end":
            check_end_counted(self)
            if read_step is not None or prefetch:
                raise OptionError(
                    "count 'end' draws no batch ahead, got read_step or prefetch. Drop it, or choose "
                    "count 'before' (--loss-aggregation-count)."
                )
        hooks.add(self)

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's schedule, from ``get_forward_backward_func()``, with its loss aggregated.

        Returns:
            a function that takes the schedule's arguments by keyword and returns its result.

        Raises:
            HostError: not one of Megatron's schedules, or one that already has a hook.
            AggregationError: when called.
        """
        schedule = original(forward_backward)
        _check_schedule(schedule)
        defaults = default_arguments(schedule)

        @functools.wraps(schedule)
        def wrapped(**arguments: Any) -> Any:
            arguments = {**defaults, **arguments}
            is_training = not arguments.get("forward_only")
            is_aggregated = is_training or self.aggregate_evaluation
            # With ``collect_non_loss_data`` the call collects outputs and computes no loss.
            if not is_aggregated or arguments.get("collect_non_loss_data"):
                return schedule(**arguments)
            call = Call.of(arguments, self.terms, self.split)
            # An evaluation between the calls of a step is not part of it.
            step = self._open_step if is_training else None
            return (step or self._new_step(call)).run(schedule, call)

        setattr(wrapped, _HOOK, self)  # `functools.wraps` copies it to wrappers
        return wrapped

    @contextlib.contextmanager
    def step(self, microbatches: Sequence[TermMicrobatches]) -> Iterator[None]:
        """Make several forward-backward calls one optimizer step:

            with hook.step(microbatches):
                forward_backward(num_microbatches=2, **the_rest)
                forward_backward(num_microbatches=6, **the_rest)

        Each training call inside takes the next ``num_microbatches``; the hook reads nothing from
        its iterator. The step is counted once, by the first call. In the last call, Megatron
        reduces and scales the gradients, and the losses of all calls are compared with the plan.
        The number of calls may differ between data-parallel ranks. Reports are partial: sum both
        elements of the pairs over all calls, then divide.

        Args:
            microbatches: this data-parallel rank's whole step, in the order of the calls. All ranks
                of one model replica pass a list of the same length; ranks that read no data ignore
                its elements.

        Raises:
            DataError: no microbatch; the block ends with microbatches left; or a step is open already.
            HostError: in a first call of several: the model has losses that Megatron averages over each
                call (routers, MTP, DSA's indexer), without ``calculate_per_token_loss``.
        """
        self._check_no_open_step("hook.step")
        microbatches = listed(microbatches)
        if not microbatches:
            raise DataError(
                "hook.step must get a microbatch on every rank, since the others wait for its counts, "
                "got none. Give one with a mask of 0, or use hook.stream, where a rank may make no call."
            )
        self._open_step = step = Step(self, microbatches)
        try:
            yield
            if step.num_taken < len(microbatches):
                raise DataError(
                    f"the calls inside hook.step must take all of its {len(microbatches)} "
                    f"microbatches, got {step.num_taken}. Let their num_microbatches add up to "
                    "that."
                )
        finally:
            self._open_step = None

    @contextlib.contextmanager
    def stream(self, model: Any = None, pg_collection: Any = None) -> Iterator[None]:
        """Make all training calls inside one optimizer step that is counted as it trains:

            with hook.stream():
                for batches in arriving:  # any number, even none; each rank has its own
                    forward_backward(data_iterator=iter(batches), num_microbatches=len(batches), ...)
            optimizer.step()

        Each call is counted by its model replica alone, and adds to the gradients. Leaving the block
        counts the step over all ranks, reduces the gradients and divides them, by
        ``config.finalize_model_grads_func`` or Megatron's ``finalize_model_grads``. Reports are
        partial: sum both elements of the pairs over all calls and ranks, then divide.

        Every group that the aggregation reads by id, such as a prompt, must be whole in one call of
        one data-parallel rank, and in one microbatch if the losses decide their masks
        (`MaskedLosses`). Several terms must have the same denominator. The modes ``custom`` and
        ``dataset_mean``, losses that Megatron itself adds (routers, MTP), its FSDP and dynamic
        context parallelism are refused. In mode ``sum``, the reported loss is infinite if the first
        data-parallel rank makes no call.

        Args:
            model: the schedule's argument, needed on a rank that makes no call.
            pg_collection: likewise, if the schedule gets one.

        Raises:
            DataError: a group in two calls (on all ranks, when the block ends); no model on a rank
                without a call; or a step that is open already.
            OptionError, HostError: a mode or model that cannot be counted at the end of a step; or
                ``model`` with ``overlap_param_gather``, for which every rank must make a call.
        """
        self._check_no_open_step("hook.stream")
        arguments = {"model": model, "pg_collection": pg_collection}
        self._open_step = stream = Stream(self, arguments)
        try:
            with warning_of_partial_gradients():
                yield
                self._open_step = None
                stream.finish()
        finally:
            self._open_step = None

    def _new_step(self, call: Call) -> Step | EndCountedStep:
        is_counted_at_end = self.count == "end" and call.trains
        return EndCountedStep(self) if is_counted_at_end else Step(self)

    def _check_no_open_step(self, name: str) -> None:
        if self._open_step is not None:
            raise DataError(
                f"{name} must not be opened inside another step. Leave the first block first."
            )

    def measure_scaling(self, call: Call, is_first: bool) -> None:
        """Measure and check Megatron's scaling in a first step; under ``audit``, if it is new."""
        is_new = call.scale not in self.verified.scales
        # All ranks must measure together, but it may be new on only some data-parallel ranks.
        if is_first or any_rank(is_new, call.groups.dp):
            self.verified.factor = check_scaling(call, self.trust_unmeasured)
            self.verified.scales.add(call.scale)
            if self.audit and torch.distributed.get_rank() == 0:
                print(audit_lines(self.verified.factor, call.scale), flush=True)

    def warn_of_mismatch(self, error: AggregationError) -> None:
        """Print and count a step's error; training goes on."""
        self.num_mismatches += 1
        print(f"megatron_loss_agg: training continues, but {error}", file=sys.stderr, flush=True)

    def compared_settings(self) -> dict[str, object]:
        """Settings that must be the same on every rank."""
        return {
            "terms": terms_in_words(self.terms),
            "also": [aggregation_in_words(agg) for agg in self.also],
            "split": self.split,
            "empty_step": self.empty_step,
            "mismatch": self.mismatch,
            "count": self.count,
            "aggregate_evaluation": self.aggregate_evaluation,
            "audit": self.audit,
            "trust_unmeasured": self.trust_unmeasured,
            "extensions": [type(x).__name__ for x in self.extensions],
            **self.settings,
        }


class _MismatchReports(Extension):
    """Adds ``mismatches``: steps with an error that only warned, over all data-parallel ranks."""

    counts_at_end = True

    def __init__(self, hook: LossHook) -> None:
        self._hook = hook

    def on_loss(self, microbatch: MicrobatchLoss) -> None:
        ranks = microbatch.call.scale.data_parallel_size
        pair = microbatch.constant_pair(self._hook.num_mismatches * ranks)
        microbatch.report("mismatches", pair)


def _check_extension(extension: object) -> None:
    if not isinstance(extension, Extension):
        raise OptionError(
            f"extensions must be objects of class Extension, got {extension!r}. Derive it from "
            "megatron_loss_agg.mcore.Extension."
        )


def _check_schedule(schedule: Callable[..., Any]) -> None:
    """Raise HostError unless ``schedule`` is, or calls, one of Megatron's, and has no hook yet."""
    if hasattr(schedule, _HOOK):
        raise HostError(
            "a schedule must have one hook, got one that is already hooked. Wrap what "
            "get_forward_backward_func() returns, once, with all terms in that LossHook."
        )
    parameters = inspect.signature(schedule).parameters
    takes_any = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    if "forward_step_func" not in parameters and not takes_any:
        raise HostError(
            "hook.wrap must get a schedule, which takes forward_step_func, got "
            f"{function_name(schedule)}. Call it: hook.wrap(get_forward_backward_func())."
        )


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise OptionError(
            f"{name} must be one of {', '.join(choices)}, got {value!r}. Choose one ({name}=, or "
            f"--loss-aggregation-{name.replace('_', '-')})."
        )
