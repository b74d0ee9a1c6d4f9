"""The results of a script's forward step: losses of tokens or samples, which the hook reduces."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError, HostError
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.split import (
    check_has_one_group,
    gathered,
    same_order,
    sums_by_sequence,
)
from megatron_loss_agg.plan import StepPlan, plan_of_first_term, token_shape
from megatron_loss_agg.tensors import at_least_fp32, described, is_plain
from megatron_loss_agg.weighted_sum import weighted_sum

Losses = Tensor | Mapping[str, Tensor]
"""Of one term, or by the names of several."""
Report = Callable[[Any, Any], Mapping[str, Any]]

hooks: WeakSet[Any] = WeakSet()
"""Every `LossHook` of this process."""


class TokenLoss:
    """A loss function for losses of tokens that leaves their reduction to the hook.

    Return it from a forward step with the model's output:

        return output, TokenLoss(lambda output: token_losses(output), loss_mask)

    For a loss of several terms, the token losses are a mapping by term, and so is the mask if the
    terms' masks differ. Terms of different kinds: return a mapping of `TokenLoss` and `SampleLoss`
    by term. The hook calls ``compute`` once, in the schedule's gradient mode.

    Without a hook, a loss of one term works as a stock Megatron loss function: it returns (sum over
    the mask, number of tokens, report). Sums are in fp32, or in fp64 for fp64 inputs. If the process
    has a `LossHook`, training in this way warns: the schedule was not wrapped.

    Args:
        compute: model output -> losses in the shape of ``loss_mask``, neither masked nor divided; a
            factor in them stays in the loss. Or (losses, report): the report is a mapping of names
            to (sum, count) pairs, for Megatron's training loop, or to the metrics of
            `megatron_loss_agg.report`, for `reduce_reports`.
        loss_mask: of this rank's tokens: its context-parallel part of the batch's mask. With
            ``gather``, the whole mask.
        gather: for losses that need all tokens of a sequence under context parallelism. Model
            output -> a number for each token of this rank, in the shape of its part of the mask
            (log-probabilities, for one), or a mapping of such tensors. The hook gathers them over
            the context-parallel ranks, and calls ``compute`` with the whole tensors, in the shape of
            the whole mask. Everything with a gradient must go through ``gather``.
        report: (losses, weights) -> a further report. Both are in the form and shape of the losses;
            ``sum(weights * losses)`` over tokens, microbatches and ranks is the aggregated loss of
            the step, so metrics can be weighed as the loss is, by `megatron_loss_agg.report.Sum`.

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
            raise _needs_hook("a TokenLoss of several masks, or with gather= or report=,")
        losses, report = losses_and_report(self.compute(output))
        if isinstance(losses, Mapping):
            raise _needs_hook("a TokenLoss of several terms")
        check_one_loss_per_token(losses, self.loss_mask, "a TokenLoss")
        if hooks and losses.requires_grad:
            warnings.warn(
                "a TokenLoss is trained as Megatron averages it, although there is a LossHook. Call the "
                "schedule that hook.wrap(get_forward_backward_func()) returns.",
                stacklevel=2,
            )
        mask = _constant(self.loss_mask).reshape(-1)
        total = weighted_sum(mask, losses.reshape(-1).to(at_least_fp32(losses.dtype)))
        return total, mask.sum().to(torch.int), report


