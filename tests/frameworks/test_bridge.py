"""Megatron-Bridge's own training loop under the plugin, without a line of code."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests import oracle
from tests.distributed import run_ranks
from tests.frameworks.harness import FP32, page, run_in_bash
from tests.host.reference import Reference, of_samples, relative_error
from tests.host.steps import Weights
from tests.peers.standins import needs_peers

pytestmark = [
    needs_peers,
    pytest.mark.extended,
    pytest.mark.skipif(sys.version_info >= (3, 13), reason="Bridge 0.6.2 is for Python 3.12"),
]

MODES = ("token_mean", "sample_mean")
STOCK = "stock"


class Case(NamedTuple):
    """The division of the step over two ranks: each has half of the samples, or of every sample."""

    layout: str
    cp: int
    per_token: bool

    @property
    def arguments(self) -> list[str]:
        return [
            *(self.layout, "--multiple", "4" if self.cp > 1 else "1"),
            f"model.context_parallel_size={self.cp}",
            f"model.calculate_per_token_loss={self.per_token}",
        ]


# Gradient errors of Bridge without the plugin, as token mean and as sample mean. Under the
# per-token flag it computes the token mean. It refuses packs with CP without that flag.
STOCK_ERRORS = {
    Case("rows", 1, False): (1.869e-1, 4.440e-1),
    Case("rows", 1, True): (0, 5.570e-1),
    Case("rows", 2, False): (2.883e-1, 6.395e-1),
    Case("rows", 2, True): (0, 5.570e-1),
    Case("packs", 1, False): (2.482e-1, 5.260e-1),
    Case("packs", 1, True): (0, 5.570e-1),
    Case("packs", 2, True): (0, 5.570e-1),
}
run = functools.partial(run_ranks, preload="tests.frameworks.bridge_recipe")


def on_ranks(arguments: list[str], modes: tuple[str, ...] = (STOCK, *MODES)) -> dict[str, Any]:
    """The results of this rank in each mode."""
    from megatron_loss_agg.launch.flags import VARIABLE
    from megatron_loss_agg.launch.install import install
    from tests.frameworks import bridge_recipe

    seen = {}
    for mode in modes:
        os.environ[VARIABLE] = (
            "" if mode == STOCK else f"--loss-aggregation {mode} --loss-aggregation-evaluation same"
        )
        uninstall = install(watch_exit=False)
        seen[mode] = bridge_recipe.main(arguments)
        uninstall()
    return seen


@functools.cache
def trained(case: Case) -> list[dict[str, Any]]:
    """The results of both ranks, by mode."""
    return run(on_ranks, 2, case.arguments)


def compute_reference() -> tuple[Reference, dict[str, Weights]]:
    """Every sample of the step alone, in fp64; and the weights of the modes."""
    from tests.frameworks.bridge_recipe import sequences
    from tests.host import gpt

    gpt.initialize()
    model, step = gpt.build(), [[[sequence.sample for sequence in sequences()]]]
    losses = ({"loss": gpt.plain_losses(model, sequence)} for sequence in sequences())
    weights = {m: list(enumerate(oracle.step_weights(m, step)[0][0])) for m in MODES}
    return of_samples(model, losses)["loss"], weights


@functools.cache
def reference() -> tuple[Reference, dict[str, Weights]]:
    return run(compute_reference, 1)[0]


def error(seen: dict[str, Any], mode: str) -> float:
    """The largest error of a rank's gradients over its steps."""
    whole, weights = reference()
    expected = whole.gradient(weights[mode])
    return max(relative_error(gradient, expected) for gradient in seen["gradients"])


def expected_reports(mode: str) -> dict[str, float]:
    whole, weights = reference()
    return {"lm loss": whole.loss(weights["token_mean"]), f"{mode} loss": whole.loss(weights[mode])}


@pytest.mark.parametrize("case", STOCK_ERRORS, ids=str)
def test_training_and_evaluation_are_exact_where_bridge_computes_another_mean(case: Case) -> None:
    own_mode = trained(case._replace(per_token=True))
    own = max(error(seen[STOCK], "token_mean") for seen in own_mode)
    for seen in trained(case):
        for mode in MODES:
            assert len(seen[mode]["gradients"]) == len(seen[mode]["reports"]) == 2
            assert error(seen[mode], mode) <= min(4 * own, FP32)
            for report in (*seen[mode]["reports"], seen[mode]["evaluation"]):
                assert report == pytest.approx(expected_reports(mode), rel=1e-6)
    found = [error(seen[STOCK], mode) for mode in MODES]
    assert found == pytest.approx(STOCK_ERRORS[case], rel=1e-3, abs=1e-6)


def test_the_function_of_the_page_reads_packs_of_bridge_before_0_6() -> None:
    names: dict[str, Any] = {}
    (code,) = re.findall(r"^```python\n(.*?)^```", page("megatron-bridge"), re.M | re.S)
    exec(code, names)
    offsets = torch.tensor([[0, 3, 5, 8, 8, -1]])  # Bridge adds the pack's end, and -1
    mask = torch.tensor([[1, 1, 0, 1, 1, 0, 0, 0]])
    batch = {"cu_seqlens": offsets, "cu_seqlens_argmin": offsets.argmin(1, keepdim=True)}
    for token_count, expected in (5, [0, 3, 5]), (8, [0, 3, 5, 8]):
        samples = names["read"]({"loss_mask": mask, "token_count": [token_count], **batch})
        assert samples.loss_mask is mask and samples.cu_seqlens.tolist() == expected


def test_the_command_of_the_page_is_exact(tmp_path: Path) -> None:
    (command,) = re.findall(r"^```bash\n(PYTHONPATH.*?)^```", page("megatron-bridge"), re.M | re.S)
    command = f"{command.strip()} --results {tmp_path}"
    run_in_bash(command, PET_STANDALONE="1", OMP_NUM_THREADS="1")
    for rank in range(2):
        assert error(torch.load(tmp_path / f"{rank}.pt"), "sample_mean") < FP32
