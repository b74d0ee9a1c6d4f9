"""NeMo-RL's batches, loss and training step on a real GPT over two ranks.

The training step is that of its Megatron worker. Stood in for: Ray, Megatron-Bridge, the inference
servers, and the optimizer, which keeps the gradient that it is given.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.launch.flags import VARIABLE
from tests.distributed import run_ranks
from tests.frameworks.harness import (
    CLIP,
    FP32,
    KL,
    KeepGradients,
    Terms,
    attempt,
    finding_without_megatron,
    grpo,
    gspo,
    use_framework,
)
from tests.frameworks.report import (
    METRICS,
    MODES,
    STEPS,
    Answer,
    Batch,
    LogProbs,
    Report,
    Run,
    Runs,
    Step,
    errors,
    flags,
    nll,
    refused,
    with_score,
)
from tests.frameworks.report import exact as exact_over
from tests.host.harness import run_host_ranks
from tests.host.steps import VOCAB

STANDINS = (
    "ray vllm sglang transformers wandb requests rich zmq pynvml uvicorn fastapi mlflow swanlab "
    "prometheus_client hydra tensordict datasets megatron.bridge decord"
)


def _generated(answer: Answer) -> Answer:
    """With a mask as NeMo-RL makes them: from the first generated token on, if there is any."""
    return replace(answer, mask=(1, *answer.mask[1:])) if any(answer.mask) else answer


BATCH: Batch = tuple(tuple(map(_generated, step)) for step in STEPS)
ANSWERS = [answer for step in BATCH for answer in step]
ROWS = len(BATCH[0])
MULTIPLE = 4  # twice the context-parallel size
TOKENS = 40  # of a microbatch
PACKED = {
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
    draft_model media_placeholder_token_id defer_fp32_logits
    delegate_pack_to_model delegate_mtp_loss_mask_to_model
    model_slices_context_parallel_inputs _router_replay_enabled
    _first_train_step_forward_pre_hook_disabled
"""
NLL = "NLLLossFn"


def use(root: str) -> None:
    use_framework(STANDINS, root)
    import transformers
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as fsdp

    transformers.__version__ = "5.0"  # it accepts no later one than 5.11
    # Names of a later Megatron-Core.
    fsdp.FullyShardedDataParallelV1 = fsdp.FullyShardedDataParallelV2 = (
        fsdp.FullyShardedDataParallel
    )


def _stock(policy: Any) -> Any:
    return policy


in_script: Callable[[Any], Any] = _stock
"""Our line of a user's script, or none."""


def adapt() -> None:
    global in_script
    from megatron_loss_agg.frameworks.nemo_rl import aggregate_losses

    in_script = aggregate_losses


def train(
    log_probs: list[LogProbs],
    _: Any,
    batching: str,
    sampling: Any = None,
    fraction: float = 1.0,
    **options: Any,
) -> list[Step]:
    loss = _loss(**options)
    policy = in_script(_policy(_worker(batching, sampling), batching))
    result = policy.train(_batch(log_probs, fraction), loss, gbs=ROWS, mbs=2)
    # Its losses are divided by the number of optimizer steps.
    losses = [{"loss": float(x) * len(STEPS)} for x in result["loss"]]
    return list(map(Step, policy.worker_group.worker.optimizer.gradients, losses))


def _loss(name: str = "ClippedPGLossFn", **options: Any) -> Any:
    from nemo_rl.algorithms import loss as losses

    if name == NLL:
        return losses.NLLLossFn()
    if name == "DistillationLossFn":
        return losses.DistillationLossFn(losses.DistillationLossConfig(**options))
    clip = {"ratio_clip_min": CLIP, "ratio_clip_max": CLIP}
    config = losses.ClippedPGLossConfig(reference_policy_kl_penalty=KL, **clip, **options)
    return losses.ClippedPGLossFn(config)


