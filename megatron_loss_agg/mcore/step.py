"""One call of the host's schedule, with weighted losses and exact reports.

Weights come from the planned masks, but the script masks its losses with those that it passes to
its loss functions. The loss is right only if both are the same, which is checked here.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.errors import GroupError, HostError, MaskError, ReportError
from megatron_loss_agg.mcore.batches import HOW_TO_READ
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.host_loss import (
    TokenLosses,
    carries_mask,
    check_is_masked_sum,
    token_losses,
)
from megatron_loss_agg.mcore.local_weights import LocalMask, StepWeights
from megatron_loss_agg.weights import times_coefficient, weighted_sum

_CHANGED_MASK = (
    "the loss function's mask is not this rank's part of the batch's 'loss_mask'; "
    "expected the script to split it as CPLayout.thd (packed) or CPLayout.bshd does "
    f"and to leave it unchanged: otherwise {HOW_TO_READ} with the final mask"
)


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
        first: index in the step of the call's first microbatch.
        carried_tokens: this rank's active tokens in earlier calls of the step, which this call
            reports to the host.
    """

    def __init__(
        self,
        call: Call,
        terms: Mapping[str, Term],
        weights: Callable[[], StepWeights],
        options: Options,
        first: int = 0,
        carried_tokens: int = 0,
    ) -> None:
        self._call = call
        self._terms = terms
        self._weights = weights
        self._options = options
        self._first = first
        self._carried_tokens = carried_tokens
        self.checks = _Checks(call, any(map(_groups_samples, terms.values())))
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
        mask = weights.first_term[self._first + i].mask
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
        for name, losses in tokens.losses.items():
            local, mask = weights.terms[name][i], tokens.masks[name]
            dtype = torch.promote_types(losses.dtype, torch.float32)
            key = id(local), id(mask), dtype  # terms with equal weights share them, and the checks
            if key not in made:
                self.checks.check(mask, local.mask)
                made[key] = local.made_for(mask, dtype)
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
        scale = self._call.scale
        number = len(weights.first_term) * scale.data_parallel_size * scale.context_parallel_size

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


def _groups_samples(term: Term) -> bool:
    """Whether the weights of a term depend on how tokens group into samples."""
    aggregation = term.aggregation
    return not {aggregation.within, aggregation.across} <= {"step", "microbatch", None}


class _Checks:
    """Compares a call's model calls and masks with what was planned.

    Values on the device are collected, and read once by `finish`: reading them in each microbatch
    would wait for the device each time.
    """

    def __init__(self, call: Call, groups_samples: bool) -> None:
        self._call = call
        self._groups_samples = groups_samples
        self._packed_sequences: int | None = None  # of the last model call; None: rows
        self._sums: list[Tensor] = []
        self._expected_sums: list[Tensor] = []

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Observe how the script calls the last model chunk, which computes the loss."""
        handle = self._call.chunks[-1].register_forward_pre_hook(self._see_call, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def check(self, mask: Tensor, planned: LocalMask) -> None:
        """Check a loss function's mask as far as possible now, and collect its sums for `finish`.

        Raises:
            MaskError: its shape, or its values if the plan kept them, are not the planned ones.
            GroupError: samples are packed, but were planned as rows.
        """
        one_sequence = self._packed_sequences == planned.shape[0] == 1
        rows = not planned.packed and not one_sequence
        if self._packed_sequences is not None and rows and self._groups_samples:
            raise GroupError(
                "the model is called with packed sequences and the batch has no 'cu_seqlens'; "
                f"expected that key: add it, or {HOW_TO_READ}"
            )
        if mask.shape != planned.shape:
            _check_shape(mask, planned.shape)
        if planned.values is not None:
            given = mask.detach().reshape(-1).to(planned.values)
            if not torch.equal(given, planned.values.reshape(-1)):
                raise MaskError(_CHANGED_MASK)
        rows_or_all = mask.detach().reshape(planned.shape if planned.by_row else (1, -1))
        self._sums.append(rows_or_all.sum(dim=-1, dtype=torch.float32))
        self._expected_sums.append(planned.sums)

    def finish(self) -> None:
        """Raise MaskError if some mask's sums are not the planned ones."""
        if not self._sums:
            return
        given, expected = torch.cat(self._sums).cpu(), torch.cat(self._expected_sums)
        # `torch.allclose` takes twice as long, a noticeable part of a small step.
        excess = (given - expected).abs_().sub_(expected, alpha=1e-5)
        if not bool((excess <= 0).all()):  # NaN, too
            raise MaskError(_CHANGED_MASK)

    def _see_call(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        packing = next((x for x in given if hasattr(x, "qkv_format")), None)
        self._packed_sequences = None
        if getattr(packing, "qkv_format", None) == "thd":
            starts = getattr(packing, "cu_seqlens_q", None)
            self._packed_sequences = 0 if starts is None else starts.numel() - 1
        own_size = getattr(packing, "local_cp_size", None)
        cp = self._call.scale.context_parallel_size
        if own_size not in (None, cp):
            raise HostError(
                f"a sample with a context-parallel group of its own (local_cp_size={own_size}); "
                f"expected one group of {cp} for all: drop --hybrid-context-parallel"
            )


def _check_shape(mask: Tensor, expected: tuple[int, ...]) -> None:
    """Raise MaskError unless ``mask`` has as many elements as ``expected``, in the same order."""
    if mask.numel() != math.prod(expected):
        raise MaskError(
            f"{mask.numel()} local losses for {math.prod(expected)} local weights; "
            "expected the script to split sequences over context-parallel ranks as "
            "CPLayout.thd (packed) or CPLayout.bshd does"
        )
    long = [[n for n in shape if n > 1] for shape in (mask.shape, expected)]
    if long[0] != long[1] and min(map(len, long)) > 1:
        raise MaskError(
            f"a loss mask of shape {tuple(mask.shape)}, where this rank's part of the batch's "
            f"is {expected}; expected [samples, seq], for losses too: transpose both"
        )
