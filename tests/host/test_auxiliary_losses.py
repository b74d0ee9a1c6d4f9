"""Losses that the host adds by itself keep the weight that it gives them without the plugin.

A gradient is linear in them: what turning one on adds to the gradient must be the same with and
without the plugin, under the same flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
from torch import Tensor

from megatron_loss_agg.mcore import LossHook
from tests.host.harness import TOPOLOGIES, Topology, build_chunks, data_for, run_host_ranks
from tests.host.reference import relative_error
from tests.host.steps import N_MB, PLACES, aggregation

pytestmark = pytest.mark.host

# Of a difference of two gradients, each exact to 1e-14; the loss is a tenth of it or more.
ROUNDING = 1e-13
# What turns each loss on, and what turns it off in a model of the same parameters.
ON_OFF: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "balance": ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}, {}),
    "z": ({"moe_z_loss_coeff": 0.1}, {}),
    "mtp": (
        {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0},
        {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0},
    ),
}
NAMES = {
    "balance": ("ep2", "cp2", "tp2-sp"),
    "z": ("ep2",),
    "mtp": ("dp2", "cp2", "pp2", "tp2"),
}


def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """As in Megatron's scripts, the model computes the losses: its own, and that of MTP."""
    from tests.host import gpt

    tokens, labels, mask, packed = gpt.local_batch(data_iterator)
    arguments = {"labels": labels, "loss_mask": mask, "packed_seq_params": packed}
    losses = model(tokens, gpt.positions_like(tokens), None, **arguments)
    return losses, partial(gpt.stock_loss_func, mask)


def gradient(topology: Topology, per_token: bool, layout: str, hooked: bool) -> Any:
    """Of this rank's parameters, for one step."""
    from tests.host import gpt, gradients

    hook = LossHook(aggregation("prompt_mean")) if hooked else None
    chunks = build_chunks(topology, per_token)
    data = data_for(topology, PLACES[topology.data_parallel_size], layout)
    gpt.run_step(hook, chunks, data, N_MB, forward_step_func=forward_step)
    return gradients.of(chunks)


def compare(topology: Topology, loss: str) -> dict[Any, tuple[float, float]]:
    """Every rank, for each (layout, per-token flag): the error of what the loss adds to the
    gradient, and how much it adds, relative to all the rest.
    """
    from tests.host import gpt

    gpt.initialize(**topology.sizes)
    on, off = (
        dataclasses.replace(topology, config={**topology.config, **config})
        for config in ON_OFF[loss]
    )
    result = {}
    for layout, per_token in product(("thd", "bshd"), (False, True)):
        added = []
        for hooked in (False, True):
            with_it, without = (gradient(t, per_token, layout, hooked) for t in (on, off))
            added.append({name: with_it[name] - g for name, g in without.items()})
        share = relative_error(with_it, without)
        result[layout, per_token] = (relative_error(added[1], added[0]), share)
    return result


@pytest.mark.parametrize("loss, name", [(loss, name) for loss in NAMES for name in NAMES[loss]])
def test_plugin_leaves_the_loss_its_weight(loss: str, name: str) -> None:
    topology = TOPOLOGIES[name]
    if loss != "mtp":
        topology = dataclasses.replace(topology, model="moe")
    for rank in run_host_ranks(compare, topology.world_size, topology, loss, timeout=300):
        assert len(rank) == 4
        for error, share in rank.values():
            assert error <= ROUNDING
            assert share > 0.1
