"""One call of the host's schedule, with weighted losses and exact reports.

Suffix: ``_T`` tokens of this rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.errors import AggregationError, HostError, ReportError
from megatron_loss_agg.mcore.checks import MaskChecks
from megatron_loss_agg.mcore.distillation import has_teacher, with_teacher
from megatron_loss_agg.mcore.evaluation import RunningMean
from megatron_loss_agg.mcore.gathers import check_same
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.host_loss import (
    TokenLoss,
    TokenLosses,
    carries_mask,
    check_is_masked_sum,
    kind_of,
    token_losses,
    token_masks,
)
from megatron_loss_agg.mcore.local_weights import LocalWeights
from megatron_loss_agg.mcore.model_calls import ModelCalls
from megatron_loss_agg.mcore.mtp import Depths
from megatron_loss_agg.mcore.pairs import Pairs, make_pairs
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.mcore.step_weights import StepWeights
from megatron_loss_agg.transfer import tensors_in
from megatron_loss_agg.weights import at_least_fp32, times_coefficient, weighted_sum_of_fitting


class Options(NamedTuple):
    """What a `Step` does besides weighting losses."""

    verify: bool  # check that stock loss functions return masked sums; waits for the device
    checked_losses: set[Any]  # kinds of loss functions that were checked; the others are, too
    total: str | None  # under which the total loss is reported besides each term
    # By report, if the host averages quotients instead of summing pairs.
    running_means: defaultdict[str, RunningMean] | None
    passes_unmasked: bool  # leave loss functions without a mask alone
    depths: Depths | None = None  # whose losses are aggregated, too
    reports_late: bool = False  # made when the call ends, for a schedule that reads none before


class Step:
    """Gives each loss function of a call, in order, the weights of its microbatch.

    Args:
        terms: of the loss, by name.
        weights: returns the weights of the whole step; called when a loss needs them.
        splits: those that the script may use.
        first: index in the step of the call's first microbatch.
        carried_tokens: this rank's active tokens in earlier calls of the step, which this call
            reports to the host.
    """

    def __init__(
        self,
        call: Call,
        terms: Mapping[str, Term],
        weights: Callable[[], StepWeights],
        splits: Splits,
        options: Options,
        first: int = 0,
        carried_tokens: int = 0,
    ) -> None:
        self._call = call
        self._terms = terms
        self._weights = weights
        self._splits = splits
        self._options = options
        self._first = first
        self._carried_tokens = carried_tokens
        self._has_teacher = has_teacher(terms)
        self._splits_tokens = call.scale.context_parallel_size > 1
        measures = self._splits_tokens and (options.verify or splits.gathers.is_open(terms))
        compares = self._splits_tokens or options.verify
        self._model_calls = ModelCalls(call, terms.values(), compares, measures)
        self._mask_checks = MaskChecks(call, self._model_calls)
        self._next = 0
        self._reports: list[dict[str, Any]] = []

    def watch(self, stack: contextlib.ExitStack) -> None:
        """Observe how the script calls the model, until ``stack`` ends."""
        stack.enter_context(self._model_calls.watch())
        if self._options.depths is not None:
            stack.enter_context(self._options.depths.watch())

    def forward_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[..., Any] | None]:
        """Call the script's forward step, and replace its loss function by ours."""
        try:
            output, loss_func = self._call.forward_step(*args, **kwargs)
        except Exception as error:
            # A script that splits a batch which cannot be split fails by itself.
            unsplit = None if self._options.passes_unmasked else self._weights().unsplit
            if unsplit is None:
                raise
            raise unsplit from error
        if loss_func is None and self._options.passes_unmasked:
            return output, None  # the schedule returns the outputs themselves
        return output, functools.partial(self._loss, loss_func)

    def finish(self) -> None:
        """Make the reports, and check the call; after its last microbatch.

        Raises:
            HostError: the schedule has not computed one loss for each microbatch.
            MaskError: some mask is not the planned one.
        """
        expected = self._call.scale.num_microbatches
        if self._next != expected and (self._next or not self._options.passes_unmasked):
            raise HostError(
                f"the schedule computed {self._next} losses for {expected} "
                "microbatches; expected one each"
            )
        self._mask_checks.finish()
        if self._options.depths is not None:
            self._options.depths.finish()
        make_pairs(self._reports)

    def _loss(self, loss_func: Callable[..., Any], output: Any) -> Any:
        if self._options.passes_unmasked and not carries_mask(loss_func):
            return loss_func(output)
        i, self._next = self._next, self._next + 1
        if i >= self._call.scale.num_microbatches:
            raise HostError(f"a loss beyond the call's {i} microbatches; expected one each")
        names = [*self._terms]
        if self._has_teacher:
            trains, verify = not self._call.forward_only, self._options.verify
            loss_func, names = with_teacher(loss_func, self._terms, trains, verify)
        masks = token_masks(loss_func, names)
        gather = self._gather(loss_func) if self._splits_tokens else None
        all_tokens = gather is not None or not self._splits_tokens

        given = local = None
        if isinstance(loss_func, TokenLoss) and loss_func.takes_weights:
            local = self._local_weights(self._first + i, masks, all_tokens)
            given = self._given(masks, local, gather)
        try:
            tokens = token_losses(loss_func, output, masks, given)
        except AggregationError:
            raise
        except Exception:  # a script's own, which a mask that is not this rank's part may cause
            if local is None:
                self._local_weights(self._first + i, masks, all_tokens)
            raise
        # After the losses, whose errors name more than those of the mask.
        local = local or self._local_weights(self._first + i, masks, all_tokens)
        weights_T = self._weights_of_tokens(tokens, local)
        self._check_losses(loss_func, tokens, weights_T, gather)
        if i + 1 == self._call.scale.num_microbatches:
            self._mask_checks.send()
        loss, parts = self._summed(tokens, weights_T)
        if self._trains() and not loss.requires_grad:
            _check_frozen(output)
        if self._options.depths is not None:
            name, term = next(iter(self._terms.items()))
            mtp = self._options.depths.losses(local[name].of_depths, term.coefficient, gather)
            loss = loss + mtp.loss
            parts |= {f"mtp_{depth} {name}": part for depth, part in mtp.parts.items()}
        step, mask = self._weights(), local[names[0]].mask
        pairs = Pairs(self._call, step, mask, gather, self._options.running_means, i == 0)
        report = self._report(tokens, weights_T, parts, loss, local, pairs)
        if self._options.reports_late:
            self._reports.append(report)
        else:
            make_pairs([report])
        num_tokens = mask.own_tokens + (0 if i else self._carried_tokens)
        return self._call.scale.returned(loss, num_tokens, step.total_tokens, report, gather)

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and not self._call.forward_only

    def _gather(self, loss_func: Callable[..., Any]) -> str | None:
        """How its losses were gathered over several context-parallel ranks."""
        gather = loss_func.whole if isinstance(loss_func, TokenLoss) else None
        if self._options.verify and self._trains():
            check_same(gather, self._call.groups.cp)
        return gather

    def _check_losses(
        self,
        loss_func: Callable[..., Any],
        tokens: TokenLosses,
        weights_T: Mapping[str, Tensor],
        gather: str | None,
    ) -> None:
        if self._splits_tokens and self._trains():
            self._weights().check_parts(*tokens.first, gather is not None, self._splits)
            if gather is not None:
                outputs, groups = self._model_calls.outputs, self._call.groups
                self._splits.gathers.check(gather, tokens.losses, weights_T, outputs, groups)
        self._model_calls.release()
        kind, checked = kind_of(loss_func), self._options.checked_losses
        if self._options.verify or kind not in checked:
            checked.add(kind)
            check_is_masked_sum(tokens, not self._splits_tokens)

    def _local_weights(
        self, i: int, masks: Mapping[str, Tensor], all_tokens: bool
    ) -> dict[str, LocalWeights]:
        """The weights of microbatch ``i`` by term, whose masks are those of the loss function."""
        self._model_calls.check()
        local = self._weights().choose(i, masks, self._model_calls, self._splits, all_tokens)
        for name, mask in masks.items():
            self._mask_checks.check(mask, local[name].mask, all_tokens)
        return local

    def _given(
        self, masks: Mapping[str, Tensor], local: Mapping[str, LocalWeights], gather: str | None
    ) -> dict[str, Tensor]:
        """Weights for a script, in the masks' shapes; summed over ranks they are the plan's."""
        copies = self._call.scale.loss_copies(gather)
        weights_T = {}
        for name, mask in masks.items():
            dtype = at_least_fp32(mask.dtype)
            # A copy: the script may edit it.
            weights_T[name] = (local[name].made_for(mask, dtype) / copies).view(mask.shape)
        return weights_T

    def _weights_of_tokens(
        self, tokens: TokenLosses, local: Mapping[str, LocalWeights]
    ) -> dict[str, Tensor]:
        """[tokens] of each term, in the dtype of its losses or fp32; collects masks to check."""
        # Terms with equal weights share them, and the checks.
        shared: dict[tuple[int, int, torch.dtype], Tensor] = {}
        weights_T = {}
        for name, losses in tokens.losses.items():
            mask, of_term = tokens.masks[name], local[name]
            dtype = at_least_fp32(losses.dtype)
            key = id(of_term), id(mask), dtype
            if key not in shared:
                shared[key] = of_term.made_for(mask, dtype)
                self._mask_checks.collect(of_term.checksum_of(mask), of_term.checksum)
            weights_T[name] = shared[key]
        return weights_T

    def _summed(
        self, tokens: TokenLosses, weights_T: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and its weighted sums by term, without their coefficients."""
        parts, scaled = {}, []
        for name, w in weights_T.items():
            losses = tokens.losses[name]
            parts[name] = part = weighted_sum_of_fitting(w, losses)
            scaled.append(times_coefficient(self._terms[name].coefficient, part, losses))
        return scaled[0] if len(scaled) == 1 else torch.stack(scaled).sum(), parts

    def _report(
        self,
        tokens: TokenLosses,
        weights_T: Mapping[str, Tensor],
        parts: Mapping[str, Tensor],
        loss: Tensor,
        local: Mapping[str, LocalWeights],
        pairs: Pairs,
    ) -> dict[str, Any]:
        """The script's report with an exact ``lm loss``, plus the aggregated losses."""
        weights, report = self._weights(), tokens.report
        denominators = weights.denominators
        ours: dict[str, Any] = {}
        for name, part in parts.items():
            key = f"{name} loss"
            ours[key] = pairs.summed(key, part, denominators.get(name, 1.0))
        if self._options.total is not None and weights_T.keys() == self._terms.keys():
            ours[self._options.total] = pairs.summed(self._options.total, loss)
        if weights.datasets is not None:
            indices = {name: of_term.mask.dataset_T for name, of_term in local.items()}
            ours |= weights.datasets.reports(
                self._terms, denominators, tokens, weights_T, indices, pairs.summed
            )
        if not ours.keys().isdisjoint(report):
            taken = sorted(ours.keys() & report.keys())
            raise ReportError(
                f"the loss function reports {taken}, which are the aggregated losses' names; "
                "expected other names, or for the sum of several terms LossHook(total=...)"
            )
        report.update(ours)
        if "lm loss" in report:
            report["lm loss"] = pairs.token_mean("lm loss", *tokens.first, loss.dtype)
        return report


def _check_frozen(output: Any) -> None:
    """Raise HostError for a loss without a gradient, unless the model's output has none either."""
    if any(x.requires_grad for x in tensors_in(output)):
        raise HostError(
            "losses without a gradient in a training step; expected those of the model's output, "
            "not detached"
        )
