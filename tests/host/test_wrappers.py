"""The host's fully sharded wrappers: what is measured as planned is exact, and what is not is not.

Megatron FSDP and torch's FSDP2, as Megatron wraps it, run on gloo ranks. Their gradients are
compared with the fp64 reference, whether the measurement lets the step pass or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg.mcore import LossHook
from tests.host import gpt, gradients, parallel_state
from tests.host.cases import Case, take
from tests.host.harness import CP2, EP2, EXACT, MODELS, Topology, error_of, run_host_ranks
from tests.host.reference import Gradient, reference, relative_error
from tests.host.steps import SHORT, Places, weights_of

TORCH = "torch"  # FSDP2; the others are what Megatron FSDP can shard
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
EXACT_FP32 = 3e-7  # bound of the error in fp32, in which Megatron FSDP keeps gradients
# What is sharded how.
WRAPPED = {
    "dp1": (Topology(1), (STRATEGIES[-1], TORCH)),
    "dp2": (Topology(2), (*STRATEGIES, TORCH)),
    "cp2": (Topology(2, CP2), (STRATEGIES[-1], TORCH)),
    "ep2": (Topology(2, EP2, model="moe"), STRATEGIES),  # experts are not replicated
    "ep2-dp4": (Topology(4, EP2, model="moe"), STRATEGIES[::3]),
}


def places_of(topology: Topology) -> Places:
    return (SHORT * 2)[: topology.data_parallel_size]


def steps(
    topology: Topology, strategies: Sequence[str], expected: Gradient
) -> dict[tuple[str, bool], Any]:
    """By strategy and per-token flag: how a step ends, and the error of its gradient."""
    gpt.initialize(**topology.sizes)

    found = {}
    config = {**MODELS[topology.model], "transformer_impl": "local"}
    for strategy, per_token in product(strategies, (False, True)):
        case = Case("prompt_mean", places=places_of(topology), per_token=per_token)
        model = gpt.fully_sharded(gpt.build(per_token=per_token, **config), strategy)
        refused = error_of(take, case, topology, [model])
        if refused:
            with mock.patch.object(LossHook, "measure_scaling"):
                take(case, topology, [model])
        got = gradient_of(model, strategy)
        error = relative_error(got, {name: expected[name] for name in got})
        found[strategy, per_token] = refused, error
    return found


def gradient_of(model: Any, strategy: str) -> Gradient:
    """By parameter of the undivided model. Shards are flat, and in the order of ranks."""
    inner = model.module if strategy == TORCH else model.module.module
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    found = {}
    for name, parameter in gradients.parts(inner):
        group = experts if "experts" in name else dense
        shard = torch.empty(0) if parameter.grad is None else parameter.grad.to_local().flatten()
        shards: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(shards, shard, group=group)
        whole = shards[0] if strategy == "no_shard" else torch.cat(shards)
        found[name] = whole.view(parameter.shape)
    return found


@pytest.mark.parametrize("name", WRAPPED)
def test_what_passes_is_exact_and_what_is_refused_is_not(name: str) -> None:
    topology, strategies = WRAPPED[name]
    weights = weights_of("prompt_mean", places_of(topology))
    expected = reference(topology.model).gradient(weights)
    for rank in run_host_ranks(steps, topology.world_size, topology, strategies, expected):
        for (strategy, per_token), (refused, error) in rank.items():
            bound = EXACT if strategy == TORCH else EXACT_FP32
            assert (error <= bound) == (refused is None), (strategy, per_token, error, refused)
            if strategy == TORCH and per_token:  # its scale_gradients does nothing
                assert "must be the planned ones" in refused
                assert "turn off calculate_per_token_loss" in refused
