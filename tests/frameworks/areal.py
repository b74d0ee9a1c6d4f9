"""AReaL's actor, SFT engine, batches, losses and training step on a real GPT over two ranks.

The training step is that of its Megatron engine. Stood in for: Ray, mbridge and Megatron-Bridge,
which load models, the inference servers, and the optimizer, which keeps the gradient that it is
given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from tests.frameworks.harness import CLIP, KL, KeepGradients, Terms, grpo, use_framework
from tests.frameworks.report import (
    MODES,
    STEPS,
    Answer,
    LogProbs,
    Report,
    Run,
    Runs,
    Step,
    exact,
    nll,
    refused,
    stock,
)

STANDINS = (
    "ray transformers mbridge megatron.bridge wandb torch_memory_saver aiohttp httpx requests "
    "datasets tenacity flask torchdata lark uvloop numba aiofiles openai safetensors peft swanlab "
    "trackio tensorboardX tabulate pybase64"
)
use = partial(use_framework, STANDINS)
CONFIG: dict[str, Any] = {
    **{"experiment_name": "test", "trial_name": "test"},
    **{"backend": "megatron:d1", "dtype": "float32"},
}
ACTOR: dict[str, Any] = {
    **{"ppo_n_minibatches": 1, "eps_clip": CLIP, "eps_clip_higher": CLIP, "kl_ctl": 0.0},
    **{"recompute_logprob": True, "use_decoupled_loss": False},
}


def train(
    log_probs: list[LogProbs], key: Any, engine: str = "MegatronPPOActor", **options: Any
) -> list[Step]:
    from areal.api import cli_args
    from megatron.core import mpu

    options |= {"loss_aggregation": cli_args.LossAggConfig(**key)} if key else {}
    trained = _engine(engine, **options)
    optimizer = _set_up(trained)
    losses = _keep_losses(trained)
    rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    for step, given in zip(STEPS, log_probs, strict=True):
        groups = _groups(step, given)[rank::ranks]
        if hasattr(trained, "train_lm"):
            trained.train_lm(groups)
        else:
            trained.ppo_update([_advantages(x) for x in trained.compute_advantages(groups)])
    return list(map(Step, optimizer.gradients, losses))


def _engine(name: str, **options: Any) -> Any:
    """One of AReaL's own, with a configuration of its own."""
    from areal.api import cli_args
    from areal.engine import fsdp_engine, megatron_engine
    from areal.experimental.engine import archon_engine

    config, actor = cli_args.TrainEngineConfig, {}
    if "Actor" in name:
        config, actor = cli_args.PPOActorConfig, ACTOR
    elif "DPO" in name:
        config = cli_args.DPOEngineConfig
    modules = {"FSDP": fsdp_engine, "Archon": archon_engine}
    module = next((x for key, x in modules.items() if key in name), megatron_engine)
    microbatches = cli_args.MicroBatchSpec(max_tokens_per_mb=40)
    return getattr(module, name)(config(**CONFIG, **actor, **options, mb_spec=microbatches))


def _set_up(engine: Any) -> Any:
    """What its `initialize` does after it has loaded a model; returns the optimizer."""
    from areal.api import ParallelStrategy
    from areal.engine.megatron_engine import _MegatronModelList
    from megatron.core import mpu

    from tests.host import gpt

    ddp = gpt.ddp_model(dtype=torch.float32)
    optimizer = KeepGradients(ddp)
    optimizer.get_loss_scale = lambda: torch.tensor(1.0)
    cp = mpu.get_context_parallel_world_size()
    engine.create_process_group(ParallelStrategy(context_parallel_size=cp))
    engine.model, engine.optimizer = _MegatronModelList([ddp]), optimizer
    engine.device, engine.use_padded_seq = torch.device("cpu"), False
    return optimizer


