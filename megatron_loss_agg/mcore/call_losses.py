"""One call of the host's schedule, with weighted losses and exact reports."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.extension import MicrobatchLoss, Watch, denominator
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.reading.model_calls import ModelCall, ModelCalls
from megatron_loss_agg.mcore.step import PlannedStep
from megatron_loss_agg.mcore.token_loss import TokenLoss, carries_mask, token_losses, token_masks
from megatron_loss_agg.mcore.weigh import LocalWeights, Weigher
from megatron_loss_agg.microbatch import tensors_in
from megatron_loss_agg.tensors import at_least_fp32
from megatron_loss_agg.weighted_sum import times_coefficient, weighted_sum_of_fitting


class CallLosses:
    """Gives each loss function of a call the weights of its microbatch."""

    def __init__(
        self,
        call: Call,
        planned: Callable[[], PlannedStep],  # the whole step; called when a loss needs it
        watchers: Sequence[Watch | None],  # what `Extension.around` yielded
        own_tokens: dict[int, int | Tensor],  # see `Step`; is added to
    ) -> None:
        self._call = call
        self._planned = planned
        self._watchers = [watch for watch in watchers if watch is not None]
        self._own_tokens = own_tokens
        self._model_calls = ModelCalls(call.chunks[-1], call.groups.cp_size)
        self._next = call.first_index
        self._computed: set[int] = set()  # microbatches with a loss

    def run(self, schedule: Callable[..., Any], data_iterator: Any) -> Any:
        """Call ``schedule`` with our losses; HostError unless it computes one a microbatch."""
        with self._model_calls.watched():
            result = self._call.run(schedule, self._forward_step, data_iterator)
        expected, found = self._call.scale.num_microbatches, len(self._computed)
        if found != expected and (found or not self._call.may_lack_mask):
            raise HostError(
                f"the schedule computed {found} losses for {expected} microbatches; expected one "
                "each: a mask in all loss functions of a call, or in none, and a schedule that "
                "takes num_microbatches as it is given"
            )
        return result

    def _forward_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[..., Any] | None]:
        """Call the script's forward step, and replace its loss function by ours.

        All that a loss depends on is bound here, so that it may be computed twice.
        """
        call = self._call
        output, loss_func = call.arguments["forward_step_func"](*args, **kwargs)
        model = args[1] if len(args) > 1 else kwargs.get("model")
        if len(call.chunks) > 1 and model is not call.chunks[-1]:
            return output, loss_func  # the schedule does not ask for this one's loss
        i, self._next = self._next, self._next + 1
        model_call = self._model_calls.take()
        if loss_func is None and call.may_lack_mask:
            return output, None  # the schedule returns the outputs themselves
        return output, functools.partial(self._loss, i, model_call, loss_func)

    def _loss(
        self, i: int, model_call: ModelCall | None, loss_func: Callable[..., Any], output: Any
    ) -> Any:
        """What the host gets of microbatch ``i`` in place of what ``loss_func`` returns."""
        call = self._call
        if call.may_lack_mask and not carries_mask(loss_func):
            return loss_func(output)
        self._computed.add(i)
        names: Sequence[str] = [*call.terms]
        for extension in call.extensions:
            loss_func, names = extension.adapt(call, loss_func, names)
        masks, plan = token_masks(loss_func, names), self._planned()
        # How losses of all tokens were gathered; None: they are of this rank's tokens.
        gather = loss_func.whole if isinstance(loss_func, TokenLoss) else None
        weigher = Weigher(call, plan, i, model_call, call.groups.cp_size if gather else 1)
        local = {name: weigher.of_term(name, mask) for name, mask in masks.items()}
        to_script = None
        if isinstance(loss_func, TokenLoss) and loss_func.takes_weights:
            to_script = _for_script(local, masks)
        losses, reports, returned = token_losses(loss_func, output, masks, to_script)
        unfactored = {
            name: local[name].unfactored(masks[name], at_least_fp32(x.dtype))
            for name, x in losses.items()
        }
        weights = {name: local[name].factored(w) for name, w in unfactored.items()}
        sums = {name: weighted_sum_of_fitting(w, losses[name]) for name, w in weights.items()}
        parts = [
            times_coefficient(call.terms[name].coefficient, x, losses[name])
            for name, x in sums.items()
        ]
        total = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        if call.trains and torch.is_grad_enabled() and not total.requires_grad:
            _refuse_detached(output)
        x = MicrobatchLoss(
            call=call,
            plan=plan,
            i=i,
            losses=losses,
            masks=masks,
            local=local,
            unfactored=unfactored,
            weights=weights,
            loss_func=loss_func,
            returned=returned,
            inputs=() if model_call is None else model_call.inputs,
            total=total,
            reports=reports,
        )
        self._report(x, sums)
        own = self._own_tokens_of(x)
        return call.scale.returned(x.total, own, plan.total_tokens, x.reports, gather)

    def _report(self, x: MicrobatchLoss, sums: Mapping[str, Tensor]) -> None:
        """Add the pairs of the terms, given their weighted sums, of extensions and of the total."""
        call = self._call
        for name, part in sums.items():
            over = denominator(call.terms[name].aggregation, x.plan.terms[name])
            x.report(f"{name} loss", x.sum_pair(f"{name} loss", part, over))
        for watch in self._watchers:
            watch(x)
        if call.total_name is not None and len(sums) == len(call.terms):
            x.report(call.total_name, x.sum_pair(call.total_name, x.total))
        if "lm loss" in x.reports:
            x.reports["lm loss"] = x.token_mean("lm loss")

    def _own_tokens_of(self, x: MicrobatchLoss) -> int | Tensor:
        """What this rank tells the host that its part of a microbatch has.

        The last call of a step tells all calls' tokens, by which the host scales the gradients.
        """
        call = self._call
        own: int | Tensor = call.groups.cp_part(x.plan.tokens[x.i])
        if x.plan.divided_by_host:
            active = x.masks[x.first].count_nonzero()
            own = active if x.copies == 1 else call.groups.cp_part(active)
        self._own_tokens[x.i] = own
        if x.i == call.first_index and call.ends_step:
            own = own + sum(self._own_tokens[earlier] for earlier in range(x.i))
        return own


def _for_script(local: Mapping[str, LocalWeights], masks: Mapping[str, Tensor]) -> Any:
    """Weights for a `TokenLoss` that takes them: summed over ranks they are the plan's."""
    weights = {
        name: (x.weights(masks[name], masks[name].dtype) / x.copies).view(masks[name].shape)
        for name, x in local.items()
    }
    return weights if len(weights) > 1 else next(iter(weights.values()))


def _refuse_detached(output: Any) -> None:
    """Raise HostError for losses that were detached from the model's output."""
    if any(x.requires_grad for x in tensors_in(output)):
        raise HostError(
            "losses without a gradient in a training step; expected those of the model's output, "
            "not detached"
        )
