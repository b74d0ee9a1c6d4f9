"""Other systems' own policy losses, with what their trainers compute for them, in one step.

python -m tests.peers.systems SYSTEM FILE    writes the gradient of each of its losses to FILE
"""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.peers.on_megatron import megatron, megatron_bridge, ms_swift
from tests.peers.standins import use_peers
from tests.peers.step import (
    ADVANTAGES,
    DIVISOR,
    LOG_PROBS,
    MASKS,
    PER_RANK,
    PROMPTS,
    RANKS,
    ROWS,
    SAMPLES,
    SEQ,
    MicrobatchLoss,
    gradient,
)


def _use_skyrl() -> None:
    use_peers(
        "ray jaxtyping loguru transformers cloudpathlib pydantic wandb omegaconf skyrl_gym "
        "datasets torchdata aiohttp orjson pybase64 rich httpx"
    )


def skyrl() -> dict[str, MicrobatchLoss]:
    """Its trainer scales advantages over the whole step; its workers add up what comes of them."""
    _use_skyrl()
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_policy_loss
    from skyrl.train.config import AlgorithmConfig
    from skyrl.train.dataset.preprocess import compute_prompt_boundaries
    from skyrl.train.trainer import RayPPOTrainer

    @cache
    def scaled_advantages(reduction: str) -> Tensor:
        mask = MASKS.reshape(SAMPLES, SEQ)
        advantages = ADVANTAGES.reshape(SAMPLES, 1).expand(SAMPLES, SEQ).clone()
        fields = {"loss_mask": mask, "response_mask": torch.ones_like(mask)}
        batch = TrainingInputBatch({"advantages": advantages, **fields})
        algorithm = AlgorithmConfig(loss_reduction=reduction, max_seq_len=DIVISOR)
        cfg = SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=ROWS)
        trainer = SimpleNamespace(cfg=SimpleNamespace(trainer=cfg))
        prompts = compute_prompt_boundaries([str(x) for x in PROMPTS.flatten().tolist()])
        RayPPOTrainer._normalize_advantages(trainer, batch, [(0, SAMPLES)], prompts)
        return batch["advantages"].reshape(MASKS.shape)

    def loss(reduction: str, rank: int, i: int, log_probs_BT: Tensor) -> Tensor:
        advantages = scaled_advantages(reduction)[rank, i]
        config = AlgorithmConfig(loss_reduction=reduction)
        found, _ = ppo_policy_loss(
            log_probs_BT, LOG_PROBS[rank, i], advantages, config, MASKS[rank, i]
        )
        return found * RANKS  # since DDP averages over them

    reductions = (
        *("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm"),
        "prompt_mean",
    )
    return {f"skyrl/{name}": partial(loss, name) for name in reductions}


