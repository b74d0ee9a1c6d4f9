"""The loss of sparse attention's indexer keeps the weight that the host gives it.

Megatron scales it as the auxiliary losses of routers, and nothing else trains the indexer. So the
indexer's gradient must be the same with and without the plugin, under the same flags.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.host.cases import Case, take
from tests.host.harness import TOPOLOGIES, Topology, build_chunks, run_host_ranks
from tests.host.reference import Gradient, relative_error
from tests.host.scripts import with_labels
from tests.host.steps import PLACES

pytestmark = pytest.mark.host

ROUNDING = 1e-6  # of fp32, in which the host computes this loss
CONFIG: dict[str, Any] = {
    "experimental_attention_variant": "dsa",
    "multi_latent_attention": True,
    "add_bias_linear": False,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "rope_type": "rope",
    "apply_rope_fusion": False,
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 4,
    "dsa_indexer_loss_coeff": 1.0,
    "dsa_indexer_rotate_activation": False,  # a kernel for GPUs
}


class Duplicated(torch.nn.Linear):
    """In place of Transformer Engine's layer, the same on every tensor-parallel rank."""

    def __init__(self, size: int, out: int, *, config: Any, init_method: Any, **_: Any) -> None:
        super().__init__(size, out, bias=False, dtype=config.params_dtype)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def layer_with_indexer(config: Any) -> Any:
    """Megatron's layer, whose attention is Megatron's sparse one."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    class Local(LocalSpecProvider):
        def linear(self) -> type:
            return Duplicated

    layer = get_gpt_layer_local_spec()
    attention = variants.get_dsa_module_spec_for_backend(config, Local())
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        setattr(attention.submodules, name, Local().column_parallel_linear())
    layer.submodules.self_attention = attention
    return layer


def build(topology: Topology, per_token: bool) -> list[Any]:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from tests.host import gpt

    made: list[Any] = []

    def config(**settings: Any) -> Any:
        made.append(MLATransformerConfig(**settings))
        return made[-1]

    def layer(**_: Any) -> Any:
        return layer_with_indexer(made[-1])

    with mock.patch.multiple(gpt, TransformerConfig=config, get_gpt_layer_local_spec=layer):
        return build_chunks(topology, per_token, torch.float32, **CONFIG)


def gradient(topology: Topology, case: Case) -> tuple[Gradient, Gradient]:
    """Of the indexer's parameters, and of all others."""
    from tests.host import gradients

    chunks = build(topology, case.per_token)
    take(case, topology, chunks)
    found = gradients.of(chunks)
    of_indexer = {name: g for name, g in found.items() if ".indexer." in name}
    return of_indexer, {name: g for name, g in found.items() if name not in of_indexer}


def compare(topology: Topology) -> list[tuple[float, float, float]]:
    """On every rank, without and with the per-token flag: how the plugin changes the gradient of
    the indexer, and that of all else; and the size of the first.
    """
    from tests.host import gpt

    gpt.initialize(**topology.sizes)
    found = []
    how = {"layout": "bshd", "places": PLACES[topology.data_parallel_size], "step": with_labels}
    for per_token in (False, True):
        case = Case("sample_mean", per_token=per_token, dtype=torch.float32, **how)
        ours = gradient(topology, case)
        stock = gradient(topology, dataclasses.replace(case, hooked=False))
        errors = [relative_error(x, y) for x, y in zip(ours, stock, strict=True)]
        size = sum(float(g.square().sum()) for g in ours[0].values())
        found.append((*errors, size))
    return found


def test_the_plugin_leaves_the_indexers_loss_its_weight() -> None:
    topology = TOPOLOGIES["dp2"]
    for rank in run_host_ranks(compare, topology.world_size, topology, timeout=300):
        for of_indexer, of_others, size in rank:
            assert size > 1e-8
            assert of_indexer <= ROUNDING
            assert of_others > 0.01  # the loss is another
