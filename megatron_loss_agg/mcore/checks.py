"""Compares a call's model calls and masks with what was planned.

Weights come from the planned masks, but the script masks its losses with those that it passes to
its loss functions. The loss is right only if both are the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.errors import GroupError, HostError, LayoutError, MaskError
from megatron_loss_agg.mcore.batches import HOW_TO_READ
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.local_weights import LocalMask
from megatron_loss_agg.microbatch import holds_integers
from megatron_loss_agg.transfer import Arriving

_CHANGED_MASK = (
    "the loss function's mask is not this rank's part of the batch's 'loss_mask'; "
    "expected the script to split it over context-parallel ranks as CPLayout can and to leave it "
    f"unchanged: otherwise {HOW_TO_READ} with the final mask"
)


class Checks:
    """What a call's model calls and masks were, against what was planned.

    Values on the device are collected, and read once by `finish`: reading them in each microbatch
    would wait for the device each time.

    Attributes:
        inputs: the integer tensors of the last model call: this rank's tokens, labels, positions;
            only if there are several context-parallel ranks.
        packed_sequences: their number in the last model call; None: rows.
        outputs: of it, if kept. GradientEdges, not tensors: an in-place edit by the script would
            move a tensor's edge.

    Args:
        keeps_outputs: keep them until `release`.
    """

    def __init__(self, call: Call, terms: Iterable[Term], keeps_outputs: bool) -> None:
        self._call = call
        self._keeps_outputs = keeps_outputs
        self.outputs: list[GradientEdge] = []
        self._groups_samples = any(map(_groups_samples, terms))
        self._seen = False  # whether the model was called since the last loss
        self.inputs: list[Tensor] = []
        self.packed_sequences: int | None = None
        self._checksums: list[Tensor] = []
        self._sent: Arriving | None = None
        self._expected: list[Tensor] = []

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Observe how the script calls the last model chunk, which computes the loss."""
        model = self._call.chunks[-1]
        while hasattr(model, "module"):  # a script may call what Megatron's wrappers hold
            model = model.module
        handles = [model.register_forward_pre_hook(self._see_call, with_kwargs=True)]
        if self._keeps_outputs:
            handles.append(model.register_forward_hook(self._see_outputs))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.release()

    def release(self) -> None:
        """Let go of the autograd graph."""
        self.outputs = []

    def check_call(self) -> None:
        """Raise HostError unless the model was called, as far as its calls matter."""
        matter = self._groups_samples or self._call.scale.context_parallel_size > 1
        if matter and not self._seen:
            raise HostError(
                "a loss without a call of the model that the schedule was given: its packing and "
                "its split over context-parallel ranks are unknown; expected the forward step to "
                "call that model (--overlap-moe-expert-parallel-comm does not: drop it)"
            )
        self._seen = False

    def check(self, mask: Tensor, planned: LocalMask, all_tokens: bool) -> None:
        """Check a loss function's mask against what is known about the planned one.

        Args:
            all_tokens: whether the planned one is of all tokens.

        Raises:
            MaskError: its shape, or its values if the plan kept them, are not the planned ones.
            LayoutError: it is of all tokens and should not be, or the other way round.
            GroupError: samples are packed, but were planned as rows.
        """
        one_sequence = self.packed_sequences == planned.shape[0] == 1
        rows = not planned.packed and not one_sequence
        lacks_offsets = self.packed_sequences is not None and rows
        if lacks_offsets and (self._groups_samples or not planned.fits(mask)):
            raise GroupError(
                "the model is called with packed sequences and the batch has no 'cu_seqlens'; "
                f"expected that key: add it, or {HOW_TO_READ}"
            )
        if self._call.scale.context_parallel_size > 1:
            self._check_part(mask, planned, all_tokens)
        if mask.shape != planned.shape:
            _check_shape(mask, planned.shape)
        if not planned.fits(mask):
            raise MaskError(_CHANGED_MASK)

    def _check_part(self, mask: Tensor, planned: LocalMask, all_tokens: bool) -> None:
        """Raise LayoutError for a mask of all tokens instead of a part, or the other way round."""
        cp, size = self._call.scale.context_parallel_size, math.prod(planned.shape)
        if not all_tokens and mask.numel() == cp * size > 0:
            raise LayoutError(
                f"losses for all {mask.numel()} tokens of the batch on a context-parallel rank of "
                f"{cp}; expected those of this rank's part, {size}: shard the losses and the mask "
                "as the model's inputs are, or, if every rank gathers the losses of all tokens, "
                "say how: TokenLoss(whole='local_grad') or 'reduced_grad'"
            )
        if all_tokens and cp * mask.numel() == size > 0:
            raise LayoutError(
                f"TokenLoss(whole=...) with a mask of {mask.numel()} tokens on a context-parallel "
                f"rank of {cp}; expected all {size} of the batch: gather the losses and the mask, "
                "or leave out whole="
            )

    def collect(self, checksum: Tensor, expected: Tensor) -> None:
        """Compare a mask's checksum with the planned one later, in `finish`."""
        self._checksums.append(checksum)
        self._expected.append(expected)

    def send(self) -> None:
        """Start to copy the checksums to the CPU; the call's last loss is made.

        `finish` then waits for this loss, while the GPU still has its backward pass to do.
        """
        if self._checksums:
            self._sent = Arriving.of(torch.cat(self._checksums))

    def finish(self) -> None:
        """Raise MaskError if some mask's checksum is not the planned one."""
        if self._sent is None:
            return
        given, expected = self._sent.arrived().double(), torch.cat(self._expected)
        if torch.equal(given, expected):  # as of masks of 0 and 1
            return
        # `torch.allclose` takes twice as long, a noticeable part of a small step.
        excess = (given - expected).abs_().sub_(expected, alpha=1e-5)
        if not float(excess.amax()) <= 0:  # NaN, too
            raise MaskError(_CHANGED_MASK)

    def _see_call(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        cp = self._call.scale.context_parallel_size
        self._seen, self.inputs = True, [x for x in given if cp > 1 and holds_integers(x)]
        self.packed_sequences = None
        self.release()
        # Tensors take long to say that they lack an attribute.
        for x in given:
            if not isinstance(x, Tensor) and hasattr(x, "qkv_format"):
                self._see_packing(x, cp)
                break

    def _see_packing(self, packing: Any, cp: int) -> None:
        if packing.qkv_format == "thd":
            starts = getattr(packing, "cu_seqlens_q", None)
            self.packed_sequences = 0 if starts is None else starts.numel() - 1
        own_size = getattr(packing, "local_cp_size", None)
        if own_size not in (None, cp):
            raise HostError(
                f"a sample with a context-parallel group of its own (local_cp_size={own_size}); "
                f"expected one group of {cp} for all: drop --hybrid-context-parallel"
            )

    def _see_outputs(self, module: Any, args: Any, outputs: Any) -> None:
        self.outputs = [get_gradient_edge(x) for x in _with_gradient(outputs)]


def _with_gradient(x: Any) -> list[Tensor]:
    """The tensors in what a model returned."""
    if isinstance(x, Tensor):
        return [x] if x.requires_grad else []
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _with_gradient(part)]


def _groups_samples(term: Term) -> bool:
    """Whether the weights of a term depend on how tokens group into samples."""
    aggregation = term.aggregation
    units = {aggregation.within, aggregation.across}
    return aggregation.function is not None or not units <= {"step", "microbatch", None}


def _check_shape(mask: Tensor, expected: tuple[int, ...]) -> None:
    """Raise MaskError unless ``mask`` has as many elements as ``expected``, in the same order."""
    if mask.numel() != math.prod(expected):
        raise MaskError(
            f"{mask.numel()} local losses for {math.prod(expected)} local weights; "
            "expected a batch that is whole, and the losses of this rank's part of every sequence; "
            "where the model makes its own mask, give --loss-aggregation-mask model "
            f"(LossHook(mask='model')), or {HOW_TO_READ}"
        )
    long = [[n for n in shape if n > 1] for shape in (mask.shape, expected)]
    if long[0] != long[1] and min(map(len, long)) > 1:
        raise MaskError(
            f"a loss mask of shape {tuple(mask.shape)}, where this rank's part of the batch's "
            f"is {expected}; expected [samples, seq], for losses too: transpose both"
        )