TRL: dict[str, Any] = {
    "max_completion_length": DIVISOR,
    "current_gradient_accumulation_steps": PER_RANK,
    "epsilon_low": 0.2,
    "epsilon_high": 5.0,  # the bound of the ratio itself for `cispo`
    "beta": 0.0,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
    "aux_loss_enabled": False,
    "_entropy_bonus_enabled": False,
    "model": SimpleNamespace(training=True),
    "accelerator": SimpleNamespace(
        num_processes=RANKS, gather=lambda x: x, reduce=lambda x, reduction: x
    ),
}
TRL_ARGS = {
    "delta": None,
    **{"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    **{"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
}


def trl() -> dict[str, MicrobatchLoss]:
    """With what its trainer computes: tokens of the generation batch, and accumulation."""
    use_peers("transformers pandas accelerate datasets huggingface_hub pyarrow")
    from trl.trainer.grpo_trainer import GRPOTrainer

    def loss(kind: str, other_tokens: int, rank: int, i: int, log_probs_BT: Tensor) -> Tensor:
        """With ``other_tokens``, the generation batch is for one more step, which has that many."""
        steps = 2 if other_tokens else 1
        given = log_probs_BT, torch.zeros_like(log_probs_BT), None
        trainer = SimpleNamespace(
            **TRL,
            loss_type=kind,
            importance_sampling_level="sequence" if kind == "luspo" else "token",
            args=SimpleNamespace(steps_per_generation=steps * PER_RANK, **TRL_ARGS),
            get_gamma_weights=GRPOTrainer.get_gamma_weights,
            _get_per_token_logps_and_entropies=lambda *args, **kwargs: given,
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
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    kinds = ("grpo", "bnpo", "dapo", "dr_grpo", "sapo", "cispo", "vespo", "luspo")
    of_two_steps = partial(loss, "dapo", int(MASKS.sum()) // 2)
    own = {f"trl/{kind}": partial(loss, kind, 0) for kind in kinds}
    return {**own, "by the generation batch": of_two_steps}


class _VerlData(dict[str, Any]):
    """As much of a TensorDict as verl's loss uses."""

    def select(self, *fields: str) -> _VerlData:
        return _VerlData((field, self[field]) for field in fields)

    def to_padded_tensor(self) -> _VerlData:
        return self


def verl() -> dict[str, MicrobatchLoss]:
    """With what its engine computes: `forward_backward_batch` for FSDP."""
    use_peers("ray tensordict omegaconf transformers codetiming orjson datasets pandas")
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    def loss(mode: str, factor: int | None, rank: int, i: int, log_probs_BT: Tensor) -> Tensor:
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=ROWS,
            loss_agg_mode=mode,
            loss_scale_factor=factor,
        )
        data = _VerlData(
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
        # Of a prompt of one token and of the answer, whose last token predicts nothing.
        output = {"log_probs": torch.nn.functional.pad(log_probs_BT, (0, 1)).flatten()}
        return ppo_loss(config, output, data)[0]

    names = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
    norm = "seq-mean-token-sum-norm"
    return {
        **{f"verl/{mode}": partial(loss, mode, None) for mode in names},
        f"verl/{norm}": partial(loss, norm, DIVISOR),
        "by the padded width": partial(loss, norm, None),
    }


def trinity() -> dict[str, MicrobatchLoss]:
    """With what its `verl_legacy` trainer does: it divides by the number of microbatches."""
    use_peers("tensordict ray transformers omegaconf safetensors datasets pandas")
    from trinity.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn

    def loss(mode: str, rank: int, i: int, log_probs_BT: Tensor) -> Tensor:
        found, _ = PPOPolicyLossFn(clip_range=0.2, loss_agg_mode=mode)(
            logprob=log_probs_BT,
            old_log_probs=LOG_PROBS[rank, i],
            response_mask=MASKS[rank, i],
            advantages=ADVANTAGES[rank, i].unsqueeze(-1).expand(ROWS, SEQ),
        )
        return found / PER_RANK

    names = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    return {f"trinity/{mode}": partial(loss, mode) for mode in names}


def clip_cov(path: str) -> None:
    """Tokens that SkyRL's Clip-Cov finds in its window of covariances, and so keeps unlearned."""
    _use_skyrl()
    from skyrl.backends.skyrl_train.utils.ppo_utils import compute_policy_loss_clip_cov
    from skyrl.train.config import AlgorithmConfig

    from megatron_loss_agg import LossAggregation, Microbatch, StepPlan

    config = AlgorithmConfig(policy_loss_type="clip_cov")
    config.clip_cov.clip_ratio = 1.0  # all of the window, not a sample of it
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.tensor([40, 200, 90, 200, 150, 200, 180, 120])
    mask_BT = (torch.arange(200) < lengths_B.unsqueeze(-1)).double()
    log_probs_BT = -torch.empty_like(mask_BT).exponential_(0.4, generator=generator)
    advantages_BT = torch.randn(8, 1, generator=generator).double().expand(8, 200)
    plan = StepPlan.build(LossAggregation(mode="sample_mean"), [Microbatch(mask_BT)])

    def in_window(of_loss_BT: Tensor) -> int:
        _, metrics = compute_policy_loss_clip_cov(
            log_probs_BT, log_probs_BT, of_loss_BT, config, mask_BT
        )
        return round(metrics["clip_ratio"] * mask_BT.sum().item())

    counts = {
        "plain": in_window(advantages_BT),
        "scaled": in_window(plan.scaled_advantages(0, advantages_BT)),
    }
    torch.save(counts, path)


SYSTEMS = {
    system.__name__.replace("_", "-"): system
    for system in (megatron, megatron_bridge, ms_swift, skyrl, trinity, trl, verl)
}
"""By what stands before the slash in their presets."""

if __name__ == "__main__":
    system, path = sys.argv[1:]
    if system == clip_cov.__name__:
        clip_cov(path)
    else:
        torch.save({name: gradient(loss) for name, loss in SYSTEMS[system]().items()}, path)
