"""A step that is counted as it trains: its denominator is known only at its end.

The samples of a step may be counted in separate parts, wherever and whenever they train. With the
loss ``L_p`` of part ``p`` and its denominator ``N_p``, such as its number of prompts, the loss of
the step is

    sum_p N_p L_p / sum_p N_p

if every group of samples, such as a prompt, is whole in one part. The gradients of ``N_p L_p`` are
added up. At the end, Megatron's own finalization gets the sum of this rank's ``N_p`` instead of its
token count, adds it up over the ranks, and divides the gradients by it.

A part is a call of the schedule (`Stream`) or a microbatch (`EndCountedStep`). If the loss decides
masks, a part is a microbatch in either case.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Unit
from megatron_loss_agg.collectives import (
    all_gather,
    any_rank,
    failing_in_broadcast,
    failing_together,
)
from megatron_loss_agg.errors import DataError, HostError, OptionError
from megatron_loss_agg.mcore.batches import ReadBatch, check_iterator
from megatron_loss_agg.mcore.call import Call, ProcessGroups, innermost, model_chunks
from megatron_loss_agg.mcore.checks.before import added_losses, check_same_on_all_ranks
from megatron_loss_agg.mcore.checks.sums import note_sums
from megatron_loss_agg.mcore.checks.tokens import TokenNotes
from megatron_loss_agg.mcore.finalization import (
    dividing_by,
    finish_gradients,
    is_megatron_finalization,
)
from megatron_loss_agg.mcore.first_lines import print_end_counted_lines
from megatron_loss_agg.mcore.forward_step import (
    Report,
    ScriptLosses,
    TermLosses,
    report_mapping,
    script_losses,
)
from megatron_loss_agg.mcore.reports import report_denominator
from megatron_loss_agg.mcore.scale import StreamScale
from megatron_loss_agg.mcore.split import TermSamples, sums_of_samples, weights_on_rank
from megatron_loss_agg.mcore.step import Plans, Step, counted, empty_step_error, is_empty
from megatron_loss_agg.microbatch import TermMicrobatches
from megatron_loss_agg.plan import StepPlan, broadcast_plans, plan_of_first_term, recounted
from megatron_loss_agg.report import Sum

if TYPE_CHECKING:
    from megatron_loss_agg.mcore.hook import LossHook

_ANOTHER_RANK_FAILED = (
    "another rank failed while counting the step. Fix the error of that rank first."
)
_DENOMINATOR_FACTOR = 2.0**20
"""Keeps the sum of small denominators above 1, since Megatron divides by at least 1."""


class Part(Step):
    """Microbatches that are counted together, only by the ranks of one model replica."""

    def __init__(self, hook: LossHook, key: int) -> None:
        super().__init__(hook)
        # Index of the call (`EndCountedStep`: of the microbatch) times 2**32. A part with a decided
        # mask adds 1 + its microbatch.
        self.key = key
        self.empty_step = "train"  # the step may have tokens in other parts
        self.decided: dict[int, Part] = {}  # by microbatch, if its loss has decided the mask
        self._is_too_large: list[Tensor] = []  # True: a decided mask is not from 0 to the batch's

    @property
    def parts(self) -> Sequence[Part]:
        """Just this part; or one for each microbatch, if the losses have decided masks."""
        return [*self.decided.values()] or [self]

    def _aggregated(self, call: Call, plans: Plans, i: int, *rest: Any) -> tuple[Any, ...]:
        results = super()._aggregated(call, plans, i, *rest)
        # Key 0 is the first part; key 1 is its first microbatch, with a decided mask.
        is_first_part = self.key <= 1 and dist.get_rank(call.groups.dp) == 0
        if not is_first_part and _is_sum(first_aggregation(call)):
            # The denominator of a sum is 1 for the whole step, so only the first part reports it.
            for name in ("loss", *(f"{x} loss" for x in plans)):
                if name in results[-1]:
                    results[-1][name][1] = 0
        return results

    def _reports(
        self,
        call: Call,
        plans: Plans,
        script: ScriptLosses,
        weights: Mapping[str, Tensor],
        sums: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        if script.further_reports:
            # Take out the part's denominator, since a mean over several parts needs weights that
            # all lack the same one, the step's.
            weights = {name: call.scale.denominator * x for name, x in weights.items()}
            further = [
                (functools.partial(_reported_means, report), names)
                for report, names in script.further_reports
            ]
            script = replace(script, further_reports=further)
        return super()._reports(call, plans, script, weights, sums)

    def loss(
        self, call: Call, plans: Plans, i: int, loss_function: Any, output: Any
    ) -> tuple[Any, ...]:
        script = script_losses(call, plans, i, loss_function, output)
        if not script.has_decided_masks:
            return self._aggregated(call, plans, i, script, loss_function, output)
        self._note_read_masks(plans, i, script)
        part = self.decided[i] = self._decided_part(call, plans, i, script)
        call = with_denominator(call, part.plans)
        assert part.plans is not None
        return part._aggregated(call, part.plans, 0, script, loss_function, output)

    def _note_read_masks(self, plans: Plans, i: int, script: ScriptLosses) -> None:
        """Note the batch's masks, to compare with the counted ones and with the decided ones."""
        self.sums[i] = []
        if script.is_gathered:
            self.gathered.add(i)
        for name, term in script.terms.items():
            # In a mapping of loss functions, some may leave the mask as it was.
            read_mask = term.mask if term.read_mask is None else term.read_mask
            read = replace(term, mask=read_mask)
            samples = self.samples[name].in_microbatch(i, read)
            weights = weights_on_rank(samples, read)
            note = note_sums(samples, plans[name], i, read, weights, self.is_first)
            self.sums[i].append(note)
            mask, read_mask = term.mask.reshape(-1), read_mask.reshape(-1)
            self._is_too_large.append(((mask > read_mask) | ~(mask >= 0)).any())

    def _decided_part(self, call: Call, plans: Plans, i: int, script: ScriptLosses) -> Part:
        """Microbatch ``i`` as a separate part, with the masks that its loss has decided."""
        counts = {name: self._decided_counts(call, name, i, x) for name, x in script.terms.items()}
        part, recounted_plans = Part(self.hook, self.key + 1 + i), None
        with failing_in_broadcast(call.groups.tp):
            if call.groups.reads_data:
                recounted_plans = {
                    name: recounted(plans[name], i, self.hook.units, *x)
                    for name, x in counts.items()
                }
        part.plans = broadcast_plans(recounted_plans, call.terms, call.groups.tp)
        part.samples = {name: TermSamples(call, plan) for name, plan in part.plans.items()}
        return part

    def _decided_counts(
        self, call: Call, name: str, i: int, term: TermLosses
    ) -> tuple[Tensor, int, Tensor | None]:
        """The counts of microbatch ``i`` for `recounted`, over all context-parallel ranks.

        Waits for the device.

        Returns:
            mask sums, fp64 [samples]; the number of active tokens; rejected samples, if any can be.
        """
        samples, plan = self.samples[name].in_microbatch(i, term), (self.plans or {})[name]
        mask, num_samples = term.mask.double().reshape(-1), plan.sizes[i]
        sums = sums_of_samples(mask, plan.shapes[i], samples.starts)
        rejected = sums.new_zeros(num_samples) if term.rejected is None else term.rejected.to(sums)
        if rejected.shape != (num_samples,):
            raise DataError(
                "rejected of MaskedLosses must be bool [samples], one for each of the "
                f"{num_samples} samples of the microbatch, got shape {tuple(rejected.shape)}. Give "
                "one for each sample."
            )
        counts = torch.cat([sums, (mask != 0).sum().to(sums).view(1), rejected])
        counts_by_rank = all_gather(counts, call.groups.cp)
        # Ranks with different tokens have different sums.
        equal = counts_by_rank if term.is_whole else counts_by_rank[:, num_samples + 1 :]
        if not torch.allclose(equal, equal[:1].expand_as(equal)):
            raise DataError(
                "all context-parallel ranks must decide the same rejected samples, and the same mask "
                "for gathered losses, got different ones. Decide them from all tokens of a sample: "
                "TokenLoss(gather=), SampleLoss(per_token=), or sums over these ranks."
            )
        counts = counts_by_rank[0] if term.is_whole else counts_by_rank.sum(dim=0)
        if term.rejected is None:
            return counts[:num_samples], int(counts[num_samples]), None
        is_rejected = counts_by_rank[0, num_samples + 1 :].bool()
        return counts[:num_samples], int(counts[num_samples]), is_rejected

    def _check_number_of_losses(self, plans: Plans) -> None:
        super()._check_number_of_losses(plans)
        # Not in `_compare`: mismatch="warn" lets its errors pass, and then the denominator would
        # lack the microbatches without a decided mask.
        if self.decided and len(self.decided) != len(plan_of_first_term(plans).sizes):
            raise DataError(
                "the losses of all microbatches of a call, or of none, must decide their masks, "
                f"got {len(self.decided)} of {len(self.sums)}. Return MaskedLosses always."
            )

    def _compare(self, call: Call, plans: Plans) -> None:
        super()._compare(call, plans)
        if self._is_too_large and bool(torch.stack(self._is_too_large).any()):
            raise DataError(
                "a mask that the loss decides must be from 0 to the loss_mask of its TokenLoss (to "
                "1 for a sample), got values outside. Give the largest mask as loss_mask, and in "
                "the batch."
            )


