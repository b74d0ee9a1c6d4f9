"""Presets against the functions of the systems that they name, token by token.

Each system runs in a process of its own, see `systems`; those of verl and SkyRL in their own
trainers, see `tests.frameworks`. Those that the package index does not have are formulas, written
out. They were compared once, on a step like this one, with the functions that the presets name, run
at those commits.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan
from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.presets import PRESETS, Preset, presets_of
from tests.distributed import run_ranks
from tests.peers import systems
from tests.peers.standins import needs_peers
from tests.peers.systems import ADVANTAGES, DIVISOR, MASKS

pytestmark = needs_peers
ROOT = Path(__file__).parents[2]
# By system, or by preset if it has several: the release or commit, and the function in it.
COMPARED_WITH = {
    "skyrl": "skyrl 0.4.0: apply_loss_reduction_to_advantages_minibatch, in ppo_utils",
    "verl": "verl 0.9.1: agg_loss, in core_algos",
    "slime": "THUDM/slime at 624b824: loss_function",
    "slime/prompt_mean": (
        "THUDM/slime at 1951fa0 (its unmerged --loss-aggregation): get_pg_loss_reducer"
    ),
    "slime/constant": (
        "THUDM/slime at 1951fa0 (its unmerged --loss-aggregation): get_pg_loss_reducer"
    ),
    "miles": "radixark/miles at 31f1ca9: loss_function",
    "miles/constant": (
        "radixark/miles at 31f1ca9: loss_function, with examples/experimental/DrGRPO"
    ),
    "open-instruct": "allenai/open-instruct at e6c3044: masked_mean, in rl_utils",
    "nemo-rl": "NVIDIA-NeMo/RL at 7ea279a: ClippedPGLossFn, on process_global_batch",
    "areal": (
        "areal-project/AReaL at 5f61b97 (its unmerged request 1546): PolicyGradientReduction"
    ),
    "areal/token_mean": (
        "areal-project/AReaL at cbff54d: MegatronEngine.train_batch, on ppo_actor_loss_fn"
    ),
    "roll": "alibaba/ROLL at 8eb27cc: agg_loss, in functionals",
    "tunix": "google/tunix at c7d8950: aggregate_loss",
    "prime-rl": "PrimeIntellect-ai/prime-rl at 559b447: compute_loss",
    "trinity": "trinity-rft 0.6.0: PPOPolicyLossFn, as its verl_legacy trainer scales it",
    "ms-swift": "ms-swift 4.6.0: MegatronGRPOTrainer.loss_func",
    "trl": "trl 1.16.0: GRPOTrainer._compute_loss",
    "megatron": "megatron-core 0.19.2: forward_step_calc_loss",
    "megatron-bridge": "megatron-bridge 0.6.2: create_masked_next_token_loss_function",
}
COMPARED = [name for system in systems.SYSTEMS for name in presets_of(system)]
TRAINED = [name for system in ("skyrl", "verl") for name in presets_of(system)]


@cache
def system_gradients(system: str) -> dict[str, Tensor]:
    if system == "megatron-bridge" and sys.version_info >= (3, 13):
        pytest.skip("Bridge 0.6.2 is for Python 3.12")
    found: dict[str, Tensor] = run_ranks(systems.gradients, 1, system)[0]
    return found


# By sample. Of each prompt two rollouts, some of which were cut in two samples; of the rejected
# samples, one has tokens and one has none.
PROMPTS = torch.tensor([3, 3, 3, -9, -9, -9, 0, 0, 7, 7, 5, 5])
ROLLOUTS = torch.tensor([10, 10, 11, 12, 13, 13, 14, 15, 16, 17, 18, 19])
KEPT = torch.ones(12).index_fill(0, torch.tensor([3, 4]), 0) == 1  # NeMo-RL's sample mask
TOKENS = MASKS.sum(-1).flatten()
ACTIVE = TOKENS > 0
R = len(ROLLOUTS.unique())
ROLLOUTS_PER_PROMPT = 2  # `n_samples_per_prompt`, in slime


def grouped(sums: Tensor, ids: Tensor) -> Tensor:
    """Sum over groups of (masked loss of the group / active tokens of the group)."""
    in_groups = [ids == group for group in ids.unique()]
    return torch.stack([sums[of].sum() / TOKENS[of].sum().clamp(min=1) for of in in_groups]).sum()


# Of the sum of the masked losses of each sample.
Formula = Callable[[Tensor], Tensor]
BY_FORMULA: dict[Formula, tuple[str, ...]] = {
    lambda sums: sums.sum() / TOKENS.sum(): (
        *("slime/token_mean", "miles/token_mean", "open-instruct/token", "areal/token_mean"),
        *("roll/token-mean", "tunix/token-mean", "prime-rl/default"),
    ),
    lambda sums: grouped(sums, ROLLOUTS) / R: ("slime/sample_mean", "miles/sample_mean"),
    # The reducer multiplies, and the train step divides by the number of rollouts.
    lambda sums: grouped(sums, PROMPTS) * ROLLOUTS_PER_PROMPT / R: ("slime/prompt_mean",),
    lambda sums: (sums / DIVISOR).sum() / R: ("slime/constant", "miles/constant"),
    lambda sums: sums.sum() / DIVISOR: ("open-instruct/constant", "roll/seq-mean-token-sum-norm"),
    lambda sums: sums[KEPT].sum() / TOKENS[KEPT].sum(): ("nemo-rl/token_level",),
    lambda sums: (sums / TOKENS.clamp(min=1))[KEPT].sum() / KEPT.sum(): ("nemo-rl/sequence_level",),
    lambda sums: (sums[ACTIVE] / TOKENS[ACTIVE]).mean(): (
        *("areal/seq_mean", "roll/seq-mean-token-mean", "tunix/sequence-mean-token-mean"),
    ),
    lambda sums: grouped(sums, PROMPTS) / len(PROMPTS[ACTIVE].unique()): ("areal/prompt_mean",),
    lambda sums: (sums[ACTIVE] / DIVISOR).mean(): (
        *("areal/constant", "tunix/sequence-mean-token-scale"),
    ),
    lambda sums: sums.sum() / ACTIVE.sum(): ("roll/seq-mean-token-sum", "tunix/seq-mean-token-sum"),
    # Its normalizer is the number of rows.
    lambda sums: sums.sum() / len(TOKENS): ("tunix/sequence-mean-token-sum-norm",),
}
FORMULAS = {name: formula for formula, names in BY_FORMULA.items() for name in names}


def preset(name: str) -> LossAggregation:
    return LossAggregation.preset(name, divisor=DIVISOR if PRESETS[name].needs_divisor else None)


def weights(agg: LossAggregation) -> Tensor:
    """In the shape of all masks, over the microbatches of both ranks."""
    by_sample = [x.reshape(MASKS.shape[:-1]) for x in (PROMPTS, ROLLOUTS, ~KEPT)]
    step = [
        Microbatch(mask, prompt_ids=p, rollout_ids=r, rejected=gone if agg.rejected else None)
        for mask, p, r, gone in zip(MASKS, *by_sample, strict=True)
    ]
    plan = StepPlan.build(agg, step)
    return torch.stack([plan.weights(i, torch.float64) for i in range(len(step))])


@pytest.mark.parametrize("name", FORMULAS)
def test_a_preset_weighs_every_token_by_its_systems_formula(name):
    sums = torch.zeros_like(TOKENS).requires_grad_()
    FORMULAS[name](sums).backward()
    theirs = MASKS * sums.grad.view(*MASKS.shape[:-1], 1)
    torch.testing.assert_close(weights(preset(name)), theirs, rtol=1e-13, atol=0)


def test_every_preset_is_compared_with_its_systems_function_or_formula():
    assert {*COMPARED, *TRAINED, *FORMULAS} == PRESETS.keys()


@pytest.mark.parametrize("name", COMPARED)
def test_a_preset_weighs_every_token_as_its_system_does(name):
    theirs = system_gradients(name.partition("/")[0])[name]
    ours = -ADVANTAGES * weights(preset(name))
    torch.testing.assert_close(theirs, ours, rtol=1e-7, atol=0)


def test_presets_name_the_release_that_they_were_compared_with():
    pins = (ROOT / "ci/peers.txt").read_text() + (ROOT / "ci/constraints.txt").read_text()
    pins = re.sub("; .*", "", pins)
    systems = {name.partition("/")[0] for name in (*COMPARED, *TRAINED)}
    releases = {COMPARED_WITH[system].partition(":")[0] for system in systems}
    assert [x for x in releases if f"\n{x.replace(' ', '==')}\n" not in pins] == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_a_divisor_if_its_formula_has_one(name):
    needs = PRESETS[name].needs_divisor
    refusal = "needs a divisor, got none" if needs else f"takes no divisor, got {DIVISOR}"
    with pytest.raises(OptionError, match=f"^preset '{name}' {refusal}. "):
        LossAggregation.preset(name, divisor=None if needs else DIVISOR)


UNKNOWN = {
    "verl/token_mean": "Choose one of verl/token-mean, verl/tok",
    "verl/dapo": "Choose one of verl/token-mean",
    "veri/token-mean": "Choose one of skyrl/..., verl/..., slime/..., ",
    "": "Choose one of skyrl/..., verl/..., slime/..., ",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_preset_is_named_beside_those_of_its_system(name):
    with pytest.raises(
        OptionError, match=f"^{re.escape(f'unknown preset {name!r}. {UNKNOWN[name]}')}"
    ):
        LossAggregation.preset(name)


def meaning(preset: Preset) -> str:
    """The first cell of the guide's line of this preset."""
    empty = "skip" if preset.empty == "skip" else None
    options = {"count": preset.count, "empty": empty, "rejected": preset.rejected}
    parts = [f"`{preset.mode}`", *(f'`{key}="{value}"`' for key, value in options.items() if value)]
    divided = " / D" if preset.needs_divisor and preset.mode == "sum" else ""
    return f"{', '.join(parts)}{divided}"


def test_the_guide_lists_the_presets():
    guide = (ROOT / "docs/modes.md").read_text()
    lines = re.findall(r"^\| (`\w+`.*?) \| ((?:`[\w-]+/[^|]*?`,? ?)+) \|$", guide, re.MULTILINE)
    found = {name: mode for mode, names in lines for name in re.findall("`(.*?)`", names)}
    assert found == {name: meaning(preset) for name, preset in PRESETS.items()}
    assert {name.partition("/")[0] for name in PRESETS} == {
        x.partition("/")[0] for x in COMPARED_WITH
    }
    compared = [
        re.match(r"(?:.*/)?(\S+) (?:at )?(\w[\w.]*)", x.partition(":")[0])
        for x in COMPARED_WITH.values()
    ]
    assert all(compared)
    assert [x for found in compared if found for x in found.groups() if x not in guide] == []
