"""Auxiliary losses of routers under ``moe="step"``, against the formula in one fp64 process.

The gradient is linear in them: what turning them on adds to it must be the gradient of
``sum_k T_k / T * a_k``, whatever the layout and the route.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import LossHook
from tests.host.harness import (
    CP2,
    EP2,
    MODELS,
    PP2,
    SP,
    TP2,
    Topology,
    build_chunks,
    data_for,
    run_host_ranks,
)
from tests.host.reference import Gradient, relative_error
from tests.host.steps import Places, aggregation, batches

pytestmark = pytest.mark.host

EXACT = 1e-12  # of a difference of two gradients
# Microbatches of unequal size, one without any active token; and of one size.
UNEQUAL = ((0, 1), (5,), (2, 3), (4, 6))
EQUAL = ((0, 1), (5, 2), (3, 7), (4, 6))
COEFFICIENTS = {"aux_loss": 3.0, "seq_aux_loss": 2.0, "global_aux_loss": 4.0, "z_loss": 0.3}
LOCAL = ("aux_loss", "seq_aux_loss", "z_loss")
GLOBAL = ("global_aux_loss",)


def topology(world_size: int, sizes: Any = None, config: Any = None) -> Topology:
    return Topology(world_size, sizes or {}, config or {}, model="moe")


TOPOLOGIES = {
    "one": topology(1),
    "dp2": topology(2),
    "cp2": topology(2, CP2),
    "tp2-sp": topology(2, TP2, SP),
    "pp2": topology(2, PP2),
    "ep2": topology(2, EP2),
}


def turned_on(kinds: tuple[str, ...]) -> dict[str, Any]:
    """The model's configuration for these losses."""
    balancing = [kind for kind in kinds if kind != "z_loss"]
    config: dict[str, Any] = {}
    if balancing:
        config["moe_router_load_balancing_type"] = balancing
        config["moe_aux_loss_coeff"] = [COEFFICIENTS[kind] for kind in balancing]
    if "z_loss" in kinds:
        config["moe_z_loss_coeff"] = COEFFICIENTS["z_loss"]
    return config


def places_on(ranks: int, microbatches: tuple[tuple[int, ...], ...]) -> Places:
    """The step's microbatches, in their order, on data-parallel ranks."""
    number = len(microbatches) // ranks
    return tuple(microbatches[r * number : (r + 1) * number] for r in range(ranks))


def switch_loss(probabilities: Tensor, fractions: Tensor) -> Tensor:
    """``E * sum_e f_e P_e`` for [tokens, E] probabilities."""
    return probabilities.shape[1] * (fractions * probabilities.mean(dim=0)).sum()


def losses_of(logits: Tensor, topk: int, running: list[Tensor]) -> dict[str, Tensor]:
    """Of one layer and microbatch with ``logits`` [rows, tokens, E]; by kind, times coefficient."""
    probabilities = logits.softmax(dim=-1)
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(topk, dim=-1).indices, 1.0)
    flat, number = probabilities.flatten(0, 1), chosen.flatten(0, 1).sum(dim=0)
    running.append(number)
    tokens = len(flat)
    mean = sum(running) / len(running)
    rows = [
        switch_loss(p, c.mean(dim=0) / topk) for p, c in zip(probabilities, chosen, strict=True)
    ]
    found = {
        "aux_loss": switch_loss(flat, number / (tokens * topk)),
        "seq_aux_loss": torch.stack(rows).mean(),
        "global_aux_loss": switch_loss(flat, mean / (tokens * topk)),
        "z_loss": logits.logsumexp(dim=-1).square().mean(),
    }
    return {kind: COEFFICIENTS[kind] * loss for kind, loss in found.items()}


