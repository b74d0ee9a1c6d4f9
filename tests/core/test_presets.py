"""Every preset against its system's own formula, written out over the batches of one step."""

from __future__ import annotations

import pytest
import torch

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan
from megatron_loss_agg.errors import DivisorError, ModeError

D = 5.0  # the systems' "maximum length", deliberately not the padded width
SEQ = 4
F64 = torch.float64

# Four microbatches of two rows (two microbatches for each of two data-parallel ranks). One row is
# fully masked; rows 1 and 2 were cut from one rollout; three prompts lie across microbatches.
MASKS = torch.tensor(
    [
        [[1, 1, 0, 0], [1, 0, 0, 0]],
        [[1, 1, 1, 1], [0, 1, 1, 0]],
        [[0, 0, 0, 0], [1, 1, 1, 0]],
        [[0, 0, 0, 1], [0, 1, 0, 1]],
    ],
    dtype=F64,
)
PROMPTS = torch.tensor([[3, 3], [3, -9], [-9, 0], [0, 0]])
ROLLOUTS = torch.tensor([[10, 11], [11, 12], [13, 14], [15, 16]])
LOSS = torch.linspace(-1.0, 2.0, MASKS.numel(), dtype=F64).reshape(MASKS.shape) ** 3
RANKS, PER_RANK = 2, 2

rows_loss, rows_mask = LOSS.reshape(-1, SEQ), MASKS.reshape(-1, SEQ)
row_sums = (rows_loss * rows_mask).sum(-1)
row_tokens = rows_mask.sum(-1)


def grouped(ids: torch.Tensor) -> torch.Tensor:
    """Sum over groups of (masked loss of the group / active tokens of the group)."""
    ids = ids.reshape(-1)
    means = [
        row_sums[ids == group].sum() / row_tokens[ids == group].sum().clamp(min=1)
        for group in ids.unique()
    ]
    return torch.stack(means).sum()


def mean_over_accumulation(microbatch_loss) -> torch.Tensor:
    """What a trainer does that divides each microbatch by their number and averages over ranks."""
    losses = [microbatch_loss(x, m) / PER_RANK for x, m in zip(LOSS, MASKS, strict=True)]
    return torch.stack(losses).sum() / RANKS


def token_mean() -> torch.Tensor:
    return row_sums.sum() / rows_mask.sum()


def microbatch_token_mean() -> torch.Tensor:
    return mean_over_accumulation(lambda x, m: (x * m).sum() / m.sum().clamp(min=1.0))


def sequence_token_mean() -> torch.Tensor:
    return (row_sums / row_tokens.clamp(min=1)).mean()


N = len(rows_mask)
FORMULAS = {
    "skyrl/token_mean": token_mean,
    "skyrl/token_mean_legacy": microbatch_token_mean,
    "skyrl/sequence_mean": sequence_token_mean,
    "skyrl/seq_mean_token_sum_norm": lambda: (row_sums / D).mean(),
    "skyrl/prompt_mean": lambda: grouped(PROMPTS) / len(PROMPTS.unique()),
    "verl/token-mean": token_mean,
    "verl/seq-mean-token-sum": lambda: row_sums.sum() / N,
    "verl/seq-mean-token-mean": sequence_token_mean,
    "verl/seq-mean-token-sum-norm": lambda: (row_sums / D).sum() / N,
    "slime/token_mean": token_mean,
    "slime/sample_mean": lambda: grouped(ROLLOUTS) / len(ROLLOUTS.unique()),
    "slime/prompt_mean": lambda: grouped(PROMPTS) / N,
    "slime/constant": lambda: (row_sums / D).sum() / N,
    "open-instruct/token": token_mean,
    "open-instruct/constant": lambda: row_sums.sum() / D,
    "nemo-rl/token_level": token_mean,
    "nemo-rl/sequence_level": lambda: sequence_token_mean() * N / (row_tokens > 0).sum(),
    "trl/grpo": lambda: mean_over_accumulation(
        lambda x, m: ((x * m).sum(-1) / m.sum(-1).clamp(min=1.0)).mean()
    ),
    "trl/bnpo": microbatch_token_mean,
    "trl/dapo": token_mean,
    "trl/dr_grpo": lambda: mean_over_accumulation(lambda x, m: (x * m).sum() / (len(x) * D)),
    "megatron/default": microbatch_token_mean,
    "megatron/per-token": token_mean,
}
WITH_DIVISOR = {name for name in FORMULAS if name.endswith(("norm", "/constant", "/dr_grpo"))}


def planned_loss(agg: LossAggregation) -> float:
    microbatches = [
        Microbatch(mask, prompt_ids=p, rollout_ids=r)
        for mask, p, r in zip(MASKS, PROMPTS, ROLLOUTS, strict=True)
    ]
    plan = StepPlan.build(agg, microbatches)
    return sum((plan.weights(i, dtype=F64) * loss).sum().item() for i, loss in enumerate(LOSS))


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_preset_is_the_systems_formula(name):
    agg = LossAggregation.preset(name, divisor=D if name in WITH_DIVISOR else None)
    assert planned_loss(agg) == pytest.approx(FORMULAS[name]().item(), rel=1e-13)


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_a_preset_takes_a_divisor_if_its_formula_has_one(name):
    with pytest.raises(DivisorError, match="divisor"):
        LossAggregation.preset(name, divisor=None if name in WITH_DIVISOR else D)


@pytest.mark.parametrize("name", ["verl/token_mean", "token_mean", "nobody/token_mean", ""])
def test_an_unknown_preset_is_named_beside_the_known_ones(name):
    with pytest.raises(ModeError, match=f"{name!r}.*verl/token-mean"):
        LossAggregation.preset(name)
