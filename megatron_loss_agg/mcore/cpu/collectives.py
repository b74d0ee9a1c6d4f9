"""Patches for Megatron collectives that assume GPU tensors, or streams."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from torch import Tensor

from megatron_loss_agg.mcore.cpu import streams


def install() -> None:
    _take_split_sizes()
    _wait_inside_streams()


def _wait_inside_streams() -> None:
    """Reduce gradients synchronously in a stream of their own.

    Megatron waits for that stream, which does not hold back gloo, and not for the reductions.
    """
    coalescing = param_and_grad_buffer._coalescing_manager

    @functools.wraps(coalescing)
    def in_order(*args: Any, async_ops: bool = False, **kwargs: Any) -> Any:
        return coalescing(*args, async_ops=async_ops and not streams.inside(), **kwargs)

    param_and_grad_buffer._coalescing_manager = in_order


def _take_split_sizes() -> None:
    """Let ``all_to_all_single`` take split sizes as tensors.

    Megatron's expert token dispatch passes tensors unless it has copied them from a GPU.
    """
    exchange = dist.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        named = {name: _as_list(value) for name, value in kwargs.items()}
        return exchange(output, input, *map(_as_list, args), **named)

    torch.distributed.all_to_all_single = all_to_all_single


def _as_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
