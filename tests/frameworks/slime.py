"""slime's controller, batch, loss and training step on a real GPT over two ranks.

Stood in for: Ray (data is handed over as it is), the inference servers, and the optimizer, which
keeps the gradient that it is given. What does not depend on slime's modules serves `miles` too.
"""

from __future__ import annotations

import importlib
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.launch.flags import VARIABLE
from tests.frameworks.harness import CLIP, ENTROPY, KL, KeepGradients, use_framework
from tests.frameworks.report import (
    MODES,
    ROLLOUTS,
    STEPS,
    Answer,
    LogProbs,
    Report,
    Run,
    Runs,
    Step,
    exact,
    refused,
    reweighed,
    stock,
    with_entropy,
)
from tests.host.steps import Places

STANDINS = (
    "ray sglang sglang_router transformers wandb torch_memory_saver mbridge httpx requests urllib3"
)
OFF = """
    balance_data balance_by_flops allgather_cp calculate_per_token_loss
    custom_pg_loss_reducer_function_path rollout_data_postprocess_path
    loss_aggregation loss_aggregation_divisor
    loss_aggregation_empty loss_aggregation_rejected
    rewards_normalization reward_key
    custom_advantage_function_path use_opd normalize_advantages use_rollout_logprobs
    use_unbiased_kl eps_clip_c use_opsm get_mismatch_metrics use_tis recompute_loss_function
    save_debug_train_data custom_megatron_before_train_step_hook_path enable_mtp_training
    decoder_seq_length ci_test mtp_num_layers mtp_loss_scaling_factor
"""
ARGS: dict[str, Any] = {
    **dict.fromkeys(OFF.split()),
    **{"global_batch_size": ROLLOUTS, "rollout_batch_size": 2 * ROLLOUTS},
    **{"n_samples_per_prompt": 1, "micro_batch_size": 1, "seq_length": 1, "qkv_format": "thd"},
    **{"use_dynamic_batch_size": True, "max_tokens_per_gpu": 24, "data_pad_size_multiplier": 8},
    **{"rollout_temperature": 1.0, "rollout_top_p": 1.0, "log_probs_chunk_size": -1},
    **{"advantage_estimator": "grpo", "loss_type": "policy_loss", "kl_coef": 0.0},
    **{"use_kl_loss": True, "kl_loss_coef": KL, "kl_loss_type": "k3", "entropy_coef": ENTROPY},
    **{"eps_clip": CLIP, "eps_clip_high": CLIP, "loss_aggregation_mtp": "megatron"},
    "custom_tis_function_path": "tests.frameworks.slime.reject",
}
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}
TRAINS_MTP = {**MTP, "enable_mtp_training": True}
EVERY_THIRD = 3
REJECTING = {"use_tis": True}
IN_PAIRS = {"use_dynamic_batch_size": False, "micro_batch_size": 2}
PER_TOKEN = {"calculate_per_token_loss": True}


def reject(*, pg_loss: Tensor, loss_masks: list[Tensor], **_: Any) -> Any:
    """As slime's rejection sampling: some tokens are masked inside the loss."""
    masks = [mask.clone() for mask in loss_masks]
    for mask in masks:
        mask[::EVERY_THIRD] = 0
    return pg_loss, masks, {}


def use(root: str) -> None:
    use_framework(STANDINS, root)
    import ray

    ray.put = ray.get = lambda x, **_: x


def train(log_probs: list[LogProbs], _: Any, **options: Any) -> list[Step]:
    from slime.backends.megatron_utils import data, loss, model

    args, ddp = set_up("slime", {**ARGS, **options})
    rollout = _rollout_data(args, log_probs)
    loss.compute_advantages_and_returns(args, rollout)
    iterators = data.get_data_iterator(rollout)
    numbers = zip(rollout["num_microbatches"], rollout["global_batch_sizes"], strict=True)
    return steps(model.train_one_step, args, ddp, iterators, numbers)


def set_up(framework: str, options: dict[str, Any]) -> tuple[Namespace, Any]:
    """The arguments, which slime or miles checks; and a model in DDP."""
    from megatron.training import global_vars

    from tests.host import gpt

    args = Namespace(**options)
    if os.environ[VARIABLE]:
        ours = importlib.import_module(f"{framework}.utils.loss_aggregation")
        ours.validate_loss_aggregation_args(args)
    global_vars.set_args(args)
    mtp = {name: vars(args).pop(name) for name in MTP}  # a model's may differ from the arguments
    ddp = gpt.data_parallel(gpt.build(torch.float32, args.calculate_per_token_loss, **mtp))
    if args.allgather_cp:
        _split_contiguously(ddp)
    return args, ddp


def _split_contiguously(ddp: Any) -> None:
    """As models for slime's ``--allgather-cp`` split a packed row."""
    from megatron_loss_agg import CPLayout
    from megatron_loss_agg.mcore.cpu import attention

    def thd(offsets: Tensor, cp_size: int, cp_rank: int) -> CPLayout:
        return CPLayout.contiguous(int(offsets[-1]), cp_size, cp_rank)

    attention.CPLayout = Namespace(thd=thd)
    ddp.module.position_embedding_type = "none"  # Megatron's rotary embedding expects a zigzag


def steps(
    train_one_step: Any, args: Namespace, ddp: Any, iterators: Any, numbers: Any, *more: Any
) -> list[Step]:
    """One for each of ``numbers``: microbatches and rollouts."""
    optimizer, scheduler = KeepGradients(ddp), Namespace(step=lambda increment: None)
    metrics = [
        train_one_step(args, 0, step, iterators, [ddp], optimizer, scheduler, n, size, *more)[0]
        for step, (n, size) in enumerate(numbers)
    ]
    return list(map(Step, optimizer.gradients, metrics))


