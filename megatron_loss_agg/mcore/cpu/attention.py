"""Core attention in plain torch for context parallelism and packed sequences.

Megatron's ``DotProductAttention`` leaves both to Transformer Engine. Here each rank gathers the
keys and values of its context-parallel group, restores their order, and calls Megatron's attention
with an explicit mask. It works on a GPU, too.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_loss_agg.cp_layout import CPLayout
from megatron_loss_agg.errors import DataError, HostError

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


def install() -> None:
    """Make Megatron's local layer specs use this attention."""
    LocalSpecProvider.core_attention = lambda self: GatheredAttention


class GatheredAttention(DotProductAttention):
    """Attention of this rank's queries to the keys of its whole context-parallel group.

    A group in ``packed_seq_params`` takes precedence.

    Assumes the zigzag split of Megatron's data path (see `CPLayout`): over the whole sequence
    (sbhd), or within each packed sequence (thd). Without context parallelism and packing it is
    bit-identical to Megatron's ``DotProductAttention``.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # With a larger size, the parent would split its heads or refuse.
        single_rank_config = copy.copy(config)
        single_rank_config.context_parallel_size = 1
        super().__init__(single_rank_config, *args, **kwargs)
        # Named pg_collection from Megatron-Core 0.15 on.
        groups = kwargs.get("pg_collection") or kwargs.get("model_comm_pgs")
        self.cp_group = getattr(groups, "cp", None) or parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """The attention output of this rank's queries, [local seq, batch, heads * head dim].

        Args:
            query: [local seq, batch, heads, head dim], or packed [local tokens, heads, head dim].
            key, value: as ``query``, or with fewer heads (grouped queries).
            attention_mask: true where *not* to attend, [batch or 1, 1, local seq, seq], with
                columns in the order of the whole sequence. Ignored for packed sequences.
        """
        group = self.cp_group
        if getattr(packed_seq_params, "local_cp_size", None) is not None:
            group = packed_seq_params.cp_group  # None if one rank has these tokens
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        if packed_seq_params is None and size == 1:
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias
            )
        if getattr(self.scale_mask_softmax, "window_size", None) is not None:
            raise HostError(
                "--window-size cannot go with context parallelism or packed sequences on a CPU. Drop "
                "one of them."
            )
        if packed_seq_params is None:
            offsets = real = torch.tensor([0, query.size(0) * size])
        else:
            real, offsets = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded
            offsets = real if offsets is None else offsets
            real, offsets = real.cpu(), offsets.cpu()
            # Packs have no batch dimension; hybrid context parallelism has rows with offsets.
            if query.dim() == 3:
                query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            attention_mask = None
        layout = CPLayout.thd(offsets, size, rank)
        if query.size(0) != layout.index.numel():
            raise DataError(
                f"context-parallel rank {rank} of {size} must have {layout.index.numel()} tokens, "
                f"got {query.size(0)}. Let the sequence offsets cover every token, including "
                "padding."
            )
        causal = (attn_mask_type or self.attn_mask_type) in _CAUSAL
        mask = _forbidden(layout.index, offsets, None if causal else real.diff()).to(query.device)
        if attention_mask is not None:
            mask = mask | attention_mask
        key, value = _gather(key, layout, group), _gather(value, layout, group)
        return super().forward(query, key, value, mask, AttnMaskType.arbitrary, attention_bias)


def _gather(local: Tensor, layout: CPLayout, group: Any) -> Tensor:
    """``local`` with its whole sequence axis (0); backward reduce-scatters the gradient."""
    if layout.cp_size == 1:
        return local.contiguous()
    parts = gather_from_sequence_parallel_region(
        local.contiguous(), tensor_parallel_output_grad=True, group=group
    )
    return layout.unshard(parts.chunk(layout.cp_size), dim=0).contiguous()


def _forbidden(query_positions: Tensor, offsets: Tensor, lengths: Tensor | None) -> Tensor:
    """[1, 1, queries, keys]: true where the query must not attend to the key.

    ``lengths`` are the lengths of sequences without padding. None for causal attention, which masks
    all later keys and thus also the padding.
    """
    key_positions = torch.arange(int(offsets[-1]))
    sequence = torch.searchsorted(offsets[1:].long(), key_positions, right=True)
    queries = query_positions.unsqueeze(1)
    mask = sequence[queries] != sequence
    if lengths is None:
        mask |= key_positions > queries
    else:
        mask |= key_positions >= (offsets[:-1] + lengths)[sequence]
    return mask[None, None]
