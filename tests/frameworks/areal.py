"""AReaL's actor, critic and SFT engine, batches, losses and training step on a real GPT, two ranks.

The engines are made by AReaL's trainers, and the training step is that of its Megatron engine. Stood
in for: Ray, mbridge and Megatron-Bridge, which load models, the inference servers, and the optimizer,
which keeps the gradient that it is given.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.launch.flags import VARIABLE
from tests.frameworks.harness import (
    CLIP,
    KL,
    KeepGradients,
    Terms,
    attempt,
    grpo,
    gspo,
    is_passed_on,
    use_framework,
)
from tests.frameworks.report import (
    MODES,
    ON_ONE_RANK,
    STEPS,
    Answer,
    LogProbs,
    Report,
    Run,
    Runs,
    Step,
    exact,
    flags,
    nll,
    refused,
    stock,
)
from tests.host.harness import run_host_ranks

STANDINS = (
    "ray transformers mbridge megatron.bridge wandb torch_memory_saver aiohttp httpx requests "
    "datasets tenacity flask torchdata lark uvloop numba aiofiles openai safetensors peft swanlab "
    "trackio tensorboardX tabulate pybase64"
)
CONFIG: dict[str, Any] = {"experiment_name": "test", "trial_name": "test", "dtype": "float32"}
MINIBATCHES = {"ppo_n_minibatches": 1}
ACTOR: dict[str, Any] = {
    **{"eps_clip": CLIP, "eps_clip_higher": CLIP, "kl_ctl": 0.0},
    **{"recompute_logprob": True, "use_decoupled_loss": False},
}
trainers = "areal"
"""The module whose trainers make the engines."""


def use(root: str) -> None:
    use_framework(STANDINS, root)
    os.environ["AREAL_SPMD_MODE"] = "1"  # each rank is its own controller
    os.environ["AREAL_FLEX_ATTENTION_BLOCK_SIZE"] = "8"  # of which a tree's tokens are a multiple


def adapt() -> None:
    global trainers
    trainers = "megatron_loss_agg.frameworks.areal"


def train(
    log_probs: list[LogProbs], _: Any, model: str = "actor", backend: str = "", **options: Any
) -> list[Step]:
    from megatron.core import mpu

    cp = mpu.get_context_parallel_world_size()
    engine = _engine(model, backend or f"megatron:d{2 // cp}c{cp}", **options)
    optimizer = _set_up(engine, model)
    rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    for step, step_log_probs in zip(STEPS, log_probs, strict=True):
        groups = _groups(step, step_log_probs)[rank::ranks]
        if model == "SFT":
            engine.train_lm(groups)
        elif model == "critic":
            engine.ppo_update([_values(x) for x in groups])
        else:
            engine.ppo_update([_advantages(x) for x in engine.compute_advantages(groups)])
    return [Step(gradient, {}) for gradient in optimizer.gradients]


def _engine(model: str, backend: str, **options: Any) -> Any:
    """As AReaL's trainer makes it, with a configuration of its own."""
    from areal.api import cli_args

    config_class, own = {
        "actor": (cli_args.PPOActorConfig, {**MINIBATCHES, **ACTOR}),
        "critic": (cli_args.PPOCriticConfig, {**MINIBATCHES, "eps_clip": CLIP, "is_critic": True}),
        "SFT": (cli_args.TrainEngineConfig, {}),
    }[model]
    microbatches = cli_args.MicroBatchSpec(max_tokens_per_mb=40)
    settings = {**CONFIG, "backend": backend, "mb_spec": microbatches, **own, **options}
    config, alloc = config_class(**settings), _allocation(backend)
    module = import_module(trainers)
    trainer = object.__new__(module.SFTTrainer if model == "SFT" else module.PPOTrainer)
    trainer.scheduler, trainer.actor_alloc = None, alloc
    trainer.config = SimpleNamespace(actor=config)
    if model == "SFT":
        return trainer._create_actor(config)
    if model == "critic":
        return trainer._create_critic(config, alloc)
    return trainer._create_train_engine(config, alloc)


def _allocation(backend: str, name: str = "") -> Any:
    """The allocation of ``megatron:d1c2``. AReaL's parser of it needs lark."""
    from areal.api import ParallelStrategy

    name, sizes = backend.split(":")
    cp = int(sizes.partition("c")[2] or 1)
    dp = int(sizes.partition("c")[0].removeprefix("d"))
    strategy = ParallelStrategy(data_parallel_size=dp, context_parallel_size=cp)
    return SimpleNamespace(backend=name, parallel=strategy)


