"""NeMo-RL's batches, loss and training step on a real GPT over two ranks.

The training step is that of its Megatron worker. Stood in for: Ray, Megatron-Bridge, the inference
servers, and the optimizer, which keeps the gradient that it is given.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from tests.frameworks.harness import CLIP, KL, KeepGradients, Terms, use_framework
from tests.frameworks.report import (
    MODES,
    STEPS,
    LogProbs,
    Report,
    Run,
    Runs,
    Step,
    exact,
    nll,
    refused,
    stock,
    with_score,
)

STANDINS = (
    "ray vllm sglang transformers wandb requests rich zmq pynvml uvicorn fastapi mlflow swanlab "
    "prometheus_client hydra tensordict datasets megatron.bridge"
)
ANSWERS = [answer for step in STEPS for answer in step]
ROWS = len(STEPS[0])
MULTIPLE = 4  # twice the context-parallel size
PACKED = {
    "max_tokens_per_microbatch": 40,
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
}
BATCHING = {
    "rows": {},
    "dynamic": {"dynamic_batching_args": {**PACKED, "sequence_length_round": MULTIPLE}},
    "packed": {
        "sequence_packing_args": {
            **PACKED,
            "algorithm": "modified_first_fit_decreasing",
            "sequence_length_pad_multiple": MULTIPLE,
        }
    },
}
BATCHING["fused"] = BATCHING["packed"]
# Of the worker.
WITHOUT = """
    draft_model sampling_params media_placeholder_token_id defer_fp32_logits
    delegate_pack_to_model delegate_mtp_loss_mask_to_model
    model_slices_context_parallel_inputs _router_replay_enabled
    _first_train_step_forward_pre_hook_disabled
"""
NLL = "NLLLossFn"
POSITIVES = 0.1  # weight of the loss of positive examples


def use(root: str) -> None:
    use_framework(STANDINS, root)
    import transformers
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as fsdp

    transformers.__version__ = "5.0"  # it accepts no later one than 5.11
    # Names of a later Megatron-Core.
    fsdp.FullyShardedDataParallelV1 = fsdp.FullyShardedDataParallelV2 = (
        fsdp.FullyShardedDataParallel
    )


def train(log_probs: list[LogProbs], key: Any, batching: str, **options: Any) -> list[Step]:
    from megatron.core import mpu

    loss = _loss(**options, **({"loss_aggregation": key} if key else {}))
    data = _batch(log_probs)
    if key:
        _set_up(loss, key, data)
    worker = _worker(batching)
    ranks, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    shards = data.shard_by_batch_size(ranks, batch_size=ROWS, **BATCHING[batching])
    shards = shards if batching == "rows" else shards[0]
    result = worker.train(shards[rank], loss, gbs=ROWS, mbs=2)
    # Its losses are divided by the number of optimizer steps.
    losses = [{"loss": float(x) * len(STEPS)} for x in result["global_loss"]]
    return list(map(Step, worker.optimizer.gradients, losses))


def _loss(name: str = "ClippedPGLossFn", **options: Any) -> Any:
    from nemo_rl.algorithms import loss as losses

    if name == "DistillationLossFn":
        return losses.DistillationLossFn(losses.DistillationLossConfig(**options))
    if name == NLL and not hasattr(losses, "NLLLossConfig"):  # without the patch
        return losses.NLLLossFn()
    if name == NLL:
        config = losses.NLLLossConfig(**options)
        return losses.NLLLossFn(loss_aggregation=config.loss_aggregation)
    clip = {"ratio_clip_min": CLIP, "ratio_clip_max": CLIP}
    config = losses.ClippedPGLossConfig(reference_policy_kl_penalty=KL, **clip, **options)
    return losses.ClippedPGLossFn(config)


def _set_up(loss: Any, key: Any, data: Any) -> None:
    """As the driver: checks what was asked for, and ships prompt ids."""
    from nemo_rl.algorithms.loss import aggregation

    config = aggregation.LossAggregationConfig(**key)
    policy = {"megatron_cfg": {"enabled": True}}
    aggregation.validate_loss_aggregation(config, policy, has_prompt_ids=True)
    prompts = [answer.tokens()[: answer.prompt_length] for answer in ANSWERS]
    aggregation.add_prompt_ids(data, pad_sequence(prompts, batch_first=True), loss)


def _worker(batching: str) -> Any:
    """The worker without its set-up."""
    from megatron.core import mpu
    from nemo_rl.models.policy.workers import megatron_policy_worker as module
    from nemo_rl.utils.timer import Timer

    from tests.host import gpt

    # Of Megatron-Bridge: what a model-parallel group of one rank makes of it.
    module.get_pg_collection = lambda model: SimpleNamespace(mp=None)
    module.logical_and_across_model_parallel_group = lambda value, mp_group: value
    module.reduce_max_stat_across_model_parallel_group = lambda value, mp_group: value
    ddp = gpt.ddp_model(True, torch.float32)
    worker = object.__new__(module.MegatronPolicyWorkerImpl)
    vars(worker).update(
        dict.fromkeys(WITHOUT.split()),
        cfg=_config(batching, mpu.get_context_parallel_world_size()),
        model=ddp,
        optimizer=KeepGradients(ddp),
        scheduler=SimpleNamespace(
            step=lambda increment: None, get_lr=lambda group: 0.0, get_wd=lambda: 0.0
        ),
        timer=Timer(),
        dtype=torch.float32,
        dp_size=mpu.get_data_parallel_world_size(),
        megatron_cfg=SimpleNamespace(optimizer=None, ddp=None),
        mcore_state=SimpleNamespace(straggler_timer=None),
    )
    return worker


def _config(batching: str, cp: int) -> dict[str, Any]:
    """As much of NeMo-RL's as its training step reads."""
    fused = batching == "fused"
    megatron = {
        **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
        **{"context_parallel_size": cp, "sequence_parallel": False, "empty_unused_memory_level": 0},
    }
    return {
        "sequence_packing": {"enabled": fused or batching == "packed", "fuse_loss": fused},
        "dynamic_batching": {"enabled": batching == "dynamic"},
        "make_sequence_length_divisible_by": MULTIPLE,
        "megatron_cfg": megatron,
        "max_total_sequence_length": 0,
    }