class SampleLoss:
    """A loss function for losses of samples, or pairs, whose microbatches are of `of_samples`.

        return output, SampleLoss(lambda output: losses_of_samples(output))

    With ``per_token``, losses of the sums over whole sequences, such as the log-probabilities of
    whole answers, whose tokens may lie on several context-parallel ranks:

        return output, SampleLoss(pair_losses, log_probs, loss_mask)

    Args:
        compute: model output -> losses [samples]; with ``per_token``, (sums, lengths) -> losses
            [samples], from the sum and the mask sum of each sequence, [sequences]. The result is as
            of a `TokenLoss`.
        per_token: model output -> a number for each token of this rank, in the shape of
            ``loss_mask``, or a mapping of such tensors. The hook multiplies them by the mask and adds
            them up over each sequence of ``Microbatch.of_samples(sequences=)``, on all
            context-parallel ranks. Values at masked positions are ignored, even NaN.
        loss_mask: of this rank's tokens of the sequences; required with ``per_token``.
        report: as of `TokenLoss`.

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
                "per_token and loss_mask of a SampleLoss go together, got one of them. Give the mask of "
                "this rank's tokens beside per_token."
            )
        self.compute = compute
        self.per_token = per_token
        self.loss_mask = loss_mask
        self.report = report

    def __call__(self, output: Any) -> Any:
        raise _needs_hook("a SampleLoss")


def _needs_hook(loss_function: str) -> HostError:
    return HostError(
        f"{loss_function} needs a hook, and was called without one. Wrap the schedule by "
        "LossHook(...).wrap, with LossHook(aggregate_evaluation=True) for evaluations."
    )


@dataclass(frozen=True)
class TermLosses:
    """The losses of one term of one microbatch on this rank."""

    losses: Tensor  # in any shape
    mask: Tensor  # without gradient, at least fp32, in the same order
    is_whole: bool = False  # every context-parallel rank has the losses of all tokens, or samples
    sequence_mask_sum: Tensor | None = None  # this rank's part of each sequence's mask sum


@dataclass(frozen=True)
class ScriptLosses:
    """The results of the script's loss function for one microbatch on this rank."""

    terms: Mapping[str, TermLosses]
    report: dict[str, Any]
    further_reports: Sequence[tuple[Report, Sequence[str]]]  # of losses and weights, of these terms
    is_gathered: bool = False  # some losses depend on the order in which tokens are gathered
    stock_loss: Any = None  # what a stock loss function returned as its loss
    returns_sum: bool = False  # beside a token count, which makes it a sum, not a mean


def script_losses(
    call: Call,
    plans: Mapping[str, StepPlan],
    i: int,
    loss_function: Any,
    output: Any,
) -> ScriptLosses:
    """The losses of microbatch ``i``, from the model's ``output``.

    A stock loss function is called for its checks (NaN, spikes) and its report; its loss is not
    used. The model's output is then the per-token loss.

    Raises:
        HostError, DataError: a loss function, or results of one, that cannot be used.
    """
    if isinstance(loss_function, Mapping):
        parts = []
        for name, of_name in _of_terms("loss functions", loss_function, [*plans], call).items():
            part = script_losses(call, {name: plans[name]}, i, of_name, output)
            parts.append(part)
        return ScriptLosses(
            terms={name: x for part in parts for name, x in part.terms.items()},
            report=functools.reduce(merged_reports, (part.report for part in parts), {}),
            further_reports=[x for part in parts for x in part.further_reports],
            is_gathered=any(part.is_gathered for part in parts),
        )
    if isinstance(loss_function, TokenLoss):
        return _of_token_loss(call, plans, i, loss_function, output)
    if isinstance(loss_function, SampleLoss):
        return _of_sample_loss(call, plans, i, loss_function, output)
    return _of_stock_function(plans, loss_function, output)


def _of_token_loss(
    call: Call,
    plans: Mapping[str, StepPlan],
    i: int,
    loss_function: TokenLoss,
    output: Any,
) -> ScriptLosses:
    names = [*plans]
    is_whole = loss_function.gather is not None
    if loss_function.gather is not None:
        shape = token_shape(plans, i)
        values = loss_function.gather(output)
        output = _for_each_tensor(lambda x: gathered(x, shape, call), values)
    losses, report = losses_and_report(loss_function.compute(output))
    masks = loss_function.loss_mask
    if not isinstance(masks, Mapping):
        masks = dict.fromkeys(names, masks)
    terms = {}
    for name, of_name in _of_terms("losses", losses, names, call).items():
        if name not in masks:
            raise DataError(
                f"a TokenLoss must have a mask for each term, got {sorted(masks)}. Add {name!r}."
            )
        mask = _constant(masks[name])
        check_one_loss_per_token(of_name, mask, "a TokenLoss")
        terms[name] = TermLosses(of_name, mask, is_whole)
    further = _further_reports(loss_function, terms)
    return ScriptLosses(terms, report, further, is_gathered=is_whole)


