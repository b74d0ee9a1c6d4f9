"""Multi-token prediction of Megatron's hybrid model, which releases from 0.18 on have."""

from __future__ import annotations

import pytest

from tests.host.cases import take
from tests.host.harness import EXACT, TOPOLOGIES, run_host_ranks
from tests.host.reference import relative_error
from tests.host.steps import PLACES, VOCAB, weights_of
from tests.host.test_mtp import CASES, CONFIG, alone

pytestmark = pytest.mark.host


def error() -> float:
    """Every rank: the gradient's error of Megatron's hybrid model."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import multi_token_prediction as mtp

    from tests.host import gpt, gradients
    from tests.launch.script_models import (
        ColumnParallelLinear,
        LocalSpecProvider,
        ModuleSpec,
        hybrid_stack,
    )

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


def test_the_hybrid_model_is_exact() -> None:
    for found in run_host_ranks(error, 2, timeout=200):
        assert found <= EXACT
