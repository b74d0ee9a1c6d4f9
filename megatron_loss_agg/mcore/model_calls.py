"""How a script calls the model, observed during a call of the schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.microbatch import holds_integers
from megatron_loss_agg.transfer import tensors_in


class ModelCalls:
    """The calls of the model, one before each loss.

    Attributes:
        groups_samples: whether weights depend on how tokens group into samples.
        inputs: the integer tensors of the last call, if kept: this rank's tokens, labels and
            positions.
        packed_sequences: their number in the last call; None: rows.
        outputs: of it, if kept. GradientEdges, not tensors: an in-place edit by the script would
            move a tensor's edge.

    Args:
        keeps_inputs: keep them until the next call.
        keeps_outputs: keep them until `release`.
    """

    def __init__(
        self, call: Call, terms: Iterable[Term], keeps_inputs: bool, keeps_outputs: bool
    ) -> None:
        self._call = call
        self._keeps_inputs = keeps_inputs
        self._keeps_outputs = keeps_outputs
        self._seen = False  # whether the model was called since the last loss
        self.groups_samples = any(map(_groups_samples, terms))
        self.inputs: list[Tensor] = []
        self.packed_sequences: int | None = None
        self.outputs: list[GradientEdge] = []

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

    def check(self) -> None:
        """Raise HostError unless the model was called, as far as its calls matter."""
        matter = self.groups_samples or self._call.scale.context_parallel_size > 1
        if matter and not self._seen:
            raise HostError(
                "a loss without a call of the model that the schedule was given: its packing and "
                "its split over context-parallel ranks are unknown; expected the forward step to "
                "call that model (--overlap-moe-expert-parallel-comm does not: drop it)"
            )
        self._seen = False

    def _see_call(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        self._seen = True
        self.inputs = [x for x in given if self._keeps_inputs and holds_integers(x)]
        self.packed_sequences = None
        self.release()
        # Tensors take long to say that they lack an attribute.
        for x in given:
            if not isinstance(x, Tensor) and hasattr(x, "qkv_format"):
                self._see_packing(x)
                break

    def _see_packing(self, packing: Any) -> None:
        if packing.qkv_format == "thd":
            starts = getattr(packing, "cu_seqlens_q", None)
            self.packed_sequences = 0 if starts is None else starts.numel() - 1
        cp = self._call.scale.context_parallel_size
        own_size = getattr(packing, "local_cp_size", None)
        if own_size not in (None, cp):
            raise HostError(
                f"a sample with a context-parallel group of its own (local_cp_size={own_size}); "
                f"expected one group of {cp} for all: drop --hybrid-context-parallel"
            )

    def _see_outputs(self, module: Any, args: Any, outputs: Any) -> None:
        self.outputs = [get_gradient_edge(x) for x in tensors_in(outputs) if x.requires_grad]


def _groups_samples(term: Term) -> bool:
    """Whether the weights of a term depend on how tokens group into samples."""
    aggregation = term.aggregation
    units = {aggregation.within, aggregation.across}
    return aggregation.function is not None or not units <= {"step", "microbatch", None}
