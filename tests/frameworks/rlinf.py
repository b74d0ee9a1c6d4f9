"""RLinf's reasoning actor, batches, losses and training step on a real GPT over two ranks.

Stood in for: Ray and RLinf's scheduler, the inference servers, and the optimizer, which keeps the
gradient that it is given.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.launch.flags import VARIABLE
from tests.frameworks.harness import (
    CLIP,
    ENTROPY,
    KL,
    KeepGradients,
    Terms,
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
    Runs,
    Step,
    exact,
    refused,
    stock,
    with_entropy,
)
from tests.host.harness import run_host_ranks

STANDINS = (
    "ray transformers peft datasets accelerate vllm sglang modelscope wandb rlinf.scheduler regex "
    "huggingface_hub rlinf.data.storage"
)
PROMPT, RESPONSE = 12, 28  # the width of prompts, padded on the left, and of responses
ROWS = 2  # of a microbatch
LAST_ARE_EMPTY = (0, 1, 2, 4, 3, 5, 7, 6)
"""The samples of a step in an order that RLinf alone trains with two ranks.

Where the first row of a microbatch has no token, it takes the loss of all rows to be 0, and has other
metrics than elsewhere: other ranks wait for ever, or the step ends in a KeyError.
"""
ALGORITHM: dict[str, Any] = {
    **{"loss_type": "actor", "use_valid_token_scale": False, "early_stop_imp_ratio": None},
    **{"sampling_params": {"temperature": 1.0}, "entropy_bonus": 0.0, "n_minibatches": 1},
}
actor_module = "rlinf.workers.actor.megatron_actor_worker"
"""The module that the training script takes the actor from."""


def use(root: str) -> None:
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "2.50" if name == "ray" else version(name)
    use_framework(STANDINS, root)


def adapt() -> None:
    global actor_module
    from megatron_loss_agg.frameworks import rlinf

    (line,) = (x for x in rlinf.SETTINGS.splitlines() if x.startswith("from "))
    actor_module = line.split()[1]


def train(
    log_probs: list[LogProbs],
    _: Any,
    mean: str = "masked_mean",
    task_type: str = "reasoning",
    order: Sequence[int] = LAST_ARE_EMPTY,
    **options: Any,
) -> list[Step]:
    actor = _actor(mean, task_type, options)
    metrics = []
    for step, step_log_probs in zip(STEPS, log_probs, strict=True):
        batch = _batch([(step[i], *(x[i] for x in step_log_probs)) for i in order])
        if options.get("use_valid_token_scale"):
            actor._setup_valid_token_scale(batch)
        metrics.append(actor.training_step(batch))
    return [
        Step(
            gradient,
            {"loss": x["actor/final_loss"], "pg_loss": x["actor/policy_loss"]}
            | {"kl_loss": x["actor/kl_loss"], "entropy_loss": x["actor/entropy_loss"]},
        )
        for gradient, x in zip(actor.optimizer.gradients, metrics, strict=True)
    ]


def _actor(mean: str, task_type: str, options: dict[str, Any]) -> Any:
    """RLinf's actor, with the attributes that its set-up makes."""
    from megatron.core import parallel_state
    from omegaconf import OmegaConf
    from rlinf.utils import utils
    from rlinf.workers import megatron_worker

    from tests.host import gpt

    ddp = gpt.ddp_model(dtype=torch.float32)
    actor: Any = object.__new__(importlib.import_module(actor_module).MegatronActor)
    rows = len(STEPS[0]) // parallel_state.get_data_parallel_world_size()
    megatron_worker.get_num_microbatches = lambda: rows // ROWS
    megatron_worker.set_sync_funcs = lambda *_, **__: None
    optimizer = KeepGradients(ddp)
    vars(actor).update(
        cfg=OmegaConf.create(
            {"algorithm": {**ALGORITHM, **options}, "runner": {"task_type": task_type}}
        ),
        **{"role": "actor", "response_len": RESPONSE, "encoder_seq_length": PROMPT + RESPONSE},
        **{"variable_seq_lengths": True, "enable_dynamic_batch_size": False, "use_profiler": False},
        **{"calculate_entropy": True, "calculate_entropy_loss": False},
        **{"clip_ratio_low": CLIP, "clip_ratio_high": CLIP, "clip_ratio_c": None},
        **{"kl_beta": KL, "kl_penalty_type": "low_var_kl", "total_batch_size_per_dp": rows},
        loss_agg_func=getattr(utils, mean),
        transformer_config=ddp.config,
        model=[ddp],
        optimizer=optimizer,
        log_debug=print,
        optimizer_step=lambda _: (*optimizer.step(), 0.0),
        make_data_iterator_list=lambda batches: [iter(batches)],
    )
    return actor


