"""A tiny LLaVA on the real Megatron-Core, which makes its own loss mask, and its forward step.

For the ranks alone: the import needs the stand-ins for a GPU that `tests.host.preload` enables.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX, LLaVAModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tests.host import gpt
from tests.host.steps import VOCAB

SIDE, PATCH = 4, 2  # of an image, and of its patches: four positions instead of its one token
Batch = dict[str, Tensor]


def build(per_token: bool) -> LLaVAModel:
    """In fp64; the same weights on every rank."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    double = {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
    settings = {**gpt.SETTINGS, **double, "calculate_per_token_loss": per_token}
    language = TransformerConfig(**settings)
    vision, projection = deepcopy(language), deepcopy(language)
    vision.num_layers = 1
    vision.vision_model_type = "internvit"  # CLIP's own norm needs Transformer Engine
    model = LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=get_gpt_layer_local_spec(),
        language_vocab_size=VOCAB,
        language_max_sequence_length=64,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=True,
        vision_projection_config=projection,
        vision_projection_layer_spec=MLPSubmodules(
            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
        ),
        language_position_embedding_type="rope",
        img_h=SIDE,
        img_w=SIDE,
        patch_dim=PATCH,
    )
    model.model_type = ModelType.encoder_or_decoder  # as Megatron's training loop sets it
    return model


def batch(number: int) -> Batch:
    """One row or two, with the keys of Megatron's multimodal data set; a row may have no image.

    Masks are of unequal sums; batch 2, of one row, has no active token.
    """
    generator = torch.Generator().manual_seed(number)
    rows, length = 1 + number % 2, 9 + number
    tokens, labels = torch.randint(0, VOCAB, (2, rows, length), generator=generator)
    tokens[0, number] = DEFAULT_IMAGE_TOKEN_INDEX
    mask = (torch.rand(rows, length, generator=generator) < 0.3 + 0.15 * number).double()
    if number == 2:
        mask[:] = 0
    image = torch.randn(1, 3, SIDE, SIDE, generator=generator)
    positions = torch.arange(length).expand(rows, length)
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": mask,
        "image": image,
        "position_ids": positions,
    }


def forward(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The losses of all positions, those of images too, and their mask."""
    losses, mask = model(
        batch["image"],
        batch["tokens"],
        batch["position_ids"],
        None,
        batch["labels"],
        batch["loss_mask"],
    )
    return losses, mask


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    losses, mask = forward(model, next(data_iterator))
    return losses, partial(gpt.stock_loss_func, mask)
