"""Reads the per-token losses of a forward step; the hook reduces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import DataError, HostError, OptionError
from megatron_loss_agg.mcore.host import GATHERS
from megatron_loss_agg.mcore.reading.loss_function import bound_mask, name_of
from megatron_loss_agg.mcore.weigh import same_order
from megatron_loss_agg.microbatch import for_each_term
from megatron_loss_agg.tensors import at_least_fp32, described, detached, in_dtype, is_plain
from megatron_loss_agg.weighted_sum import weighted_sum


class TokenLoss:
    """A loss function for custom losses that leaves the reduction to the hook.

    Return it from a forward step with the model's output:

        return output, TokenLoss(lambda output: (token_losses(output), report), loss_mask)

    For a loss of several terms, the token losses are a mapping by term, and so is the mask if the
    terms' masks differ. It holds only its arguments, and lives as long as the schedule keeps it.
    The hook calls ``compute`` in the schedule's gradient mode: once, but for the first training
    step with ``whole``.

    Without a hook, a loss of one term works as a stock Megatron loss function: it returns (sum over
    the mask, number of tokens, report). Sums are in fp32, or in fp64 for fp64 inputs.

    Args:
        compute: model output -> (per-token losses, report); the losses in the shape of
            ``loss_mask``, neither masked nor divided: a factor in them stays in the loss, unseen.
            The report is a mapping of names to (sum, count) pairs, for Megatron's training loop, or
            to the metrics of `megatron_loss_agg.report`, for `reduce_reports`.
        loss_mask: of this rank's tokens: its context-parallel shard of the batch's mask.
        whole: if every context-parallel rank has the losses, and ``loss_mask``, of all tokens of
            the microbatch: how they were gathered. ``local_grad``: in the backward pass, a rank's
            part gets the gradient of this rank's losses, without communication; ``reduced_grad``:
            the sum of all ranks'. The hook tells a wrong one in the first step, though not a factor
            by which a gather multiplies gradients besides. A `megatron_loss_agg.report.Sum` of all
            these tokens counts them once a rank: sum this rank's alone, or use the weights below.
        takes_weights: call ``compute(output, weights)``, with the weights of the loss: in the shape
            of ``loss_mask``, fp32 or the mask's wider dtype; by name for several terms.
            ``sum(weights * losses)`` over tokens, microbatches and ranks is the aggregated loss of
            the step, so metrics can be weighed as the loss is, by `megatron_loss_agg.report.Sum`.
            Under ``token_mean`` of a mask that the model makes, they are not yet divided.

    Raises:
        OptionError: an unknown ``whole``.
        HostError: in a step: called without a hook, though it needs one, or a report that is not a
            mapping.
        DataError: in a step: not one loss per element of the mask, or terms that differ from the
            hook's.
    """

    def __init__(
        self,
        compute: Callable[..., tuple[Tensor | Mapping[str, Tensor], Mapping[str, Any]]],
        loss_mask: Tensor | Mapping[str, Tensor],
        whole: str | None = None,
        *,
        takes_weights: bool = False,
    ) -> None:
        if whole not in (None, *GATHERS):
            raise OptionError(f"whole={whole!r}; expected None, {' or '.join(map(repr, GATHERS))}")
        self.compute = compute
        self.loss_mask = loss_mask
        self.whole = whole
        self.takes_weights = takes_weights

    def __call__(self, output: Any) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        if self.whole or self.takes_weights or isinstance(self.loss_mask, Mapping):
            raise HostError(
                "a TokenLoss of several masks, or with whole= or takes_weights=, was called "
                "without a hook; expected a schedule wrapped by LossHook"
            )
        losses, report = self.compute(output)
        _check_one_loss_per_token(losses, self.loss_mask, True)
        assert isinstance(losses, Tensor)  # checked
        losses, mask = (x.reshape(-1).to(at_least_fp32(x.dtype)) for x in (losses, self.loss_mask))
        return weighted_sum(mask, losses), mask.sum().to(torch.int), report


def carries_mask(loss_func: Callable[..., Any]) -> bool:
    """Whether it is a `TokenLoss`, or a `functools.partial` that binds ``loss_mask``."""
    return isinstance(loss_func, TokenLoss) or bound_mask(loss_func) is not None


def token_masks(loss_func: Callable[..., Any], names: Sequence[str]) -> dict[str, Tensor]:
    """The masks that a loss function carries, by term, without gradients and at least fp32."""
    mask: Any = loss_func.loss_mask if isinstance(loss_func, TokenLoss) else bound_mask(loss_func)
    if mask is None:
        raise HostError(
            f"the loss function {name_of(loss_func)}, which the forward step returned, has no "
            "mask; expected functools.partial(loss_func, loss_mask) with a parameter named "
            "loss_mask, or megatron_loss_agg.mcore.TokenLoss"
        )
    if len(names) > 1 and not isinstance(loss_func, TokenLoss):
        raise HostError(
            f"the forward step returned the loss function {name_of(loss_func)} for the terms "
            f"{sorted(names)}; expected a TokenLoss, whose losses are a mapping of them; for "
            "Megatron's distillation LossHook(extensions=[Distillation()])"
        )
    if not isinstance(mask, Mapping):  # one for all terms
        return dict.fromkeys(names, _constant(mask))
    return for_each_term(_constant, _by_term("masks", mask, names))


def _constant(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor):
        raise DataError(f"the loss mask is a {type(mask).__name__}; expected a tensor")
    return in_dtype(detached(mask), at_least_fp32(mask.dtype))


def token_losses(
    loss_func: Callable[..., Any],
    output: Any,
    masks: Mapping[str, Tensor],
    weights: Any = None,
) -> tuple[dict[str, Tensor], dict[str, Any], Sequence[Any] | None]:
    """Losses [tokens] by term, the report, and what a stock loss function returned.

    A stock loss function is called for its checks (NaN, spikes) and its report; its loss is not
    used. The model's output is then the per-token loss. A `TokenLoss` may take ``weights``.
    """
    returned: Any
    if isinstance(loss_func, TokenLoss):
        given = (output, weights) if loss_func.takes_weights else (output,)
        losses, report = _checked(loss_func.compute(*given), "(losses, report)", 2)
        returned = None
    else:
        version = getattr(output, "_version", None)
        with torch.set_grad_enabled(False):  # `no_grad` does it in twice the calls
            results = loss_func(output)
        if getattr(output, "_version", None) != version:
            raise HostError(
                f"the loss function {name_of(loss_func)} writes into the model's losses, whose "
                "gradients the hook takes as they were; expected it to make new tensors: "
                "losses = losses * x, or return a TokenLoss"
            )
        wanted = "(loss, report) or (loss, number of tokens, report)"
        returned = _checked(results, wanted, 2, 3)
        losses, report = output, returned[-1]
    if not isinstance(report, Mapping):
        raise HostError(
            f"the loss function reports a {type(report).__name__}; expected a mapping of names"
        )
    flat = {}
    for name, of_term in _by_term("losses", losses, [*masks]).items():
        _check_one_loss_per_token(of_term, masks[name], returned is None)
        flat[name] = of_term.flatten()  # adds no node to the graph for a vector
    return flat, dict(report), returned


def _checked(results: Any, wanted: str, *numbers: int) -> Any:
    """``results``; raises HostError unless it is a tuple, or a list, of one of ``numbers``."""
    several = isinstance(results, (tuple, list))
    if several and len(results) in numbers:
        return results
    got = f"{len(results)} results" if several else described(results)
    raise HostError(f"the loss function returned {got}; expected {wanted}")


def _by_term(what: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    """``given`` by term, in the order of ``names``."""
    if not isinstance(given, Mapping) and len(names) == 1:
        return {names[0]: given}
    if not isinstance(given, Mapping) or given.keys() != {*names}:
        got = f"for {sorted(given)}" if isinstance(given, Mapping) else f"are {described(given)}"
        raise DataError(f"{what} {got}; expected one for each of {sorted(names)}")
    return {name: given[name] for name in names}


def _check_one_loss_per_token(losses: Any, mask: Tensor, custom: bool) -> None:
    """Raise DataError unless both have one order of tokens; ``custom``: of a `TokenLoss`."""
    if is_plain(losses) and same_order(losses.shape, mask.shape):
        return
    whose, mend = "", "the model called with labels: otherwise return a TokenLoss"
    if custom:
        whose = " of a TokenLoss"
        mend = (
            "without a sum or mean over tokens, and the mask of the same tokens as the losses: "
            "under context parallelism this rank's part, see CPLayout.shard"
        )
    raise DataError(
        f"losses{whose} are {described(losses)} for a loss mask of shape {tuple(mask.shape)}; "
        f"expected one loss per token ({mend})"
    )
