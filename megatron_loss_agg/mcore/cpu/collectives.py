"""Patches for Megatron collectives that assume GPU tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def install() -> None:
    """Let ``all_to_all_single`` take split sizes as tensors.

    Megatron's expert token dispatch passes tensors unless it has copied them from a GPU.
    """
    exchange = dist.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        sizes = (_as_list(output_split_sizes), _as_list(input_split_sizes))
        return exchange(output, input, *sizes, *args, **kwargs)

    torch.distributed.all_to_all_single = all_to_all_single


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, Tensor) else sizes
