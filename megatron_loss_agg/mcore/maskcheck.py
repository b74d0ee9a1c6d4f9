"""Whether a step is as it was planned: how its model is called, and the masks of its losses.

The hook weighs a step by the masks that it read, and the script masks its losses by those that it
hands to its loss functions. A loss is what was asked for only where both are the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.errors import GroupError, HostError, MaskError
from megatron_loss_agg.mcore.batches import HOW_TO_READ
from megatron_loss_agg.mcore.scaling import HostScale
from megatron_loss_agg.mcore.weighting import Part, PlannedWeights, RowWeights
from megatron_loss_agg.terms import Term


class MaskChecks:
    """Compares one step's model calls and masks with what its weights were made for.

    What a tensor's values decide is collected and looked at once, by `finish`: to look at them in
    each microbatch would wait for the device in each.

    Args:
        terms: of the loss, by name.
        micro_batch_size: rows of a microbatch, as the schedule is told.

    Attributes:
        expected_mask: what this rank's part of the mask of (term, microbatch) must be, to be
            compared value by value, which waits for the device; None to compare sums alone.
    """

    def __init__(
        self,
        terms: Mapping[str, Term],
        weights: PlannedWeights | RowWeights,
        scale: HostScale,
        micro_batch_size: int,
    ) -> None:
        self._weights = weights
        self._scale = scale
        self._micro_batch_size = micro_batch_size
        self._groups_samples = any(map(_groups_samples, terms.values()))
        self.expected_mask: Callable[[str, int], Tensor] | None = None
        self._packed = False
        # Seen of each mask, and looked at once the step is through.
        self._bad_masks: list[Tensor] = []
        self._counted_masks: list[Tensor] = []  # by the host; what is wrong with a bad one
        self._mask_sums: list[Tensor] = []
        self._expected_sums: list[Tensor] = []

    @contextlib.contextmanager
    def watch(self, model: Any) -> Iterator[None]:
        """See how the script calls the last model chunk: packed or not.

        The call itself raises HostError if a sample has a context-parallel group of its own.
        """
        chunk = model[-1] if isinstance(model, list) else model
        handle = chunk.register_forward_pre_hook(self._see_call, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def check(self, i: int, masks: Mapping[str, Tensor]) -> None:
        """Check what is known of microbatch ``i`` at once, and collect the rest.

        Args:
            masks: this rank's part, by term; terms that have mask and weights in common need be
                there once.

        Raises:
            MaskError: a mask has another shape, or is known to have other values, than planned.
            GroupError: samples are packed, and the plan took them for rows.
            HostError: rows are not those of the first step, whose plan this one goes by.
        """
        if isinstance(self._weights, RowWeights):
            for mask in masks.values():
                self._check_rows(mask)
            return
        if self._packed and self._weights.rows and self._groups_samples:
            raise GroupError(
                "the model is called with packed sequences and the batch has no 'cu_seqlens'; "
                f"expected that key: add it, or {HOW_TO_READ}"
            )
        for name, mask in masks.items():
            self._check_planned(mask, self._weights.parts[name][i])
            if self.expected_mask is not None:
                _check_values(mask, self.expected_mask(name, i))

    def finish(self) -> None:
        """Look at what was collected.

        Raises:
            MaskError: some mask is not the planned one, or has values that cannot be counted.
        """
        if self._bad_masks and bool(torch.stack(self._bad_masks).any()):
            if self._scale.per_token and not any(map(_is_unusable, self._counted_masks)):
                raise MaskError(
                    "fractional loss masks with --calculate-per-token-loss, where Megatron counts "
                    "tokens as integers; expected masks of 0 and 1: drop that flag"
                )
            raise MaskError(
                "the loss function's mask has negative, infinite or NaN values; expected "
                "finite values >= 0: mend it where it is made"
            )
        if self._mask_sums:
            given, counted = torch.cat(self._mask_sums), torch.cat(self._expected_sums)
            # `torch.allclose` takes twice as long, which is much of a small step.
            excess = (given.cpu() - counted).abs_().sub_(counted, alpha=1e-5).amax()
            if not float(excess) <= 0:  # NaN, too
                raise MaskError(_CHANGED_MASK)

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

    def _check_rows(self, mask: Tensor) -> None:
        """Of a step that was not read ahead: nothing is known of its masks but their layout."""
        if self._scale.per_token:
            self._bad_masks.append(((mask != 0) & (mask != 1)).any())
            self._counted_masks.append(mask.detach())
            return
        self._bad_masks.append(_is_unusable(mask))
        if not self._groups_samples:
            return
        rows = mask.shape[0] if mask.dim() == 2 else self._micro_batch_size
        if self._packed or rows != self._micro_batch_size or mask.numel() % rows:
            raise HostError(
                f"packed sequences, or a mask of shape {tuple(mask.shape)}, after a first step of "
                f"{self._micro_batch_size} rows a microbatch; expected the same layout in every "
                "step: build a LossHook for each"
            )

    def _check_planned(self, mask: Tensor, part: Part) -> None:
        if mask.shape != part.shape:
            _check_shape(mask, part.shape)
        rows = mask.reshape(len(part.mask_sums), -1)
        self._mask_sums.append(rows.sum(dim=1, dtype=torch.float32))
        self._expected_sums.append(part.mask_sums)


def _is_unusable(mask: Tensor) -> Tensor:
    """Whether there is something negative, infinite or NaN in it; on its device."""
    # A finite sum has no NaN or inf in it.
    return (mask < 0).any() | ~mask.sum(dtype=torch.float32).isfinite()


def _groups_samples(term: Term) -> bool:
    """Whether the weights of a term depend on which sample a token is in."""
    aggregation = term.aggregation
    return not {aggregation.within, aggregation.across} <= {"step", "microbatch", None}


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


def _check_values(mask: Tensor, expected: Tensor) -> None:
    counted = expected.reshape(-1)
    given = mask.detach().reshape(-1).to(counted)
    if counted.shape != given.shape or not torch.equal(counted, given):
        raise MaskError(_CHANGED_MASK)


_CHANGED_MASK = (
    "the loss function's mask is not this rank's part of the batch's 'loss_mask'; "
    "expected the script to split it as CPLayout.thd (packed) or CPLayout.bshd does "
    f"and to leave it unchanged: otherwise {HOW_TO_READ} with the final mask"
)