def _reported_means(report: Report, losses: Any, weights: Any) -> Mapping[str, Any]:
    """The result of a script's report function; DataError for sums, which nothing divides later."""
    metrics = report_mapping(report(losses, weights))
    names = [name for name, x in metrics.items() if isinstance(x, Sum)]
    if names:
        raise DataError(
            "report= of a loss that is counted at its end must return means, since its weights are not "
            f"divided yet, got a Sum in {names}. Return Mean.of(values, weights)."
        )
    return metrics


class StreamedCall(Part):
    """One call of a `Stream`: a part, or several if the losses decide masks."""

    def run(self, schedule: Callable[..., Any], call: Call) -> Any:
        self.is_first = not self.hook.verified.has_run(call)
        self._check_on_rank(call)
        self.plans = plans = self._plan(call)
        self.samples = {name: TermSamples(call, plan) for name, plan in (plans or {}).items()}
        # Terms with different denominators fail here, only on the last stage.
        groups = [call.groups.split_group, call.groups.pp]
        with failing_together(groups, _ANOTHER_RANK_FAILED, when=self.is_first):
            call = with_denominator(call, plans)
        with self._running(call):
            forward_step = self._forward_step(call)
            result = schedule(**call.arguments_with(forward_step, self.iterator))
        self._check_losses(call)
        return result

    def _fetch_next(self, call: Call) -> None:
        """Do nothing, since the next call may have a different number of microbatches."""


