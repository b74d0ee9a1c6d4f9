"""The forward step for Megatron's schedule, and the losses with their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from examples.grpo import task
from examples.grpo.logprobs import (
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
)
from examples.grpo.options import Options
from examples.grpo.packing import Pack
from examples.grpo.policy import clipped_policy_loss, kl_k2, log_ratio_of
from megatron_loss_agg import CPLayout, LossAggregation, Term
from megatron_loss_agg.mcore import LossHook, TokenLoss
from megatron_loss_agg.report import Max, Mean

Report = dict[str, Mean | Max]
Losses = Callable[[Tensor, Pack], tuple[dict[str, Tensor], Report]]
"""(logits [1, local tokens, vocabulary], this rank's part of the pack) -> (terms, report)."""


def forward_step(
    losses: Losses, data_iterator: Iterator[Pack], model: Any
) -> tuple[Tensor, TokenLoss]:
    """Run the model on this context-parallel rank's part of a pack."""
    batch = {name: value.cuda() for name, value in next(data_iterator).items()}
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    offsets = batch["cu_seqlens_padded"]
    layout = CPLayout.thd(offsets, size, rank)
    local = {name: layout.shard(value) for name, value in batch.items() if value.dim() == 2}
    longest = int(offsets.diff().max())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    logits = model(
        local["tokens"], local["position_ids"], attention_mask=None, packed_seq_params=packed
    )
    return logits, TokenLoss(lambda output: losses(output, local), local["loss_mask"])


class Objective:
    """Losses, and Megatron's schedule under the hook that aggregates them."""

    def __init__(self, hook: LossHook, losses: Losses) -> None:
        self.hook = hook
        self.forward_step = partial(forward_step, losses)
        self.forward_backward = hook.wrap(get_forward_backward_func())


def grpo_hook(options: Options) -> LossHook:
    """GRPO's loss: three terms, each a different mean over the whole optimizer step."""
    divisor = float(task.MAX_ANSWER) if options.mode == "constant" else None
    return LossHook(
        {
            "policy": Term(LossAggregation(mode=options.mode, divisor=divisor)),
            "kl": Term(LossAggregation(mode="token_mean"), multiplier=options.kl),
            "entropy": Term(LossAggregation(mode="sample_mean"), multiplier=-options.entropy),
        },
        empty_step="skip",
    )


def grpo_losses(clip: float, logits: Tensor, local: Pack) -> tuple[dict[str, Tensor], Report]:
    """The terms of `grpo_hook`, per token, and a report of metrics."""
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, local["labels"])
    log_ratio = log_ratio_of(log_probs, local["old_log_probs"])
    policy, is_clipped = clipped_policy_loss(log_ratio, local["advantages"], clip, clip)
    kl = kl_k2(log_probs, local["reference_log_probs"])
    mask = local["loss_mask"]
    report: Report = {
        "clip_fraction": Mean.of(is_clipped, mask),
        "ratio_max": Max.of(log_ratio.exp(), mask),
        "kl": Mean.of(kl, mask),
        "entropy": Mean.of(entropy, mask),
    }
    return {"policy": policy, "kl": kl, "entropy": entropy}, report


def supervised_hook() -> LossHook:
    """The warm-up's loss: the mean over tokens."""
    return LossHook({"supervised": LossAggregation(mode="token_mean")}, empty_step="skip")


def supervised_losses(logits: Tensor, local: Pack) -> tuple[dict[str, Tensor], Report]:
    """The term of `supervised_hook`: cross entropy of the next token."""
    return {"supervised": -vocab_parallel_log_probs(logits, local["labels"])}, {}
