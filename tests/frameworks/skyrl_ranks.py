"""On a rank that can import SkyRL: its real trainer, Megatron worker, model wrapper and loss.

Every rank runs the trainer and keeps its own part of the data, which Ray would send to it.
"""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from skyrl.backends.skyrl_train.distributed.dispatch import MeshDispatch
from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.backends.skyrl_train.workers.megatron import megatron_worker
from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.utils import validate_cfg

from megatron_loss_agg.mcore.flags import VARIABLE
from tests.frameworks import skyrl_case as case
from tests.frameworks.optimizer import KeepGradients
from tests.frameworks.reference import CLIP, ENTROPY, KL
from tests.host import gpt


def train(run: case.Run, log_probs: list[torch.Tensor]) -> dict[str, Any]:
    """On every rank: the gradients of both optimizer steps, and the trainer's metrics."""
    cfg = configured(run)
    model = gpt.data_parallel(case.build(torch.float32))
    optimizer = KeepGradients(model)
    worker = make_worker(cfg.trainer, model, optimizer)
    trainer = object.__new__(RayPPOTrainer)
    trainer.cfg, trainer.all_metrics = cfg, {}
    trainer.tokenizer = SimpleNamespace(pad_token_id=0)
    trainer.dispatch = Dispatch(worker, run.calls)
    output, uids = trainer.postprocess_generator_output(generated(), list(case.PROMPTS))
    data = trainer.convert_to_training_input(output, uids)
    fill_in(data, log_probs)
    metrics = trainer._execute_training_step("policy", data)
    return {"gradients": optimizer.gradients, "metrics": metrics}


def configured(run: case.Run) -> Any:
    cfg = SkyRLTrainConfig()
    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    trainer.strategy, trainer.logger = run.strategy, "console"
    trainer.train_batch_size, trainer.policy_mini_batch_size = len(set(case.PROMPTS)), 3
    trainer.micro_train_batch_size_per_gpu = 2
    trainer.max_tokens_per_microbatch = run.max_tokens
    trainer.remove_microbatch_padding = run.packed
    algorithm.loss_reduction, algorithm.max_seq_len = run.loss_reduction, run.max_seq_len
    for key, value in (run.aggregation or {}).items():
        setattr(algorithm.loss_aggregation, key, value)
    algorithm.zero_variance_filter = run.filtered
    algorithm.policy_loss_type = run.policy_loss
    algorithm.use_kl_loss = algorithm.use_entropy_loss = True
    algorithm.kl_loss_coef, algorithm.entropy_loss_coef = KL, ENTROPY
    algorithm.eps_clip_low = algorithm.eps_clip_high = CLIP
    algorithm.clip_cov.clip_ratio, algorithm.clip_cov.clip_cov_lb = 1.0, 0.1  # all of a window
    cfg.generator.n_samples_per_prompt = 2
    with mock.patch.dict(os.environ, {VARIABLE: run.flags}):
        validate_cfg(cfg)
    cfg.generator.step_wise_trajectories = True  # lets prompts differ in their number of samples
    return cfg


def make_worker(cfg: Any, model: Any, optimizer: KeepGradients) -> Any:
    """As after ``init_model``."""
    worker = object.__new__(megatron_worker.MegatronPolicyWorkerBase)
    worker.cfg, worker.optimizer, worker.actor_module = cfg, optimizer, [model]
    worker.scheduler = SimpleNamespace(step=lambda increment: None)
    worker.strategy = object.__new__(MegatronStrategy)
    worker.enable_router_replay = worker.enable_sample_support_replay = False
    worker.empty_cuda_cache = False
    loss = PolicyLossRegistry.get(cfg.algorithm.policy_loss_type)
    worker.model = MegatronModelWrapper(cfg, [model], optimizer, loss)
    return worker


class Dispatch:
    """In place of Ray: this rank's own part of what the trainer sends to all.

    Args:
        calls: of ``forward_backward`` in each optimizer step.
    """

    def __init__(self, worker: Any, calls: int) -> None:
        self.worker, self.calls = worker, calls

    def stage_data(self, model: str, data: Any, boundaries: Any) -> Any:
        return MeshDispatch.stage_chunks(
            parallel_state.get_data_parallel_world_size(), data, boundaries
        )

    def get_lcm_dp_size(self) -> int:
        return parallel_state.get_data_parallel_world_size()

    def forward_backward_from_staged(self, model: str, chunks: Any) -> Any:
        mine = chunks[parallel_state.get_data_parallel_rank()]
        for part in mine.chunk(-(-len(mine) // self.calls)):
            output = self.worker.forward_backward(part)
        return output

    def optim_step(self, model: str) -> Any:
        return self.worker.optim_step()


def generated() -> dict[str, Any]:
    """What SkyRL's generator returns."""
    return {
        "prompt_token_ids": [sample.prompt for sample in case.samples()],
        "response_ids": [sample.response for sample in case.samples()],
        "rewards": [float(reward) for reward in case.REWARDS],
        "loss_masks": [sample.mask for sample in case.samples()],
        "is_last_step": [a != b for a, b in itertools.pairwise((*case.ROLLOUTS, None))],
    }


def fill_in(data: Any, log_probs: list[torch.Tensor]) -> None:
    """What the trainer's inference steps add; responses are aligned to the right."""
    shape = data["loss_mask"].shape
    for name in ("action_log_probs", "base_action_log_probs", "advantages"):
        data[name] = torch.zeros(shape, dtype=torch.float32)
    for i, (sample, of_model) in enumerate(zip(case.samples(), log_probs, strict=True)):
        where = slice(shape[1] - len(sample.mask), None)
        data["action_log_probs"][i, where] = of_model + sample.old
        data["base_action_log_probs"][i, where] = of_model + sample.base
        data["advantages"][i, where] = sample.advantage
    data["rollout_logprobs"] = data["action_log_probs"] + 0.01
