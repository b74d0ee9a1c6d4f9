"""The one sum."""

from __future__ import annotations

from torch import Tensor

from megatron_loss_agg.errors import MaskError


def weighted_sum(w: Tensor, token_loss: Tensor) -> Tensor:
    """``sum_t w_t * loss_t`` over the tokens with ``w_t != 0``.

    A token of weight 0 is left out rather than multiplied by 0: NaN or inf there reaches neither
    the value nor the gradient of ``token_loss``. Without any token, the sum is 0 and keeps its path
    in the autograd graph, so that collectives in the backward pass are reached on every rank.

    Args:
        w: weights, from `StepPlan.weights`.
        token_loss: per-token losses, of the same shape.

    Returns:
        scalar, in the wider of the two dtypes.

    Raises:
        MaskError: the shapes differ; nothing is broadcast.
    """
    if not isinstance(w, Tensor) or not isinstance(token_loss, Tensor):
        raise MaskError(
            f"weights are a {type(w).__name__} and losses a {type(token_loss).__name__}; expected "
            "two tensors"
        )
    if w.shape != token_loss.shape:
        raise MaskError(
            f"weights of shape {tuple(w.shape)} for losses of shape {tuple(token_loss.shape)}; "
            "expected the same shape"
        )
    return (token_loss.masked_fill(w == 0, 0) * w).sum()
