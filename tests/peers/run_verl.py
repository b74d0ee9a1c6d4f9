"""verl's policy loss with what its engine computes for it: `forward_backward_batch` for FSDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.peers.standins import use_peers
from tests.peers.step import (
    ADVANTAGES,
    DIVISOR,
    LOG_PROBS,
    MASKS,
    RANKS,
    ROWS,
    SAMPLES,
    SEQ,
    save,
)

use_peers("ray tensordict omegaconf transformers codetiming orjson datasets pandas")

from verl.workers.config import ActorConfig  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402


class Data(dict[str, Any]):
    """As much of a TensorDict as the loss uses."""

    def select(self, *fields: str) -> Data:
        return Data((field, self[field]) for field in fields)

    def to_padded_tensor(self) -> Data:
        return self


def policy_loss(mode: str, factor: int | None, rank: int, i: int, log_probs_BT: Tensor) -> Tensor:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=ROWS,
        loss_agg_mode=mode,
        loss_scale_factor=factor,
    )
    data = Data(
        prompts=torch.zeros(ROWS, 1),
        responses=torch.zeros(ROWS, SEQ),
        attention_mask=torch.ones(ROWS, 1 + SEQ, dtype=torch.int64),
        response_mask=MASKS[rank, i],
        old_log_probs=LOG_PROBS[rank, i],
        advantages=ADVANTAGES[rank, i].unsqueeze(-1).expand(ROWS, SEQ),
        dp_size=RANKS,
        batch_num_tokens=MASKS.sum().item(),
        global_batch_size=SAMPLES,
    )
    # The model's output at a prompt of one token and at the answer; the last predicts nothing.
    output = {"log_probs": pad(log_probs_BT, (0, 1)).flatten()}
    loss: Tensor = ppo_loss(config, output, data)[0]
    return loss


FACTORS = {
    "token-mean": None,
    "token-sum": None,
    "seq-mean-token-sum": None,
    "seq-mean-token-mean": None,
    "seq-mean-token-sum-norm": DIVISOR,
}

if __name__ == "__main__":
    save(
        {
            **{f"verl/{mode}": partial(policy_loss, mode, D) for mode, D in FACTORS.items()},
            "by the padded width": partial(policy_loss, "seq-mean-token-sum-norm", None),
        }
    )
