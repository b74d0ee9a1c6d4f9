"""The loss of DSA's indexer keeps Megatron's weight beside a hook, as `docs/losses.md` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host import gpt
from tests.host.cases import Case, take
from tests.host.harness import TOPOLOGIES, build_chunks, run_host_ranks
from tests.host.steps import Places, sequences

MLA = {
    **{"multi_latent_attention": True, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8},
    **{"qk_pos_emb_head_dim": 4, "v_head_dim": 8, "rope_type": "rope", "add_bias_linear": False},
}
INDEXER = {
    **{"experimental_attention_variant": "dsa", "dsa_indexer_loss_coeff": 0.1},
    **{"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 4},
    "dsa_indexer_rotate_activation": False,  # its kernel needs a GPU
}
STEP: Places = (((0, 1), (2, 3)),)


class Linear(torch.nn.Linear):
    """In place of Transformer Engine's layer of the same parameters on every rank."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def sparse_layer(config: Any) -> Any:
    """Megatron's local layer with its sparse attention."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    backend = LocalSpecProvider()
    backend.linear = lambda: Linear
    layer = gpt.get_gpt_layer_local_spec(multi_latent_attention=True)
    attention = specs.get_dsa_module_spec_for_backend(config, backend=backend)
    attention.submodules.linear_q_down_proj = ColumnParallelLinear
    attention.submodules.linear_kv_down_proj = ColumnParallelLinear
    layer.submodules.self_attention = attention
    return layer


def indexer_gradient(model: Any, **case: Any) -> Tensor:
    options = {"layout": "bshd", "dtype": torch.float32, "places": STEP, **case}
    take(Case(**options), TOPOLOGIES["dp1"], [model])
    named = model.module.named_parameters()
    return torch.cat([x.main_grad.flatten().clone() for name, x in named if "indexer" in name])


def indexer_gradients(per_token: bool) -> dict[str, Tensor]:
    gpt.initialize()
    config = {**MLA, **INDEXER, "layer": sparse_layer}
    (model,) = build_chunks(TOPOLOGIES["dp1"], per_token, torch.float32, **config)
    stock = {"mode": "token_mean", "per_token": per_token, "hooked": False}
    return {
        "stock": indexer_gradient(model, **stock),
        "first": indexer_gradient(model, **stock, places=(STEP[0][:1],)),
        "second": indexer_gradient(model, **stock, places=(STEP[0][1:],)),
        "token_mean": indexer_gradient(model, mode="token_mean", per_token=per_token),
        "sample_mean": indexer_gradient(model, mode="sample_mean", per_token=per_token),
    }


@pytest.mark.parametrize("per_token", [False, True])
def test_the_loss_of_an_indexer_keeps_megatrons_weight(per_token: bool) -> None:
    (found,) = run_host_ranks(indexer_gradients, 1, per_token)
    first, second = found["first"], found["second"]
    expected = (first + second) / 2
    if per_token:  # each alone is divided by its active tokens, together by those of both
        tokens = [sum(sum(sequences()[i].sample.mask) for i in samples) for samples in STEP[0]]
        expected = (tokens[0] * first + tokens[1] * second) / sum(tokens)
    for name in ("stock", "token_mean", "sample_mean"):
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-7)
