"""Log-probabilities and entropy of a vocabulary that is split over tensor-parallel ranks.

Shapes: logits are [..., vocab / tp] and contiguous (Megatron's [seq, batch, vocab / tp], or any
other leading axes), labels and results [...]. Computed in fp32, in Megatron's own steps.

**fp32 logits are overwritten** by the functions that take labels, as Megatron's cross entropy does,
so that they need no second buffer of that size; half-precision logits are copied to fp32, as there.
Hand in a clone, or use `vocab_parallel_log_probs_and_entropy`, where both are wanted. Work on the
vocabulary beside that one buffer is done in `_PARTS` parts of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.tensor_parallel.utils import VocabUtility
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_loss_agg.errors import PolicyError

_PARTS = 32
_LEAST = -1e4  # exp of it is 0, and 0 times it is 0 and not NaN as with -inf
_overwritten = WeakIdKeyDictionary()  # logits -> the version that holds a softmax


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``log softmax(logits / temperature)[label]``, fp32 [...]. Overwrites fp32 logits.

    Equals minus Megatron's ``vocab_parallel_cross_entropy`` at temperature 1. Its gradient is made
    in the one buffer that is kept, so it can be taken once.

    Args:
        logits: [..., vocab / tp], this rank's part of the vocabulary.
        labels: int64 [...], in the whole vocabulary, the same on all tensor-parallel ranks.
        temperature: > 0, that of the rollout.
        group: tensor-parallel group; Megatron's own when absent.

    Raises:
        PolicyError: shapes or dtypes that do not fit, a temperature that is not > 0, or logits
            that an earlier call has overwritten.
    """
    log_probs, _ = _apply(logits, labels, temperature, False, group)
    return log_probs


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """`vocab_parallel_log_probs` and the entropy of the same softmax, which they share.

    The entropy is of ``softmax(logits / temperature)``. Arguments and Raises as there.

    Returns:
        (log-probabilities, entropy), fp32 [...] each.
    """
    log_probs, entropy = _apply(logits, labels, temperature, True, group)
    return log_probs, entropy


