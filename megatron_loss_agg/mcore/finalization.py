"""Megatron's finalization of gradients, with a denominator instead of its token count.

``finalize_model_grads(model, num_tokens)`` adds up ``num_tokens`` over the data- and context-parallel
ranks of the last pipeline stage, in place, and divides all gradients by the sum, or by 1 if the sum
is smaller than that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from megatron_loss_agg.mcore.call import Call, replaced


def is_megatron_finalization(finalize: Callable[..., Any] | None) -> bool:
    """True if, with this function configured, `finish_gradients` calls Megatron's own."""
    from megatron.core.distributed import finalize_model_grads

    return finalize in (None, finalize_model_grads)


def finish_gradients(call: Call, denominator: Tensor) -> None:
    """Reduce the gradients of a step, and divide them by the sum of ``denominator`` over ranks."""
    from megatron.core.distributed import finalize_model_grads

    finalize = call.config.finalize_model_grads_func or finalize_model_grads
    for chunk in call.chunks:
        # Without overlap, finalization starts the reduction itself.
        if getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False):
            chunk.start_grad_sync()
    # The schedule would pass on these arguments.
    names = ("pg_collection", "force_all_reduce")
    options = {name: call.arguments[name] for name in names if call.arguments.get(name)}
    finalize([*call.chunks], denominator, **options)


@contextlib.contextmanager
def dividing_by(denominator: Callable[[], Tensor], config: Any) -> Iterator[None]:
    """Let a schedule divide gradients by the sum of ``denominator()`` over ranks.

    Args:
        denominator: this rank's share; called once, after the last microbatch.
    """
    finalize: Callable[..., Any] = config.finalize_model_grads_func

    # Ignores ``num_tokens``, the schedule's token count.
    def divide(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
        return finalize(model, denominator(), *args, **kwargs)

    with replaced(config, "finalize_model_grads_func", divide):
        yield
