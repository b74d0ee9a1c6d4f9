"""Presets against the functions of the systems that they name, token by token.

Each system runs in a process of its own, see `systems`. Those that the package index does not have
are formulas, written out. They were compared once, on a step like this one, with the functions that
the presets name, run at those commits.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan
from megatron_loss_agg.errors import DivisorError, ModeError
from megatron_loss_agg.presets import PRESETS, Preset  # each with what it was compared with
from tests.peers.standins import PEERS
from tests.peers.step import ADVANTAGES, DIVISOR, MASKS, PROMPTS, SEQ
from tests.peers.systems import SYSTEMS

ROOT = Path(__file__).parents[2]
COMPARED = {name: preset for name, preset in PRESETS.items() if name.split("/")[0] in SYSTEMS}


@cache
def run(system: str) -> dict[str, Tensor]:
    """What ``tests.peers.systems`` saves."""
    assert PEERS.is_dir(), f"no {PEERS}; bash ci/test.sh installs the systems of ci/peers.txt"
    if system == "megatron-bridge" and sys.version_info >= (3, 13):
        pytest.skip("Bridge 0.6.2 is for Python 3.12")
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.peers.systems", system, f"{folder}/results"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        saved: dict[str, Tensor] = torch.load(f"{folder}/results")
    return saved


# Of each prompt two rollouts, some of which were cut in two samples; of the rejected samples, one
# has tokens and one has none.
ROLLOUTS = torch.tensor([10, 10, 11, 12, 13, 13, 14, 15, 16, 17, 18, 19])
KEPT = torch.ones(12).index_fill(0, torch.tensor([3, 4]), 0) == 1  # NeMo-RL's sample mask
TOKENS = MASKS.sum(-1).flatten()
ACTIVE = TOKENS > 0
R = len(ROLLOUTS.unique())
ROLLOUTS_PER_PROMPT = 2  # `n_samples_per_prompt`, in slime


def grouped(sums: Tensor, ids: Tensor) -> Tensor:
    """Sum over groups of (masked loss of the group / active tokens of the group)."""
    in_groups = [ids.flatten() == group for group in ids.unique()]
    return torch.stack([sums[of].sum() / TOKENS[of].sum().clamp(min=1) for of in in_groups]).sum()


# Of the sum of the masked losses of each sample.
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "slime/token_mean": lambda sums: sums.sum() / TOKENS.sum(),
    "slime/sample_mean": lambda sums: grouped(sums, ROLLOUTS) / R,
    # The reducer multiplies, and the train step divides by the number of rollouts.
    "slime/prompt_mean": lambda sums: grouped(sums, PROMPTS) * ROLLOUTS_PER_PROMPT / R,
    "slime/constant": lambda sums: (sums / DIVISOR).sum() / R,
    "miles/token_mean": lambda sums: sums.sum() / TOKENS.sum(),
    "miles/sample_mean": lambda sums: grouped(sums, ROLLOUTS) / R,
    "miles/constant": lambda sums: (sums / DIVISOR).sum() / R,
    "open-instruct/token": lambda sums: sums.sum() / TOKENS.sum(),
    "open-instruct/constant": lambda sums: sums.sum() / DIVISOR,
    "nemo-rl/token_level": lambda sums: sums[KEPT].sum() / TOKENS[KEPT].sum(),
    "nemo-rl/sequence_level": lambda sums: (sums / TOKENS.clamp(min=1))[KEPT].sum() / KEPT.sum(),
    "areal/token_mean": lambda sums: sums.sum() / TOKENS.sum(),
    "areal/seq_mean": lambda sums: (sums[ACTIVE] / TOKENS[ACTIVE]).mean(),
    "areal/prompt_mean": lambda sums: (
        grouped(sums, PROMPTS) / len(PROMPTS.flatten()[ACTIVE].unique())
    ),
    "areal/constant": lambda sums: (sums[ACTIVE] / DIVISOR).mean(),
    "roll/token-mean": lambda sums: sums.sum() / TOKENS.sum(),
    "roll/seq-mean-token-sum": lambda sums: sums.sum() / ACTIVE.sum(),
    "roll/seq-mean-token-mean": lambda sums: (sums[ACTIVE] / TOKENS[ACTIVE]).sum() / ACTIVE.sum(),
    "roll/seq-mean-token-sum-norm": lambda sums: sums.sum() / DIVISOR,
    "tunix/token-mean": lambda sums: sums.sum() / TOKENS.sum(),
    "tunix/sequence-mean-token-mean": lambda sums: (
        (sums / TOKENS.clamp(min=1)).sum() / ACTIVE.sum()
    ),
    "tunix/sequence-mean-token-scale": lambda sums: (sums / DIVISOR).sum() / ACTIVE.sum(),
    "tunix/seq-mean-token-sum": lambda sums: sums.sum() / ACTIVE.sum(),
    # Its normalizer is the number of rows.
    "tunix/sequence-mean-token-sum-norm": lambda sums: sums.sum() / len(TOKENS),
    "prime-rl/default": lambda sums: sums.sum() / TOKENS.sum(),
}


def preset(name: str) -> LossAggregation:
    return LossAggregation.preset(name, divisor=DIVISOR if PRESETS[name].needs_divisor else None)


def weights(agg: LossAggregation) -> Tensor:
    """In the shape of all masks, over the microbatches of both ranks."""
    shape = (-1, *MASKS.shape[2:])
    by_sample = [x.reshape(shape[:-1]) for x in (PROMPTS, ROLLOUTS, ~KEPT)]
    step = [
        Microbatch(mask, prompt_ids=p, rollout_ids=r, rejected=gone if agg.rejected else None)
        for mask, p, r, gone in zip(MASKS.reshape(shape), *by_sample, strict=True)
    ]
    plan = StepPlan.build(agg, step)
    found = torch.stack([plan.weights(i, torch.float64) for i in range(len(step))])
    return found.reshape(MASKS.shape)


def gradient(agg: LossAggregation) -> Tensor:
    """``-A_t * w_t`` with our weights."""
    return -ADVANTAGES.unsqueeze(-1) * weights(agg)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_preset_weighs_every_token_by_its_systems_formula(name):
    sums = torch.zeros_like(TOKENS).requires_grad_()
    FORMULAS[name](sums).backward()
    theirs = MASKS * sums.grad.view(*MASKS.shape[:-1], 1)
    torch.testing.assert_close(weights(preset(name)), theirs, rtol=1e-13, atol=0)


def test_every_preset_is_compared_with_its_systems_function_or_formula():
    assert COMPARED.keys() | FORMULAS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", COMPARED)
def test_a_preset_weighs_every_token_as_its_system_does(name):
    theirs = run(name.partition("/")[0])[name]
    # verl adds 1e-8 to denominators.
    torch.testing.assert_close(theirs, gradient(preset(name)), rtol=1e-7, atol=0)


def test_presets_name_the_release_that_they_were_compared_with():
    pins = (ROOT / "ci/peers.txt").read_text() + (ROOT / "ci/constraints.txt").read_text()
    pins = re.sub("; .*", "", pins)
    releases = {preset.compared_with.partition(":")[0] for preset in COMPARED.values()}
    assert len(releases) == len(SYSTEMS)
    assert [x for x in releases if f"\n{x.replace(' ', '==')}\n" not in pins] == []


def test_verl_without_a_factor_divides_by_the_padded_width():
    agg = LossAggregation.preset("verl/seq-mean-token-sum-norm", divisor=SEQ)
    torch.testing.assert_close(run("verl")["by the padded width"], gradient(agg))


def test_trl_divides_by_a_part_of_the_tokens_of_the_generation_batch():
    # The other step of the generation batch has half as many tokens: (1 + 1/2) M / 2 = 3/4 M.
    theirs = run("trl")["by the generation batch"]
    torch.testing.assert_close(theirs, gradient(preset("trl/dapo")) / 0.75)


def test_scaled_advantages_leave_nothing_in_the_window_of_clip_cov():
    found = run("clip_cov")
    assert found["plain"] > 100
    assert found["scaled"] == 0


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_a_divisor_if_its_formula_has_one(name):
    needs = PRESETS[name].needs_divisor
    expected = "a number > 0" if needs else "none"
    with pytest.raises(DivisorError, match=f"with preset '{name}'; expected {expected}"):
        LossAggregation.preset(name, divisor=None if needs else DIVISOR)


UNKNOWN = {
    "verl/token_mean": "did you mean 'verl/token-mean'? expected one of verl/token-mean, verl/tok",
    "verl/dapo": "expected one of verl/token-mean",  # another system's is no hint
    "veri/token-mean": "did you mean 'verl/token-mean'? expected one of skyrl/..., verl/..., slime",
    "verl": "expected one of verl/token-mean, verl/token-sum, verl/seq-mean-token-sum, verl/seq-m",
    "verl/": "expected one of verl/token-mean, verl/token-sum, verl/seq-mean-token-sum, verl/seq-m",
    "": "expected one of skyrl/..., verl/..., slime/..., ",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_preset_is_named_beside_the_nearest_and_those_of_its_system(name):
    with pytest.raises(
        ModeError, match=f"^{re.escape(f'unknown preset {name!r}; {UNKNOWN[name]}')}"
    ):
        LossAggregation.preset(name)


def test_what_is_given_overrides_the_presets_own_choice():
    own = LossAggregation.preset("nemo-rl/sequence_level")
    assert (own.empty, own.rejected) == ("count", "skip")
    given = LossAggregation.preset("nemo-rl/sequence_level", empty="skip", rejected="count")
    assert (given.empty, given.rejected) == ("skip", "count")
    assert LossAggregation.preset("areal/seq_mean", empty="count").empty == "count"
    counting = LossAggregation.preset("verl/token-mean", sample_weights="count")
    assert (counting.rejected, counting.sample_weights) == (None, "count")


def test_an_aggregation_is_labelled_by_its_preset_or_its_mode_and_equal_by_neither():
    plain, named = LossAggregation(mode="sum"), LossAggregation.preset("verl/token-sum")
    assert (plain.label, named.label) == ("sum", "verl/token-sum")
    assert plain == named and hash(plain) == hash(named) and repr(plain) == repr(named)


def meaning(preset: Preset) -> str:
    """The last cells of the guide's line: what it is, and where the system may differ."""
    empty = "skip" if preset.empty == "skip" else None
    options = {"count": preset.count, "empty": empty, "rejected": preset.rejected}
    parts = [f"`{preset.mode}`", *(f'`{key}="{value}"`' for key, value in options.items() if value)]
    divided = " / D" if preset.needs_divisor and preset.mode == "sum" else ""
    return f"{', '.join(parts)}{divided} | {preset.caveat}"


def lines() -> list[str]:
    """Those of the guide: presets of one system that mean the same share one."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, preset in PRESETS.items():
        names.setdefault((name.partition("/")[0], meaning(preset)), []).append(name)
    return [f"| `{'`, `'.join(alike)}` | {text} |" for (_, text), alike in names.items()]


def test_the_guide_lists_the_presets():
    guide = (ROOT / "docs/migration.md").read_text()
    assert re.findall(r"^\| `[\w-]+/.*$", guide, re.MULTILINE) == lines()
    _, _, compared = guide.partition("They were compared with\n\n")
    releases = list(dict.fromkeys(preset.compared_with for preset in PRESETS.values()))
    assert re.findall(r"- (.*)[.;]\n", compared)[: len(releases)] == releases
