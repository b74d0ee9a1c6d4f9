"""Lifts Megatron restrictions that do not apply on CPU or over gloo."""

from __future__ import annotations

import copy
import functools
import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core import utils
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from megatron_loss_agg.cp_layout import CPLayout
from megatron_loss_agg.mcore.cpu import device


def install() -> None:
    """Patch Megatron to run over gloo, without streams, nvcc and Transformer Engine."""
    _wait_inside_streams()
    _take_split_sizes()
    _skip_kernel_build()
    _split_packs_without_transformer_engine()
    _route_without_transformer_engine()
    _allow_sequence_parallel_norms()
    _norm_without_transformer_engine()
    _predict_tokens_without_transformer_engine()
    _let_experts_have_biases()


def _wait_inside_streams() -> None:
    """Wait for reductions of gradients where Megatron waits for a stream: gloo has no streams."""
    coalescing = param_and_grad_buffer._coalescing_manager

    @functools.wraps(coalescing)
    def in_order(*args: Any, async_ops: bool = False, **kwargs: Any) -> Any:
        return coalescing(*args, async_ops=async_ops and not device.inside_stream(), **kwargs)

    param_and_grad_buffer._coalescing_manager = in_order


def _take_split_sizes() -> None:
    """Let ``all_to_all_single`` take tensors, as Megatron's expert dispatch passes split sizes."""
    exchange = dist.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        options = {name: _as_list(value) for name, value in kwargs.items()}
        return exchange(output, input, *map(_as_list, args), **options)

    dist.all_to_all_single = all_to_all_single


def _as_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _skip_kernel_build() -> None:
    """Keep Megatron up to 0.16 from asking for nvcc's version at startup; nothing is built."""
    try:
        fused_kernels = importlib.import_module("megatron.legacy.fused_kernels")
    except ImportError:
        return
    fused_kernels.load = lambda args: None  # type: ignore[attr-defined]


def _split_packs_without_transformer_engine() -> None:
    """Provide the one Transformer Engine function that Megatron's data path uses."""
    if getattr(utils, "tex", None) is None:

        def index(offsets: Tensor, total: int, cp_size: int, cp_rank: int) -> Tensor:
            return CPLayout.thd(offsets, cp_size, cp_rank).index

        utils.tex = SimpleNamespace(thd_get_partitioned_indices=index)
    # Up to 0.17 Megatron also checks the version of Transformer Engine.
    split = getattr(utils, "get_thd_batch_on_this_cp_rank", None)
    if split is None:
        return

    @functools.wraps(split)
    def split_anyway(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(utils, "is_te_min_version", return_value=True):
            return split(*args, **kwargs)

    utils.get_thd_batch_on_this_cp_rank = split_anyway


def _route_without_transformer_engine() -> None:
    """Define a name that the router in releases up to 0.15 reads."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _allow_sequence_parallel_norms() -> None:
    """Mark the parameters of torch's norms so that Megatron all-reduces their gradients.

    Megatron refuses torch's norms only because they do not set the mark.
    """
    construct = WrappedTorchNorm.__new__

    def construct_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        unsplit_config = copy.copy(config)
        unsplit_config.sequence_parallel = False
        norm = construct(cls, unsplit_config, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = construct_marked


def _norm_without_transformer_engine() -> None:
    """Provide the norm at the end of hybrid models, which ignores their layer spec."""
    if transformer_engine.HAVE_TE:
        return

    def construct(cls: type, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        return WrappedTorchNorm(config, hidden_size, eps)

    transformer_engine.TENorm.__new__ = construct


def _predict_tokens_without_transformer_engine() -> None:
    """Replace an MTP function that, from 0.20 on, calls isinstance with classes that are None."""
    if not transformer_engine.HAVE_TE:
        vars(multi_token_prediction).update(is_inference_column_parallel_linear=lambda layer: False)


def _let_experts_have_biases() -> None:
    """Return a new tensor from reductions, since local experts add their biases to it in place.

    Megatron returns the input itself, and torch refuses to change that in place within autograd.
    """
    reduce = mappings._reduce

    @functools.wraps(reduce)
    def reduced(input_: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return reduce(input_, *args, **kwargs).clone()

    mappings._reduce = reduced
