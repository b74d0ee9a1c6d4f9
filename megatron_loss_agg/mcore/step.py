"""One step of the host: its loss functions get weights, and its reports exact numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import HostError, ReportError
from megatron_loss_agg.loss import weighted_sum
from megatron_loss_agg.mcore.lossfunc import TokenLosses, check_is_masked_sum, token_losses
from megatron_loss_agg.mcore.maskcheck import MaskChecks
from megatron_loss_agg.mcore.scaling import HostScale
from megatron_loss_agg.mcore.weighting import PlannedWeights, RowWeights
from megatron_loss_agg.report import Mean
from megatron_loss_agg.terms import Term


class Step:
    """Gives each loss function of a step, in order, the weights of its microbatch.

    Args:
        terms: of the loss, by name.
        mask_checks: compare how the model is called, and with what masks, with the plan.
        reports_shares: report parts of the step's mean, and not sums and counts.

    Attributes:
        reports_sum: report the loss of several terms, beside each of them.
        verify: compare what the script's loss functions return with what is assumed of them,
            which costs device synchronisations.
    """

    def __init__(
        self,
        terms: Mapping[str, Term],
        weights: PlannedWeights | RowWeights,
        scale: HostScale,
        mask_checks: MaskChecks,
        reports_shares: bool,
    ) -> None:
        self._terms = terms
        self._weights = weights
        self._scale = scale
        self.mask_checks = mask_checks
        self._reports_shares = reports_shares
        self.reports_sum = False
        self.verify = False
        self._next = 0

    def hook_forward_step(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """``forward_step``, returning a loss function of ours in place of its own."""

        @functools.wraps(forward_step)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            output, loss_func = forward_step(*args, **kwargs)
            return output, functools.partial(self._loss, loss_func)

        return hooked

    def finish(self) -> None:
        """Checks that are due once all microbatches are through, before the optimizer's step.

        Raises:
            HostError: the schedule has not computed one loss for each microbatch.
            MaskError: see `MaskChecks.finish`.
        """
        if self._next != self._scale.num_microbatches:
            raise HostError(
                f"the schedule computed {self._next} losses for {self._scale.num_microbatches} "
                "microbatches; expected one each"
            )
        self.mask_checks.finish()

    def _loss(self, loss_func: Callable[..., Any], output: Any) -> tuple[Any, ...]:
        i, self._next = self._next, self._next + 1
        if i >= self._scale.num_microbatches:
            raise HostError(f"a loss beyond the step's {i} microbatches; expected one each")
        tokens = token_losses(loss_func, output, list(self._terms))
        alike = self._alike(i, tokens.masks)
        self.mask_checks.check(i, {first: tokens.masks[first] for first in alike.values()})
        if self.verify:
            check_is_masked_sum(tokens, whole=self._scale.context_parallel_size == 1)
        parts = self._aggregated(i, tokens, alike)
        scaled = [
            self._terms[name].scaled(part, tokens.losses[name]) for name, part in parts.items()
        ]
        loss = scaled[0] if len(scaled) == 1 else torch.stack(scaled).sum()
        with torch.no_grad():
            report = self._report(i, tokens, parts, loss)
        num_tokens, total_tokens = self._counts(i, tokens)
        return self._scale.returned(loss, num_tokens, total_tokens, report)

    def _alike(self, i: int, masks: Mapping[str, Tensor]) -> dict[str, str]:
        """For each term the first one that has the same mask and the same weights."""
        weights, alike = self._weights, {}
        first: dict[tuple[int, int], str] = {}
        for name, mask in masks.items():
            made_by = weights.parts[name][i] if isinstance(weights, PlannedWeights) else weights
            alike[name] = first.setdefault((id(made_by), id(mask)), name)
        return alike

    def _aggregated(
        self, i: int, tokens: TokenLosses, alike: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """This rank's part of the aggregated loss of each term; scalars."""
        weights: dict[tuple[str, torch.dtype], Tensor] = {}
        parts = {}
        for name, losses in tokens.losses.items():
            first, dtype = alike[name], torch.promote_types(losses.dtype, torch.float32)
            if (first, dtype) not in weights:
                mask = tokens.masks[first]
                weights[first, dtype] = self._weights.weights(first, i, mask, dtype)
            parts[name] = weighted_sum(weights[first, dtype], losses)
        return parts

    def _counts(self, i: int, tokens: TokenLosses) -> tuple[Tensor, float]:
        """Active tokens of this rank's microbatch, on its device, and of the whole step."""
        losses, mask = tokens.first
        if isinstance(self._weights, RowWeights):
            # The host alone counts here, and only masks of 0 and 1.
            return mask.sum(dtype=torch.float32).to(torch.int), 0
        active = next(iter(self._weights.parts.values()))[i].active_tokens
        number = torch.full((), active, dtype=torch.int, device=losses.device)
        return number, self._weights.total_tokens

    def _report(
        self, i: int, tokens: TokenLosses, parts: Mapping[str, Tensor], loss: Tensor
    ) -> dict[str, Any]:
        """The script's report, its ``lm loss`` made exact, and the aggregated losses beside it."""
        report = tokens.report
        ours = {f"{name} loss": self._share(part) for name, part in parts.items()}
        if self.reports_sum:
            ours["loss"] = self._share(loss)
        taken = sorted(ours.keys() & report.keys())
        if taken:
            raise ReportError(
                f"the loss function reports {taken}, which are the aggregated losses' names; "
                "expected other names"
            )
        report.update(ours)
        # Of `token_mean` left to the host, the loss is a sum still, which the host will divide.
        undivided = isinstance(self._weights, RowWeights) and self._scale.per_token
        if "lm loss" in report or undivided:
            mean = self._token_mean(i, tokens).to(loss.dtype)
            if "lm loss" in report:
                report["lm loss"] = mean
            if undivided:
                report.update({f"{name} loss": mean for name in parts})
        return report

    def _token_mean(self, i: int, tokens: TokenLosses) -> Tensor:
        """This rank's part of the report of the mean over the step's tokens."""
        losses, mask = tokens.first
        mask = mask.reshape(-1)
        if isinstance(self._weights, RowWeights):
            return Mean.of(losses, mask).pair()
        dtype = torch.promote_types(mask.dtype, torch.float32)
        total = weighted_sum(mask.to(dtype), losses)
        if self._reports_shares:
            of_step = next(iter(self._weights.mask_sums.values()))
            return self._share(total / (of_step or 1.0))
        # The mask itself is compared with that of the plan, so its sum needs no second pass.
        return _pair(total, next(iter(self._weights.parts.values()))[i].mask_sum)

    def _share(self, part: Tensor) -> Tensor:
        """A report that the host turns into the sum of all parts.

        It adds up both halves over all reports and divides, or averages all quotients.
        """
        return _pair(part * self._scale.reports_per_step, 1.0)


def _pair(total: Tensor, count: float) -> Tensor:
    """[total, count], as Megatron's training loop takes a report."""
    return torch.stack([total, total.new_full((), count)])
