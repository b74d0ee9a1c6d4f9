"""One step of the host: its loss functions get weights, and its reports exact numbers."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import GroupError, HostError, MaskError, ReportError
from megatron_loss_agg.loss import weighted_sum
from megatron_loss_agg.mcore.batches import HOW_TO_READ
from megatron_loss_agg.mcore.lossfunc import TokenLosses, check_is_masked_sum, token_losses
from megatron_loss_agg.mcore.scaling import HostScale
from megatron_loss_agg.mcore.weighting import PlannedWeights, RowWeights
from megatron_loss_agg.report import Mean
from megatron_loss_agg.terms import Term

ExpectedMask = Callable[[str, int], Tensor]


class Step:
    """Gives each loss function of a step, in order, the weights of its microbatch.

    Args:
        terms: of the loss, by name.
        reports_shares: report parts of the step's mean, and not sums and counts.

    Attributes:
        reports_sum: report the loss of several terms, beside each of them.
        verify: compare what the script computes with what is assumed of it, which costs device
            synchronisations.
        expected_mask: what this rank's part of the mask of (term, microbatch) must be, to be
            verified too; None where that is not known.
    """

    def __init__(
        self,
        terms: Mapping[str, Term],
        weights: PlannedWeights | RowWeights,
        scale: HostScale,
        micro_batch_size: int,
        reports_shares: bool,
    ) -> None:
        self._terms = terms
        self._weights = weights
        self._scale = scale
        self._micro_batch_size = micro_batch_size
        self._reports_shares = reports_shares
        self.reports_sum = False
        self.verify = False
        self.expected_mask: ExpectedMask | None = None
        self._next = 0
        self._packed = False
        # Seen of each microbatch, and looked at once the step is through.
        self._bad_masks: list[Tensor] = []
        self._mask_sums: list[Tensor] = []
        self._expected_sums: list[Tensor] = []

    def hook_forward_step(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """``forward_step``, returning a loss function of ours in place of its own."""

        @functools.wraps(forward_step)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            output, loss_func = forward_step(*args, **kwargs)
            return output, functools.partial(self._loss, loss_func)

        return hooked

    @contextlib.contextmanager
    def watch(self, model: Any) -> Iterator[None]:
        """See how the script calls the last model chunk: packed or not."""
        chunk = model[-1] if isinstance(model, list) else model
        handle = chunk.register_forward_pre_hook(self._see_call, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def finish(self) -> None:
        """Checks that are due once all microbatches are through, before the optimizer's step."""
        if self._next != self._scale.num_microbatches:
            raise HostError(
                f"the schedule computed {self._next} losses for {self._scale.num_microbatches} "
                "microbatches; expected one each"
            )
        if self._bad_masks and bool(torch.stack(self._bad_masks).any()):
            if not self._scale.per_token:
                raise MaskError(
                    "the loss function's mask has negative, infinite or NaN values; expected "
                    "finite values >= 0"
                )
            raise MaskError(
                "fractional loss masks with --calculate-per-token-loss, where Megatron counts "
                "tokens as integers; expected masks of 0 and 1: drop that flag"
            )
        if self._mask_sums:
            given, counted = torch.cat(self._mask_sums), torch.cat(self._expected_sums)
            # `torch.allclose` takes twice as long, which is much of a small step.
            excess = (given.cpu() - counted).abs_().sub_(counted, alpha=1e-5).amax()
            if not float(excess) <= 0:  # NaN, too
                raise MaskError(_CHANGED_MASK)

    def _loss(self, loss_func: Callable[..., Any], output: Any) -> tuple[Any, ...]:
        i, self._next = self._next, self._next + 1
        if i >= self._scale.num_microbatches:
            raise HostError(f"a loss beyond the step's {i} microbatches; expected one each")
        tokens = token_losses(loss_func, output, list(self._terms))
        self._check_call(i, tokens)
        parts = {name: self._aggregated(name, i, tokens) for name in self._terms}
        scaled = [
            self._terms[name].scaled(part, tokens.losses[name]) for name, part in parts.items()
        ]
        loss = scaled[0] if len(scaled) == 1 else torch.stack(scaled).sum()
        with torch.no_grad():
            report = self._report(i, tokens, parts, loss)
        num_tokens, total_tokens = self._counts(i, tokens)
        return self._scale.returned(loss, num_tokens, total_tokens, report)

    def _aggregated(self, name: str, i: int, tokens: TokenLosses) -> Tensor:
        """This rank's part of the aggregated loss of one term; a scalar."""
        losses = tokens.losses[name]
        dtype = torch.promote_types(losses.dtype, torch.float32)
        return weighted_sum(self._weights.weights(name, i, tokens.masks[name], dtype), losses)

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

    def _see_call(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        packed = next((x for x in given if hasattr(x, "qkv_format")), None)
        starts = getattr(packed, "cu_seqlens_q", None)
        alone = self._micro_batch_size == 1 and starts is not None and starts.numel() == 2
        self._packed = getattr(packed, "qkv_format", None) == "thd" and not alone
        own_size = getattr(packed, "local_cp_size", None)
        if own_size not in (None, self._scale.context_parallel_size):
            raise HostError(
                f"a sample with a context-parallel group of its own (local_cp_size={own_size}); "
                f"expected one group of {self._scale.context_parallel_size} for all: "
                "drop --hybrid-context-parallel"
            )

    def _check_call(self, i: int, tokens: TokenLosses) -> None:
        for name, mask in tokens.masks.items():
            if isinstance(self._weights, RowWeights):
                self._check_rows(name, mask)
            else:
                self._check_planned(name, i, mask)
        if self.verify:
            check_is_masked_sum(tokens, whole=self._scale.context_parallel_size == 1)

    def _groups_samples(self, name: str) -> bool:
        """Whether the weights of a term depend on which sample a token is in."""
        aggregation = self._terms[name].aggregation
        return not {aggregation.within, aggregation.across} <= {"step", "microbatch", None}

    def _check_rows(self, name: str, mask: Tensor) -> None:
        if self._scale.per_token:
            self._bad_masks.append(((mask != 0) & (mask != 1)).any())
            return
        # A finite sum has no NaN or inf in it.
        finite = mask.sum(dtype=torch.float32).isfinite()
        self._bad_masks.append((mask < 0).any() | ~finite)
        if not self._groups_samples(name):
            return
        rows = mask.shape[0] if mask.dim() == 2 else self._micro_batch_size
        if self._packed or rows != self._micro_batch_size or mask.numel() % rows:
            raise HostError(
                f"packed sequences, or a mask of shape {tuple(mask.shape)}, after a first step of "
                f"{self._micro_batch_size} rows a microbatch; expected the same layout in every "
                "step: build a LossHook for each"
            )

    def _check_planned(self, name: str, i: int, mask: Tensor) -> None:
        assert isinstance(self._weights, PlannedWeights)
        part = self._weights.parts[name][i]
        if self._packed and self._weights.rows and self._groups_samples(name):
            raise GroupError(
                "the model is called with packed sequences and the batch has no 'cu_seqlens'; "
                f"expected that key: add it, or {HOW_TO_READ}"
            )
        if mask.shape != part.shape:
            _check_shape(mask, part.shape)
        rows = mask.reshape(len(part.mask_sums), -1)
        self._mask_sums.append(rows.sum(dim=1, dtype=torch.float32))
        self._expected_sums.append(part.mask_sums)
        if self.verify and self.expected_mask is not None:
            counted = self.expected_mask(name, i).reshape(-1)
            given = mask.detach().reshape(-1).to(counted)
            if counted.shape != given.shape or not torch.equal(counted, given):
                raise MaskError(_CHANGED_MASK)


def _check_shape(mask: Tensor, expected: tuple[int, ...]) -> None:
    """Raise unless ``mask`` has the elements of ``expected`` in their order."""
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


def _pair(total: Tensor, count: float) -> Tensor:
    """[total, count], as Megatron's training loop takes a report."""
    return torch.stack([total, total.new_full((), count)])


_CHANGED_MASK = (
    "the loss function's mask is not this rank's part of the batch's 'loss_mask'; "
    "expected the script to split it as CPLayout.thd (packed) or CPLayout.bshd does "
    f"and to leave it unchanged: otherwise {HOW_TO_READ} with the final mask"
)
