"""Loss functions that leave their reduction to the hook: for losses of tokens, and of samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError, HostError
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.forward_step import (
    LossFunction,
    Report,
    ScriptLosses,
    TermLosses,
    check_one_loss_per_token,
    constant_mask,
    report_mapping,
    results_in_words,
    values_by_term,
)
from megatron_loss_agg.mcore.split import check_has_one_group, gathered, sums_by_sequence
from megatron_loss_agg.plan import StepPlan, plan_of_first_term, token_shape
from megatron_loss_agg.tensors import at_least_fp32, described, is_plain, moved
from megatron_loss_agg.weighted_sum import weighted_sum

Losses = Tensor | Mapping[str, Tensor]
"""The losses of one term, or of several terms by name."""

hooks: WeakSet[Any] = WeakSet()
"""Every `LossHook` of this process."""


@dataclass(frozen=True, eq=False)
class MaskedLosses:
    """Losses with the mask that they count with, decided from the model's output.

    In a step that is counted at its end (`LossHook.stream`, ``LossHook(count="end")``), ``compute``
    of a `TokenLoss` or `SampleLoss` may return it instead of the losses:

        return output, TokenLoss(lambda output: MaskedLosses(losses, loss_mask * is_trusted), loss_mask)

    A sample that loses all its tokens is empty, see `LossAggregation.empty`.

    Args:
        losses: as ``compute`` returns them.
        mask: in the form of the losses. At most the ``loss_mask`` of the `TokenLoss`; from 0 to 1
            for each sample of a `SampleLoss`. None: unchanged.
        rejected: bool [samples] for the whole microbatch, the same on all of its context-parallel
            ranks: further samples that are rejected. The aggregation's ``rejected`` says whether
            they stay in the denominators.
    """

    losses: Losses
    mask: Losses | None = None
    rejected: Tensor | None = None

    def applied_to(self, script: ScriptLosses, call: Call) -> ScriptLosses:
        """``script`` with these masks; raises DataError in a step that was counted beforehand."""
        if not call.groups.is_end_counted:
            raise DataError(
                "a mask that the loss decides needs a step that is counted at its end, got one that was "
                "counted before. Train in hook.stream() (or with --loss-aggregation-count end, "
                "LossHook(count='end')), and return losses without MaskedLosses in an evaluation."
            )
        masks: Mapping[str, Any] = dict.fromkeys(script.terms, self.mask)
        if isinstance(self.mask, Mapping):
            masks = self.mask
        if masks.keys() != script.terms.keys():
            raise DataError(
                f"MaskedLosses must have a mask for each term of {sorted(script.terms)}, got "
                f"{sorted(masks)}. Give one mask for all terms, or a mapping of all."
            )
        terms = {}
        for name, term in script.terms.items():
            mask = term.mask if masks[name] is None else constant_mask(masks[name])
            check_one_loss_per_token(term.losses, mask, "MaskedLosses")
            terms[name] = replace(term, mask=mask, read_mask=term.mask, rejected=self.rejected)
        return replace(script, terms=terms, has_decided_masks=True)


class TokenLoss(LossFunction):
    """A loss function for losses of tokens that leaves their reduction to the hook.

    Return it from a forward step with the model's output:

        return output, TokenLoss(lambda output: token_losses(output), loss_mask)

    For a loss of several terms, the token losses are a mapping by term, and so is the mask if the
    terms' masks differ. For terms of different kinds, return a mapping by term of `TokenLoss` and
    `SampleLoss`. The hook calls ``compute`` once, in the schedule's gradient mode.

    Without a hook, a loss of one term works as a stock Megatron loss function: it returns (sum over
    the mask, number of tokens, report). Sums are in fp32, or in fp64 for fp64 inputs. If the process
    has a `LossHook`, training this way warns that the schedule was not wrapped.

    Args:
        compute: model output -> losses in the shape of ``loss_mask``, neither masked nor divided; a
            factor in them stays in the loss. Or (losses, report): the report is a mapping of names
            to (sum, count) pairs, for Megatron's training loop, or to the metrics of
            `megatron_loss_agg.report`, for `reduce_reports`.
        loss_mask: the mask of this rank's tokens, its context-parallel part of the batch's mask.
            With ``gather``, the whole mask.
        gather: for losses that need all tokens of a sequence under context parallelism. Model
            output -> a number for each token of this rank, in the shape of its part of the mask
            (such as log-probabilities), or a mapping of such tensors. The hook gathers them over
            the context-parallel ranks and calls ``compute`` with the whole tensors, in the shape of
            the whole mask. Everything with a gradient must go through ``gather``.
        report: (losses, weights) -> a further report. Both are in the form and shape of the losses;
            ``sum(weights * losses)`` over tokens, microbatches and ranks is the aggregated loss of
            the step, so `megatron_loss_agg.report.Sum` weights metrics like the loss. In a step
            that is counted at its end, weights lack the step's denominator: use `Mean`, not `Sum`.

    Raises:
        HostError: in a step: called without a hook, though it needs one, or a report that is not a
            mapping.
        DataError: in a step: not one loss per element of the mask, or terms that differ from the
            hook's.
    """

    def __init__(
        self,
        compute: Callable[[Any], Losses | tuple[Losses, Mapping[str, Any]]],
        loss_mask: Losses,
        gather: Callable[[Any], Any] | None = None,
        *,
        report: Report | None = None,
    ) -> None:
        self.compute = compute
        self.loss_mask = loss_mask
        self.gather = gather
        self.report = report

    def __call__(self, output: Any) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        if self.gather or self.report or isinstance(self.loss_mask, Mapping):
            raise _needs_hook("a TokenLoss with several masks, gather= or report=")
        losses, report = losses_and_report(self.compute(output))
        if isinstance(losses, (Mapping, MaskedLosses)):
            raise _needs_hook("a TokenLoss that has several terms or decides its mask")
        check_one_loss_per_token(losses, self.loss_mask, "a TokenLoss")
        if hooks and losses.requires_grad:
            warnings.warn(
                "a TokenLoss is averaged by Megatron itself, although there is a LossHook. Call "
                "the schedule that hook.wrap(get_forward_backward_func()) returns.",
                stacklevel=2,
            )
        mask = constant_mask(self.loss_mask).reshape(-1)
        total = weighted_sum(mask, losses.reshape(-1).to(at_least_fp32(losses.dtype)))
        return total, mask.sum().to(torch.int), report

    def script_losses(
        self, call: Call, plans: Mapping[str, StepPlan], i: int, output: Any
    ) -> ScriptLosses:
        names = [*plans]
        is_whole = self.gather is not None
        if self.gather is not None:
            shape = token_shape(plans, i)
            values = self.gather(output)
            output = _for_each_tensor(lambda x: gathered(x, shape, call), values)
        computed, report = losses_and_report(self.compute(output))
        losses = computed.losses if isinstance(computed, MaskedLosses) else computed
        masks = self.loss_mask
        if not isinstance(masks, Mapping):
            masks = dict.fromkeys(names, masks)
        terms = {}
        for name, term_losses in values_by_term("losses", losses, names, call).items():
            if name not in masks:
                raise DataError(
                    f"a TokenLoss must have a mask for each term, got {sorted(masks)}. Add {name!r}."
                )
            mask = constant_mask(masks[name])
            check_one_loss_per_token(term_losses, mask, "a TokenLoss")
            terms[name] = TermLosses(term_losses, mask, is_whole)
        further = _further_reports(self.report, terms)
        script = ScriptLosses(terms, report, further, is_gathered=is_whole)
        return computed.applied_to(script, call) if isinstance(computed, MaskedLosses) else script


class SampleLoss(LossFunction):
    """A loss function for losses of samples, or pairs, with microbatches from `of_samples`.

        return output, SampleLoss(lambda output: losses_of_samples(output))

    With ``per_token``, losses are computed from sums over whole sequences, such as the
    log-probabilities of answers. Their tokens may be on several context-parallel ranks:

        return output, SampleLoss(pair_losses, log_probs, loss_mask)

    Args:
        compute: model output -> losses [samples]; with ``per_token``, (sums, lengths) -> losses
            [samples], from the sum and the mask sum of each sequence, [sequences]. With a report as
            in `TokenLoss`.
        per_token: model output -> a number for each token of this rank, in the shape of
            ``loss_mask``, or a mapping of such tensors. The hook multiplies them by the mask and adds
            them up over each sequence of ``Microbatch.of_samples(sequences=)``, on all
            context-parallel ranks. Values at masked positions are ignored, even NaN.
        loss_mask: the mask of this rank's tokens in the sequences; required with ``per_token``.
        report: as in `TokenLoss`.

    Raises:
        DataError: in a step: not one loss per sample; or no ``per_token`` under context parallelism.
    """

    def __init__(
        self,
        compute: Callable[..., Losses | tuple[Losses, Mapping[str, Any]]],
        per_token: Callable[[Any], Any] | None = None,
        loss_mask: Tensor | None = None,
        *,
        report: Report | None = None,
    ) -> None:
        if (per_token is None) != (loss_mask is None):
            raise DataError(
                "per_token and loss_mask of a SampleLoss go together, got only one of them. Give "
                "the mask of this rank's tokens with per_token."
            )
        self.compute = compute
        self.per_token = per_token
        self.loss_mask = loss_mask
        self.report = report

    def __call__(self, output: Any) -> Any:
        raise _needs_hook("a SampleLoss")

    def script_losses(
        self, call: Call, plans: Mapping[str, StepPlan], i: int, output: Any
    ) -> ScriptLosses:
        names = [*plans]
        cp = call.groups.cp_rank_in(plan_of_first_term(plans).shapes[i])
        sequence_mask_sum = None
        if self.per_token is None:
            if cp.size > 1:
                check_has_one_group(call.groups)
                raise DataError(
                    "a SampleLoss under context parallelism needs per_token=, since each rank has "
                    "only a part of the tokens, got none. Give SampleLoss(compute, per_token, "
                    "loss_mask)."
                )
            computed, report = losses_and_report(self.compute(output))
        else:
            check_has_one_group(call.groups)
            sequences = plan_of_first_term(plans).sequences[i]
            if sequences is None or any(plans[name].sequences[i] is None for name in names):
                raise DataError(
                    "SampleLoss(per_token=) needs the token sequences of its microbatch, got none. "
                    "Read Microbatch.of_samples(number, sequences=Microbatch(loss_mask, "
                    "cu_seqlens))."
                )
            mask = constant_mask(self.loss_mask)

            def sequence_sums(x: Tensor) -> Tensor:
                check_one_loss_per_token(x, mask, "per_token of a SampleLoss")
                return sums_by_sequence(x, mask, sequences.shape, call.split, cp, call.groups.cp)

            sums = _for_each_tensor(sequence_sums, self.per_token(output))
            sequence_mask_sum = sums_by_sequence(mask, mask != 0, sequences.shape, call.split, cp)
            lengths = moved(sequences.mask_sum, mask.device, mask.dtype)
            computed, report = losses_and_report(self.compute(sums, lengths))
        losses = computed.losses if isinstance(computed, MaskedLosses) else computed
        terms = {}
        for name, sample_losses in values_by_term("losses", losses, names, call).items():
            number = plans[name].sizes[i]
            if not is_plain(sample_losses) or sample_losses.numel() != number:
                raise DataError(
                    f"a SampleLoss must have a loss for each of the {number} samples of the "
                    f"microbatch, got {described(sample_losses)}. Return losses [samples], neither "
                    "summed nor divided."
                )
            ones = torch.ones(
                sample_losses.shape,
                dtype=at_least_fp32(sample_losses.dtype),
                device=sample_losses.device,
            )
            terms[name] = TermLosses(sample_losses, ones, True, sequence_mask_sum)
        script = ScriptLosses(terms, report, _further_reports(self.report, terms))
        return computed.applied_to(script, call) if isinstance(computed, MaskedLosses) else script


def _needs_hook(loss_function: str) -> HostError:
    return HostError(
        f"{loss_function} needs a hook, but was called without one. Wrap the schedule with "
        "LossHook(...).wrap, using LossHook(aggregate_evaluation=True) for evaluations."
    )


def _further_reports(
    report: Report | None, terms: Mapping[str, TermLosses]
) -> list[tuple[Report, Sequence[str]]]:
    """The script's report function, if there is one, with the names of the terms that it gets."""
    return [] if report is None else [(report, [*terms])]


def losses_and_report(results: Any) -> tuple[Any, dict[str, Any]]:
    """The results of ``compute`` as (losses, report); the report is empty if there are only losses."""
    if isinstance(results, (Tensor, Mapping, MaskedLosses)):
        return results, {}
    if not isinstance(results, (tuple, list)) or len(results) != 2:
        raise HostError(
            f"compute must return losses or (losses, report), got {results_in_words(results)}. Return "
            "one of these."
        )
    return results[0], report_mapping(results[1])


def _for_each_tensor(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    if isinstance(values, Mapping):
        return {name: change(x) for name, x in values.items()}
    return change(values)
