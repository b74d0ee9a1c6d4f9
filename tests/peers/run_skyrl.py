"""SkyRL's loss reduction with its trainer and its workers: advantages are scaled, losses summed."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.peers.standins import use_peers
from tests.peers.step import (
    ADVANTAGES,
    DIVISOR,
    LOG_PROBS,
    MASKS,
    PROMPTS,
    RANKS,
    ROWS,
    SAMPLES,
    SEQ,
    save,
)

use_peers(
    "ray jaxtyping loguru transformers cloudpathlib pydantic wandb omegaconf skyrl_gym datasets "
    "torchdata aiohttp orjson pybase64 rich httpx"
)

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402
from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_policy_loss  # noqa: E402
from skyrl.train.config import AlgorithmConfig  # noqa: E402
from skyrl.train.dataset.preprocess import compute_prompt_boundaries  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402

REDUCTIONS = (
    "token_mean",
    "token_mean_legacy",
    "sequence_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
)


@cache
def scaled_advantages(reduction: str) -> Tensor:
    """By the trainer, over the whole step (its "mini-batch"), before ranks get their parts."""
    mask = MASKS.reshape(SAMPLES, SEQ)
    batch = TrainingInputBatch(
        {
            "advantages": ADVANTAGES.reshape(SAMPLES, 1).expand(SAMPLES, SEQ).clone(),
            "loss_mask": mask,
            "response_mask": torch.ones_like(mask),
        }
    )
    algorithm = AlgorithmConfig(loss_reduction=reduction, max_seq_len=DIVISOR)
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(
            trainer=SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=ROWS)
        )
    )
    uids = [str(prompt) for prompt in PROMPTS.flatten().tolist()]
    RayPPOTrainer._normalize_advantages(
        trainer, batch, [(0, SAMPLES)], compute_prompt_boundaries(uids)
    )
    scaled: Tensor = batch["advantages"].reshape(MASKS.shape)
    return scaled


def policy_loss(reduction: str, rank: int, i: int, log_probs_BT: Tensor) -> Tensor:
    """By a worker, which multiplies by the number of ranks, since DDP averages over them."""
    loss: Tensor
    loss, _ = ppo_policy_loss(
        log_probs_BT,
        LOG_PROBS[rank, i],
        scaled_advantages(reduction)[rank, i],
        AlgorithmConfig(loss_reduction=reduction),
        MASKS[rank, i],
    )
    return loss * RANKS


if __name__ == "__main__":
    save({f"skyrl/{name}": partial(policy_loss, name) for name in REDUCTIONS})