class Stream:
    """An optimizer step of any number of calls of the schedule, different on each rank.

    Args:
        arguments: of the schedule, for a rank that makes no call: its ``model``, and its
            ``pg_collection`` if it is given one.
    """

    def __init__(self, hook: LossHook, arguments: Mapping[str, Any]) -> None:
        check_end_counted(hook)
        check_gathers_parameters(arguments["model"])
        self.hook = hook
        self._arguments = arguments
        self._calls: list[StreamedCall] = []
        self._call: Call | None = None  # the last one
        self._has_failed = False

    def run(self, schedule: Callable[..., Any], call: Call) -> Any:
        """Make one call of the schedule, which adds to the gradients."""
        if self._call is not None and call.chunks != self._call.chunks:
            raise DataError(
                "all calls of a stream must train one model, since only one model's gradients are "
                "divided at its end, got another. Make a LossHook for each model."
            )
        self._call = call = end_counted(call, ends_step=False)
        check_model(call)
        part = StreamedCall(self.hook, key=len(self._calls) << 32)
        self._calls.append(part)
        try:
            return part.run(schedule, call)
        except BaseException:
            self._has_failed = True
            raise

    def finish(self) -> None:
        """Count the step over all ranks, reduce its gradients, and divide them. All ranks call."""
        hook, call = self.hook, self._call or self._call_from_arguments()
        if call is None:
            groups = ProcessGroups.of(self._arguments["pg_collection"])
        else:
            groups = call.groups
            check_model(call)
        # In every step, since other replicas do not know about an error that a script has caught.
        with failing_together(groups.all_groups, _ANOTHER_RANK_FAILED):
            if call is None:
                raise DataError(
                    "a rank that makes no call in a stream must give its model, got none. Write "
                    "hook.stream(model=...) on every rank."
                )
            if self._has_failed:
                raise DataError(
                    "a step must not be finished after one of its calls failed and left part of "
                    "its gradients. Leave the block, zero the gradients, and start the step again."
                )
        is_first = not hook.verified.has_run(call)
        if is_first:
            check_same_on_all_ranks(call, hook.compared_settings())
            hook.measure_scaling(call, is_first)
        parts = [part for x in self._calls for part in x.parts if part.plans is not None]
        tally = Tally.of(call, parts)
        is_empty_step = tally.compare(call, must_compare(hook, is_first))
        total = tally.on_device(call)  # finalization sums it over all ranks, in place
        finish_gradients(call, total)
        check_total(call, total)
        end_step(hook, call, total, is_empty_step)

    def _call_from_arguments(self) -> Call | None:
        """A call for a rank that makes none: its process groups and model; None without a model."""
        if self._arguments["model"] is None:
            return None
        names = ("forward_step_func", "data_iterator")
        arguments = {**dict.fromkeys(names), "num_microbatches": 1, **self._arguments}
        hook = self.hook
        return end_counted(Call.of(arguments, hook.terms, hook.split), ends_step=False)


