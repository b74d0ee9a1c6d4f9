"""Losses that the host adds by itself keep the weight that it gives them.

A gradient is linear in them, so what turning one on adds to it is compared: with the plugin, and
without it under the same flags. Under the per-token flag a loop may return its routed tokens for
the weights of these losses, on which the aggregated loss does not depend.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import read_batch
from tests.host import gpt, gradients
from tests.host.cases import Case, assert_exact, take
from tests.host.harness import TOPOLOGIES, Topology, build_chunks, run_host_ranks
from tests.host.reference import Gradient, relative_error
from tests.host.refusals import Refusal, assert_told
from tests.host.scripts import with_labels
from tests.host.steps import PLACES

Config = dict[str, Any]


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


SPARSE_ATTENTION: Config = {
    "layer": layer_with_indexer,
    "experimental_attention_variant": "dsa",
    "multi_latent_attention": True,
    "add_bias_linear": False,
    "rope_type": "rope",
    "apply_rope_fusion": False,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 8),
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 4,
    "dsa_indexer_rotate_activation": False,  # a kernel for GPUs
}
# What turns a loss on, and what turns it off in a model of the same parameters.
ON_OFF: dict[str, tuple[Config, Config]] = {
    "balance": ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}, {}),
    "z": ({"moe_z_loss_coeff": 0.1}, {}),
    "mtp": (
        {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0},
        {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0},
    ),
    # Nothing else trains the indexer of sparse attention.
    "indexer": (
        {**SPARSE_ATTENTION, "dsa_indexer_loss_coeff": 1e3},
        {**SPARSE_ATTENTION, "dsa_indexer_loss_coeff": 0.0},
    ),
}


def routed(batch: dict[str, Tensor], number: int | None = None) -> Microbatch:
    """With the number of tokens that the model is called with, or another."""
    number = batch["tokens"].numel() if number is None else number
    return dataclasses.replace(read_batch(batch), routed_tokens=number)


def counts_routed_tokens(data_iterator: Any, model: Any) -> Any:
    """The loop without the plugin: it returns this rank's routed tokens."""
    losses, loss_func = with_labels(data_iterator, model)

    def counted(output: Tensor) -> Any:
        loss, _, report = loss_func(output)
        return loss, torch.tensor(output.numel(), dtype=torch.int), report

    return losses, counted


MODE = "prompt_mean"
WAYS = [Case(MODE, step=with_labels)]
WAYS += [Case(MODE, layout="bshd", per_token=True, step=with_labels)]
# The host computes the indexer's loss in fp32, and sparse attention of rows alone.
OF_INDEXER = [dataclasses.replace(x, layout="bshd", dtype=torch.float32) for x in WAYS]
ROUTED = Case(MODE, per_token=True, step=with_labels, hook={"read_batch": routed})
EXPERTS = [("balance", case) for case in (*WAYS, ROUTED)]
# By topology and model: a loss, and steps under the plugin.
KEPT: dict[tuple[str, str], list[tuple[str, Case]]] = {
    ("ep2", "moe"): [*EXPERTS, *(("z", case) for case in WAYS)],
    ("cp2", "moe"): EXPERTS,
    ("tp2-sp", "moe"): EXPERTS[:2],
    ("cp2", "dense"): [("mtp", case) for case in WAYS],
    ("pp2", "dense"): [("mtp", case) for case in WAYS],
    ("dp2", "dense"): [("indexer", case) for case in OF_INDEXER],
}


def added(topology: Topology, case: Case, loss: str) -> tuple[Gradient, float]:
    """The part of a loss in this rank's gradient; and relative to all the rest."""
    found: list[Gradient] = []
    for config in ON_OFF[loss]:
        chunks = build_chunks(topology, case.per_token, case.dtype, **config)
        take(case, topology, chunks)
        found.append(gradients.of(chunks))
    with_it, without = found
    return {name: with_it[name] - g for name, g in without.items()}, relative_error(*found)


def compare(topology: Topology, losses: list[tuple[str, Case]]) -> None:
    """On every rank."""
    gpt.initialize(**topology.sizes)
    for loss, case in losses:
        placed = dataclasses.replace(case, places=PLACES[topology.data_parallel_size])
        ours, share = added(topology, placed, loss)
        # The same loop without the plugin: of routed tokens, it returns their number itself.
        own = {"step": counts_routed_tokens} if case.hook else {}
        stock, _ = added(topology, dataclasses.replace(placed, hooked=False, **own), loss)
        assert share > 0.1, (loss, case)
        # Of a difference of two gradients, each exact to 1e-14.
        bound = 1e-6 if loss == "indexer" else 1e-12
        assert relative_error(ours, stock) <= bound, (loss, case)


@pytest.mark.parametrize("name, model", KEPT)
def test_the_plugin_leaves_the_hosts_loss_its_weight(name: str, model: str) -> None:
    topology = dataclasses.replace(TOPOLOGIES[name], model=model)
    run_host_ranks(compare, topology.world_size, topology, KEPT[name, model])


@pytest.mark.parametrize("name", ["cp2", "ep2"])
def test_the_aggregated_loss_does_not_depend_on_the_routed_tokens(name: str) -> None:
    topology = dataclasses.replace(TOPOLOGIES[name], model="moe")
    assert_exact(
        topology, [dataclasses.replace(ROUTED, places=PLACES[topology.data_parallel_size])]
    )


def some(batch: dict[str, Tensor]) -> Microbatch:
    """Routed tokens for packs of several samples alone, which both data-parallel ranks have."""
    several = batch["prompt_ids"].numel() > 1
    return routed(batch) if several else read_batch(batch)


def counted(read: Any, says: str = "", per_token: bool = True) -> Refusal:
    return Refusal(says, Case(hook={"read_batch": read}, per_token=per_token))


# Each of the 8 microbatches of two ranks.
ROWS = {
    "the most": counted(partial(routed, number=2**28 - 1)),
    "too many": counted(
        partial(routed, number=2**28),
        "HostError: a step must have at most 2147483647 tokens ... int32, got 2147483648. Turn",
    ),
    "too many without the flag": counted(partial(routed, number=2**28), per_token=False),
    "none": counted(partial(routed, number=0)),
    "some": counted(
        some, "DataError: all or none of a step's microbatches must have routed_tokens, got 2 of 8"
    ),
    "negative": counted(
        partial(routed, number=-1), "DataError: routed_tokens must be an int >= 0, got -1"
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_numbers_that_the_host_cannot_count_are_refused_on_every_rank(name: str) -> None:
    assert_told(__name__, name)
