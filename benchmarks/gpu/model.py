"""A GPT in bf16 in Megatron's DDP, its batches, and a training step with and without the plugin."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.loss_function import loss_func
from benchmarks.megatron import gpt_model
from benchmarks.shapes import SEED, Gpt, Step
from megatron_loss_agg import LossAggregation, Term
from megatron_loss_agg.policy import clipped_policy_loss, kl_penalty

Batch = dict[str, Tensor]

KL = 0.01  # coefficient
POLICY = "policy + KL"
LOSSES: dict[str, Any] = {
    "token_mean": LossAggregation(mode="token_mean"),
    "prompt_mean": LossAggregation(mode="prompt_mean"),
    POLICY: {
        "policy": LossAggregation(mode="prompt_mean"),
        "kl": Term(LossAggregation(mode="token_mean"), coefficient=KL),
    },
}
TINY = Gpt(layers=1, hidden=32, heads=2, vocabulary=64), Step(microbatches=2, rows=2, length=16)
SMALL = Gpt(layers=2, hidden=256, heads=4, vocabulary=1024), Step(4, 2, 128)
LARGE = Gpt(layers=24, hidden=1024, heads=16, vocabulary=32000)  # 336 million parameters
LENGTH, MICROBATCHES = 1024, 4


def large_step() -> Step:
    """As many rows as fit with room to spare: a row takes 4 GB, without fused attention."""
    free = torch.cuda.mem_get_info()[0] / 1e9
    return Step(MICROBATCHES, max(1, min(8, int((free - 10) / 6))), LENGTH)


def transformer_engine() -> bool:
    """Whether its layers can be used."""
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:
        print(f"transformer_engine cannot be imported: {error!r}", flush=True)
        return False
    return True


def build(gpt: Gpt, length: int, with_te: bool) -> Any:
    """The model in DDP; bf16 parameters, fp32 gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.module import Float16Module

    if with_te:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec()
    model = gpt_model(
        gpt,
        length,
        spec,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        # Further kernels of Apex.
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(
        model.config, settings, Float16Module(model.config, model.cuda())
    )


def adam(ddp: Any) -> Any:
    """Megatron's optimizer with fp32 copies of the parameters."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(optimizer="adam", lr=1e-5, bf16=True, params_dtype=torch.bfloat16)
    return get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False)


def batches(gpt: Gpt, step: Step) -> list[Batch]:
    """One for each microbatch, in pinned memory; the first part of every row is a prompt."""
    generator = torch.Generator().manual_seed(SEED)
    shape = step.microbatches, step.rows, step.length
    tokens = torch.randint(gpt.vocabulary, (*shape[:2], step.length + 1), generator=generator)
    first = torch.randint(step.length // 2, (*shape[:2], 1), generator=generator)
    random = functools.partial(torch.randn, *shape, generator=generator)
    uniform = -math.log(gpt.vocabulary)  # about what an untrained model's log-probabilities are
    columns = {
        "tokens": tokens[..., :-1],
        "labels": tokens[..., 1:],
        "loss_mask": (torch.arange(step.length) >= first).float(),
        "prompt_ids": torch.arange(shape[0] * shape[1]).view(shape[:2]) // 3,
        "old": uniform + 0.1 * random(),
        "ref": uniform + 0.1 * random(),
        "advantages": random()[..., :1].expand(shape),
    }
    return [
        {name: column[i].contiguous().pin_memory() for name, column in columns.items()}
        for i in range(step.microbatches)
    ]


@dataclass
class Training:
    """Steps of one kind over the same model and batches.

    Args:
        loss: a name of `LOSSES`.
        hooked: with the plugin; else the host's own averaging of the same token losses.
        optimizer: None: gradients alone.
    """

    loss: str
    hooked: bool
    ddp: Any
    optimizer: Any
    batches: list[Batch]
    step: Step
    causal: Tensor | None  # the local layers' mask, bool [1, 1, tokens, tokens]

    def __post_init__(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from megatron_loss_agg.mcore import LossHook

        self._schedule = get_forward_backward_func()
        if self.hooked:
            self._schedule = LossHook(LOSSES[self.loss]).wrap(self._schedule)

    def run(self) -> None:
        self.ddp.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=iter(self.batches),
            model=[self.ddp],
            num_microbatches=self.step.microbatches,
            seq_length=self.step.length,
            micro_batch_size=self.step.rows,
            forward_only=False,
        )
        if self.optimizer is not None:
            self.optimizer.step()

    def _forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        from megatron_loss_agg.mcore import TokenLoss

        batch = {name: x.cuda(non_blocking=True) for name, x in next(data_iterator).items()}
        tokens, mask = batch["tokens"], batch["loss_mask"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if self.loss != POLICY:
            losses = model(tokens, positions, self.causal, labels=batch["labels"])
            return losses, functools.partial(loss_func, mask)
        logits = model(tokens, positions, self.causal)
        if not self.hooked:
            return logits, functools.partial(_sum_of_terms, mask, batch)
        return logits, TokenLoss(lambda output: (_policy(batch, output), {}), mask)


def _policy(batch: Batch, logits: Tensor) -> dict[str, Tensor]:
    from megatron_loss_agg.mcore.logprobs import vocab_parallel_log_probs

    log_probs = vocab_parallel_log_probs(logits, batch["labels"])
    losses = clipped_policy_loss(log_probs, batch["old"], batch["advantages"]).losses
    return {"policy": losses, "kl": kl_penalty(log_probs, batch["ref"], "k3")}


def _sum_of_terms(loss_mask: Tensor, batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor, Any]:
    """What a loop without the plugin writes: both terms averaged by the host alike."""
    losses = _policy(batch, logits)
    kl = (losses["kl"] * loss_mask).sum()
    policy, tokens, report = loss_func(loss_mask, losses["policy"])
    report["kl loss"] = torch.cat([kl.detach().view(1), tokens.view(1)])
    return policy + KL * kl, tokens, report
