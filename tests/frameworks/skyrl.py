"""SkyRL's real trainer, Megatron worker, model wrapper and loss on a tiny GPT, in two steps.

Every rank runs the trainer and keeps its own part of the data, which Ray would send to it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.frameworks import harness
from tests.frameworks.harness import CLIP, COEFFICIENTS, ENTROPY, KL, KeepGradients
from tests.host.reference import Reference
from tests.peers.standins import use_peers

STANDINS = (
    "ray jaxtyping loguru transformers cloudpathlib pydantic wandb omegaconf skyrl_gym datasets "
    "torchdata aiohttp orjson pybase64 rich httpx huggingface_hub nvidia_resiliency_ext "
    "megatron.bridge"
)
VOCAB = 100  # SkyRL fills microbatches of padding with any tokens below
# Optimizer steps, as rows of the batch. With two data-parallel ranks, the first is padded by a row.
STEPS = ((0, 7), (7, 11))
PROMPTS = ("ab", "ab", "ab", "c-", "c-", "9f", "9f", "", "", "7", "x")  # SkyRL's uids
PROMPT_LENGTHS = (3, 3, 3, 5, 5, 2, 2, 4, 4, 1, 3)
LENGTHS = (9, 2, 17, 1, 6, 12, 5, 20, 3, 8, 11)  # of the responses
ROLLOUTS = (0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 8)  # samples of one rollout are steps of a trajectory
EMPTY = (4, 9)  # samples whose mask is all 0
REWARDS = (0, 1, 2, 3, 4, 5, 5, 7, 8, 9, 10)
REJECTED = (5, 6)  # by SkyRL's filter of prompts whose rewards are equal


class Run(NamedTuple):
    """How to train on the batch."""

    loss_reduction: str = "token_mean"  # SkyRL's own
    aggregation: Mapping[str, Any] = {}  # keys of ours, which replaces it
    flags: str = ""  # of ours, in the environment
    filtered: bool = False  # whether SkyRL's filter rejects samples
    cp: int = 1
    packed: bool = False  # SkyRL's remove_microbatch_padding, which context parallelism requires
    max_tokens: int = 0  # of a microbatch; 0: microbatches of two samples
    calls: int = 1  # of forward_backward in each optimizer step
    policy_loss: str = "regular"
    max_seq_len: float | None = None  # SkyRL's divisor
    strategy: str = "megatron"


class Sample(NamedTuple):
    """One response. Vectors have the length of the response, right after the prompt."""

    prompt: list[int]
    response: list[int]
    mask: list[float]
    advantage: float
    old: Tensor  # log-probabilities minus those of the model, of the policy that sampled
    base: Tensor  # and of the reference policy


@functools.cache
def samples() -> tuple[Sample, ...]:
    generator = torch.Generator().manual_seed(3)
    prompts = {
        uid: torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        for uid, length in zip(PROMPTS, PROMPT_LENGTHS, strict=True)
    }
    result = []
    for i, (uid, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        # Of a fixed dtype: the same draw whatever the default dtype is.
        mask = (torch.rand(length, generator=generator, dtype=torch.float64) < 0.7).double()
        mask[0] = 1
        response = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        advantage = float(torch.randn((), generator=generator, dtype=torch.float64))
        old, base = torch.randn(2, length, generator=generator, dtype=torch.float64) * 0.15
        kept = (mask * (i not in EMPTY)).tolist()
        result.append(Sample(prompts[uid], response, kept, advantage, old, base))
    return tuple(result)


def build(dtype: torch.dtype) -> Any:
    """On a rank: the model of the host tests, with this vocabulary."""
    from tests.host import gpt

    gpt.VOCAB = VOCAB
    return gpt.build(dtype)


def references() -> dict[str, Reference]:
    """On a rank of its own: the terms of the loss, and the model's log-probabilities."""
    from tests.host import gpt

    gpt.initialize()
    model = build(torch.float64)

    def terms(sample: Sample) -> harness.Terms:
        tokens = torch.tensor(sample.prompt + sample.response)
        lp, entropy = harness.token_values(model, tokens, len(sample.prompt))
        old, base = lp.detach() + sample.old, lp.detach() + sample.base
        return {"lp": lp, **harness.grpo(lp, entropy, old, base, sample.advantage)}

    return harness.references(model, map(terms, samples()), COEFFICIENTS)


def use_skyrl(package: str) -> None:
    """Let this process, which has Megatron-Core, import SkyRL from the folder ``package``."""
    from megatron.core.distributed import finalize_model_grads

    from megatron_loss_agg.mcore.cpu.attention import GatheredAttention

    use_peers(STANDINS)
    sys.path.insert(1, package)
    logging.disable()  # its handlers are stood in for
    ray: Any = importlib.import_module("ray")
    ray.put = lambda value: value
    bridge: Any = importlib.import_module("megatron.bridge.peft.utils")
    bridge.enable_expert_parallel_grad_sync_in_finalize = lambda chunks: None
    bridge.finalize_model_grads_with_expert_adapter_sync = finalize_model_grads
    attend = GatheredAttention.forward

    def without_mask(
        self: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **options: Any
    ) -> Any:
        """As Transformer Engine, which ignores a mask of padding where attention is causal."""
        return attend(self, query, key, value, None, *args, **options)

    GatheredAttention.forward = without_mask


def train(package: str, cp: int, runs: dict[str, Run], log_probs: list[Tensor]) -> dict[str, Any]:
    """On a rank: by run, its gradients and metrics, with SkyRL from a folder; or its error."""
    use_skyrl(package)
    from tests.host import gpt

    gpt.initialize(cp)
    return {name: harness.attempt(_train, run, log_probs) for name, run in runs.items()}