def _set_up(engine: Any, model: str) -> Any:
    """Do the part of its `initialize` after a model is loaded; return the optimizer."""
    from areal.engine.megatron_engine import _MegatronModelList

    from tests.host import gpt

    ddp = gpt.ddp_model(dtype=torch.float32)
    if model == "critic":
        _predict_values(ddp.module)
    if engine.enable_tree_training:
        _attend_in_trees(ddp.module)
    optimizer = KeepGradients(ddp)
    optimizer.get_loss_scale = lambda: torch.tensor(1.0)
    engine.model, engine.optimizer = _MegatronModelList([ddp]), optimizer
    engine.device, engine.use_padded_seq = torch.device("cpu"), False
    return optimizer


def _attend_in_trees(model: Any) -> None:
    """Let it attend by AReaL's mask, as its FlexAttention does, and read AReaL's positions."""

    def by_mask(
        forward: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        *args: Any,
        **more: Any,
    ) -> Tensor:
        return forward(query, key, value, ~mask[None, None], *args, **more)

    for layer in model.decoder.layers:
        attention = layer.self_attention.core_attention
        attention.forward = partial(by_mask, attention.forward)
    predict, rotary = model.forward, model.rotary_pos_emb

    def forward(*args: Any, position_ids: Tensor, **more: Any) -> Tensor:
        (depth,) = position_ids
        handle = rotary.register_forward_hook(lambda *_: rotary.get_emb(len(depth))[depth])
        output = predict(*args, position_ids=position_ids, **more)
        handle.remove()
        return output

    model.forward = forward


def _predict_values(model: Any) -> None:
    """Let it predict a value for each token: the log-probability of the next one."""
    predict = model.forward

    def forward(input_ids: Tensor, *args: Any, **more: Any) -> Tensor:
        log_p = predict(input_ids, *args, **more).log_softmax(-1)
        return log_p.gather(-1, input_ids.roll(-1, -1).unsqueeze(-1))

    model.forward = forward


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
        "loss_mask": placed([torch.tensor(answer.trained_mask()).int() for answer in answers]),
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


def _values(group: dict[str, Any]) -> dict[str, Any]:
    """For a critic with values near the policy's log-probabilities; returns are rewards."""
    mask = group["loss_mask"].float().roll(-1, -1)
    rewards = group["rewards"].unsqueeze(-1).expand_as(mask).contiguous()
    return {**group, "loss_mask": mask, "values": group["prox_logp"], "returns": rewards}