class EndCountedStep(Step):
    """A step of one call, with microbatches counted one by one as they train."""

    def run(self, schedule: Callable[..., Any], call: Call) -> Any:
        hook, groups = self.hook, call.groups
        call = end_counted(call, ends_step=True)
        check_model(call)
        self._check_before(call)
        self.parts: list[Part] = []
        self.iterator = call.data_iterator
        with failing_together(groups.all_groups, _ANOTHER_RANK_FAILED, when=self.is_first):
            if groups.reads_data:
                self.iterator = BatchReader(call.data_iterator, hook.read_batch)

        # Called by finalization, after all microbatches have been counted.
        def denominator() -> Tensor:
            self.tally = Tally.of(call, [x for part in self.parts for x in part.parts])
            self._total = self.tally.on_device(call)
            return self._total

        with self._running(call), dividing_by(denominator, call.config):
            forward_step = self._forward_step(call)
            result = schedule(**call.arguments_with(forward_step, self.iterator))
        self._check_after(call)
        return result

    def _fetch_next(self, call: Call) -> None:
        """Do nothing, since no batch is drawn before its forward step."""

    def _forward_step(self, call: Call) -> Callable[..., Any]:
        """The script's forward step, after which its microbatch is counted."""
        script_forward_step: Callable[..., Any] = call.arguments["forward_step_func"]
        if not call.groups.is_last_stage:
            return script_forward_step

        def forward_step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            model = args[1] if len(args) > 1 else kwargs.get("model")
            if len(call.chunks) > 1 and innermost(model) is not innermost(call.chunks[-1]):
                return script_forward_step(*args, **kwargs)
            part = Part(self.hook, key=len(self.parts) << 32)
            self.parts.append(part)
            part.is_first = self.is_first
            if self.tokens is not None:
                part.tokens = TokenNotes(self.is_first, self.hook.verified.splits)
            plans: dict[str, StepPlan] = {}  # filled while the model's call is observed
            part.plans = plans
            tokens = part.tokens
            if call.groups.reads_data:
                self.iterator.note_batch = None if tokens is None else tokens.note_batch
            with contextlib.nullcontext() if tokens is None else tokens.observing(call, plans, 0):
                output, loss_function = script_forward_step(*args, **kwargs)
                plans |= counted(call, self.hook.units, lambda: [self.iterator.taken()])
            if tokens is not None and not tokens.may_differ(call, plans):
                part.tokens = None
            part.samples = {name: TermSamples(call, plan) for name, plan in plans.items()}
            loss = functools.partial(part.loss, with_denominator(call, plans), plans, 0)
            return output, functools.partial(loss, loss_function)

        return forward_step

    def _check_after(self, call: Call) -> None:
        """Check each part as `Step` does, and the step over all ranks."""
        groups = call.groups.all_groups
        with failing_together(groups, _ANOTHER_RANK_FAILED, when=self.is_first):
            for part in self.parts:
                assert part.plans is not None
                part._check_number_of_losses(part.plans)
                part._compare_or_warn(call, part.plans)
        is_empty_step = self.tally.compare(call, must_compare(self.hook, self.is_first))
        check_total(call, self._total)
        end_step(self.hook, call, self._total, is_empty_step)