def vocab_parallel_entropy(
    logits: Tensor, temperature: float = 1.0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """``-sum_v p_v log p_v`` with ``p = softmax(logits / temperature)``, fp32 [...].

    Leaves the logits as they are, and keeps nothing else of their size; only the gradient is.
    Arguments and Raises as in `vocab_parallel_log_probs`.
    """
    _check(logits, temperature)
    return _Entropy.apply(logits, temperature, _tensor_group(group))  # type: ignore[no-untyped-call]


def _apply(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    with_entropy: bool,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    _check(logits, temperature)
    if not isinstance(labels, Tensor) or labels.shape != logits.shape[:-1]:
        got = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise PolicyError(f"labels are {got}; expected {tuple(logits.shape[:-1])}, one a token")
    results = _LogProbs.apply(  # type: ignore[no-untyped-call]
        logits, labels, temperature, with_entropy, _tensor_group(group)
    )
    if logits.dtype == torch.float32 and not logits.is_inference():
        _overwritten[logits] = logits._version
    return results


class _LogProbs(torch.autograd.Function):
    """Megatron's cross entropy with the entropy of its softmax, in one buffer."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        steps = VocabParallelCrossEntropy
        buffer, top = steps.calculate_logits_max(logits)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        if temperature != 1:
            buffer.div_(temperature)
            top.div_(temperature)
        first, end = VocabUtility.vocab_range_from_per_partition_vocab_size(
            buffer.shape[-1], dist.get_rank(group), dist.get_world_size(group)
        )
        elsewhere, target, predicted, total, exps = steps.calculate_predicted_logits(
            buffer, labels, top, first, end
        )
        moment = torch.zeros_like(total)  # sum_v e^z z
        if with_entropy:
            for rows, out in _parts(exps, moment):
                torch.sum(torch.special.xlogy(rows, rows), dim=-1, out=out)
        predicted, total, moment = _summed((predicted, total, moment), group)
        softmax, loss = steps.calculate_cross_entropy_loss(exps, predicted, total)
        entropy = total.log() - moment / total
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        ctx.save_for_backward(softmax, elsewhere, target, entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return -loss, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        # d log p_y / d z_j = [j = y] - p_j; dH / d z_j = -p_j (log p_j + H). A token that neither
        # is taken of gets 0, whatever its logits are.
        softmax, elsewhere, target, entropy = ctx.saved_tensors
        g_log_prob, g_entropy = (g / ctx.temperature for g in gradients)
        unused = (g_log_prob == 0) & (g_entropy == 0)
        steps = VocabParallelCrossEntropy
        grad_2d, token, own, softmax = steps.prepare_gradient_calculation_operands(
            softmax, elsewhere
        )
        if ctx.with_entropy:
            for rows, g_lp, g_h, h in _parts(softmax, g_log_prob, g_entropy, entropy):
                factor = rows.log().clamp_(min=_LEAST).add_(h.unsqueeze(-1))
                rows.mul_(factor.mul_(g_h.unsqueeze(-1)).add_(g_lp.unsqueeze(-1)).neg_())
            grad_2d[token, target] += own * g_log_prob.view(-1)
        else:
            steps.calculate_gradients(grad_2d, token, target, own, softmax, -g_log_prob)
        softmax.masked_fill_(unused.unsqueeze(-1), 0)
        return softmax, None, None, None, None


class _Entropy(torch.autograd.Function):
    """Keeps the logits and a few numbers a token; takes the softmax again for the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float, group: dist.ProcessGroup) -> Tensor:
        top = logits.amax(dim=-1).float()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        total, moment = torch.zeros_like(top), torch.zeros_like(top)
        for rows, high, sum_e, sum_ez in _parts(logits, top, total, moment):
            z = _scaled(rows, high, temperature)
            e = z.exp()
            torch.sum(e, dim=-1, out=sum_e)
            torch.sum(e.mul_(z), dim=-1, out=sum_ez)
        total, moment = _summed((total, moment), group)
        entropy = total.log() - moment / total
        ctx.temperature = temperature
        ctx.save_for_backward(logits, top, total.log(), entropy)
        return entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, top, log_total, entropy = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        tokens = top, log_total, entropy, gradients[0] / ctx.temperature
        for rows, out, high, norm, h, g in _parts(logits, gradient, *tokens):
            # The large numbers first: near 0, log p keeps its digits.
            log_p = _scaled(rows, high, ctx.temperature).sub_(norm.unsqueeze(-1))
            p = log_p.exp()
            p.mul_(log_p.add_(h.unsqueeze(-1)).mul_(-g.unsqueeze(-1)))
            out.copy_(p.masked_fill_((g == 0).unsqueeze(-1), 0))
        return gradient, None, None


def _scaled(rows: Tensor, shift: Tensor, temperature: float) -> Tensor:
    """``(rows - shift) / temperature`` in new memory and ``shift``'s dtype, nowhere -inf."""
    return (rows.to(shift.dtype) - shift.unsqueeze(-1)).div_(temperature).clamp_(min=_LEAST)


def _parts(vocabulary: Tensor, *tokens: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of a part of the tokens: of the [..., vocab] tensor, and of each [...] one.

    A tensor of ``vocabulary``'s shape may be among ``tokens``.
    """
    flat = [
        x.view(-1, x.shape[-1]) if x.dim() == vocabulary.dim() else x.reshape(-1)
        for x in (vocabulary, *tokens)
    ]
    size = max(-(-flat[0].shape[0] // _PARTS), 1)
    return zip(*(x.split(size) for x in flat), strict=True)


def _summed(values: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Each summed over ``group``, in one collective."""
    total = torch.stack(values)
    dist.all_reduce(total, group=group)
    return total.unbind()


def _tensor_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return parallel_state.get_tensor_model_parallel_group() if group is None else group


def _check(logits: Tensor, temperature: float) -> None:
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() == 0:
        kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise PolicyError(f"logits are {kind}; expected a floating tensor [..., vocab / tp]")
    if not logits.is_contiguous():
        raise PolicyError(
            f"logits of shape {tuple(logits.shape)} are not contiguous; take them before they are "
            "transposed, and give labels the same leading axes"
        )
    if not temperature > 0:
        raise PolicyError(f"temperature={temperature!r}; expected a number > 0")
    if not logits.is_inference() and _overwritten.get(logits) == logits._version:
        raise PolicyError(
            "an earlier call has overwritten these fp32 logits with their softmax; expected "
            "logits: call vocab_parallel_log_probs_and_entropy once, or give each call a clone"
        )