def with_teacher(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    """A clipped policy loss, and the distance to a teacher."""
    return {"loss": grpo(lp, entropy, old, ref, reward)["pg_loss"] + KL * (lp - ref)}


def cispo(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    ratio = (lp - old).exp().clamp(1 - CLIP, 1 + CLIP).detach()
    return {"loss": -ratio * reward * lp + KL * (lp - ref)}


def with_sample_ratio(
    lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float
) -> Terms:
    """GSPO in place of the policy loss."""
    answers = [a for step in STEPS for a in step if (a.reward, len(a.mask)) == (reward, len(lp))]
    (mask,) = {a.trained_mask() for a in answers}
    return {"loss": gspo(lp, old, mask, reward) + KL * (lp - ref)}


def value_loss(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    """A critic's clipped loss."""
    clipped = old + (lp - old).clamp(-CLIP, CLIP)
    return {"loss": 0.5 * torch.maximum((lp - reward).square(), (clipped - reward).square())}


OURS = [mode for mode in MODES if mode != "rollout_mean"]
CISPO, GSPO = {"use_cispo_loss": True}, {"importance_sampling_level": "sequence"}
CRITIC, SFT = {"model": "critic"}, {"model": "SFT"}
OWN: Runs = {
    "token_mean": stock(with_teacher, "token_mean"),
    "token_mean, CISPO": stock(cispo, "token_mean", **CISPO),
    "token_mean, GSPO": stock(with_sample_ratio, "token_mean", **GSPO),
    "SFT": Run(options=SFT),  # divides by 1e-5 + the tokens of a microbatch
}
RUNS: Runs = {
    **{mode: exact(with_teacher, mode) for mode in OURS},
    **{f"{mode}, CISPO": exact(cispo, mode, **CISPO) for mode in OURS},
    "prompt_mean, GSPO": exact(with_sample_ratio, "prompt_mean", **GSPO),
    **{f"{mode}, SFT": exact(nll, mode, **SFT) for mode in ("sample_mean", "constant")},
    "sample_mean, without empty ones": exact(with_teacher, "sample_mean", empty="skip"),
    "rollout_mean": refused("rollout_mean"),
    "microbatch_mean": refused("microbatch_mean"),
    "rejected samples": refused("token_mean", "skip"),
    "prompt_mean, minibatches": refused("prompt_mean", ppo_n_minibatches=2),
    "prompt_mean, SFT": refused("prompt_mean", **SFT),
    "M2PO": refused("token_mean", m2_threshold=0.1),
    **{
        f"{backend}, {model}": refused("token_mean", model=model, backend=f"{backend}:d2")
        for backend in ("fsdp", "archon")
        for model in ("actor", "critic", "SFT")
    },
    **ON_ONE_RANK,
}
# AReaL's critic has no context parallelism.
CRITIC_OWN: Runs = {"token_mean, critic": stock(value_loss, "token_mean", **CRITIC)}
CRITIC_RUNS: Runs = {f"{mode}, critic": exact(value_loss, mode, **CRITIC) for mode in OURS}

# AReaL has no trees under context parallelism, for its critic, nor for SFT.
TREES = {"enable_tree_training": True, "pad_to_maximum": True}
TREE_OWN: Runs = {"token_mean, trees": stock(with_teacher, "token_mean", **TREES)}
TREE_RUNS: Runs = {
    **{f"{mode}, trees": exact(with_teacher, mode, **TREES) for mode in OURS},
    "prompt_mean, CISPO, trees": exact(cispo, "prompt_mean", **CISPO, **TREES),
    "GSPO, trees": refused("prompt_mean", **GSPO, **TREES),  # by AReaL, which has no offsets there
}


def report(*checkouts: str) -> Any:
    found = Report(use, train, checkouts, OWN, RUNS, adapt=adapt)
    critic = Report(use, train, checkouts, CRITIC_OWN, CRITIC_RUNS, adapt=adapt)
    trees = Report(use, train, checkouts, TREE_OWN, TREE_RUNS, adapt=adapt)
    found.compare("DP 2", 1)
    critic.compare("DP 2", 1)
    trees.compare("DP 2", 1)
    found.compare("CP 2", 2)
    (problems,) = run_host_ranks(_class_problems, 1, checkouts[1])
    # AReaL reports no loss, and so there is no metric to compare.
    rows = [(*row[:3], "", row[4]) for x in (found, critic, trees) for row in x.rows]
    return rows, found.failures + critic.failures + trees.failures + problems


def _class_problems(checkout: str) -> list[str]:
    """Faults of the engines where a single controller, or one's own code, uses them."""
    use(checkout)
    adapt()
    del os.environ["AREAL_SPMD_MODE"]
    from areal.api.alloc_mode import ModelAllocation
    from areal.utils.dynamic_import import import_from_string

    from megatron_loss_agg.frameworks import areal as adapter

    os.environ[VARIABLE] = flags("sample_mean")
    ModelAllocation.from_str = _allocation
    problems = []
    for model, expected in {
        "actor": adapter.AggregatedPPOActor,
        "critic": adapter.AggregatedPPOCritic,
        "SFT": adapter.AggregatedLMEngine,
    }.items():
        worker_class = _engine(model, "megatron:d2").train_engine
        path = f"{worker_class.__module__}.{worker_class.__name__}"  # as its controllers write it
        if import_from_string(path) is not expected:
            problems.append(f"workers of the {model} get {path}")
    os.environ[VARIABLE] = ""
    problems += _calls_without_the_variable(adapter)
    engine = object.__new__(adapter.AggregatedLMEngine)
    refusals = {
        "another loss": (engine.train_batch, {}, torch.sum, torch.sum),
        "no variable": (adapter._aggregation, None, True),
    }
    for name, (call, *args) in refusals.items():
        if not str(attempt(call, *args, errors=HostError)).startswith("HostError:"):
            problems.append(f"{name} is not refused")
    return problems


def _calls_without_the_variable(adapter: Any) -> list[str]:
    """Methods of AReaL's trainers that do not get the same objects without the variable."""
    from areal import PPOTrainer, SFTTrainer

    config, alloc = object(), object()
    ppo, sft = object.__new__(adapter.PPOTrainer), object.__new__(adapter.SFTTrainer)
    ppo.scheduler, ppo.config = None, SimpleNamespace(actor=config)
    sft.scheduler, sft.actor_alloc = None, alloc
    calls = {
        "_create_train_engine": (PPOTrainer, ppo, config, alloc),
        "_create_critic": (PPOTrainer, ppo, config, alloc),
        "_create_actor": (SFTTrainer, sft, config),
    }
    return [
        f"{name} does not get the same objects"
        for name, (owner, trainer, *args) in calls.items()
        if not is_passed_on(owner, name, getattr(trainer, name), *args)
    ]
