"""Megatron's vision-language and hybrid models: losses and reports are those of the formula.

The first makes its own loss mask in the forward pass, which the batch's reader must give before it;
the second, of releases from 0.18 on, predicts several tokens.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_loss_agg import Microbatch
from tests import oracle
from tests.host import gpt, gradients
from tests.host.cases import Batch, Case, reduced, take
from tests.host.harness import EXACT, TOPOLOGIES, error_of, on_ranks_of
from tests.host.reference import gradient_of, relative_error
from tests.host.refusals import assert_says
from tests.host.steps import PLACES, VOCAB, Places, Weights, sequences, weights_of
from tests.host.test_mtp import CONFIG, DEPTHS, FACTOR, case, logits_of

SIDE, PATCH = 4, 2  # of an image, and of its patches
POSITIONS = (SIDE // PATCH) ** 2  # of an image, instead of its one token
STEP: Places = (((0,), (1,)), ((2,), (3,)))  # numbers of batches
MODES = ("sum", "sample_mean", "microbatch_mean", "token_mean")


def llava_batch(_: Batch, number: tuple[int]) -> Batch:
    """One row or two, with the keys of Megatron's multimodal data set; a row may have no image.

    Masks are of unequal sums; batch 2, of one row, has no active token.
    """
    from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX

    (n,) = number
    generator = torch.Generator().manual_seed(n)
    rows, length = 1 + n % 2, 9 + n
    tokens, labels = torch.randint(0, VOCAB, (2, rows, length), generator=generator)
    tokens[0, n] = DEFAULT_IMAGE_TOKEN_INDEX
    drawn = torch.rand(rows, length, generator=generator) < 0.3 + 0.15 * n
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": drawn.double() * (n != 2),
        "image": torch.randn(1, 3, SIDE, SIDE, generator=generator),
        "position_ids": torch.arange(length).expand(rows, length),
    }


def with_images(batch: Batch) -> Microbatch:
    """A reader with the mask that the model makes: 0 at images and just before them."""
    from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX

    rows = []
    for tokens, mask in zip(batch["tokens"], batch["loss_mask"], strict=True):
        is_image = tokens == DEFAULT_IMAGE_TOKEN_INDEX
        is_before_image = F.pad(is_image[1:], (0, 1))
        mask = mask.masked_fill(is_image | is_before_image, 0)
        rows.append(mask.repeat_interleave(torch.where(is_image, POSITIONS, 1)))
    return Microbatch(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))


def llava_losses(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of all positions, those of images too; and their mask."""
    images = batch["image"], batch["tokens"], batch["position_ids"], None
    return model(*images, batch["labels"], batch["loss_mask"])


def llava_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    losses, mask = llava_losses(model, next(data_iterator))
    return losses, partial(gpt.stock_loss_func, mask)


def llava_model(per_token: bool) -> Any:
    """In fp64; the same weights on every rank."""
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    double = {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
    language = TransformerConfig(**gpt.SETTINGS, **double, calculate_per_token_loss=per_token)
    vision, projection = deepcopy(language), deepcopy(language)
    vision.num_layers = 1
    vision.vision_model_type = "internvit"  # CLIP's own norm needs Transformer Engine
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    model = LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=get_gpt_layer_local_spec(),
        language_vocab_size=VOCAB,
        language_max_sequence_length=64,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=True,
        vision_projection_config=projection,
        vision_projection_layer_spec=linear,
        language_position_embedding_type="rope",
        img_h=SIDE,
        img_w=SIDE,
        patch_dim=PATCH,
    )
    model.model_type = ModelType.encoder_or_decoder  # as Megatron's training loop sets it
    return model