def formula(cases: list[tuple[str, Any]]) -> list[dict[str, Gradient]]:
    """One process without the plugin: by (layout, microbatches) and kind, the gradient of the loss.

    The host gives the routers' inputs and weights alone.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    from tests.host import gpt

    gpt.initialize()
    model = gpt.build(**MODELS["moe"])
    names, parameters = zip(*model.named_parameters(), strict=True)
    routers = [m for m in model.modules() if isinstance(m, TopKRouter)]
    inputs: list[Tensor] = []
    for router in routers:
        router.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    result = []
    for layout, microbatches in cases:
        running: list[list[Tensor]] = [[] for _ in routers]
        total: dict[str, Any] = dict.fromkeys(COEFFICIENTS, 0.0)
        tokens = 0
        data = batches(microbatches, layout)
        for _ in microbatches:
            ids, _, _, packed = gpt.local_batch(data)
            inputs.clear()
            with gpt.precision(model.config):
                model(ids, gpt.positions_like(ids), None, packed_seq_params=packed)
            tokens += ids.numel()
            for router, given, counts in zip(routers, inputs, running, strict=True):
                logits = given.transpose(0, 1) @ router.weight.T
                for kind, loss in losses_of(logits, router.topk, counts).items():
                    total[kind] = total[kind] + ids.numel() * loss
        of_case = {}
        for kind, loss in total.items():
            found = torch.autograd.grad(
                loss / tokens, parameters, retain_graph=True, materialize_grads=True
            )
            of_case[kind] = dict(zip(names, found, strict=True))
        result.append(of_case)
    return result


def added(
    chosen: Topology, kinds: tuple[str, ...], case: tuple[str, Any], per_token: bool, hook: Any
) -> tuple[Any, Gradient]:
    """This rank's chunks, and what ``kinds`` add to the gradient of a step."""
    from tests.host import gpt, gradients

    layout, microbatches = case
    places = places_on(chosen.data_parallel_size, microbatches)
    found = []
    for config in ({}, turned_on(kinds)):
        chunks = build_chunks(
            dataclasses.replace(chosen, config={**chosen.config, **config}), per_token
        )
        data = data_for(chosen, places, layout)
        given = hook if config else (lambda: LossHook(aggregation("token_mean")))
        gpt.run_step(given(), chunks, data, len(places[0]))
        found.append(gradients.of(chunks))
    off, on = found
    return chunks, {name: on[name] - g for name, g in off.items()}


def step_hook() -> LossHook:
    return LossHook(aggregation("token_mean"), moe="step")


def host_hook() -> LossHook:
    return LossHook(aggregation("token_mean"))


def errors(chosen: Topology, expected: dict[Any, Any]) -> dict[Any, tuple[float, float, float]]:
    """A rank, by case, route and kinds: the error, that of experts alone, and the host's error."""
    from tests.host import gpt, gradients

    gpt.initialize(**chosen.sizes)
    found = {}
    for (case, by_kind), per_token, kinds in product(
        expected.items(), (False, True), (LOCAL, GLOBAL)
    ):
        if kinds == GLOBAL and chosen.data_parallel_size > 1:
            continue
        layout, microbatches = case
        if "pipeline_model_parallel_size" in chosen.sizes and not per_token and microbatches == UNEQUAL:
            continue
        chunks, ours = added(chosen, kinds, case, per_token, step_hook)
        whole = {n: sum(by_kind[kind][n] for kind in kinds) for n in by_kind["z_loss"]}
        parts = {
            name: gradients.part_of(whole[name], p)
            for ddp in chunks
            for name, p in gradients.parts(ddp.module)
        }
        experts = {name: g for name, g in parts.items() if "experts" in name and g.norm() > 0}
        _, host = added(chosen, kinds, case, per_token, host_hook)
        found[(layout, microbatches == EQUAL), per_token, kinds] = (
            relative_error(ours, parts),
            relative_error(ours, experts) if experts else 0.0,
            relative_error(host, parts),
        )
    return found


CASES = [("thd", UNEQUAL), ("bshd", UNEQUAL), ("bshd", EQUAL)]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    chosen = TOPOLOGIES[name]
    (expected,) = run_host_ranks(formula, 1, CASES)
    wanted = dict(zip(CASES, expected, strict=True))
    for rank in run_host_ranks(errors, chosen.world_size, chosen, wanted):
        for case, found in rank.items():
            print(name, case, found)
