"""Refusals of Megatron that a CPU need not heed."""

from __future__ import annotations

import copy
import importlib
from typing import Any

from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm


def install() -> None:
    """Let Megatron start without nvcc, route to experts, and use torch's norms in parallel."""
    _skip_kernel_build()
    _route_without_transformer_engine()
    _allow_sequence_parallel_norms()


def _skip_kernel_build() -> None:
    """Up to 0.16 Megatron asks nvcc for its version at the start, though it builds nothing."""
    try:
        fused_kernels = importlib.import_module("megatron.legacy.fused_kernels")
    except ImportError:
        return
    fused_kernels.load = lambda args: None  # type: ignore[attr-defined]


def _route_without_transformer_engine() -> None:
    """Up to 0.15 the router tests a name for None that is bound only with Transformer Engine."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _allow_sequence_parallel_norms() -> None:
    """Give torch's norms the mark that Megatron refuses them for want of.

    By it Megatron sums their gradients over the tensor-parallel group, each rank of which has seen
    a part of the sequence.
    """
    construct = WrappedTorchNorm.__new__

    def construct_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        norm = construct(cls, unsplit, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = construct_marked
