"""Reads the per-token losses of a forward step; the hook reduces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.errors import HostError, MaskError, ModeError
from megatron_loss_agg.mcore.host import GATHERS
from megatron_loss_agg.mcore.reading.loss_function import bound_mask, name_of
from megatron_loss_agg.microbatch import for_each_term
from megatron_loss_agg.weights import (
    at_least_fp32,
    described,
    detached,
    is_plain,
    weighted_sum,
)


class TokenLoss:
    """A loss function for custom losses that leaves the reduction to the hook.

    Return it from a forward step together with the model's output:

        return output, TokenLoss(lambda output: (token_losses(output), report), loss_mask)

    For a loss of several terms, the token losses are a mapping by term, and so is the mask if the
    terms' masks differ. It holds only its arguments, and lives as long as the schedule keeps it.
    The hook calls ``compute`` in the
    schedule's gradient mode: once, but for the first training step with ``whole``.

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
            by which a gather multiplies gradients besides.
        takes_weights: call ``compute(output, weights)``, with the weights of the loss: in the shape
            of ``loss_mask``, fp32 or the mask's wider dtype; by name for several terms.
            ``sum(weights * losses)`` over tokens, microbatches and ranks is the aggregated loss of
            the step, so metrics can be weighed as the loss is, by `megatron_loss_agg.report.Sum`.

    Raises:
        ModeError: an unknown ``whole``.
        HostError: when called: without a hook, though it needs one, or a report that is not a
            mapping.
        MaskError: when called: not one loss per element of the mask, or terms that differ from the
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
            raise ModeError(f"whole={whole!r}; expected None, {' or '.join(map(repr, GATHERS))}")
        self.compute = compute
        self.loss_mask = loss_mask
        self.whole = whole
        self.takes_weights = takes_weights

    def __call__(self, output: Any) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        if self.whole is not None or self.takes_weights:
            raise HostError(
                "a TokenLoss with whole= or takes_weights= was called without a hook; expected a "
                "schedule wrapped by LossHook"
            )
        losses, report = self.compute(output)
        if not isinstance(losses, Tensor) or not isinstance(self.loss_mask, Tensor):
            raise HostError(
                "a TokenLoss of several terms was called without a hook; expected a schedule "
                "wrapped by LossHook"
            )
        _check_one_loss_per_token(losses, self.loss_mask, True)
        losses, mask = (x.reshape(-1).to(at_least_fp32(x.dtype)) for x in (losses, self.loss_mask))
        return weighted_sum(mask, losses), mask.sum().to(torch.int), report


class TokenLosses(NamedTuple):
    """One microbatch's losses on one rank before any reduction, by term."""

    losses: dict[str, Tensor]  # [tokens]
    masks: dict[str, Tensor]
    report: dict[str, Any]
    reduced: tuple[Any, ...] | None  # what a stock loss function returned

    @property
    def first(self) -> tuple[Tensor, Tensor]:
        """Losses and mask of the first term, from which ``lm loss`` is computed."""
        name = next(iter(self.losses))
        return self.losses[name], self.masks[name]


def carries_mask(loss_func: Callable[..., Any]) -> bool:
    """Whether it is a `TokenLoss`, or a `functools.partial` that binds ``loss_mask``."""
    return isinstance(loss_func, TokenLoss) or bound_mask(loss_func) is not None


def token_masks(loss_func: Callable[..., Any], names: Sequence[str]) -> dict[str, Tensor]:
    """The masks that a loss function carries, by term, without gradients.

    Raises:
        HostError: there is none.
        MaskError: masks for other terms than ``names``, or masks that are no tensors.
    """
    mask: Any
    if isinstance(loss_func, TokenLoss):
        mask = loss_func.loss_mask
    elif len(names) > 1:
        raise HostError(
            f"the forward step returned the loss function {name_of(loss_func)} for the terms "
            f"{sorted(names)}; expected a TokenLoss, whose losses are a mapping of them; for "
            "Megatron's distillation LossHook(extensions=[Distillation()])"
        )
    else:
        mask = bound_mask(loss_func)
        if mask is None:
            raise HostError(
                f"the loss function {name_of(loss_func)}, which the forward step returned, has no "
                "mask; expected functools.partial(loss_func, loss_mask) with a parameter named "
                "loss_mask, or megatron_loss_agg.mcore.TokenLoss"
            )
    if isinstance(mask, Tensor):  # one for all terms
        return dict.fromkeys(names, detached(mask))
    masks = _by_term("masks", mask, names)
    for given in masks.values():
        if not isinstance(given, Tensor):
            raise MaskError(f"the loss mask is a {type(given).__name__}; expected a tensor")
    return for_each_term(detached, masks)