class BatchReader:
    """Reads each batch of ``source`` when a forward step draws it."""

    def __init__(self, source: Any, read_batch: ReadBatch) -> None:
        check_iterator(source)
        self._source = source
        self._read_batch = read_batch
        self._microbatches: list[TermMicrobatches | Exception] = []
        self.note_batch: Callable[[int, TermMicrobatches, Any], None] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._source)
        try:
            microbatch = self._read_batch(batch)
            if self.note_batch is not None:
                self.note_batch(0, microbatch, batch)
            self._microbatches.append(microbatch)
        except Exception as error:
            # Raised later, by `taken`, since other tensor-parallel ranks wait for this batch now.
            self._microbatches.append(error)
        return batch

    def taken(self) -> TermMicrobatches:
        """The microbatch of the batch that a forward step has drawn.

        Raises:
            DataError: the forward step has drawn none, or several; or ``read_batch`` raised it.
        """
        microbatches, self._microbatches = self._microbatches, []
        if len(microbatches) != 1:
            raise DataError(
                f"a forward step must draw one batch, got {len(microbatches)}. Call "
                "next(data_iterator) once, or count the step before (without "
                "--loss-aggregation-count end)."
            )
        if isinstance(microbatches[0], Exception):
            raise microbatches[0]
        return microbatches[0]


