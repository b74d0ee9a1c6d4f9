"""slime's controller, batch, loss and training step on a real GPT over two ranks.

    python -m tests.frameworks.run_slime STOCK PATCHED TABLE [mtp]

Two checkouts, without and with the patch; the table goes to a file. Stood in for: Ray (data is
handed over as it is), the inference servers, and the optimizer, which keeps the gradient that it is
given. With `mtp` the model has MTP layers, and the PYTHONPATH starts with the Megatron that slime
names, since a released one does not take slime's arguments for MTP. What does not depend on slime's
modules serves `run_miles` too.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.frameworks.checkout_report import (
    MODES,
    REFUSALS,
    ROLLOUTS,
    STEPS,
    Held,
    LogProbs,
    Report,
    Run,
    Steps,
    Train,
    exact,
    refused,
    stock,
    with_entropy,
)
from tests.frameworks.harness import CLIP, ENTROPY, KL, KeepGradients, attempt
from tests.peers.standins import use_peers

STANDINS = (
    "ray sglang sglang_router transformers wandb torch_memory_saver mbridge httpx requests urllib3"
)
OFF = """
    balance_data balance_by_flops allgather_cp calculate_per_token_loss
    custom_pg_loss_reducer_function_path loss_aggregation loss_aggregation_divisor
    loss_aggregation_empty loss_aggregation_rejected loss_aggregation_mtp
    rewards_normalization reward_key
    custom_advantage_function_path use_opd normalize_advantages use_rollout_logprobs
    use_unbiased_kl eps_clip_c use_opsm get_mismatch_metrics use_tis recompute_loss_function
    save_debug_train_data custom_megatron_before_train_step_hook_path enable_mtp_training
    decoder_seq_length ci_test
"""
ARGS: dict[str, Any] = {
    **dict.fromkeys(OFF.split()),
    "global_batch_size": ROLLOUTS,
    "rollout_batch_size": 2 * ROLLOUTS,
    "n_samples_per_prompt": 1,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 24,
    "micro_batch_size": 1,
    "data_pad_size_multiplier": 8,
    "qkv_format": "thd",
    "advantage_estimator": "grpo",
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "log_probs_chunk_size": -1,
    "kl_coef": 0.0,
    "use_kl_loss": True,
    "kl_loss_coef": KL,
    "kl_loss_type": "k3",
    "entropy_coef": ENTROPY,
    "eps_clip": CLIP,
    "eps_clip_high": CLIP,
    "custom_tis_function_path": "tests.frameworks.run_slime.reject",
    "loss_type": "policy_loss",
    "seq_length": 1,
    "mtp_num_layers": None,
    "mtp_loss_scaling_factor": None,
}
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}
TRAINS_MTP = {**MTP, "enable_mtp_training": True}
EVERY_THIRD = 3
REJECTING = {"use_tis": True}
PER_TOKEN = {"calculate_per_token_loss": True}


def reject(*, pg_loss: Tensor, loss_masks: list[Tensor], **_: Any) -> Any:
    """As slime's rejection sampling: some tokens are masked inside the loss."""
    masks = [mask.clone() for mask in loss_masks]
    for mask in masks:
        mask[::EVERY_THIRD] = 0
    return pg_loss, masks, {}


def train(root: str, cp: int, runs: list[Run], log_probs: list[LogProbs]) -> list[Steps | str]:
    """On a rank; see `checkout_report.Train`."""
    use_peers(STANDINS)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.path.insert(0, root)
    import ray

    from tests.host import gpt

    ray.put = ray.get = lambda x, **_: x
    gpt.initialize(cp)
    return [attempt(_train, run, log_probs, errors=REFUSALS) for run in runs]


def _train(run: Run, log_probs: list[LogProbs]) -> Steps:
    from megatron.core import mpu
    from megatron.training import global_vars
    from slime.backends.megatron_utils import data, loss, model

    os.environ["MEGATRON_LOSS_AGG_FLAGS"] = run.flags
    args = Namespace(**{**ARGS, **run.options})
    if run.flags:
        from slime.utils.loss_aggregation import validate_loss_aggregation_args

        validate_loss_aggregation_args(args)
    ddp = model_of(args)
    if args.allgather_cp:
        split_contiguously(ddp)
    global_vars.set_args(args)
    rollout = _rollout_data(args, mpu.get_data_parallel_world_size(), log_probs)
    loss.compute_advantages_and_returns(args, rollout)
    iterators = data.get_data_iterator(rollout)
    numbers = zip(rollout["num_microbatches"], rollout["global_batch_sizes"], strict=True)
    found = []
    for step, (n, size) in enumerate(numbers):
        optimizer = KeepGradients(ddp)
        scheduler = Namespace(step=lambda increment: None)
        metrics, _ = model.train_one_step(
            args, 0, step, iterators, [ddp], optimizer, scheduler, n, size
        )
        found.append((*optimizer.gradients, metrics))
    return found