def _rollout_data(args: Namespace, log_probs: list[LogProbs]) -> Any:
    """This rank's, by the controller and then by the actor."""
    from megatron.core import mpu
    from slime.backends.megatron_utils import actor, loss
    from slime.ray.rollout import RolloutManager
    from slime.utils.types import Sample

    sizes = {
        "dp_size": mpu.get_data_parallel_world_size(),
        "cp_size": mpu.get_context_parallel_world_size(),
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }
    manager = Namespace(
        args=args,
        custom_convert_samples_to_train_data_func=None,
        train_parallel_config=sizes,
        _post_process_rewards=lambda samples: ([s.reward for s in samples],) * 2,
    )
    whole = RolloutManager._convert_samples_to_train_data(manager, samples(Sample, log_probs))
    shipped = RolloutManager._split_train_data_by_dp(manager, whole)
    rollout = actor.MegatronTrainRayActor._get_rollout_data(manager, shipped)
    add_log_probs(rollout, log_probs, loss.slice_log_prob_with_cp)
    return rollout


def add_log_probs(
    rollout: dict[str, Any], log_probs: list[LogProbs], slice_with_cp: Callable[..., Tensor]
) -> None:
    """As the forward passes of the policy and the reference do: on this rank's tokens."""
    rows = rollout["sample_indices"], rollout["total_lengths"], rollout["response_lengths"]
    for name, kind in (("log_probs", "old"), ("ref_log_probs", "ref")):
        of_all = [x for step in log_probs for x in getattr(step, kind)]
        rollout[name] = [slice_with_cp(of_all[i], *of) for i, *of in zip(*rows, strict=True)]


def samples(sample: type, log_probs: list[LogProbs]) -> list[Any]:
    """`STEPS`, in the framework's class."""
    generated = [x for step in log_probs for x in step.old]
    answers = [answer for step in STEPS for answer in step]
    return [
        sample(
            index=index,
            group_index=answer.prompt,
            rollout_id=answer.rollout,
            tokens=answer.tokens().tolist(),
            response_length=len(answer.mask),
            reward=answer.reward,
            loss_mask=list(answer.mask),
            rollout_log_probs=old.tolist(),
            remove_sample=answer.removed,
        )
        for index, (answer, old) in enumerate(zip(answers, generated, strict=True))
    ]


def _in_pairs(step: Sequence[Answer]) -> Places:
    """Microbatches of two samples: the controller takes the rollouts in order, each whole."""
    order = sorted(range(len(step)), key=lambda i: step[i].rollout)
    return (tuple(zip(order[::2], order[1::2], strict=True)),)


def _rejecting(run: Run) -> Run:
    """Without the tokens that `reject` masks."""
    return reweighed(run, lambda t: t % EVERY_THIRD > 0)


OWN: Runs = {
    "rollout_mean": stock(with_entropy, "rollout_mean"),
    "with rejection": _rejecting(stock(with_entropy, "rollout_mean", **REJECTING)),
    "tokens": Run(options=PER_TOKEN),
}
RUNS: Runs = {
    **{mode: exact(with_entropy, mode) for mode in MODES},
    "token_mean": exact(with_entropy, "token_mean", near="tokens"),
    "sample_mean, removed samples: skip": exact(with_entropy, "sample_mean", "skip"),
    "token_mean, removed samples: count": exact(with_entropy, "token_mean", "count"),
    "sample_mean, without empty ones": exact(with_entropy, "sample_mean", empty="skip"),
    "prompt_mean, tokens rejected in the loss": _rejecting(
        exact(with_entropy, "prompt_mean", **REJECTING)
    ),
    "microbatch_mean": exact(with_entropy, "microbatch_mean", places=_in_pairs, **IN_PAIRS),
    "token_mean with a reducer": refused(
        "token_mean", custom_pg_loss_reducer_function_path="some.reducer"
    ),
    **{f"{mode}, per token": exact(with_entropy, mode, **PER_TOKEN) for mode in MODES},
}
# With MTP layers, of which the stock code has no aggregation that is exact.
SAME = {**TRAINS_MTP, "loss_aggregation_mtp": "same"}
WITH_MTP = {"with MTP": {}, "with MTP, per token": PER_TOKEN}
OWN_MTP: Runs = {f"stock {x}": Run(options={**TRAINS_MTP, **y}) for x, y in WITH_MTP.items()}
RUNS_MTP: Runs = {
    **{
        f"{mode} {what}": exact(with_entropy, mode, near=f"stock {what}", **SAME, **options)
        for what, options in WITH_MTP.items()
        for mode in MODES
    },
    "without training MTP": refused("token_mean", **MTP, loss_aggregation_mtp="same"),
    "contiguous": refused("token_mean", **SAME, allgather_cp=True),
}


def compared(use: Any, train: Any, *checkouts: str, more: Runs | None = None) -> Report:
    """Of `slime` or `miles`, with ``more`` runs; or, if the last argument is "mtp", with MTP.

    The PYTHONPATH then starts with the Megatron that the framework names, since a released one does
    not take its arguments for MTP.
    """
    without, patched, *mtp = checkouts
    runs = (OWN_MTP, RUNS_MTP) if mtp else (OWN, {**RUNS, **(more or {})})
    report = Report(use, train, (without, patched), *runs, mtp=MTP if mtp else {})
    report.compare("DP 2", 1)
    report.compare("CP 2, zigzag", 2)
    if not mtp:
        report.compare("CP 2, contiguous", 2, rope=False, allgather_cp=True)
    return report


def report(*arguments: str) -> Any:
    found = compared(use, train, *arguments)
    return found.rows, found.failures
