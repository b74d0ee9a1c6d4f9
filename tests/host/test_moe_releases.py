"""`RouterLosses` runs on this release of the host, or is refused by name."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version

import pytest

from megatron_loss_agg.mcore import LossHook, RouterLosses
from tests.host.harness import TOPOLOGIES, build_chunks, data_for, error_of, run_host_ranks
from tests.host.steps import N_MB, PLACES, aggregation

pytestmark = pytest.mark.host


def error() -> str | None:
    from tests.host import gpt

    gpt.initialize()
    losses = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
    topology = dataclasses.replace(TOPOLOGIES["dp1"], model="moe", config=losses)
    chunks = build_chunks(topology, True)
    data = data_for(topology, PLACES[1], "thd")
    hook = LossHook(aggregation("token_mean"), extensions=[RouterLosses()])
    return error_of(gpt.run_step, hook, chunks, data, N_MB)


def test_a_release_without_the_weights_is_refused() -> None:
    (found,) = run_host_ranks(error, 1)
    release = version("megatron-core")
    if release.startswith("0.19."):
        assert found is None
        return
    assert found is not None
    assert f"--loss-aggregation-moe step (RouterLosses()) with Megatron-Core {release}" in found
    assert "whose weights of these losses are not known; expected a release of 0.19" in found
