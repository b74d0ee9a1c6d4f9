"""One call of the host's schedule, with weighted losses and exact reports.

Suffix: ``_T`` tokens of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import AggregationError, HostError
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss, Reports, denominator
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.reading.model_calls import ModelCall, ModelCalls
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.mcore.step import PlannedStep
from megatron_loss_agg.mcore.token_loss import (
    TokenLoss,
    TokenLosses,
    carries_mask,
    token_losses,
    token_masks,
)
from megatron_loss_agg.mcore.weigh import LocalWeights, weighed
from megatron_loss_agg.microbatch import tensors_in
from megatron_loss_agg.report import RunningMean
from megatron_loss_agg.weights import (
    at_least_fp32,
    times_coefficient,
    weighted_sum_of_fitting,
)


class CallLosses:
    """Gives each loss function of a call the weights of its microbatch.

    Args:
        plan: returns the plan of the whole step; called when a loss needs it.
        splits: those that the script may use.
        extensions: whose `Extension.adapt` reads loss functions.
        watchers: what `Extension.around` yielded.
        own_tokens: of each microbatch of the step, as this rank told the host; is added to.
        total: under which name the sum of several terms is reported.
        running_means: see `Reports`.
    """

    def __init__(
        self,
        call: Call,
        plan: Callable[[], PlannedStep],
        splits: Splits,
        extensions: Sequence[Extension],
        watchers: Sequence[Callable[[MicrobatchLoss], None]],
        own_tokens: dict[int, int | Tensor],
        total: str | None,
        running_means: MutableMapping[str, RunningMean] | None,
    ) -> None:
        self._call = call
        self._plan = plan
        self._splits = splits
        self._extensions, self._watchers = extensions, watchers
        self._own_tokens = own_tokens
        self._total = total
        self._running_means = running_means
        self._model_calls = ModelCalls(call.chunks[-1], call.groups.cp_size)
        self.watching_the_model = self._model_calls.watched
        self._next = call.first
        self._computed: set[int] = set()  # microbatches with a loss

    def forward_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[..., Any] | None]:
        """Call the script's forward step, and replace its loss function by ours.

        All that a loss depends on is bound here, so that it may be computed twice.
        """
        call = self._call
        output, loss_func = call.forward_step(*args, **kwargs)
        model = args[1] if len(args) > 1 else kwargs.get("model")
        if len(call.chunks) > 1 and model is not call.chunks[-1]:
            return output, loss_func  # the schedule does not ask for this one's loss
        i, self._next = self._next, self._next + 1
        if i > call.last:
            raise HostError(
                f"a forward step beyond the call's {call.scale.num_microbatches} microbatches; "
                "expected one each"
            )
        model_call = self._model_calls.take()
        if loss_func is None and call.may_lack_mask:
            return output, None  # the schedule returns the outputs themselves
        return output, functools.partial(self._loss, i, model_call, loss_func)

    def finish(self) -> None:
        """Raise HostError unless the schedule has computed one loss for each microbatch."""
        expected, found = self._call.scale.num_microbatches, len(self._computed)
        if found != expected and (found or not self._call.may_lack_mask):
            raise HostError(
                f"the schedule computed {found} losses for {expected} microbatches; expected one "
                "each"
            )

    def _loss(
        self, i: int, model_call: ModelCall | None, loss_func: Callable[..., Any], output: Any
    ) -> Any:
        call = self._call
        if call.may_lack_mask and not carries_mask(loss_func):
            return loss_func(output)
        self._computed.add(i)
        names: Sequence[str] = [*call.terms]
        for extension in self._extensions:
            loss_func, names = extension.adapt(call, loss_func, names)
        masks, plan, whole = token_masks(loss_func, names), self._plan(), self._whole(loss_func)

        @functools.cache
        def local() -> dict[str, LocalWeights]:
            return self._weighed(i, masks, plan, model_call, whole is not None)

        tokens = self._tokens(loss_func, output, masks, local)
        weights = {
            name: local()[name].weights(tokens.masks[name], at_least_fp32(losses.dtype))
            for name, losses in tokens.losses.items()
        }
        total, parts = self._summed(tokens, weights)
        if call.trains and torch.is_grad_enabled() and not total.requires_grad:
            _check_frozen(output)
        reports = Reports(
            call,
            plan,
            tokens.first,
            local()[names[0]].copies,
            self._running_means,
            i == call.first,
        )
        loss = MicrobatchLoss(
            i=i,
            is_last=i == call.last,
            plan=plan,
            losses=tokens.losses,
            masks=tokens.masks,
            local=local(),
            weights=weights,
            whole=whole,
            returned=tokens.reduced,
            inputs=[] if model_call is None else model_call.inputs,
            sum_pair=reports.summed,
            total=total,
            reports=tokens.report,
        )
        for name, part in parts.items():
            key, over = f"{name} loss", denominator(call.terms[name].aggregation, plan.terms[name])
            loss.report(key, reports.summed(key, part, over))
        for watch in self._watchers:
            watch(loss)
        if self._total is not None and weights.keys() == call.terms.keys():
            loss.report(self._total, reports.summed(self._total, loss.total))
        if "lm loss" in loss.reports:
            loss.reports["lm loss"] = reports.token_mean("lm loss", total.dtype)
        own = self._own_tokens_of(i, plan, tokens.first[1], whole)
        return call.scale.returned(loss.total, own, plan.total_tokens, loss.reports, whole)

    def _whole(self, loss_func: Callable[..., Any]) -> str | None:
        """How losses of all tokens were gathered, where context-parallel ranks split them."""
        if self._call.scale.context_parallel_size == 1:
            return None
        whole = loss_func.whole if isinstance(loss_func, TokenLoss) else None
        self._splits.settle(whole is not None)
        return whole

    def _weighed(
        self,
        i: int,
        masks: Mapping[str, Tensor],
        plan: PlannedStep,
        model_call: ModelCall | None,
        whole: bool,
    ) -> dict[str, LocalWeights]:
        call = self._call
        return {
            name: weighed(
                plan.terms[name],
                call.terms[name].aggregation,
                i,
                mask,
                model_call,
                call.groups,
                self._splits,
                whole,
            )
            for name, mask in masks.items()
        }

    def _tokens(
        self,
        loss_func: Callable[..., Any],
        output: Any,
        masks: dict[str, Tensor],
        local: Callable[[], Mapping[str, LocalWeights]],
    ) -> TokenLosses:
        """The script's losses of tokens, whose errors name more than those of the mask."""
        given = None
        if isinstance(loss_func, TokenLoss) and loss_func.takes_weights:
            # Summed over ranks they are the plan's. A copy: the script may edit it.
            given = {
                name: (x.weights(mask, at_least_fp32(mask.dtype)) / x.copies).view(mask.shape)
                for (name, x), mask in zip(local().items(), masks.values(), strict=True)
            }
        try:
            return token_losses(loss_func, output, masks, given)
        except AggregationError:
            raise
        except Exception:  # a script's own, which a mask that is not this rank's part may cause
            local()
            raise

    def _summed(
        self, tokens: TokenLosses, weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and its weighted sums by term, without their coefficients."""
        parts, scaled = {}, []
        for name, w in weights.items():
            losses = tokens.losses[name]
            parts[name] = part = weighted_sum_of_fitting(w, losses)
            scaled.append(times_coefficient(self._call.terms[name].coefficient, part, losses))
        return scaled[0] if len(scaled) == 1 else torch.stack(scaled).sum(), parts

    def _own_tokens_of(
        self, i: int, plan: PlannedStep, mask: Tensor, whole: str | None
    ) -> int | Tensor:
        """What this rank tells the host that its part of a microbatch has.

        The host scales the gradients of all calls of a step by the token count of the last one.
        """
        call = self._call
        own: int | Tensor = call.groups.cp_part(plan.tokens[i])
        if plan.divided_by_host:
            active = mask.count_nonzero()
            own = active if whole is None else call.groups.cp_part(active)
        self._own_tokens[i] = own
        if i == call.first and call.ends_step:
            own = own + sum(self._own_tokens[earlier] for earlier in range(i))
        return own


def _check_frozen(output: Any) -> None:
    """Raise HostError for a loss without a gradient, unless the model's output has none either."""
    if any(x.requires_grad for x in tensors_in(output)):
        raise HostError(
            "losses without a gradient in a training step; expected those of the model's output, "
            "not detached"
        )