def _batch(log_probs: list[LogProbs]) -> Any:
    """What the driver sends: two global batches, padded to one width."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    tokens = [answer.tokens() for answer in ANSWERS]
    longest = max(map(len, tokens))
    width = longest + -longest % MULTIPLE

    def placed(values: list[Tensor]) -> Tensor:
        """At the positions of the answers' tokens."""
        starts = [answer.prompt_length for answer in ANSWERS]
        ends = [(start, width - start - len(x)) for start, x in zip(starts, values, strict=True)]
        return torch.stack([pad(x.float(), end) for x, end in zip(values, ends, strict=True)])

    old, ref = (placed([x for step in log_probs for x in step[i]]) for i in (0, 1))
    rewards = torch.tensor([answer.reward for answer in ANSWERS])
    return BatchedDataDict(
        {
            "input_ids": pad(pad_sequence(tokens, batch_first=True), (0, width - longest)),
            "input_lengths": torch.tensor([len(x) for x in tokens]),
            "generation_logprobs": old,
            "prev_logprobs": old,
            "reference_policy_logprobs": ref,
            "token_mask": placed([torch.tensor(answer.mask) for answer in ANSWERS]),
            "sample_mask": torch.tensor([float(not answer.removed) for answer in ANSWERS]),
            "rewards": rewards,
            "advantages": rewards.unsqueeze(-1).expand(-1, width).contiguous(),
        }
    )


def with_positives(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    """In a mean over tokens: `with_score`, and a mean over the correct samples' tokens alone."""
    terms = with_score(lp, entropy, old, ref, reward)
    step = next(step for step in STEPS if any(a.reward == reward for a in step))
    tokens, correct = (
        sum(sum(a.kept()) for a in step if a.reward > least) for least in (-math.inf, 0)
    )
    return {"loss": terms["loss"] - POSITIVES * (reward > 0) * tokens / correct * lp}


OURS = [mode for mode in MODES if mode != "rollout_mean"]
BY_SEQUENCES = {"token_level_loss": False}
PAID = {"positive_example_nll_weight": POSITIVES}
OWN: Runs = {
    "token_mean": stock(with_score, "token_mean", "skip"),
    "sample_mean": stock(with_score, "sample_mean", "skip", **BY_SEQUENCES),
    NLL: stock(nll, "token_mean", "skip", name=NLL),
    "positive examples": Run(options=PAID),
}
RUNS: Runs = {
    **{mode: exact(with_score, mode, "skip") for mode in OURS},
    "token_mean, removed samples: count": exact(with_score, "token_mean", "count"),
    "sample_mean, without empty ones": exact(with_score, "sample_mean", "skip", empty="skip"),
    **{
        f"{mode}, token_level_loss=False": exact(with_score, mode, "skip", **BY_SEQUENCES)
        for mode in ("token_mean", "prompt_mean")
    },
    f"sample_mean, {NLL}": exact(nll, "sample_mean", "skip", name=NLL),
    "token_mean, positive examples": exact(with_positives, "token_mean", "skip", **PAID),
    "rollout_mean": refused("rollout_mean"),
    "microbatch_mean": refused("microbatch_mean", "skip"),
    "token_mean with distillation": refused("token_mean", "skip", name="DistillationLossFn"),
}


def report(*checkouts: str) -> Any:
    found = Report(use, train, checkouts, OWN, RUNS)
    for module in ("grpo", "ppo"):  # two training loops each, which are too long to run
        source = Path(checkouts[1], "nemo_rl", "algorithms", f"{module}.py").read_text()
        calls = source.count("add_prompt_ids(train_data, prompt_ids_for_adv, loss_fn)")
        found.check(calls == 2, f"{calls} of 2 loops of {module} send prompt ids")
    compare = partial(found.compare, configured=True)
    compare("DP 2", 1, batching="rows")
    compare("DP 2, dynamic batches", 1, batching="dynamic")
    compare("DP 2, packed", 1, batching="packed")
    compare("CP 2, packed", 2, batching="packed")
    compare("CP 2, packed, fused loss", 2, batching="fused")
    return found.rows, found.failures
