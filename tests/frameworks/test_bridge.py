"""Megatron-Bridge's own training loop under the plugin, without a line of code."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests import oracle
from tests.distributed import run_ranks
from tests.frameworks.bridge import ranks
from tests.frameworks.bridge.data import MULTIPLE, sequences
from tests.frameworks.bridge.ranks import MODES, STOCK
from tests.host.harness import run_host_ranks
from tests.host.reference import relative_error
from tests.host.steps import Weights

pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(sys.version_info >= (3, 13), reason="Bridge 0.6.2 is for Python 3.12"),
]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/frameworks/megatron-bridge.md"


class Case(NamedTuple):
    """How two ranks divide the step: each has half of the samples, or of every sample."""

    layout: str
    cp: int
    per_token: bool

    @property
    def arguments(self) -> list[str]:
        multiple = MULTIPLE if self.cp > 1 else 1
        return [
            *(self.layout, "--multiple", str(multiple)),
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

run_bridge_ranks = functools.partial(run_ranks, preload="tests.frameworks.bridge.preload")
reference = functools.cache(lambda: run_host_ranks(ranks.reference, 1)[0])


@functools.cache
def trained(case: Case) -> list[dict[str, Any]]:
    """What both ranks see, by mode."""
    return run_bridge_ranks(ranks.train, 2, case.arguments)


def weights(mode: str) -> Weights:
    ((of_step,),) = oracle.step_weights(mode, [[[s.sample for s in sequences()]]])
    return list(enumerate(of_step))


def error(seen: dict[str, Any], mode: str) -> float:
    """Of the gradients of a rank, the largest over its steps."""
    expected = reference().gradient(weights(mode))
    return max(relative_error(gradient, expected) for gradient in seen["gradients"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", STOCK_ERRORS, ids=str)
def test_every_step_has_the_exact_gradient(case: Case, mode: str) -> None:
    own_mode = trained(case._replace(per_token=True))
    bound = 2 * max(error(seen[STOCK], "token_mean") for seen in own_mode)
    assert bound < 1e-6
    for seen in trained(case):
        assert len(seen[mode]["gradients"]) == 2
        assert error(seen[mode], mode) <= bound


def test_communication_may_overlap_as_in_the_recipes_of_bridge() -> None:
    overlap = [
        *("ddp.use_distributed_optimizer=true", "optimizer.use_distributed_optimizer=true"),
        *("ddp.overlap_param_gather=true", "optimizer.overlap_param_gather=true"),
        *("ddp.overlap_grad_reduce=true", "ddp.bucket_size=2000"),
    ]
    case = Case("rows", 1, False)
    for seen in run_bridge_ranks(ranks.train, 2, case.arguments + overlap):
        for mode in MODES:
            assert error(seen[mode], mode) < 1e-6
            assert seen[mode]["evaluation"] == trained(case)[0][mode]["evaluation"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", STOCK_ERRORS, ids=str)
def test_training_and_evaluation_report_the_exact_loss(case: Case, mode: str) -> None:
    of_tokens, of_mode = (reference().loss(weights(name)) for name in ("token_mean", mode))
    expected = {"lm loss": of_tokens, f"{mode} loss": of_mode}
    for seen in trained(case):
        assert len(seen[mode]["reports"]) == 2
        for report in (*seen[mode]["reports"], seen[mode]["evaluation"]):
            assert report == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", STOCK_ERRORS, ids=str)
def test_bridge_alone_computes_another_mean(case: Case) -> None:
    found = [error(trained(case)[0][STOCK], mode) for mode in MODES]
    assert found == pytest.approx(STOCK_ERRORS[case], rel=1e-3, abs=1e-6)


def test_bridge_demands_the_per_token_flag_for_packs_with_context_parallelism() -> None:
    (error, _) = run_bridge_ranks(ranks.error_of, 2, Case("packs", 2, False).arguments)
    assert "calculate_per_token_loss must be True" in error


def test_the_command_of_the_page(tmp_path: Path) -> None:
    (command,) = re.findall(r"^```bash\n(PYTHONPATH.*?)^```", PAGE.read_text(), re.M | re.S)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        ["bash", "-c", f"{command.strip()} --results {tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"PATH": path, "PET_STANDALONE": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    for rank in range(2):
        assert error(torch.load(tmp_path / f"{rank}.pt"), "sample_mean") < 1e-6