def _train(run: Run, log_probs: list[Tensor]) -> dict[str, Any]:
    from skyrl.train.trainer import RayPPOTrainer

    from megatron_loss_agg.mcore.flags import VARIABLE
    from tests.host import gpt

    os.environ[VARIABLE] = run.flags
    cfg = _configured(run)
    model = gpt.data_parallel(build(torch.float32))
    optimizer = KeepGradients(model)
    trainer = object.__new__(RayPPOTrainer)
    trainer.cfg, trainer.all_metrics = cfg, {}
    trainer.tokenizer = SimpleNamespace(pad_token_id=0)
    trainer.dispatch = _Dispatch(_worker(cfg.trainer, model, optimizer), run.calls)
    generated = {  # what SkyRL's generator returns
        "prompt_token_ids": [sample.prompt for sample in samples()],
        "response_ids": [sample.response for sample in samples()],
        "rewards": [float(reward) for reward in REWARDS],
        "loss_masks": [sample.mask for sample in samples()],
        "is_last_step": [a != b for a, b in itertools.pairwise((*ROLLOUTS, None))],
    }
    output, uids = trainer.postprocess_generator_output(generated, list(PROMPTS))
    data = trainer.convert_to_training_input(output, uids)
    _fill_in(data, log_probs)
    metrics = trainer._execute_training_step("policy", data)
    return {"gradients": optimizer.gradients, "metrics": metrics}


def _configured(run: Run) -> Any:
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils.utils import validate_cfg

    cfg = SkyRLTrainConfig()
    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    trainer.strategy, trainer.logger = run.strategy, "console"
    trainer.train_batch_size, trainer.policy_mini_batch_size = len(set(PROMPTS)), 3
    trainer.micro_train_batch_size_per_gpu = 2
    trainer.max_tokens_per_microbatch = run.max_tokens
    trainer.remove_microbatch_padding = run.packed
    algorithm.loss_reduction, algorithm.max_seq_len = run.loss_reduction, run.max_seq_len
    for key, value in run.aggregation.items():
        setattr(algorithm.loss_aggregation, key, value)
    algorithm.zero_variance_filter = run.filtered
    algorithm.policy_loss_type = run.policy_loss
    algorithm.use_kl_loss = algorithm.use_entropy_loss = True
    algorithm.kl_loss_coef, algorithm.entropy_loss_coef = KL, ENTROPY
    algorithm.eps_clip_low = algorithm.eps_clip_high = CLIP
    algorithm.clip_cov.clip_ratio, algorithm.clip_cov.clip_cov_lb = 1.0, 0.1  # all of a window
    cfg.generator.n_samples_per_prompt = 2
    validate_cfg(cfg)
    cfg.generator.step_wise_trajectories = True  # lets prompts differ in their number of samples
    return cfg


def _worker(cfg: Any, model: Any, optimizer: KeepGradients) -> Any:
    """As after ``init_model``."""
    from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper, megatron_worker

    worker = object.__new__(megatron_worker.MegatronPolicyWorkerBase)
    worker.cfg, worker.optimizer, worker.actor_module = cfg, optimizer, [model]
    worker.scheduler = SimpleNamespace(step=lambda increment: None)
    worker.strategy = object.__new__(MegatronStrategy)
    worker.enable_router_replay = worker.enable_sample_support_replay = False
    worker.empty_cuda_cache = False
    loss = PolicyLossRegistry.get(cfg.algorithm.policy_loss_type)
    wrapper = megatron_model_wrapper.MegatronModelWrapper
    worker.model = wrapper(cfg, [model], optimizer, loss)
    return worker


class _Dispatch:
    """In place of Ray: this rank's own part of what the trainer sends to all.

    Args:
        calls: of ``forward_backward`` in each optimizer step.
    """

    def __init__(self, worker: Any, calls: int) -> None:
        from megatron.core import parallel_state

        self.worker, self.calls = worker, calls
        self.size = parallel_state.get_data_parallel_world_size()
        self.rank = parallel_state.get_data_parallel_rank()

    def stage_data(self, model: str, data: Any, boundaries: Any) -> Any:
        from skyrl.backends.skyrl_train.distributed.dispatch import MeshDispatch

        return MeshDispatch.stage_chunks(self.size, data, boundaries)

    def get_lcm_dp_size(self) -> int:
        return self.size

    def forward_backward_from_staged(self, model: str, chunks: Any) -> Any:
        mine = chunks[self.rank]
        for part in mine.chunk(-(-len(mine) // self.calls)):
            output = self.worker.forward_backward(part)
        return output

    def optim_step(self, model: str) -> Any:
        return self.worker.optim_step()


def _fill_in(data: Any, log_probs: list[Tensor]) -> None:
    """What the trainer's inference steps add; responses are aligned to the right."""
    shape = data["loss_mask"].shape
    for name in ("action_log_probs", "base_action_log_probs", "advantages"):
        data[name] = torch.zeros(shape, dtype=torch.float32)
    for i, (sample, of_model) in enumerate(zip(samples(), log_probs, strict=True)):
        where = slice(shape[1] - len(sample.mask), None)
        data["action_log_probs"][i, where] = of_model + sample.old
        data["base_action_log_probs"][i, where] = of_model + sample.base
        data["advantages"][i, where] = sample.advantage
    data["rollout_logprobs"] = data["action_log_probs"] + 0.01