def token_losses(
    loss_func: Callable[..., Any],
    output: Any,
    masks: dict[str, Tensor],
    weights: Mapping[str, Tensor] | None = None,
) -> TokenLosses:
    """Per-token losses and report, from what a forward step returned.

    A stock loss function is called for its checks (NaN, spikes) and its report; its loss is not
    used. The model's output is then the per-token loss.

    Args:
        masks: from `token_masks`; the losses of a single term need not be a mapping.
        weights: for a `TokenLoss` that takes them, by term, in the masks' shapes.

    Raises:
        HostError: another number of results, or a report that is not a mapping.
        MaskError: not one loss per element of the mask, or losses for other terms.
    """
    names = list(masks)
    losses: Any = output
    if isinstance(loss_func, TokenLoss):
        given: list[Any] = []
        if weights is not None:
            given = [weights if len(names) > 1 else weights[names[0]]]
        returned = loss_func.compute(output, *given)
        losses, report = _parts(returned, "a TokenLoss's function", "(losses, report)", 2)
        reduced = None
    else:
        with torch.set_grad_enabled(False):  # `no_grad` does it in twice the calls
            returned = loss_func(output)
        wanted = "(loss, report) or (loss, number of tokens, report)"
        reduced = _parts(returned, "the loss function", wanted, 2, 3)
        report = reduced[-1]
    if not isinstance(report, Mapping):
        raise HostError(
            f"the loss function reports a {type(report).__name__}; expected a mapping of names"
        )
    flat = {}
    for name, of_term in _by_term("losses", losses, names).items():
        _check_one_loss_per_token(of_term, masks[name], reduced is None)
        flat[name] = of_term.flatten()  # of a vector no node of the graph
    return TokenLosses(flat, masks, dict(report), reduced)


def _parts(returned: Any, who: str, wanted: str, *lengths: int) -> Any:
    """``returned``; raises HostError unless it is a tuple, or a list, of one of ``lengths``."""
    several = isinstance(returned, (tuple, list))
    if several and len(returned) in lengths:
        return returned
    got = f"{len(returned)} results" if several else described(returned)
    raise HostError(f"{who} returned {got}; expected {wanted}")


def _by_term(what: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    """``given`` by term, in the order of ``names``."""
    if not isinstance(given, Mapping):
        if len(names) == 1:
            return {names[0]: given}
        raise MaskError(f"{what} are a {type(given).__name__}; expected one for each of {names}")
    if set(given) != set(names):
        raise MaskError(f"{what} for {sorted(given)}; expected one for each of {sorted(names)}")
    return {name: given[name] for name in names}


def _check_one_loss_per_token(losses: Any, mask: Tensor, custom: bool) -> None:
    """Raise MaskError unless shapes match up to axes of length 1, or one is flat.

    Args:
        custom: they are a `TokenLoss`'s.
    """
    if is_plain(losses):
        if losses.shape == mask.shape:
            return
    elif isinstance(losses, Tensor):
        raise MaskError(f"losses are {described(losses)}; expected a real, dense tensor")
    long = [[n for n in getattr(x, "shape", ()) if n != 1] for x in (losses, mask)]
    one_is_flat = min(map(len, long)) <= 1
    fits = isinstance(losses, Tensor) and losses.numel() == mask.numel()
    if not fits or (long[0] != long[1] and not one_is_flat):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        who, otherwise = "losses", "the model called with labels: otherwise return a TokenLoss"
        if custom:
            who = "a TokenLoss whose function returned losses of shape"
            otherwise = (
                "without a sum or mean over tokens, and the mask of the same tokens as the losses: "
                "under context parallelism this rank's part, see CPLayout.shard"
            )
        raise MaskError(
            f"{who} {shape} for a loss mask of shape {tuple(mask.shape)}; expected one loss per "
            f"token ({otherwise})"
        )
