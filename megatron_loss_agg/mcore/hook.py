"""One call of Megatron's schedule, or several, as one exact optimizer step.

A call goes through two functions: `LossHook._run`, from the step's batches to its plan, and
`LossHook._loss`, from a microbatch's model output to the loss that Megatron differentiates.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Term, named_terms, units_by_id
from megatron_loss_agg.collectives import any_rank, broadcast_result, failing_together
from megatron_loss_agg.describe import aggregation_in_words, terms_in_words
from megatron_loss_agg.errors import DataError, HostError, OptionError
from megatron_loss_agg.mcore.batches import (
    DrawnBatches,
    DrawnTensors,
    ReadBatch,
    ReadStep,
    read_batch,
    read_now,
    reader_for,
    with_dataset_ids,
)
from megatron_loss_agg.mcore.call import Call, defaults_of, innermost, stock
from megatron_loss_agg.mcore.checks.ids import warn_of_restarting_ids
from megatron_loss_agg.mcore.checks.loss_function import (
    StockLoss,
    check_stock_losses,
    compare_stock_loss,
    function_of,
)
from megatron_loss_agg.mcore.checks.masks import (
    SumsOnRank,
    WholeTokens,
    check_mask_sums,
    check_split_was_verified,
    check_tokens,
    depends_on_split,
    has_several_samples,
    is_pack_of_several,
    sums_on_rank,
)
from megatron_loss_agg.mcore.checks.scaling import check_scaling
from megatron_loss_agg.mcore.checks.settings import (
    check_logits_are_split,
    check_same_on_all_ranks,
    check_settings,
)
from megatron_loss_agg.mcore.dynamic_cp import batches_of, with_cp_size
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.first_lines import audit_lines, first_lines, prints_first_lines
from megatron_loss_agg.mcore.forward_step import (
    ModelCalls,
    check_has_gradient,
    check_packing,
    hooks,
    merged_reports,
    name_of,
    observed_calls,
    script_losses,
)
from megatron_loss_agg.mcore.local_weights import starts_on_rank, weights_on_rank
from megatron_loss_agg.mcore.parts.modes import ModeReports, aggregations_beside
from megatron_loss_agg.mcore.prefetch import prefetch_of
from megatron_loss_agg.mcore.reports import (
    MicrobatchLoss,
    denominator_of,
    report_pair,
    token_mean_pair,
)
from megatron_loss_agg.mcore.split import SPLITS
from megatron_loss_agg.microbatch import MicrobatchOfTerms, listed
from megatron_loss_agg.plan import StepPlan, plan_of_first_term, plan_step
from megatron_loss_agg.weighted_sum import weighted_sum_unchecked

Plans = Mapping[str, StepPlan]
"""Of one step, by term."""
Wrapper = Callable[["LossHook", Callable[..., Any]], Callable[..., Any]]
"""(the hook, Megatron's schedule) -> a schedule that does more."""

_HOOK = "loss_hook"
"""Attribute of a hooked schedule: its `LossHook`."""

_ANOTHER_RANK_FAILED = (
    "another rank of the last pipeline stage failed while planning the step. Fix the error of that "
    "rank first."
)
_ANOTHER_RANK_DIFFERED = (
    "another rank's losses were not those that were planned. Fix the error of that rank first."
)


class LossHook:
    """Makes Megatron's schedule compute an exact loss, whatever averaging Megatron does itself.

    In a custom loop:

        hook = LossHook(LossAggregation(mode="prompt_mean"))
        forward_backward = hook.wrap(get_forward_backward_func())

    Every training call of ``forward_backward`` is one optimizer step; for a step of several calls
    see `step`. The forward step returns what Megatron's own does, per-token losses and
    ``partial(loss_func, loss_mask)``, or a `TokenLoss` or `SampleLoss` as the loss function. Reports
    of a stock loss function keep ``lm loss`` as the mean over tokens. Reports get the aggregated
    loss of the step, named ``"<mode> loss"`` or by the preset; both are pairs whose quotient it is.

    A loss of several terms, each with a denominator of its own:

        hook = LossHook({"policy": LossAggregation(mode="prompt_mean"),
                         "kl": Term(LossAggregation(mode="token_mean"), multiplier=0.01)})

    Its forward step returns a `TokenLoss` with losses by name. Reports get ``"<name> loss"`` for
    each, without its multiplier, and ``"loss"``, the weighted sum that is differentiated.

    Args:
        aggregation: of the loss; or several terms, by name, of which the first has Megatron's token
            count.
        read_batch: batch of the data iterator -> `Microbatch` with the whole mask; or a mapping by
            term, where their masks differ. The hook draws the step's batches before its first
            forward pass and then passes them to the schedule.
        read_step: (data iterator of the last model chunk, number of microbatches) -> list of that
            many `Microbatch` (or mappings by term), for loops that hold the step in memory or whose
            iterator must not be drawn ahead. The hook then draws nothing. It is called on
            tensor-parallel rank 0 of the last pipeline stage; for evaluations, too, if
            ``evaluates``.
        split: how the script splits tokens over context-parallel ranks: ``zigzag`` (inside every
            row or packed sequence), ``zigzag_pack`` (over the whole pack) or ``contiguous``. None:
            ``zigzag``. It is compared with the model's inputs in the first step; see docs/limits.md.
        also: further modes, presets or aggregations, under which the loss of the first term is
            reported, too.
        extensions: `Extension` objects, such as `DatasetReports`.
        wrappers: functions (hook, schedule) -> schedule, such as `aggregate_mtp` and
            `aggregate_routers`; their schedules run inside the hook.
        empty_step: in a step without an active token, raise DataError (``error``); set
            `step_is_empty`, so that the caller can skip the optimizer (``skip``); or do nothing, so
            that momentum and weight decay still move the model (``train``).
        evaluates: forward-only calls are aggregated, too; otherwise they are left alone.
        prefetches: draw the next step's batches behind this one's compute, also where Megatron's
            own loop reads a torch ``DataLoader`` without a `Prefetch`.
        audit: measure Megatron's scaling again for every new number of microbatches, and print it.
        trusts_unmeasured: go on with a model whose averaging cannot be measured, as if Megatron's
            DistributedDataParallel averaged it.
        settings: further settings that must be alike on every rank, which the log's first lines say.

    Attributes:
        terms: `Term` by name; one with another multiplier may replace it between steps, alike on
            every rank.
        also: aggregations under which the loss of the first term is reported, too.
        split: the declared split, or ``zigzag``.
        reports_total: whether reports get ``"loss"``, as of several terms.
        call, plans: of the call that is running; ``plans`` is None on stages without a loss.
        step_is_empty: whether the last training step was empty, the same on every rank; always
            False unless ``empty_step`` is ``skip``.

    Raises:
        OptionError: an unknown option, bad terms, or something that is no extension.
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
        wrappers: Iterable[Wrapper] = (),
        empty_step: str = "train",
        evaluates: bool = False,
        prefetches: bool = False,
        audit: bool = False,
        trusts_unmeasured: bool = False,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        _check_choice("empty_step", empty_step, ("train", "error", "skip"))
        if split is not None:
            _check_choice("split", split, SPLITS)
        self.reports_total = not isinstance(aggregation, LossAggregation)
        if isinstance(aggregation, LossAggregation):
            aggregation = {aggregation.label: aggregation}
        self.terms = named_terms(aggregation)
        if "lm" in self.terms:
            raise OptionError(
                "a term must have another name than 'lm', since 'lm loss' is the mean over tokens. "
                "Rename it."
            )
        self.also = aggregations_beside(also, self.terms)
        self.extensions = [*([ModeReports(self.also)] if also else []), *extensions]
        for extension in self.extensions:
            if not isinstance(extension, Extension):
                raise OptionError(
                    f"extensions must be objects of class Extension, got {extension!r}. Derive it from "
                    "megatron_loss_agg.mcore.Extension."
                )
        self.split = split or SPLITS[0]
        self.empty_step = empty_step
        self.step_is_empty = False
        self.call: Call | None = None
        self.plans: Plans | None = None
        self._split_is_declared = split is not None
        self._read_batch = reader_for(read_batch, self.terms)
        self._read_step = read_step
        self._wrappers = list(wrappers)
        self._evaluates = evaluates
        self._prefetches = prefetches
        self._audits = audit
        self._trusts_unmeasured = trusts_unmeasured
        self._settings = dict(settings or {})
        self._open_step: _OpenStep | None = None
        self._measured: float | None = None
        self._measured_scales: set[object] = set()
        self._printed: set[str] = set()  # kinds of calls whose first lines were printed
        # By model: whether a first training and a first evaluation call were verified.
        self._verified: WeakKeyDictionary[Any, set[bool]] = WeakKeyDictionary()
        self._checked_functions: set[object] = set()  # see `checks.loss_function`
        # All splits that fit the tokens that were compared; None: nothing was.
        self._fitting_splits: set[str] | None = None
        hooks.add(self)

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's schedule, from ``get_forward_backward_func()``, with its loss aggregated.

        Returns:
            a function that takes the schedule's arguments, by keyword, and returns its result.

        Raises:
            HostError: not a schedule of Megatron's, or one that has a hook already.
            AggregationError: when called.
        """
        schedule = stock(forward_backward)
        _check_schedule(schedule)
        for wrapper in self._wrappers:
            schedule = wrapper(self, schedule)
        defaults = defaults_of(schedule)

        @functools.wraps(schedule)
        def wrapped(**arguments: Any) -> Any:
            arguments = {**defaults, **arguments}
            computes_loss = not arguments.get("collect_non_loss_data")
            if computes_loss and (self._evaluates or not arguments.get("forward_only")):
                return self._run(schedule, arguments)
            return schedule(**arguments)

        setattr(wrapped, _HOOK, self)  # wrappers by `functools.wraps` have it, too
        return wrapped

    @contextlib.contextmanager
    def step(self, microbatches: Sequence[MicrobatchOfTerms]) -> Iterator[None]:
        """Make several forward-backward calls one optimizer step:

            with hook.step(microbatches):
                forward_backward(num_microbatches=2, **the_rest)
                forward_backward(num_microbatches=6, **the_rest)

        Each training call inside takes the next ``num_microbatches``; the hook reads nothing from
        its iterator. The step is counted once, by the first call; in the last one Megatron reduces
        and scales the gradients, and the losses of all are compared with the plan. Data-parallel
        ranks may make other numbers of calls. Reports are partial: sum both elements of the pairs
        over all calls, then divide.

        Args:
            microbatches: this data-parallel rank's whole step, in the order of the calls. All ranks
                of one model replica give a list of the same length; ranks that read no data ignore
                its elements.

        Raises:
            DataError: the block ends with microbatches left, or a step is open already.
        """
        if self._open_step is not None:
            raise DataError(
                "hook.step must not be opened inside another one. Leave the first block first."
            )
        self._open_step = step = _OpenStep(listed(microbatches))
        try:
            yield
            if step.taken < len(step.microbatches):
                raise DataError(
                    f"the calls inside hook.step must take all of its {len(step.microbatches)} "
                    f"microbatches, got {step.taken}. Let their num_microbatches add up to all."
                )
        finally:
            self._open_step = None

    def _run(self, schedule: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """One call of the schedule, which is one step or a part of it."""
        # 1. What Megatron was asked, its groups and scaling.
        call = Call.of(arguments)
        step = self._open_step if call.trains else None
        if step is not None:
            if call.draws_samples:
                raise HostError(
                    "hook.step must not go with hybrid context parallelism, whose schedule takes the "
                    "samples of a whole step, got a call inside of it. Leave hook.step out."
                )
            call = step.take(call)
        verified = self._verified.setdefault(call.chunks[0], set())
        is_first = call.trains not in verified

        # Checks before the first step.
        if is_first and call.begins_step:
            check_same_on_all_ranks(call, self._compared_settings())
            check_settings(call.config, getattr(call.chunks[0], "ddp_config", None))
        if call.trains and call.begins_step:
            self._check_scaling(call, is_first)

        # 2. and 3. Read the step's batches, count them, and give every rank its coefficients.
        if call.begins_step:
            records = _Records(is_first, call.data_iterator)
            plans = self._plan(call, step, records)
        else:
            assert step is not None and step.records is not None  # of its first call
            plans, records = step.plans, step.records
            records.iterator = call.data_iterator
        if step is None:
            self._fetch_next(call)
        else:
            step.plans, step.records = plans, records
        self.call, self.plans = call, plans
        if call.begins_step:
            for extension in self.extensions:
                extension.before_step(call, plans)

        # 4. to 6. happen in the loss function of each microbatch, see `_loss`.
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget_call)
            if not call.ends_step:
                stack.enter_context(call.without_reduction())
            forward_step, model_calls = call.arguments["forward_step_func"], None
            if plans is not None:
                records.compares_tokens = is_first or self._may_show_split(call, plans)
                if records.compares_tokens:
                    model_calls = stack.enter_context(observed_calls(call))
                forward_step = self._forward_step(call, plans, records, model_calls)
            result = schedule(**call.arguments_with(forward_step, records.iterator))

        # 7. The losses were those that were planned.
        if call.ends_step:
            self._check_step(call, plans, records)
        if is_first or (call.trains and self.empty_step == "skip"):
            is_empty = plans is not None and _is_empty(self.terms, plans)
            is_empty = any_rank(is_empty, call.groups.pp)  # other stages have no plan
            if call.trains:
                self.step_is_empty = is_empty and self.empty_step == "skip"
            if call.ends_step and not is_empty:
                verified.add(call.trains)
        return result

    def _loss(
        self,
        call: Call,
        plans: Plans,
        records: _Records,
        i: int,
        loss_function: Any,
        output: Any,
    ) -> tuple[Any, ...]:
        """The results of microbatch ``i`` for Megatron, in place of those of ``loss_function``."""
        # 4. What the script computes: the losses of each term, and the mask they are under.
        script = script_losses(call, plans, i, self.split, loss_function, output)
        reports = script.report
        first = plan_of_first_term(plans)
        holders = call.groups.holders(first.shapes[i])
        if depends_on_split(holders, plans, i, script.is_gathered):
            records.depend_on_split.add(i)

        weights: dict[str, Tensor] = {}
        starts: dict[str, Tensor | None] = {}
        parts: list[Tensor] = []
        sums: list[SumsOnRank] = []
        for name, term in script.terms.items():
            # 5. The weights of this rank's tokens: mask times coefficient.
            plan = plans[name]
            starts[name] = starts_on_rank(plan, i, term, holders, self.split)
            weights[name] = weights_on_rank(plan, i, term, holders, starts[name])

            # 6. The weighted sum, and its report.
            part = weighted_sum_unchecked(weights[name], term.losses)
            parts.append(_multiplied(part, self.terms[name].multiplier, term.losses))
            pair = report_pair(call, plan, part, denominator_of(plan))
            reports = merged_reports(reports, {f"{name} loss": pair})
            # For 7: sums to compare after the call.
            sums.append(
                sums_on_rank(holders, plan, i, term, weights[name], starts[name], records.is_first)
            )
        records.sums[i] = sums

        total = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        if self.reports_total and len(parts) == len(self.terms):
            reports = merged_reports(reports, {"loss": report_pair(call, first, total)})
        if script.returned is not None and "lm loss" in reports:
            (term,) = script.terms.values()
            reports["lm loss"] = token_mean_pair(call, first, term)
        for report, names in script.further_reports:
            reports = merged_reports(reports, _reported(report, names, script.terms, weights))

        microbatch = MicrobatchLoss(call, plans, i, script.terms, weights, starts, total, reports)
        for extension in self.extensions:
            extension.on_loss(microbatch)
        if call.trains and torch.is_grad_enabled():
            check_has_gradient(microbatch.total, output)
        if (call.trains, function_of(loss_function)) not in self._checked_functions:
            stock_loss = compare_stock_loss(call, holders, loss_function, script)
            if stock_loss is not None:
                records.stock_losses[i] = stock_loss

        num_tokens = _tokens_of_rank(call, first, i)
        return call.scale.returned(
            microbatch.total, num_tokens, first.counts.model_tokens, microbatch.reports
        )

    def _forward_step(
        self, call: Call, plans: Plans, records: _Records, model_calls: ModelCalls | None
    ) -> Callable[..., Any]:
        """The script's forward step, whose loss function is replaced by `_loss`.

        All that a loss depends on is bound here, since Megatron may compute it again. ``i`` counts
        the microbatches of the step, of which a call may have a part.
        """
        script_forward_step = call.arguments["forward_step_func"]

        def forward_step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            output, loss_function = script_forward_step(*args, **kwargs)
            model = args[1] if len(args) > 1 else kwargs.get("model")
            if len(call.chunks) > 1 and innermost(model) is not innermost(call.chunks[-1]):
                return output, loss_function  # the schedule does not ask for this one's loss
            i = records.forward_steps
            records.forward_steps += 1
            if model_calls is not None:
                of_model = model_calls.take()
                records.inputs[i] = of_model.integers
                check_packing(call, of_model.packing, plans, i)
                if of_model.labels is not None:
                    check_logits_are_split(call)
            return output, functools.partial(self._loss, call, plans, records, i, loss_function)

        return forward_step

    def _plan(self, call: Call, step: _OpenStep | None, records: _Records) -> Plans | None:
        """The plan of a step; None on stages without a loss."""
        groups, refuses_empty = call.groups, call.trains and self.empty_step == "error"
        of_model = [groups.comparing, groups.pp]
        read: Callable[[], Any] = functools.partial(self._read, call, step, records)
        if groups.dp_cp is not None and groups.reads_data:
            read = read_now(read)
        with failing_together(
            of_model, _ANOTHER_RANK_FAILED, when=records.is_first or refuses_empty
        ):
            if not groups.is_last_stage:
                return None
            make = functools.partial(plan_step, self.terms, read, groups.planning)
            plans = broadcast_result(make, groups.tp, 0)
            if refuses_empty and _is_empty(self.terms, plans):
                raise DataError(
                    "a step must have an active token, and every token is masked or rejected. Fix "
                    "the data, or choose skip or train (--loss-aggregation-empty-step, empty_step=)."
                )
            return plans

    def _read(
        self, call: Call, step: _OpenStep | None, records: _Records
    ) -> list[MicrobatchOfTerms]:
        """The microbatches of a step, on a rank that reads data."""
        number, tokens = call.scale.num_microbatches, records.tokens
        is_open = self._split_is_open(call)

        def is_compared(microbatch: MicrobatchOfTerms) -> bool:
            return records.is_first or (is_open and is_pack_of_several(microbatch))

        microbatches: list[MicrobatchOfTerms] = []
        tensors = DrawnTensors()
        if step is not None:
            microbatches = step.microbatches
        elif self._read_step is not None:
            microbatches = listed(self._read_step(call.data_iterator, number))
            if len(microbatches) != number and not call.draws_samples:
                raise DataError(
                    f"the function that reads a step must return {number} microbatches, one for each of "
                    f"the call, got {len(microbatches)}. Correct read_step."
                )
        else:
            items = 1 if call.draws_samples else number
            records.iterator = drawn = DrawnBatches(call.data_iterator, items)
            for _ in range(items):
                for batch in batches_of(call, drawn.draw()):
                    microbatch = with_cp_size(call, self._read_batch(batch), batch)
                    # Before the next one is drawn, maybe into the same memory.
                    if is_compared(microbatch):
                        tokens[len(microbatches)] = WholeTokens.of(microbatch, batch)
                    if records.is_first:
                        tensors.note(microbatch)
                    microbatches.append(microbatch)
            tensors.check_unchanged()
        for i, microbatch in enumerate(microbatches):
            if i not in tokens and is_compared(microbatch):
                tokens[i] = WholeTokens.of(microbatch)
        if not call.trains and "dataset" in units_by_id(self.terms):
            microbatches = with_dataset_ids(microbatches)
        return microbatches

    def _fetch_next(self, call: Call) -> None:
        """Start to draw the next step's batches by a `Prefetch`, if there is one."""
        draws_ahead = self._read_step is None and not call.draws_samples
        if draws_ahead and call.trains and call.groups.reads_data:
            prefetch = prefetch_of(call.data_iterator, insert=self._prefetches)
            if prefetch is not None:
                prefetch.fetch(call.scale.num_microbatches)

    def _check_scaling(self, call: Call, is_first: bool) -> None:
        is_new = call.scale not in self._measured_scales
        # The number of microbatches may be new on some data-parallel ranks only.
        if is_first or (self._audits and any_rank(is_new, call.groups.dp)):
            self._measured = check_scaling(call, self._trusts_unmeasured)
            self._measured_scales.add(call.scale)
            if self._audits and torch.distributed.get_rank() == 0:
                print(audit_lines(self._measured, call.scale), flush=True)

    def _check_step(self, call: Call, plans: Plans | None, records: _Records) -> None:
        """Raise unless the step's losses were those that were planned; in the first step everywhere.

        After the step's last call, since ranks may make other numbers of calls.
        """
        groups = call.groups
        of_model = [groups.tp, groups.cp, groups.pp, groups.dp]
        with failing_together(of_model, _ANOTHER_RANK_DIFFERED, when=records.is_first):
            if plans is not None:
                self._check_number_of_losses(plans, records)
        with failing_together(of_model, _ANOTHER_RANK_DIFFERED, when=records.is_first):
            if plans is not None:
                self._check_losses(call, plans, records)
        if records.is_first and plans is not None:
            self._print_first_lines(call, plans)

    def _check_number_of_losses(self, plans: Plans, records: _Records) -> None:
        expected = len(plan_of_first_term(plans).sizes)
        computed = len(records.sums)
        if computed != expected:
            raise HostError(
                f"the schedule must compute one loss for each of the {expected} microbatches, got "
                f"{computed}. Return a loss function from every forward step, and pass num_microbatches "
                "on unchanged."
            )

    def _check_losses(self, call: Call, plans: Plans, records: _Records) -> None:
        if records.compares_tokens:
            fitting = check_tokens(
                call,
                records.tokens,
                records.inputs,
                plans,
                records.depend_on_split,
                self.split,
                self._split_is_declared,
            )
            if fitting is not None:
                self._fitting_splits = fitting & (self._fitting_splits or fitting)
        elif records.depend_on_split:
            i = min(records.depend_on_split)
            check_split_was_verified(i, self._fitting_splits, self.split, self._split_is_declared)
        sums = [x for of_microbatch in records.sums.values() for x in of_microbatch]
        check_mask_sums(call, plans, sums, records.is_first)
        self._checked_functions |= check_stock_losses([*records.stock_losses.values()])
        if isinstance(records.iterator, DrawnBatches):
            records.iterator.check_taken()

    def _split_is_open(self, call: Call) -> bool:
        """Whether the tokens that were compared fit several splits, as those of rows do.

        Also if none were compared, as of packs that one rank held, or of padding alone.
        """
        if self._fitting_splits is None:
            is_split = dist.get_world_size(call.groups.comparing) > 1
            return call.groups.dp_cp is not None or (is_split and not self._split_is_declared)
        return len(self._fitting_splits) > 1

    def _may_show_split(self, call: Call, plans: Plans) -> bool:
        """Whether the step's packs may decide between the splits that earlier tokens fit."""
        if not self._split_is_open(call):
            return False
        if call.groups.dp_cp is not None:  # alike on all ranks, which have different packs
            return any(plan.has_split_packs for plan in plans.values())
        microbatches = range(len(plan_of_first_term(plans).sizes))
        return any(has_several_samples(plans, i) for i in microbatches)

    def _print_first_lines(self, call: Call, plans: Plans) -> None:
        """Print once for a step with tokens; before that, for a step without and an evaluation."""
        is_empty = _is_empty(self.terms, plans)
        kind = "step" if call.trains else "evaluation"
        if is_empty:
            kind = f"empty {kind}"
        if {"step", kind} & self._printed:
            return
        self._printed.add(kind)
        if prints_first_lines(call):
            split = self.split if self._fitting_splits else f"{self.split} (not verified)"
            further = [(name, str(value)) for name, value in self._settings.items()]
            for extension in self.extensions:
                further += extension.first_lines(plans).items()
            text = first_lines(call, self.terms, plans, is_empty, split, self._measured, further)
            print(text, flush=True)
            warn_of_restarting_ids(plans)

    def _compared_settings(self) -> dict[str, object]:
        return {
            "terms": terms_in_words(self.terms),
            "also": [aggregation_in_words(agg) for agg in self.also],
            "split": self.split,
            "empty_step": self.empty_step,
            "evaluates": self._evaluates,
            "audit": self._audits,
            "trusts_unmeasured": self._trusts_unmeasured,
            "extensions": [type(x).__name__ for x in self.extensions],
            "wrappers": [getattr(x, "__qualname__", type(x).__name__) for x in self._wrappers],
            **self._settings,
        }

    def _forget_call(self) -> None:
        self.call = self.plans = None


@dataclass
class _OpenStep:
    """The microbatches of a `LossHook.step`, which several calls take in turn."""

    microbatches: list[MicrobatchOfTerms]
    taken: int = 0
    plans: Plans | None = None  # on stages without a loss, and before the first call
    records: _Records | None = None

    def take(self, call: Call) -> Call:
        """``call`` with its place in the step; DataError for more microbatches than are left."""
        number, first = call.scale.num_microbatches, self.taken
        left = len(self.microbatches) - first
        if number > left:
            raise DataError(
                f"a call in a hook.step must take at most the {left} of {len(self.microbatches)} "
                f"microbatches that are left (a call that failed has taken its own), got "
                f"num_microbatches={number}. Correct it."
            )
        self.taken += number
        return replace(call, first_index=first, ends_step=number == left)


@dataclass
class _Records:
    """Results of one step that are compared after it; numbers stay on the device until then."""

    is_first: bool  # training step, or evaluation, of this model: it is verified
    iterator: Any  # that the schedule gets
    forward_steps: int = 0  # of the step that have run
    sums: dict[int, list[SumsOnRank]] = field(default_factory=dict)  # by microbatch
    stock_losses: dict[int, StockLoss] = field(default_factory=dict)  # likewise
    depend_on_split: set[int] = field(default_factory=set)  # microbatches
    tokens: dict[int, WholeTokens] = field(default_factory=dict)  # that may be compared
    compares_tokens: bool = False
    inputs: dict[int, Sequence[Tensor] | None] = field(default_factory=dict)  # of the model's calls


def _is_empty(terms: Mapping[str, Term], plans: Plans) -> bool:
    """Whether every token of the step is masked or rejected, in all terms that have a multiplier."""
    of_loss = [plan for name, plan in plans.items() if terms[name].multiplier]
    return all(plan.is_empty for plan in of_loss or plans.values())


def _tokens_of_rank(call: Call, plan: StepPlan, i: int) -> int:
    """Token count that this rank returns to Megatron for microbatch ``i``.

    The floors of ``(tokens + rank) / size`` over context-parallel ranks add up to the tokens. The
    last call of a step also returns the tokens of earlier calls, since Megatron dropped their counts
    with its finalization (`Call.without_reduction`).
    """
    counts_earlier_calls = i == call.first_index and call.ends_step
    counted = range(i + 1) if counts_earlier_calls else [i]
    tokens = 0
    for k in counted:
        holders = call.groups.holders(plan.shapes[k])
        tokens += (plan.model_tokens[k] + holders.rank) // holders.size
    return tokens


def _multiplied(part: Tensor, multiplier: float, losses: Tensor) -> Tensor:
    """``multiplier * part``, a weighted sum of ``losses``; for 0 it is 0 even if they are NaN."""
    if multiplier == 0:
        return weighted_sum_unchecked(torch.zeros_like(losses), losses).to(part.dtype)
    return part if multiplier == 1 else multiplier * part


def _reported(
    report: Callable[[Any, Any], Mapping[str, Any]],
    names: Sequence[str],
    terms: Mapping[str, Any],
    weights: Mapping[str, Tensor],
) -> Mapping[str, Any]:
    """A script's report of losses and weights, each by term if there are several."""
    losses = {name: terms[name].losses for name in names}
    of_names = {name: weights[name] for name in names}
    if len(names) == 1:
        (name,) = names
        return report(losses[name], of_names[name])
    return report(losses, of_names)


def _check_schedule(schedule: Callable[..., Any]) -> None:
    """Raise HostError unless ``schedule`` is one of Megatron's, or calls one, and has no hook yet."""
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
            f"{name_of(schedule)}. Call it: hook.wrap(get_forward_backward_func())."
        )


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise OptionError(
            f"{name} must be one of {', '.join(choices)}, got {value!r}. Choose one ({name}=, or "
            f"--loss-aggregation-{name.replace('_', '-')})."
        )