def _of_sample_loss(
    call: Call,
    plans: Mapping[str, StepPlan],
    i: int,
    loss_function: SampleLoss,
    output: Any,
) -> ScriptLosses:
    names = [*plans]
    cp = call.groups.cp_rank_in(plan_of_first_term(plans).shapes[i])
    sequence_mask_sum = None
    if loss_function.per_token is None:
        if cp.size > 1:
            check_has_one_group(call.groups)
            raise DataError(
                "a SampleLoss under context parallelism needs per_token=, since each rank has a part "
                "of the tokens, and got none. Give SampleLoss(compute, per_token, loss_mask)."
            )
        losses, report = losses_and_report(loss_function.compute(output))
    else:
        check_has_one_group(call.groups)
        sequences = plan_of_first_term(plans).sequences[i]
        if sequences is None or any(plans[name].sequences[i] is None for name in names):
            raise DataError(
                "SampleLoss(per_token=) needs the token sequences of its microbatch, and got none. Read "
                "Microbatch.of_samples(number, sequences=Microbatch(loss_mask, cu_seqlens))."
            )
        mask = _constant(loss_function.loss_mask)

        def sums_of(x: Tensor) -> Tensor:
            check_one_loss_per_token(x, mask, "per_token of a SampleLoss")
            return sums_by_sequence(x, mask, sequences.shape, call.split, cp, call.groups.cp)

        sums = _for_each_tensor(sums_of, loss_function.per_token(output))
        sequence_mask_sum = sums_by_sequence(mask, mask != 0, sequences.shape, call.split, cp)
        lengths = sequences.mask_sum.to(mask.device, mask.dtype)
        losses, report = losses_and_report(loss_function.compute(sums, lengths))
    terms = {}
    for name, of_name in _of_terms("losses", losses, names, call).items():
        number = plans[name].sizes[i]
        if not is_plain(of_name) or of_name.numel() != number:
            raise DataError(
                f"a SampleLoss must have a loss for each of the {number} samples of the microbatch, "
                f"got {described(of_name)}. Return losses [samples], neither summed nor divided."
            )
        ones = torch.ones(of_name.shape, dtype=at_least_fp32(of_name.dtype), device=of_name.device)
        terms[name] = TermLosses(of_name, ones, True, sequence_mask_sum)
    return ScriptLosses(terms, report, _further_reports(loss_function, terms))


def _further_reports(
    loss_function: TokenLoss | SampleLoss, terms: Mapping[str, TermLosses]
) -> list[tuple[Report, Sequence[str]]]:
    """The script's function of losses and weights, with the names of its terms, if it has one."""
    return [] if loss_function.report is None else [(loss_function.report, [*terms])]


def _of_stock_function(
    plans: Mapping[str, StepPlan], loss_function: Callable[..., Any], output: Any
) -> ScriptLosses:
    names = [*plans]
    mask = bound_mask(loss_function)
    if mask is None:
        raise HostError(
            "a forward step must return functools.partial(loss_func, loss_mask) with a parameter named "
            f"loss_mask, or a TokenLoss, got {name_of(loss_function)}. Bind the mask, or return "
            "megatron_loss_agg.mcore.TokenLoss."
        )
    if len(names) > 1:
        raise HostError(
            f"a loss of the terms {sorted(names)} must be a TokenLoss, whose losses are a mapping of "
            f"them, got {name_of(loss_function)}. Return TokenLoss; for Megatron's distillation "
            "add the extension of examples/extensions/distillation.py."
        )
    version = _version(output)
    with torch.no_grad():
        returned = loss_function(output)
    if _version(output) != version:
        raise HostError(
            f"a loss function must not write into the model's losses, whose gradients the hook takes "
            f"as they were, and {name_of(loss_function)} does. Make a new tensor (losses = losses * x), "
            "or return a TokenLoss."
        )
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        raise HostError(
            "a loss function must return (loss, report) or (loss, number of tokens, report), got "
            f"{_results(returned)}. Change {name_of(loss_function)}."
        )
    check_one_loss_per_token(output, mask, "the model's output")
    terms = {names[0]: TermLosses(output, _constant(mask))}
    return ScriptLosses(
        terms,
        _mapping(returned[-1]),
        further_reports=[],
        stock_loss=returned[0],
        returns_sum=len(returned) == 3,
    )


def losses_and_report(results: Any) -> tuple[Any, dict[str, Any]]:
    """The losses alone have an empty report."""
    if isinstance(results, (Tensor, Mapping)):
        return results, {}
    if not isinstance(results, (tuple, list)) or len(results) != 2:
        raise HostError(
            f"compute must return losses or (losses, report), got {_results(results)}. Return one of "
            "these."
        )
    return results[0], _mapping(results[1])


