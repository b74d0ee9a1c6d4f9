"""The check of tensors that are combined elementwise."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from megatron_loss_agg.errors import AggregationError


def check_tensors(
    error: type[AggregationError], kind: Literal["real", "floating-point"], /, **inputs: Tensor
) -> None:
    """Raise ``error`` unless the inputs are tensors of that kind and of the first one's shape."""
    (first_name, first), *_ = inputs.items()
    for name, x in inputs.items():
        fits = isinstance(x, Tensor) and not x.is_complex()
        if not fits or (kind == "floating-point" and not x.is_floating_point()):
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise error(f"{name} is {got}; expected a {kind} tensor")
        if x.shape != first.shape:
            raise error(
                f"{name} has shape {tuple(x.shape)} and {first_name} {tuple(first.shape)}; "
                "expected the same shape (nothing is broadcast)"
            )