@dataclass(frozen=True)
class Tally:
    """This rank's contribution to the counts of a step, summed over its parts."""

    denominator: float  # times `denominator_factor`
    has_tokens: bool
    # int64 [3, groups]: for each group that must be whole, the index of its unit in
    # `_compared_units`, its id, and the key of its part.
    groups: Tensor

    @classmethod
    def of(cls, call: Call, parts: Sequence[Part]) -> Tally:
        plans = [part.plans for part in parts if part.plans]
        denominator = sum(map(common_denominator, plans))
        if _is_sum(first_aggregation(call)):
            denominator = float(dist.get_rank(call.groups.dp) == 0)
        columns = [_part_groups(call, part.plans, part.key) for part in parts if part.plans]
        # Context-parallel ranks have the same denominator, so only the first of them passes it on.
        is_first_cp_rank = call.groups.is_last_stage and call.groups.cp_rank == 0
        return cls(
            denominator * denominator_factor(call) if is_first_cp_rank else 0.0,
            any(not is_empty(call, x) for x in plans),
            torch.cat([torch.zeros(3, 0, dtype=torch.int64), *columns], dim=1),
        )

    def on_device(self, call: Call) -> Tensor:
        """The denominator for Megatron's finalization, with the same dtype on every stage."""
        return torch.full((), self.denominator, dtype=torch.float64, device=call.device)

    def compare(self, call: Call, when: bool) -> bool:
        """Raise DataError if a group has samples in two parts of the step. All ranks call.

        Args:
            when: the same on all ranks; if False, nothing is compared, and the result is False.

        Returns:
            True if the step has no tokens.
        """
        if not when:
            return False
        groups, is_empty_step = call.groups, False
        with failing_together(groups.all_groups, _ANOTHER_RANK_FAILED):
            if groups.is_last_stage:
                is_empty_step = self._compare(call)
        return any_rank(is_empty_step, groups.pp)  # other stages have no counts

    def _compare(self, call: Call) -> bool:
        dp, num_groups = call.groups.dp, self.groups.shape[1]
        headers = all_gather(torch.tensor([self.has_tokens, num_groups]), dp)
        most = int(headers[:, 1].max())
        if most:
            row = torch.nn.functional.pad(self.groups, (0, most - num_groups))
            rows = all_gather(row.reshape(-1), dp).view(-1, 3, most)
            _check_whole(call, rows, headers[:, 1])
        return not bool(headers[:, 0].any())


def end_counted(call: Call, ends_step: bool) -> Call:
    """``call`` in a step that is counted at its end, and divided by its denominator there."""
    scale = call.scale
    return replace(
        call,
        groups=replace(call.groups, is_end_counted=True),
        scale=StreamScale(
            scale.num_microbatches, scale.data_parallel_size, scale.per_token, scale.normalized
        ),
        ends_step=ends_step,
    )


def with_denominator(call: Call, plans: Plans | None) -> Call:
    """``call`` for the losses of the part with these plans."""
    if plans is None:
        return call
    denominator = common_denominator(plans) * denominator_factor(call)
    return replace(call, scale=replace(call.scale, denominator=denominator))


def denominator_factor(call: Call) -> float:
    """Factor on all denominators of a step; 1 in fp16, whose range the sums of gradients need."""
    return 1.0 if getattr(call.config, "fp16", False) else _DENOMINATOR_FACTOR


def common_denominator(plans: Plans) -> float:
    """The denominator of a part; DataError if its terms have different ones."""
    by_name = {name: report_denominator(plan) for name, plan in plans.items()}
    if len({*by_name.values()}) > 1:
        raise DataError(
            "the terms of a loss that is counted at its end must have one denominator, since their "
            f"gradients are divided together, got {by_name}. Give them the same masks, or count the "
            "step before (hook.step, or without --loss-aggregation-count end)."
        )
    return next(iter(by_name.values()))


def first_aggregation(call: Call) -> LossAggregation:
    """The aggregation of the first term."""
    return next(iter(call.terms.values())).aggregation


def check_end_counted(hook: LossHook) -> None:
    """Raise OptionError unless a step of these terms and options can be counted at its end."""
    for name, term in hook.terms.items():
        agg = term.aggregation
        if agg.function is not None:
            raise OptionError(
                f"a custom function needs the samples of the whole step, got one for {name!r} in a "
                "step that is counted at its end. Choose another mode, or count the step before "
                "(hook.step, or without --loss-aggregation-count end)."
            )
        if "dataset" in _whole_units(agg):
            raise OptionError(
                f"a mean over data sets needs the tokens of the whole step, got one for {name!r} "
                "in a step that is counted at its end. Choose another mode, or count the step "
                "before (hook.step, or without --loss-aggregation-count end)."
            )
    kinds = {name: _denominator_in_words(x.aggregation) for name, x in hook.terms.items()}
    if len({*kinds.values()}) > 1:
        raise OptionError(
            "the terms of a loss that is counted at its end must have one denominator, since their "
            f"gradients are divided together, got {kinds}. Choose modes with the same one, or count "
            "the step before (hook.step, or without --loss-aggregation-count end)."
        )
    late = [type(x).__name__ for x in hook.extensions if not x.counts_at_end]
    if late:
        raise OptionError(
            f"{', '.join(late)} needs the counts of the whole step, got a step that is counted at its "
            "end. Drop it (for ModeReports: also=, --loss-aggregation-also), or count the step before "
            "(hook.step, or without --loss-aggregation-count end)."
        )


