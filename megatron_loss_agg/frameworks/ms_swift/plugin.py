"""The file that ms-swift runs in every process that trains: see its package.

Without the environment variable it compares the ranks and calls ms-swift's own functions. In data
loader workers it does nothing.
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from swift.megatron.trainers import BaseMegatronTrainer, MegatronTrainer, base
from torch import Tensor
from torch.utils.data import get_worker_info

import megatron_loss_agg.frameworks.ms_swift  # noqa: F401  # checks the names that are replaced below
from megatron_loss_agg import Microbatch
from megatron_loss_agg.frameworks import check_aggregation, print_inactive, same_on_all_ranks
from megatron_loss_agg.frameworks.refusals import refused
from megatron_loss_agg.launch.flags import (
    VARIABLE,
    aggregations_from,
    environment_flags,
    hook_options,
)
from megatron_loss_agg.launch.install import hook_from_args, install
from megatron_loss_agg.mcore import LossHook, SampleLoss, TokenLoss

stock_log = BaseMegatronTrainer._log_callback
stock_prepare_model = BaseMegatronTrainer.prepare_model
stock_max = base.reduce_max_stat_across_model_parallel_group

IS_SET = bool(os.environ.get(VARIABLE, "").strip())

_trainer_options: dict[str, Any] = {}
"""Options of the hook that depend on this process's trainer."""


def read_samples(batch: Any) -> Microbatch:
    """The samples of the data collator's batch: whole on every rank, with unshifted labels."""
    labels = batch["labels"].roll(-1, -1)
    mask = labels != -100
    inputs = [labels, batch["input_ids"]]
    if "attention_mask" in batch:
        return Microbatch(mask, model_inputs=inputs)
    positions = batch.get("text_position_ids", batch["position_ids"]).flatten()
    starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
    real = torch.tensor([0, *batch["seq_lens"]]).cumsum(0)
    padded = torch.tensor(starts[: len(real)])  # any further starts are padding's
    return Microbatch(mask, real, cu_seqlens_padded=padded, model_inputs=inputs)


def read_pairs(batch: Any) -> Microbatch:
    """A sample for each pair of answers; all chosen answers come before the rejected ones."""
    return Microbatch.of_samples(len(batch["seq_lens"]) // 2, sequences=read_samples(batch))


def sample_step(trainer: Any, stock_step: Any, data_iterator: Any, model: Any) -> Any:
    """The trainer's forward step, with losses of tokens instead of the trainer's loss function."""
    output, stock = stock_step(data_iterator, model)

    def compute(losses: Tensor) -> tuple[Tensor, Any]:
        with torch.no_grad():
            report = stock(losses)[-1]
        losses = losses.float()
        if trainer.args.enable_dft_loss:
            losses = losses * torch.exp(-losses.detach())
        if (scale := stock.keywords["loss_scale"]) is not None:
            losses = losses * scale  # a factor of the loss, not of the mask
        return losses, report

    # Earlier pipeline stages have no labels and no use for the mask.
    return output, TokenLoss(compute, stock.keywords["labels"] != -100)


def pair_step(trainer: Any, stock_step: Any, data_iterator: Any, model: Any) -> Any:
    """The trainer's forward step, with losses of pairs instead of the trainer's loss function."""
    output, stock = stock_step(data_iterator, model)

    def log_probs(losses: Tensor) -> dict[str, Tensor]:
        reference, policy = losses.chunk(2)
        return {"reference": -reference.detach(), "policy": -policy}

    def compute(answers: dict[str, Tensor], lengths: Tensor) -> tuple[Tensor, Any]:
        with torch.no_grad():
            report = stock(output)[-1]
        # Split each into the chosen and the rejected answers.
        policy, reference = answers["policy"].chunk(2), answers["reference"].chunk(2)
        return trainer.dummy_dpo_trainer.dpo_loss(*policy, *reference)[0], report

    return output, SampleLoss(compute, log_probs, stock.keywords["labels"] != -100)


def log(trainer: Any, logs: dict[str, Any], n_steps: int) -> None:
    """Log the hook's reports under names in ms-swift's style, over all ranks."""
    ranks = mpu.get_data_parallel_group(with_context_parallel=True)
    for name in [name for name in logs if name.endswith(" loss") or name == "mismatches"]:
        pair = logs[name.replace(" ", "_")] = logs.pop(name)  # ms-swift logs their quotient
        dist.all_reduce(pair, group=ranks)
    stock_log(trainer, logs, n_steps)


def prepare_model(trainer: Any) -> Any:
    """Choose how batches and losses are read, before the model is built.

    Raises:
        HostError: the trainer's loss is neither a sum over tokens nor a mean over pairs.
        OptionError: some ranks aggregate and others do not, a mode needs ids, or a step is to be
            counted at its end.
    """
    if not same_on_all_ranks(lambda: IS_SET):
        print_inactive("ms-swift")
        return stock_prepare_model(trainer)
    flags = argparse.Namespace(**environment_flags())
    for agg in aggregations_from(flags):
        check_aggregation(agg, "ms-swift")
    if (count := hook_options(flags)["count"]) != "before":
        raise refused("ms_swift, count", count)
    args = trainer.args
    if args.rlhf_type == "dpo" and not args.rpo_alpha:
        _trainer_options["read_batch"], step = read_pairs, pair_step
    elif isinstance(trainer, MegatronTrainer) and args.task_type == "causal_lm":
        _trainer_options["read_batch"], step = read_samples, sample_step
    else:
        got = f"{type(trainer).__name__} with --task_type {args.task_type}"
        raise refused("ms_swift, trainer", got)
    _trainer_options["split"] = args.cp_partition_mode
    trainer.forward_step = functools.partial(step, trainer, trainer.forward_step)
    return stock_prepare_model(trainer)


def make_hook(args: Any, in_training_loop: bool) -> LossHook | None:
    """The hook from the flags; by default it aggregates evaluations and uses ms-swift's split."""
    for name, value in {"evaluation": "same", "split": _trainer_options["split"]}.items():
        vars(args).setdefault(f"loss_aggregation_{name}", value)
    return hook_from_args(args, in_training_loop, _trainer_options["read_batch"])


if get_worker_info() is None:
    BaseMegatronTrainer.prepare_model = prepare_model
if IS_SET and get_worker_info() is None:
    install(make_hook=make_hook)
    BaseMegatronTrainer._log_callback = log
    # The gradient norm is None if the optimizer skips an empty step.
    base.reduce_max_stat_across_model_parallel_group = lambda stat: stock_max(stat or 0.0)
