"""Presets of systems that the package index does not have, against their formulas, written out.

The formulas were compared once, on a step like this one, with the functions that the presets name,
run at those commits. The other systems' functions are run by ``tests/peers``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan
from megatron_loss_agg.aggregation import MODES
from megatron_loss_agg.errors import DivisorError, ModeError
from megatron_loss_agg.presets import PRESETS, Preset
from tests.peers.systems import SYSTEMS

ROOT = Path(__file__).parents[2]
D = 5.0  # the systems' "maximum length", deliberately not the padded width
F64 = torch.float64

# Five microbatches of two rows. Rows 4 and 8 are fully masked; rows 1 and 2, and 8 and 9, were cut
# from one rollout; two prompts, of four rollouts each, lie across microbatches; of the rejected
# rows, one has tokens and one has none.
MASKS = torch.tensor(
    [
        [[1, 1, 0, 0], [1, 0, 0, 0]],
        [[1, 1, 1, 1], [0, 1, 1, 0]],
        [[0, 0, 0, 0], [1, 1, 1, 0]],
        [[0, 0, 0, 1], [0, 1, 0, 1]],
        [[0, 0, 0, 0], [1, 1, 0, 0]],
    ],
    dtype=F64,
)
PROMPTS = torch.tensor([[3, 3], [3, -9], [-9, 3], [-9, 3], [-9, -9]])
ROLLOUTS = torch.tensor([[10, 11], [11, 12], [13, 14], [15, 16], [17, 17]])
REJECTED = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0], [1, 0]]) == 1
LOSS = torch.linspace(-1.0, 2.0, MASKS.numel(), dtype=F64).reshape(MASKS.shape) ** 3

row_sums = (LOSS * MASKS).sum(-1).flatten()
row_tokens = MASKS.sum(-1).flatten()
active = row_tokens > 0
kept = ~REJECTED.flatten()  # the sample mask of NeMo-RL


def grouped(ids: torch.Tensor) -> torch.Tensor:
    """Sum over groups of (masked loss of the group / active tokens of the group)."""
    ids = ids.flatten()
    means = [
        row_sums[ids == group].sum() / row_tokens[ids == group].sum().clamp(min=1)
        for group in ids.unique()
    ]
    return torch.stack(means).sum()


R = len(ROLLOUTS.unique())
N_SAMPLES_PER_PROMPT = 4  # rollouts, in slime
FORMULAS = {
    "slime/token_mean": lambda: row_sums.sum() / row_tokens.sum(),
    "slime/sample_mean": lambda: grouped(ROLLOUTS) / R,
    # The reducer multiplies, and the train step divides by the number of rollouts.
    "slime/prompt_mean": lambda: grouped(PROMPTS) * N_SAMPLES_PER_PROMPT / R,
    "slime/constant": lambda: (row_sums / D).sum() / R,
    "open-instruct/token": lambda: row_sums.sum() / row_tokens.sum(),
    "open-instruct/constant": lambda: row_sums.sum() / D,
    "nemo-rl/token_level": lambda: row_sums[kept].sum() / row_tokens[kept].sum(),
    "nemo-rl/sequence_level": lambda: (row_sums / row_tokens.clamp(min=1))[kept].sum() / kept.sum(),
    "areal/token_mean": lambda: row_sums.sum() / row_tokens.sum(),
    "areal/seq_mean": lambda: (row_sums / row_tokens)[active].mean(),
    "areal/prompt_mean": lambda: grouped(PROMPTS) / len(PROMPTS.flatten()[active].unique()),
    "areal/constant": lambda: (row_sums[active] / D).mean(),
}


def preset(name: str) -> LossAggregation:
    return LossAggregation.preset(name, divisor=D if PRESETS[name].needs_divisor else None)


def planned_loss(agg: LossAggregation) -> float:
    microbatches = [
        Microbatch(mask, prompt_ids=p, rollout_ids=r, rejected=q if agg.rejected else None)
        for mask, p, r, q in zip(MASKS, PROMPTS, ROLLOUTS, REJECTED, strict=True)
    ]
    plan = StepPlan.build(agg, microbatches)
    return sum((plan.weights(i, dtype=F64) * loss).sum().item() for i, loss in enumerate(LOSS))


@pytest.mark.parametrize("name", FORMULAS)
def test_preset_is_the_systems_formula(name):
    assert planned_loss(preset(name)) == pytest.approx(FORMULAS[name]().item(), rel=1e-13)


def test_every_preset_is_tested_here_or_beside_its_systems_function():
    rest = {name for name in PRESETS if name.partition("/")[0] not in SYSTEMS}
    assert rest == FORMULAS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_takes_a_divisor_if_its_formula_has_one(name):
    needs = PRESETS[name].needs_divisor
    expected = "a number > 0" if needs else "none"
    with pytest.raises(DivisorError, match=f"with preset '{name}'; expected {expected}"):
        LossAggregation.preset(name, divisor=None if needs else D)


UNKNOWN = {
    "verl/token_mean": "did you mean 'verl/token-mean'? expected one of verl/token-mean, verl/tok",
    "trl/papo": "did you mean 'trl/sapo'? expected one of trl/grpo, trl/bnpo, trl/dapo, trl/dr_g",
    "verl/dapo": "expected one of verl/token-mean",  # another system's is no hint
    "trl/zzz": "expected one of trl/grpo, trl/bnpo",
    "veri/token-mean": "did you mean 'verl/token-mean'? expected one of skyrl/token_mean, ",
    "nobody": "expected one of skyrl/token_mean, ",
    "": "expected one of skyrl/token_mean, ",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_preset_is_named_beside_the_nearest_and_those_of_its_system(name):
    with pytest.raises(
        ModeError, match=f"^{re.escape(f'unknown preset {name!r}; {UNKNOWN[name]}')}"
    ):
        LossAggregation.preset(name)


def test_an_unknown_mode_is_named_beside_the_nearest():
    with pytest.raises(
        ModeError, match=r"unknown mode 'token-mean'; did you mean 'token_mean'\? exp"
    ):
        LossAggregation(mode="token-mean")
    with pytest.raises(ModeError, match="unknown mode 'dapo'; expected one of token_mean"):
        LossAggregation(mode="dapo")


def test_what_is_given_overrides_the_presets_own_choice():
    own = LossAggregation.preset("nemo-rl/sequence_level")
    assert (own.empty, own.rejected) == ("count", "skip")
    given = LossAggregation.preset("nemo-rl/sequence_level", empty="skip", rejected="count")
    assert (given.empty, given.rejected) == ("skip", "count")
    assert LossAggregation.preset("areal/seq_mean", empty="count").empty == "count"
    assert LossAggregation.preset("verl/token-mean").rejected is None


def test_an_aggregation_is_labelled_by_its_preset_or_its_mode_and_equal_by_neither():
    plain, named = LossAggregation(mode="sum"), LossAggregation.preset("verl/token-sum")
    assert (plain.label, named.label) == ("sum", "verl/token-sum")
    assert plain == named and hash(plain) == hash(named) and repr(plain) == repr(named)


def row(name: str, preset: Preset) -> str:
    """The line of the table in the guide."""
    assert preset.mode in MODES
    empty = "skip" if preset.empty == "skip" else None
    options = {"count": preset.count, "empty": empty, "rejected": preset.rejected}
    parts = [f"`{preset.mode}`", *(f'`{key}="{value}"`' for key, value in options.items() if value)]
    parts += ["with D"] if preset.needs_divisor and preset.mode == "sum" else []
    return f"| `{name}` | {', '.join(parts)} | {preset.compared_with} | {preset.caveat} |"


def test_the_guide_lists_the_presets():
    guide = (ROOT / "docs/migration.md").read_text()
    assert re.findall(r"^\| `.*$", guide, re.MULTILINE) == [row(*item) for item in PRESETS.items()]
