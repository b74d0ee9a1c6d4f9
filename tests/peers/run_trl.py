"""TRL's loss with what its trainer computes: tokens of the generation batch, and accumulation."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.peers.standins import use_peers
from tests.peers.step import ADVANTAGES, DIVISOR, LOG_PROBS, MASKS, PER_RANK, RANKS, ROWS, save

use_peers("transformers pandas accelerate datasets huggingface_hub pyarrow")

from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

LOSSES = ("grpo", "bnpo", "dapo", "dr_grpo", "sapo", "cispo", "vespo", "luspo")


def policy_loss(kind: str, other_tokens: int, rank: int, i: int, log_probs_BT: Tensor) -> Tensor:
    """With ``other_tokens``, the generation batch is for one more step, which has that many."""
    steps = 2 if other_tokens else 1
    trainer = SimpleNamespace(
        loss_type=kind,
        importance_sampling_level="sequence" if kind == "luspo" else "token",
        max_completion_length=DIVISOR,
        current_gradient_accumulation_steps=PER_RANK,
        args=SimpleNamespace(
            steps_per_generation=steps * PER_RANK,
            delta=None,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        accelerator=SimpleNamespace(
            num_processes=RANKS, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        epsilon_low=0.2,
        epsilon_high=5.0,  # the bound of the ratio itself for `cispo`
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (
            log_probs_BT,
            torch.zeros_like(log_probs_BT),
            None,
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1),
        "prompt_mask": torch.ones(ROWS, 1),
        "completion_ids": torch.zeros_like(log_probs_BT),
        "completion_mask": MASKS[rank, i],
        "advantages": ADVANTAGES[rank, i],
        "old_per_token_logps": LOG_PROBS[rank, i],
        "num_items_in_batch": MASKS.sum() + other_tokens,
    }
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


if __name__ == "__main__":
    save(
        {
            **{f"trl/{kind}": partial(policy_loss, kind, 0) for kind in LOSSES},
            "by the generation batch": partial(policy_loss, "dapo", int(MASKS.sum()) // 2),
        }
    )
