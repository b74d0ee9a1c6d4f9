"""`RouterLosses` runs on this release of the host, or is refused by name."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from megatron_loss_agg.mcore import RouterLosses
from tests.host.harness import MODELS
from tests.host.refusals import Row, assert_told, hook_of, thd
from tests.host.steps import N_MB, PLACES

pytestmark = pytest.mark.host

RELEASE = version("megatron-core")
REFUSED = (
    f"HostError: --loss-aggregation-moe step (RouterLosses()) with Megatron-Core {RELEASE} ... "
    "whose weights of these losses are not known; expected a release of 0.19"
)
ROWS = {
    "routers": Row(
        "" if RELEASE.startswith("0.19.") else REFUSED,
        topology="dp1",
        hook=hook_of("token_mean", extensions=[RouterLosses()]),
        data=thd(*PLACES[1]),
        number=N_MB,
        per_token=True,
        model={
            **MODELS["moe"],
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1.0,
        },
    )
}


def test_a_release_without_the_weights_is_refused() -> None:
    assert_told(__name__, "routers")
