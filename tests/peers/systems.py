"""Other systems' own losses in one optimizer step, with the inputs of their trainers.

Two data-parallel ranks with three microbatches of two samples. Masks are uneven; one sample is
empty, and so is one microbatch. Gradients are those of the policy loss by the log-probabilities,
where the ratio is 1: ``-A_t * w_t``.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.peers.standins import use_peers

RANKS, PER_RANK, ROWS, SEQ = 2, 3, 2, 5
DIVISOR = 7  # the systems' "maximum length", deliberately not the padded width
_SAMPLES = """
    11000 10000  11111 01100  00000 11100
    00010 01010  00000 00000  11110 10100
"""
_BITS = torch.tensor([list(map(int, sample)) for sample in _SAMPLES.split()]).double()
MASKS = _BITS.reshape(RANKS * PER_RANK, ROWS, SEQ)
# One for each sample, all different, of both signs.
ADVANTAGES = torch.linspace(-1.0, 1.3, len(_BITS), dtype=torch.float64).reshape(-1, ROWS, 1)


class Rows(NamedTuple):
    """One microbatch, with the log-probabilities of the policy and of the one that sampled."""

    log_probs: Tensor
    old: Tensor
    mask: Tensor
    advantages: Tensor


Loss = Callable[[Rows], Tensor]
"""The loss that the trainer calls backward on."""


def gradients(system: str) -> dict[str, Tensor]:
    """The gradient that the optimizer gets, by preset. The system changes the process."""
    found = {}
    for name, loss in SYSTEMS[system]().items():
        old = torch.linspace(-4.0, -0.5, MASKS.numel()).double().reshape(MASKS.shape)
        log_probs = old.clone().requires_grad_()
        for rows in zip(log_probs, old, MASKS, ADVANTAGES.expand_as(MASKS), strict=True):
            loss(Rows(*rows)).backward()
        assert log_probs.grad is not None
        found[name] = log_probs.grad / RANKS  # as DDP averages
    return found


def scheduled(output: Tensor, loss_func: Any, per_token: bool = False) -> Tensor:
    """The loss that Megatron's schedule calls backward on."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    config = SimpleNamespace(calculate_per_token_loss=per_token, timers=None)
    scaled, _ = forward_step_calc_loss(
        *(SimpleNamespace(), output, loss_func, config, None, False, PER_RANK, []),
        cp_group_size=1,
        is_last_stage=True,
    )
    # Under the flag, DDP adds up over ranks, and `finalize_model_grads` divides by all tokens.
    return scaled * RANKS / MASKS.sum() if per_token else scaled


def _by_flag(name: str, loss_func: Callable[[Tensor, Tensor], Any]) -> dict[str, Loss]:
    """The loss of a stock function (mask, output) -> (sum, number of tokens)."""

    def loss(per_token: bool, x: Rows) -> Tensor:
        return scheduled(-x.advantages * x.log_probs, partial(loss_func, x.mask), per_token)

    return {f"{name}/default": partial(loss, False), f"{name}/per-token": partial(loss, True)}


def megatron() -> dict[str, Loss]:
    return _by_flag("megatron", lambda mask, x: ((x * mask).sum(), mask.sum().int(), {}))


def megatron_bridge() -> dict[str, Loss]:
    use_peers("megatron.bridge.models transformers safetensors")
    from megatron.bridge.training.losses import create_masked_next_token_loss_function as create

    return _by_flag("megatron-bridge", lambda mask, x: create(mask, False, False)(x))


