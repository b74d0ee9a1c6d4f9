"""ROLL's actors, losses and training step on a real GPT over two ranks.

Stood in for: Ray, the inference servers, checkpoints of mcore_adapter, and the optimizer, which
keeps the gradient that it is given.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.launch.flags import VARIABLE
from tests.frameworks.harness import (
    CLIP,
    ENTROPY,
    KL,
    KeepGradients,
    ignore_padding_masks,
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
    "ray transformers peft datasets accelerate vllm sglang modelscope wandb transfer_queue "
    "more_itertools opentelemetry huggingface_hub pybase64 imageio safetensors"
)
WIDTH = 48  # of a padded row; a multiple of what packs are padded to
PAIRS = 2  # rows of a microbatch
SETTINGS: dict[str, Any] = {
    "enable_old_logprobs_recompute": True,
    "loss_agg_mode": "seq-mean-token-sum",
    **{"importance_sampling": "token", "ratio_type": "token"},
    **{"use_pg_clip_range": False, "pg_clip": CLIP, "dual_clip_loss": False},
    "train_infer_correction": Namespace(is_weight=Namespace(enabled=False)),
    **{"use_kl_loss": True, "kl_loss_coef": KL, "entropy_loss_coef": ENTROPY, "rl_loss_coef": 1.0},
    **{"difficulty_loss_weight": False, "length_loss_weight": False},
}
workers = "roll.pipeline.rlvr.actor_worker.ActorWorker"
"""The class of the actor, as in ROLL's configuration."""


def use(root: str) -> None:
    use_framework(STANDINS, root)
    sys.path.insert(1, f"{root}/mcore_adapter/src")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.chdir(tempfile.mkdtemp())  # it writes logs there
    ignore_padding_masks()
    from roll.distributed.scheduler import decorator

    decorator.get_tracer = lambda _: Namespace(start_as_current_span=nullcontext)
    decorator.attach_trace_context = nullcontext


def adapt() -> None:
    global workers
    from megatron_loss_agg.frameworks import roll

    (line,) = (x for x in roll.SETTINGS.splitlines() if "worker_cls" in x)
    workers = line.split()[-1]