class _Workers:
    """In place of Ray's: the policy's driver is on every rank, and has this rank's worker."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def run_all_workers_sharded_data(
        self, name: str, data: Any, common_kwargs: dict[str, Any], **_: Any
    ) -> list[dict[str, Any]]:
        from megatron.core import mpu

        shard, more = pickle.loads(
            pickle.dumps((data[mpu.get_data_parallel_rank()], common_kwargs))
        )
        return [getattr(self.worker, name)(shard, **more)]

    def get_all_worker_results(self, futures: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return futures


def _policy(worker: Any, batching: str) -> Any:
    """The driver's policy without its set-up."""
    from megatron.core import mpu
    from nemo_rl.models.policy.lm_policy import Policy

    policy = object.__new__(Policy)
    vars(policy).update(
        cfg=worker.cfg,
        worker_group=_Workers(worker),
        sharding_annotations=SimpleNamespace(
            get_axis_size=lambda axis: mpu.get_data_parallel_world_size()
        ),
        use_dynamic_batches=batching == "dynamic",
        use_sequence_packing=batching in ("packed", "fused"),
        flops_tracker=None,
        debug_payload_metrics=False,
        **BATCHING[batching],
    )
    return policy


def _worker(batching: str, sampling: Any) -> Any:
    """The worker without its set-up."""
    from megatron.core import mpu
    from nemo_rl.algorithms.logits_sampling_utils import TrainingSamplingParams
    from nemo_rl.models.policy.workers import megatron_policy_worker as module
    from nemo_rl.utils.timer import Timer

    from tests.host import gpt

    # Functions of Megatron-Bridge, for a model-parallel group of one rank.
    module.get_pg_collection = lambda model: SimpleNamespace(mp=None)
    module.logical_and_across_model_parallel_group = lambda value, mp_group: value
    module.reduce_max_stat_across_model_parallel_group = lambda value, mp_group: value
    ddp = gpt.ddp_model(True, torch.float32)
    worker = object.__new__(module.MegatronPolicyWorkerImpl)
    vars(worker).update(
        dict.fromkeys(WITHOUT.split()),
        sampling_params=sampling and TrainingSamplingParams(**sampling),
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
        **{"enabled": True},
        **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
        **{"context_parallel_size": cp, "sequence_parallel": False, "empty_unused_memory_level": 0},
    }
    return {
        "sequence_packing": {
            "enabled": fused or batching == "packed",
            "fuse_loss": fused,
            "train_mb_tokens": TOKENS,
        },
        "dynamic_batching": {"enabled": batching == "dynamic", "train_mb_tokens": TOKENS},
        "make_sequence_length_divisible_by": MULTIPLE,
        "megatron_cfg": megatron,
        "max_total_sequence_length": 0,
    }


def _batch(log_probs: list[LogProbs], fraction: float = 1.0) -> Any:
    """The driver's data: two global batches, padded to one width.

    Args:
        fraction: the sample_mask of samples with a positive reward.
    """
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    # Of an answer without a generated token, the prompt alone.
    tokens = [a.tokens() if any(a.mask) else a.tokens()[: a.prompt_length] for a in ANSWERS]
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
            "sample_mask": torch.tensor([float(not answer.removed) for answer in ANSWERS])
            * torch.where(rewards > 0, fraction, 1.0),
            "rewards": rewards,
            "advantages": rewards.unsqueeze(-1).expand(-1, width).contiguous(),
        }
    )


def with_sample_ratio(
    lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float
) -> Terms:
    """GSPO in place of the policy loss."""
    (mask,) = {a.mask for a in ANSWERS if (a.reward, len(a.mask)) == (reward, len(lp))}
    loss = with_score(lp, entropy, old, ref, reward)["loss"]
    policy = grpo(lp, entropy, old, ref, reward)["pg_loss"]
    return {"loss": loss - policy + gspo(lp, old, mask, reward)}


