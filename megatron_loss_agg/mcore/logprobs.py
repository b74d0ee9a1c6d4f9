"""Log-probabilities and entropy of logits that are sharded over tensor-parallel ranks.

Shapes: logits are [..., vocab / tp] and contiguous (Megatron's [seq, batch, vocab / tp], or any
other leading axes), labels and results [...]. Computed in fp32, by Megatron's own functions.

**The functions that take labels overwrite fp32 logits**, like Megatron's cross entropy, to avoid a
second buffer of that size; half-precision logits are copied to fp32. If you need both results, pass
a clone or use `vocab_parallel_log_probs_and_entropy`; if the loss function is recomputed in the
backward pass, pass a clone. Temporaries of vocabulary size are limited to 1 / `_CHUNKS` of the
tokens at a time.
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

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.tensors import check_tensors

__all__ = [
    "vocab_parallel_entropy",
    "vocab_parallel_log_probs",
    "vocab_parallel_log_probs_and_entropy",
]

_CHUNKS = 32
_MIN_LOGIT = -1e4  # stands in for -inf: its exp is 0 too, but 0 times it is not NaN
_overwritten = WeakIdKeyDictionary()  # storage of logits -> its version, and the parts overwritten


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``log softmax(logits / temperature)[label]``, fp32 [...]. Overwrites fp32 logits.

    At temperature 1 this is the negative of Megatron's ``vocab_parallel_cross_entropy``. The
    gradient is computed in place in the saved buffer, so backward can run only once.

    Args:
        labels: int64, indices into the whole vocabulary, the same on all tensor-parallel ranks.
        temperature: above 0, that of the rollout.
        group: tensor-parallel group; default: Megatron's own.

    Raises:
        OptionError: mismatched shapes or dtypes, a temperature that is not > 0, or logits that an
            earlier call has overwritten.
    """
    return _log_probs(logits, labels, temperature, False, group)[0]


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """`vocab_parallel_log_probs` and the entropy of ``softmax(logits / temperature)``, fp32 [...].

    Both from one softmax. Arguments and Raises are the same.
    """
    return _log_probs(logits, labels, temperature, True, group)


def vocab_parallel_entropy(
    logits: Tensor, temperature: float = 1.0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """``-sum_v p_v log p_v`` with ``p = softmax(logits / temperature)``, fp32 [...].

    Does not overwrite the logits, and allocates nothing else of their size but the gradient.
    Arguments and Raises as in `vocab_parallel_log_probs`.
    """
    _check(logits, temperature)
    group = group or parallel_state.get_tensor_model_parallel_group()
    return _Entropy.apply(logits, temperature, group)  # type: ignore[no-untyped-call]


def _log_probs(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, group: Any
) -> tuple[Tensor, Tensor]:
    _check(logits, temperature)
    if labels.shape != logits.shape[:-1]:
        raise OptionError(
            f"labels are {tuple(labels.shape)}; expected {tuple(logits.shape[:-1])}, one per token"
        )
    group = group or parallel_state.get_tensor_model_parallel_group()
    before = _overwritten_parts(logits)  # overwriting changes the version
    results = _LogProbs.apply(  # type: ignore[no-untyped-call]
        logits, labels.contiguous(), temperature, with_entropy, group
    )
    if logits.dtype == torch.float32 and not logits.is_inference():
        parts = [*before, _part(logits)]
        _overwritten[logits.untyped_storage()] = logits._version, parts
    return results


class _LogProbs(torch.autograd.Function):
    """Megatron's cross entropy and the entropy of its softmax, in one buffer."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, group: Any
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
            for rows, out in _chunks(exps, moment):
                torch.sum(torch.special.xlogy(rows, rows), dim=-1, out=out)
        predicted, total, moment = _all_reduced((predicted, total, moment), group)
        softmax, loss = steps.calculate_cross_entropy_loss(exps, predicted, total)
        entropy = total.log() - moment / total
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        ctx.save_for_backward(softmax, elsewhere, target, entropy)
        return -loss, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        # d log p_y / d z_j = [j = y] - p_j; dH / d z_j = -p_j (log p_j + H). Tokens without an
        # incoming gradient get 0, even if their logits are NaN.
        softmax, elsewhere, target, entropy = ctx.saved_tensors
        g_log_prob, g_entropy = (g / ctx.temperature for g in gradients)
        unused = (g_log_prob == 0) & (g_entropy == 0)
        steps = VocabParallelCrossEntropy
        grad_2d, token, own, softmax = steps.prepare_gradient_calculation_operands(
            softmax, elsewhere
        )
        if ctx.with_entropy:
            for rows, g_lp, g_h, h in _chunks(softmax, g_log_prob, g_entropy, entropy):
                factor = rows.log().clamp_(min=_MIN_LOGIT).add_(h.unsqueeze(-1))
                rows.mul_(factor.mul_(g_h.unsqueeze(-1)).add_(g_lp.unsqueeze(-1)).neg_())
            grad_2d[token, target] += own * g_log_prob.reshape(-1)
        else:
            steps.calculate_gradients(grad_2d, token, target, own, softmax, -g_log_prob)
        softmax.masked_fill_(unused.unsqueeze(-1), 0)
        return softmax, None, None, None, None


class _Entropy(torch.autograd.Function):
    """Saves the logits and a few numbers per token; recomputes the softmax in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float, group: dist.ProcessGroup) -> Tensor:
        top = logits.amax(dim=-1).float()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        total, moment = torch.zeros_like(top), torch.zeros_like(top)
        for rows, high, sum_e, sum_ez in _chunks(logits, top, total, moment):
            z = _shifted(rows, high, temperature)
            e = z.exp()
            torch.sum(e, dim=-1, out=sum_e)
            torch.sum(e.mul_(z), dim=-1, out=sum_ez)
        total, moment = _all_reduced((total, moment), group)
        entropy = total.log() - moment / total
        ctx.temperature = temperature
        ctx.save_for_backward(logits, top, total.log(), entropy)
        return entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, top, log_total, entropy = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        tokens = top, log_total, entropy, gradients[0] / ctx.temperature
        for rows, out, high, norm, h, g in _chunks(logits, gradient, *tokens):
            # Subtract the large numbers first, to keep the precision of log p near 0.
            log_p = _shifted(rows, high, ctx.temperature).sub_(norm.unsqueeze(-1))
            p = log_p.exp()
            p.mul_(log_p.add_(h.unsqueeze(-1)).mul_(-g.unsqueeze(-1)))
            out.copy_(p.masked_fill_((g == 0).unsqueeze(-1), 0))
        return gradient, None, None


