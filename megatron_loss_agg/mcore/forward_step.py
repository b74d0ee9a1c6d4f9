"""The results of a script's forward step: losses of tokens or samples, not yet reduced."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError, HostError
from megatron_loss_agg.mcore.call import Call
from megatron_loss_agg.mcore.split import same_order
from megatron_loss_agg.plan import StepPlan
from megatron_loss_agg.tensors import at_least_fp32, described, is_plain

Report = Callable[[Any, Any], Mapping[str, Any]]


@dataclass(frozen=True)
class TermLosses:
    """The losses of one term of one microbatch on this rank."""

    losses: Tensor  # in any shape
    mask: Tensor  # without gradient, at least fp32, in the same order as the losses
    is_whole: bool = False  # every context-parallel rank has the losses of all tokens, or samples
    sequence_mask_sum: Tensor | None = None  # this rank's part of each sequence's mask sum
    read_mask: Tensor | None = None  # the batch's mask, if the loss has decided another one
    rejected: Tensor | None = None  # bool [samples], decided by the loss


@dataclass(frozen=True)
class ScriptLosses:
    """The results of the script's loss function for one microbatch on this rank."""

    terms: Mapping[str, TermLosses]
    report: dict[str, Any]
    further_reports: Sequence[tuple[Report, Sequence[str]]]  # of losses and weights, of these terms
    is_gathered: bool = False  # some losses depend on the order in which tokens are gathered
    stock_loss: Any = None  # the loss that a stock loss function returned
    has_token_count: bool = False  # with the stock loss, which is then a sum, not a mean
    has_decided_masks: bool = False  # see `token_loss.MaskedLosses`


class LossFunction:
    """A loss function that leaves its reduction to the hook."""

    def script_losses(
        self, call: Call, plans: Mapping[str, StepPlan], i: int, output: Any
    ) -> ScriptLosses:
        """The losses of microbatch ``i``, from the model's ``output``."""
        raise NotImplementedError


def script_losses(
    call: Call,
    plans: Mapping[str, StepPlan],
    i: int,
    loss_function: Any,
    output: Any,
) -> ScriptLosses:
    """The losses of microbatch ``i``, from the model's ``output``.

    A stock loss function (one that reduces losses like Megatron's) is called for its checks (NaN,
    spikes) and its report; its loss is not used. The model's output is then the per-token loss.

    Raises:
        HostError, DataError: the loss function or its results cannot be used.
    """
    if isinstance(loss_function, Mapping):
        parts = []
        functions = values_by_term("loss functions", loss_function, [*plans], call)
        for name, term_function in functions.items():
            part = script_losses(call, {name: plans[name]}, i, term_function, output)
            parts.append(part)
        return ScriptLosses(
            terms={name: x for part in parts for name, x in part.terms.items()},
            report=functools.reduce(merged_reports, (part.report for part in parts), {}),
            further_reports=[x for part in parts for x in part.further_reports],
            is_gathered=any(part.is_gathered for part in parts),
            has_decided_masks=any(part.has_decided_masks for part in parts),
        )
    if isinstance(loss_function, LossFunction):
        return loss_function.script_losses(call, plans, i, output)
    return _stock_losses(plans, loss_function, output)


def _stock_losses(
    plans: Mapping[str, StepPlan], loss_function: Callable[..., Any], output: Any
) -> ScriptLosses:
    names = [*plans]
    mask = bound_mask(loss_function)
    if mask is None:
        raise HostError(
            "a forward step must return functools.partial(loss_func, loss_mask) with a parameter named "
            f"loss_mask, or a TokenLoss, got {function_name(loss_function)}. Bind the mask, or return "
            "megatron_loss_agg.mcore.TokenLoss."
        )
    if len(names) > 1:
        raise HostError(
            f"a loss of the terms {sorted(names)} must be a TokenLoss whose losses are a mapping "
            f"by term, got {function_name(loss_function)}. Return TokenLoss; for Megatron's "
            "distillation add the extension of examples/extensions/distillation.py."
        )
    # The hook's sum saves the output for the backward pass: a function that writes into it would
    # change the gradients.
    version = _version(output)
    with torch.no_grad():
        returned = loss_function(output)
    if _version(output) != version:
        raise HostError(
            "a loss function must not write into the model's losses, since the hook's gradients "
            f"need them unchanged, but {function_name(loss_function)} does. Make a new tensor "
            "(losses = losses * x), or return a TokenLoss."
        )
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        raise HostError(
            "a loss function must return (loss, report) or (loss, number of tokens, report), got "
            f"{results_in_words(returned)}. Change {function_name(loss_function)}."
        )
    check_one_loss_per_token(output, mask, "the model's output")
    terms = {names[0]: TermLosses(output, constant_mask(mask))}
    return ScriptLosses(
        terms,
        report_mapping(returned[-1]),
        further_reports=[],
        stock_loss=returned[0],
        has_token_count=len(returned) == 3,
    )