def whole_loss(mode: str, made: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
    """Of the losses and masks of all microbatches, by the oracle's weights."""
    step = [
        [[oracle.Sample(tuple(row.tolist())) for row in mask] for _, mask in rank] for rank in made
    ]
    weights = oracle.step_weights(mode, step)
    flat = [w for rank in weights for of_mb in rank for w in of_mb]
    rows = [row for rank in made for losses, _ in rank for row in losses]
    return sum((torch.tensor(w) * row).sum() for w, row in zip(flat, rows, strict=True))


@on_ranks_of("dp2")
def test_megatrons_llava_is_exact(name: str) -> None:
    for per_token in (False, True):
        model = llava_model(per_token)
        chunks = [gpt.data_parallel(model)]
        for mode in MODES:
            way = {"hook": {"read_batch": with_images}, "step": llava_step}
            step = Case(mode, places=STEP, per_token=per_token, batch=llava_batch, **way)
            with gpt.KeepDouble():
                reports = reduced(take(step, TOPOLOGIES[name], chunks))
                made = [[llava_losses(model, llava_batch({}, mb)) for mb in rank] for rank in STEP]
            loss = whole_loss(mode, made)
            found = {key: p.main_grad for key, p in model.named_parameters()}
            assert relative_error(found, gradient_of(loss, model)) <= EXACT, step
            shown = {"lm loss": whole_loss("token_mean", made), f"{mode} loss": loss}
            wanted = {key: float(x) for key, x in shown.items()}
            assert {key: reports[key] for key in wanted} == pytest.approx(wanted, rel=EXACT), step


@on_ranks_of("dp2")
def test_a_mask_that_the_model_makes_is_refused_unless_it_is_read(name: str) -> None:
    case = Case("sample_mean", places=STEP, batch=llava_batch, step=llava_step)
    assert_says(
        error_of(take, case, TOPOLOGIES[name], [gpt.data_parallel(llava_model(False))]),
        "DataError: the loss function's mask must have the shape of this rank's part of the "
        "batch's mask, (1,  ... (a mask that the model makes, as in LLaVA, is not supported); or "
        "give a function batch -> Microbatch",
    )


@on_ranks_of("dp2")
def test_multi_token_prediction_of_the_hybrid_model_is_exact(name: str) -> None:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec

    norm, stack = LocalSpecProvider().layer_norm(), hybrid_stack()
    parts = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=ColumnParallelLinear
    )
    layers = [ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=parts)]
    block = mtp.MultiTokenPredictionBlockSubmodules(layer_specs=layers)
    stack.submodules.mtp_block_spec = ModuleSpec(
        module=mtp.MultiTokenPredictionBlock, submodules=block
    )
    config = gpt.build(**CONFIG).config
    pattern = {"hybrid_layer_pattern": "*-/*-/*-", "position_embedding_type": "rope"}
    model = HybridModel(config, stack, VOCAB, 256, **pattern)
    for key, parameter in model.named_parameters():
        parameter.data = gradients.initial_value(key, parameter).double()
    expected = gradient_of(loss_alone(model, weights_of("prompt_mean", PLACES[2])), model)
    chunks = [gpt.data_parallel(model)]
    take(case("bshd", False, "prompt_mean"), TOPOLOGIES[name], chunks)
    assert relative_error(gradients.of(chunks), expected) <= EXACT


def loss_alone(model: Any, weights: Weights) -> Tensor:
    """The main loss, and its part of each depth, whose logits at t predict label t + depth."""
    parts = []
    for i, of_sample in weights:
        sequence, w = sequences()[i], torch.tensor(of_sample, dtype=torch.float64)
        for depth, logits in enumerate(logits_of(model, sequence)):
            kept = max(len(w) - depth, 0)
            losses = F.cross_entropy(logits[:kept], sequence.labels[depth:], reduction="none")
            parts.append((FACTOR / DEPTHS if depth else 1.0) * (w[depth:] * losses).sum())
    return torch.stack(parts).sum()


def hybrid_stack() -> Any:
    """Layers of attention and MLP, each a part of a GPT's: the host's own spec needs a GPU."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    whole = vars(get_gpt_layer_local_spec().submodules)
    attention, mlp = (
        TransformerLayerSubmodules(**{name: whole[name] for name in names})
        for names in (
            ("input_layernorm", "self_attention", "self_attn_bda"),
            ("pre_mlp_layernorm", "mlp", "mlp_bda"),
        )
    )
    layers = HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )
    return ModuleSpec(module=HybridStack, submodules=layers)
