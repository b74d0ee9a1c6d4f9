"""How a forward step calls the model: its integer inputs, and whether they are packed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.microbatch import holds_integers


class ModelCall(NamedTuple):
    """One call of the model."""

    inputs: Sequence[Tensor]  # its integer tensors
    packed_sequences: int | None  # None: rows


class ModelCalls:
    """Observes the calls of the model chunk that computes the loss."""

    def __init__(self, chunk: Any, cp_size: int) -> None:
        self._chunk, self._cp_size = chunk, cp_size
        self._last: ModelCall | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        model = self._chunk
        while hasattr(model, "module"):  # a script may call what Megatron's wrappers hold
            model = model.module
        handle = model.register_forward_pre_hook(self._see, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def take(self) -> ModelCall | None:
        """The last call, once; None: there was none."""
        last, self._last = self._last, None
        return last

    def _see(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        inputs = [x for x in given if holds_integers(x)]
        others = [x for x in given if not isinstance(x, Tensor)]
        packing = next((x for x in others if hasattr(x, "qkv_format")), None)
        self._last = ModelCall(inputs, None if packing is None else self._packed(packing))

    def _packed(self, packing: Any) -> int | None:
        own_size = getattr(packing, "local_cp_size", None)
        if own_size not in (None, self._cp_size):
            raise HostError(
                f"a sample with a context-parallel group of its own (local_cp_size={own_size}); "
                f"expected one group of {self._cp_size} for all: drop --hybrid-context-parallel"
            )
        return packing.cu_seqlens_q.numel() - 1 if packing.qkv_format == "thd" else None
