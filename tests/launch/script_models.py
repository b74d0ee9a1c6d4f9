"""Models and forward steps in the form of Megatron-LM's further training scripts, in fp64.

For the ranks alone: the import needs the stand-ins for a GPU that `tests.host.preload` enables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
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


class Script(NamedTuple):
    """What a training script is made of."""

    model: Callable[[TransformerConfig], Any]
    forward: Callable[[Any, Batch], tuple[Any, Tensor]]  # the model's output, and the loss mask

    def forward_step(self, data_iterator: Any, model: Any) -> tuple[Any, Any]:
        output, mask = self.forward(model, next(data_iterator))
        return output, partial(gpt.stock_loss_func, mask)


def config() -> TransformerConfig:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    double = {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
    return TransformerConfig(**{**gpt.SETTINGS, **double})


def batch(number: int) -> Batch:
    """Two rows, with masks of unequal sums; the second row of batch 1 has no active token."""
    generator = torch.Generator().manual_seed(number)
    tokens, labels, decoder = torch.randint(0, VOCAB, (3, 2, LENGTH), generator=generator)
    active = torch.rand(2, LENGTH, generator=generator) < torch.tensor([[0.8], [0.3]])
    if number == 1:
        active[1] = False
    mask = active.double()
    return {"tokens": tokens, "labels": labels, "decoder_tokens": decoder, "loss_mask": mask}


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


def _t5(config: TransformerConfig) -> Any:
    encoder = get_t5_encoder_with_local_block_spec(config.num_layers)
    decoder = get_t5_decoder_with_local_block_spec(config.num_layers)
    return T5Model(config, config, encoder, decoder, VOCAB, LENGTH)


def _encoded_and_decoded(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    none = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    later = none | torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    tokens = batch["tokens"], batch["decoder_tokens"]
    return model(*tokens, none, later, none, lm_labels=batch["labels"]), batch["loss_mask"]


class WithImage(GPTModel):
    """Puts three positions of an image before the text, and returns the mask of the whole."""

    def __init__(self, config: TransformerConfig) -> None:
        layer = get_gpt_layer_local_spec()
        super().__init__(config, layer, VOCAB, LENGTH + 3, position_embedding_type="rope")
        self.image = torch.nn.Parameter(torch.randn(3, 1, config.hidden_size))

    def forward(self, tokens: Tensor, labels: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        text = self.embedding(tokens, gpt.positions_like(tokens))
        labels, loss_mask = F.pad(labels, (3, 0)), F.pad(loss_mask, (3, 0))
        whole = torch.cat([self.image.expand(-1, len(tokens), -1), text])
        positions = gpt.positions_like(labels)
        losses = super().forward(labels, positions, None, decoder_input=whole, labels=labels)
        return losses, loss_mask


def _with_image(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(batch["tokens"], batch["labels"], batch["loss_mask"])


SCRIPTS = {
    "pretrain_t5.py": Script(_t5, _encoded_and_decoded),
    "pretrain_vlm.py": Script(WithImage, _with_image),
}