def merged_reports(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both reports merged; DataError for a name in both."""
    if shared := sorted(one.keys() & other.keys()):
        raise DataError(
            f"reports must have different names, got {shared} twice: from the script, an "
            "aggregated loss or an extension. Rename yours."
        )
    return {**one, **other}


def check_one_loss_per_token(losses: Any, mask: Any, of: str) -> None:
    """Raise DataError unless both have the same number of elements, in the same order."""
    if is_plain(losses) and isinstance(mask, Tensor) and same_order(losses.shape, mask.shape):
        return
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else described(mask)
    raise DataError(
        f"losses of {of} must have one value for each element of the loss mask {shape}, without a "
        f"sum or mean over tokens, got {described(losses)}. Call the model with labels, or return "
        "a TokenLoss with the mask of the same tokens: under context parallelism this rank's part, "
        "see CPLayout.shard."
    )


def check_has_gradient(total: Tensor, output: Any) -> None:
    """Raise HostError for losses that were detached from the model's output."""
    if not total.requires_grad and any(x.requires_grad for x in tensors_in(output)):
        raise HostError(
            "losses of a training step must have a gradient, but these were detached from the "
            "model's output. Compute them from the output itself."
        )


def bound_mask(loss_function: Any) -> Tensor | None:
    """The ``loss_mask`` that a `functools.partial` binds, by position or name."""
    if not isinstance(loss_function, functools.partial):
        return None
    function, args = loss_function.func, loss_function.args
    mask = loss_function.keywords.get("loss_mask")
    if isinstance(function, FunctionType) and not vars(function):
        # A plain function. Reading its code is much faster than a signature, in every microbatch.
        code = function.__code__
        names = code.co_varnames[: min(code.co_argcount, len(args))]
        if "loss_mask" in names:
            mask = args[names.index("loss_mask")]
    elif args:
        with contextlib.suppress(ValueError):  # some built-in functions have no signature
            bound = inspect.signature(function).bind_partial(*args, **loss_function.keywords)
            mask = bound.arguments.get("loss_mask")
    return mask if isinstance(mask, Tensor) else None


def function_key(loss_function: Any) -> object:
    """The code of a loss function: a key that is equal for equal functions.

    Scripts make a new function, or `functools.partial`, for every microbatch. Decorated functions
    share their decorator's code, so the code of the function inside is used. Objects have no code
    of their own, so each is its own key.
    """
    while isinstance(loss_function, functools.partial):
        loss_function = loss_function.func
    loss_function = inspect.unwrap(loss_function)
    return getattr(loss_function, "__code__", (type(loss_function), id(loss_function)))


def function_name(loss_function: Any) -> str:
    """A readable name, without the tensors that a `functools.partial` binds."""
    if isinstance(loss_function, functools.partial):
        return f"partial({function_name(loss_function.func)})"
    return getattr(loss_function, "__qualname__", type(loss_function).__qualname__)


def values_by_term(kind: str, values: Any, names: Sequence[str], call: Call) -> dict[str, Any]:
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


def constant_mask(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor):
        raise DataError(f"a loss mask must be a tensor, got a {type(mask).__name__}. Convert it.")
    return mask.detach().to(at_least_fp32(mask.dtype))


def report_mapping(report: Any) -> dict[str, Any]:
    if not isinstance(report, Mapping):
        raise HostError(
            f"a report must be a mapping of names, got a {type(report).__name__}. Return a dict."
        )
    return dict(report)


def results_in_words(results: Any) -> str:
    is_several = isinstance(results, (tuple, list))
    return f"{len(results)} results" if is_several else described(results)


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors in mappings, lists and tuples."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Mapping):
        return [tensor for value in x.values() for tensor in tensors_in(value)]
    if isinstance(x, (list, tuple)):
        return [tensor for value in x for tensor in tensors_in(value)]
    return []


def _version(x: Any) -> int | None:
    """The number of writes to a tensor; None for inference tensors, which torch does not count."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else None