def train(
    log_probs: list[LogProbs],
    _: Any,
    packed: bool = False,
    pipeline: str = "rlvr",
    worker_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[Step]:
    worker = _worker(packed, pipeline, worker_options or {}, options)
    worker.initialize(worker.pipeline_config)
    for step, step_log_probs in zip(STEPS, log_probs, strict=True):
        batch = _batch(step, step_log_probs)
        worker.strategy.train_step(batch=batch, loss_func=worker.loss_func)
    return [Step(gradient, {}) for gradient in worker.strategy.optimizer.gradients]


def _worker(
    packed: bool, pipeline: str, worker_options: dict[str, Any], options: dict[str, Any]
) -> Any:
    """ROLL's worker and strategy, with the attributes that their set-up makes."""
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from roll.distributed.strategy.megatron_strategy import MegatronTrainStrategy
    from roll.pipeline import base_worker
    from roll.utils.import_utils import safe_import_class

    from tests.host import gpt

    path = workers
    if pipeline == "agentic":
        path = "roll.pipeline.agentic.agentic_actor_worker.ActorWorker"
        if workers.startswith("megatron_loss_agg"):
            path = "megatron_loss_agg.frameworks.roll.AggregatedAgenticWorker"
    worker: Any = object.__new__(safe_import_class(path))
    ddp = gpt.ddp_model(dtype=torch.float32)
    # ROLL overwrites logits in fp32, in which it computes; of others, as in training, it makes copies.
    ddp.module.register_forward_hook(lambda _, __, logits: logits.double())
    rows = len(STEPS[0]) // mpu.get_data_parallel_world_size()
    settings = {
        **{"strategy_name": "megatron_train", "apply_loss_scale": True, "name": "actor_train"},
        **{"use_dynamic_batching_in_train": False, "use_sequence_packing": packed},
        **{"sequence_packing_args": None, "logits_in_fp32": True},
        "training_args": Namespace(per_device_train_batch_size=PAIRS),
        "strategy_args": Namespace(strategy_config={}),
        **worker_options,
    }
    sizes = {"tp_size": 1, "cp_size": mpu.get_context_parallel_world_size()}
    vars(worker).update(
        worker_config=Namespace(**settings),
        pipeline_config=Namespace(**{**SETTINGS, **options}),
        rank_info=Namespace(**sizes),
        _logprobs_cache={},
    )
    strategy: Any = object.__new__(MegatronTrainStrategy)
    strategy.strategy_name = settings["strategy_name"]
    vars(strategy).update(
        worker=worker,
        worker_config=worker.worker_config,
        model=_Models([ddp]),
        models_unwrapped=[Namespace(get_batch_on_this_cp_rank=_split)],
        optimizer=KeepGradients(ddp),
        scheduler=Namespace(step=lambda: None),
        forward_backward_func=get_forward_backward_func(),
        megatron_train_args=Namespace(
            gradient_accumulation_steps=rows // PAIRS, cross_entropy_loss_fusion=False
        ),
        **{"seq_length": WIDTH, "use_sequence_packing": packed, "is_multimodal": False},
        **{"enable_router_replay": False, "load_states": id, "offload_states": id},
    )
    strategy.load_states = strategy.offload_states = lambda **_: None

    def initialize(self: Any, _: Any) -> None:
        self.strategy = strategy

    base_worker.ActorWorker.initialize = initialize
    return worker


class _Models(list):  # type: ignore[type-arg]
    """In place of mcore_adapter's, which loads them."""

    def train(self) -> None:
        for model in self:
            model.train()

    def get_models(self) -> list[Any]:
        return self

    @property
    def config(self) -> Any:
        return self[0].config


def _split(batch: dict[str, Tensor], dim3_keys: Sequence[str] = ()) -> dict[str, Tensor]:
    """As mcore_adapter's models split rows."""
    from megatron.core import mpu

    from megatron_loss_agg import CPLayout

    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    return {
        key: CPLayout.bshd(x.shape[1], size, rank).shard(x, dim=1) if size > 1 else x
        for key, x in batch.items()
    }


def _batch(step: Sequence[Answer], log_probs: LogProbs) -> Any:
    """This rank's part of a mini-batch."""
    from megatron.core import mpu
    from roll.distributed.scheduler.protocol import DataProto

    rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    chosen = [*zip(step, *log_probs, strict=True)][rank::ranks]

    def placed(values: Sequence[Tensor], first: int = 0) -> Tensor:
        """At the positions of the answers' tokens, from the position ``first`` on."""
        starts = [answer.prompt_length - first for answer, *_ in chosen]
        zipped = zip(values, starts, strict=True)
        return torch.stack([pad(x, (n, WIDTH - first - n - len(x))) for x, n in zipped])

    answers, old, ref = zip(*chosen, strict=True)
    tokens = [answer.tokens() for answer in answers]
    mask = placed([torch.tensor(answer.trained_mask()).long() for answer in answers])
    rewards = torch.tensor([answer.reward for answer in answers])
    tensors = {
        "input_ids": torch.stack([pad(x, (0, WIDTH - len(x))) for x in tokens]),
        "attention_mask": torch.stack(
            [pad(torch.ones_like(x), (0, WIDTH - len(x))) for x in tokens]
        ),
        "prompt_mask": torch.arange(WIDTH)
        < torch.tensor([answer.prompt_length for answer in answers]).unsqueeze(-1),
        "response_mask": mask,
        "final_response_mask": mask[:, 1:].clone(),
        "old_log_probs": placed(old, 1),
        "ref_log_probs": placed(ref, 1),
        "advantages": rewards.unsqueeze(-1).repeat(1, WIDTH - 1),
        "train_infer_is_weight": torch.ones(len(chosen), WIDTH - 1),
    }
    names = {
        "traj_group_id": np.array([f"group {a.prompt}" for a in answers], dtype=object),
        "traj_id": np.array([f"group {a.prompt}_{a.rollout}" for a in answers], dtype=object),
    }
    meta = {"loss_mask_keys": ["response_mask", "final_response_mask"]}
    return DataProto.from_dict(tensors, names, meta)


OURS = [mode for mode in MODES if mode != "rollout_mean"]
OWN: Runs = {
    "sample_sum": stock(with_entropy, "sample_sum", empty="skip"),
    "token_mean": stock(with_entropy, "token_mean", loss_agg_mode="token-mean"),
    "sample_mean, without empty ones": stock(
        with_entropy, "sample_mean", empty="skip", loss_agg_mode="seq-mean-token-mean"
    ),
}
RUNS: Runs = {
    **{mode: exact(with_entropy, mode) for mode in OURS},
    "sample_sum": exact(with_entropy, "sample_sum", empty="skip"),
    "sum": exact(with_entropy, "sum"),
    "sample_mean, without empty ones": exact(with_entropy, "sample_mean", empty="skip"),
    **{
        f"{mode}, agentic": exact(with_entropy, mode, pipeline="agentic")
        for mode in ("token_mean", "rollout_mean", "prompt_mean")
    },
    "rollout_mean": refused("rollout_mean"),
    "microbatch_mean": refused("microbatch_mean"),
    "ROLL's mode": refused("token_mean", loss_agg_mode="token-mean"),
    "weights of difficulty": refused("token_mean", difficulty_loss_weight=True),
    "weights of lengths": refused("token_mean", length_loss_weight=True),
    "unscaled": refused("token_mean", worker_options={"apply_loss_scale": False}),
    "a variant": refused("token_mean", worker_options={"pg_variant": "topr"}),
    "FSDP": refused("token_mean", worker_options={"strategy_name": "fsdp2_train"}),
    **ON_ONE_RANK,
}


def report(*checkouts: str) -> Any:
    found = Report(use, train, checkouts, OWN, RUNS, adapt=adapt)
    found.compare("DP 2", 1)
    found.compare("CP 2", 2)
    found.compare("DP 2, packed", 1, packed=True)
    found.compare("CP 2, packed", 2, packed=True)
    (problems,) = run_host_ranks(_calls_without_the_variable, 1, checkouts[1])
    return [(*row[:3], "", row[4]) for row in found.rows], found.failures + problems


def _calls_without_the_variable(checkout: str) -> list[str]:
    """Faults of a worker without the variable: it must be ROLL's, with ROLL's strategy."""
    use(checkout)
    from roll.pipeline.rlvr.actor_worker import ActorWorker

    from megatron_loss_agg.frameworks.roll import AggregatedRLVRWorker

    os.environ[VARIABLE] = ""
    worker: Any = object.__new__(AggregatedRLVRWorker)
    worker.strategy = strategy = Namespace(train_step=print)
    same = is_passed_on(ActorWorker, "initialize", worker.initialize, object())
    if not same or vars(strategy) != {"train_step": print} or worker.strategy is not strategy:
        return ["the worker changes without the variable"]
    return []
