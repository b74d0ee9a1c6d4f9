"""Megatron's vision-language and hybrid models: losses and reports are those of the formula.

The first makes its own loss mask; the second, of releases from 0.18 on, predicts several tokens.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import LossHook, read_samples
from tests.host.cases import reduced, take
from tests.host.harness import EXACT, TOPOLOGIES, run_host_ranks
from tests.host.reference import relative_error
from tests.host.steps import PLACES, VOCAB, aggregation, weights_of
from tests.host.test_late_masks import MODES, OPTIONS
from tests.host.test_mtp import CASES, CONFIG, alone

pytestmark = pytest.mark.host

SIDE, PATCH = 4, 2  # of an image, and of its patches: four positions instead of its one token
BATCHES, RANKS = 4, 2
LLAVA = [(False, mode) for mode in MODES] + [(True, mode) for mode in (*MODES, "token_mean")]


def llava_model(per_token: bool) -> Any:
    """In fp64; the same weights on every rank."""
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.host import gpt

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


def llava_batch(number: int) -> dict[str, Tensor]:
    """One row or two, with the keys of Megatron's multimodal data set; a row may have no image.

    Masks are of unequal sums; batch 2, of one row, has no active token.
    """
    from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX

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


def llava_losses(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of all positions, those of images too; and their mask."""
    images = batch["image"], batch["tokens"], batch["position_ids"], None
    return model(*images, batch["labels"], batch["loss_mask"])


def llava_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    from tests.host import gpt

    losses, mask = llava_losses(model, next(data_iterator))
    return losses, partial(gpt.stock_loss_func, mask)


def llava_errors() -> dict[Any, tuple[float, ...]]:
    """A rank, by case: the errors of the gradient and of both reports, against the formula."""
    return {case: errors_of(*case) for case in LLAVA}


def errors_of(per_token: bool, mode: str) -> tuple[float, ...]:
    from tests.host import gpt

    gpt.initialize()
    number = BATCHES // RANKS
    model = llava_model(per_token)
    ddp = gpt.data_parallel(model)
    mine = [llava_batch(gpt.data_rank() * number + i) for i in range(number)]
    hook = LossHook(aggregation(mode, **OPTIONS.get(mode, {})), read_batch=read_samples)
    with gpt.KeepDouble():
        step = {"forward_step_func": llava_step}
        reports = reduced(gpt.run_step(hook, ddp, iter(mine), number, **step))
        made = [llava_losses(model, llava_batch(i)) for i in range(BATCHES)]
    names, parameters = zip(*model.named_parameters(), strict=True)
    wanted = torch.autograd.grad(formula(mode, made), parameters, materialize_grads=True)
    gradient = relative_error(
        {name: p.main_grad for name, p in zip(names, parameters, strict=True)},
        dict(zip(names, wanted, strict=True)),
    )
    shown = {"lm loss": "token_mean", f"{mode} loss": mode}
    return gradient, *(reports[key] / float(formula(x, made)) - 1 for key, x in shown.items())


def formula(mode: str, made: list[tuple[Tensor, Tensor]]) -> Any:
    """The loss of a step of whole microbatches, each with losses and mask [samples, seq]."""
    pairs = [((losses * mask).sum(dim=1), mask.sum(dim=1)) for losses, mask in made]
    samples = sum(len(tokens) for _, tokens in pairs)
    if mode == "sample_mean":
        return sum((s / m.clamp(min=1)).sum() for s, m in pairs) / samples
    if mode == "microbatch_mean":
        return sum(s.sum() / m.sum().clamp(min=1) for s, m in pairs) / len(pairs)
    divisors = {
        "token_mean": sum(m.sum() for _, m in pairs),
        "sum": 3.0,
        "constant": 7.0 * samples,
        "sample_sum": samples,
    }
    return sum(s.sum() for s, _ in pairs) / divisors[mode]


def test_megatrons_llava_is_exact() -> None:
    for rank in run_host_ranks(llava_errors, RANKS):
        assert {
            case: errors for case, errors in rank.items() if max(map(abs, errors)) > EXACT
        } == {}
        assert list(rank) == LLAVA


def hybrid_error() -> float:
    """Every rank: the gradient's error of Megatron's hybrid model."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec

    from tests.host import gpt, gradients

    gpt.initialize()
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
    for name, parameter in model.named_parameters():
        parameter.data = gradients.initial_value(name, parameter).double()
    ((expected, _),) = alone(model, [("01", weights_of("prompt_mean", PLACES[2]))])
    chunks = [gpt.data_parallel(model)]
    take(CASES["dp2"]["rows"], TOPOLOGIES["dp2"], chunks)
    return relative_error(gradients.of(chunks), expected)


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


def test_multi_token_prediction_of_the_hybrid_model_is_exact() -> None:
    assert max(run_host_ranks(hybrid_error, 2, timeout=200)) <= EXACT
