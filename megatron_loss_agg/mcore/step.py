"""One optimizer step: a call of Megatron's schedule, and each microbatch inside it.

With the mask ``m`` and the loss ``l`` of each token, the loss of a step is

    sum_s c_s sum_{t in s} m_t l_t        over the tokens t of all samples s of the step

The coefficient ``c_s`` of a sample depends only on the masks of the whole step. So `Step.run` reads
and counts all batches before the first forward pass; the result is a plan with the coefficients.
`Step.loss` is then the loss function of each microbatch: it adds up ``m_t c_s l_t`` over the tokens
of its rank, and undoes the averaging that Megatron will apply.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import Unit
from megatron_loss_agg.collectives import any_rank, failing_in_broadcast, failing_together
from megatron_loss_agg.errors import DataError, HostError, PeerError
from megatron_loss_agg.exchange import failing_in_exchange
from megatron_loss_agg.mcore.batches import DrawnBatches
from megatron_loss_agg.mcore.call import Call, innermost, without_reduction
from megatron_loss_agg.mcore.checks.before import (
    check_added_losses,
    check_same_on_all_ranks,
    check_settings,
)
from megatron_loss_agg.mcore.checks.loss_function import (
    StockLoss,
    check_stock_losses,
    note_stock_loss,
)
from megatron_loss_agg.mcore.checks.memory import DrawnTensors
from megatron_loss_agg.mcore.checks.sums import TermSums, check_sums, note_sums
from megatron_loss_agg.mcore.checks.tokens import TokenNotes, check_split, dependent_microbatches
from megatron_loss_agg.mcore.dynamic_cp import batches_on_rank, read_now, with_cp_size
from megatron_loss_agg.mcore.first_lines import print_first_lines
from megatron_loss_agg.mcore.forward_step import (
    ScriptLosses,
    check_has_gradient,
    function_key,
    merged_reports,
    script_losses,
    tensors_in,
)
from megatron_loss_agg.mcore.parts.datasets import with_dataset_ids
from megatron_loss_agg.mcore.prefetch import Prefetch, fetch_ahead
from megatron_loss_agg.mcore.reports import MicrobatchLoss, aggregated_pair, token_mean_pair
from megatron_loss_agg.mcore.scale import MegatronScale
from megatron_loss_agg.mcore.split import TermSamples, weights_on_rank
from megatron_loss_agg.microbatch import TermMicrobatches, listed
from megatron_loss_agg.plan import StepPlan, broadcast_plans, plan_of_first_term, plan_step
from megatron_loss_agg.tensors import at_least_fp32
from megatron_loss_agg.weighted_sum import weighted_sum_unchecked

if TYPE_CHECKING:
    from megatron_loss_agg.mcore.hook import LossHook

Plans = Mapping[str, StepPlan]
"""The plans of one step, by term."""

_ANOTHER_RANK_FAILED = (
    "another rank of the last pipeline stage failed while planning the step. Fix the error of that "
    "rank first."
)
_ANOTHER_RANK_DIFFERED = (
    "another rank's losses were not the planned ones. Fix the error of that rank first."
)


@dataclass
class Verified:
    """Results of earlier steps' checks; later steps need not repeat them."""

    scales: set[MegatronScale] = field(default_factory=set)
    factor: float | None = None  # the measured gradients as a multiple of the planned ones
    loss_functions: set[object] = field(default_factory=set)  # see `checks.loss_function`
    splits: set[str] | None = None  # those that fit all compared tokens; None: none compared yet
    printed: set[str] = field(default_factory=set)  # kinds of calls with first lines in the log
    # By model, since Megatron's scaling depends on its data-parallel wrapper; and by kind of call,
    # since an evaluation may have different data and a different loss function than training, and a
    # step that is counted at its end is scaled differently.
    _runs: WeakKeyDictionary[Any, set[tuple[bool, bool]]] = field(default_factory=WeakKeyDictionary)

    def has_run(self, call: Call) -> bool:
        """True if a step, or an evaluation, of this model has passed all checks."""
        return (call.trains, call.groups.is_end_counted) in self._runs.get(call.chunks[0], ())

    def add_run(self, call: Call) -> None:
        kind = call.trains, call.groups.is_end_counted
        self._runs.setdefault(call.chunks[0], set()).add(kind)

    def split_matters(self, call: Call) -> bool:
        """True if a step may depend on a split that was not verified.

        This is also True after a step with only padding and, with dynamic context parallelism, as
        long as each pack was held by a single rank.
        """
        is_split = torch.distributed.get_world_size(call.groups.split_group) > 1
        return is_split and self.splits != {call.split}