def check_model(call: Call) -> None:
    """Raise HostError for a model whose gradients cannot be divided at the end of the step."""
    bases = {base.__name__ for chunk in call.chunks for base in type(chunk).__mro__}
    finalize, reason = call.config.finalize_model_grads_func, None
    if any("FullyShardedDataParallel" in name for name in bases):
        reason = "Megatron's FSDP reduces gradients in every backward pass"
    elif losses := [*added_losses(call.config).values()]:
        reason = f"Megatron scales {losses[0]} by itself"
    elif call.ends_step and finalize is None:
        reason = "the schedule divides no gradients where config.finalize_model_grads_func is None"
    elif is_megatron_finalization(finalize) and not all(
        hasattr(chunk, "finish_grad_sync") for chunk in call.chunks
    ):
        reason = "Megatron's finalize_model_grads needs its DistributedDataParallel"
    elif call.groups.dp_cp is not None:
        reason = "under dynamic context parallelism all ranks would have to make the same calls"
    if reason is not None:
        raise HostError(
            f"this model cannot train in a step that is counted at its end: {reason}. Turn that off, or "
            "count the step before (hook.step, or without --loss-aggregation-count end)."
        )


def check_gathers_parameters(model: Any) -> None:
    """Raise HostError if a rank that makes no call would not gather parameters with the others.

    Args:
        model: of a rank that may make no call; None: every rank makes one.
    """
    chunks = () if model is None else model_chunks(model)
    if any(getattr(getattr(x, "ddp_config", None), "overlap_param_gather", False) for x in chunks):
        raise HostError(
            "a rank that makes no call in a stream must not leave the others waiting for its "
            "parameters, which are gathered in forward passes, got overlap_param_gather. Turn it off, "
            "or make a call on every rank and leave out model=."
        )


def check_total(call: Call, total: Tensor) -> None:
    """Raise DataError for a sum of denominators that Megatron would replace by 1."""
    if 0 < float(total) < 1:
        factor = denominator_factor(call)
        raise DataError(
            f"the denominator of the step must be at least {1 / factor:.3g}, got "
            f"{float(total) / factor:.3g}. Make masks and sample_weights larger by a constant "
            "factor, or train in bf16."
        )


def end_step(hook: LossHook, call: Call, total: Tensor, is_empty_step: bool) -> None:
    """Note on every rank that the step has ended; raise DataError for a forbidden empty step."""
    if not hook.verified.has_run(call) and not is_empty_step:
        print_end_counted_lines(hook, call, float(total) / denominator_factor(call))
        hook.verified.add_run(call)
    if is_empty_step and hook.empty_step == "error":
        raise empty_step_error()
    hook.step_is_empty = is_empty_step and hook.empty_step == "skip"


def must_compare(hook: LossHook, is_first: bool) -> bool:
    """True if ranks compare their counts at the end of a step; the same on all ranks."""
    has_ids = any(_whole_units_by_id(x.aggregation) for x in hook.terms.values())
    return is_first or has_ids or hook.empty_step != "train"


def _is_sum(agg: LossAggregation) -> bool:
    """True if the denominator of a step is 1, whatever its samples."""
    return agg.within is None and agg.across is None


def _whole_units(agg: LossAggregation) -> list[Unit]:
    """The units whose groups must be whole in one part."""
    units = {agg.within, agg.across, *agg.path} - {None}
    return sorted(str(unit) for unit in units)