def _keep_losses(engine: Any) -> list[dict[str, float]]:
    """Of each training step, which AReaL does not report: what it calls backward on, unscaled."""
    from megatron.core import mpu

    kept: list[dict[str, float]] = []
    of_step: list[Tensor] = []
    compute, step = engine._compute_logprobs_and_loss, engine.optimizer_step

    def compute_and_keep(*args: Any, loss_multiplier: float) -> Tensor:
        loss = compute(*args, loss_multiplier=loss_multiplier)
        of_step.append(loss.detach() / loss_multiplier)
        return loss

    def step_and_sum_up() -> Any:
        total = torch.stack(of_step).sum()
        dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
        kept.append({"loss": total.item()})
        of_step.clear()
        return step()

    engine._compute_logprobs_and_loss, engine.optimizer_step = compute_and_keep, step_and_sum_up
    return kept


def _groups(step: Sequence[Answer], log_probs: LogProbs) -> list[dict[str, Any]]:
    """A trajectory of each prompt, with all its samples, as the rollout makes them."""
    samples = sorted(zip(step, *log_probs, strict=True), key=_prompt)
    return [_trajectory(*zip(*group, strict=True)) for _, group in groupby(samples, _prompt)]


def _prompt(sample: tuple[Answer, Tensor, Tensor]) -> int:
    return sample[0].prompt


def _trajectory(
    answers: Sequence[Answer], old: Sequence[Tensor], ref: Sequence[Tensor]
) -> dict[str, Any]:
    tokens = [answer.tokens() for answer in answers]
    padded = partial(pad_sequence, batch_first=True)

    def placed(values: Sequence[Tensor], shift: int = 0) -> Tensor:
        """At the answers' tokens, or ``shift`` before them."""
        pairs = zip(answers, values, strict=True)
        return padded([pad(value, (a.prompt_length - shift, shift)) for a, value in pairs])

    return {
        "input_ids": padded(tokens),
        "attention_mask": padded([torch.ones(len(x), dtype=torch.bool) for x in tokens]),
        "loss_mask": placed([torch.tensor(answer.kept()).int() for answer in answers]),
        "logprobs": placed(old),
        # Of the policy and of a teacher, by their forward passes: where a token is predicted.
        "prox_logp": placed(old, shift=1),
        "teacher_logp": placed(ref, shift=1),
        "distill_loss_weight": KL,
        "rewards": torch.tensor([answer.reward for answer in answers]),
    }


def _advantages(group: dict[str, Any]) -> dict[str, Any]:
    """The rewards: AReaL's own advantages are 0 where an answer's last token is masked."""
    rewards = group["rewards"].unsqueeze(-1)
    return {**group, "advantages": rewards.expand_as(group["advantages"]).contiguous()}


def with_teacher(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    """A clipped policy loss, and the distance to a teacher."""
    return {"loss": grpo(lp, entropy, old, ref, reward)["pg_loss"] + KL * (lp - ref)}


def cispo(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    ratio = (lp - old).exp().clamp(1 - CLIP, 1 + CLIP).detach()
    return {"loss": -ratio * reward * lp + KL * (lp - ref)}


OURS = [mode for mode in MODES if mode != "rollout_mean"]
CISPO, SFT = {"use_cispo_loss": True}, {"engine": "MegatronLMEngine"}
OTHERS = ("FSDPPPOActor", "ArchonPPOActor", "MegatronRWEngine", "MegatronDPOEngine")
OWN: Runs = {
    "token_mean": stock(with_teacher, "token_mean"),
    "token_mean, CISPO": stock(cispo, "token_mean", **CISPO),
    "SFT": Run(options=SFT),  # divides by 1e-5 + the tokens of a microbatch
}
RUNS: Runs = {
    **{mode: exact(with_teacher, mode) for mode in OURS},
    **{f"{mode}, CISPO": exact(cispo, mode, **CISPO) for mode in OURS},
    **{f"{mode}, SFT": exact(nll, mode, **SFT) for mode in ("sample_mean", "constant")},
    "sample_mean, without empty ones": exact(with_teacher, "sample_mean", empty="skip"),
    "rollout_mean": refused("rollout_mean"),
    "prompt_mean, SFT": refused("prompt_mean", **SFT),
    "tree training": refused("token_mean", enable_tree_training=True),
    **{name: refused("token_mean", engine=name) for name in OTHERS},
}


def report(*checkouts: str) -> Any:
    found = Report(use, train, checkouts, OWN, RUNS)
    found.compare("DP 2", 1, configured=True)
    found.compare("CP 2", 2, configured=True)
    return found.rows, found.failures
