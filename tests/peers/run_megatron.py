"""Megatron's schedule with a stock loss function, which returns a sum and its number of tokens."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from torch import Tensor

from tests.peers.step import ADVANTAGES, MASKS, PER_RANK, RANKS, save


def loss(per_token: bool, rank: int, i: int, log_probs_BT: Tensor) -> Tensor:
    mask_BT = MASKS[rank, i]
    losses_BT = -ADVANTAGES[rank, i].unsqueeze(-1) * log_probs_BT

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return (output * mask_BT).sum(), mask_BT.sum().int(), {}

    config = SimpleNamespace(calculate_per_token_loss=per_token, timers=None)
    scaled, tokens = forward_step_calc_loss(
        *(SimpleNamespace(), losses_BT, loss_func, config, None, False, PER_RANK, []),
        cp_group_size=1,
        is_last_stage=True,
    )
    assert tokens == mask_BT.sum()
    # Under the flag, DDP adds up over ranks, and `finalize_model_grads` divides by all tokens.
    result: Tensor = scaled * RANKS / MASKS.sum() if per_token else scaled
    return result


if __name__ == "__main__":
    save({"megatron/default": partial(loss, False), "megatron/per-token": partial(loss, True)})
