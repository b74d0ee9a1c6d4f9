"""How many tokens SkyRL's Clip-Cov finds in its window of covariances, and so keeps unlearned."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan
from tests.peers import run_skyrl  # noqa: F401 - it makes SkyRL importable

from skyrl.backends.skyrl_train.utils.ppo_utils import (  # isort: skip
    compute_policy_loss_clip_cov,
)
from skyrl.train.config import AlgorithmConfig  # isort: skip


def tokens_in_window(log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> int:
    config = AlgorithmConfig(policy_loss_type="clip_cov")
    config.clip_cov.clip_ratio = 1.0  # all of the window, not a sample of it
    _, metrics = compute_policy_loss_clip_cov(
        log_probs_BT, log_probs_BT, advantages_BT, config, mask_BT
    )
    return round(metrics["clip_ratio"] * mask_BT.sum().item())


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.tensor([40, 200, 90, 200, 150, 200, 180, 120])
    mask_BT = (torch.arange(200) < lengths_B.unsqueeze(-1)).double()
    log_probs_BT = -torch.empty_like(mask_BT).exponential_(0.4, generator=generator)
    advantages_BT = torch.randn(8, 1, generator=generator).double().expand(8, 200)
    plan = StepPlan.build(LossAggregation(mode="sample_mean"), [Microbatch(mask_BT)])
    scaled_BT = plan.scaled_advantages(0, advantages_BT)
    counts = {
        "tokens": int(mask_BT.sum()),
        "plain": tokens_in_window(log_probs_BT, advantages_BT, mask_BT),
        "scaled": tokens_in_window(log_probs_BT, scaled_BT, mask_BT),
    }
    torch.save(counts, sys.argv[1])
