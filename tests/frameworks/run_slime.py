"""slime's controller, batch, loss and training step on a real GPT over two ranks.

    python -m tests.frameworks.run_slime STOCK PATCHED

Two checkouts, without and with the patch. Stood in for: Ray (data is handed over as it is), the
inference servers, and the optimizer, which here keeps the gradient that it is given.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from tests.frameworks.checkout_data import (
    CLIP,
    ENTROPY,
    KL,
    ROLLOUTS,
    STEPS,
    LogProbs,
)
from tests.host.reference import Gradient

STANDINS = (
    "ray sglang sglang_router transformers wandb torch_memory_saver mbridge httpx requests urllib3"
)
ARGS: dict[str, Any] = {
    "global_batch_size": ROLLOUTS,
    "rollout_batch_size": 2 * ROLLOUTS,
    "n_samples_per_prompt": 1,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 24,
    "micro_batch_size": 1,
    "balance_data": False,
    "balance_by_flops": False,
    "data_pad_size_multiplier": 8,
    "allgather_cp": False,
    "qkv_format": "thd",
    "calculate_per_token_loss": False,
    "custom_pg_loss_reducer_function_path": None,
    "advantage_estimator": "grpo",
    "rewards_normalization": False,
    "reward_key": None,
    "custom_advantage_function_path": None,
    "use_opd": False,
    "normalize_advantages": False,
    "use_rollout_logprobs": False,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "log_probs_chunk_size": -1,
    "kl_coef": 0.0,
    "use_kl_loss": True,
    "kl_loss_coef": KL,
    "kl_loss_type": "k3",
    "use_unbiased_kl": False,
    "entropy_coef": ENTROPY,
    "eps_clip": CLIP,
    "eps_clip_high": CLIP,
    "eps_clip_c": None,
    "use_opsm": False,
    "get_mismatch_metrics": False,
    "use_tis": False,
    "custom_tis_function_path": "tests.frameworks.run_slime.reject",
    "loss_type": "policy_loss",
    "recompute_loss_function": False,
    "save_debug_train_data": None,
    "custom_megatron_before_train_step_hook_path": None,
    "enable_mtp_training": False,
    "seq_length": 1,
    "decoder_seq_length": None,
    "ci_test": False,
}
EVERY_THIRD = 3


def reject(*, pg_loss: Tensor, loss_masks: list[Tensor], **_: Any) -> Any:
    """As slime's rejection sampling: some tokens are masked inside the loss."""
    masks = [mask.clone() for mask in loss_masks]
    for mask in masks:
        mask[::EVERY_THIRD] = 0
    return pg_loss, masks, {}


class KeepGradients:
    """In the optimizer's place."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def zero_grad(self) -> None:
        pass

    def step(self) -> tuple[bool, float, int]:
        from tests.host import gradients

        self.gradient = gradients.of(self.model)
        return True, 0.0, 0


def train(
    root: str, cp: int, flags: str, log_probs: list[LogProbs], **options: Any
) -> list[tuple[Gradient, dict[str, float]]]:
    """On a rank: gradient and metrics of each step.

    Args:
        root: the checkout.
        flags: for MEGATRON_LOSS_AGG_FLAGS.
    """
    _import_from(root, flags)
    from megatron.core import mpu
    from megatron.training import global_vars
    from slime.backends.megatron_utils import actor, data, loss, model
    from slime.ray.rollout import RolloutManager

    from megatron_loss_agg.mcore.cpu import attention
    from tests.host import gpt

    gpt.initialize(cp)
    args = Namespace(**{**ARGS, **options})
    ddp = gpt.ddp_model(args.calculate_per_token_loss, torch.float32)
    if args.allgather_cp:
        ddp.module.position_embedding_type = "none"
        attention.CPLayout = _Contiguous
    global_vars.set_args(args)

    dp = mpu.get_data_parallel_world_size()
    manager = Namespace(
        args=args,
        custom_convert_samples_to_train_data_func=None,
        train_parallel_config={
            "dp_size": dp,
            "cp_size": cp,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
        },
    )
    manager._post_process_rewards = lambda samples: ([s.reward for s in samples],) * 2
    data_of_all = RolloutManager._convert_samples_to_train_data(manager, _samples(log_probs))
    shipped = RolloutManager._split_train_data_by_dp(manager, data_of_all)
    rollout = actor.MegatronTrainRayActor._get_rollout_data(manager, shipped)
    for key, whole in (
        ("log_probs", [x for s in log_probs for x in s.old]),
        ("ref_log_probs", [x for s in log_probs for x in s.ref]),
    ):
        rollout[key] = [
            loss.slice_log_prob_with_cp(whole[i], total, response)
            for i, total, response in zip(
                rollout["partition"],
                rollout["total_lengths"],
                rollout["response_lengths"],
                strict=True,
            )
        ]
    loss.compute_advantages_and_returns(args, rollout)
    iterators = data.get_data_iterator(rollout)
    found = []
    for step, (n, size) in enumerate(
        zip(rollout["num_microbatches"], rollout["global_batch_sizes"], strict=True)
    ):
        optimizer = KeepGradients(ddp)
        scheduler = Namespace(step=lambda increment: None)
        metrics, _ = model.train_one_step(
            args, 0, step, iterators, [ddp], optimizer, scheduler, n, size
        )
        found.append((optimizer.gradient, metrics))
    return found


def _import_from(root: str, flags: str) -> None:
    from tests.peers.standins import use_peers

    os.environ["MEGATRON_LOSS_AGG_FLAGS"] = flags
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    use_peers(STANDINS)
    sys.path.insert(0, root)
    import ray

    ray.put = ray.get = lambda x, **_: x


def _samples(log_probs: list[LogProbs]) -> list[Any]:
    from slime.utils.types import Sample

    return [
        Sample(
            group_index=answer.prompt,
            rollout_id=answer.rollout,
            tokens=answer.tokens().tolist(),
            response_length=len(answer.mask),
            reward=answer.reward,
            loss_mask=list(answer.mask),
            rollout_log_probs=old.tolist(),
            remove_sample=answer.removed,
        )
        for step, of_step in zip(STEPS, log_probs, strict=True)
        for answer, old in zip(step, of_step.old, strict=True)
    ]


class _Contiguous:
    """How models for slime's ``--allgather-cp`` split a packed row."""

    @staticmethod
    def thd(offsets: Tensor, cp_size: int, cp_rank: int) -> Any:
        from megatron_loss_agg import CPLayout

        return CPLayout.contiguous(int(offsets[-1]), cp_size, cp_rank)