OURS = [mode for mode in MODES if mode != "rollout_mean"]
BY_SEQUENCES = {"token_level_loss": False}
GSPO = {**BY_SEQUENCES, "sequence_level_importance_ratios": True}
# The most probable tokens alone; the KL term is of all.
TOP_K = {"sampling": {"top_k": VOCAB // 2}}
FRACTIONS = {"fraction": 0.25}
exact = partial(exact_over, batch=BATCH)
stock = partial(exact, our_flags="")
OWN: Runs = {
    "token_mean": stock(with_score, "token_mean", "skip"),
    "sample_mean": stock(with_score, "sample_mean", "skip", **BY_SEQUENCES),
    NLL: stock(nll, "token_mean", "skip", name=NLL),
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
}
# In two places.
FURTHER_OWN: Runs = {
    "sample_mean, GSPO": stock(with_sample_ratio, "sample_mean", "skip", **GSPO),
    "top-k": Run(options=TOP_K),
    "fractions": Run(options=FRACTIONS),
}
FURTHER: Runs = {
    "token_mean, by default": exact(
        with_score, "token_mean", "skip", our_flags=flags("token_mean")
    ),
    **{
        f"{mode}, GSPO": exact(with_sample_ratio, mode, "skip", **GSPO)
        for mode in ("sample_mean", "prompt_mean")
    },
    "top-k": Run(flags("token_mean"), {**TOP_K, **BY_SEQUENCES}),
    "fractions": Run(flags("token_mean"), {**FRACTIONS, **BY_SEQUENCES}),
    "rollout_mean": refused("rollout_mean"),
    "microbatch_mean": refused("microbatch_mean", "skip"),
    f"prompt_mean, {NLL}": refused("prompt_mean", name=NLL),
    "distillation": refused("token_mean", "skip", name="DistillationLossFn"),
    "positive examples": refused("token_mean", positive_example_nll_weight=0.1),
}


def report(*checkouts: str) -> Any:
    found = Report(use, train, checkouts, OWN, RUNS, batch=BATCH, adapt=adapt)
    found.compare("DP 2", 1, batching="rows")
    found.compare("DP 2, dynamic batches", 1, batching="dynamic")
    found.compare("DP 2, packed", 1, batching="packed")
    found.compare("CP 2, packed", 2, batching="packed")
    found.compare("CP 2, packed, fused loss", 2, batching="fused")
    further = Report(use, train, checkouts, FURTHER_OWN, FURTHER, batch=BATCH, adapt=adapt)
    for place, cp, batching in (("DP 2", 1, "rows"), ("CP 2, packed, fused loss", 2, "fused")):
        theirs, ours = further.compare(place, cp, batching=batching)
        for name in ("top-k", "fractions"):  # which the reference does not have
            gradient, metrics = errors(ours[name], theirs[name])
            holds = gradient < FP32 and metrics < METRICS
            further.check(holds, f"{place}: token_mean with {name} is {gradient:.1e} from stock's")
    (problems,) = run_host_ranks(_driver_problems, 1, checkouts[1])
    ((level, text),) = run_ranks(_driver_finding, 1, checkouts[1])
    if level == "FAIL":
        problems.append(f"doctor in a driver without Megatron: {text}")
    return found.rows + further.rows, found.failures + further.failures + problems


def _driver_finding(checkout: str) -> tuple[str, str]:
    return finding_without_megatron(STANDINS, checkout, "nemo_rl", transformers="5.0")


def _driver_problems(checkout: str) -> list[str]:
    """Faults that show before anything is sent to a worker."""
    use(checkout)
    from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
    from nemo_rl.data.multimodal_utils import PackedTensor

    from megatron_loss_agg.frameworks import nemo_rl as adapter

    os.environ[VARIABLE] = flags("prompt_mean")
    loss, sent = ClippedPGLossFn(ClippedPGLossConfig()), []

    def aggregated(enabled: bool = True, **more: Any) -> Any:
        policy = SimpleNamespace(cfg={"megatron_cfg": {"enabled": enabled}}, **more)
        policy.train = lambda data, loss_fn, **_: sent.append((data, loss_fn))
        return adapter.aggregate_losses(policy)

    log_probs = LogProbs(*([torch.zeros(len(a.mask)) for a in step] for step in BATCH))
    data = _batch([log_probs, log_probs])
    with_images = type(data)({**data, "pixel_values": PackedTensor([torch.zeros(1)], 0)})
    problems = []
    for name, call in {
        "DTensor": lambda: aggregated(enabled=False),
        "the data plane": lambda: aggregated(train_from_meta=None),
        "images": lambda: aggregated().train(with_images, loss, gbs=ROWS),
    }.items():
        if not str(attempt(call, errors=HostError)).startswith("HostError:"):
            problems.append(f"{name} is not refused")
    os.environ[VARIABLE] = ""
    policy = SimpleNamespace(train=print)
    if adapter.aggregate_losses(policy) is not policy or vars(policy) != {"train": print}:
        problems.append("the policy changes without the variable")
    os.environ[VARIABLE] = flags("prompt_mean")
    aggregated().train(data, loss, eval_mode=True, gbs=ROWS)
    ((sent_data, sent_loss),) = sent
    if sent_data is not data or sent_loss is not loss:
        problems.append("evaluation is not NeMo-RL's own")
    return problems