class Step:
    """One optimizer step of a hook: one call of Megatron's schedule, or several.

    Args:
        microbatches: from `LossHook.step`, if the step has several calls; None: the step is one
            call, and its batches come from the data iterator.
    """

    def __init__(self, hook: LossHook, microbatches: list[TermMicrobatches] | None = None) -> None:
        self.hook = hook
        self.microbatches = microbatches
        self.empty_step = hook.empty_step
        self.num_taken = 0  # number of microbatches in the calls so far
        self.is_planned = False
        self.plans: Plans | None = None  # None on pipeline stages without a loss
        self.samples: Mapping[str, TermSamples] = {}  # by term: the samples' part on this rank
        self.is_first = False  # the model's first training step, or evaluation: check everything
        self.iterator: Any = None  # for the schedule: repeats the batches that the hook drew
        self.num_forward_steps = 0  # of the last model chunk, so far
        # Notes to compare after the step; numbers stay on the device until then.
        self.sums: dict[int, list[TermSums]] = {}  # by microbatch
        self.stock_losses: dict[int, StockLoss] = {}  # by microbatch
        self.gathered: set[int] = set()  # microbatches with losses in the order of the split
        self.tokens: TokenNotes | None = None  # None if no tokens are to be compared

    def run(self, schedule: Callable[..., Any], call: Call) -> Any:
        """Make one call of the schedule: the whole step, or its next part."""
        # 1. The call: Megatron's arguments, and the offset of its microbatches in the step.
        call = self._next(call)
        if call.begins_step:
            self._check_before(call)
            # 2. Read the step's batches. 3. Count them over all ranks: every sample gets its
            # coefficient. A loss of several terms has a plan for each.
            self.plans = plans = self._plan(call)
            self.samples = {name: TermSamples(call, plan) for name, plan in (plans or {}).items()}
            self.is_planned = True
        with self._running(call):
            # 4. to 6. happen in the loss function of each microbatch: `loss`.
            result = schedule(**call.arguments_with(self._forward_step(call), self.iterator))
        if call.ends_step:
            # 7. Check that the losses had the counted masks. Not earlier, since comparing waits for
            # the device and for other ranks.
            self._check_after(call)
        return result

    def loss(
        self, call: Call, plans: Plans, i: int, loss_function: Any, output: Any
    ) -> tuple[Any, ...]:
        """The results of microbatch ``i`` for Megatron, instead of those of ``loss_function``."""
        # 4. Losses: the script's, by term, not reduced, with the masks of their tokens.
        script = script_losses(call, plans, i, loss_function, output)
        return self._aggregated(call, plans, i, script, loss_function, output)

    def _aggregated(
        self,
        call: Call,
        plans: Plans,
        i: int,
        script: ScriptLosses,
        loss_function: Any,
        output: Any,
    ) -> tuple[Any, ...]:
        """The weighted sum of the losses, in the form that Megatron expects."""
        samples, weights, sums = {}, {}, {}
        for name, term in script.terms.items():
            # 5. Weights: the mask times the coefficient of each sample, for this rank's tokens.
            samples[name] = self.samples[name].in_microbatch(i, term)
            weights[name] = weights_on_rank(samples[name], term)
            # 6. Sum. "Unchecked", since the shapes have already been compared.
            sums[name] = weighted_sum_unchecked(weights[name], term.losses)
        microbatch = MicrobatchLoss(
            call,
            plans,
            i,
            script.terms,
            weights,
            samples,
            total=_total(call, output, script, sums),
            reports=self._reports(call, plans, script, weights, sums),
            stock_loss=script.stock_loss,
        )
        for extension in self.hook.extensions:
            extension.on_loss(microbatch)
        # An evaluation may lack terms: the total of the others is not the loss.
        if self.hook.has_named_terms and len(sums) == len(plans):
            microbatch.report("loss", microbatch.pair(microbatch.total, call.scale.denominator))
        self._note(microbatch, script, output)
        if script.stock_loss is not None:
            self._use_stock_loss(microbatch, script, loss_function)
        # Megatron averages its losses over microbatches and ranks, or by tokens. Multiplying by the
        # inverse of that factor gives the gradients of the sum.
        first = plan_of_first_term(plans)
        num_tokens = _tokens_on_rank(call, first, i)
        return call.scale.returned(
            microbatch.total, num_tokens, first.counts.model_tokens, microbatch.reports
        )

    def _next(self, call: Call) -> Call:
        """Return ``call`` with its offset in the step.

        Raises:
            DataError: the call has more microbatches than are left.
        """
        if self.microbatches is None:
            return call
        if call.draws_samples:
            raise HostError(
                "hook.step must not be used with hybrid context parallelism, whose schedule takes "
                "the samples of a whole step, got a call inside it. Leave hook.step out."
            )
        number, first_index = call.scale.num_microbatches, self.num_taken
        if first_index and not self.is_planned:
            raise DataError(
                "a step must be planned by its first call, but that call failed, got a further "
                "call in its hook.step. Leave the block, and start the step again."
            )
        left = len(self.microbatches) - first_index
        if number > left:
            raise DataError(
                f"a call in a hook.step must take at most the {left} of {len(self.microbatches)} "
                "microbatches that are left (a failed call uses up its own), got "
                f"num_microbatches={number}. Correct it."
            )
        self.num_taken += number
        return replace(call, first_index=first_index, ends_step=number == left)

    def _check_before(self, call: Call) -> None:
        """Check settings and measure Megatron's scaling; begin to note tokens if any are compared."""
        hook = self.hook
        # Settings, models and scripts do not change in a run: results of the first step hold later.
        self.is_first = not hook.verified.has_run(call)
        if self.is_first:
            check_same_on_all_ranks(call, hook.compared_settings())
        self._check_on_rank(call)
        if call.trains and (self.is_first or hook.audit):
            hook.measure_scaling(call, self.is_first)

    def _check_on_rank(self, call: Call) -> None:
        """The part of `_check_before` in which ranks do not communicate."""
        verified = self.hook.verified
        if self.is_first:
            check_settings(call.config, getattr(call.chunks[0], "ddp_config", None))
        if self.is_first or verified.split_matters(call):
            self.tokens = TokenNotes(self.is_first, verified.splits)

    def _plan(self, call: Call) -> Plans | None:
        """The plans of the step; None on pipeline stages without a loss."""
        groups = call.groups
        must_have_tokens = call.trains and self.empty_step == "error"
        self.iterator = call.data_iterator
        read: Callable[[], list[TermMicrobatches]] = functools.partial(self._read, call)
        if groups.dp_cp is not None and groups.reads_data:
            # With dynamic context parallelism the loader communicates. If it fails on this rank,
            # the other ranks wait in the loader's collective, not in one of ours.
            read = read_now(read)
        # Errors of a first step, and of an empty one, are raised on all ranks of the model; in other
        # steps ranks need not wait for each other. A failure spreads from the ranks of a microbatch,
        # all on the last stage, to the earlier stages.
        with failing_together(
            [groups.split_group, groups.pp],
            _ANOTHER_RANK_FAILED,
            when=self.is_first or must_have_tokens,
        ):
            if not groups.is_last_stage:
                # In a later step nobody tells this stage of the error.
                check_added_losses(call, self.hook.extensions)
                return None
            plans = counted(call, self.hook.units, read)
            if must_have_tokens and is_empty(call, plans):
                raise empty_step_error()
        return plans

    def _read(self, call: Call) -> list[TermMicrobatches]:
        """The microbatches of the step, on a rank that reads data."""
        read_step, number = self.hook.read_step, call.scale.num_microbatches
        check_added_losses(call, self.hook.extensions)
        if self.microbatches is not None:
            microbatches = self.microbatches
        elif read_step is None:
            microbatches = self._draw(call, number)
        else:
            microbatches = listed(read_step(call.data_iterator, number))
            if len(microbatches) != number and not call.draws_samples:
                raise DataError(
                    f"the function that reads a step must return {number} microbatches, one for each "
                    f"of the call, got {len(microbatches)}. Correct read_step."
                )
        if self.tokens is not None:
            for i, microbatch in enumerate(microbatches):
                self.tokens.note_batch(i, microbatch)
        return microbatches if call.trains else with_dataset_ids(call.terms, microbatches)

    def _draw(self, call: Call, number: int) -> list[TermMicrobatches]:
        """The microbatches of the batches that the call's forward steps will take."""
        microbatches: list[TermMicrobatches] = []
        tensors = DrawnTensors(self.hook) if self.is_first else None
        # With hybrid context parallelism, one item holds the samples of the whole step.
        num_items = 1 if call.draws_samples else number
        self.iterator = drawn = DrawnBatches(call.data_iterator, num_items)
        for _ in range(num_items):
            item = drawn.draw()
            for batch in batches_on_rank(call, item) if call.draws_samples else [item]:
                microbatch = self.hook.read_batch(batch)
                if call.groups.dp_cp is not None:
                    microbatch = with_cp_size(microbatch, batch)
                if self.tokens is not None:
                    # Copy before the next batch is drawn, perhaps into the same memory.
                    self.tokens.note_batch(len(microbatches), microbatch, batch)
                if tensors is not None:
                    tensors.note(microbatch)
                microbatches.append(microbatch)
        if tensors is not None:
            tensors.check_unchanged()
        return microbatches

    @contextlib.contextmanager
    def _running(self, call: Call) -> Iterator[None]:
        """Enter the extensions, and keep Megatron from reducing before the step's last call."""
        if self.microbatches is not None:
            self.iterator = call.data_iterator  # every call may have a different one
        elif self.hook.read_step is None:
            self._fetch_next(call)
        with contextlib.ExitStack() as stack:
            for extension in self.hook.extensions:
                stack.enter_context(extension.around(call, self.plans))
            if not call.ends_step:
                stack.enter_context(without_reduction(call.chunks, call.config))
            yield

    def _fetch_next(self, call: Call) -> None:
        """With a `Prefetch`, start drawing the next step's batches while this step computes."""
        if call.trains and call.groups.reads_data and not call.draws_samples:
            iterator: Any = call.data_iterator
            if self.hook.prefetch or isinstance(getattr(iterator, "iterable", iterator), Prefetch):
                fetch_ahead(iterator, call.scale.num_microbatches, insert=self.hook.prefetch)

    def _forward_step(self, call: Call) -> Callable[..., Any]:
        """The script's forward step with `loss` instead of its loss function."""
        script_forward_step: Callable[..., Any] = call.arguments["forward_step_func"]
        if self.plans is None:
            return script_forward_step
        plans, tokens = self.plans, self.tokens
        number = len(plan_of_first_term(plans).sizes)
        if tokens is not None and not tokens.may_differ(call, plans):
            tokens = self.tokens = None

        def forward_step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            model = args[1] if len(args) > 1 else kwargs.get("model")
            if len(call.chunks) > 1 and innermost(model) is not innermost(call.chunks[-1]):
                return script_forward_step(*args, **kwargs)  # only the last chunk computes a loss
            # The schedules take microbatches in order. The index is in the step, not in the call.
            i = self.num_forward_steps
            self.num_forward_steps += 1
            if i == number:
                raise HostError(
                    f"a forward step must run once for each of the {number} microbatches, got one "
                    "more. Call it once for each, without trial runs."
                )
            with contextlib.nullcontext() if tokens is None else tokens.observing(call, plans, i):
                output, loss_function = script_forward_step(*args, **kwargs)
            # Bind everything that the loss depends on, since Megatron may compute it again after
            # later forward steps have run.
            return output, functools.partial(self.loss, call, plans, i, loss_function)

        return forward_step

    def _reports(
        self,
        call: Call,
        plans: Plans,
        script: ScriptLosses,
        weights: Mapping[str, Tensor],
        sums: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        """The script's reports, and the aggregated loss of each term."""
        pairs = {f"{name} loss": aggregated_pair(call, plans[name], x) for name, x in sums.items()}
        reports = merged_reports(script.report, pairs)
        for report, names in script.further_reports:
            reports = merged_reports(reports, _reported(report, names, script, weights))
        return reports

    def _note(self, microbatch: MicrobatchLoss, script: ScriptLosses, output: Any) -> None:
        """Note the sums for the comparison after the step; check that the loss has a gradient."""
        call, plans, i = microbatch.call, microbatch.plans, microbatch.i
        if script.is_gathered:
            self.gathered.add(i)
        self.sums[i] = [
            note_sums(
                microbatch.samples[name],
                plans[name],
                i,
                term,
                microbatch.weights[name],
                self.is_first,
            )
            for name, term in script.terms.items()
        ]
        if call.trains and torch.is_grad_enabled():
            # Check now, since the backward pass would fail without naming the cause.
            check_has_gradient(microbatch.total, output)

    def _use_stock_loss(
        self, microbatch: MicrobatchLoss, script: ScriptLosses, loss_function: Any
    ) -> None:
        """Correct the report ``lm loss``, and note the loss if its function is not verified yet."""
        # A function may compute more in training than in an evaluation.
        function = microbatch.call.trains, function_key(loss_function)
        is_verified = function in self.hook.verified.loss_functions
        stock_loss = microbatch.stock_loss
        if "lm loss" in microbatch.reports:
            # A verified function has computed the masked sum already.
            has_sum = is_verified and script.has_token_count
            pair = token_mean_pair(microbatch, stock_loss if has_sum else None)
            microbatch.reports["lm loss"] = pair
        if stock_loss is None or is_verified:
            return
        ((name, term),) = script.terms.items()
        cp = microbatch.samples[name].cp
        note = note_stock_loss(cp, function, stock_loss, script.has_token_count, term)
        if note is not None:
            self.stock_losses[microbatch.i] = note

    def _check_after(self, call: Call) -> None:
        """Raise unless the losses of the step had the counted masks and tokens.

        This runs once per step, after its last call, since ranks may differ in the number of calls.
        """
        hook, plans, groups = self.hook, self.plans, call.groups
        self._check_losses(call)
        if self.is_first and plans is not None:
            print_first_lines(hook, call, plans, is_empty(call, plans))
        if self.is_first or (call.trains and self.empty_step == "skip"):
            is_empty_here = plans is not None and is_empty(call, plans)
            is_empty_step = any_rank(is_empty_here, groups.pp)  # other stages have no plan
            if call.trains:
                hook.step_is_empty = is_empty_step and self.empty_step == "skip"
            # A step without tokens has nothing to compare: the next one counts as the first again.
            if not is_empty_step:
                hook.verified.add_run(call)

    def _check_losses(self, call: Call) -> None:
        """Compare the losses with the plan; on other stages, wait for the result in the first step."""
        plans = self.plans
        # Only in the first step: mistakes show in it, and later steps should not make ranks wait
        # for each other.
        groups = call.groups.counting_groups
        with failing_together(groups, _ANOTHER_RANK_DIFFERED, when=self.is_first):
            if plans is not None:
                self._check_number_of_losses(plans)
        # A separate block, since ranks communicate while they compare.
        with failing_together(groups, _ANOTHER_RANK_DIFFERED, when=self.is_first):
            if plans is not None:
                self._compare_or_warn(call, plans)

    def _check_number_of_losses(self, plans: Plans) -> None:
        expected, computed = len(plan_of_first_term(plans).sizes), len(self.sums)
        if computed != expected:
            raise HostError(
                f"the schedule must compute one loss for each of the {expected} microbatches, got "
                f"{computed}. Return a loss function from every forward step, and pass num_microbatches "
                "on unchanged."
            )
        if isinstance(self.iterator, DrawnBatches):
            self.iterator.check_taken()

    def _compare_or_warn(self, call: Call, plans: Plans) -> None:
        try:
            self._compare(call, plans)
        except (DataError, PeerError) as error:
            if self.is_first or self.hook.mismatch == "stop":
                raise
            self.hook.warn_of_mismatch(error)

    def _compare(self, call: Call, plans: Plans) -> None:
        """Compare the step's notes with its plan."""
        hook, verified = self.hook, self.hook.verified
        if self.tokens is not None or verified.split_matters(call):
            dependent = dependent_microbatches(call, plans, self.gathered)
            is_declared = hook.split_is_declared
            if self.tokens is not None:
                verified.splits = self.tokens.compare(
                    call, plans, dependent, is_declared, verified.splits
                )
            elif dependent:
                check_split(dependent[0], verified.splits, call.split, is_declared)
        notes = [note for microbatch in self.sums.values() for note in microbatch]
        check_sums(call, plans, notes)
        if self.stock_losses:
            verified.loss_functions |= check_stock_losses([*self.stock_losses.values()])


def counted(call: Call, units: Sequence[Unit], read: Callable[[], Any]) -> Plans:
    """The plans of the microbatches that ``read`` returns, on ranks of the last pipeline stage.

    One tensor-parallel rank has the data. It counts together with its counterparts on the other
    data-parallel ranks, and sends its plans to the rest of its tensor-parallel group.
    """
    groups, plans = call.groups, None
    with failing_in_broadcast(groups.tp):
        if groups.reads_data:
            with failing_in_exchange(groups.count_group):
                microbatches = read()
            plans = plan_step(
                call.terms,
                units,
                microbatches,
                groups.count_group,
                is_evaluation=not call.trains,
            )
    return broadcast_plans(plans, call.terms, groups.tp)


def is_empty(call: Call, plans: Plans) -> bool:
    """True if every token of the step is masked or rejected, in all terms not switched off."""
    in_loss = [plan for name, plan in plans.items() if call.terms[name].multiplier]
    return all(plan.is_empty for plan in in_loss or plans.values())


def empty_step_error() -> DataError:
    """The error for an empty step (see `is_empty`), if the hook forbids it."""
    return DataError(
        "a step must have an active token, and every token is masked or rejected. Fix the data, or "
        "choose skip or train (--loss-aggregation-empty-step, empty_step=)."
    )


def _tokens_on_rank(call: Call, plan: StepPlan, i: int) -> int:
    """Token count that this rank returns to Megatron for microbatch ``i``.

    It must be an integer: the floors of ``(tokens + rank) / size`` over context-parallel ranks add up
    to the tokens. The last call of a step also returns the tokens of earlier calls, since their
    counts were dropped along with Megatron's finalization (`call.without_reduction`).
    """
    has_earlier_tokens = i == call.first_index and call.ends_step
    num_tokens = 0
    for k in range(i + 1) if has_earlier_tokens else [i]:
        cp = call.groups.cp_rank_in(plan.shapes[k])
        num_tokens += (plan.model_tokens[k] + cp.rank) // cp.size
    return num_tokens


def _total(call: Call, output: Any, script: ScriptLosses, sums: Mapping[str, Tensor]) -> Tensor:
    """The sum of the terms, each times its multiplier; a multiplier of 0 switches a term off."""
    terms = []
    for name, x in sums.items():
        multiplier = call.terms[name].multiplier
        if multiplier != 0:
            terms.append(x if multiplier == 1 else multiplier * x)
    if not terms:
        # Stay attached to the graph, so that every rank still runs the backward pass's collectives;
        # to the model's output, since the gradient of a NaN loss may be NaN times 0.
        losses = next(iter(script.terms.values())).losses
        dtype = at_least_fp32(losses.dtype)
        outputs = [x for x in tensors_in(output) if x.requires_grad] or [losses]
        return torch.stack([x.flatten()[:0].sum(dtype=dtype) for x in outputs]).sum()
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum()


def _reported(
    report: Callable[[Any, Any], Mapping[str, Any]],
    names: Sequence[str],
    script: ScriptLosses,
    weights: Mapping[str, Tensor],
) -> Mapping[str, Any]:
    """The result of a script's report function; losses and weights are by term if several."""
    if len(names) == 1:
        (name,) = names
        return report(script.terms[name].losses, weights[name])
    losses = {name: script.terms[name].losses for name in names}
    return report(losses, {name: weights[name] for name in names})
