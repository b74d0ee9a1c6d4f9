"""Exact loss aggregation in ms-swift's Megatron training, without a patch: see its page in docs.

MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation sample_mean" \
    megatron sft ... --external_plugins examples/ms_swift_plugin.py
"""

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from swift.megatron.trainers import BaseMegatronTrainer, MegatronTrainer, base
from torch.utils.data import get_worker_info

from megatron_loss_agg import Microbatch
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.launch.flags import VARIABLE
from megatron_loss_agg.launch.install import hook_from_args, install
from megatron_loss_agg.mcore import LossHook, SampleLoss, TokenLoss

stock_log = BaseMegatronTrainer._log_callback
stock_prepare_model = BaseMegatronTrainer.prepare_model
stock_max = base.reduce_max_stat_across_model_parallel_group


def read_samples(batch: Any) -> Microbatch:
    """From the data collator's batch, whole on every context-parallel rank, labels not shifted."""
    labels = batch["labels"].roll(-1, -1)
    mask = labels != -100
    inputs = [labels, batch["input_ids"]]
    if "attention_mask" in batch:
        return Microbatch(mask, model_inputs=inputs)
    positions = batch.get("text_position_ids", batch["position_ids"]).flatten()
    starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
    real = torch.tensor([0, *batch["seq_lens"]]).cumsum(0)
    padded = torch.tensor(starts[: len(real)])  # what follows is padding, not samples
    return Microbatch(mask, real, cu_seqlens_padded=padded, model_inputs=inputs)


def read_pairs(batch: Any) -> Microbatch:
    """Of a chosen and a rejected answer each; all chosen answers come first."""
    return Microbatch.of_samples(len(batch["seq_lens"]) // 2, sequences=read_samples(batch))


def sample_step(trainer: Any, stock_step: Any, data_iterator: Any, model: Any) -> Any:
    output, stock = stock_step(data_iterator, model)

    def compute(losses: torch.Tensor) -> Any:
        with torch.no_grad():
            report = stock(losses)[-1]
        losses = losses.float()
        if trainer.args.enable_dft_loss:
            losses = losses * torch.exp(-losses.detach())
        if (scale := stock.keywords["loss_scale"]) is not None:
            losses = losses * scale  # a factor of the loss, which is not counted
        return losses, report

    # Earlier pipeline stages have no labels, and no use for the mask.
    return output, TokenLoss(compute, stock.keywords["labels"] != -100)


def pair_step(trainer: Any, stock_step: Any, data_iterator: Any, model: Any) -> Any:
    output, stock = stock_step(data_iterator, model)

    def log_probs(losses: torch.Tensor) -> dict[str, torch.Tensor]:
        reference, policy = losses.chunk(2)
        return {"reference": -reference.detach(), "policy": -policy}

    def compute(answers: dict[str, torch.Tensor], lengths: torch.Tensor) -> Any:
        with torch.no_grad():
            report = stock(output)[-1]
        of_policy, of_reference = answers["policy"].chunk(2), answers["reference"].chunk(2)
        return trainer.dummy_dpo_trainer.dpo_loss(*of_policy, *of_reference)[0], report

    return output, SampleLoss(compute, log_probs, stock.keywords["labels"] != -100)


def log(trainer: Any, logs: dict[str, Any], n_steps: int) -> None:
    for name in [name for name in logs if name.endswith(" loss")]:
        loss = logs[name.replace(" ", "_")] = logs.pop(name)
        dist.all_reduce(loss, group=mpu.get_data_parallel_group(with_context_parallel=True))
    stock_log(trainer, logs, n_steps)


def prepare_model(trainer: Any) -> None:
    args = trainer.args
    if args.rlhf_type == "dpo" and not args.rpo_alpha:
        chosen["read_batch"], step = read_pairs, pair_step
    elif isinstance(trainer, MegatronTrainer) and args.task_type == "causal_lm":
        chosen["read_batch"], step = read_samples, sample_step
    else:
        raise HostError(
            "the plugin needs megatron sft or pt with --task_type causal_lm, whose loss is a sum over "
            "tokens, or rlhf with --rlhf_type dpo and without --rpo_alpha, got "
            f"{type(trainer).__name__} with --task_type {args.task_type}. Unset {VARIABLE}."
        )
    chosen["split"] = args.cp_partition_mode
    trainer.forward_step = functools.partial(step, trainer, trainer.forward_step)
    stock_prepare_model(trainer)


def make_hook(args: Any, in_training_loop: bool) -> LossHook | None:
    """Of the flags, which say by default that evaluations are aggregated, and ms-swift's split."""
    for name, value in {"evaluation": "same", "split": chosen["split"]}.items():
        vars(args).setdefault(f"loss_aggregation_{name}", value)
    return hook_from_args(args, in_training_loop, chosen["read_batch"])


chosen: dict[str, Any] = {}  # for the trainer of this process
# A worker of a data loader imports plugins, too.
if os.environ.get(VARIABLE) and get_worker_info() is None:
    install(make_hook=make_hook)
    BaseMegatronTrainer._log_callback, BaseMegatronTrainer.prepare_model = log, prepare_model
    # The optimizer's norm is None where it skips an empty step.
    base.reduce_max_stat_across_model_parallel_group = lambda stat: stock_max(stat or 0.0)
