"""One call of the host's schedule, with weighted losses and exact reports."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.errors import HostError, ReportError
from megatron_loss_agg.mcore.checks import Checks
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.host_loss import (
    TokenLosses,
    carries_mask,
    check_is_masked_sum,
    token_losses,
)
from megatron_loss_agg.mcore.local_weights import LocalMask, StepWeights
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.weights import times_coefficient, weighted_sum


class Options(NamedTuple):
    """What a `Step` does besides weighting losses."""

    verify: bool  # check that stock loss functions return masked sums; waits for the device
    reports_total: bool  # report the total loss besides each term
    reports_quotients: bool  # the host averages quotients of reports instead of summing pairs
    passes_unmasked: bool  # leave loss functions without a mask alone


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
        self.checks = Checks(call, terms.values())
        self._next = 0

    def forward_step(self) -> Callable[..., Any]:
        """The script's forward step, with its loss function replaced by ours."""
        forward_step = self._call.forward_step

        @functools.wraps(forward_step)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            output, loss_func = forward_step(*args, **kwargs)
            return output, functools.partial(self._loss, loss_func)

        return hooked

    def finish(self) -> None:
        """Checks after the last microbatch, before the optimizer's step.

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
        self.checks.finish()

    def _loss(self, loss_func: Callable[..., Any], output: Any) -> Any:
        if self._options.passes_unmasked and not carries_mask(loss_func):
            return loss_func(output)
        i, self._next = self._next, self._next + 1
        if i >= self._call.scale.num_microbatches:
            raise HostError(f"a loss beyond the call's {i} microbatches; expected one each")
        tokens = token_losses(loss_func, output, list(self._terms))
        weights = self._weights()
        parts = self._weighted_sums(self._first + i, tokens, weights)
        if self._options.verify:
            check_is_masked_sum(tokens, whole=self._call.scale.context_parallel_size == 1)
        scaled = [
            times_coefficient(self._terms[name].coefficient, part, tokens.losses[name])
            for name, part in parts.items()
        ]
        loss = scaled[0] if len(scaled) == 1 else torch.stack(scaled).sum()
        mask = weights.local_mask(self._first + i)
        with torch.no_grad():
            report = self._report(tokens, parts, loss, mask, weights)
        active = mask.active_tokens + (0 if i else self._carried_tokens)
        num_tokens = torch.full((), active, dtype=torch.int, device=loss.device)
        return self._call.scale.returned(loss, num_tokens, weights.active_tokens, report)

    def _weighted_sums(
        self, i: int, tokens: TokenLosses, weights: StepWeights
    ) -> dict[str, Tensor]:
        """This rank's part of the aggregated loss of each term; scalars."""
        made: dict[tuple[int, int, torch.dtype], Tensor] = {}
        parts = {}
        self.checks.check_call()
        chosen = weights.choose(i, tokens.masks, self.checks.inputs, self._splits)
        for name, losses in tokens.losses.items():
            mask, local = tokens.masks[name], chosen[name]
            dtype = torch.promote_types(losses.dtype, torch.float32)
            key = id(local), id(mask), dtype  # terms with equal weights share them, and the checks
            if key not in made:
                self.checks.check(mask, local.mask)
                made[key] = local.made_for(mask, dtype)
                self.checks.collect(local.checksum_of(mask, made[key]), local.checksum)
            parts[name] = weighted_sum(made[key], losses)
        return parts

    def _report(
        self,
        tokens: TokenLosses,
        parts: Mapping[str, Tensor],
        loss: Tensor,
        local: LocalMask,
        weights: StepWeights,
    ) -> dict[str, Any]:
        """The script's report with an exact ``lm loss``, plus the aggregated losses."""
        # All reports of the step, over microbatches and ranks.
        number = weights.counts.microbatches * self._call.scale.context_parallel_size

        def summed(part: Tensor) -> Tensor:
            """A report that the host's mean over all ``number`` reports turns into the sum."""
            return _pair(part * number, 1.0)

        report = tokens.report
        ours = {f"{name} loss": summed(part) for name, part in parts.items()}
        if self._options.reports_total:
            ours["loss"] = summed(loss)
        taken = sorted(ours.keys() & report.keys())
        if taken:
            raise ReportError(
                f"the loss function reports {taken}, which are the aggregated losses' names; "
                "expected other names"
            )
        report.update(ours)
        if "lm loss" in report:
            losses, mask = tokens.first
            mask = mask.reshape(-1).to(torch.promote_types(mask.dtype, torch.float32))
            total = weighted_sum(mask, losses)
            if self._options.reports_quotients:
                mean = summed(total / (next(iter(weights.tokens.values())) or 1.0))
            else:
                mean = _pair(total, local.total)
            report["lm loss"] = mean.to(loss.dtype)
        return report


def _pair(total: Tensor, count: float) -> Tensor:
    """[total, count], the form of a report in Megatron's training loop."""
    return torch.stack([total, total.new_full((), count)])
