"""Models of Megatron-LM's further training scripts, and the forward step of pretrain_t5.py.

For the ranks alone: the import needs the stand-ins for a GPU that `tests.host.preload` enables.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import (
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from tests.host import gpt
from tests.host.steps import VOCAB

LENGTH = 12
Batch = dict[str, Tensor]


def t5() -> T5Model:
    """In fp64; the same weights on every rank."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    double = {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
    config = TransformerConfig(**{**gpt.SETTINGS, **double})
    encoder = get_t5_encoder_with_local_block_spec(config.num_layers)
    decoder = get_t5_decoder_with_local_block_spec(config.num_layers)
    return T5Model(config, config, encoder, decoder, VOCAB, LENGTH)


def t5_batch(number: int) -> Batch:
    """Two rows, with masks of unequal sums; the second row of batch 1 has no active token."""
    generator = torch.Generator().manual_seed(number)
    tokens, labels, decoder = torch.randint(0, VOCAB, (3, 2, LENGTH), generator=generator)
    mask = (torch.rand(2, LENGTH, generator=generator) < torch.tensor([[0.8], [0.3]])).double()
    if number == 1:
        mask[1] = 0
    return {"tokens": tokens, "labels": labels, "decoder_tokens": decoder, "loss_mask": mask}


def t5_losses(model: Any, batch: Batch) -> Tensor:
    none = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    later = none | torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    tokens = batch["tokens"], batch["decoder_tokens"]
    return model(*tokens, none, later, none, lm_labels=batch["labels"])


def t5_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    batch = next(data_iterator)
    return t5_losses(model, batch), partial(gpt.stock_loss_func, batch["loss_mask"])


def hybrid_stack() -> ModuleSpec:
    """Layers of attention and MLP, from 0.18 on: Megatron's own spec needs Transformer Engine."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules

    local = LocalSpecProvider()
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=local.layer_norm(),
                    self_attention=ModuleSpec(
                        module=SelfAttention,
                        params={"attn_mask_type": AttnMaskType.causal},
                        submodules=SelfAttentionSubmodules(
                            linear_qkv=ColumnParallelLinear,
                            core_attention=local.core_attention(),
                            linear_proj=RowParallelLinear,
                        ),
                    ),
                    self_attn_bda=get_bias_dropout_add,
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=local.layer_norm(),
                    mlp=ModuleSpec(
                        module=MLP,
                        submodules=MLPSubmodules(
                            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
                        ),
                    ),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
        ),
    )
