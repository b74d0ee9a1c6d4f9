"""Log-probabilities and entropy of logits whose vocabulary is sharded over tensor-parallel ranks.

Shapes: logits are [..., vocab / tp] in any memory layout, labels and results [...]. Results are
fp32, or fp64 for fp64 logits, and the same on all tensor-parallel ranks. In the backward pass every
rank gets the gradient of its shard.

The functions do not change the logits. They save the logits and compute the softmax again in the
backward pass. Temporaries of vocabulary size exist for 1 / `_CHUNKS` of the tokens at a time.

With more than one tensor-parallel rank, each call waits for the device once, to refuse gathered
logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.tensors import at_least_fp32, check_tensors, described

__all__ = [
    "vocab_parallel_entropy",
    "vocab_parallel_log_probs",
    "vocab_parallel_log_probs_and_entropy",
]

_CHUNKS = 32
_MIN_LOG_PROB = -1e4  # replaces -inf: its exp is also 0, but 0 times it is not NaN


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``log softmax(logits / temperature)[label]``, [...].

    At temperature 1 this is the negative of Megatron's ``vocab_parallel_cross_entropy``. A token
    without an incoming gradient gets gradient 0, even if its logits are NaN.

    Args:
        labels: integers [...], indices into the whole vocabulary, the same on all tensor-parallel
            ranks.
        temperature: the rollout's temperature, above 0.
        group: tensor-parallel process group; default: Megatron's.

    Raises:
        OptionError: a shape or dtype does not fit, or the temperature is not > 0.
        HostError: all tensor-parallel ranks have the same logits, so they were gathered, as with
            ``parallel_output=False``. Raised on all ranks.
    """
    return vocab_parallel_log_probs_and_entropy(logits, labels, temperature, group)[0]


def vocab_parallel_entropy(
    logits: Tensor, temperature: float = 1.0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """``-sum_v p_v log p_v`` with ``p = softmax(logits / temperature)``, [...].

    A logit of -inf contributes 0. Arguments and errors are as in `vocab_parallel_log_probs`.
    """
    check_tensors(OptionError, "floating-point", logits=logits)
    any_label = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return vocab_parallel_log_probs_and_entropy(logits, any_label, temperature, group)[1]


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """`vocab_parallel_log_probs` and `vocab_parallel_entropy`, from one softmax.

    Arguments and errors are as in `vocab_parallel_log_probs`.
    """
    check_tensors(OptionError, "floating-point", logits=logits)
    if labels.shape != logits.shape[:-1] or labels.is_floating_point():
        raise OptionError(
            f"labels must be integers of shape {tuple(logits.shape[:-1])}, got "
            f"{described(labels)}. Pass one label for each token of the logits."
        )
    if not temperature > 0:
        raise OptionError(
            f"temperature must be a number > 0, got {temperature!r}. Pass that of the rollout."
        )
    group = group or parallel_state.get_tensor_model_parallel_group()
    return _LogProbsAndEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, temperature, group
    )


class _LogProbsAndEntropy(torch.autograd.Function):
    """Values by token are columns, [tokens, 1]; logits are [tokens, vocab / tp]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        shard = logits.shape[-1]
        logits_2d = logits.reshape(-1, shard)
        label = labels.reshape(-1, 1).long() - dist.get_rank(group) * shard
        in_shard = (label >= 0) & (label < shard)
        index = label.where(in_shard, 0)

        dtype = at_least_fp32(logits.dtype)
        top_by_rank = _all_gather(logits_2d.amax(dim=1, keepdim=True).to(dtype), group)
        top = top_by_rank.amax(dim=0)
        sums = []
        for logits_c, top_c, index_c, in_shard_c in _chunks(logits_2d, top, index, in_shard):
            z = (logits_c.to(dtype) - top_c) / temperature
            exp = z.exp()
            exp_z = torch.where(exp == 0, 0, exp * z)  # 0 for a logit of -inf
            label_z = torch.where(in_shard_c, z.gather(1, index_c), 0)
            sums.append(torch.stack([exp.sum(dim=1), exp_z.sum(dim=1), label_z.squeeze(1)]))
        sums_by_rank = _all_gather(torch.cat(sums, dim=1).unsqueeze(-1), group)
        _refuse_gathered(top_by_rank, sums_by_rank[:, 0], shard)

        sum_exp, sum_exp_z, label_z = sums_by_rank.sum(dim=0)
        log_prob = label_z - sum_exp.log()
        entropy = sum_exp.log() - sum_exp_z / sum_exp
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, index, in_shard, top, sum_exp, entropy)
        return log_prob.view(labels.shape), entropy.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        # d log p_y / d z_v = [v = y] - p_v     d H / d z_v = -p_v (log p_v + H)
        logits, *saved = ctx.saved_tensors
        logits_2d = logits.reshape(-1, logits.shape[-1])
        gradient = torch.empty_like(logits_2d, memory_format=torch.contiguous_format)
        incoming = [
            torch.zeros_like(saved[-1]) if grad is None else grad.reshape(-1, 1) / ctx.temperature
            for grad in (grad_log_prob, grad_entropy)
        ]
        for chunk in _chunks(logits_2d, gradient, *saved, *incoming):
            logits_c, out, index, in_shard, top, sum_exp, entropy, d_log_prob, d_entropy = chunk
            z = (logits_c.to(top.dtype) - top) / ctx.temperature
            p = z.exp() / sum_exp
            grad = (-p).scatter_add_(1, index, in_shard.to(p.dtype)) * d_log_prob
            if grad_entropy is not None:
                log_p = (z - sum_exp.log()).clamp(min=_MIN_LOG_PROB)
                grad -= p * (log_p + entropy) * d_entropy
            out.copy_(grad.masked_fill((d_log_prob == 0) & (d_entropy == 0), 0))
        return gradient.view(logits.shape), None, None, None


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tuples of chunks of tensors whose first axis is the tokens."""
    return zip(*(x.chunk(_CHUNKS) for x in tensors), strict=True)


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...] from each rank's [...]."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.stack(parts)


def _refuse_gathered(top_by_rank: Tensor, sum_exp_by_rank: Tensor, shard: int) -> None:
    """Raise HostError, on all ranks, if every rank has the logits of the whole vocabulary.

    The softmax would then count every logit once for each rank.
    """
    ranks = len(top_by_rank)
    if ranks == 1:
        return
    is_same = (top_by_rank == top_by_rank[0]) & (sum_exp_by_rank == sum_exp_by_rank[0])
    is_same = is_same.all(dim=0)
    # Ignore tokens with NaN, and tokens with equal logits (an output layer of zeros), which are the
    # same on all ranks even if they are not gathered.
    is_distinctive = sum_exp_by_rank.isfinite().all(dim=0) & (sum_exp_by_rank != shard).any(dim=0)
    if bool(is_distinctive.any() & (is_same | ~is_distinctive).all()):
        raise HostError(
            "logits must be this rank's shard of the vocabulary, got the same logits on all "
            f"{ranks} tensor-parallel ranks. Build the model with parallel_output=True."
        )
