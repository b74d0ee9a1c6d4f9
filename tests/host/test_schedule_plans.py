"""``--overlap-moe-expert-parallel-comm``: Megatron calls the layers by a plan, and not the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from routers import RouterLosses

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import LossHook
from tests.host import gpt, gradients
from tests.host.harness import (
    APART,
    EP2,
    EXACT,
    VPP2,
    Topology,
    build_chunks,
    error_of,
    one_or_all,
    run_host_ranks,
)
from tests.host.reference import Gradient, reference
from tests.host.steps import MODES, N_MB, PLACES, aggregation, batches, weights_of

FLAG = "overlap_moe_expert_parallel_comm"


def forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    """As pretrain_gpt.py's."""
    tokens, labels, mask, packing = gpt.local_batch(iterator)
    call: Callable[..., Any] = model.build_schedule_plan if return_schedule_plan else model
    output = call(
        tokens,
        gpt.positions_like(tokens),
        None,
        labels=labels,
        packed_seq_params=packing,
        loss_mask=mask,
    )
    return output, partial(gpt.stock_loss_func, mask)


TOPOLOGIES = {
    "ep2": Topology(2, EP2, model="moe"),
    "ep2-vpp2": Topology(4, {**EP2, **VPP2}, APART, model="moe-chunks"),
}


def chunks_of(topology: Topology) -> list[Any]:
    gpt.initialize(**topology.sizes)
    chunks = build_chunks(topology, per_token=True)
    for chunk in chunks:
        assert hasattr(chunk.config, FLAG)
        setattr(chunk.config, FLAG, True)  # after its check that the model is of half precision
    return chunks


def as_one_row(batch: dict[str, Any]) -> Microbatch:
    """A pack that is read as a row."""
    return Microbatch(batch["loss_mask"], prompt_ids=batch["prompt_ids"][:1])


def iterators(topology: Topology, layout: str) -> Any:
    data = [batches(PLACES[2][gpt.data_rank()], layout) for _ in range(topology.chunks)]
    return one_or_all(data)


def train(topology: Topology, expected: dict[str, Gradient]) -> None:
    chunks = chunks_of(topology)
    for layout in ("bshd", "thd"):
        for mode, gradient in expected.items():
            hook = LossHook(aggregation(mode))
            for _ in range(2):
                data = iterators(topology, layout)
                gpt.run_step(hook, chunks, data, N_MB, forward_step_func=forward_step)
                assert gradients.error(chunks, gradient) < EXACT, (layout, mode)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_schedule_of_plans_is_exact(name: str) -> None:
    topology = TOPOLOGIES[name]
    losses = reference(topology.model)
    expected = {mode: losses.gradient(weights_of(mode, PLACES[2])) for mode in MODES}
    run_host_ranks(train, topology.world_size, topology, expected)


def refused(topology: Topology) -> list[str | None]:
    """A pack that is read as a row; and losses of routers over the step."""
    chunks, aggregated = chunks_of(topology), aggregation("prompt_mean")
    hooks = [
        LossHook(aggregated, read_batch=as_one_row),
        LossHook(aggregated, extensions=[RouterLosses()]),
    ]
    step = {"forward_step_func": forward_step}
    return [
        error_of(gpt.run_step, hook, chunks, iterators(topology, "thd"), N_MB, **step)
        for hook in hooks
    ]


def test_its_packs_are_checked_and_losses_of_routers_refused() -> None:
    for packs, routers in run_host_ranks(refused, 2, TOPOLOGIES["ep2"]):
        assert "DataError: a batch of packed sequences must have 'cu_seqlens'" in str(packs)
        assert "HostError: RouterLosses needs the model's own forward pass" in str(routers)
