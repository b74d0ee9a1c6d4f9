"""Helpers for tensors: dtypes, devices, and checks of a caller's tensors."""

from __future__ import annotations

import functools
from typing import Literal, TypeGuard

import torch
from torch import Tensor

from megatron_loss_agg.errors import AggregationError

LARGEST_FP32 = torch.finfo(torch.float32).max


@functools.cache
def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The wider of ``dtype`` and fp32: half precision cannot hold sums or counts."""
    return torch.promote_types(dtype, torch.float32)


def moved(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``x`` on ``device``, in ``dtype`` if given; a copy from the CPU does not wait for the device."""
    if x.device != device:
        is_on_cpu = x.is_cpu  # a copy to the CPU must wait: it could be read before it has arrived
        if is_on_cpu and torch.accelerator.is_available():
            x = x.pin_memory()
        x = x.to(device, non_blocking=is_on_cpu)
    return x if dtype is None else x.to(dtype)


def is_plain(x: object) -> TypeGuard[Tensor]:
    """True if ``x`` is a dense tensor of real numbers."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_complex()


def described(x: object) -> str:
    """``x`` in words, for an error."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return f"a {x.dtype} tensor of shape {tuple(x.shape)}"


def check_tensors(
    error: type[AggregationError], kind: Literal["real", "floating-point"], /, **inputs: Tensor
) -> None:
    """Raise ``error`` unless all inputs are dense tensors of this kind and of the same shape."""
    (first_name, first), *_ = inputs.items()
    for name, x in inputs.items():
        if not is_plain(x) or (kind == "floating-point" and not x.is_floating_point()):
            raise error(f"{name} must be a {kind}, dense tensor, got {described(x)}. Convert it.")
        if x.shape != first.shape:
            raise error(
                f"{name} must have the shape {tuple(first.shape)} of {first_name}, got "
                f"{tuple(x.shape)}. Reshape it: nothing is broadcast."
            )
