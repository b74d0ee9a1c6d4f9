"""One step inside the schedule: its forward steps, with the loss replaced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import GroupError, HostError, MaskError
from megatron_loss_agg.loss import weighted_sum
from megatron_loss_agg.mcore.batches import HOW_TO_READ
from megatron_loss_agg.mcore.lossfunc import TokenLosses, check_is_masked_sum, token_losses
from megatron_loss_agg.mcore.scaling import HostScale
from megatron_loss_agg.mcore.weighting import RowWeights, StepWeights
from megatron_loss_agg.report import Mean


class Step:
    """Gives each loss function of a step, in order, the weights of its microbatch.

    Args:
        verify: compare what the script gives its loss function with what was counted, which costs
            device synchronisations.
        reports_shares: report parts of the step's mean, and not sums and counts.
    """

    def __init__(
        self,
        aggregation: LossAggregation,
        weights: StepWeights,
        scale: HostScale,
        micro_batch_size: int,
        verify: bool,
        reports_shares: bool,
    ) -> None:
        self._aggregation = aggregation
        self._weights = weights
        self._scale = scale
        self._micro_batch_size = micro_batch_size
        self._verify = verify
        self._reports_shares = reports_shares
        self.masks_have_rows = True  # a flat mask does not tell where its samples end
        self._next = 0
        self._packed = False
        self._bad_masks: list[Tensor] = []  # seen, and looked at once the step is through

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

    def _loss(self, loss_func: Callable[..., Any], output: Any) -> tuple[Any, ...]:
        i, self._next = self._next, self._next + 1
        if i >= self._scale.num_microbatches:
            raise HostError(f"a loss beyond the step's {i} microbatches; expected one each")
        tokens = token_losses(loss_func, output)
        self._check_call(i, tokens)
        dtype = torch.promote_types(tokens.losses.dtype, torch.float32)
        weights = self._weights.of(i, tokens.mask, dtype)
        if weights.numel() != tokens.losses.numel():
            raise MaskError(
                f"{tokens.losses.numel()} local losses for {weights.numel()} local weights; "
                "expected the script to split sequences over context-parallel ranks as "
                "CPLayout.thd (packed) or CPLayout.bshd does"
            )
        loss = weighted_sum(weights.reshape(-1), tokens.losses.reshape(-1))
        report = self._report(tokens, loss.detach())
        num_tokens = torch.count_nonzero(tokens.mask).to(torch.int)
        return self._scale.returned(loss, num_tokens, self._weights.total_tokens, report)

    def _report(self, tokens: TokenLosses, loss: Tensor) -> dict[str, Any]:
        """The script's report, its ``lm loss`` made exact, and the aggregated loss beside it."""
        report = tokens.report
        # Of `token_mean` left to the host, `loss` is a sum still, which the host will divide.
        undivided = isinstance(self._weights, RowWeights) and self._scale.per_token
        key = f"{self._aggregation.mode} loss"
        report[key] = self._share(loss)
        if "lm loss" in report or undivided:
            mean = self._token_mean(tokens).to(loss.dtype)
            if "lm loss" in report:
                report["lm loss"] = mean
            if undivided:
                report[key] = mean
        return report

    def _token_mean(self, tokens: TokenLosses) -> Tensor:
        """This rank's part of the report of the mean over the step's tokens."""
        mean = Mean.of(tokens.losses.reshape(-1), tokens.mask.reshape(-1))
        if self._reports_shares:
            return self._share(mean.sum / (self._weights.mask_sum or 1.0))
        return mean.pair()

    def _share(self, part: Tensor) -> Tensor:
        """A report that the host turns into the sum of all parts.

        It adds up both halves over all reports and divides, or averages all quotients.
        """
        share = part * self._scale.reports_per_step
        return torch.stack([share, torch.ones_like(share)])

    def _see_call(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        packed = next((x for x in given if hasattr(x, "qkv_format")), None)
        self._packed = getattr(packed, "qkv_format", None) == "thd"
        own_size = getattr(packed, "local_cp_size", None)
        if own_size not in (None, self._scale.context_parallel_size):
            raise HostError(
                f"a sample with a context-parallel group of its own (local_cp_size={own_size}); "
                f"expected one group of {self._scale.context_parallel_size} for all: "
                "drop --hybrid-context-parallel"
            )

    def _check_call(self, i: int, tokens: TokenLosses) -> None:
        self.masks_have_rows = self.masks_have_rows and tokens.mask.dim() == 2
        by_sample = {self._aggregation.within, self._aggregation.across} - {"step", "microbatch"}
        rows = isinstance(self._weights, RowWeights)
        mask = tokens.mask
        if rows and self._scale.per_token:
            self._bad_masks.append(((mask != 0) & (mask != 1)).any())
        elif rows:
            self._bad_masks.append(~((mask >= 0) & (mask < torch.inf)).all())
            if by_sample != {None}:
                self._check_rows(mask)
        if self._packed and self._weights.rows and by_sample != {None}:
            raise GroupError(
                "the model is called with packed sequences and the batch has no 'cu_seqlens'; "
                f"expected that key: add it, or {HOW_TO_READ}"
            )
        if self._verify:
            self._check_first(i, tokens)

    def _check_rows(self, mask: Tensor) -> None:
        if self._packed or mask.dim() != 2 or mask.shape[0] != self._micro_batch_size:
            raise HostError(
                "packed sequences, or a changed number of rows, after a first step of "
                f"{self._micro_batch_size} rows a microbatch; expected the same layout in every "
                "step: build a LossHook for each"
            )

    def _check_first(self, i: int, tokens: TokenLosses) -> None:
        check_is_masked_sum(tokens, whole=self._scale.context_parallel_size == 1)
        if self._weights.planned is None:
            return
        counted = self._weights.planned.local_mask(i).reshape(-1)
        given = tokens.mask.detach().reshape(-1).to(counted)
        if counted.shape != given.shape or not torch.equal(counted, given):
            raise MaskError(
                "the loss function's mask is not this rank's part of the batch's 'loss_mask'; "
                "expected the script to split it as CPLayout.thd (packed) or CPLayout.bshd does "
                f"and to leave it unchanged: otherwise {HOW_TO_READ} with the final mask"
            )