GRPO: dict[str, Any] = {
    "max_completion_length": DIVISOR,
    "epsilon_low": 0.2,
    "epsilon_high": 5.0,  # the bound of the ratio itself for `cispo`
    "beta": 0.0,
}
"""Attributes of the trainers of ms-swift and TRL."""
SWIFT: dict[str, Any] = {
    **GRPO,
    "micro_batch_size": ROWS,
    **{"tau_pos": 1.0, "tau_neg": 1.05},
    **{"fipo_gamma": 0.9, "fipo_clip_range": None, "fipo_safety_threshold": None},
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


def ms_swift() -> dict[str, Loss]:
    """Its trainer computes the tokens of the step."""
    use_peers(
        "accelerate aiohttp dacite datasets huggingface_hub json_repair mcore_bridge modelscope "
        "msgspec pandas peft pydantic requests safetensors swift.rlhf_trainers.gkd_helpers "
        "swift.rlhf_trainers.grpo_trainer transformer_engine transformers trl urllib3 wandb"
    )
    importlib.import_module("modelscope.hub.utils.utils").get_cache_dir = lambda: "/nonexistent"
    from swift.megatron.trainers import grpo_trainer

    cls = grpo_trainer.MegatronGRPOTrainer
    grpo_trainer.mpu = SimpleNamespace(
        get_data_parallel_world_size=lambda: RANKS,
        get_data_parallel_group=lambda with_context_parallel: None,
    )
    grpo_trainer.gather = lambda x, group: x

    def loss(kind: str, x: Rows) -> Tensor:
        trainer = SimpleNamespace(**SWIFT, loss_type=kind, _metrics={"train": defaultdict(list)})
        trainer._compute_fipo_influence = partial(cls._compute_fipo_influence, trainer)
        batch = grpo_trainer.GRPOBatch(
            completion_mask=x.mask.bool(),
            truncated_mask=torch.zeros(ROWS).bool(),
            seq_lengths=torch.full((ROWS,), SEQ),
            old_per_token_logps=x.old,
            advantages=x.advantages,
            num_items_in_batch=MASKS.sum(),
        )
        return scheduled(x.log_probs, partial(cls.loss_func, trainer, data={"grpo_batch": batch}))

    kinds = ("grpo", "sapo", "bnpo", "dapo", "cispo", "fipo", "dr_grpo")
    return {f"ms-swift/{kind}": partial(loss, kind) for kind in kinds}


TRL: dict[str, Any] = {
    **GRPO,
    "current_gradient_accumulation_steps": PER_RANK,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
    "aux_loss_enabled": False,
    "_entropy_bonus_enabled": False,
    "model": SimpleNamespace(training=True),
    "accelerator": SimpleNamespace(
        num_processes=RANKS, gather=lambda x: x, reduce=lambda x, reduction: x
    ),
    "args": SimpleNamespace(
        steps_per_generation=PER_RANK,
        delta=None,
        **{"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        **{"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0},
        **{"vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
    ),
}


def trl() -> dict[str, Loss]:
    """Its trainer computes the tokens of the generation batch, and accumulates."""
    use_peers("transformers pandas accelerate datasets huggingface_hub pyarrow")
    from trl.trainer.grpo_trainer import GRPOTrainer

    def loss(kind: str, x: Rows) -> Tensor:
        policy = x.log_probs, torch.zeros_like(x.old), None
        trainer = SimpleNamespace(
            **TRL,
            loss_type=kind,
            importance_sampling_level="sequence" if kind == "luspo" else "token",
            get_gamma_weights=GRPOTrainer.get_gamma_weights,
            _get_per_token_logps_and_entropies=lambda *args, **kwargs: policy,
            _metrics={"train": defaultdict(list)},
        )
        inputs = {
            "prompt_ids": torch.zeros(ROWS, 1),
            "prompt_mask": torch.ones(ROWS, 1),
            "completion_ids": torch.zeros_like(x.old),
            "completion_mask": x.mask,
            "advantages": x.advantages[:, 0],
            "old_per_token_logps": x.old,
            "num_items_in_batch": MASKS.sum(),
        }
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    kinds = ("grpo", "bnpo", "dapo", "dr_grpo", "sapo", "cispo", "vespo", "luspo")
    return {f"trl/{kind}": partial(loss, kind) for kind in kinds}


def trinity() -> dict[str, Loss]:
    """Its `verl_legacy` trainer divides by the number of microbatches."""
    use_peers("tensordict ray transformers omegaconf safetensors datasets pandas")
    from trinity.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn

    def loss(mode: str, x: Rows) -> Tensor:
        policy_loss = PPOPolicyLossFn(clip_range=0.2, loss_agg_mode=mode)
        found, _ = policy_loss(
            logprob=x.log_probs,
            old_log_probs=x.old,
            response_mask=x.mask,
            advantages=x.advantages,
        )
        return found / PER_RANK

    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    return {f"trinity/{mode}": partial(loss, mode) for mode in modes}


SYSTEMS = {
    system.__name__.replace("_", "-"): system
    for system in (megatron, megatron_bridge, ms_swift, trinity, trl)
}
"""The systems by the first part of their presets' names."""