def _rollout_data(args: Namespace, dp: int, log_probs: list[LogProbs]) -> Any:
    """This rank's, by the controller and then by the actor."""
    from slime.backends.megatron_utils import actor, loss
    from slime.ray.rollout import RolloutManager
    from slime.utils.types import Sample

    manager = Namespace(
        args=args,
        custom_convert_samples_to_train_data_func=None,
        train_parallel_config={
            "dp_size": dp,
            "cp_size": 2 // dp,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
        },
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
    for key, parts in (
        ("log_probs", [x.old for x in log_probs]),
        ("ref_log_probs", [x.ref for x in log_probs]),
    ):
        of_all = [x for part in parts for x in part]
        rollout[key] = [
            slice_with_cp(of_all[i], *lengths) for i, *lengths in zip(*rows, strict=True)
        ]


def samples(sample: type, log_probs: list[LogProbs]) -> list[Any]:
    """`STEPS`, in the framework's class."""
    pairs = [
        (answer, old)
        for step, of_step in zip(STEPS, log_probs, strict=True)
        for answer, old in zip(step, of_step.old, strict=True)
    ]
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
        for index, (answer, old) in enumerate(pairs)
    ]


def model_of(args: Namespace) -> Any:
    from tests.host import gpt

    mtp = {name: getattr(args, name) for name in MTP}
    return gpt.data_parallel(gpt.build(torch.float32, args.calculate_per_token_loss, **mtp))


def split_contiguously(ddp: Any) -> None:
    """As models for slime's ``--allgather-cp`` split a packed row."""
    from megatron_loss_agg import CPLayout
    from megatron_loss_agg.mcore.cpu import attention

    def thd(offsets: Tensor, cp_size: int, cp_rank: int) -> CPLayout:
        return CPLayout.contiguous(int(offsets[-1]), cp_size, cp_rank)

    attention.CPLayout = Namespace(thd=thd)
    ddp.module.position_embedding_type = "none"  # Megatron's rotary embedding expects a zigzag


def _rejecting(held: Held) -> Held:
    """Without the tokens that `reject` masks."""
    run, (losses, by_step) = held
    left = [[[x * (t % EVERY_THIRD > 0) for t, x in enumerate(w)] for w in w_s] for w_s in by_step]
    return run, (losses, left)


def report_on(name: str, train: Train, checkouts: tuple[str, str]) -> Report:
    """With all runs, before any of them."""
    reducer = {"custom_pg_loss_reducer_function_path": "some.reducer"}
    rejected = "prompt_mean, tokens rejected in the loss"
    return Report(
        name,
        train,
        checkouts,
        own={
            "rollout_mean": stock(with_entropy, "rollout_mean"),
            "with rejection": _rejecting(stock(with_entropy, "rollout_mean", **REJECTING)),
            "tokens": (Run("", PER_TOKEN), None),
        },
        runs={
            **{mode: exact(with_entropy, mode) for mode in MODES},
            "sample_mean, removed samples: skip": exact(with_entropy, "sample_mean", "skip"),
            "token_mean, removed samples: count": exact(with_entropy, "token_mean", "count"),
            "sample_mean, without empty ones": exact(with_entropy, "sample_mean", empty="skip"),
            rejected: _rejecting(exact(with_entropy, "prompt_mean", **REJECTING)),
            "token_mean with a reducer": refused("token_mean", **reducer),
            **{f"{mode}, per token": exact(with_entropy, mode, **PER_TOKEN) for mode in MODES},
        },
        near={"token_mean": "tokens"},
    )


def report_on_mtp(name: str, train: Train, checkouts: tuple[str, str]) -> Report:
    """With MTP layers; the stock code has no aggregation of their losses that is exact."""
    same = {**TRAINS_MTP, "loss_aggregation_mtp": "same"}
    exact_runs = {
        f"{mode}{ending}": exact(with_entropy, mode, **same, **options)
        for ending, options in ((" with MTP", {}), (" with MTP, per token", PER_TOKEN))
        for mode in MODES
    }
    return Report(
        name,
        train,
        checkouts,
        own={
            "stock with MTP": (Run("", TRAINS_MTP), None),
            "stock with MTP, per token": (Run("", {**TRAINS_MTP, **PER_TOKEN}), None),
        },
        runs={
            **exact_runs,
            "without training MTP": refused("token_mean", **MTP, loss_aggregation_mtp="same"),
            "contiguous": refused("token_mean", **same, allgather_cp=True),
        },
        near={name: f"stock with {name.partition(' with ')[2]}" for name in exact_runs},
        mtp=MTP,
    )


def compare(report: Report, **options: Any) -> None:
    """In every topology."""
    report.compare("DP 2", 1, **options)
    report.compare("CP 2, zigzag", 2, **options)
    report.compare("CP 2, contiguous", 2, rope=False, allgather_cp=True, **options)


def compare_mtp(report: Report) -> None:
    report.compare("DP 2", 1)
    report.compare("CP 2, zigzag", 2)


def main(without: str, patched: str, table: str, what: str = "") -> None:
    if what == "mtp":
        report = report_on_mtp("slime", train, (without, patched))
        compare_mtp(report)
    else:
        report = report_on("slime", train, (without, patched))
        compare(report)
    report.close(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