def _batch(samples: Sequence[tuple[Answer, Tensor, Tensor]]) -> dict[str, Tensor]:
    """This rank's part of a global batch: prompts end, and responses start, at one position."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    answers, old, ref = zip(*samples[rank::ranks], strict=True)

    def whole(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Tensor:
        pairs = zip(prompts, responses, strict=True)
        return torch.stack(
            [
                torch.cat([pad(x, (PROMPT - len(x), 0)), pad(y, (0, RESPONSE - len(y)))])
                for x, y in pairs
            ]
        )

    tokens = [a.tokens().split([a.prompt_length, len(a.mask)]) for a in answers]
    prompts, responses = zip(*tokens, strict=True)
    attention = whole(*[[torch.ones_like(x) for x in xs] for xs in (prompts, responses)]).bool()
    masks = [torch.tensor(a.trained_mask()).bool() for a in answers]
    rewards = torch.tensor([a.reward for a in answers])
    return {
        "input_ids": whole(prompts, responses),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "response_mask": whole([torch.zeros_like(x).bool() for x in prompts], masks),
        "rollout_logprobs": torch.stack([pad(x, (0, RESPONSE - len(x))) for x in old]),
        "ref_logprobs": torch.stack([pad(x, (0, RESPONSE - len(x))) for x in ref]),
        "advantages": rewards.unsqueeze(-1).repeat(1, RESPONSE),
    }


def with_kl(*sample: Any) -> Terms:
    terms = with_entropy(*sample)
    return {**terms, "loss": terms["loss"] + ENTROPY * terms["entropy_loss"]}


OURS = [mode for mode in MODES if mode != "rollout_mean"]
OWN: Runs = {
    "token_mean": stock(with_kl, "token_mean", use_valid_token_scale=True),
}
RUNS: Runs = {
    **{mode: exact(with_kl, mode) for mode in OURS},
    "sample_sum": exact(with_kl, "sample_sum"),
    "sum": exact(with_kl, "sum"),
    "sample_mean, without empty ones": exact(with_kl, "sample_mean", empty="skip"),
    "sample_mean, a microbatch without tokens": exact(
        with_kl, "sample_mean", order=(0, 1, 2, 3, 4, 5, 6, 7)
    ),
    "rollout_mean": refused("rollout_mean"),
    "dataset_mean": refused("dataset_mean"),
    "scaled by tokens": refused("token_mean", use_valid_token_scale=True),
    "early stops": refused("token_mean", early_stop_imp_ratio=5.0),
    "entropy": refused("token_mean", entropy_bonus=0.1),
    "embodied": refused("token_mean", task_type="embodied"),
    **ON_ONE_RANK,
}


def report(*checkouts: str) -> Any:
    found = Report(use, train, checkouts, OWN, RUNS, adapt=adapt)
    found.compare("DP 2", 1)
    found.compare("CP 2", 2)
    (problems,) = run_host_ranks(_calls_without_the_variable, 1, checkouts[1])
    return found.rows, found.failures + problems


def _calls_without_the_variable(checkout: str) -> list[str]:
    """Methods of RLinf's actor that do not get the same objects without the variable."""
    use(checkout)
    from rlinf.workers.actor.megatron_actor_worker import MegatronActor

    from megatron_loss_agg.frameworks import rlinf

    os.environ[VARIABLE] = ""
    actor: Any = object.__new__(rlinf.MegatronActor)
    calls = {"training_step": (object(),), "get_forward_step_func": ()}
    return [
        f"{name} does not get the same objects"
        for name, args in calls.items()
        if not is_passed_on(MegatronActor, name, getattr(actor, name), *args)
    ]
