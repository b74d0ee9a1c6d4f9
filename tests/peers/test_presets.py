"""Presets against the functions of the systems that they name, token by token.

Each system runs in a process of its own, see `systems`. Those that the package index does not have
are in ``tests/core/test_presets.py``.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan
from megatron_loss_agg.presets import PRESETS
from tests.peers.standins import PEERS
from tests.peers.systems import ADVANTAGES, DIVISOR, MASKS, PROMPTS, SEQ, SYSTEMS

ROOT = Path(__file__).parents[2]
COMPARED = {name: preset for name, preset in PRESETS.items() if name.split("/")[0] in SYSTEMS}


@cache
def run(system: str) -> dict[str, Tensor]:
    """What ``tests.peers.systems`` saves."""
    assert PEERS.is_dir(), f"no {PEERS}; bash ci/test.sh installs the systems of ci/peers.txt"
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.peers.systems", system, f"{folder}/results"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        saved: dict[str, Tensor] = torch.load(f"{folder}/results")
    return saved


def gradient(agg: LossAggregation) -> Tensor:
    """``-A_t * w_t`` with our weights, over the microbatches of both ranks."""
    shape = (-1, *MASKS.shape[2:])
    masks, prompts = MASKS.reshape(shape), PROMPTS.reshape(shape[:-1])
    step = [Microbatch(mask, prompt_ids=p) for mask, p in zip(masks, prompts, strict=True)]
    plan = StepPlan.build(agg, step)
    weights = torch.stack([plan.weights(i, torch.float64) for i in range(len(step))])
    return -ADVANTAGES.unsqueeze(-1) * weights.reshape(MASKS.shape)


def preset(name: str) -> LossAggregation:
    return LossAggregation.preset(name, divisor=DIVISOR if PRESETS[name].needs_divisor else None)


@pytest.mark.parametrize("name", COMPARED)
def test_a_preset_weighs_every_token_as_its_system_does(name: str) -> None:
    theirs = run(name.partition("/")[0])[name]
    # verl adds 1e-8 to denominators.
    torch.testing.assert_close(theirs, gradient(preset(name)), rtol=1e-7, atol=0)


def test_presets_name_the_release_that_they_were_compared_with() -> None:
    pins = (ROOT / "ci/peers.txt").read_text() + (ROOT / "ci/constraints.txt").read_text()
    releases = {preset.compared_with.partition(":")[0] for preset in COMPARED.values()}
    assert len(releases) == len(SYSTEMS)
    assert [x for x in releases if f"\n{x.replace(' ', '==')}\n" not in pins] == []


def test_verl_without_a_factor_divides_by_the_padded_width() -> None:
    agg = LossAggregation.preset("verl/seq-mean-token-sum-norm", divisor=SEQ)
    torch.testing.assert_close(run("verl")["by the padded width"], gradient(agg))


def test_trl_divides_by_a_part_of_the_tokens_of_the_generation_batch() -> None:
    # The other step of the generation batch has half as many tokens: (1 + 1/2) M / 2 = 3/4 M.
    theirs = run("trl")["by the generation batch"]
    torch.testing.assert_close(theirs, gradient(preset("trl/dapo")) / 0.75)


def test_scaled_advantages_leave_nothing_in_the_window_of_clip_cov() -> None:
    found = run("clip_cov")
    assert found["plain"] > 100
    assert found["scaled"] == 0