def _shifted(rows: Tensor, shift: Tensor, temperature: float) -> Tensor:
    """``(rows - shift) / temperature`` as a new tensor in ``shift``'s dtype, without -inf."""
    return (rows.to(shift.dtype) - shift.unsqueeze(-1)).div_(temperature).clamp_(min=_MIN_LOGIT)


def _chunks(vocabulary: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in chunks of tokens: views of shape [tokens, vocab] or [tokens]."""
    flat = [
        x.view(-1, x.shape[-1]) if x.dim() == vocabulary.dim() else x.reshape(-1)
        for x in (vocabulary, *others)
    ]
    size = max(-(-flat[0].shape[0] // _CHUNKS), 1)
    return zip(*(x.split(size) for x in flat), strict=True)


def _all_reduced(values: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Each of ``values`` summed over ``group``, in one collective."""
    total = torch.stack(values)
    dist.all_reduce(total, group=group)
    return total.unbind()


def _check(logits: Tensor, temperature: float) -> None:
    check_tensors(OptionError, "floating-point", logits=logits)
    if not logits.is_contiguous():
        raise OptionError(
            f"logits of shape {tuple(logits.shape)} are not contiguous; pass them untransposed, "
            "and labels as they are"
        )
    if not temperature > 0:
        raise OptionError(f"temperature={temperature!r}; expected a number > 0")
    if any(_overlap(x, _part(logits)) for x in _overwritten_parts(logits)):
        raise OptionError(
            "an earlier call has overwritten these fp32 logits with their softmax; expected "
            "logits: call vocab_parallel_log_probs_and_entropy once, pass each call a clone, or "
            "recompute from a clone"
        )


def _overwritten_parts(logits: Tensor) -> list[range]:
    """What earlier calls have overwritten in the logits' storage, if nothing was written since.

    A recomputed function gets other tensors, of the same storage.
    """
    if logits.is_inference():
        return []
    version, parts = _overwritten.get(logits.untyped_storage(), (None, []))
    return parts if version == logits._version else []


def _part(logits: Tensor) -> range:
    """Where the elements are in their storage."""
    return range(logits.storage_offset(), logits.storage_offset() + logits.numel())


def _overlap(x: range, y: range) -> bool:
    return max(x.start, y.start) < min(x.stop, y.stop)