def merged_reports(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both together; DataError for a name in both."""
    if shared := sorted(one.keys() & other.keys()):
        raise DataError(
            f"reports must have different names, got two of {shared}: of the script, an aggregated "
            "loss or an extension. Rename yours."
        )
    return {**one, **other}


def check_one_loss_per_token(losses: Any, mask: Any, of: str) -> None:
    """Raise DataError unless both have as many elements, in one order."""
    if is_plain(losses) and isinstance(mask, Tensor) and same_order(losses.shape, mask.shape):
        return
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else described(mask)
    raise DataError(
        f"losses of {of} must be one for each element of the loss mask {shape}, without a sum or mean "
        f"over tokens, got {described(losses)}. Call the model with labels, or return a TokenLoss with "
        "the mask of the same tokens: under context parallelism this rank's part, see CPLayout.shard."
    )


def check_has_gradient(total: Tensor, output: Any) -> None:
    """Raise HostError for losses that were detached from the model's output."""
    if not total.requires_grad and any(x.requires_grad for x in _tensors_in(output)):
        raise HostError(
            "losses of a training step must have a gradient, and these were detached from the model's "
            "output. Compute them from the output itself."
        )


def bound_mask(loss_function: Any) -> Tensor | None:
    """The ``loss_mask`` that a `functools.partial` binds, by position or name."""
    if not isinstance(loss_function, functools.partial):
        return None
    function, args = loss_function.func, loss_function.args
    mask = loss_function.keywords.get("loss_mask")
    if isinstance(function, FunctionType) and not vars(function):
        # A plain function: reading its code is much faster than making a signature.
        code = function.__code__
        names = code.co_varnames[: min(code.co_argcount, len(args))]
        if "loss_mask" in names:
            mask = args[names.index("loss_mask")]
    elif args:
        with contextlib.suppress(ValueError):  # some built-in functions have no signature
            bound = inspect.signature(function).bind_partial(*args, **loss_function.keywords)
            mask = bound.arguments.get("loss_mask")
    return mask if isinstance(mask, Tensor) else None


def name_of(loss_function: Any) -> str:
    """A readable name, without the tensors that a `functools.partial` binds."""
    if isinstance(loss_function, functools.partial):
        return f"partial({name_of(loss_function.func)})"
    return getattr(loss_function, "__qualname__", type(loss_function).__qualname__)


def _of_terms(kind: str, values: Any, names: Sequence[str], call: Call) -> dict[str, Any]:
    """``values`` by term, in the order of ``names``; an evaluation may lack terms."""
    if not isinstance(values, Mapping) and len(names) == 1:
        return {names[0]: values}
    is_complete = isinstance(values, Mapping) and values.keys() == {*names}
    is_part = isinstance(values, Mapping) and bool(values) and values.keys() < {*names}
    if not is_complete and not (is_part and not call.trains):
        got = sorted(values) if isinstance(values, Mapping) else described(values)
        raise DataError(
            f"{kind} must be a mapping with one for each term of {sorted(names)}, got {got}. Return all "
            "terms of the hook."
        )
    return {name: values[name] for name in names if name in values}


def _for_each_tensor(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    if isinstance(values, Mapping):
        return {name: change(x) for name, x in values.items()}
    return change(values)


def _constant(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor):
        raise DataError(f"a loss mask must be a tensor, got a {type(mask).__name__}. Convert it.")
    return mask.detach().to(at_least_fp32(mask.dtype))


def _mapping(report: Any) -> dict[str, Any]:
    if not isinstance(report, Mapping):
        raise HostError(
            f"a report must be a mapping of names, got a {type(report).__name__}. Return a dict."
        )
    return dict(report)


def _results(results: Any) -> str:
    is_several = isinstance(results, (tuple, list))
    return f"{len(results)} results" if is_several else described(results)


def _version(x: Any) -> int | None:
    """The number of writes to a tensor; inference tensors do not count them."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else None


def _tensors_in(x: Any) -> list[Tensor]:
    """The tensors in mappings, lists and tuples."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Mapping):
        return [tensor for value in x.values() for tensor in _tensors_in(value)]
    if isinstance(x, (list, tuple)):
        return [tensor for value in x for tensor in _tensors_in(value)]
    return []
