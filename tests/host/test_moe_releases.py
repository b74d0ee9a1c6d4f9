"""`RouterLosses` runs on this release of the host, or is refused by name."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version

import pytest

from megatron_loss_agg.mcore import RouterLosses
from tests.host.cases import Case, refusals
from tests.host.harness import TOPOLOGIES
from tests.host.steps import PLACES

pytestmark = pytest.mark.host

BALANCE = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}


def test_a_release_without_the_weights_is_refused() -> None:
    topology = dataclasses.replace(TOPOLOGIES["dp1"], model="moe", config=BALANCE)
    hook = {"extensions": [RouterLosses()]}
    case = Case("token_mean", places=PLACES[1], per_token=True, hook=hook)
    ((error,),) = (rank.values() for rank in refusals(topology, {"": case}))
    release = version("megatron-core")
    if release.startswith("0.19."):
        assert error is None
        return
    assert error is not None
    assert f"--loss-aggregation-moe step (RouterLosses()) with Megatron-Core {release}" in error
    assert "whose weights of these losses are not known; expected a release of 0.19" in error
