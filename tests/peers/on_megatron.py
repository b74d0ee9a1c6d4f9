"""The losses of Megatron, and of systems that call its schedules."""

from __future__ import annotations

import importlib
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.peers.standins import use_peers
from tests.peers.step import (
    ADVANTAGES,
    DIVISOR,
    LOG_PROBS,
    MASKS,
    PER_RANK,
    RANKS,
    ROWS,
    SEQ,
    MicrobatchLoss,
)


def _scheduled(per_token: bool, output: Tensor, loss_func: Any) -> Tensor:
    """What Megatron's schedule calls backward on."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    config = SimpleNamespace(calculate_per_token_loss=per_token, timers=None)
    scaled, _ = forward_step_calc_loss(
        *(SimpleNamespace(), output, loss_func, config, None, False, PER_RANK, []),
        cp_group_size=1,
        is_last_stage=True,
    )
    # Under the flag, DDP adds up over ranks, and `finalize_model_grads` divides by all tokens.
    return scaled * RANKS / MASKS.sum() if per_token else scaled


def _losses(rank: int, i: int, log_probs_BT: Tensor) -> Tensor:
    return -ADVANTAGES[rank, i].unsqueeze(-1) * log_probs_BT


def megatron() -> dict[str, MicrobatchLoss]:
    """A stock loss function, which returns a sum and its number of tokens."""

    def loss(per_token: bool, rank: int, i: int, log_probs_BT: Tensor) -> Tensor:
        mask_BT = MASKS[rank, i]

        def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return (output * mask_BT).sum(), mask_BT.sum().int(), {}

        return _scheduled(per_token, _losses(rank, i, log_probs_BT), loss_func)

    return {"megatron/default": partial(loss, False), "megatron/per-token": partial(loss, True)}


def megatron_bridge() -> dict[str, MicrobatchLoss]:
    use_peers("megatron.bridge.models transformers safetensors")
    from megatron.bridge.training.losses import create_masked_next_token_loss_function

    def loss(per_token: bool, rank: int, i: int, log_probs_BT: Tensor) -> Tensor:
        loss_func = create_masked_next_token_loss_function(MASKS[rank, i], False, False)
        return _scheduled(per_token, _losses(rank, i, log_probs_BT), loss_func)

    return {
        "megatron-bridge/default": partial(loss, False),
        "megatron-bridge/per-token": partial(loss, True),
    }


_SWIFT: dict[str, Any] = {
    "micro_batch_size": ROWS,
    "max_completion_length": DIVISOR,
    "epsilon_low": 0.2,
    "epsilon_high": 5.0,  # the bound of the ratio itself for `cispo`
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "fipo_gamma": 0.9,
    "fipo_clip_range": None,
    "fipo_safety_threshold": None,
    "beta": 0.0,
    "importance_sampling_level": "token",
    "disable_rollout_importance_sampling": True,
    "off_policy_sequence_mask_delta": None,
    "compute_entropy": False,
    "_has_teacher": False,
    "_step": 0,
    "steps_per_generation": PER_RANK,
    "_all_reduce_metric": lambda metrics: metrics,
    "unwrapped_models": [SimpleNamespace(training=True)],
    "args": SimpleNamespace(
        num_microbatches=PER_RANK, overlong_filter=False, delta=None, report_to=()
    ),
}


def ms_swift() -> dict[str, MicrobatchLoss]:
    """With what its trainer computes: the tokens of the step."""
    use_peers(
        "accelerate aiohttp dacite datasets huggingface_hub json_repair mcore_bridge modelscope "
        "msgspec pandas peft pydantic requests safetensors swift.rlhf_trainers.gkd_helpers "
        "swift.rlhf_trainers.grpo_trainer transformer_engine transformers trl urllib3 wandb"
    )
    importlib.import_module("modelscope.hub.utils.utils").get_cache_dir = lambda: "/nonexistent"
    from swift.megatron.trainers import grpo_trainer

    parallel = {
        "get_data_parallel_world_size": lambda: RANKS,
        "get_data_parallel_group": lambda with_context_parallel: None,
    }
    grpo_trainer.mpu = SimpleNamespace(**parallel)
    grpo_trainer.gather = lambda x, group: x

    def loss(kind: str, rank: int, i: int, log_probs_BT: Tensor) -> Tensor:
        trainer = SimpleNamespace(**_SWIFT, loss_type=kind, _metrics={"train": defaultdict(list)})
        trainer._compute_fipo_influence = partial(
            grpo_trainer.MegatronGRPOTrainer._compute_fipo_influence, trainer
        )
        batch = grpo_trainer.GRPOBatch(
            completion_mask=MASKS[rank, i].bool(),
            truncated_mask=torch.zeros(ROWS).bool(),
            seq_lengths=torch.full((ROWS,), SEQ),
            old_per_token_logps=LOG_PROBS[rank, i],
            advantages=ADVANTAGES[rank, i].unsqueeze(-1).expand(ROWS, SEQ),
            num_items_in_batch=MASKS.sum(),
        )
        loss_func = partial(
            grpo_trainer.MegatronGRPOTrainer.loss_func, trainer, data={"grpo_batch": batch}
        )
        return _scheduled(False, log_probs_BT, loss_func)

    kinds = ("grpo", "sapo", "bnpo", "dapo", "cispo", "fipo", "dr_grpo")
    return {f"ms-swift/{kind}": partial(loss, kind) for kind in kinds}
