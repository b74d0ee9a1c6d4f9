"""Offline distillation through the real host: two terms, each exact over the whole step."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch

from tests.host.harness import EXACT, TOPOLOGIES, Topology, run_host_ranks
from tests.host.reference import relative_error
from tests.host.steps import Places, Weights, weights_of

pytestmark = pytest.mark.host

# Two microbatches a rank, of unequal masks; one sample has no active token.
PLACES: dict[int, Places] = {
    1: (((0, 1), (5, 2, 3)),),
    2: (((0, 5), (3,)), ((1,), (2, 4))),
}
MODE = "sample_mean"
LAYOUTS = ("bshd", "thd")


def by_hand(weights: Weights) -> list[Any]:
    from tests.host import distillation

    return [distillation.by_hand(weights, dtype) for dtype in (torch.float64, torch.float32)]


@functools.cache
def expected(ranks: int) -> Any:
    """Gradient and losses in fp64, and the error of the gradient in fp32."""
    (exact, naive), = run_host_ranks(by_hand, 1, weights_of(MODE, PLACES[ranks]))
    return *exact, relative_error(naive[0], exact[0])


def on_host(topology: Topology, folder: str, gradient: Any) -> dict[Any, Any]:
    """Every rank, for each dtype, layout and route: the gradient's error, and what is reported."""
    from tests.host import distillation, gpt, gradients

    gpt.initialize(**topology.sizes)
    places = PLACES[topology.data_parallel_size]
    found = {}
    for layout in LAYOUTS:
        where = f"{folder}/{layout}"
        distillation.save_teacher(topology, places, layout, where)
        flags = ("--loss-aggregation", MODE, "--logits-load-dir", where)
        flags += ("--logits-load-kd-loss-alpha", str(distillation.ALPHA))
        for dtype in (torch.float64, torch.float32):
            for per_token in (False, True):
                chunks, capture = distillation.student(topology, per_token, dtype)
                reports = distillation.step(chunks, places, layout, *flags)
                error = gradients.error(chunks, gradient)
                names = sorted(reports[0])
                numbers = {name: gpt.reported(reports, name) for name in names}
                found[dtype, layout, per_token] = (error, numbers)
                capture.remove_hooks()
    return found


@pytest.mark.parametrize("name", ["dp2", "cp2", "tp2"])
def test_both_terms_are_exact_over_the_whole_step(name: str, tmp_path: Any) -> None:
    topology = TOPOLOGIES[name]
    gradient, numbers, fp32_error = expected(topology.data_parallel_size)
    for rank in run_host_ranks(on_host, 2, topology, str(tmp_path), gradient):
        for (dtype, *case), (error, reported) in rank.items():
            print(name, dtype, case, error, fp32_error)
            exact = dtype == torch.float64
            assert error <= (EXACT if exact else 2 * fp32_error), case
            names = {f"{MODE} loss": "language", "kd loss": "kd", "loss": "loss", "lm loss": "lm"}
            names["logits distillation loss"] = "kd mean"
            got = {ours: reported[key] for key, ours in names.items()}
            want = {key: numbers[key] for key in got}
            assert got == pytest.approx(want, rel=EXACT if exact else 1e-5), case
