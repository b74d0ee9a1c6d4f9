"""ModelOpt's distillation at its pinned version: its default is exact, the rest refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.host.harness import EXACT, TOPOLOGIES, Topology, error_of, run_host_ranks
from tests.host.steps import Places, Weights, weights_of

pytestmark = pytest.mark.host

PLACES: dict[int, Places] = {
    1: (((0, 1), (5, 2, 3)),),
    2: (((0, 5), (3,)), ((1,), (2, 4))),
}
MODE = "sample_mean"
TOP_K = {"logit_kl_topk": 5}
FINAL = "decoder.final_layernorm"


def by_hand(weights: Weights, top_k: bool) -> Any:
    from tests.host import distillation

    kl = distillation.top_kl if top_k else distillation.full_kl
    return distillation.by_hand(weights, weights, alpha=1.0, kl=kl)


@functools.cache
def expected(ranks: int, top_k: bool = False) -> Any:
    """Gradient and losses of the teacher's loss alone."""
    return run_host_ranks(by_hand, 1, weights_of(MODE, PLACES[ranks]), top_k)[0]


def on_host(topology: Topology, layout: str, settings: Any, gradient: Any) -> dict[bool, Any]:
    """Every rank, by route: the gradient's error, and what is reported."""
    from tests.frameworks import modelopt_ranks
    from tests.host import gpt

    gpt.initialize(**topology.sizes)
    places = PLACES[topology.data_parallel_size]
    case = topology, places, layout
    run = modelopt_ranks.error_and_reports
    return {per_token: run(*case, per_token, settings, gradient) for per_token in (False, True)}


@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    [("dp2", "bshd", {}), ("cp2", "thd", {}), ("tp2", "bshd", {}), ("dp1", "thd", TOP_K)],
)
def test_the_loss_on_logits_is_exact(name: str, layout: str, settings: Any) -> None:
    topology = TOPOLOGIES[name]
    gradient, numbers = expected(topology.data_parallel_size, bool(settings))
    for rank in run_host_ranks(on_host, topology.world_size, topology, layout, settings, gradient):
        for error, reported in rank.values():
            assert error <= EXACT
            for report in ("kd loss", "loss"):
                assert reported[report] == pytest.approx(numbers["kd"], rel=EXACT)
            assert reported[f"{MODE} loss"] == pytest.approx(numbers["language"], rel=EXACT)
            assert reported["lm loss"] == pytest.approx(numbers["lm"], rel=EXACT)


REFUSED: dict[str, tuple[str, dict[str, Any], bool, str]] = {
    "mixture": (
        "dp1",
        {"skip_lm_loss": False},
        False,
        "skip_lm_loss on, without which losses' values",
    ),
    "layers": (
        "dp1",
        {"intermediate_layer_pairs": [(FINAL, FINAL)]},
        False,
        "computed 2 distillation losses; expected one",
    ),
    "means": ("dp1", {}, True, "a sum, not a mean (Megatron-LM 0.15 or later)"),
    "top-k": ("tp2", TOP_K, False, "adds up the equal gradients of all ranks"),
}


def refusals(topology: Topology) -> dict[str, str | None]:
    """The errors of one step each."""
    from tests.frameworks import modelopt_ranks
    from tests.host import gpt

    gpt.initialize(**topology.sizes)
    places = PLACES[topology.data_parallel_size]
    return {
        name: error_of(modelopt_ranks.step, topology, places, "bshd", False, means, settings)
        for name, (where, settings, means, _) in REFUSED.items()
        if TOPOLOGIES[where] == topology
    }


@pytest.mark.parametrize("name", ["dp1", "tp2"])
def test_what_is_no_weighted_sum_of_tokens_is_refused(name: str) -> None:
    topology = TOPOLOGIES[name]
    for rank in run_host_ranks(refusals, topology.world_size, topology):
        assert rank
        for case, error in rank.items():
            assert error is not None and error.startswith("HostError: ")
            assert REFUSED[case][-1] in error, error