def _whole_units_by_id(agg: LossAggregation) -> list[Unit]:
    """The `_whole_units` with groups that are read as ids; others cannot be in two parts."""
    return [unit for unit in _whole_units(agg) if unit in agg.by_id]


def _denominator_in_words(agg: LossAggregation) -> str:
    """The denominator of a step in words: equal for aggregations that divide by the same number."""
    if _is_sum(agg):
        return "1"
    counted = "tokens" if agg.within == "all" else f"{agg.across}s"
    rules = [f"empty: {agg.empty}", f"rejected: {agg.rejected}"]
    if agg.sample_weights == "count":
        rules.append(f"weighted by {agg.weighted}")
        if agg.dataset_weights is not None:
            rules.append(f"{agg.dataset_weights}")
    return f"{counted} ({', '.join(rules)})"


def _part_groups(call: Call, plans: Plans, key: int) -> Tensor:
    """The columns of one part in `Tally.groups`."""
    columns = [torch.zeros(3, 0, dtype=torch.int64)]
    for index, unit in enumerate(_compared_units(call)):
        # Ids of all terms, since each may have its own samples.
        terms = [x for x in plans if unit in _whole_units_by_id(call.terms[x].aggregation)]
        ids = torch.cat([plans[name].ids_S[unit] for name in terms]).unique()
        columns.append(torch.stack([torch.full_like(ids, index), ids, torch.full_like(ids, key)]))
    return torch.cat(columns, dim=1)


def _compared_units(call: Call) -> list[Unit]:
    """The units, of all terms, with groups that are compared by id at the end of the step."""
    terms = call.terms.values()
    return sorted({unit for x in terms for unit in _whole_units_by_id(x.aggregation)})


def _check_whole(call: Call, rows: Tensor, num_groups: Tensor) -> None:
    """Raise DataError if the same group of a unit is in two parts.

    Args:
        rows: int64 [ranks, 3, most groups], see `Tally.groups`.
        num_groups: int64 [ranks], the number of groups on each rank.
    """
    ranks, _, most = rows.shape
    is_group = torch.arange(most) < num_groups.view(-1, 1)
    rank = torch.arange(ranks).view(-1, 1).expand(ranks, most)
    unit_index, id_, key = rows.unbind(1)
    # `unique` sorts, so that two parts with the same group are neighbours.
    table = torch.stack([unit_index, id_, rank, key], dim=-1)[is_group].unique(dim=0)
    is_same = (table[1:, :2] == table[:-1, :2]).all(dim=1)
    if not bool(is_same.any()):
        return
    first = int(is_same.nonzero()[0])
    (index, group_id, *one), (_, _, *other) = table[first : first + 2].tolist()
    unit = _compared_units(call)[index]
    raise DataError(
        f"each {unit} of a step that is counted at its end must be whole in one of its parts, got the "
        f"{unit} {group_id} in {_part_in_words(*one)} and in {_part_in_words(*other)}. Give all of its "
        "samples to one call (with MaskedLosses, or --loss-aggregation-count end, to one microbatch), "
        f"and ids that are unique over the step ('{unit}_ids')."
    )


def _part_in_words(rank: int, key: int) -> str:
    """In words, the part with this `Part.key`."""
    part, microbatch = key >> 32, key & (2**32 - 1)
    where = f"part {part}" if not microbatch else f"microbatch {microbatch - 1} of part {part}"
    return f"{where} of data-parallel rank {rank}"


@contextlib.contextmanager
def warning_of_partial_gradients() -> Iterator[None]:
    """On an exception, print that the gradients of the step cannot be used."""
    try:
        yield
    except BaseException:
        print(
            "megatron_loss_agg: hook.stream was left by an exception: its gradients cannot be used. "
            "Zero them before the next step.",
            file=sys.stderr,
            flush=True,
        )
        raise
