"""Refusals of Megatron that a CPU need not heed."""

from __future__ import annotations

import copy
import functools
import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron.core import utils
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.layout import CPLayout


def install() -> None:
    """Let Megatron start without nvcc, route to experts, split packs, and use torch's norms."""
    _skip_kernel_build()
    _split_packs_without_transformer_engine()
    _route_without_transformer_engine()
    _allow_sequence_parallel_norms()


def _skip_kernel_build() -> None:
    """Up to 0.16 Megatron asks nvcc for its version at the start, though it builds nothing."""
    try:
        fused_kernels = importlib.import_module("megatron.legacy.fused_kernels")
    except ImportError:
        return
    fused_kernels.load = lambda args: None  # type: ignore[attr-defined]


def _split_packs_without_transformer_engine() -> None:
    """Give Megatron's data path the one function that it takes from Transformer Engine."""
    if getattr(utils, "tex", None) is None:
        utils.tex = SimpleNamespace(thd_get_partitioned_indices=_packed_index)
    # Up to 0.17 it asks for the version, too.
    split = getattr(utils, "get_thd_batch_on_this_cp_rank", None)
    if split is None:
        return

    @functools.wraps(split)
    def split_anyway(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(utils, "is_te_min_version", return_value=True):
            return split(*args, **kwargs)

    utils.get_thd_batch_on_this_cp_rank = split_anyway


def _packed_index(offsets: Tensor | None, total: int, cp_size: int, cp_rank: int) -> Tensor:
    """Which of a pack's ``total`` tokens a context-parallel rank holds."""
    if offsets is None:
        raise HostError(
            "this Megatron splits packs over context-parallel ranks by 'cu_seqlens_padded', which "
            "its batches lack (as --sft up to 0.17); expected that key: leave "
            "--context-parallel-size at 1"
        )
    return CPLayout.thd(offsets, cp_size, cp_rank).index


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
