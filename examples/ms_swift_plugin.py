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
from megatron_loss_agg.mcore import TokenLoss
from megatron_loss_agg.mcore.flags import VARIABLE
from megatron_loss_agg.mcore.install import hook_from_args, install

stock_forward_step, stock_log = MegatronTrainer.forward_step, MegatronTrainer._log_callback
stock_prepare_model = BaseMegatronTrainer.prepare_model
stock_max = base.reduce_max_stat_across_model_parallel_group


def mask_of(labels: torch.Tensor, loss_scale: torch.Tensor | None) -> torch.Tensor:
    return labels != -100 if loss_scale is None else (labels != -100) * loss_scale


def read_batch(batch: Any) -> Microbatch:
    """From the data collator's batch, whole on every context-parallel rank, labels not shifted."""
    labels, scale = batch["labels"].roll(-1, -1), batch.get("loss_scale")
    mask = mask_of(labels, None if scale is None else scale.roll(-1, -1))
    token_ids = [labels, batch["input_ids"]]
    if "attention_mask" in batch:
        return Microbatch(mask, token_ids=token_ids)
    positions = batch.get("text_position_ids", batch["position_ids"]).flatten()
    starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
    real = torch.tensor([0, *batch["seq_lens"]]).cumsum(0)
    padded = torch.tensor(starts[: len(real)])  # what follows is padding, not samples
    return Microbatch(mask, real, cu_seqlens_padded=padded, token_ids=token_ids)


def forward_step(trainer: Any, data_iterator: Any, model: Any) -> Any:
    output, stock = stock_forward_step(trainer, data_iterator, model)

    def compute(losses: torch.Tensor) -> Any:
        with torch.no_grad():
            report = stock(losses)[-1]
        losses = losses.float()
        if trainer.args.enable_dft_loss:
            losses = losses * torch.exp(-losses.detach())
        return losses, report

    # Earlier pipeline stages have no labels, and no use for the mask.
    mask = mask_of(stock.keywords["labels"], stock.keywords["loss_scale"])
    return output, TokenLoss(compute, mask)


def log(trainer: Any, logs: dict[str, Any], n_steps: int) -> None:
    for name in [name for name in logs if name.endswith(" loss")]:
        loss = logs[name.replace(" ", "_")] = logs.pop(name)
        dist.all_reduce(loss, group=mpu.get_data_parallel_group(with_context_parallel=True))
    stock_log(trainer, logs, n_steps)


def prepare_model(trainer: Any) -> None:
    if not isinstance(trainer, MegatronTrainer) or trainer.args.task_type != "causal_lm":
        raise HostError(
            f"{type(trainer).__name__} with --task_type {trainer.args.task_type}; expected "
            f"megatron sft or pt with causal_lm, whose loss is a sum over tokens: unset {VARIABLE}"
        )
    stock_prepare_model(trainer)


# A worker of a data loader imports plugins, too.
if os.environ.get(VARIABLE) and get_worker_info() is None:
    install(make_hook=functools.partial(hook_from_args, read_batch=read_batch))
    MegatronTrainer.forward_step, MegatronTrainer._log_callback = forward_step, log
    BaseMegatronTrainer.prepare_model = prepare_model
    # The optimizer's norm is None where it skips an empty step.
    base.reduce_max_stat_across_model_parallel_group = lambda stat: stock_max(stat or 0.0)
